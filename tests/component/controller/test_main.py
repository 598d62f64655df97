"""The controller as a program: command line, signals, exit status, probes and metrics."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import get_type_hints

import pytest
import trio

from runner.base.errors import HostError
from runner.base.version import VERSION
from runner.controller.command_line import Options, command_line
from runner.controller.main import main
from runner.controller.serve.seccomp import SeccompCheck
from runner.controller.serve.socket_file import listening
from runner.protocol.http import serve_http
from tests.support.exposition import families, figures
from tests.support.fake_node import B, Controller, Node, Parts, connected, controlled, register_beforehand
from tests.support.json_schemas import fitting

PREFIX = "instance_cgroup_controller_"
PORT = 9440
"""Of the program's endpoints. The tests have a network of their own, and no connection gets a port below 32768, so that none takes it."""


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node.new(tmp_path)


def command(node: Node, *more: str) -> list[str]:
    return [
        *(sys.executable, "-c", "import sys; from runner.controller.main import main; sys.exit(main())"),
        *("--root", str(node.root.path), "--cgroupfs", str(node.mount.path), "--socket", str(node.socket)),
        *("--state-dir", str(node.path)),  # where the one of `register_beforehand` has its records
        *(
            "--kubelet-dir",
            str(node.kubelet),
            "--cdi-dir",
            str(node.cdi),
            "--sysfs",
            str(node.path / "sys"),
            "--procfs",
            str(node.proc),
        ),
        *("--no-device-filter", *more),
    ]


def until_logged(process: subprocess.Popen[str], word: str) -> str:
    """Read what *process* logs until a line with *word*."""
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if word in line:
            return "".join(lines)
    raise AssertionError("".join(lines))


@pytest.fixture
def built(node: Node) -> Node:
    """Build the tree beforehand: the program itself cannot make groups out of ordinary directories."""
    register_beforehand(node)
    return node


@pytest.fixture
def process(built: Node) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        command(built, "--metrics", "127.0.0.1:0"), stderr=subprocess.PIPE, text=True, cwd=Path.cwd()
    ) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_and_leaves_the_tree(
    built: Node, process: subprocess.Popen[str], number: signal.Signals
) -> None:
    before = built.snapshot()
    assert "ready" in until_logged(process, "ready")
    with socket.socket(socket.AF_UNIX) as client:  # a connection is no reason to stay
        client.connect(str(built.socket))
        process.send_signal(number)
        assert number.name in until_logged(process, "stopping")
        assert process.wait() == 0
    assert built.snapshot() == before
    assert not built.socket.exists()


def test_it_continues_when_its_log_is_not_read(built: Node, process: subprocess.Popen[str]) -> None:
    until_logged(process, "ready")
    assert process.stderr is not None
    process.stderr.close()
    subprocess.run(command(built), capture_output=True, check=False)  # it connects, which is logged
    process.terminate()
    assert process.wait() == 0


