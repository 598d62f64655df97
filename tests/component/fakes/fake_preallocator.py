"""A preallocator that takes no memory, and may fail; the script's head sets ``NAME``, ``LOG`` and ``BEHAVIOUR``."""

import json
import os
import signal
import sys

behaviour = {"does": "exit", "output": "nothing is left", "status": 3, **globals()["BEHAVIOUR"]}
fds = sorted(int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}"))
with open(globals()["LOG"], "a") as log:
    log.write(json.dumps({"fake": globals()["NAME"], "what": "start", "argv": sys.argv, "fds": fds}) + "\n")
if behaviour["does"] == "hang":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pause()
elif behaviour["does"] == "die":
    os.kill(os.getpid(), signal.SIGKILL)
elif behaviour["does"] == "fail":
    print(behaviour["output"], flush=True)
    sys.exit(behaviour["status"])
