"""The node as a QEMU process, which ends with the block that started it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import time
import tty
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex

from tests.emulated_node import artefacts, cache, spares
from tests.emulated_node.cache import say
from tests.emulated_node.shape import THREADS, Shape
from tests.support.newest_qemu import PROGRAM, newest_qemu

CPU_MODEL = {"kvm": "host", "tcg": "EPYC,-erms,-avx,-avx2,-f16c,-fma,+svm"}
"""With TCG a model that has RDRAND: without it, gathering entropy dominates the boot. Without ERMS: the kernel and glibc copy
and clear by `rep movsb` and `rep stosb` then, which TCG emulates byte by byte; all tests take a tenth less time without. Without
AVX, which glibc's functions use wherever it is: TCG emulates what SSE does in less time. With SVM the node has KVM: TCG emulates
the virtualization of AMD's CPUs, and not that of Intel's."""
FROM_AN_IMAGE = (
    *("unshare", "--mount", "sh", "-c"),
    'mount -t erofs -o ro "$1" "$2" && qemu=$2/$3 && shift 3 && exec "$qemu" "$@"',
    "sh",
)
"""A program from an image that is mounted for it alone: the mount is gone with the process, however that ends."""
COMPILE = (
    *("unshare", "--mount", "sh", "-ec"),
    """mount -t erofs -o ro "$1" "$2"
    mount --bind "$3" "$2/project"
    mount -t devtmpfs dev "$2/dev"
    unset PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX
    chroot "$2" python3 -m compileall -q /project/runner /project/tests
    mount -t sysfs sys "$2/sys"
    exec chroot "$2" sh -c 'cd /project && python3 -m pytest --collect-only -q -p no:cacheprovider tests/node'""",
    "sh",
)
"""The node's Python and pytest, run natively, compile what has changed in the checkout: an emulated CPU takes minutes for it."""
TIMERS = ("no_timer_check",)
"""On a loaded machine one emulated boot in a few dozen panics in the kernel's check of the 8254 timer without."""
ONE_CLOCK = ("tsc=reliable",)
"""All of TCG's time-stamp counters are one clock, but the kernel finds them apart, because the CPUs that it compares run one after
the other; it takes seconds for that, and reads the time from the HPET then, which all CPUs wait for. But with it, a Debian that is a
guest of the node's KVM hangs early: all of its timers are eighteen minutes away."""
ALIVE_WITHIN = 300
"""Seconds without a sign of life after which a node that was up counts as hung; it gives one every twenty."""
PORT = "virtserialport,chardev={0},name={0}"
TRIAL_SECONDS = 20


@dataclass(frozen=True)
class Outcome:
    """The report of a node: the seconds until it was up, and the status of its job; ``None`` where it did not get so far."""

    up_after: float | None
    status: int | None


def newest_emulator() -> Sequence[str]:
    """Return the command that is the newest QEMU of Debian's backports."""
    place = cache.directory() / "mounted"
    image = cache.fetch(newest_qemu())
    place.mkdir(exist_ok=True)
    return (*FROM_AN_IMAGE, str(image), str(place), PROGRAM)


def accelerator(chosen: str, qemu: Sequence[str], kernel: Path) -> str:
    """Return ``kvm`` or ``tcg``; *auto* takes KVM only where a bounded trial has run this very kernel under it.

    A ``/dev/kvm`` that opens proves nothing: nested without hardware help, it may hang at the kernel's first
    instructions. The verdict is kept until the machine is booted again.
    """
    if chosen != "auto":
        return chosen
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return "tcg"
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    verdict = cache.directory() / "kvm-verdict"
    question = f"{boot} {kernel.name}"
    with contextlib.suppress(FileNotFoundError, ValueError):
        asked, answer = verdict.read_text().rsplit(" ", 1)
        if asked == question and answer in CPU_MODEL:
            return answer
    say(f"trying KVM for at most {TRIAL_SECONDS} s")
    answer = "kvm" if runs_under_kvm(qemu, kernel) else "tcg"
    say(f"KVM {'works' if answer == 'kvm' else 'does not run the kernel'}: using {answer}")
    verdict.write_text(f"{question} {answer}")
    return answer


