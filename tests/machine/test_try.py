"""A newcomer's terminal: `instance-runner try` with a real guest, whose shell is typed into, and every way to leave it."""

from __future__ import annotations

import os
import re
import select
import shlex
import signal
import socket
import subprocess
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import attrs
import pytest

from tests.emulated_node import artefacts
from tests.emulated_node.cache import fetch
from tests.support.program_runs import FIRST_SECOND, RUNNER, GuestFiles, children_by_name, until
from tests.support.soak import some

WITHIN = 240
"""Seconds that an emulated guest may take to say something."""
BOOTS_WITHIN = 1200
"""Seconds that an emulated guest may take to boot a distribution, on a busy machine."""


@attrs.define
class Terminal:
    """The terminal of a program, and everything that was shown on it."""

    process: subprocess.Popen[bytes]
    fd: int
    before: list[Any] = attrs.field(factory=list)
    """Its attributes before the program was started."""
    seen: str = ""
    _read_to: int = 0

    def until(self, pattern: str, within: float = WITHIN) -> re.Match[str]:
        """Wait for *pattern* in what was shown since the last match."""
        deadline = time.monotonic() + within
        while (match := re.compile(pattern).search(self.seen, self._read_to)) is None:
            assert time.monotonic() < deadline, f"waited for {pattern!r} in:\n{self.seen}"
            if not select.select([self.fd], [], [], 1)[0]:
                continue
            try:
                data = os.read(self.fd, 1 << 16)
            except OSError:  # nothing has the terminal open any more
                data = b""
            assert data, f"ended without {pattern!r}:\n{self.seen}"
            self.seen += data.decode(errors="replace")
        self._read_to = match.end()
        return match

    def read(self) -> str:
        """Read what is there, so that the program can go on writing; return everything that was shown."""
        while select.select([self.fd], [], [], 0)[0]:
            self.seen += os.read(self.fd, 1 << 16).decode(errors="replace")
        return self.seen

    def runs(self) -> bool:
        """Return ``True``. Raises ``AssertionError``, with what was shown, where the program has ended."""
        ended = self.process.poll() is not None
        seen = self.read()  # after that, so that its last words are among it
        assert not ended, seen
        return True

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def until_shell(self) -> None:
        self.until(r"guest# (\x1b\[6n)?$")  # it may ask where the cursor is

    def wait(self) -> int:
        """Return the exit status, once the rest was shown and if the terminal is as it was."""
        deadline = time.monotonic() + WITHIN
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"does not end:\n{self.seen}"
            select.select([self.fd], [], [], 0.1)
            self.read()
        self.read()
        assert termios.tcgetattr(self.fd) == self.before
        return self.process.returncode


@contextmanager
def terminal(*argv: str | Path) -> Iterator[Terminal]:
    """Run *argv* as the leader of the session of a new terminal of 33 lines and 111 columns."""
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (33, 111))
    before = termios.tcgetattr(theirs)
    process = subprocess.Popen(("setsid", "--ctty", *argv), stdin=theirs, stdout=theirs, stderr=theirs)
    shown = Terminal(process, ours, before)
    try:
        yield shown
        assert process.poll() is not None, "the program has not been left"
    finally:
        process.kill()
        process.wait()
        os.close(theirs)
        os.close(shown.fd)


@contextmanager
def tried(guest: GuestFiles) -> Iterator[Terminal]:
    with terminal(RUNNER, "try", "--guest", guest.kernel.parent) as shown:
        yield shown


