"""kubectl as a user has it: the program, and what it prints."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import attrs

Object = dict[str, Any]
T = TypeVar("T")


class KubectlError(Exception):
    """A command ended with a status other than 0; the text is what it has printed."""


def until(condition: Callable[[], T | None], what: str, seconds: float) -> T:
    """Return the first true value of *condition*, which may also fail with :class:`KubectlError` for a while.

    The longer it waits, the rarer it asks: each kubectl takes CPU time that the node could have.
    """
    begun = time.monotonic()
    last: object = None
    while True:
        try:
            found = condition()
            if found:
                return found
            last = found
        except KubectlError as error:
            last = error
        waited = time.monotonic() - begun
        assert waited < seconds, f"waited {seconds:.0f} s for {what}; last: {last}"
        time.sleep(min(0.3 + waited / 15, 5))


@attrs.frozen
class Kubectl:
    """The program with the configuration of one client."""

    program: Path
    configuration: Path

    def argv(self, *arguments: str) -> list[str]:
        """Return the command line with *arguments*."""
        return [str(self.program), f"--kubeconfig={self.configuration}", *arguments]

    def run(self, *arguments: str, given: str | None = None, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """Run it with *given* on its standard input, and return what it has printed and its status.

        A log may have an event in the middle of a character of the guest's: what is no UTF-8 is replaced.
        """
        return subprocess.run(
            self.argv(*arguments),
            check=False,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            input=given or "",
            timeout=timeout,
        )

    def __call__(self, *arguments: str, given: str | None = None, timeout: float = 300) -> str:
        """Return its output. Raises :class:`KubectlError`."""
        done = self.run(*arguments, given=given, timeout=timeout)
        if done.returncode != 0:
            raise KubectlError(f"kubectl {' '.join(arguments)}: status {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def json(self, *arguments: str) -> Object:
        """Return an object as the API has it. Raises :class:`KubectlError`."""
        found: Object = json.loads(self(*arguments, "-o", "json"))
        return found

    def items(self, *arguments: str) -> list[Object]:
        """Return the objects of a list. Raises :class:`KubectlError`."""
        found: list[Object] = self.json("get", *arguments)["items"]
        return found

    def apply(self, *objects: Object) -> str:
        """Apply objects. Raises :class:`KubectlError`."""
        return self("apply", "-f", "-", given="\n---\n".join(map(json.dumps, objects)))

    def pod(self, name: str, namespace: str = "instances") -> Object | None:
        """Return a pod, ``None`` if there is none of this name."""
        found = self("get", "pod", "-n", namespace, name, "--ignore-not-found", "-o", "json")
        pod: Object | None = json.loads(found) if found else None
        return pod

    def gone(self, name: str, seconds: float, namespace: str = "instances") -> None:
        """Wait until there is no pod of this name."""
        until(lambda: self.pod(name, namespace) is None, f"the end of the pod {name}", seconds)

    def events(self, name: str, namespace: str = "instances") -> list[tuple[str, str]]:
        """Return reason and message of every event about an object of this name."""
        found = self.items("events", "-n", namespace, f"--field-selector=involvedObject.name={name}")
        return [(event["reason"], event["message"]) for event in found]
