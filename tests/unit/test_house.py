"""The rules of imports: which room may import which, and which module alone may use a kernel interface."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

import runner.__main__
from tests.support import figures
from tests.support.figures import nodes, parsed

PACKAGE = Path(runner.__main__.__file__).parent
LAW: dict[str, set[str]] = {
    "base": set(),
    "facts": {"base"},
    "spec": {"facts"},
    "placement": {"facts", "spec"},
    "kernel": {"facts"},
    "kubelet": {"facts", "spec", "placement"},
    "protocol": {"facts", "kernel"},
    "plan": {"facts", "spec", "placement", "kubelet"},
    "host": {"plan", "kernel", "protocol"},
    "node_plan": {"kubelet"},
    "instance": {"host", "plan", "kernel", "protocol"},
    "controller": {"kubelet", "kernel", "protocol"},
    "inspect": {"placement", "kubelet", "kernel", "protocol"},
    "check": {"host", "node_plan", "inspect"},
}
"""Room → the rooms that it may import, with what these may; those of :data:`EVERYTHING` may import everything."""

INSTANCE_LAW: dict[str, set[str]] = {
    "parts": set(),
    "watch": {"parts"},
    "change": {"parts", "watch"},
    "renewal": {"parts", "watch", "change"},
    "control": {"parts", "watch", "change", "renewal"},
}
"""Room of ``instance`` → the other ones that it may import."""

INSTANCE_ENTRANCES = {"init", "lifecycle", "optional_parts"}
"""The modules of ``instance`` itself that import its rooms; the others are what each room needs."""

TUNING_DOORS = {"tuner_messages", "disturbances", "tuner_process"}
"""Of ``controller.tune`` what the rest of the controller may know: values, and the process."""

EVERYTHING = {"__main__", "cli", "entry"}
"""Rooms that nothing imports."""


PURE = (
    {"facts", "spec", "placement", "kubelet", "plan", "node_plan"}
    | {
        f"base.{module}"
        for module in (
            "arguments",
            "cpuset",
            "errors",
            "events",
            "json_schema",
            "judgement",
            "strict_json",
            "subject",
            "table",
            "values",
            "version",
        )
    }
    | {f"cli.{module}" for module in ("completion", "events_table", "manual", "outcomes", "spec_table")}
    | {f"inspect.{module}" for module in ("roles", "render", "rules", "observation", "cpu_time", "trace_render")}
    | {"kernel.ring_buffer"}
    | {f"controller.tree.{module}" for module in ("faults", "limits", "reconcile")}
    | {f"controller.tune.{module}" for module in ("cache_groups", "disturbances", "tuner_messages")}
)
LARGEST_CLASS = 350
"""Lines of code, without docstrings and comments."""
MOST_IMPORTS_INSIDE_FUNCTIONS = 7
"""In the room ``instance``, beside those of its optional parts."""
EFFECTS = {
    "asyncio",
    "ctypes",
    "fcntl",
    "io",
    "multiprocessing",
    "os",
    "select",
    "shutil",
    "signal",
    "socket",
    "subprocess",
    "tempfile",
    "threading",
    "time",
    "trio",
}
"""Modules that no pure room imports, because a pure room does no input or output."""

ONE_DOOR = {
    "subprocess": {"kernel.child_processes"},
    "socket": {"kernel", "protocol", "controller"},
    "h11": {"protocol.http"},
    "h2": {"protocol.grpc"},
    "prometheus_client": {"protocol.exposition", "controller.metrics"},
    "runner.instance.watch.metrics": {"instance.watch.figures"},
    "pycdlib": {"instance.parts.seed"},
    "argcomplete": {"base.completion", "cli.completion"},
    "pyroute2": {"kernel.netlink"},
    "qemu": {"protocol.qmp", "protocol.qmp_server", "cli.ctl_qmp"},
    "asyncio": {"cli.ctl_qmp"},
    "runner.cli.ctl_qmp": {"cli.ctl"},
    "yaml": {"spec.yaml"},
    "runner.spec.yaml": {"cli.plan_node", "cli.plan_document_only", "cli.plan_node_files"},
    "runner.cli.plan_node": {"cli.plan"},
}
"""Module → the only modules (or rooms) of ours that may import it."""


def modules() -> Iterator[tuple[str, Path]]:
    for path in figures.files():
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
        yield name, path


@cache
def imports(path: Path) -> dict[str, int]:
    """Return each module, or name in a package, that *path* imports → the line of its first import."""
    found: dict[str, int] = {}
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name: node.lineno for alias in node.names if alias.name not in found}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; name the module from runner on"
            module = node.module or ""
            is_package = (PACKAGE / module.removeprefix("runner.").replace(".", "/")).is_dir()
            ours = module == "runner" or (module.startswith("runner.") and is_package)
            names = [f"{module}.{alias.name}" for alias in node.names] if ours else [module]
            found |= {name: node.lineno for name in names if name not in found}
    return found


@cache
def imports_by_name(path: Path) -> dict[str, int]:
    """Return what may be a module's name among the strings of *path*, which ``import_module`` can be given → its line."""
    return {
        node.value: node.lineno
        for node in nodes(path)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("runner.")
    }


