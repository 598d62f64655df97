"""The program as ``uv tool install`` installs it: from a wheel into an environment of its own, without the tree."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UV = shutil.which("uv")


def uv(*arguments: str, **environment: str) -> None:
    """Run uv; a machine that runs these tests has it (``tests/support/environment``)."""
    assert UV, "uv is missing from PATH: run the tests by tests/run"
    done = subprocess.run(
        [UV, *arguments], check=False, capture_output=True, text=True, env={**os.environ, **environment}, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    # With the build back end of the tests' own environment, so that no network is needed.
    uv(
        "build",
        "--quiet",
        "--offline",
        "--no-build-isolation",
        "--python",
        sys.executable,
        "--wheel",
        "--out-dir",
        str(directory),
    )
    [wheel] = directory.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the installed program; its dependencies are those of the tests, so that no network is needed."""
    directory = tmp_path_factory.mktemp("tool")
    uv("venv", "--quiet", "--python", sys.executable, str(directory))
    uv("pip", "install", "--quiet", "--no-deps", "--offline", str(wheel), VIRTUAL_ENV=str(directory))
    [packages] = directory.glob("lib/python3*/site-packages")
    # The project itself is there as a directory of a .pth file, which only the tests' own Python reads.
    (packages / "dependencies.pth").write_text(str(Path(pytest.__file__).parents[1]) + "\n")
    return directory / "bin/instance-runner"


def run(program: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run([program, *arguments], check=False, capture_output=True, text=True, cwd=cwd, env=environment)


def test_the_documented_command_works_in_any_directory(installed: Path, tmp_path: Path) -> None:
    readme = (ROOT / "examples/plan/README.md").read_text().replace("\\\n    ", "")
    (shown,) = re.findall(r"```console\n\$ instance-runner plan (--node .*)\n((?:.*\n)*?)```", readme)
    done = run(installed, "plan", *shown[0].split(), cwd=tmp_path)
    assert (done.stdout, done.stderr) == (shown[1], "")
    strict = ("--node", "examples/kubernetes/kubelet-configuration-strict.yaml", *shown[0].split()[2:])
    assert "single-numa-node" in run(installed, "plan", *strict, cwd=tmp_path).stdout
    # A file of the same name comes first, and a name that is no example stays an error.
    (tmp_path / "examples/plan").mkdir(parents=True)
    (tmp_path / "examples/plan/pod.yaml").write_text("kind: Service\n")
    assert "no pod is in 'examples/plan/pod.yaml'" in run(installed, "plan", *shown[0].split(), cwd=tmp_path).stderr
    for name in ("examples/none.yaml", "examples/../cli/plan.py"):
        done = run(installed, "plan", "--node", name, cwd=tmp_path)
        assert (
            done.stderr
            == f"instance-runner: cannot read the kubelet configuration '{name}': No such file or directory\n"
        )


def test_a_wheel_has_the_package_and_the_examples_and_no_documents(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    examples = {name.removeprefix("runner/") for name in names if name.startswith("runner/examples/")}
    assert examples == {
        "examples/kubernetes/kubelet-configuration.yaml",
        "examples/kubernetes/kubelet-configuration-strict.yaml",
        "examples/plan/dual-epyc.json",
        "examples/plan/pod.yaml",
    }
    modules = {str(path.relative_to(ROOT)) for path in ROOT.glob("runner/**/*.py")}
    assert {name for name in names if name.endswith(".py")} == modules
    assert not [name for name in names if name.endswith(".md") or not name.startswith("runner/")]
