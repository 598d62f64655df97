"""The command line of ``plan`` for one instance, and for documents without a host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from runner.cli.plan import print_nccl
from runner.cli.plan_document_only import yaml_problems
from tests.support.fake_kernel import FAKE_KERNEL
from tests.support.json_schemas import fitting
from tests.support.user_data import YAML_NOT_READ, YAML_READ
from tests.unit.plan.test_nccl import HERE as NCCL
from tests.unit.plan.test_nccl import planned as board

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples/instances").glob("*.toml"))


def plan(*arguments: str | Path, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "runner", "plan", *arguments], check=False, capture_output=True, text=True, input=text
    )


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    """Return a spec that can be planned here; tests append to it."""
    (tmp_path / "kernel").write_bytes(FAKE_KERNEL)
    path = tmp_path / "spec.toml"
    path.write_text(f'[boot]\nkernel = "{tmp_path}/kernel"\n')
    return path


def test_every_example_is_right_without_its_target() -> None:
    done = plan("--document-only", *EXAMPLES)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        f"{ROOT}/examples/instances/{line}"
        for line in (
            "block-disk-server.toml: right, 1 vCPU, 1GiB",
            "gpu.toml: right, 20 vCPUs, 80GiB",
            "tiny.toml: right, 1 vCPU, 128MiB",
            "two-nics.toml: right, 2 vCPUs, 512MiB",
        )
    ]


OLD = "echo 'QEMU emulator version 6.2.0 (Debian 1:6.2)'"
BROKEN = "echo 'error while loading shared libraries: libaio.so.1' >&2; exit 127"


@pytest.mark.parametrize(
    ("script", "reason"),
    [(OLD, "QEMU 6.2.0 is older than 7.2"), (BROKEN, "it prints 'error while loading shared libraries: libaio.so.1'")],
)
def test_a_qemu_that_would_not_start_is_refused(
    spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, reason: str
) -> None:
    program = tmp_path / "bin" / "qemu-system-x86_64"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    done = plan(spec)
    assert done.returncode == 30, done.stdout
    assert f"cannot use {program}: {reason}" in done.stderr


def test_a_passt_that_would_not_start_is_refused(spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a pod with the runtime's seccomp profile, which allows no user namespace."""
    program = tmp_path / "bin" / "passt"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\necho "Couldn\'t create user namespace: Operation not permitted" >&2; exit 1\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    spec.write_text(spec.read_text() + '[[network]]\nmode = "passt"\n')
    done = plan(spec)
    assert done.returncode == 30, done.stdout
    assert "network[0].mode: passt does not start here: it exited with status 1, saying" in done.stderr
    assert "(a pod's RuntimeDefault allows none, `seccompProfile: {type: Unconfined}` does)" in done.stderr


@pytest.mark.parametrize("named", [True, False])
def test_a_directory_in_the_place_of_the_console_log_is_refused(spec: Path, tmp_path: Path, *, named: bool) -> None:
    """Also where it is that of the state directory, which no key names."""
    (tmp_path / "state" / "console.log").mkdir(parents=True)
    if named:
        spec.write_text(f'{spec.read_text()}[console]\nlog = "{tmp_path}/state/console.log"\n')
    done = plan("--state-dir", tmp_path / ("other" if named else "state"), spec)
    assert done.returncode == 30, done.stdout
    assert f"console.log: cannot write '{tmp_path}/state/console.log': Is a directory; name a file" in done.stderr


def test_a_share_on_a_read_only_mount_is_not_said_to_be_writable(spec: Path, tmp_path: Path) -> None:
    (tmp_path / "share").mkdir()
    spec.write_text(f'{spec.read_text()}[[share]]\ntag = "s"\npath = "{tmp_path}/share"\n')
    command = (sys.executable, "-m", "runner", "plan", spec)
    mounted = f'mount -t tmpfs -o ro none {tmp_path}/share && exec "$@"'
    for prefix, mode in (
        ((), "writable"),
        (("unshare", "--mount", "sh", "-c", mounted, "sh"), "read-only as its mount"),
    ):
        done = subprocess.run((*prefix, *command), check=False, capture_output=True, text=True)
        assert f"{tmp_path}/share as 's', {mode}, by " in done.stdout, done.stderr


