"""A QEMU without a guest: a real process with real threads and real QMP on the inherited descriptor.

The script that includes this file defines ``BEHAVIOUR``, how it misbehaves; ``DEFAULTS`` lists the choices.
"""

import fcntl
import itertools
import json
import os
import resource
import signal
import socket
import struct
import sys
import threading
import time

DEFAULTS = {
    "before_greeting": None,  # None | "exit" | "hang" | "garbage" | "half a line" | "long line"
    "says": "fake-qemu: something is wrong with the fake",  # before it exits without a greeting
    "major": 7,
    "minor": 2,  # of its version, 7.2.0
    "as_source": None,  # None | "blocked" (a device of its) | "refuses" (the transfer) | "fails" (it, after the guest was stopped)
    # | "hangs" (in it)
    "as_successor": None,  # None | "exit at start" | "hang at start" | "exit" (with the state) | "another cpu" | "inmigrate" |
    # "shutdown" (the state it ends in) | "refuses cont" | "exits at cont" | "hangs at cont"
    "queues": None,  # None (taps are left alone) | "one" (its guest uses one queue of each) | "all"
    "vcpus": None,  # how many vCPU threads are reported; None: as many as -smp gives
    "tid": None,  # None | "gone" (a thread that does not exist) | "the runner's" | "same" (one thread for all)
    "at_cont": None,  # None | "shutdown" | "reset" | "panic" | "exit" | "abort" | "hang up" | "garbage" | "storm" (events) |
    # "ask to stop" (the runner, by SIGTERM)
    "at_powerdown": "shutdown",  # also: None (the guest ignores it), "reset", "panic", "exit", "no reply"
    "at_quit": "exit",  # also: None (hangs)
    "at_sigterm": "exit",  # also: None (ignores it)
    "silent": False,  # its guest writes nothing when it begins to run
    "deaf_to": None,  # a command that is never answered
    "console": None,  # None (reads nothing) | "echo" | "plays" (prints what is typed; "!reset" and such: what the guest does);
    # also a number: writes so many bytes for each input
    "ticks": None,  # seconds between two lines that its guest prints, "tick 0", "tick 1", … without end
    "agent": None,  # None (no agent) | "answers" | "deaf" | "refuses" | "garbage" | "flood" | "lazy" (takes it, does nothing) | "old"
    "unplugs": True,  # the guest releases a disk that is to be detached
    "vcpu_add": None,  # None (it is plugged) | "refused" | "gone" (its thread does not exist)
    "vcpu_del": "released",  # also: None (the guest keeps it), "later" (it can be asked the second time), "silently" (no event)
    # | "late" (when there is a file LOG.released)
    "cont_again": None,  # None (the guest runs on after it was stopped) | "deaf" | "refused"
    "fills": None,  # a directory whose file system is full as soon as the guest has a new disk
    "hostile": None,  # a phase and what it does then: see `misbehave`
    "noise": False,  # events and foreign replies between request and reply
    "records_owners_of": (),  # files whose owners it records when it starts
    "daemonize": False,  # leaves a grandchild that keeps the output open
}
behaviour = {**DEFAULTS, **globals()["BEHAVIOUR"]}
arguments = sys.argv[1:]
if arguments == ["--version"]:
    print(f"QEMU emulator version {behaviour['major']}.{behaviour['minor']}.0 (fake)")
    sys.exit(0)
values = {name: value for name, value in zip(arguments, arguments[1:], strict=False) if name.startswith("-")}
LOG = globals()["LOG"]


def record(what, **facts):
    with open(LOG, "a") as log:
        log.write(json.dumps({"fake": "qemu", "what": what, **facts}) + "\n")


def fd_of(chardev):
    option = next(word for word in arguments if word.startswith(f"socket,id={chardev},fd="))
    return int(option.rpartition("=")[2])


