#!/usr/bin/env python3
"""A kubectl for ``upgrade-runners``: the directory that FAKE_CLUSTER names has a directory for each pod, with its node and its files.

A pod that has the file ``bad`` refuses the program; one with ``slow`` waits in its upgrade until that
of the pod that is named there has begun.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

cluster, words = Path(os.environ["FAKE_CLUSTER"]), sys.argv[1:]
namespace, command, *rest = words[1:]
assert (words[0], namespace) == ("-n", "instances")


def state(pod):
    digest = (pod / "digest").read_text() if (pod / "digest").exists() else ""
    runner = {"version": "0.1.0", "generation": int(bool(digest)), "digest": digest, "outcome": None, "reason": ""}
    return {"version": 1, "runner": runner}


if command == "get":
    pods = [
        {"metadata": {"name": each.name}, "spec": {"nodeName": (each / "node").read_text()}}
        for each in cluster.iterdir()
        if each.is_dir()
    ]
    if node := [word for word in ",".join(rest).split(",") if word.startswith("spec.nodeName=")]:
        pods = [each for each in pods if each["spec"]["nodeName"] == node[0].partition("=")[2]]
    print(json.dumps({"items": pods}))
    sys.exit()

rest = [word for word in rest if word != "-i"]
pod, argv = cluster / rest[0], rest[rest.index("--") + 1 :]
assert rest[1:3] == ["-c", "instance"]
if argv[0] == "sh":
    argv[-1] = str(pod) + argv[-1]
    (pod / "run/instance-runner").mkdir(parents=True, exist_ok=True)
    sys.exit(subprocess.run(argv, stdin=sys.stdin, check=False).returncode)
assert argv[:3] == ["instance-runner", "ctl", "--json"]
if argv[3] == "upgrade":
    (_, place), (_, digest) = argv[4:6], argv[6:8]
    with (cluster / "begun").open("a") as begun:
        begun.write(f"{pod.name}\n")
    if (pod / "bad").exists():
        print("instance-runner: cannot renew the runner now: a disk is being attached (for 7 s)", file=sys.stderr)
        sys.exit(4)
    if (pod / "slow").exists():
        while (pod / "slow").read_text() not in (cluster / "begun").read_text().split():
            time.sleep(0.01)
    lines = "find . -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum"
    found = subprocess.run(["sh", "-c", lines], cwd=str(pod) + place, check=True, capture_output=True, text=True).stdout
    assert digest == "sha256:" + found.split()[0]
    (pod / "digest").write_text(digest)
print(json.dumps(state(pod)))
