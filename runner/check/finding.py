"""What a check says: a level, what was found, why it matters, and what mends it."""

from __future__ import annotations

import enum

import attrs


class Level(enum.Enum):
    """How bad it is, from best to worst."""

    OK = "ok"
    UNKNOWN = "unknown"
    """It cannot be judged from here; that is not the same as being all right."""
    WARNING = "warning"
    """An instance starts, and is slower or less apart from others than it could be."""
    FATAL = "fatal"
    """``run`` refuses to start here, or the controller refuses its instances."""


@attrs.frozen
class Finding:
    """What one check found; *remedy* is a command, or the line of a file or manifest, that mends it."""

    check: str
    level: Level
    found: str
    matters: str
    remedy: str = ""


@attrs.frozen
class Check:
    """One question: its *name* for machines, and why the answer *matters*."""

    name: str
    matters: str

    def ok(self, found: str) -> Finding:
        """Say that all is well."""
        return Finding(self.name, Level.OK, found, self.matters)

    def unknown(self, found: str, remedy: str = "") -> Finding:
        """Say that it cannot be judged, and why not; *remedy* is how it could be."""
        return Finding(self.name, Level.UNKNOWN, found, self.matters, remedy)

    def warning(self, found: str, remedy: str) -> Finding:
        """Say what is second best."""
        return Finding(self.name, Level.WARNING, found, self.matters, remedy)

    def fatal(self, found: str, remedy: str) -> Finding:
        """Say what keeps an instance from starting."""
        return Finding(self.name, Level.FATAL, found, self.matters, remedy)


class Place(enum.Enum):
    """Where the question is asked: it decides what can be seen, and what has to be there."""

    NODE = "node"
    """A Kubernetes node: every process is seen, and the kubelet's files."""
    POD = "pod"
    """A container of a Kubernetes pod."""
    CONTAINER = "container"
    """A container without Kubernetes around it."""
    MACHINE = "machine"
    """No container, and no kubelet."""


def place_of(*, sees_everything: bool, has_kubelet: bool, in_pod: bool) -> Place:
    """Tell where we are.

    *sees_everything* is whether our PID namespace is the machine's first one, so that a pod with ``hostPID`` that has
    the kubelet's directory, as the controller's, is as good as the node itself.
    """
    if sees_everything and has_kubelet:
        return Place.NODE
    if in_pod:
        return Place.POD
    return Place.MACHINE if sees_everything else Place.CONTAINER


@attrs.frozen
class CheckReport:
    """Everything that was found, in the order it was asked for."""

    place: Place
    findings: tuple[Finding, ...]

    @property
    def verdict(self) -> Level:
        """The worst level of all."""
        return max((finding.level for finding in self.findings), key=list(Level).index, default=Level.OK)
