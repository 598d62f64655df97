"""A dnsmasq, virtiofsd or anchor that does nothing but misbehave; the script's head sets ``NAME``, ``LOG``, ``BEHAVIOUR``."""

import json
import os
import signal
import sys

behaviour = {"dies_after": None, "ignores_sigterm": False, "version": "virtiofsd 1.13.2", **globals()["BEHAVIOUR"]}
if sys.argv[1:] == ["--version"]:
    print(behaviour["version"])
    sys.exit(0)
with open(globals()["LOG"], "a") as log:
    mask = sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    opened = {
        name: os.readlink(f"/proc/self/fd/{name}")
        for name in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{name}")
    }
    facts = {
        "fake": globals()["NAME"],
        "what": "start",
        "argv": sys.argv,
        "mask": mask,
        "pid": os.getpid(),
        "open": opened,
    }
    log.write(json.dumps(facts) + "\n")
if behaviour["ignores_sigterm"]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if behaviour["dies_after"] is not None:
    signal.setitimer(signal.ITIMER_REAL, behaviour["dies_after"])  # SIGALRM's default action ends us
while True:
    signal.pause()
