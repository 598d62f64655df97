"""Figures of the code's size: ``python -m tests.support.figures`` prints them, ``test_house`` holds some."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import runner.__main__

PACKAGE = Path(runner.__main__.__file__).parent
"""The folder of the code."""
OPTIONAL_PARTS = PACKAGE / "instance/optional_parts.py"
"""The module of imports inside functions."""
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def files(room: str = "") -> list[Path]:
    """Return the modules of *room*, mostly of all rooms."""
    return sorted((PACKAGE / room).rglob("*.py"))


@cache
def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a module, which nobody may change: each test of the source reads all of them."""
    return ast.parse(path.read_text())


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of :func:`parsed`."""
    return tuple(ast.walk(parsed(path)))


def code_lines(path: Path) -> set[int]:
    """Return the numbers of the lines of *path* that have code: none that is blank, a comment or a docstring."""
    text = path.read_text()
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in NO_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in nodes(path):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def classes() -> Iterator[tuple[int, str]]:
    """Yield each class with the number of its lines of code."""
    for path in files():
        lines = code_lines(path)
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                yield len(lines & set(range(node.lineno, (node.end_lineno or node.lineno) + 1))), node.name


def imports_inside_functions(room: str) -> Iterator[str]:
    """Yield, for each import inside a function of *room*, its place; neither those of :data:`OPTIONAL_PARTS` count nor a type checker's."""
    for path in set(files(room)) - {OPTIONAL_PARTS}:
        for function in nodes(path):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                for node in ast.walk(function):
                    match node:
                        case ast.Import() | ast.ImportFrom() | ast.Call(func=ast.Name(id="import_module")):
                            yield f"{path.relative_to(PACKAGE)}:{node.lineno}"


def reached(*starts: str) -> set[str]:
    """Return the modules that *starts* import, directly or not, lazily too and by a name in a string."""
    found: set[str] = set()
    left = list(starts)
    while left:
        name = left.pop()
        path = PACKAGE.parent / f"{name.replace('.', '/')}.py"
        if name in found or not path.exists():
            continue
        found.add(name)
        for node in nodes(path):
            match node:
                case ast.Import(names=names):
                    left += (alias.name for alias in names)
                case ast.ImportFrom(module=str(module), names=names):
                    left += (module, *(f"{module}.{alias.name}" for alias in names))
                case ast.Constant(value=str(text)) if re.fullmatch(r"runner(\.\w+)+", text):
                    left.append(text)
    return found


def count(pattern: str, paths: list[Path]) -> int:
    """Return the number of lines in *paths* that *pattern* matches."""
    return sum(bool(re.search(pattern, line)) for path in paths for line in path.read_text().splitlines())


def main() -> None:
    """Print the figures."""
    reachable = reached("runner.cli.run_instance")
    outside = [path for path in files() if not {"renewal"} & set(path.parts)]
    tests = sorted((PACKAGE.parent / "tests").rglob("*.py"))
    for name, value in (
        ("lines of code", sum(len(code_lines(path)) for path in files())),
        *((f"  of {room.name}", sum(len(code_lines(path)) for path in files(room.name)))
          for room in sorted(PACKAGE.iterdir()) if (room / "__init__.py").exists()),
        ("lines of code that run can reach", sum(len(code_lines(PACKAGE.parent / f"{name.replace('.', '/')}.py")) for name in reachable)),
        ("imports inside functions of instance/", len(set(imports_inside_functions("instance")))),
        ("classes over 350 lines", sorted(((size, cls) for size, cls in classes() if size > 350), reverse=True)),
        ("largest classes", sorted(classes(), reverse=True)[:8]),
        ("places outside renewal/ that know of it", count(r"resuming|carried is None|\.taking\(|\.offer\(|not_now", outside)),
        ("tests that replace a name", count(r"monkeypatch\.setattr", tests)),
        ("of these a constant of ours", count(r"monkeypatch\.setattr\([^()]*\b[A-Z]{3}[A-Z_]*\b", tests)),
    ):  # fmt: skip
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()
