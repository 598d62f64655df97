"""The parts of which the tests consist: what ``tests/run`` runs in each tier, in this order."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """A command of bash, and the tiers in which it runs; of a *lane* no more parts than :data:`LANES` allows run at once."""

    name: str
    tiers: str
    command: str
    lane: str = "here"


TIERS = {"newcomer": 2, "gate": 2, "all": 3, "soak": 2, "kubelet": 2, "node": 2}
"""How many parts of a tier run at once. CI's machine has two CPUs, and most parts compute nearly all the time, so that a third makes
the whole hardly shorter, and each step of a test that other processes take for it longer by half. The long ones that `all` has besides
wait for half of their time."""
ALWAYS, SHORT = "newcomer gate all", "newcomer gate"
LANES = {"here": 2, "machine": 1, "node": 2}
"""Two parts that start real guests on this machine would see each other's links; a third node would only slow two others down."""

SHOWN = "not node_only"
"""Of the tests of the node and of the machine those that `all` runs."""
COMPONENT = "tests/component/controller tests/component/test_renewal.py tests/component/test_qemu_update.py"
"""About half of the time of the component tests."""

SMALL = "RUNNER_VOLUME=8m unshare --mount prlimit --nofile=1024:"
"""With the soft limit with which containerd 2 starts containers, and state directories in a small volume."""

LOWEST = (
    "uv venv -q --clear .cache/lowest && export VIRTUAL_ENV=$PWD/.cache/lowest PATH=$PWD/.cache/lowest/bin:$PATH &&"
    " uv pip install -q --resolution lowest-direct -e . && uv pip install -q --group dev &&"
)
"""With the oldest packages that pyproject.toml allows; all other parts have those of uv.lock."""

PARTS = (
    # A node takes longest, so it begins; what follows is ordered so that no long part begins last.
    Part("the emulated node: what no fake can show", "gate", "tests/images/run --only gate", "node"),
    Part(
        "the emulated node: what no fake can show, what needs 16 CPUs, the images",
        "all",
        f"tests/images/run --only gate -- -m '(gate or many_cpus) and {SHOWN}'",
        "node",
    ),
    Part(
        "the emulated node with 8 CPUs",
        "all",
        f"tests/node/run --cpus 8 -- -m 'not gate and not many_cpus and {SHOWN}'",
        "node",
    ),
    Part(
        "unit and component tests with the oldest packages and small limits",
        "all",
        f"{LOWEST} {SMALL} pytest -q tests/unit tests/component",
    ),
    Part(
        "the rest of the component tests",
        SHORT,
        f"pytest -q tests/component {COMPONENT.replace('tests/', '--ignore=tests/')}",
    ),
    Part("component tests of the controller, of renewals and updates", SHORT, f"pytest -q {COMPONENT}"),
    Part("types", ALWAYS, "mypy"),
    Part("unit tests", SHORT, "pytest -q tests/unit -m 'not kubelet_model'"),
    Part(
        "the heart of tests/machine: the real program as PID 1, with a real guest",
        SHORT,
        "pytest tests/machine -m heart",
        "machine",
    ),
    Part(
        "asynchronous code",
        "gate all",
        # It takes a minute of CPU time for the program's files that use trio and for what ruff has no rule for, and several for all
        # files and rules. ASYNC9xx ask for a checkpoint on every path; what a test does wrong is seen when it runs.
        "git grep -lzE '^ *(import|from) trio' -- 'runner/*.py' | xargs -0 flake8-async --enable=\"$("
        "printf 'ASYNC%s,' 101 102 103 104 106 111 112 113 114 118 120 121 122 123 124 125 126 127 128 211 231 232)\"",
    ),
    Part("format", ALWAYS, "ruff format --check ."),
    Part("lint", ALWAYS, "ruff check ."),
    Part(
        "scripts",
        ALWAYS,
        "git ls-files -z | xargs -0 awk 'FNR == 1 && /^#!.*sh$|^# shellcheck/ { print FILENAME } { nextfile }' | xargs shellcheck -x",
    ),
    Part(
        "the machine: the real program as PID 1, with real guests",
        "all",
        f"pytest tests/machine -m '{SHOWN}'",
        "machine",
    ),
    Part(
        "the emulated node with systemd, containerd and podman",
        "all",
        f"tests/images/run --only systemd -- -m '{SHOWN}'",
        "node",
    ),
    Part(
        "the emulated node with an IOMMU and devices to pass",
        "all",
        f"tests/node/run --devices --cpus 8 -- -m '{SHOWN}'",
        "node",
    ),
    Part("the images on this machine; the Kubernetes manifests", "all", "tests/images/run --only here", "machine"),
    Part(
        "the benchmark once, quickly: that it runs, not what it measures",
        "all",
        "tests/benchmarks/run --quick",
        "machine",
    ),
    Part(
        "the attacks",
        "soak",
        "RUNNER_SOAK=${RUNNER_SOAK:-10} pytest -m soak --timeout 7200 tests/component tests/machine",
    ),
    Part("the emulated node", "node", "tests/node/run -- -m node_only", "node"),
    Part("the emulated node with another QEMU", "node", "tests/node/run --qemu -- -m node_only", "node"),
    Part("the images in the emulated node", "node", "tests/images/run --only node -- -m node_only", "node"),
    Part("the emulated node with systemd", "node", "tests/images/run --only systemd -- -m node_only", "node"),
    Part("the emulated node with devices", "node", "tests/node/run --devices --cpus 8 -- -m node_only", "node"),
    Part("the cloud image on this machine", "node", "pytest tests/machine -m node_only", "machine"),
    Part("the model of the kubelet", "kubelet", "pytest -q tests/unit tests/component -m kubelet_model"),
)
