"""`python -m lab house`: the sizes of a checkout and the names in it. It asserts nothing."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from specpool.errors import ConfigError

#: Top-level folders of the package by tier; the engine is tier 2.
_TIERS = {
    "(root)": 1,
    "capacity": 1,
    "kernels": 1,
    "plugins": 1,
    "record": 1,
    "testing": 1,
    "serve": 3,
    "train": 3,
    "cli": 3,
}
#: Files that are no rooms: what Python itself asks for.
_NO_ROOMS = {"__init__.py", "__main__.py"}
#: Words that leave the noun to the reader.
PRONOUNS = ("found", "each", "most", "own", "one", "kept", "told", "mine", "of", "place")
#: The head of a class; no text of the package has a line like that.
_CLASS = re.compile(r"^ *class (\w+)[:(]", re.MULTILINE)
#: Suffixes of the source files that may name a verb.
_SOURCES = {".rs", ".h", ".hpp", ".cu", ".cuh", ".py", ".pyi"}


def house(*, root: Path, verb: str) -> None:
    """Print the tables for the checkout at `root`; `verb` is a verb of the ledger, in snake case.

    Raises:
        ConfigError: `root` is not a checkout, or `verb` is not a name.
    """
    package = root / "python" / "specpool"
    if not package.is_dir():
        raise ConfigError(f"root must be a checkout of specpool, and {package} is not a folder")
    if not re.fullmatch(r"[a-z]+(_[a-z]+)*", verb):
        raise ConfigError(f"verb must be a name such as end_turn, got {verb!r}")
    trees = parsed(package)
    console = Console(highlight=False, soft_wrap=True)
    console.print(_wheel(package))
    console.print(_parts(root))
    console.print(_names(root, package, trees, verb))
    duplicates = [(name, ", ".join(files)) for name, files in duplicate_classes(package).items()]
    console.print(_table("class names that occur twice", ("class", "files"), duplicates))


def parsed(package: Path) -> dict[Path, ast.Module]:
    """Return the syntax tree of each Python file of a package, by its path in there."""
    return {
        path.relative_to(package): ast.parse(path.read_text(encoding="utf-8"))
        for path in _files(package, {".py"})
    }


def duplicate_classes(package: Path) -> dict[str, list[str]]:
    """Return the class names that several classes have, each with the files of these classes."""
    files: dict[str, list[str]] = {}
    for path in _files(package, {".py"}):
        for name in _CLASS.findall(path.read_text(encoding="utf-8")):
            files.setdefault(name, []).append(path.relative_to(package).as_posix())
    return {name: files[name] for name in sorted(files) if len(files[name]) > 1}


def _wheel(package: Path) -> Table:
    """Return lines and files of the package's Python, tier by tier.

    The parts of tier 2 are the folders of the engine; those of the others are top-level folders.
    """
    files: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    for path in _files(package, {".py", ".pyi"}):
        parts = path.relative_to(package).parts
        folder = parts[0] if len(parts) > 1 else "(root)"
        if folder == "engine" and len(parts) > 2:
            folder = f"engine/{parts[1]}"
        files[folder] += 1
        lines[folder] += _num_lines(path)
    rows: list[tuple[str, ...]] = []
    for tier in (1, 2, 3):
        folders = sorted(folder for folder in files if _TIERS.get(folder, 2) == tier)
        rows += [(str(tier), name, str(files[name]), f"{lines[name]:,}") for name in folders]
        num_files = sum(files[name] for name in folders)
        rows.append((str(tier), "all", str(num_files), f"{sum(lines[name] for name in folders):,}"))
    rows.append(("all", "all", str(files.total()), f"{lines.total():,}"))
    return _table("Python in the wheel", ("tier", "folder", "files", "lines"), rows)


def _parts(root: Path) -> Table:
    """Return the sizes of what is around the package."""
    rows = []
    for title, folder, suffixes in (
        ("tests, Python", root / "tests", {".py"}),
        ("benches, Python", root / "benches", {".py"}),
        ("lab, Python", root / "lab", {".py"}),
        ("Rust, sources", root / "rust", {".rs"}),
        ("CUDA", root / "cuda", {".cu", ".cuh"}),
    ):
        paths = list(_files(folder, suffixes))
        if title == "Rust, sources":
            tests = [path for path in paths if "tests" in path.relative_to(folder).parts]
            paths = [path for path in paths if path not in tests]
            rows.append(("Rust, tests", str(len(tests)), f"{sum(map(_num_lines, tests)):,} lines"))
        rows.append((title, str(len(paths)), f"{sum(map(_num_lines, paths)):,} lines"))
    for title, paths in (
        ("docs", list(_files(root / "docs", {".md"}))),
        ("README", [root / "README.md"]),
        ("CHANGELOG", [root / "CHANGELOG.md"]),
    ):
        words = sum(len(path.read_text(encoding="utf-8").split()) for path in paths)
        rows.append((title, str(len(paths)), f"{words:,} words"))
    return _table("around it", ("part", "files", "size"), rows)


def _names(root: Path, package: Path, trees: Mapping[Path, ast.Module], verb: str) -> Table:
    rooms = {path.parts[0] for path in trees if len(path.parts) > 1 or path.name not in _NO_ROOMS}
    scheduler = [path for path in trees if "scheduler" in path.parts[:-1]]
    assigned = Counter(
        node.id
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in PRONOUNS
    )
    rows = [
        ("top-level rooms of the package", str(len(rooms))),
        ("files in scheduler/", str(len(scheduler))),
        (f"source files that name the verb {verb}", str(len(_naming(root, package, verb)))),
        ("class names that occur twice", str(len(duplicate_classes(package)))),
        ("assigned variables that are pronouns", str(assigned.total())),
        *((f"  {name}", str(assigned[name])) for name in PRONOUNS),
    ]
    return _table("rooms and names", ("measure", "count"), rows)


def _naming(root: Path, package: Path, verb: str) -> list[Path]:
    """Return the sources that name `verb`, in snake case or camel case; tests do not count."""
    camel = "".join(word.title() for word in verb.split("_"))
    name = re.compile(rf"\b(?:{verb}|{camel})\b")
    crates = [
        path for path in _files(root / "rust", _SOURCES) if {"src", "include"} & {*path.parts}
    ]
    sources = [*crates, *_files(root / "cuda", _SOURCES), *_files(package, _SOURCES)]
    return [path for path in sources if name.search(path.read_text(encoding="utf-8"))]


def _files(folder: Path, suffixes: set[str]) -> Iterable[Path]:
    paths = (path for path in sorted(folder.rglob("*")) if path.suffix in suffixes)
    return (path for path in paths if not {"target", "__pycache__"} & {*path.parts})


def _num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n")


def _table(title: str, columns: Iterable[str], rows: Iterable[tuple[str, ...]]) -> Table:
    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    return table
