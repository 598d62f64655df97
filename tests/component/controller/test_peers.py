"""The identity of the peer process: real processes on real sockets, with and without SO_PEERPIDFD."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import runner.kernel.peers
from runner.kernel.leases import read_at_once
from runner.kernel.peers import INIT_PID_NAMESPACE, SO_PEERPIDFD, Peer, PeerError, Peers, boot_time
from tests.support.fake_node import NO_PIDFD

CLIENT = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); sys.stdin.read()"


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        listener.settimeout(10)
        yield listener


@pytest.fixture(params=[SO_PEERPIDFD, NO_PIDFD], ids=["pidfd", "credentials"])
def peers(request: pytest.FixtureRequest) -> Peers:
    return Peers(Path("/proc"), request.param)


def connect(listener: socket.socket, *prefix: str) -> tuple[subprocess.Popen[bytes], socket.socket, float]:
    process = subprocess.Popen(
        [*prefix, sys.executable, "-S", "-c", CLIENT, listener.getsockname()], stdin=subprocess.PIPE
    )
    return process, listener.accept()[0], boot_time()


def identify_and_end(
    peers: Peers, process: subprocess.Popen[bytes], connection: socket.socket, accepted_at: float
) -> Peer:
    with connection, process:
        try:
            return peers.identify(connection, accepted_at)
        finally:
            assert process.stdin is not None
            process.stdin.close()


def test_identifies_a_process(listener: socket.socket, peers: Peers) -> None:
    process, connection, accepted_at = connect(listener)
    peer = identify_and_end(peers, process, connection, accepted_at)
    assert (peer.pid, peer.user_id) == (process.pid, os.getuid())
    assert peer.pid_namespace == peers.own_namespace()
    assert peer.cgroup == next(
        line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::")
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: a new PID namespace")
def test_identifies_the_init_of_another_pid_namespace(listener: socket.socket, peers: Peers) -> None:
    process, connection, accepted_at = connect(listener, "unshare", "--pid", "--fork", "--kill-child")
    peer = identify_and_end(peers, process, connection, accepted_at)
    assert (peer.inner_pid, peer.nested) == (1, False)
    assert peer.pid != process.pid  # it is unshare's child
    assert peer.pid_namespace not in (peers.own_namespace(), INIT_PID_NAMESPACE)


def test_does_not_identify_a_process_that_has_ended(listener: socket.socket, peers: Peers) -> None:
    process, connection, accepted_at = connect(listener)
    process.kill()
    process.wait()  # reaped: its number is free for others
    assert peers.container(connection, peers.own_namespace()) == 0
    with connection, pytest.raises(PeerError, match=f"process {process.pid}"):
        peers.identify(connection, accepted_at)
    assert process.stdin is not None
    process.stdin.close()


def test_refuses_a_process_younger_than_the_connection(listener: socket.socket, peers: Peers) -> None:
    process, connection, accepted_at = connect(listener)
    with pytest.raises(PeerError, match="younger"):
        identify_and_end(peers, process, connection, accepted_at - 3600)


def test_a_malformed_proc_is_an_error(listener: socket.socket, tmp_path: Path) -> None:
    process, connection, accepted_at = connect(listener)
    directory = tmp_path / "proc" / str(process.pid)
    directory.mkdir(parents=True)
    for file, text in (("stat", f"{process.pid} (x) S" + " 1" * 30), ("status", "Name:\tx\n"), ("cgroup", "0::/\n")):
        (directory / file).write_text(text)
    with pytest.raises(PeerError, match="not understood"):
        identify_and_end(Peers(tmp_path / "proc", NO_PIDFD), process, connection, accepted_at)


def test_leaves_no_descriptor_behind(listener: socket.socket, peers: Peers) -> None:
    process, connection, accepted_at = connect(listener)
    before = os.listdir("/proc/self/fd")  # noqa: PTH208  # names only
    peers.identify(connection, accepted_at)
    assert len(os.listdir("/proc/self/fd")) == len(before)  # noqa: PTH208  # names only
    identify_and_end(peers, process, connection, accepted_at)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: new PID namespaces")
@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_containers_are_told_apart_without_identifying_the_peer(listener: socket.socket, depth: int) -> None:
    peers, new = Peers(Path("/proc")), ("unshare", "--pid", "--fork", "--kill-child")
    process, connection, accepted_at = connect(listener, *new * depth)
    own_namespace = peers.own_namespace()
    found = peers.container(connection, own_namespace)
    peer = identify_and_end(peers, process, connection, accepted_at)
    assert found == [peer.pid, peer.pid_namespace, own_namespace, own_namespace][depth]


def test_a_missing_process_has_no_namespace(peers: Peers) -> None:
    assert peers.namespace(os.getpid()) == peers.own_namespace()
    assert peers.namespace(2**22 + 1) is None


def test_the_groups_of_a_peer_are_not_read(
    listener: socket.socket, peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 65,536 of them the status has 700 KB."""
    read = dict[str, bytes]()

    def reading(file: str, *, dir_fd: int | None = None) -> bytes:
        read[file] = read_at_once(file, dir_fd=dir_fd)
        return read[file]

    monkeypatch.setattr(runner.kernel.peers, "read_at_once", reading)
    client = f"import os; os.setgroups(range(65536)); {CLIENT}"
    process = subprocess.Popen([sys.executable, "-S", "-c", client, listener.getsockname()], stdin=subprocess.PIPE)
    peer = identify_and_end(peers, process, listener.accept()[0], boot_time())
    assert peer.inner_pid == process.pid
    assert max(map(len, read.values())) < 1 << 16


NAMED = "open('/proc/self/comm', 'wb').write(b'a\\rNSpid:\\t1'); "


def test_does_not_believe_the_name_of_a_process(listener: socket.socket, peers: Peers) -> None:
    client = NAMED + CLIENT
    process = subprocess.Popen([sys.executable, "-S", "-c", client, listener.getsockname()], stdin=subprocess.PIPE)
    peer = identify_and_end(peers, process, listener.accept()[0], boot_time())
    assert peer.inner_pid == process.pid


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: a new PID namespace")
def test_the_init_of_a_namespace_inside_a_container_is_not_the_containers(
    listener: socket.socket, peers: Peers
) -> None:
    new = ("unshare", "--pid", "--fork", "--kill-child")
    process, connection, accepted_at = connect(listener, *new, *new)
    peer = identify_and_end(peers, process, connection, accepted_at)
    assert peer.inner_pid > 1  # the inner unshare is the container's init
    assert peer.nested
