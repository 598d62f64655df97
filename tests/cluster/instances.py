"""Instances in the cluster: applied from the examples, looked at, and ended."""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

from runner.base.cpuset import CpuSet
from tests.cluster.joined_node import JoinedNode
from tests.cluster.kubectl import Kubectl, Object, until
from tests.cluster.node_side import KUBELET_DIRECTORY
from tests.images.manifests import EXAMPLES

SOON, GUEST_SECONDS, POD_SECONDS = 60, 600, 240
"""Seconds: for an object; for the demo guest, an emulated machine's guest, to boot; for a pod to start."""
IN_ORDER = {0, 13}
"""Exit codes of an instance that was ended in order; 13 where its guest had not booted yet, or takes longer than its grace to power
itself down, as Debian does in an emulated machine."""
RUNNER, CONTROLLER = "instance-runner", "instance-cgroup-controller"
STATE = KUBELET_DIRECTORY / "cpu_manager_state"


@attrs.define
class Deployed:
    """One instance, applied from a kustomization."""

    kubectl: Kubectl
    node: JoinedNode
    place: Path
    name: str

    @property
    def pod(self) -> Object:
        found = self.kubectl.pod(self.name)
        assert found is not None, f"there is no pod {self.name}"
        return found

    @property
    def status(self) -> Object:
        """Return the status of its only container; empty before there is one."""
        statuses = self.pod["status"].get("containerStatuses", [])
        found: Object = statuses[0] if statuses else {}
        return found

    def log(self) -> str:
        return self.kubectl("logs", "-n", "instances", self.name)

    def logged(self, words: str, seconds: float) -> None:
        """Wait until *words* are in its log; fail as soon as it has ended without."""

        def found() -> bool:
            ended = "terminated" in self.status.get("state", {})
            log = self.log()
            assert words in log or not ended, log
            return words in log

        until(found, f"{words!r} in the log of {self.name}", seconds)

    def up(self) -> None:
        """Wait until its guest runs; to boot it takes minutes, because it is a guest of an emulated machine."""
        until(lambda: "running" in self.status.get("state", {}), f"{self.name} to run", POD_SECONDS)
        self.logged("the guest runs", POD_SECONDS)

    @property
    def cpus(self) -> CpuSet:
        """Return the exclusive CPUs that the kubelet has given it; none if its state does not name it."""
        return exclusive_cpus(self.node).get(self.pod["metadata"]["uid"], CpuSet())

    def execute(self, *argv: str) -> str:
        return self.kubectl("exec", "-n", "instances", self.name, "--", *argv)

    def holds(self) -> None:
        """Assert that it was never restarted, and that every thread is where it belongs (``inspect``, on the node)."""
        assert self.status["restartCount"] == 0
        shown = inspected(self.node)
        assert shown.returncode == 0, shown.stdout + shown.stderr
        assert self.pod["metadata"]["uid"] in shown.stdout

    def end(self, seconds: float = 120) -> Object:
        """Delete its kustomization, and return how its container terminated: the last status that was to be seen."""
        seen: list[Object] = []
        watch = ["get", "pod", "-n", "instances", self.name, "--watch", "--output-watch-events", "-o", "json"]
        with subprocess.Popen(self.kubectl.argv(*watch), stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            reader = threading.Thread(target=lambda text: seen.extend(documents(text)), args=(process.stdout,))
            reader.start()
            self.kubectl("delete", "-k", str(self.place), f"--timeout={seconds}s", timeout=seconds + SOON)
            self.kubectl.gone(self.name, SOON)
            time.sleep(1)
            process.terminate()
            reader.join()
        states = [
            status["state"]["terminated"]
            for event in seen
            for status in event["object"]["status"].get("containerStatuses", [])
            if "terminated" in status["state"]
        ]
        assert states, "no state of the container's end was published"
        last: Object = states[-1]
        return last


def documents(text: Any) -> Iterator[Object]:
    """Yield the JSON documents of a stream, one after another."""
    decoder, kept = json.JSONDecoder(), ""
    for line in text:
        kept += line
        try:
            found, end = decoder.raw_decode(kept.lstrip())
        except ValueError:
            continue
        kept = kept.lstrip()[end:]
        yield found


def exclusive_cpus(node: JoinedNode) -> dict[str, CpuSet]:
    """Return pod UID → the CPUs that the kubelet's CPU Manager has given its containers."""
    entries = json.loads(node.read(str(STATE))).get("entries", {})
    return {uid: CpuSet.parse(",".join(containers.values())) for uid, containers in entries.items()}


def inspected(node: JoinedNode) -> subprocess.CompletedProcess[str]:
    return node.execute("python3", "-m", "runner", "inspect", timeout=300)


def planned(node: JoinedNode, kubectl: Kubectl, objects: list[Object]) -> list[Object]:
    """Return what ``plan --node``, on the node, says of pods that come now, one after the other."""
    running = kubectl.json("get", "pods", "-A", f"--field-selector=spec.nodeName={node.name}")
    (node.results / "running.json").write_text(json.dumps(running))
    (node.results / "pods.json").write_text("\n---\n".join(map(json.dumps, objects)))
    argv = ["python3", "-m", "runner", "plan", "--json", "--node", str(KUBELET_DIRECTORY / "config.yaml")]
    argv += ["--state", str(KUBELET_DIRECTORY), "--running", "/results/running.json", "--pod", "/results/pods.json"]
    shown = node.execute(*argv, timeout=300)
    assert shown.returncode in {0, 3}, shown.stderr
    found: list[Object] = json.loads(shown.stdout)["pods"]
    return found


def program_of(it: Deployed, directory: Path) -> None:
    """Copy the runner of the image of *it* into *directory*; `kubectl exec` alone may lose the end of so long an output."""
    [packages] = re.findall(r"^\$ new=(\S+)$", (EXAMPLES / "upgrade.md").read_text(), re.MULTILINE)
    source = f"{it.name}:{packages}"
    it.kubectl("cp", "--retries=20", "-n", "instances", source, str(directory), timeout=GUEST_SECONDS)


def digest_of(directory: Path) -> str:
    """Return the digest of a program by the document's line."""
    lines = "find . -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum"
    return subprocess.check_output(["sh", "-c", lines], cwd=directory, text=True).split()[0]


@contextmanager
def deployed(kubectl: Kubectl, node: JoinedNode, place: Path, name: str) -> Iterator[Deployed]:
    """Hold an instance from a kustomization; it is deleted with the block if it is still there."""
    kubectl("apply", "-k", str(place))
    it = Deployed(kubectl, node, place, name)
    try:
        yield it
    except BaseException:
        if kubectl.pod(name) is not None:
            print(
                f"--- {name}", kubectl.run("logs", "-n", "instances", name).stdout[-6000:], it.pod["status"], sep="\n"
            )
            print(*kubectl.events(name), sep="\n")
        raise
    finally:
        kubectl("delete", "-k", str(place), "--ignore-not-found", "--timeout=120s", timeout=200)


def instances_left(node: JoinedNode) -> list[str]:
    return [each for each in node("ls", "/sys/fs/cgroup/stelia").split() if each.startswith("instance-")]