def hold(rule: str, path: Path, broken: Mapping[str, int]) -> None:
    """Fail if *broken* has anything: what breaks *rule* in *path* → its line. *rule* ends with what to do instead."""
    places = [f"{path.relative_to(PACKAGE.parent)}:{line}: {what}: {rule}" for what, line in broken.items()]
    if places:
        pytest.fail("\n".join(places), pytrace=False)


def is_module(name: str) -> bool:
    """Tell whether *name* is that of a module or room of ours, and no other text that begins like one."""
    path = PACKAGE / name.removeprefix("runner.").replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").exists()


def within(name: str, places: set[str]) -> bool:
    return any(name == place or name.startswith(f"{place}.") for place in places)


def of_each(*begins: str) -> Callable[[Callable[[str, Path], None]], Callable[[], None]]:
    """Make a test of one module, by its name and path, a test of all whose name begins so, which shows each that fails."""

    def test_of_all(test: Callable[[str, Path], None]) -> Callable[[], None]:
        def of_all() -> None:
            failures = []
            for name, path in modules():
                if name.startswith(begins or ""):
                    try:
                        test(name, path)
                    except pytest.fail.Exception as failure:
                        failures.append(str(failure.msg))
            if failures:
                pytest.fail("\n".join(failures), pytrace=False)

        of_all.__doc__ = test.__doc__
        return of_all

    return test_of_all


def allowed(room: str) -> set[str]:
    """Return *room* and every room that it may import."""
    return {room}.union(*map(allowed, LAW[room]))


@of_each()
def test_rooms_import_only_what_the_law_allows(name: str, path: Path) -> None:
    """Names of modules in strings count as well."""
    room = name.split(".", maxsplit=1)[0]
    if room in EVERYTHING | {"__init__"} or path == PACKAGE / room / "__init__.py":
        return
    by_name = {found: line for found, line in imports_by_name(path).items() if is_module(found)}
    hold(
        f"{room} may import only {', '.join(sorted(allowed(room)))}: move what both need into one of these",
        path,
        {
            f"imports {found}": line
            for found, line in (by_name | imports(path)).items()
            if found.startswith("runner.") and not within(found.removeprefix("runner."), allowed(room))
        },
    )


@of_each("instance.")
def test_rooms_of_instance_import_only_what_their_law_allows(name: str, path: Path) -> None:
    room = name.split(".")[1]
    if room not in INSTANCE_ENTRANCES:
        others = {f"runner.instance.{other}" for other in INSTANCE_LAW.keys() - INSTANCE_LAW.get(room, set()) - {room}}
        broken = {f"imports {each}": line for each, line in imports(path).items() if within(each, others)}
        rule = "of instance's rooms it may import only those before its own: give what it needs to it as an argument"
        hold(rule, path, broken)


