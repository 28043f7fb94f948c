"""`python -m lab house`: what it counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli_kit import call
from lab.house import duplicate_classes

FILES = {
    "python/specpool/__init__.py": "class Row:\n    found = 1\n",
    "python/specpool/engine/scheduler/__init__.py": "",
    "python/specpool/engine/scheduler/rows.py": (
        "class Rows:\n    class Row:\n        pass\n\n\n"
        "def count(found, own=2):\n    for each in found:\n        own += each\n"
    ),
    "rust/core/src/ledger.rs": "fn end_turn() {}\nfn end_turns() {}\n",
    "rust/core/src/call.rs": "enum Call { EndTurn }\n",
    "rust/core/tests/ledger.rs": "end_turn();\n",
    "cuda/page.cu": "//\n",
    "docs/page.md": "Three words here.\n",
    "README.md": "Two words.\n",
    "CHANGELOG.md": "One.\n",
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_the_house_is_counted(capsys, checkout):
    code, out, err = call(capsys, "lab", "house", "--root", str(checkout))
    assert (code, err) == (0, "")
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in out.splitlines()]
    for cell in (
        ["2", "engine/scheduler", "2", "8"],
        ["all", "all", "3", "10"],
        ["Rust, sources", "2", "3 lines"],
        ["docs", "1", "3 words"],
        ["top-level rooms of the package", "1"],
        ["files in scheduler/", "2"],
        ["source files that name the verb end_turn", "2"],
        ["assigned variables that are pronouns", "3"],
        ["Row", "__init__.py, engine/scheduler/rows.py"],
    ):
        assert cell in cells, out


def test_a_class_in_a_class_counts(checkout):
    package = checkout / "python" / "specpool"
    assert duplicate_classes(package) == {"Row": ["__init__.py", "engine/scheduler/rows.py"]}


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--root", "/no/such"], "--root must be a checkout of specpool"),
        (["--verb", "EndTurn"], "--verb must be a name such as end_turn, got 'EndTurn'"),
    ],
)
def test_a_bad_option_is_one_line(capsys, args, says):
    code, out, err = call(capsys, "lab", "house", *args)
    assert (code, out) == (2, "") and says in err