@pytest.fixture
def unread() -> Iterator[tuple[int, int]]:
    """Give the two ends of a pipe that is full, and whose reader is there and reads nothing."""
    reading, writing = os.pipe()
    filler = os.open(f"/proc/self/fd/{writing}", os.O_WRONLY | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(filler, b"\n" * 4096)
    os.close(filler)
    yield reading, writing
    os.close(reading)
    os.close(writing)


def test_a_log_pipe_that_is_open_and_unread_does_not_hold_it_up(built: Node, unread: tuple[int, int]) -> None:
    reading, writing = unread

    async def ask() -> None:
        with trio.fail_after(120):
            assert (await asked_http("/healthz")).endswith(b"\r\n\r\nok\n")
            metrics = await asked_http("/metrics")
            async with connected(built.socket) as client:
                await client.result("getStatus")
        assert figures(metrics.decode().partition("\r\n\r\n")[2], PREFIX)["instances"] == 1

    argv = command(built, "--metrics", f"127.0.0.1:{PORT}", "--insecure-trust-peer")
    with subprocess.Popen(argv, stderr=writing) as process:
        trio.run(ask)
        process.terminate()
        assert process.wait() == 0
    os.set_blocking(reading, False)
    assert os.read(reading, 1 << 20).strip() == b"", "nothing of the log had room"


def test_a_bug_is_logged_without_waiting_for_the_logs_reader(node: Node, unread: tuple[int, int]) -> None:
    """The interpreter's own report of an exception waits until its reader has made room."""
    script = (
        "import sys, runner.controller.main as program\n"
        "async def control(*_): raise ExceptionGroup('', [ValueError('x')])\n"
        "program.control = control\n"
        "sys.exit(program.main())"
    )
    argv = [sys.executable, "-c", script, *command(node)[3:]]
    assert subprocess.run(argv, stderr=unread[1], check=False).returncode == 1
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert "this is a bug of instance-cgroup-controller:" in done.stderr
    assert "ValueError: x" in done.stderr


async def asked_http(path: str) -> bytes:
    """Return the response to a request for *path*, as soon as a program listens on :data:`PORT`."""
    while True:
        try:
            stream = await trio.open_tcp_stream("127.0.0.1", PORT)
        except OSError:
            await trio.sleep(0.01)
        else:
            return await exchange(stream, f"GET {path} HTTP/1.0\r\n\r\n".encode())


def test_killed_and_started_again_it_replaces_its_socket(built: Node, process: subprocess.Popen[str]) -> None:
    before = built.snapshot()
    until_logged(process, "ready")
    process.kill()
    process.wait()
    assert built.socket.exists()
    with subprocess.Popen(command(built), stderr=subprocess.PIPE, text=True, cwd=Path.cwd()) as successor:
        until_logged(successor, "ready")
        successor.terminate()
        assert successor.wait() == 0
    assert built.snapshot() == before


def test_a_second_controller_refuses_to_start(built: Node, process: subprocess.Popen[str]) -> None:
    until_logged(process, "ready")
    second = subprocess.run(command(built), capture_output=True, text=True, check=False)
    assert second.returncode == 31
    assert f"cannot control {built.root.path}: another controller does; end it first" in second.stderr
    assert "INSECURE" not in second.stderr, "it has changed nothing, and not the device filter"
    assert "Traceback" not in second.stderr


def test_without_cgroup_v2_it_logs_the_reason_and_waits(node: Node) -> None:
    (node.mount.path / "cgroup.controllers").write_text("memory\n")
    with subprocess.Popen(command(node), stderr=subprocess.PIPE, text=True) as process:
        assert "offers no cpuset controller" in until_logged(process, "ready")
        process.terminate()
        assert process.wait() == 0


def test_without_the_device_filter_it_runs_and_is_not_ready(built: Node) -> None:
    """Over ordinary directories no kernel takes the program. It gives its capabilities away all the same."""
    argv = [word for word in command(built) if word != "--no-device-filter"]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as process:
        logged = until_logged(process, "ready")
        status = Path(f"/proc/{process.pid}/status").read_text()
        process.terminate()
        assert process.wait() == 0
    assert f"cannot attach the device filter to {built.root.path}" in logged
    assert "CONFIG_CGROUP_BPF" in logged
    dac_override, sys_nice, sys_resource = 1, 23, 24  # include/uapi/linux/capability.h
    kept = capabilities(status, "CapEff")
    own = capabilities(Path("/proc/self/status").read_text(), "CapEff")
    assert kept == own & {dac_override, sys_nice, sys_resource}
    assert (capabilities(status, "CapPrm"), capabilities(status, "CapInh")) == (kept, set())
    assert "NoNewPrivs:\t1\n" in status


def capabilities(status: str, name: str) -> set[int]:
    """Return the numbers of a set of capabilities in a process's *status* (proc_pid_status(5))."""
    [mask] = re.findall(rf"{name}:\t(\w+)", status)
    return {number for number in range(64) if int(mask, 16) >> number & 1}


def test_a_tree_that_is_to_have_no_device_filter_is_logged_as_a_warning(process: subprocess.Popen[str]) -> None:
    assert "INSECURE: a process in float may make and open device nodes" in until_logged(process, "ready")


def test_a_cgroup_namespace_that_it_cannot_enter_ends_it(built: Node) -> None:
    (built.proc / "1" / "ns" / "cgroup").unlink()
    done = subprocess.run(command(built), capture_output=True, text=True, check=False)
    assert done.returncode == 31
    assert f"cannot enter the cgroup namespace of {built.proc / '1'}" in done.stderr
    assert "No such file or directory; it takes CAP_SYS_ADMIN and CAP_SYS_PTRACE" in done.stderr


def test_more_for_a_pod_than_for_all_is_an_error_before_anything_is_touched(node: Node) -> None:
    left = subprocess.run(
        command(node, "--memory-max=1G", "--pod-memory=2G"), capture_output=True, text=True, check=False
    )
    assert left.returncode == 2
    assert "cannot use --pod-memory: it must be a size, and no more than --memory-max" in left.stderr
    assert "Traceback" not in left.stderr
    assert str(node.root.cpus()) == ""


def test_a_procfs_that_is_none_is_an_error_before_anything_is_touched(node: Node) -> None:
    left = subprocess.run(command(node, f"--procfs={node.path}"), capture_output=True, text=True, check=False)
    assert left.returncode == 31
    assert f"cannot enter the cgroup namespace of {node.path}/1" in left.stderr
    assert "Traceback" not in left.stderr
    assert str(node.root.cpus()) == ""


def test_a_procfs_without_the_machines_memory_is_an_error_before_anything_is_touched(node: Node) -> None:
    (node.proc / "meminfo").unlink()
    left = subprocess.run(command(node), capture_output=True, text=True, check=False)
    assert left.returncode == 31
    assert f"cannot read the machine's memory in {node.proc}" in left.stderr
    assert "Traceback" not in left.stderr
    assert str(node.root.cpus()) == ""


def test_where_others_have_taken_all_inotify_queues_the_controller_starts(built: Node) -> None:
    """``fs.inotify.max_user_instances`` is one limit for all processes of root's; here in a user namespace with its own."""
    limited = ["unshare", "--user", "--map-root-user", "sh", "-c"]
    script = 'echo 0 >/proc/sys/user/max_inotify_instances; exec "$@"'
    argv = [*limited, script, "sh", *command(built, "--insecure-trust-peer")]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as process:
        log = until_logged(process, "ready")
        assert log.count("changes will be seen late reason=") == 1
        assert "Too many open files" in log
        assert "raise fs.inotify.max_user_instances" in log
        process.terminate()
        assert process.wait() == 0


def test_it_may_have_as_many_files_open_as_its_hard_limit_allows(built: Node) -> None:
    """It keeps the files of its groups open: 1024, a usual soft limit, would do for some 50 instances."""
    argv = ["prlimit", "--nofile=256:4096", *command(built)]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as process:
        until_logged(process, "ready")
        limits = Path(f"/proc/{process.pid}/limits").read_text()
        assert re.search(r"^Max open files +4096 +4096 ", limits, re.MULTILINE)
        process.terminate()


def test_trusting_is_logged_as_a_warning(built: Node) -> None:
    with subprocess.Popen(command(built, "--insecure-trust-peer"), stderr=subprocess.PIPE, text=True) as process:
        assert "INSECURE" in until_logged(process, "ready")
        process.terminate()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--cpus", "5-3"], "--cpus"),
        (["--cpus", ""], "--cpus"),
        (["--reserved-cpus", "x"], "--reserved-cpus"),
        (["--metrics", "9100"], "--metrics"),
        (["--metrics", "127.0.0.1:99999"], "--metrics"),
        (["--metrics", "localhost:9100"], "--metrics"),
        (["--allow-device", "/dev/null"], "--allow-device"),
        (["--memory-max", "8GiB"], "--memory-max"),
        (["--memory-high", "0M"], "--memory-high"),
        (["--pids-max", "0"], "--pids-max"),
        (["--pod-pids-max", "-1"], "--pod-pids-max"),
        (["--cpu-weight", "10001"], "--cpu-weight"),
        (["--unknown"], "--unknown"),
    ],
)
def test_a_wrong_command_line_is_an_error(arguments: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert word in capsys.readouterr().err


async def get(path: Path, request: bytes) -> bytes:
    return await exchange(await trio.open_unix_socket(path), request)


async def exchange(stream: trio.SocketStream, request: bytes) -> bytes:
    async with stream:
        await stream.send_all(request)
        answer = b""
        while data := await stream.receive_some():
            answer += data
    return answer


async def test_probes_and_metrics(node: Node) -> None:
    node.become(B)
    port = node.path / "http"  # HTTP over a Unix socket
    async with controlled(node) as controller, connected(node.socket) as client:
        await client.result("registerCgroup", uuid=B, cpuset="14-17")
        await client.refusal("registerCgroup", uuid="x", cpuset="1")
        with listening(port) as listener:
            async with trio.open_nursery() as nursery:
                endpoints = controller.endpoints()
                nursery.start_soon(serve_http, [listener], endpoints.respond)
                await check_responses(port, controller)
                nursery.cancel_scope.cancel()


async def check_responses(port: Path, controller: Controller) -> None:
    answer = (await get(port, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")).decode()
    head, _, body = answer.partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 200 OK\r\n")
    assert f"Content-Length: {len(body)}" in head
    assert "Content-Type: text/plain; version=0.0.4; charset=utf-8" in head
    found = figures(body, PREFIX)
    expected = {
        "instances": 1,
        "instance_cpus": 4,
        "float_cpus": 10,
        "frozen": 0,
        'requests_total{method="registerCgroup"}': 2,
        'refusals_total{reason="identity"}': 1,
    }
    assert {name: found[name] for name in expected} == expected
    types = {name: metric.type for name, metric in families(body, PREFIX).items()}
    assert found[f'build_info{{digest="",version="{VERSION}"}}'] == 1  # no image of ours
    assert {name for name, kind in types.items() if kind == "gauge"} == {
        "build_info",
        "instances",
        "instances_enforced",
        "instance_enforced",
        "instance_report_age_seconds",
        "instance_cpus",
        "float_cpus",
        "handover_cpus",
        "pods_without_seccomp",
        "frozen",
        "disturbances",
    }
    assert set(types.values()) == {"gauge", "counter"}
    assert (await get(port, b"GET /healthz HTTP/1.0\r\n\r\n")).endswith(b"\r\n\r\nok\n")
    assert b" 200 " in await get(port, b"GET /readyz?x=1 HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b" 404 " in await get(port, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b" 405 " in await get(port, b"POST /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b" 400 " in await get(port, b"nonsense\r\n\r\n")
    assert b" 431 " in await get(port, b"GET /" + b"x" * (8192 - 4))
    (controller.node.kubelet / "cpu_manager_state").write_bytes(b"{")
    await controller.until(lambda: bool(controller.loop.frozen_because))
    assert b"frozen: cannot use" in await get(port, b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b" 503 " in await get(port, b"GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n")
    while b"controller_frozen 1.0\n" not in await get(port, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"):
        await trio.sleep(0.01)  # they may be a tenth of a second old


async def test_a_node_whose_first_pass_failed_is_not_ready(node: Node) -> None:
    controllers = node.mount.path / "cgroup.controllers"
    before = controllers.read_text()
    controllers.write_text("memory\n")
    async with controlled(node) as controller:
        show = controller.endpoints().respond
        failed = await show("/readyz")
        assert (failed.status, failed.text[:21]) == (503, "the last pass failed:")
        assert "offers no cpuset controller" in failed.text
        assert (await show("/healthz")).text == "ok\n"
        controllers.write_text(before)
        await controller.eventually(lambda: not controller.loop.error)
        assert (await show("/readyz")).status == 200


async def test_an_endpoint_for_which_the_host_cannot_be_read_is_unavailable(node: Node) -> None:
    class UnreadableSeccomp(SeccompCheck):
        def without(self, pod_uids: Collection[str]) -> frozenset[str]:
            del pod_uids
            raise HostError("cannot read it")

    async with controlled(node, parts=Parts(seccomp=UnreadableSeccomp)) as controller:
        answer = await controller.endpoints().respond("/metrics")
        assert (answer.status, answer.text) == (503, "cannot read it\n")
        assert (await controller.endpoints().respond("/healthz")).text == "ok\n", "it reads no pod"


def test_its_log_can_be_json(built: Node) -> None:
    with subprocess.Popen(command(built, "--log-format=json"), stderr=subprocess.PIPE, text=True) as process:
        records = [fitting("events", json.loads(line)) for line in until_logged(process, '"ready"').splitlines()]
        process.terminate()
        assert process.stderr is not None
        records += [json.loads(line) for line in process.stderr]
    [ready] = [each for each in records if each["message"] == "ready"]
    assert ready["fields"]["socket"] == str(built.socket)
    [stopping] = [each for each in records if each["message"] == "stopping"]
    assert stopping["fields"] == {"signal": "SIGTERM"}


def test_the_parser_sets_every_option() -> None:
    """A type checker cannot see which."""
    options = command_line().parse_args([], Options())
    assert [name for name in get_type_hints(Options) if not hasattr(options, name)] == []


def test_the_script_is_installed() -> None:
    found = subprocess.run(
        [Path(sys.executable).with_name("instance-cgroup-controller"), "--help"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "100"},
    )
    assert "--insecure-trust-peer" in found.stdout