record(
    "start",
    argv=sys.argv,
    fds=sorted(int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")),
    mask=sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    cpus=sorted(os.sched_getaffinity(0)),
    uid=os.getuid(),
    held=[
        os.readlink(f"/proc/self/fd/{name}")
        for name in os.listdir("/proc/self/fd")
        if int(name) > 2 and os.path.exists(f"/proc/self/fd/{name}")
    ],
    owners=[os.stat(path).st_uid for path in behaviour["records_owners_of"]],
    lockable=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
)
signal.signal(signal.SIGTERM, signal.SIG_IGN if behaviour["at_sigterm"] is None else lambda *_: os._exit(0))
if behaviour["daemonize"]:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.execvp("sleep", ["sleep", "1000"])
        os._exit(0)
if behaviour["before_greeting"] == "exit":
    print(behaviour["says"], file=sys.stderr, flush=True)
    sys.exit(7)

incoming = [json.loads(arguments[at + 1]) for at, word in enumerate(arguments) if word == "-incoming"]
incoming = {each["channel-type"]: each["addr"] for each in incoming}
state = {"status": "inmigrate" if incoming else "running", "migration": "none"}
received_fds = []
greeted = threading.Event()
share_fds = [int(word.rpartition("=")[2]) for word in arguments if word.startswith("socket,id=share")]


def set_queues(flag):
    """Attach or detach all queues of taps but the first, and end where that fails, as ``virtio_net_set_queue_pairs`` does."""
    if behaviour["queues"] is None:
        return
    for option in (word for word in arguments if word.startswith("tap,")):
        for fd in next(part for part in option.split(",") if part.startswith("fds="))[4:].split(":")[1:]:
            try:
                fcntl.ioctl(int(fd), 0x400454D9, struct.pack("16sH22x", b"", flag))
            except OSError:
                print("virtio_net_set_queue_pairs: Assertion `!r' failed.", file=sys.stderr, flush=True)
                os.abort()


ATTACH, DETACH = 0x0200, 0x0400


def ask_shares(*requests):
    """Return what the virtiofsd of each share answers to the request for it, empty if it has ended."""
    found = []
    for number, request in zip(share_fds, requests, strict=True):
        try:
            os.write(number, request.encode())
            found.append(os.read(number, 1 << 16).decode())
        except OSError:
            found.append("")
    return found


def be_successor():
    """Wait for the source, as a QEMU does before it makes its machine, and let it continue."""
    if behaviour["as_successor"] == "exit at start":
        print("fake-qemu: something is wrong with the successor", file=sys.stderr, flush=True)
        sys.exit(7)
    if behaviour["as_successor"] == "hang at start":
        threading.Event().wait()
    main = socket.socket(fileno=int(incoming["main"]["str"]))
    with socket.socket(fileno=int(incoming["cpr"]["str"])) as listener:
        connection, _ = listener.accept()
        connection.recv(1 << 16)
        connection.close()
    set_queues(DETACH)
    threading.Thread(target=receive_state, args=(main,), daemon=True).start()


def receive_state(connection):
    text = connection.makefile().readline()
    greeted.wait()  # a QEMU loads the state in its main loop
    loaded = ask_shares(*(f"load {each}" for each in json.loads(text)))
    if behaviour["as_successor"] == "exit" or any(each != "loaded" for each in loaded):
        os._exit(7)
    if behaviour["queues"] == "all":
        set_queues(ATTACH)
    connection.sendall(b"done")
    connection.close()
    if behaviour["as_successor"] != "inmigrate":
        state["status"] = "shutdown" if behaviour["as_successor"] == "shutdown" else "paused"
    record("received", text=text)


def be_source(channels):
    """Send the state, and run on when that fails; in a thread."""
    try:
        sent = send_state({each["channel-type"]: each["addr"]["path"] for each in channels})
    except OSError:
        sent = False
    if sent is None or state["migration"] == "cancelled":
        return
    if sent:
        state["status"] = "postmigrate"
    elif state["status"] == "finish-migrate":
        runs()
    migration_is("completed" if sent else "failed")


def send_state(paths):
    """Return whether the successor has received the state, ``None`` if that shall never be known."""
    with socket.socket(socket.AF_UNIX) as cpr, socket.socket(socket.AF_UNIX) as main:
        cpr.connect(paths["cpr"])
        cpr.sendall(b"descriptors")
        cpr.recv(1)
        migration_is("active")
        main.connect(paths["main"])
        event("STOP")
        state["status"] = "finish-migrate"
        if behaviour["as_source"] == "hangs":
            return None
        if behaviour["as_source"] != "fails":
            saved = ask_shares(*("save" for _ in share_fds))
            if "" in saved:
                return False
            main.sendall(json.dumps(saved).encode() + b"\n")
        return behaviour["as_source"] != "fails" and main.recv(4) == b"done"


def runs():
    state["status"] = "running"
    event("RESUME")
    record("runs", pid=os.getpid())


def migration_is(status):
    state["migration"] = status
    event("MIGRATION", status=status)


def answer_about_updates(command, arguments):
    """Return the reply to a command that belongs to an update, ``None`` to any other."""
    if command == "qom-get":
        name = arguments["property"]
        more = ",dumpdtb=/file" if behaviour["as_source"] == "names a property" else ""
        return (
            f"pc-q35-11.1{more}-machine" if name == "type" else f"{name} {behaviour['as_successor'] == 'another cpu'}"
        )
    if command == "query-migrate":
        if behaviour["as_source"] == "blocked":
            return {"blocked-reasons": ["of the fake"]}
        return {} if state["migration"] == "none" else {"status": state["migration"], "error-desc": "of the fake"}
    if command == "migrate_cancel" and state["migration"] in {"setup", "active"}:
        if state["status"] == "finish-migrate":
            runs()
        migration_is("cancelled")
    if command == "migrate":
        migration_is("setup")
        threading.Thread(target=be_source, args=(arguments["channels"],), daemon=True).start()
    if command == "query-fdsets":
        opaque = [{"fd": fd, "opaque": "qemu-update"} for fd in received_fds]
        return [{"fdset-id": name, "fds": opaque} for name in hotplugged["add-fd"]]
    if command == "query-status":
        return {"status": state["status"], "running": state["status"] == "running"}
    return None


def refused(command):
    """Return whether a command is refused, as the fake is to misbehave."""
    return (command == "migrate" and behaviour["as_source"] == "refuses") or (
        command == "cont" and incoming and behaviour["as_successor"] == "refuses cont"
    )


qmp = socket.socket(fileno=fd_of("qmp"))
console = socket.socket(fileno=fd_of("console"))


def play(typed):
    printed, *deeds = typed.split("!")
    console.sendall(printed.encode())
    for deed in deeds:
        if deed.startswith("agent "):
            event("VSERPORT_CHANGE", id="agent", open=deed == "agent opens")
        elif deed in STATES:
            change_state(deed)
        else:
            do(deed)


def tick():
    for number in itertools.count():
        console.sendall(b"tick %d\r\n" % number)
        time.sleep(behaviour["ticks"])


def serve_console():
    while typed := console.recv(1 << 16):
        record("typed", text=typed.decode(errors="replace"))
        if behaviour["console"] == "plays":
            play(typed.decode(errors="replace"))
        elif behaviour["console"] == "echo":
            console.sendall(b"you typed " + typed + b"\r\n")
        else:
            console.sendall(b"x" * behaviour["console"] + b"END\r\n")


if behaviour["console"] is not None:
    threading.Thread(target=serve_console, daemon=True).start()
smp = dict(item.partition("=")[::2] for item in values["-smp"].split(","))
count, most = int(smp["cpus"]), int(smp.get("maxcpus", smp["cpus"]))
stop = threading.Event()
tids = []
ready = threading.Barrier(count + 1)


def vcpu(index):
    tids.append((index, threading.get_native_id()))
    ready.wait()
    stop.wait()


for index in range(count):
    threading.Thread(target=vcpu, args=(index,), daemon=True).start()
ready.wait()
tids = [tid for _, tid in sorted(tids)]
if behaviour["tid"] == "gone":
    tids[-1] = 4_000_000
if behaviour["tid"] == "the runner's":
    tids[-1] = os.getppid()
if behaviour["tid"] == "same":
    tids = [tids[0]] * count
if behaviour["vcpus"] is not None:
    tids = (tids * 9)[: behaviour["vcpus"]]


released = set()
"""The indexes of vCPUs that the machine was started with and that the guest has released."""
plugged = {}
"""Index → tid of each vCPU that was plugged, and what ends its thread."""
refusals = []


def vcpus():
    """Return index → tid and QOM path of each vCPU."""
    found = {at: (tid, f"/machine/unattached/device[{at}]") for at, tid in enumerate(tids) if at not in released}
    return {**found, **{at: (tid, f"/machine/peripheral/vcpu{at}") for at, (tid, _) in plugged.items()}}


def plug_vcpu(arguments):
    index, over, there = arguments["core-id"], threading.Event(), threading.Event()
    assert index not in vcpus()
    assert arguments["socket-id"] == arguments["thread-id"] == 0
    assert state["status"] == "paused", "a vCPU that is plugged while the guest runs may run before it is pinned"
    if behaviour["vcpu_add"] == "refused":
        return "refused by the fake"
    found = []

    def run():
        found.append(threading.get_native_id())
        there.set()
        over.wait()

    threading.Thread(target=run, daemon=True).start()
    there.wait()
    plugged[index] = (4_000_000 if behaviour["vcpu_add"] == "gone" else found[0], over)
    record("vcpus", indexes=sorted(vcpus()))
    return None


def unplug_vcpu(path):
    index = next(at for at, (_, each) in vcpus().items() if each == path)
    assert index > 0
    if behaviour["vcpu_del"] == "later" and not refusals:
        refusals.append(path)
        return "acpi: device unplug request for not supported device type: max-x86_64-cpu"
    if behaviour["vcpu_del"] is None:
        return None
    if behaviour["vcpu_del"] == "late":
        threading.Thread(target=release_vcpu_late, args=(index, path), daemon=True).start()
        return None
    release_vcpu(index, path)
    return None


def release_vcpu_late(index, path):
    while not os.path.exists(f"{LOG}.released"):
        time.sleep(0.01)
    os.unlink(f"{LOG}.released")
    release_vcpu(index, path)


def release_vcpu(index, path):
    if index in plugged:
        plugged.pop(index)[1].set()
    else:
        released.add(index)
    record("vcpus", indexes=sorted(vcpus()))
    if behaviour["vcpu_del"] != "silently":
        event("DEVICE_DELETED", path=path)


def refused_about_vcpus(command, arguments):
    """Do what changes vCPUs, and return why it is refused; ``None`` for any other command."""
    if command == "device_add" and arguments["driver"] == "max-x86_64-cpu":
        return plug_vcpu(arguments) or ""
    if command == "device_del" and arguments["id"].startswith("/machine/"):
        return unplug_vcpu(arguments["id"]) or ""
    return None


def list_vcpus():
    there = {**{at: (tid, "/") for at, tid in enumerate(tids)}, **vcpus()}  # it may report more than there are
    listed = [at for at in there if at not in released]
    return [{"cpu-index": at, "thread-id": there[at][0], "qom-path": there[at][1]} for at in reversed(listed)]


def slots():
    there = vcpus()
    return [
        {
            "type": "max-x86_64-cpu",
            "vcpus-count": 1,
            "props": {"core-id": at, "thread-id": 0, "socket-id": 0},
            **({"qom-path": there[at][1]} if at in there else {}),
        }
        for at in reversed(range(most))
    ]


def send(**message):
    qmp.sendall(json.dumps(message).encode() + b"\r\n")


def event(name, **data):
    send(event=name, data=data, timestamp={"seconds": 1, "microseconds": 2})


STATES = {  # what the guest does: the status that it has then, and QEMU's event
    "suspend": ("suspended", "SUSPEND"),
    "wake": ("running", "WAKEUP"),
    "break": ("internal-error", "STOP"),
    "crash kernel": ("running", "GUEST_CRASHLOADED"),
    "resume": ("running", "RESUME"),
    "novelty": ("running", "OF_A_NEWER_QEMU"),
}


def change_state(what):
    """Have the guest do one of :data:`STATES`."""
    state["status"], name = STATES[what]
    event(name)


def do(what):
    """Play what the guest does: *what* is one of the choices of ``at_cont``."""
    record("guest", does=what)
    if what == "shutdown":
        event("SHUTDOWN", guest=True, reason="guest-shutdown")
        event("STOP")
    elif what == "reset":
        event("SHUTDOWN" if reboot_is_shutdown else "RESET", guest=True, reason="guest-reset")
    elif what == "panic":
        event("GUEST_PANICKED", action="pause", info={})
    elif what == "hang":
        event("WATCHDOG", action="pause")
    elif what == "exit":
        os._exit(3)
    elif what == "abort":
        os.abort()
    elif what == "hang up":
        qmp.shutdown(socket.SHUT_RDWR)
    elif what == "garbage":
        qmp.sendall(b"\x00\xff this is not QMP\n")
    elif what == "storm":
        storm()


def storm():
    """Send events as fast as a hostile guest can cause them, with what it may make QEMU say in them."""
    for number in range(500):
        event("RESET", guest=True, reason=f"guest-reset {number}\nforged")
        event("WATCHDOG", action=f"none {number}\rforged")
        event("VSERPORT_CHANGE", id="agent", open=number % 2 == 0)
        event("BLOCK_IO_ERROR", **{"node-name": f"disk{number}", "operation": "write", "reason": "\x1b[2J"})
    event("SHUTDOWN", guest=True, reason="guest-shutdown")


def serve_agent(line):
    while request := line.recv(1 << 16):
        request = json.loads(request.lstrip(b"\xff"))
        record("agent", command=request["execute"], arguments=request["arguments"])
        if behaviour["agent"] == "garbage":
            line.sendall(b"\xff\xff\xff[]\n\xff{\n" + b'\xff{"return": -99}\n')
        elif behaviour["agent"] == "flood":
            while True:
                line.sendall(b"x" * 4096)
        elif behaviour["agent"] == "deaf":
            continue
        elif request["execute"] == "guest-sync-delimited":
            number = request["arguments"]["id"]
            if behaviour["agent"] == "old":  # answers only what another host asked before
                number += 1000
            line.sendall(b'{"return": "of an earlier one"}\n\xff{"return": %d}\n' % number)
        elif behaviour["agent"] == "refuses":
            line.sendall(b'{"error": {"class": "GenericError", "desc": "not today"}}\n')
        elif behaviour["agent"] == "answers":
            event("SHUTDOWN", guest=True, reason="guest-shutdown")


def without_end(data):
    while True:
        qmp.sendall(data)


MISBEHAVIOUR = {
    "exit": lambda _: os._exit(3),
    "abort": lambda _: os.abort(),
    "hang up": lambda _: qmp.shutdown(socket.SHUT_RDWR),
    "hang up and ignore SIGTERM": lambda _: (signal.signal(signal.SIGTERM, signal.SIG_IGN), qmp.shutdown(2)),
    "deaf": lambda _: None,
    "stop reading": lambda _: threading.Event().wait(),
    "garbage": lambda _: qmp.sendall(b"\x00\xff\n\r this is not QMP\n"),
    "half a line": lambda _: (qmp.sendall(b'{"return": {}, "i'), qmp.shutdown(socket.SHUT_RDWR)),
    "a line without end": lambda _: without_end(b"x" * (1 << 16)),
    "a million brackets": lambda _: qmp.sendall(b"[" * 1_000_000 + b"\n"),
    "no object": lambda _: qmp.sendall(b'[1, "a", null]\n'),
    "events without end": lambda _: without_end(b'{"event": "RTC_CHANGE", "data": {"offset": 1}}\n' * 1000),
    "one event of 3 MiB": lambda _: event("X", text="x" * (3 << 20)),
    "a foreign reply": lambda number: send(**{"return": {}, "id": f"{number}0"}),
    "a reply without return": lambda number: send(id=number),
    "a reply of another type": lambda number: send(**{"return": 7, "id": number}),
    "an error that is none": lambda number: send(error="no", id=number),
    "an error with a forged line": lambda number: send(error={"class": "X", "desc": "a\n\x1b[2Jb"}, id=number),
    "output without end": lambda _: [os.write(2, b"qemu: \x1b]0;x\x07\r\n" * 100) for _ in iter(int, 1)],
    "two greetings": lambda _: send(QMP=None),
}


def misbehave(phase, number):
    """Do what an attacker does in this *phase*, and return whether it was to be done."""
    if behaviour["hostile"] is None or behaviour["hostile"][0] != phase:
        return False
    record("hostile", phase=phase)
    MISBEHAVIOUR[behaviour["hostile"][1]](number)
    return True


if incoming:
    be_successor()
else:
    set_queues(DETACH)
    if behaviour["queues"] == "all":
        set_queues(ATTACH)
misbehave("greeting", "")
before = behaviour["before_greeting"]
if before == "garbage":
    qmp.sendall(b"SSH-2.0-OpenSSH\r\n")
elif before == "half a line":
    qmp.sendall(b'{"QMP": {"ver')
    sys.exit(0)
elif before == "long line":
    qmp.sendall(b'{"QMP": "' + b"x" * (5 << 20) + b'"}\n')
if before == "hang":
    threading.Event().wait()
send(
    QMP={
        "version": {"qemu": {"major": behaviour["major"], "minor": behaviour["minor"], "micro": 0}, "package": "fake"},
        "capabilities": ["oob"],
    }
)
reboot_is_shutdown = "reboot=shutdown" in values["-action"]
hotplugged = {"add-fd": [], "blockdev-add": [], "object-add": [], "device_add": []}
"""What was added and not taken back, by the command that adds it."""
iothreads = {}
sizes = {}


def iothread(name):
    iothreads[name] = threading.get_native_id()
    started.wait()
    stop.wait()


started = threading.Barrier(2)


def fill(directory):
    with open(f"{directory}/filler", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass


def change(command, arguments):
    """Add or take back a part of a disk, as QEMU does; return the reply."""
    adding = {"remove-fd": "add-fd", "blockdev-del": "blockdev-add", "object-del": "object-add"}.get(command)
    if command == "add-fd":
        arguments.setdefault("fdset-id", max(hotplugged["add-fd"], default=0) + 1)
    name = next(arguments[key] for key in ("fdset-id", "node-name", "id") if key in arguments)
    if adding is not None:
        hotplugged[adding].remove(name)
        iothreads.pop(name, None)
        return {}
    if command == "device_del":
        if behaviour["unplugs"]:
            hotplugged["device_add"].remove(name)
            event("DEVICE_DELETED", device=name, path="/")
        return {}
    hotplugged[command].append(name)
    if command == "device_add" and behaviour["fills"]:
        fill(behaviour["fills"])
    if command == "object-add":
        threading.Thread(target=iothread, args=(name,), daemon=True).start()
        started.wait()
    if command == "blockdev-add":
        sizes[name] = 1 << 20
    return {"fdset-id": name, "fd": received_fds[-1]} if command == "add-fd" else {}


def answer(command, arguments):
    """Return the reply to a command."""
    if (reply := answer_about_updates(command, arguments)) is not None:
        return reply
    if command == "query-hotpluggable-cpus":
        return slots()
    if command == "query-cpus-fast":
        return list_vcpus()
    if command == "query-iothreads":
        return [{"id": name, "thread-id": tid} for name, tid in iothreads.items()]
    if command == "query-named-block-nodes":
        return [{"node-name": name, "image": {"virtual-size": sizes[name]}} for name in hotplugged["blockdev-add"]]
    if command == "block_resize":
        sizes[arguments["node-name"]] = arguments["size"]
    reply = {}
    if command in {*hotplugged, "remove-fd", "blockdev-del", "object-del", "device_del"}:
        reply = change(command, arguments)
        record("hotplug", **hotplugged)
    return reply


def requests():
    """Yield each request; like QEMU, need no line end after it."""
    text = ""
    while True:
        data, fds, *_ = socket.recv_fds(qmp, 1 << 16, 16)
        received_fds.extend(fds)
        if not data:
            break
        text = (text + data.decode()).lstrip()
        while text:
            try:
                request, end = json.JSONDecoder().raw_decode(text)
            except ValueError:  # the rest is to come
                break
            text = text[end:].lstrip()
            yield request


for request in requests():
    command, number = request["execute"], {"id": request["id"]} if "id" in request else {}
    record("command", command=command, pid=os.getpid())
    if refused(command):
        send(error={"class": "GenericError", "desc": "refused by the fake"}, **number)
        continue
    if command == "cont" and incoming and behaviour["as_successor"] == "exits at cont":
        os._exit(7)
    if command == "cont" and incoming and behaviour["as_successor"] == "hangs at cont":
        continue
    if misbehave(command, number):
        continue
    if behaviour["noise"]:
        event("NOISE", text="x" * (1 << 20))
        send(**{"return": {}, "id": "unknown"})
        send(**{"return": {}})
        send(error={"class": "GenericError", "desc": "of no command"}, id=["list"])
    refusal = refused_about_vcpus(command, request.get("arguments", {}))
    if refusal:
        send(error={"class": "GenericError", "desc": refusal}, **number)
        continue
    if command == "stop":
        state["status"] = "paused"
        event("STOP")
    if command == "cont" and state["status"] == "paused" and not incoming:
        if behaviour["cont_again"] == "deaf":
            continue
        if behaviour["cont_again"] == "refused":
            send(error={"class": "GenericError", "desc": "refused by the fake"}, **number)
            continue
        runs()
        send(**{"return": {}}, **number)
        continue
    reply = {} if refusal is not None else answer(command, request.get("arguments", {}))
    if command == "query-commands":
        reply = [{"name": name} for name in ("query-status", "quit", "query-commands", "device_add")]
    if command == "query-balloon":
        send(error={"class": "DeviceNotActive", "desc": "No balloon device has been activated"}, **number)
        continue
    if command == "system_wakeup":
        change_state("wake")
    if command == "announce-self":
        event("ANNOUNCED", text="of the fake")
    if command == "set-action":
        reboot_is_shutdown = request["arguments"]["reboot"] == "shutdown"
    if command == "quit" and behaviour["at_quit"] is None:
        continue
    if command == behaviour["deaf_to"]:
        continue
    if command == "system_powerdown" and behaviour["at_powerdown"] == "no reply":
        continue
    send(**{"return": reply}, **number)
    if command == "qmp_capabilities":
        greeted.set()
    if command == "quit":
        event("SHUTDOWN", guest=False, reason="host-qmp-quit")
        os._exit(0)
    if command == "cont":
        runs()
        if behaviour["agent"] is not None:
            agent = socket.socket(fileno=fd_of("agent"))
            threading.Thread(target=serve_agent, args=(agent,), daemon=True).start()
            event("VSERPORT_CHANGE", id="other", open=False)
            event("VSERPORT_CHANGE", id="agent", open=behaviour["console"] != "plays")
        if not behaviour["silent"]:  # last: tests wait for this, and then have the agent open its port
            console.sendall(b"guest: runs\r\n")
        if behaviour["ticks"] is not None:
            threading.Thread(target=tick, daemon=True).start()
        if behaviour["at_cont"] == "ask to stop":
            os.kill(os.getppid(), signal.SIGTERM)
        do(behaviour["at_cont"])
        if behaviour["hostile"] is not None:
            threading.Timer(0.05, misbehave, ("the guest runs", "")).start()
    if command == "system_powerdown":
        event("POWERDOWN")
        if state["status"] != "suspended":
            do(behaviour["at_powerdown"])
signal.pause()