def test_a_state_directory_that_is_a_file_is_refused(spec: Path) -> None:
    done = plan("--state-dir", spec, spec)
    assert done.returncode == 30, done.stdout
    assert f"--state-dir: '{spec}' is a file, not a directory\n" in done.stderr


def test_the_specs_of_all_manifests_are_right_without_their_target() -> None:
    specs = sorted((ROOT / "examples/kubernetes").rglob("*.toml"))
    done = plan("--document-only", *specs)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == len(specs) > 4


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[cpu]\ncount = 0\n", "cpu.count: found the integer 0; it takes"),
        (
            '[memory]\nsize = "3GiB"\nhugepages = "2MiB"\nprealloc = false\n',
            "memory.prealloc: must not be false: huge pages",
        ),
        (
            '[memory]\nsize = "1025MiB"\nhugepages = "2MiB"\n',
            "memory.size: 1025MiB is not a multiple of the huge pages' 2MiB",
        ),
        (
            '[console]\nlog = "/srv/a/log"\n[[share]]\ntag = "t"\npath = "/srv"\n',
            "console.log: '/srv/a/log' lies in the share 't'",
        ),
        (
            '[cloud_init]\nuser_data = "runcmd: []"\n',
            "cloud_init.user_data: begins with 'runcmd: []', which cloud-init",
        ),
        ('[cloud_init]\nssh_keys = ["secret"]\n', "cloud_init.ssh_keys[0]: is 'secret', which is no public key"),
        (
            '[cloud_init]\nnetwork_config = "version: 2: 3"\n',
            "cloud_init.network_config: cannot parse the document as YAML: line 1, column 11: mapping values are not allowed",
        ),
        (
            '[cloud_init]\nmeta_data = "web-1"\n',
            "cloud_init.meta_data: must be one mapping in YAML or JSON; write keys",
        ),
        (
            '[cloud_init]\nuser_data = "#cloud-config\\n- a"\n',
            "cloud_init.user_data: must be one mapping in YAML or JSON",
        ),
    ],
)
def test_a_wrong_document_is_refused_without_its_target_and_the_others_are_judged(
    tmp_path: Path, text: str, problem: str
) -> None:
    wrong = tmp_path / "wrong.toml"
    wrong.write_text(f'[boot]\nkernel = "/k"\n{text}')
    done = plan("--document-only", wrong, EXAMPLES[2])
    assert done.returncode == 30
    [line] = done.stderr.splitlines()
    assert line.startswith(f"instance-runner: {wrong}: {problem}"), line
    assert done.stdout == f"{EXAMPLES[2]}: right, 1 vCPU, 128MiB\n"


def test_a_document_that_cannot_be_read_does_not_keep_the_others_from_being_judged(tmp_path: Path) -> None:
    (tmp_path / "wrong.toml").write_text("[cpu]\ncount = 0\n")
    missing = tmp_path / "missing.toml"
    done = plan("--document-only", missing, EXAMPLES[2], tmp_path, tmp_path / "wrong.toml")
    assert done.returncode == 30, "the highest of 2, 0, 2 and 30"
    assert done.stdout == f"{EXAMPLES[2]}: right, 1 vCPU, 128MiB\n"
    first, second, *others = done.stderr.splitlines()
    assert first == f"instance-runner: cannot read the spec {str(missing)!r}: No such file or directory"
    assert second == f"instance-runner: cannot read the spec {str(tmp_path)!r}: it is not a file"
    assert all(line.startswith(f"instance-runner: {tmp_path}/wrong.toml: ") for line in others)
    assert plan("--document-only", EXAMPLES[2], missing).returncode == 2


