"""`help()` of the Rust core says what the stub says: each docstring has one source."""

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specpool import _core
from verb_table import METHODS

STUB = Path(_core.__file__).with_name("_core.pyi")
Documented = ast.ClassDef | ast.FunctionDef


def named(nodes: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, Documented]]:
    """Every public class, function, method and property of the stub, with its dotted name."""
    for node in nodes:
        if isinstance(node, Documented) and not node.name.startswith("_"):
            yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from named(node.body, f"{prefix}{node.name}.")


MODULE = ast.parse(STUB.read_text())
NODES = dict(named(MODULE.body))


def at_run_time(name: str) -> Any:
    found: Any = _core
    for part in name.split("."):
        # From the class's own dictionary: a property as such, and nothing that is inherited.
        found = vars(found)[part]
    return found


def parameters(node: ast.FunctionDef) -> list[str]:
    args = node.args
    in_order = [*args.posonlyargs, *args.args, args.vararg, *args.kwonlyargs, args.kwarg]
    return [arg.arg for arg in in_order if arg is not None]


def test_every_public_name_of_the_core_is_in_the_stub() -> None:
    names = {name for name in _core.__all__ if callable(getattr(_core, name))}
    for name in sorted(names):
        found = getattr(_core, name)
        if isinstance(found, type):
            names |= {f"{name}.{part}" for part in vars(found) if not part.startswith("_")}
    assert names == set(NODES)


def test_the_module_is_documented() -> None:
    assert inspect.getdoc(_core) == ast.get_docstring(MODULE)


@pytest.mark.parametrize("name", NODES)
def test_help_shows_the_docstring_of_the_stub(name: str) -> None:
    written = ast.get_docstring(NODES[name])
    assert written, f"the stub has no docstring for {name}"
    found = at_run_time(name)
    # `getdoc` of a static method is that of its type.
    found = found.__func__ if isinstance(found, staticmethod) else found
    assert inspect.getdoc(found) == written


@pytest.mark.parametrize("name", NODES)
def test_the_signature_names_the_parameters_of_the_stub(name: str) -> None:
    node, found = NODES[name], at_run_time(name)
    if isinstance(node, ast.ClassDef):
        methods = {part.name: part for part in node.body if isinstance(part, ast.FunctionDef)}
        constructor = methods.get("__new__")
        if constructor is None:
            with pytest.raises(TypeError):
                found()
            return
        expected = parameters(constructor)[1:]
    elif inspect.isgetsetdescriptor(found):
        assert any(
            isinstance(mark, ast.Name) and mark.id == "property" for mark in node.decorator_list
        )
        return
    else:
        found = found.__func__ if isinstance(found, staticmethod) else found
        expected = parameters(node)
    assert list(inspect.signature(found).parameters) == expected


#: Verbs change the ledger; everything else that it has is a query, and says what it costs.
VERBS = METHODS | {"close"}


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, node in NODES.items()
        if isinstance(node, ast.FunctionDef)
        and name.startswith("Ledger.")
        and name.removeprefix("Ledger.") not in VERBS
    ],
)
def test_every_query_of_the_ledger_states_its_cost(name: str) -> None:
    assert "Cost: O(" in (ast.get_docstring(NODES[name]) or "")