@pytest.mark.heart
def test_a_shell_that_is_typed_into_looked_at_from_outside_and_left_by_its_key(guest: GuestFiles) -> None:
    """It has the terminal's size and its Ctrl-C, and both commands that are shown work as they are."""
    with tried(guest) as shown:
        assert "placement: vcpu 0" in shown.until(r"(?s).*the guest runs\r\n")[0]
        assert shown.until(r"\[to leave: (\S+),")[1] == "Ctrl-]"
        look = shown.until(r"in another terminal: ([^;]*); ([^\]]*)\]")
        shown.until_shell()
        shown.type("stty size; echo $((6 * 7)) >/mnt/answer; cat /mnt/answer\r")
        shown.until(r"33 111\r\n42\r\n")
        shown.until_shell()
        shown.type("sh -c 'echo $0; exec sleep 1000' begun\r")
        shown.until(r"\nbegun\r\n")
        shown.type("\x03")
        shown.until_shell()
        environment = {**os.environ, "PATH": f"{RUNNER.parent}:{os.environ['PATH']}"}
        status, judged = (
            subprocess.run(shlex.split(each), check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
            for each in look.groups()
        )
        assert re.search(r"^guest +running for ", status, re.MULTILINE), status
        assert "vcpu 0" in judged
        shown.type("\x1d")
        assert shown.wait() == 0, shown.seen
        assert "ended outcome=stopped status=0 faults=0" in shown.seen
        assert shown.seen.endswith("[the guest has ended, and nothing of it is left]\r\n")
    assert not Path("/run/instance-runner").exists()


def test_powering_the_guest_off_ends_it_well(guest: GuestFiles) -> None:
    with tried(guest) as shown:
        shown.until_shell()
        shown.type("poweroff\r")
        assert shown.wait() == 0, shown.seen
        assert "the guest shut itself down" in shown.seen


def test_another_end_is_explained_with_what_to_do(guest: GuestFiles) -> None:
    with tried(guest) as shown:
        shown.until_shell()
        shown.type("echo c >/proc/sysrq-trigger\r")
        assert shown.wait() == 12, shown.seen
        assert "ended with status 12 (guest_panicked): the guest's kernel panicked" in shown.seen
        assert "what to do: " in shown.seen


def test_a_terminal_that_is_closed_ends_everything(guest: GuestFiles) -> None:
    """The kernel sends SIGHUP to the session of a terminal that has gone (drivers/tty/tty_io.c, tty_vhangup)."""
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        ("setsid", "--ctty", RUNNER, "try", "--guest", guest.kernel.parent), stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    shown = Terminal(process, ours)
    try:
        shown.until_shell()
        os.close(ours)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_from_outside_ends_everything(guest: GuestFiles, number: signal.Signals) -> None:
    """After SIGKILL the kernel ends its children; `console` may end before it has restored the terminal."""
    with tried(guest) as shown:
        shown.until(r"guest: up with")
        shown.process.send_signal(number)
        if number == signal.SIGTERM:
            assert shown.wait() == 0, shown.seen
            assert "asked to stop reason=SIGTERM" in shown.seen
        else:
            shown.process.wait()


def pid_1(shown: Terminal) -> int:
    """Return the runner's pid, which the command that looks at the guest names."""
    return int(shown.seen.partition("another terminal: nsenter -t ")[2].partition(" ")[0])


def test_a_runner_that_is_killed_is_no_fault_of_its_own(guest: GuestFiles) -> None:
    with tried(guest) as shown:
        shown.until(r"guest: up with")
        os.kill(pid_1(shown), signal.SIGKILL)
        assert shown.wait() == 128 + signal.SIGKILL, shown.seen
        assert "ended with status 137: the runner was killed (SIGKILL)" in shown.seen
        assert "bug" not in shown.seen


def test_the_terminal_is_restored_when_its_console_is_killed(guest: GuestFiles) -> None:
    """As the kernel kills it with all that is in its PID namespace when the runner is killed."""
    with tried(guest) as shown:
        shown.until(r"guest: up with")
        enter = f"nsenter -t {pid_1(shown)} -p".replace(" ", "\0").encode()
        commands = {each: each.read_bytes() for each in Path("/proc").glob("[0-9]*/cmdline")}
        [nsenter] = [path for path, words in commands.items() if words.startswith(enter) and b"\0console\0" in words]
        [console] = (nsenter.parent / "task" / nsenter.parent.name / "children").read_text().split()
        os.kill(int(console), signal.SIGKILL)
        assert shown.wait() == 0, shown.seen


def test_a_spec_of_ones_own_is_tried_as_it_is(guest: GuestFiles, tmp_path: Path) -> None:
    """Also where it has the console's output on standard output, by default: that would be shown twice."""
    spec = tmp_path / "mine.toml"
    files = f'kernel = "{guest.kernel}"\ninitrd = "{guest.initrd}"\n'
    cmdline = 'cmdline = "console=ttyS0 quiet no_timer_check guest.then=shell"\n'
    spec.write_text(f'[cpu]\naccel = "tcg"\n[boot]\n{files}{cmdline}[shutdown]\ngrace = 8\n')
    with terminal(RUNNER, "try", spec) as shown:
        shown.until_shell()
        shown.type("\x1d")
        assert shown.wait() == 0, shown.seen
    assert shown.seen.count("guest: up with") == 1
    assert shown.seen.endswith("[the guest has ended, and nothing of it is left]\r\n")


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


@contextmanager
def served(answer: bytes) -> Iterator[int]:
    """Answer each connection to a port of this machine, which is yielded, with *answer*."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def speaks_ssh(port: int) -> bool:
    """Tell whether a server answers; passt takes the connection also where the guest refuses it.

    The client speaks first, as ssh does: passt of 2023 keeps what the guest says until then.
    """
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=WITHIN) as connection:
        connection.sendall(b"SSH-2.0-test\r\n")
        return connection.recv(4) == b"SSH-"
    return False


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that the process has had, that of the kernel for it included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")  # proc_pid_stat(5): utime, stime


@pytest.mark.timeout(3 * BOOTS_WITHIN)
@pytest.mark.node_only
def test_a_cloud_image_has_a_login_a_way_out_and_a_port_and_is_only_read() -> None:
    """As a stranger has one: qcow2, for UEFI, with a real cloud-init, and no user that could log in.

    `pytest -s tests/machine/test_try.py -k cloud_image` prints how long the login took.
    """
    image = fetch(artefacts.cloud_image())
    before, port, begun = image.read_bytes(), free_port(), time.monotonic()
    options = ("--login", "--memory", "1GiB", "--port", f"{port}:22")
    with served(b"the way out\n") as outside, terminal(RUNNER, "try", "--disk", image, *options) as shown:
        assert shown.until(r"ssh -p (\d+) try@127\.0\.0\.1")[1] == str(port)
        password = shown.until(r"log in as 'try' with the password '(\w+)'")[1]
        assert "firmware" in shown.until(r"(?s).*the guest runs\r\n")[0]
        shown.until(rf"log in as 'try' with the password '{password}'", BOOTS_WITHIN)
        shown.until("try login: ")
        [qemu] = children_by_name(pid_1(shown))["qemu-system-x86"]
        print(f"it asked for the login after {time.monotonic() - begun:.0f} s, {cpu_seconds(qemu):.0f} s of CPU time")
        shown.type("try\r")
        shown.until("Password: ")
        shown.type(f"{password}\r")
        shown.until(r"\$ ")
        shown.type("sudo sh -c 'echo I am $(id -un)'\r")
        shown.until(r"I am root[^$]*\$ ")  # what is typed while sudo runs is its own
        gateway = "$(ip route show default | cut -d' ' -f3)"
        shown.type(f'bash -c "cat </dev/tcp/{gateway}/{outside}"\r')  # passt has its gateway stand for this machine
        shown.until("the way out")
        until(lambda: shown.runs() and speaks_ssh(port), "the guest's sshd", BOOTS_WITHIN)
        shown.type("\x1d")
        assert shown.wait() in {0, 13}, shown.seen  # a busy machine's guest takes longer than its grace
    assert image.read_bytes() == before


def test_ctrl_c_before_the_guest_runs_ends_the_start(guest: GuestFiles) -> None:
    with tried(guest) as shown:
        shown.until("starting instance=try")
        shown.type("\x03")
        assert shown.wait() == 0, shown.seen
        assert "asked to stop reason=SIGTERM" in shown.seen
        assert "to leave" not in shown.seen


@pytest.mark.heart
@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_at_any_moment_of_its_start_ends_everything(guest: GuestFiles, number: signal.Signals) -> None:
    """Before it handles them it dies of them; from then on it and all that it has started end in order."""
    for milliseconds in some(FIRST_SECOND, 6):
        process = subprocess.Popen(
            (RUNNER, "try", "--guest", guest.kernel.parent),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        time.sleep(milliseconds / 1000)  # the moment is what is tested
        process.send_signal(number)
        try:
            output, _ = process.communicate(timeout=30)
        finally:
            process.kill()
        # 13: a guest that has just begun to boot ignores its power button.
        assert process.returncode in {-number, 128 + number, 0, 13}, (milliseconds, process.returncode, output)