@of_each("controller.")
def test_the_host_tuner_knows_nothing_of_what_pods_send(name: str, path: Path) -> None:
    """It has a process of its own, with which the rest of the controller speaks through a door."""
    found = {each.removeprefix("runner."): line for each, line in imports(path).items()}
    if within(name, {"controller.tune"}):
        rule = "the host tuner parses nothing that a pod sends: let it have values, as messages of its own"
        known = {"controller.serve", "controller.tree", "protocol"}
        hold(rule, path, {f"imports {each}": line for each, line in found.items() if within(each, known)})
    elif name not in {"controller.main", "controller.privileged_start"}:
        doors = {f"controller.tune.{door}" for door in TUNING_DOORS}
        rule = f"the tuner is a process of its own: speak with it through {', '.join(sorted(doors))}"
        inside = {each: line for each, line in found.items() if within(each, {"controller.tune"}) and each not in doors}
        hold(rule, path, {f"imports {each}": line for each, line in inside.items()})


def test_no_two_files_import_each_other() -> None:
    """Indirect imports count too, and the names of modules in strings."""
    known = {f"runner.{name}": name for name, _ in modules()}
    needs = {
        name: {
            known[module]
            for found in (*imports(path), *imports_by_name(path))
            for module in (found, found.rpartition(".")[0])
            if module in known and known[module] != name
        }
        for name, path in modules()
    }
    circles = sorted(name for name in needs if name in reached(needs, name))
    assert circles == [], f"{circles} import each other: move what both need into a module that imports neither"


def reached(needs: dict[str, set[str]], start: str) -> set[str]:
    """Return every file that *start* needs, directly or indirectly."""
    found: set[str] = set()
    left = list(needs[start])
    while left:
        if (name := left.pop()) not in found:
            found.add(name)
            left += needs[name]
    return found


def test_no_class_name_is_used_twice() -> None:
    places: dict[str, list[str]] = {}
    for name, path in modules():
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name.lstrip("_"), []).append(name)
    twice = {cls: where for cls, where in places.items() if len(where) > 1}
    assert twice == {}, f"one class name is used in several modules, {twice}: give each class a name of its own"


def test_no_class_is_as_large_as_a_program() -> None:
    """One of more lines of code does several things, and whoever needs one of them is given all."""
    large = {cls: size for size, cls in figures.classes() if size > LARGEST_CLASS}
    assert large == {}, (
        f"a class has at most {LARGEST_CLASS} lines of code, and {large}: move what needs no state out of it"
    )


def test_what_few_instances_need_is_imported_by_the_table_of_optional_parts() -> None:
    """Elsewhere in PID 1 an import inside a function is an exception; and the table names modules to mypy, which checks their types."""
    inside = sorted(set(figures.imports_inside_functions("instance")))
    assert len(inside) <= MOST_IMPORTS_INSIDE_FUNCTIONS, (
        f"{inside}: import at the top, or by a row of {figures.OPTIONAL_PARTS.name}"
    )
    names = {node.id for node in nodes(figures.OPTIONAL_PARTS) if isinstance(node, ast.Name)}
    assert names & {"Any", "import_module"} == set()
    assert not any(map(is_module, imports_by_name(figures.OPTIONAL_PARTS)))


@of_each()
def test_pure_rooms_do_nothing(name: str, path: Path) -> None:
    if within(name, PURE):
        broken = {f"imports {found}": line for found, line in imports(path).items() if found.split(".")[0] in EFFECTS}
        hold(f"{name} does no input or output: read it in kernel or host, and pass the value", path, broken)


@of_each()
def test_each_kernel_interface_is_used_by_one_module_only(name: str, path: Path) -> None:
    for module, users in ONE_DOOR.items():
        if not within(name, users):
            broken = {f"imports {found}": line for found, line in imports(path).items() if within(found, {module})}
            hold(f"only {', '.join(sorted(users))} may: call a function of it, or write one there", path, broken)


@of_each()
def test_no_decision_reads_the_wall_clock(name: str, path: Path) -> None:
    """The wall clock may jump an hour either way; timeouts use trio's monotonic clock."""
    del name
    calls = {ast.unparse(node): node.lineno for node in nodes(path) if isinstance(node, ast.Attribute)}
    calls |= {found: line for found, line in imports(path).items() if found == "datetime"}
    wall = {"time.time", "time.time_ns", "datetime", "datetime.now", "datetime.utcnow"}
    broken = {call: line for call, line in calls.items() if call in wall}
    hold("the wall clock may jump: take trio.current_time() or time.monotonic()", path, broken)


