"""The documents agree with the code: their tables, command lines, paths and links."""

from __future__ import annotations

import argparse
import re
import shlex
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
import yaml

import runner.base.errors
from runner.base.cpuset import CpuSet
from runner.base.errors import SpecError, Status, UsageError
from runner.base.judgement import Level
from runner.base.table import aligned
from runner.base.version import VERSION
from runner.check.checker import CHECKS, SPEC
from runner.check.checks import OFF_NODE, Place
from runner.cli.commands import program_parser
from runner.cli.events_table import events_markdown
from runner.cli.json_documents import DOCUMENTS as JSON_DOCUMENTS
from runner.cli.outcomes import OUTCOMES
from runner.cli.spec_table import spec_markdown
from runner.controller.command_line import command_line
from runner.controller.serve.callers import MOST_PROCESSES
from runner.controller.serve.methods import CODES
from runner.controller.serve.registrations import MOST_WAITING, REST
from runner.controller.serve.report_methods import LIMITS
from runner.controller.serve.reports import ReportIntervals
from runner.controller.serve.timeouts import Timeouts
from runner.controller.serve.tuning_passes import LEAST
from runner.inspect.cpu_time import CpuAccount, InstanceTrace, TaskTime, TraceReport
from runner.inspect.observation import ObservedGuarantee
from runner.inspect.render import HEAD
from runner.inspect.trace_render import trace_lines
from runner.instance.control.method_table import METHODS, PROTOCOL
from runner.instance.gate import PRECEDENCE, Kind
from runner.placement.children import CHILDREN, Role
from runner.plan.memory import FORWARDED_PORT
from runner.protocol.unix_server import SocketLimits
from runner.spec.instance import parse_instance
from runner.spec.ports import MOST_OF_ALL
from runner.spec.reference import reference
from runner.spec.rules import MIB
from tests.emulated_node.command import parser as emulated_node_parser
from tests.images.manifests import DIRECTORIES, EXAMPLES
from tests.support.monitoring import exported_by_a_controller, exported_by_an_instance
from tests.unit.test_house import LAW

ROOT = Path(__file__).parents[2]
FRONT_PAGE = (ROOT / "README.md").read_text()


def pages(directory: Path) -> str:
    """Return the text of the pages in *directory*: a topic may move from one to another."""
    return "\n".join(path.read_text() for path in sorted(directory.glob("*.md")))


SPECS = pages(ROOT / "examples")
KUBERNETES = pages(EXAMPLES)
HOW_IT_WORKS = (ROOT / "runner/README.md").read_text()
CONTROLLER = pages(ROOT / "runner/controller")
CHECK = (ROOT / "runner/check/README.md").read_text()
FIGURES = (ROOT / "tests/benchmarks/README.md").read_text()
TESTS = (ROOT / "tests/README.md").read_text()
DOCUMENTS = sorted(
    path for path in ROOT.rglob("*.md") if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
)

documents = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


def table_rows(text: str, head: str) -> list[list[str]]:
    """Return the cells of the rows of the table of *text* whose first line is *head*."""
    assert head in text, head
    rows = text.partition(head)[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip()[1:-1].split(" | ")] for row in rows]


def test_every_module_of_the_controller_is_in_its_table() -> None:
    directory = ROOT / "runner" / "controller"
    rows = table_rows((directory / "README.md").read_text(), "| module | what |")
    named = {name for modules, _ in rows for name in re.findall("`([^`]+)`", modules)}
    found = {str(path.relative_to(directory)) for path in directory.rglob("*.py") if path.name != "__init__.py"}
    assert named == found


def test_the_front_page_is_short() -> None:
    assert len(FRONT_PAGE.splitlines()) <= 220