def test_problems_are_data_for_a_program_and_sentences_for_a_reader(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.toml"
    wrong.write_text('[cpu]\ncount = "four"\n[[disk]]\npath = [1]\npaht = "/d"\n')
    expected = [
        ("cpu.count", "four", 'found the string "four"'),
        ("disk[0].paht", "/d", "unknown key"),
        ("disk[0].path", [1], "found an array"),
    ]
    refused, judged = plan("--json", wrong), plan("--document-only", "--json", wrong, EXAMPLES[2], tmp_path)
    assert (refused.returncode, judged.returncode) == (30, 30)
    assert refused.stderr.count(f"instance-runner: {wrong}: ") == len(expected)
    assert not judged.stderr
    [first, right, unreadable] = fitting("documents", json.loads(judged.stdout))["documents"]
    assert fitting("refusal", json.loads(refused.stdout)) == {"version": 1, "problems": first["problems"]}
    found = sorted((each["path"], each["found"], each["message"]) for each in first["problems"])
    assert [(path, value) for path, value, _ in found] == [(path, value) for path, value, _ in expected]
    assert all(message.startswith(begins) for (_, _, message), (_, _, begins) in zip(found, expected, strict=True))
    assert all(each["document"] == str(wrong) and each["remedy"] for each in first["problems"])
    assert (right["right"], right["problems"]) == (True, [])
    assert [each["message"] for each in unreadable["problems"]] == [
        f"cannot read the spec {str(tmp_path)!r}: it is not a file"
    ]


def test_what_depends_on_variables_that_are_not_set_is_left_open() -> None:
    document = '[boot]\nkernel = "/k"\n[environment]\nallow = ["NO_SUCH_UID"]\n[instance]\nuuid = "${NO_SUCH_UID}"\n'
    done = plan("--document-only", "-", text=document)
    assert (done.returncode, done.stdout) == (
        0,
        "standard input: right; without the values of NO_SUCH_UID, which are not set here\n",
    ), done.stderr


def test_every_line_of_an_error_has_the_program_s_name_and_none_acts_on_the_terminal(tmp_path: Path) -> None:
    name = "\x1b[2Jwrong.toml"
    (tmp_path / name).write_text('[cpu]\ncount = 0\n"\\u001b[31m\\n\\u202e" = 1\n[memory]\nsize = 0\n')
    for options in ((), ("--document-only",)):
        done = plan(*options, tmp_path / name)
        lines = done.stderr.splitlines()
        assert (done.returncode, len(lines)) == (30, 3)
        assert all(line.startswith(f"instance-runner: {tmp_path}/\\x1b[2Jwrong.toml: ") for line in lines)
        assert all(line.isprintable() for line in lines)


def test_standard_input_is_named_in_errors() -> None:
    done = plan("-", text="[cpu]\ncounts = 1\n")
    assert done.stderr == "instance-runner: standard input: cpu.counts: unknown key; did you mean 'count'?\n"


def test_a_large_document_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    large = tmp_path / "large.toml"
    with large.open("wb") as file:
        file.truncate(1 << 40)  # a hole: whoever reads all of it needs a TiB of memory
    for options in ((), ("--json",)):
        done = plan(large, *options)
        assert (done.returncode, done.stderr) == (
            30,
            f"instance-runner: {large}: cannot parse the document: it has more than 1MiB\n",
        )


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (
            '[console]\nlog = "/none/log"\n',
            "console.log: cannot write '/none/log': there is no directory '/none'; name a",
        ),
        (
            '[cloud_init]\nnetwork_config = "a: b: c"\n',
            "cloud_init.network_config: cannot parse the document as YAML: line",
        ),
        (
            '[cpu]\nmodel = "EPIC"\n',
            "has no CPU model 'EPIC'; did you mean 'EPYC'? `qemu-system-x86_64 -cpu help` lists",
        ),
    ],
)
def test_what_run_would_refuse_later_is_refused(spec: Path, more: str, sentence: str) -> None:
    assert plan(spec).returncode == 0
    spec.write_text(spec.read_text() + more)
    done = plan(spec)
    assert done.returncode == 30
    assert sentence in done.stderr


def test_a_console_log_in_the_state_directory_is_made_with_it(spec: Path, tmp_path: Path) -> None:
    spec.write_text(spec.read_text() + f'[console]\nlog = "{tmp_path}/state/guest.log"\n')
    assert plan(spec, "--state-dir", tmp_path / "state").returncode == 0
    done = plan(spec, "--state-dir", tmp_path / "another")
    assert f"there is no directory '{tmp_path}/state'" in done.stderr