@of_each("kernel.", "instance.")
def test_no_constant_of_a_module_holds_a_path_of_the_kernels_file_systems(name: str, path: Path) -> None:
    """Readers take their root path as an argument, so that another machine's tree can be read as well."""
    del name
    assignments = [node for node in parsed(path).body if isinstance(node, ast.Assign | ast.AnnAssign)]
    broken = {
        repr(each.value): each.lineno
        for node in assignments
        for each in ast.walk(node)
        if isinstance(each, ast.Constant)
        and isinstance(each.value, str)
        and each.value.startswith(("/proc", "/sys", "/dev"))
    }
    hold("another machine's tree must be readable too: join it to a root, which the caller gives", path, broken)


@of_each()
def test_init_files_are_empty(name: str, path: Path) -> None:
    del name
    code = path.name == "__init__.py" and path.read_text()
    hold("a room's __init__ has no code: move it into a module", path, {"code": 1} if code else {})


NO_IMPERATIVE = {"What", "Whether", "How", "Why", "Which", "Where", "Who", "When", "Have"}
NO_NOUN = {"what", "why", "where", "who", "those"}
"""After the verb: a value is named by a noun, not by a clause."""


@of_each()
def test_the_docstring_of_a_function_says_what_it_does(name: str, path: Path) -> None:
    del name
    broken = {}
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            words = (ast.get_docstring(node) or "-").split()[:2]
            if words[0] in NO_IMPERATIVE or words[-1] in NO_NOUN:
                broken[f"{node.name} ({' '.join(words)} …)"] = node.lineno
    hold("its docstring begins with a verb in the imperative, and names values by nouns: 'Return the …'", path, broken)


@of_each()
def test_the_docstring_of_a_field_or_constant_begins_with_a_noun(name: str, path: Path) -> None:
    """Or with "Whether"."""
    del name
    bodies = (getattr(node, "body", []) for node in nodes(path))
    broken = {
        f"{ast.unparse(named)} ({described.value.value.split()[0]} …)": described.lineno
        for body in bodies
        if isinstance(body, list)
        for named, described in pairwise(body)
        if isinstance(described, ast.Expr)
        and isinstance(described.value, ast.Constant)
        and isinstance(described.value.value, str)
        and described.value.value.split()[0] in NO_IMPERATIVE - {"Whether"}
    }
    hold("its docstring begins with a noun, or with Whether", path, broken)


@of_each()
def test_the_docstring_of_a_module_or_class_begins_with_what_it_is(name: str, path: Path) -> None:
    """Not those of the spec's tables, which are a sentence of its reference."""
    if name == "spec.instance":
        return
    broken = {
        getattr(node, "name", name): getattr(node, "lineno", 1)
        for node in nodes(path)
        if isinstance(node, ast.Module | ast.ClassDef) and (ast.get_docstring(node) or "-").split()[0] in NO_IMPERATIVE
    }
    hold("its docstring begins with a noun that says what it is", path, broken)


def test_a_forbidden_import_is_found(tmp_path: Path) -> None:
    by_name = tmp_path / "by_name.py"
    by_name.write_text('modules = {"tun": "runner.kernel.tun"}\n')
    assert imports_by_name(by_name) == {"runner.kernel.tun": 1}
    offender = tmp_path / "offender.py"
    offender.write_text(
        "import runner.plan.argv.qemu\nfrom runner.protocol import qmp\nfrom runner import spec\nimport os.path\n"
    )
    assert imports(offender) == {"runner.plan.argv.qemu": 1, "runner.protocol.qmp": 2, "runner.spec": 3, "os.path": 4}
    assert not within("plan.argv", allowed("kernel"))
    assert allowed("protocol") == {"protocol", "kernel", "facts", "base"}


def test_a_broken_rule_is_named_with_its_place_and_what_to_do() -> None:
    with pytest.raises(pytest.fail.Exception) as caught:
        hold("kernel may import only base, facts: move it", PACKAGE / "kernel/files.py", {"imports runner.plan": 7})
    assert (
        caught.value.msg == "runner/kernel/files.py:7: imports runner.plan: kernel may import only base, facts: move it"
    )