@documents
def test_lines_are_short(document: Path) -> None:
    """Only rows of tables and a program's output may be longer."""
    text = re.sub(r"^ *```\w*\n(.*?)^ *```", commands_alone, document.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert [line for line in text.splitlines() if len(line) > 120 and not line.startswith("|")] == []


def commands_alone(fence: re.Match[str]) -> str:
    return "\n".join(line for line in fence[1].splitlines() if line.startswith(("$ ", "# ")))


def test_the_placement_on_the_front_page_is_formatted_as_the_receipt_is() -> None:
    lines = re.findall(r"^placement: (.*)$", FRONT_PAGE, re.MULTILINE)
    rows = [re.split(r"  +", line) for line in lines]
    assert lines == [*aligned(rows)]
    assert [row[0] for row in rows].count("anchor") == 2
    assert {row[0].split()[0] for row in rows[1:]} <= {role.value for role in Role}


def test_the_tables_of_inspect_are_formatted_as_it_does() -> None:
    tables = re.findall(
        r"^ROLE .*\n(?:(?!ok |unknown ).*\n)+", (ROOT / "runner/inspect/README.md").read_text(), re.MULTILINE
    )
    assert len(tables) == 2
    for table in tables:
        rows = [re.split(r"  +", line) for line in table.splitlines()]
        assert rows[0] == [*HEAD]
        assert table.splitlines() == [*aligned(rows)]
        assert {row[0].split()[0] for row in rows[1:]} <= {role.value for role in Role}


def test_the_trace_on_the_front_page_is_what_inspect_prints_of_its_times() -> None:
    """``tests/node/test_trace.py`` has the command print one on a node, and fails if it shows another task."""
    shown = re.search(r"^node# instance-runner inspect --trace 2\n((?:.+\n)+)```", FRONT_PAGE, re.MULTILINE)
    assert shown is not None
    title, _, *rows, _ = shown[1].splitlines()
    name, cpus = re.findall(r"^instance (\S+): CPUs '(.*)', guarantee enforced, ", title)[0]
    accounts = [
        traced_account(cpu, [row for row in map(re.compile(r"  +").split, rows) if row[0] == str(cpu)])
        for cpu in CpuSet.parse(cpus)
    ]
    [window] = {
        account.vcpu_nanoseconds + account.idle_nanoseconds + sum(task.nanoseconds for task in account.kernel)
        for account in accounts
    }
    guarantee = ObservedGuarantee("enforced")
    instance = InstanceTrace(name, "controller", guarantee, CpuSet.parse(cpus), tuple(accounts), ended=False)
    report = TraceReport("node", window, "sched_switch", "", (instance,))
    assert [line.rstrip() for line in trace_lines(report)][: len(rows) + 3] == shown[1].splitlines()


def traced_account(cpu: int, rows: list[list[str]]) -> CpuAccount:
    """Return the account that the *rows* of *cpu* show; none of them is of another task."""
    (_, vcpu, vcpu_time, _), (_, idle, idle_time, _), *kernel = rows
    assert (vcpu[:5], idle, {row[1] for row in kernel} - {"kernel"}) == ("vcpu ", "idle", set())
    tasks = tuple(
        TaskTime(name, int(pid), int(tid), cgroup, kernel=True, nanoseconds=int(nanoseconds))
        for _, _, name, pid, tid, nanoseconds, _, cgroup in kernel
    )
    return CpuAccount(cpu, int(vcpu[5:]), int(vcpu_time), int(idle_time), tasks, (), 0)


def test_the_article_has_forty_vcpus_alone_on_isolated_cpus() -> None:
    """``tests/node/run --article`` prints the table, and checks the same of every thread."""
    table = TESTS.partition("==== python3")[2].partition("```")[0]
    threads = re.findall(r"^ *\d+  (\S.*?)  +([\d,-]+)  +(\d+)  (/\S+)$", table, re.MULTILINE)
    vcpus = [thread for thread in threads if thread[0].startswith("CPU ")]
    assert len(vcpus) == 40
    assert {group for _, _, _, group in vcpus} == {"/stelia/instance-00000001…/vcpus"}
    assert all(allowed == running_on for _, allowed, running_on, _ in vcpus)
    assert {allowed for name, allowed, _, _ in threads if not name.startswith("CPU ")} == {"0,21-64,85-127"}
    isolated = CpuSet(int(allowed) for _, allowed, _, _ in vcpus)
    assert table.endswith(f"\n{isolated}      /cpuset.cpus.isolated\n")


def test_the_reference_of_the_spec_is_generated() -> None:
    """``instance-runner manual instance-runner-spec.md > examples/SPEC.md`` generates it."""
    assert (ROOT / "examples/SPEC.md").read_text() == spec_markdown()


def test_the_reference_of_the_events_is_generated() -> None:
    """``instance-runner manual instance-runner-events.md > examples/EVENTS.md`` generates it."""
    assert (ROOT / "examples/EVENTS.md").read_text() == events_markdown()


def test_every_key_of_the_schema_is_in_the_reference_as_it_is() -> None:
    text = spec_markdown()
    prose = " ".join(text.split())
    for name, allowed, default, meaning in reference():
        shown = default if default in {"-", "required"} else f"`{default}`"
        assert f"| `{name}` | {allowed} | {shown} | " in text
        assert f"| {meaning} |" in text or f" `{name}`: {meaning}. " in prose
    assert len(re.findall(r"^\| `[a-z_]+(?:\[\])?\.[a-z0-9_]+` \|", text, re.MULTILINE)) == len(list(reference()))


@pytest.mark.parametrize(
    ("number", "spec"),
    [
        (0, b"[cpu]\ncounts = 4\n"),
        (1, b'[boot]\nkernel = "/k"\n[[share]]\ntag = "home"\npath = "/a"\n[[share]]\ntag = "home"\npath = "/b"\n'),
    ],
)
def test_the_mistakes_in_the_documents_are_reported_as_shown(number: int, spec: bytes) -> None:
    shown = re.findall(r"^spec\.toml: .*$", SPECS, re.MULTILINE)
    with pytest.raises(SpecError) as refused:
        parse_instance("spec.toml", spec, {})
    assert str(refused.value) == shown[number]


@documents
def test_a_row_of_a_table_is_one_line(document: Path) -> None:
    text = re.sub(r"^ *```.*?^ *```", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert [line for line in text.splitlines() if line.startswith("|") and not line.endswith("|")] == []


def test_a_cell_of_a_table_is_short() -> None:
    """More than 200 characters belong in the text below it; the records of trials below ``tests`` may say more."""
    documents = [path for path in ROOT.rglob("*.md") if not {"tests", ".venv"} & set(path.relative_to(ROOT).parts)]
    assert len(documents) > 20
    cells = [
        cell.strip()
        for path in documents
        for line in re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE).splitlines()
        if line.startswith("|")
        for cell in re.split(r"(?<!\\)\|", line)
    ]
    assert [cell for cell in cells if len(cell) > 200] == []


def test_every_exit_status_is_in_the_table() -> None:
    for status in Status:
        assert f"| {status.value} | `{status.name.lower()}` |" in SPECS
    for status, (means, remedy) in OUTCOMES.items():
        assert f"| {status.value} | `{status.name.lower()}` | {means} | {remedy} |" in SPECS


def test_every_check_is_named_with_its_places() -> None:
    rows = {where: re.findall(r"`([a-z-]+)`", names) for where, names in table_rows(CHECK, "| where | checks |")}
    asked_for = {"trial-guest": "with `--try-guest`"}
    places = {
        tuple(Place): "everywhere",
        (Place.NODE,): "node only",
        OFF_NODE: "not on a node",
        (Place.POD, Place.CONTAINER): "pod, container",
        (Place.POD,): "pod",
    }
    for check in CHECKS:
        assert check.name in rows[asked_for.get(check.name, places[check.places])]
    assert SPEC.name in rows["with a SPEC"]
    assert sum(map(len, rows.values())) == len(CHECKS) + 1
    for level in Level:
        assert f"| `{level.value}` | " in CHECK


def test_every_child_is_in_the_table_of_deaths() -> None:
    children = " ".join(row[0].lower() for row in table_rows(SPECS, "| child | when it dies |"))
    for role in CHILDREN:
        assert role in re.findall(r"[a-z]+", children)


def test_what_changes_do_to_each_other_is_shown() -> None:
    others = [kind for kind in Kind if kind is not Kind.STOP]
    head = " | ".join(f"`{kind.name.lower()}`" for kind in others)
    rows = table_rows(HOW_IT_WORKS, f"| comes ↓, in progress → | {head} |")
    assert rows == [[f"`{kind.name.lower()}`", *(PRECEDENCE[kind, each].value for each in others)] for kind in Kind]


def test_the_table_of_rooms_is_the_law_of_imports() -> None:
    rows = table_rows(HOW_IT_WORKS, "| room | what | may import |")
    listed = {room.strip("`"): set(re.findall(r"`([a-z_]+)`", imports)) for room, _, imports in rows}
    assert listed == {**LAW, "cli": set()}


def test_every_module_of_kernel_is_in_the_table_by_subject() -> None:
    listed = [
        name for _, names in table_rows(HOW_IT_WORKS, "| subject | modules of `kernel` |") for name in names.split()
    ]
    modules = {f"`{path.stem}`" for path in (ROOT / "runner/kernel").glob("[!_]*.py")}
    assert sorted(listed) == sorted(modules), "give each module of kernel one place in the table of runner/README.md"


def test_the_protocol_of_the_controller_is_as_shown() -> None:
    rows = table_rows(CONTROLLER, "| code | `reason` | it means |")
    assert {reason.strip("`"): int(code) for code, reason, _ in rows} == CODES
    methods = [row[0].strip("`") for row in table_rows(CONTROLLER, "| method | params | result |")]
    assert methods == [
        "registerCgroup",
        "deregisterCgroup",
        "sealCgroup",
        "unsealCgroup",
        "tuneInstance",
        "listInstances",
        "getStatus",
    ]
    limits, timeouts = SocketLimits(), Timeouts()
    assert [value for _, value in table_rows(CONTROLLER, "| limit | value |")] == [
        f"{limits.message >> 10} KiB",
        f"{limits.connections}, {limits.connections_per_peer}",
        f"{limits.newcomers}",
        f"{limits.in_flight}",
        f"{MOST_WAITING}",
        f"{MOST_PROCESSES}",
        f"{REST} times what it took",
        f"{timeouts.sealed_again:g} s, {timeouts.seals_apart:g} s",
        f"{LEAST:g} s",
        f"{limits.first_byte:g} s, {limits.idle:g} s",
    ]


def test_the_protocol_of_the_control_socket_is_as_shown() -> None:
    text = (ROOT / "examples/running.md").read_text()
    assert f"This is protocol {PROTOCOL}, " in text
    rows = table_rows(text, "| method | params | result: its [schema](json.md) |")
    assert {row[0].strip("`"): re.findall("`([a-z_-]+)`", row[1].partition(", and ")[0]) for row in rows} == {
        name: [*method.params] for name, method in METHODS.items()
    }
    assert [row[2].split("`")[1] for row in rows] == [method.result for method in METHODS.values()]


def test_every_json_document_is_in_the_table() -> None:
    head = "| schema | what it is of: with `--json`, where it is a command |"
    rows = table_rows((ROOT / "examples/json.md").read_text(), head)
    assert [(name.strip("`"), where) for name, where in rows] == [
        (name, each.where) for name, each in JSON_DOCUMENTS.items()
    ]


def test_the_version_is_the_packages() -> None:
    assert metadata.version("instance-runner") == VERSION
    assert f"| {VERSION}, not released | " in HOW_IT_WORKS


def test_the_limits_of_reports_are_as_shown() -> None:
    intervals = ReportIntervals()
    assert [value for _, value in table_rows(CONTROLLER, "| limit of `reports.sock` | value |")] == [
        f"{LIMITS.message >> 10} KiB",
        f"{LIMITS.connections}, {LIMITS.connections_per_peer}, {LIMITS.in_flight}",
        f"{intervals.least:g} s",
        f"{intervals.fetch:g} s",
        f"{intervals.texts:g} s",
    ]


def test_every_metric_of_the_controller_is_named() -> None:
    names = exported_by_a_controller()
    assert len(names) > 5
    assert [name for name in sorted(names) if f"`{name}`" not in CONTROLLER] == []


def test_the_figures_of_the_front_page_are_those_of_the_benchmark() -> None:
    for _, ours, peer in table_rows(FRONT_PAGE, "| figure | here | peer |"):
        for figure in (ours, peer.partition(":")[0]):
            assert figure in FIGURES, figure


def test_every_metric_of_an_instance_is_named() -> None:
    names = {name.removeprefix("vcpu_") for name in exported_by_an_instance()}
    assert len(names) > 10
    assert [name for name in sorted(names) if f"`{name}`" not in KUBERNETES] == []


def test_the_runbook_has_a_list_of_its_contents_and_the_answers_that_are_looked_for() -> None:
    text = (EXAMPLES / "operate.md").read_text()
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    listed = text.partition("\n\n[")[2].partition("\n\n")[0].replace("\n", " ")
    assert re.findall(r"\[?([^\]\[·]+)\]\(#", listed) == headings
    slow = table_rows(text, "| slow | look at | when it is not as it should be |")
    assert {"CPU, always", "disk", "network"} <= {row[0] for row in slow}
    named = {name for row in slow for name in re.findall(r"`([a-z_]+_total|emulated)`", row[1])}
    assert len(named) > 5
    assert named <= exported_by_an_instance()
    questions = " ".join(row[0] for row in table_rows(text, "| question | answer |"))
    for each in ("memory dump", "core dump", "sent to the network", "versions go together", "Windows", "migration"):
        assert each in questions


def test_the_pod_and_the_spec_with_an_image_from_a_volume_name_the_same_directory() -> None:
    section = (EXAMPLES / "operate.md").read_text().partition("## A qcow2 image from a volume\n")[2]
    pod = yaml.safe_load(section.partition("```yaml\n")[2].partition("```")[0])["spec"]
    [volume], [container] = pod["volumes"], pod["containers"]
    [mount] = container["volumeMounts"]
    [disk] = tomllib.loads(section.partition("```toml\n")[2].partition("```")[0])["disk"]
    assert mount["name"] == volume["name"]
    assert disk["path"].startswith(f"{mount['mountPath']}/")
    assert container["name"] in (EXAMPLES / "instance/pod.yaml").read_text()


def test_what_all_ports_cost_is_as_planned() -> None:
    words = f'{round(MOST_OF_ALL * FORWARDED_PORT / MIB)} MiB for `"all"`'
    assert words in " ".join(SPECS.split())


def test_nothing_connects_to_the_network_but_to_the_port_of_the_guest() -> None:
    """What is sent to the network (operate.md): these modules have sockets of IP at all; others are of Unix and netlink."""
    pattern = r"AF_INET|open_tcp|create_connection|http\.client|urllib\.request|from_thread|SOCK_RAW|\.port\)\)"
    found = {
        str(path.relative_to(ROOT / "runner"))
        for path in (ROOT / "runner").rglob("*.py")
        if re.search(pattern, path.read_text())
    }
    assert found == {
        "protocol/http.py",  # listens
        "kernel/netlink.py",  # speaks of addresses to the kernel
        "kernel/packet_filter.py",  # the same
        "instance/watch/readiness.py",  # guest.ready = "port …" connects to the guest
    }


def test_every_explained_event_is_logged_somewhere() -> None:
    source = " ".join(path.read_text() for path in sorted(Path(runner.base.errors.__file__).parents[1].rglob("*.py")))
    table = KUBERNETES.partition("| event | it means | do |")[2].partition("\n\n")[0]
    events = re.findall(r"`([^`]+)`", "\n".join(row.split("|")[1] for row in table.splitlines()[2:]))
    assert len(events) > 10
    for event in events:
        words = max(re.split(r"…|'affinity'|\w+=|[:;]", event), key=len).strip()
        assert words in source, event


@documents
def test_the_example_specs_are_accepted(document: Path) -> None:
    for spec in re.findall(r"```toml\n(.*?)```", document.read_text(), re.DOTALL):
        assert tomllib.loads(spec)
        parse_instance(document.name, spec.encode(), {"POD_NAME": "web-1"})


def test_topics_and_front_page_have_example_specs() -> None:
    assert SPECS.count("```toml\n") >= 4
    assert "```toml\n" in FRONT_PAGE
    assert "```toml\n" in KUBERNETES


def test_the_two_commands_exist() -> None:
    commands = re.findall(r"^# ((?:examples|tests)/[a-z/]*run)", FRONT_PAGE, re.MULTILINE)
    assert set(commands) == {"examples/quickstart/run", "tests/run"}
    for command in commands:
        assert (ROOT / command).is_file()


def anchors_of(document: Path) -> set[str]:
    """Return what a link may name in *document*, by its headings."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@documents
def test_every_link_leads_somewhere(document: Path) -> None:
    for link in re.findall(r"\]\(([^):]*)\)", document.read_text()):
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        assert target.exists(), link
        if anchor:
            assert anchor in anchors_of(target), link


def linked(document: Path) -> set[Path]:
    """Return the files of this tree to which *document* has links."""
    links = re.findall(r"\]\(([^):]*)\)", document.read_text())
    return {(document.parent / link.partition("#")[0]).resolve() for link in links if not link.startswith("#")}


def test_the_front_page_leads_to_every_document_over_one_other_at_most() -> None:
    first = linked(ROOT / "README.md")
    second = {each for document in first & {*DOCUMENTS} for each in linked(document)}
    assert {*DOCUMENTS} - first - second - {ROOT / "README.md"} == set()


@documents
def test_every_path_exists(document: Path) -> None:
    """Paths of this tree from its root, wherever they stand, and Python files named from the document's folder."""
    text = document.read_text()
    for name in re.findall(r"(?<![\w/.~-])((?:runner|tests|examples|images|\.ci)/[\w./@-]*\w)", text):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"`([\w/]+\.py)`", text):
        assert any((folder / name).is_file() for folder in (document.parent, ROOT)), name


