"""Law: every surface of the ledger has the verbs of the table in `verb.rs`, and no others."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import log_reference
from paths import ROOT
from specpool import Ledger, _core
from verb_table import ENTRIES, METHODS

INCLUDE = ROOT / "rust/specpool-capi/include"
#: A snapshot is a value of the process that took it; the C interface has no handle for one.
NOT_IN_C = {"snapshot", "restore"}
#: They fill arrays of the caller, which `specpool.h` takes as it is.
NOT_IN_CPP = {"take_delta", "ack_delta"}


def _stub_methods() -> set[str]:
    stub = ast.parse(Path(_core.__file__).with_name("_core.pyi").read_text(encoding="utf-8"))
    (ledger,) = (
        node for node in stub.body if isinstance(node, ast.ClassDef) and node.name == "Ledger"
    )
    return {node.name for node in ledger.body if isinstance(node, ast.FunctionDef)}


def _functions_of_c() -> set[str]:
    header = (INCLUDE / "specpool.h").read_text(encoding="utf-8")
    return set(re.findall(r"\bspecpool_ledger_(\w+)\(", header))


def test_python_has_each_verb():
    assert METHODS - set(vars(Ledger)) == set()
    assert METHODS - _stub_methods() == set()


def test_c_has_each_verb_or_it_is_named_here():
    functions = {entry.function for entry in ENTRIES}
    assert functions - _functions_of_c() == NOT_IN_C


def test_cpp_has_each_verb_of_c_or_it_is_named_here():
    header = (INCLUDE / "specpool.hpp").read_text(encoding="utf-8")
    calls = set(re.findall(r"\bspecpool_ledger_(\w+)\(handle_", header))
    assert {entry.function for entry in ENTRIES} - NOT_IN_C - calls == NOT_IN_CPP
    assert all(f"`{name}`" in header for name in NOT_IN_CPP), "the head names what is left out"


def test_the_page_on_the_log_has_each_kind():
    """The verb and the bytes of each call, as docs/event_log.md has them."""
    kinds = {kind: entry.name for entry in ENTRIES for kind in entry.kinds}
    page = {kind: verb for kind, (verb, _) in log_reference.KINDS.items()}
    assert {kind: page[kind] for kind in page if kind < 126} == kinds
