"""A dnsmasq, virtiofsd or anchor that does nothing but misbehave; the script's head sets ``NAME``, ``LOG``, ``BEHAVIOUR``."""

import json
import os
import signal
import socket
import sys
import threading

DEFAULTS = {
    "dies_after": None,
    "refuses": None,  # what it prints when it ends at its start
    "silent": False,  # a dnsmasq that never says that it serves
    "says": (),  # a dnsmasq's lines, the next of which it prints at each SIGUSR1
    "ignores_sigterm": False,
    "version": "virtiofsd 1.13.2",
    "at_load": None,  # of another virtiofsd's state: None | "exit" | "refuse" | "hang"
}
behaviour = {**DEFAULTS, **globals()["BEHAVIOUR"]}
if sys.argv[1:] == ["--version"]:
    print(behaviour["version"])
    sys.exit(0)
if globals()["NAME"] == "passt" and behaviour["refuses"] is None:
    [stream] = (int(word.removeprefix("--fd=")) for word in sys.argv if word.startswith("--fd="))
    with socket.socket(fileno=os.dup(stream)) as client:
        try:
            if not client.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                sys.exit(0)  # it is asked whether it starts, with a client that has gone
        except BlockingIOError:
            pass  # there is one
LOG = globals()["LOG"]


def record(what, **facts):
    with open(LOG, "a") as log:
        log.write(json.dumps({"fake": globals()["NAME"], "what": what, "pid": os.getpid(), **facts}) + "\n")


def serve(listener):
    """Serve one QEMU, as virtiofsd does: save its state and load another one's, and end with the connection."""
    connection, _ = listener.accept()
    state = f"state of {os.getpid()}"
    while request := connection.recv(1 << 16).decode():
        if request == "save":
            connection.sendall(state.encode())
        elif behaviour["at_load"] == "exit":
            os._exit(7)
        elif behaviour["at_load"] == "refuse":
            print("fake-virtiofsd: cannot load it", file=sys.stderr, flush=True)
            connection.sendall(b"failed")
        elif behaviour["at_load"] is None:
            state = request.removeprefix("load ")
            record("loaded", state=state)
            connection.sendall(b"loaded")
    if not behaviour["ignores_sigterm"]:
        os._exit(0)


record(
    "start",
    argv=sys.argv,
    mask=sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    open={
        name: os.readlink(f"/proc/self/fd/{name}")
        for name in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{name}")
    },
)
if behaviour["refuses"] is not None:
    print(behaviour["refuses"], file=sys.stderr, flush=True)
    sys.exit(1)
if globals()["NAME"] == "dnsmasq" and not behaviour["silent"]:
    print("dnsmasq: started, version 2.90 DNS disabled", file=sys.stderr, flush=True)
lines = iter(behaviour["says"])
signal.signal(signal.SIGUSR1, lambda *_: print(next(lines), file=sys.stderr, flush=True))
if behaviour["ignores_sigterm"]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if behaviour["dies_after"] is not None:
    signal.setitimer(signal.ITIMER_REAL, behaviour["dies_after"])  # SIGALRM's default action ends us
if globals()["NAME"] == "virtiofsd":
    [listening] = (int(word.removeprefix("--fd=")) for word in sys.argv if word.startswith("--fd="))
    threading.Thread(target=serve, args=(socket.socket(fileno=listening),), daemon=True).start()
while True:
    signal.pause()
