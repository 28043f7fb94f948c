"""No test holds two layouts at once."""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent


def privates_of(chain: ast.expr) -> list[str]:
    """The private attributes of `a.b[0].c()._d._e`, those of `self` itself left out."""
    names = []
    while isinstance(chain, ast.Attribute | ast.Subscript | ast.Call):
        if isinstance(chain, ast.Call):
            chain = chain.func
            continue
        if isinstance(chain, ast.Attribute) and chain.attr.startswith("_"):
            of_self = isinstance(chain.value, ast.Name) and chain.value.id == "self"
            if not chain.attr.startswith("__") and not of_self:
                names.append(chain.attr)
        chain = chain.value
    return names


def test_no_test_reaches_a_private_of_a_private():
    """Such a test holds two layouts at once: ask the first object, or name what it shall answer."""
    for path in sorted(TESTS.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                assert len(privates_of(node)) < 2, f"{path}:{node.lineno} {ast.unparse(node)}"