def compile_checkout(image: Path) -> None:
    """Compile what has changed in the checkout, by the Python of the node's root *image*; where that fails, the node does it."""
    with tempfile.TemporaryDirectory() as directory:
        argv = [*COMPILE, str(image), directory, str(artefacts.PROJECT)]
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        say(f"each program compiles its modules in the node: {(done.stdout + done.stderr).strip()}")


def runs_under_kvm(qemu: Sequence[str], kernel: Path) -> bool:
    """Boot *kernel* once under KVM and return whether its first program printed the word it was given."""
    word = f"trial-{token_hex(8)}"
    with tempfile.TemporaryDirectory() as directory:
        initrd = Path(directory) / "initrd"
        initrd.write_bytes(artefacts.initrd(Shape(cpus=4)))
        argv = [
            *(*qemu, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
            *("-M", "q35", "-accel", "kvm", "-cpu", "host", "-m", "256M", "-smp", "4,sockets=2,cores=1,threads=2"),
            *("-kernel", str(kernel), "-initrd", str(initrd), "-append", f"console=ttyS0 quiet node.trial={word}"),
            *("-serial", "stdio"),
        ]
        try:
            done = subprocess.run(
                argv,
                timeout=TRIAL_SECONDS,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False
    return word.encode() in done.stdout


def arguments(
    qemu: Sequence[str],
    shape: Shape,
    accel: str,
    kernel: Path,
    image: Path,
    run: Path,
    *,
    word: str,
    disks: Mapping[str, Path],
    writable: Mapping[str, Path],
    interactive: bool,
    systemd: bool,
    devices: bool,
    tap: str | None,
    hpet: bool,
) -> list[str]:
    """Return QEMU's command line but for the two descriptors (``terminal``, ``events``).

    An interactive node's terminal is a console; otherwise it is a port, which is no tty, so that programs write logs.
    """
    boot_options = [
        "console=ttyS0",
        "quiet",
        *TIMERS,
        *(ONE_CLOCK if accel == "tcg" and not hpet else ()),
        "panic=-1",
        "rcupdate.rcu_expedited=1",
        f"node.word={word}",
    ]
    if interactive:
        boot_options.append("node.live")
    if systemd:
        boot_options.append("node.systemd")
    if devices:
        boot_options.append("intel_iommu=on")
    per_node = shape.memory_mib // shape.numa_nodes
    numa = [
        option
        for numa_node in range(shape.numa_nodes)
        for option in (
            *("-object", f"memory-backend-ram,id=m{numa_node},size={per_node}M"),
            *("-numa", f"node,nodeid={numa_node},memdev=m{numa_node}"),
            *("-numa", f"cpu,node-id={numa_node},socket-id={numa_node}"),
        )
    ]
    shares = [
        option
        for tag, path, mode in (("project", artefacts.PROJECT, ",readonly=on"), ("results", run, ""))
        for option in (
            *("-fsdev", f"local,id={tag},path={path},security_model=none,multidevs=remap{mode}"),
            *("-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"),
        )
    ]
    drives = [
        option
        for serial, path in {**disks, **writable}.items()
        for option in (
            *("-drive", f"if=none,id={serial},file={path},format=raw{'' if serial in writable else ',readonly=on'}"),
            *("-device", f"virtio-blk-pci,drive={serial},serial={serial}"),
        )
    ]
    return [
        *(*qemu, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-name", "node"),
        *(
            "-M",
            "q35,kernel-irqchip=split" if devices else "q35",
            "-accel",
            accel if accel == "kvm" else "tcg,thread=multi",
            "-cpu",
            CPU_MODEL[accel],
        ),
        *("-m", f"{per_node * shape.numa_nodes}M"),
        *("-smp", f"{shape.cpus},sockets={shape.numa_nodes},cores={shape.cores},threads={THREADS}"),
        *numa,
        *("-kernel", str(kernel), "-initrd", str(run / "initrd")),
        *("-append", " ".join(boot_options)),
        *(spares.iommu() if devices else ()),
        *("-chardev", f"file,id=console,path={run / 'console.log'}", "-serial", "chardev:console"),
        *("-device", "virtio-rng-pci"),
        *("-drive", f"if=none,id=root,file={image},format=raw,readonly=on", "-device", "virtio-blk-pci,drive=root"),
        *drives,
        *shares,
        *("-device", "virtio-serial-pci"),
        *("-device", "virtconsole,chardev=terminal" if interactive else PORT.format("terminal")),
        *("-device", PORT.format("events")),
        *(("-netdev", f"tap,id=tap,ifname={tap},script=no,downscript=no") if tap else ()),
        *(("-device", "virtio-net-pci,netdev=tap,romfile=") if tap else ()),
        # last: a device without a bus would be put onto their host bridges
        *(spares.spare_devices(run, shape.numa_nodes) if devices else ()),
    ]


@contextlib.contextmanager
def running(argv: list[str], log: Path) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Run QEMU with a socket for the node's terminal and one for its events; it ends with the block.

    ``setpriv --pdeathsig`` ends it when this process is killed.
    """
    terminal, node_terminal = socket.socketpair()
    events, node_events = socket.socketpair()
    with terminal, events, log.open("wb") as errors:
        with node_terminal, node_events:
            process = subprocess.Popen(
                [
                    *("setpriv", "--pdeathsig", "KILL"),
                    *argv,
                    *("-chardev", f"socket,id=terminal,fd={node_terminal.fileno()}"),
                    *("-chardev", f"socket,id=events,fd={node_events.fileno()}"),
                ],
                pass_fds=(node_terminal.fileno(), node_events.fileno()),
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C is for us (or for the node's shell), not for QEMU
            )
        try:
            yield terminal, events
        finally:
            process.kill()
            process.wait()


@contextlib.contextmanager
def raw_terminal() -> Iterator[None]:
    """Have the terminal pass every key, Ctrl-C included, to the node's shell."""
    before = termios.tcgetattr(0)
    tty.setraw(0)
    try:
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)


def terminal_size() -> tuple[int, int]:
    """Return columns and lines of our terminal, or a size that suits logs."""
    with contextlib.suppress(OSError):
        lines, columns, _, _ = struct.unpack("4H", fcntl.ioctl(1, termios.TIOCGWINSZ, bytes(8)))
        if columns:
            return columns, lines
    return 120, 40


def boot(
    shape: Shape,
    accel: str,
    run: Path,
    *,
    kernel: Path,
    disks: Mapping[str, Path],
    interactive: bool,
    systemd: bool,
    devices: bool,
    writable: Mapping[str, Path] | None = None,
    tap: str | None = None,
    hpet: bool = False,
    emulator: Path | None = None,
    boot_seconds: float,
    job_seconds: float,
    alive_within: float = ALIVE_WITHIN,
) -> Outcome:
    """Boot the node, show the output of its job, and return its report.

    *run* is the directory the node sees as ``/results``; the scripts ``job`` and ``shell`` in it are run (``node-job``).
    *disks* are read-only ones, by the serial numbers the node sees, and it may write to the *writable* ones; *tap* is an
    interface that shall be its network. *hpet* is for an emulated node that has guests of distributions (:data:`ONE_CLOCK`).
    After *job_seconds*, or *alive_within* seconds without a sign of life, the node is ended.
    The *emulator* is the newest QEMU if none is named, so that a node is the same on machines of any release.
    """
    image = cache.fetch(artefacts.root())
    compile_checkout(image)
    (run / "initrd").write_bytes(artefacts.initrd(shape))
    word = f"node-{token_hex(8)}"
    qemu = [str(emulator)] if emulator else newest_emulator()
    accel = accelerator(accel, qemu, kernel)
    argv = arguments(
        qemu,
        shape,
        accel,
        kernel,
        image,
        run,
        word=word,
        disks=disks,
        writable=writable or {},
        interactive=interactive,
        systemd=systemd,
        devices=devices,
        tap=tap,
        hpet=hpet,
    )
    started = time.monotonic()
    say(f"booting {shape.cpus} CPUs on {shape.numa_nodes} NUMA nodes ({accel}); logs: {run}")
    with running(argv, run / "qemu.log") as (terminal, events), contextlib.ExitStack() as stack:
        listener = Listener(terminal, events, word)
        up = listener.wait_for("up", started + boot_seconds)
        if up is None:
            return Outcome(None, None)
        up_after = time.monotonic() - started
        say(f"up after {up_after:.1f} s")
        if interactive:
            stack.enter_context(raw_terminal())
            listener.take_keys()
        listener.alive_within = alive_within if not interactive else None
        done = listener.wait_for("done", time.monotonic() + job_seconds if not interactive else float("inf"))
        if listener.silent():
            say(f"the node hung: no sign of life for {alive_within:g} s")
        if done is not None:
            listener.wait_for("nothing more", time.monotonic() + 30)  # the rest of the terminal's output
    return Outcome(up_after, None if done is None else int(done))


class Listener:
    """The node's terminal, which is shown as it comes, and its events, which count only with the word of this boot.

    After *alive_within* seconds without an event, if it is given, the node counts as :meth:`silent`, and is not waited for.
    """

    def __init__(self, terminal: socket.socket, events: socket.socket, word: str) -> None:
        self.terminal, self.events, self.word = terminal, events, word
        self.alive_within: float | None = None
        self.last_event = time.monotonic()
        self.received = b""
        self.selector = selectors.DefaultSelector()
        self.selector.register(terminal, selectors.EVENT_READ)
        self.selector.register(events, selectors.EVENT_READ)

    def silent(self) -> bool:
        """Tell whether the node should have given a sign of life, and has not."""
        return self.alive_within is not None and time.monotonic() >= self.last_event + self.alive_within

    def take_keys(self) -> None:
        """Send the keys typed here to the node's terminal."""
        self.selector.register(0, selectors.EVENT_READ)

    def wait_for(self, event: str, until: float) -> str | None:
        """Return the text after *event*, or ``None`` when the time is over, or the node is silent or has ended."""
        prefix = f"{event} {self.word}"
        while True:
            for line in self.lines():
                if line == prefix or line.startswith(f"{prefix} "):
                    return line.removeprefix(prefix).strip()
            if not {self.terminal.fileno(), self.events.fileno()} & {key.fd for key in self.registered()}:
                return None
            end = until if self.alive_within is None else min(until, self.last_event + self.alive_within)
            left = end - time.monotonic()
            ready = self.selector.select(None if left == float("inf") else max(left, 0))
            if not ready:
                return None
            for key, _ in ready:
                self.read(key.fd)

    def registered(self) -> list[selectors.SelectorKey]:
        """Return the descriptors that are still open."""
        return list(self.selector.get_map().values())

    def lines(self) -> Iterator[str]:
        """Yield and remove the complete event lines received so far."""
        while b"\n" in self.received:
            line, self.received = self.received.split(b"\n", 1)
            yield line.decode(errors="replace").strip()

    def read(self, fd: int) -> None:
        """Read from one of the descriptors: a key, output of the terminal, or an event."""
        if fd == 0:
            keys = os.read(0, 4096)
            if keys:
                self.terminal.sendall(keys)
            else:
                self.selector.unregister(0)
            return
        with contextlib.suppress(ConnectionResetError):
            data = os.read(fd, 65536)
            if data:
                if fd == self.events.fileno():
                    self.received += data
                    self.last_event = time.monotonic()
                else:
                    sys.stdout.buffer.write(data)
                    sys.stdout.buffer.flush()
                return
        self.selector.unregister(fd)