@pytest.mark.parametrize("name", [*YAML_READ, *YAML_NOT_READ])
def test_yaml_is_refused_where_cloud_init_cannot_read_it(name: str) -> None:
    assert bool([*yaml_problems({"user_data": {**YAML_READ, **YAML_NOT_READ}[name]})]) is (name in YAML_NOT_READ)


def test_a_kernel_that_is_none_is_refused(spec: Path) -> None:
    (spec.parent / "kernel").write_bytes(b"\x1f\x8b of another architecture")
    done = plan(spec)
    assert done.returncode == 30
    assert f"boot.kernel: '{spec.parent}/kernel' is no kernel that QEMU can start: it is no bzImage" in done.stderr


@pytest.mark.parametrize("model", ["EPYC", "EPYC-v1,-svm", "max,-avx"])
def test_the_cpu_models_of_the_installed_qemu_are_known(spec: Path, model: str) -> None:
    spec.write_text(spec.read_text() + f'[cpu]\nmodel = "{model}"\n')
    done = plan(spec)
    assert done.returncode == 0, done.stderr
    assert f"CPU model {model}\n" in done.stdout


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("max,+foo", "Property 'max-x86_64-cpu.foo' not found"),
        ("max,foo=bar", "Property 'max-x86_64-cpu.foo' not found"),
        ("max,level=x", "Parameter 'level' expects uint"),
        ("qemu64-x86_64-cpu", "has no CPU model 'qemu64-x86_64-cpu'; did you mean 'qemu64'?"),
    ],
)
def test_a_cpu_model_that_the_installed_qemu_refuses_is_refused_by_the_plan(
    spec: Path, model: str, reason: str
) -> None:
    spec.write_text(spec.read_text() + f'[cpu]\naccel = "tcg"\nmodel = "{model}"\n')
    done = plan(spec)
    assert (done.returncode, done.stdout) == (30, "")
    assert "cpu.model: " in done.stderr
    assert reason in done.stderr


def test_a_qemu_that_crashes_refuses_no_cpu_model(spec: Path, tmp_path: Path) -> None:
    """KVM in a virtual machine may do that, whatever the model."""
    qemu = tmp_path / "bin" / "qemu-system-x86_64"
    qemu.parent.mkdir()
    spec.write_text(spec.read_text() + '[cpu]\naccel = "tcg"\nmodel = "max,-avx"\n')
    for end, status in (("kill -ABRT $$", 0), ("exit 1", 30)):
        qemu.write_text(f'#!/bin/sh\ncase $* in *avx*) {end};; esac\necho "QEMU emulator version 7.2.0"\n')
        qemu.chmod(0o755)
        environment = {**os.environ, "PATH": f"{qemu.parent}:{os.environ['PATH']}"}
        done = subprocess.run(
            [sys.executable, "-m", "runner", "plan", spec], check=False, capture_output=True, env=environment
        )
        assert done.returncode == status, done.stderr


def test_the_models_of_every_qemu_cost_no_process(spec: Path, tmp_path: Path) -> None:
    log, qemu = tmp_path / "log", tmp_path / "bin" / "qemu-system-x86_64"
    qemu.parent.mkdir()
    qemu.write_text(f'#!/bin/sh\necho "$@" >> {log}\necho "QEMU emulator version 7.2.0"\n')
    qemu.chmod(0o755)
    environment = {**os.environ, "PATH": f"{qemu.parent}:{os.environ['PATH']}"}
    for model in ("max", "EPYC"):
        spec.write_text(f'[boot]\nkernel = "{spec.parent}/kernel"\n[cpu]\nmodel = "{model}"\n')
        subprocess.run([sys.executable, "-m", "runner", "plan", spec], check=True, capture_output=True, env=environment)
        assert ("-cpu help" in log.read_text().splitlines()) == (model == "EPYC")


def test_nccls_file_is_printed_as_the_guest_gets_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For a host with eight GPUs, which this one is not."""
    planned, _ = board(tmp_path, "hgx-h200")
    print_nccl(planned)
    assert capsys.readouterr().out == (NCCL / "hgx-h200.xml").read_text()
