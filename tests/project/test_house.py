"""The package stays small: `python tests/house.py` prints the measures, which have limits here."""

from __future__ import annotations

import ast
import statistics
from pathlib import Path

import house


def test_no_file_grows_beyond_a_few_hundred_lines():
    lines = house.file_lines()
    assert max(lines.values()) <= 450, max(lines, key=lines.__getitem__)
    assert statistics.median(lines.values()) <= 125


def test_no_function_is_longer_than_a_screen():
    """Without the docstring, the options of commands included."""
    lines = house.function_lines()
    assert max(lines.values()) <= 60, max(lines, key=lines.__getitem__)


def test_no_folder_is_too_full():
    folders = house.folder_files()
    assert max(folders.values()) <= 13, max(folders, key=folders.__getitem__)
    assert (
        len(house.rooms()) <= 31
    )  # 26 as the plan drew it, two doors to engines, a server, moves, ranks


def privates_of(chain: ast.expr) -> list[str]:
    """The private attributes of `a.b[0].c()._d._e`, those of `self` itself left out."""
    found = []
    while isinstance(chain, ast.Attribute | ast.Subscript | ast.Call):
        if isinstance(chain, ast.Call):
            chain = chain.func
            continue
        if isinstance(chain, ast.Attribute) and chain.attr.startswith("_"):
            own = isinstance(chain.value, ast.Name) and chain.value.id == "self"
            if not chain.attr.startswith("__") and not own:
                found.append(chain.attr)
        chain = chain.value
    return found


def test_no_test_reaches_a_private_of_a_private():
    """Such a test holds two layouts at once: ask the first object, or name what it shall answer."""
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                assert len(privates_of(node)) < 2, f"{path.name}:{node.lineno} {ast.unparse(node)}"