@pytest.mark.parametrize(
    "name",
    [
        "examples/README.md",
        "examples/host/README.md",
        "examples/monitoring/README.md",
        "examples/plan/README.md",
        "runner/controller/README.md",
    ],
)
def test_every_file_of_a_table_of_files_exists(name: str) -> None:
    text = (ROOT / name).read_text()
    head = re.search(r"^\| (?:file|file or directory|module) \| what.*\|$", text, re.MULTILINE)
    assert head
    for first, *_ in table_rows(text, head[0]):
        for each in re.findall(r"`([^`]+)`", first):
            assert ((ROOT / name).parent / each).exists(), each


def command_lines(text: str) -> Iterator[list[str]]:
    """Yield the command lines of our programs that stand in code in *text*, alone or after ``--`` or ``<(``.

    A line that begins with a command, such as ``ctl status``, is one of ``instance-runner``.
    """
    text = re.sub(r"\\\n *", "", text)
    fence = re.compile(r"^ *```\w*\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
    codes = re.findall(r"^[$#] (.*)$", "\n".join(fence.findall(text)), re.MULTILINE)
    for each in [*codes, *re.findall(r"`([^`]+)`", fence.sub("", text))]:
        code = re.sub(r"^(?=(?:run|plan|check|inspect|ctl|console) \S)", "instance-runner ", each)
        if found := re.search(r"(?:^|-- |<\()(instance-(?:runner|cgroup-controller)(?:\s.*)?)$", code, re.DOTALL):
            yield shlex.split(re.sub(r"[\[\]]", "", re.split(r" \||  #| >|\)", found[1])[0]))


def parses(line: list[str]) -> bool:
    """Return whether *line* is a command line; it may end before the value of its last option, or name only a command."""
    parser: argparse.ArgumentParser = program_parser() if line[0] == "instance-runner" else command_line()
    words = [{"COUNT": "1"}.get(word, word) for word in line[1:] if word != "…"]
    attempts = [words, [*words, "X"]]
    if not any(word.startswith("-") for word in words):
        attempts.append([*words, "--help"])
    for attempt in attempts:
        try:
            parser.parse_args(attempt)
        except SystemExit:  # of --help
            return True
        except UsageError:
            continue
        return True
    return False


@documents
def test_every_command_line_parses(document: Path) -> None:
    for line in command_lines(document.read_text()):
        assert parses(line), shlex.join(line)


def test_the_documents_have_command_lines() -> None:
    lines = {shlex.join(line) for document in DOCUMENTS for line in command_lines(document.read_text())}
    assert len(lines) > 15
    assert {"instance-runner ctl status", "instance-cgroup-controller --cpus 4-15"} <= lines


def test_every_command_line_of_the_emulated_node_parses() -> None:
    lines = re.findall(r"^# tests/node/run +([^#\n]*)", (ROOT / "tests/README.md").read_text(), re.MULTILINE)
    assert len(lines) > 5
    for line in lines:
        emulated_node_parser().parse_args(shlex.split(line))


@pytest.mark.parametrize(
    "text",
    ["`kubectl exec POD -- instance-runner inspect --wach 2`", "```console\n$ instance-runner plans x | head\n```"],
)
def test_a_wrong_command_line_is_found(text: str) -> None:
    (line,) = command_lines(text)
    assert not parses(line)


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


@pytest.mark.parametrize("name", ["nodes.md", "kubelet-configuration.yaml", "overlays/gpu/kustomization.yaml"])
def test_the_file_to_remove_is_named_where_huge_pages_are_reserved(name: str) -> None:
    """A kubelet does not start with a ``memory_manager_state`` that holds another number of pages."""
    text = re.sub(r"\s+#?\s*", " ", (EXAMPLES / name).read_text())
    assert re.search(r"remove [^:]*memory_manager_state", text)
    assert re.search(r"number of (huge )?pages", text)
