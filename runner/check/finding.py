"""Findings of the checks: a level, what was found, why it matters, and what fixes it."""

from __future__ import annotations

import enum

from runner.base.values import frozen


class Level(enum.Enum):
    """Levels of a finding, from best to worst."""

    OK = "ok"
    UNKNOWN = "unknown"
    """It cannot be judged from here, and may be either."""
    WARNING = "warning"
    """An instance starts, and is slower or less isolated from others than it could be."""
    FATAL = "fatal"
    """``run`` refuses to start here, or the controller refuses its instances."""


@frozen
class Finding:
    """One result of a check; *remedy* is a command, or the line of a file or manifest, that fixes it."""

    check: str
    level: Level
    found: str
    matters: str
    remedy: str = ""


@frozen
class Check:
    """One question: its *name* for machines, and why the answer *matters*."""

    name: str
    matters: str

    def ok(self, found: str) -> Finding:
        """Return a finding that needs no change."""
        return Finding(self.name, Level.OK, found, self.matters)

    def unknown(self, found: str, remedy: str = "") -> Finding:
        """Return why it cannot be judged; *remedy* is how it could be."""
        return Finding(self.name, Level.UNKNOWN, found, self.matters, remedy)

    def warning(self, found: str, remedy: str) -> Finding:
        """Return what makes an instance slower or less isolated."""
        return Finding(self.name, Level.WARNING, found, self.matters, remedy)

    def fatal(self, found: str, remedy: str) -> Finding:
        """Return what keeps an instance from starting."""
        return Finding(self.name, Level.FATAL, found, self.matters, remedy)


class Place(enum.Enum):
    """Where the checks run, which decides what they can read and what has to be there."""

    NODE = "node"
    """A Kubernetes node: every process and the kubelet's files are visible."""
    POD = "pod"
    """A container of a Kubernetes pod."""
    CONTAINER = "container"
    """A container without Kubernetes around it."""
    MACHINE = "machine"
    """No container, and no kubelet."""


def place_of(*, in_initial_pid_namespace: bool, has_kubelet: bool, in_pod: bool) -> Place:
    """Return where this process runs.

    A pod with ``hostPID`` is *in_initial_pid_namespace*: with the kubelet's directory, as the controller's pod has it, it
    counts as the node.
    """
    if in_initial_pid_namespace and has_kubelet:
        return Place.NODE
    if in_pod:
        return Place.POD
    return Place.MACHINE if in_initial_pid_namespace else Place.CONTAINER


@frozen
class CheckReport:
    """All findings, in the order of the checks."""

    place: Place
    findings: tuple[Finding, ...]

    @property
    def verdict(self) -> Level:
        """The worst level of all."""
        return max((finding.level for finding in self.findings), key=list(Level).index, default=Level.OK)
