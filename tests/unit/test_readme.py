"""The documents are true: their tables are those of the code, their paths and links exist."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import runner.errors
from runner.check import cpu_owners, device_rights, host_reader, kernel_settings, programs
from runner.check.finding import Check, Level
from runner.errors import Status
from runner.instance import probes
from runner.instance.daemons import DEATHS
from runner.spec.instance import parse_instance, reference
from tests.images.manifests import DIRECTORIES, EXAMPLES
from tests.unit.test_house import MAY_IMPORT

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
KUBERNETES = (EXAMPLES / "README.md").read_text()
DOCUMENTS = [ROOT / "README.md", EXAMPLES / "README.md"]


def test_every_key_of_the_schema_is_in_the_reference_as_it_is() -> None:
    for name, allowed, default, meaning in reference():
        shown = default if default in {"-", "required"} else f"`{default}`"
        assert f"| `{name}` | {allowed} | {shown} | {meaning} |" in README
    assert len(re.findall(r"^\| `[a-z_]+(?:\[\])?\.[a-z0-9_]+` \|", README, re.MULTILINE)) == len(list(reference()))


def test_every_exit_status_is_in_the_table() -> None:
    for status in Status:
        assert f"| {status.value} | `{status.name.lower()}` |" in README


def test_every_check_is_named() -> None:
    checks = {
        value.name
        for module in (cpu_owners, device_rights, kernel_settings, host_reader, programs)
        for value in vars(module).values()
        if isinstance(value, Check)
    }
    tables = README.partition("### Is it fit?")[2].partition("\n### ")[0]
    where = tables.partition("| where | checks |")[2]
    named = {
        name
        for row in re.findall(r"^\| [^|]+ \| (`.*) \|$", where, re.MULTILINE)
        for name in re.findall(r"`([a-z-]+)`", row)
    }
    assert named == checks
    for level in Level:
        assert f"| `{level.value}` | " in tables


def test_every_child_is_in_the_table_of_deaths() -> None:
    table = README.partition("| child | when it dies |")[2].partition("\n\n")[0]
    children = " ".join(row.split("|")[1].lower() for row in table.splitlines()[2:])
    for role in DEATHS:
        assert role in re.findall(r"[a-z]+", children)


def test_every_room_is_in_the_table_of_rooms() -> None:
    table = README.partition("| room | what | may import |")[2].partition("\n\n")[0]
    rooms = {word for row in table.splitlines()[2:] for word in re.findall(r"\w+", row.split("|")[1])}
    assert MAY_IMPORT.keys() - {"errors", "cpuset"} <= rooms


def test_every_metric_of_an_instance_is_named() -> None:
    source = Path(probes.__file__).read_text()
    names = set(re.findall(r'add\(\s*"(?:vcpu_)?([a-z_]+)", "(?:gauge|counter)"', source)) - {"info"}
    assert len(names) > 10
    assert [name for name in sorted(names) if f"`{name}`" not in KUBERNETES] == []


def test_every_event_that_is_explained_is_one_of_ours() -> None:
    source = " ".join(path.read_text() for path in sorted(Path(runner.errors.__file__).parent.rglob("*.py")))
    table = KUBERNETES.partition("| event | it means | do |")[2].partition("\n\n")[0]
    events = re.findall(r"`([^`]+)`", "\n".join(row.split("|")[1] for row in table.splitlines()[2:]))
    assert len(events) > 10
    for event in events:
        words = max(re.split(r"…|'affinity'|\w+=|[:;]", event), key=len).strip()
        assert words in source, event


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_the_example_specs_are_taken(document: Path) -> None:
    specs = re.findall(r"```toml\n(.*?)```", document.read_text(), re.DOTALL)
    assert specs
    for spec in specs:
        assert tomllib.loads(spec)
        parse_instance("README.md", spec.encode(), {"POD_NAME": "web-1"})


def test_the_two_commands_exist() -> None:
    for command in re.findall(r"^# ((?:examples|tests)/[a-z/]+run)", README, re.MULTILINE):
        assert (ROOT / command).is_file()


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_every_link_leads_somewhere(document: Path) -> None:
    links = re.findall(r"\]\(([^):]*)\)", document.read_text())
    assert links
    for link in links:
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in anchors, link


def test_every_directory_of_manifests_is_in_the_table() -> None:
    table = KUBERNETES.partition("| directory or file | what it is |")[2].partition("\n\n")[0]
    named = {name for row in table.splitlines() for name in re.findall(r"`([^`]+)`", row.split("|")[1] if row else "")}
    assert set(DIRECTORIES) <= named
    for name in named:
        assert (EXAMPLES / name).exists(), name


def test_every_manifest_that_a_command_applies_exists() -> None:
    named = re.findall(r"kubectl (?:apply|create|delete) [^`\n]*?-[kf] (\w\S*?)[`\s]", KUBERNETES)
    assert len(named) > 5
    for name in named:
        path = EXAMPLES / name.removeprefix("examples/kubernetes/")
        assert path.is_file() or (path / "kustomization.yaml").is_file(), name


def test_a_drain_is_given_the_options_without_which_it_ends_at_once() -> None:
    """The pods of the examples have an emptyDir and no controller, and the node has a DaemonSet."""
    assert "$ kubectl drain NODE --ignore-daemonsets --delete-emptydir-data --force\n" in KUBERNETES


@pytest.mark.parametrize("name", ["README.md", "kubelet-configuration.yaml", "overlays/gpu/kustomization.yaml"])
def test_the_file_to_remove_is_named_where_huge_pages_are_reserved(name: str) -> None:
    """A kubelet does not start with a ``memory_manager_state`` that holds another number of pages."""
    text = re.sub(r"\s+#?\s*", " ", (EXAMPLES / name).read_text())
    assert re.search(r"remove [^:]*memory_manager_state", text)
    assert re.search(r"number of (huge )?pages", text)
