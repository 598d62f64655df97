"""Types that several JSON documents share; ``instance-runner schema`` makes JSON Schemas of these and of the modules ``…_json``.

Such a module defines the JSON that a command prints or a program serves, and is imported for types only. ``Annotated[str, X]`` stands
for the written form of a value of the class X.
"""

from __future__ import annotations

from typing import Annotated, Any, TypedDict

from runner.base.cpuset import CpuSet
from runner.base.judgement import Judgement

JudgementDocument = Annotated[dict[str, Any], Judgement]
CpuList = Annotated[str, CpuSet]
"""CPUs, or NUMA nodes."""


class PodDocument(TypedDict):
    """The names that the pod's manifest provides by the Downward API; empty if it does not."""

    name: str
    namespace: str
    node: str
    """The Kubernetes node."""
    uid: str
