"""Types shared by the JSON that commands print and instances serve, from which ``instance-runner schema`` makes JSON Schemas.

These modules are imported for types only. ``Annotated[str, X]`` stands for the written form of a value of the class X.
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
