"""Parts of the JSON that commands print and instances serve, as types: a JSON Schema is made of them (``instance-runner schema``).

No program imports such a module to run. ``Annotated[str, X]`` is a string, number or object as a value of the class X is written.
"""

from __future__ import annotations

from typing import Annotated, Any, TypedDict

from runner.base.cpuset import CpuSet
from runner.base.judgement import Judgement

JudgementDocument = Annotated[dict[str, Any], Judgement]
CpuList = Annotated[str, CpuSet]
"""CPUs, or NUMA nodes."""


class PodDocument(TypedDict):
    """The names of the pod that its manifest gives by the Downward API; empty where it does not."""

    name: str
    namespace: str
    node: str
    """The Kubernetes node."""
    uid: str
