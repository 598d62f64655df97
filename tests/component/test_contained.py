"""The reader of a container's log, of which ``tests/node/containerd`` has one for each container."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.node.cgroups import Cgroup
from tests.node.containerd.cri import Cri, Message
from tests.node.containerd.kubelet.test_kubelet import RealKubelet
from tests.node.containerd.pods import Contained


class OneContainer(Cri):
    """A container runtime with one container, whose first process is given by its pid (``socket``)."""

    def __call__(self, method: str, **_: Any) -> Message:
        """Answer what ``ContainerStatus`` answers."""
        assert method == "ContainerStatus"
        return {"info": {"info": json.dumps({"pid": int(self.socket.name)})}, "status": {"exit_code": 3}}


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(["sleep", "infinity"], text=True) as process:
        yield process
        process.kill()


@pytest.fixture
def contained(process: subprocess.Popen[str], tmp_path: Path) -> Contained:
    log = tmp_path / "log"
    log.write_text("ready\n")
    return Contained(OneContainer(Path(str(process.pid)), log), "container", Cgroup(tmp_path), log)


def is_waited_for(contained: Contained) -> bool:
    """Tell whether no process, thread or warning of *contained* is left over; a zombie still has its place in /proc."""
    pid = contained.process.pid
    return (
        contained.process.returncode is not None
        and not contained.reader.is_alive()
        and not Path(f"/proc/{pid}").exists()
    )


def test_a_log_is_read_until_it_is_closed_and_the_container_goes_on(
    contained: Contained, process: subprocess.Popen[str]
) -> None:
    assert contained.wait_for("ready") == "ready"
    assert not is_waited_for(contained)
    contained.close()
    assert is_waited_for(contained)
    assert process.poll() is None
    contained.close()  # once more is no error


def test_a_log_is_read_until_the_container_has_ended(contained: Contained, process: subprocess.Popen[str]) -> None:
    contained.wait_for("ready")
    process.kill()
    process.wait()
    assert contained.wait() == 3
    assert is_waited_for(contained)


def test_every_log_of_a_real_kubelets_containers_is_closed(contained: Contained) -> None:
    kubelet = RealKubelet(Path("kubelet"), None, followed=[contained])  # type: ignore[arg-type]  # nothing is started
    kubelet.close_logs()
    assert is_waited_for(contained)
