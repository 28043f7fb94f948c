"""`docs/architecture.md` has every folder of the package, and only functions that exist."""

from __future__ import annotations

import ast
import re
from itertools import pairwise

import pytest

from paths import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
CELLS = re.compile(r"^\|(.*)\|$", re.MULTILINE)
NAME, FILE = re.compile(r"`([\w.:]+)`"), re.compile(r"`((?:python|rust|cuda)/[\w/.-]+\.\w+)`")


def steps() -> list[tuple[str, str]]:
    """Each line of a table that names a function and its file: (name, file)."""
    found = []
    for line in CELLS.findall(PAGE):
        cells = [cell.strip() for cell in line.split("|")]
        for name, file in pairwise(cells):
            if NAME.fullmatch(name) and FILE.fullmatch(file):
                found.append((name.strip("`"), file.strip("`")))
    return found


def python_functions(text: str) -> set[str]:
    """The functions of a module, and the methods of its classes as `Class.name`."""
    found, functions = set(), (ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.parse(text).body:
        if isinstance(node, functions):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {
                f"{node.name}.{each.name}" for each in node.body if isinstance(each, functions)
            }
    return found


def rust_functions(text: str) -> set[str]:
    """The functions of a file, and those of its impl blocks as `Type::name`."""
    found = set(re.findall(r"^(?:pub(?:\([a-z]+\))? )?fn (\w+)", text, re.MULTILINE))
    for kind, body in re.findall(r"^impl(?:<[^>]*>)? (\w+).*?\{\n(.*?)^\}", text, re.M | re.S):
        names = re.findall(r"^    (?:pub(?:\([a-z]+\))? )?(?:const )?fn (\w+)", body, re.MULTILINE)
        found |= {f"{kind}::{name}" for name in names}
    return found


def folders() -> set[str]:
    """The folders of the package and of its engine, and the other folders of sources."""
    package = ROOT / "python" / "specpool"
    python = [*package.iterdir(), *(package / "engine").iterdir()]
    names = {folder.relative_to(ROOT).as_posix() for folder in python if any(folder.glob("*.py"))}
    crates = ("core/src", "py", "capi", "ops", "check", "bench")
    names |= {f"rust/specpool-{crate}" for crate in crates}
    return names | {"cuda", "tests", "benches", "lab", "fuzz", "examples", "docs"}


@pytest.mark.parametrize(("name", "file"), sorted(set(steps())))
def test_every_step_of_a_walk_is_a_function_of_its_file(name, file):
    text = (ROOT / file).read_text(encoding="utf-8")
    found = python_functions(text) if file.endswith(".py") else rust_functions(text)
    assert name in found, f"docs/architecture.md: {file} has no {name}"


def test_the_walks_are_whole():
    """A row in another form would be skipped, not checked."""
    sections = re.split(r"^## ", PAGE, flags=re.MULTILINE)
    walks = [section for section in sections if "| function |" in section]
    assert len(walks) == 4
    for walk in walks:
        rows = [line for line in CELLS.findall(walk) if "---" not in line][1:]
        assert rows == [line for line in rows if NAME.search(line) and FILE.search(line)], walk


@pytest.mark.parametrize("folder", sorted(folders()))
def test_every_folder_has_its_sentence(folder):
    sentences = re.findall(rf"^\| `{re.escape(folder)}` \| (.+) \|$", PAGE, re.MULTILINE)
    assert len(sentences) == 1 and sentences[0].endswith(".")


def test_no_folder_that_is_gone_is_named():
    for folder in re.findall(r"^\| `([\w/-]+)` \| [^|]+ \|$", PAGE, re.MULTILINE):
        assert (ROOT / folder).is_dir(), folder


def test_a_wrong_name_is_noticed():
    text = "class A:\n    def f(self): ...\n\ndef g(): ...\n"
    assert python_functions(text) == {"A.f", "g"}
    text = (
        "impl A {\n    pub(crate) fn f() {\n    }\n}\n\nimpl B {\n    fn h() {}\n}\n\nfn g() {}\n"
    )
    assert rust_functions(text) == {"A::f", "B::h", "g"}


def test_the_layers_are_those_that_lint_checks():
    """The lists in the page have the folders of `[tool.importlinter]` in its order.

    The page calls the first layer of the engine, its own files, by that name.
    """
    lint = (ROOT / "pyproject.toml").read_text()
    package, engine = re.findall(r"^layers = \[(.*?)^\]", lint, re.MULTILINE | re.DOTALL)
    shown = re.findall(r"^```text\n(\w+ -> .*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert [layers_shown(text) for text in shown] == [layers_of(package), layers_of(engine)[1:]]


def layers_of(block: str) -> list[set[str]]:
    rows = re.findall(r'"([^"]+)"', block)
    return [{part.removeprefix("specpool.") for part in row.split(" : ")} for row in rows]


def layers_shown(text: str) -> list[set[str]]:
    return [{part.strip() for part in row.split(",")} for row in text.split("->")]
