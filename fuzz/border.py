"""Call every function of `specpool._core` with arguments that nearly fit.

Shapes, dtypes, strides, aliases and sizes are odd now and then. Names and types come from
`_core.pyi`, so a new function is fuzzed at once. The law: a call answers or raises one of
`REFUSALS`; a refused call writes nothing; a wrong array never aborts the process.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import numpy as np
from source import EDGES, STRANGERS, Source, array, overlapping, spoiled

import specpool
from specpool import SpecpoolError, _core

#: The errors that a call may raise: ours, and Python's own for a wrong kind, number or text, or no
#: memory.
REFUSALS = (SpecpoolError, TypeError, OverflowError, MemoryError, UnicodeEncodeError)
DTYPES = {
    "_I32": "i4",
    "_I64": "i8",
    "_F32": "f4",
    "_F64": "f8",
    "_Bool": "?",
    "_U8": "u1",
    "_IntArray": "i4",
    "NDArray[np.uint64]": "u8",
}
#: The dimensions of an array by its name, as letters of `sizes`; n where it is not named.
DIMENSIONS = {
    "attend_pages.keys": "WKS", "attend_pages.values": "WKS", "attend_pages.new_keys": "nKS",
    "attend_pages.new_values": "nKS", "attend_pages.q": "nKS", "attend_pages.out": "nKS",
    "attend_pages.pages": "nP", "attend_pages.bias": "nNL", "attend_pages.sinks": "K",
    "page_table": "RW", "ancestors": "nKS", "branch_parents": "nK", "accept_index": "nA",
    "topk_p": "nK", "topk_index": "nK", "scores": "nK",
    "candidate_scores": "nM", "candidate_tokens": "nM", "candidate_parents": "nL",
    "parent_list": "nL", "top_scores_index": "nD", "parents": "nN", "tokens": "nN",
    "first_child": "nN", "next_sibling": "nN", "target_tokens": "nN", "logits": "nV",
    "own_mask": "nNN", "q_positions": "nN", "own_positions": "nN", "out": "O",
    "gather_pages.out": "G", "scatter_pages.values": "G",
}  # fmt: skip
#: The size that an integer argument has in a call that fits.
SIZES = {
    "topk": "K",
    "num_steps": "S",
    "num_draft_tokens": "N",
    "page_size": "P",
    "step": "s",
    "num_slots": "O",
    "num_columns": "O",
    "num_queries": "N",
}


# Functions that read no arrays, or that take a ledger, which `fuzz/ledger.py` drives.
OTHERS = {"decode_op", "kernel_source", "decode_into", "launch_into", "round_slots"}


def signatures() -> dict[str, list[tuple[str, str, bool]]]:
    """By function: each argument's name, annotation, and whether it has a default."""
    module = ast.parse(Path(specpool.__file__).with_name("_core.pyi").read_text(encoding="utf-8"))
    fields = {}
    for node in module.body:
        if isinstance(node, ast.FunctionDef) and node.name not in OTHERS:
            arguments = node.args
            plain = [*arguments.posonlyargs, *arguments.args]
            defaults = (
                [None] * (len(plain) - len(arguments.defaults))
                + list(arguments.defaults)
                + list(arguments.kw_defaults)
            )
            fields[node.name] = [
                (arg.arg, ast.unparse(arg.annotation), default is not None)
                for arg, default in zip([*plain, *arguments.kwonlyargs], defaults, strict=True)
                if arg.annotation is not None
            ]
    return fields


SIGNATURES = signatures()
NAMES = sorted(SIGNATURES)


def dimensions_of(function: str, name: str) -> str:
    return DIMENSIONS.get(f"{function}.{name}", DIMENSIONS.get(name, "n"))


def sizes_of(source: Source) -> dict[str, int]:
    K, S, n = 1 + source.below(4), 1 + source.below(4), source.below(4)
    M = K + (S - 1) * K * K
    N = 1 + source.below(M + 1)
    return {
        "n": n, "K": K, "S": S, "N": N, "M": M, "D": N - 1, "A": S + 1, "L": 1 + K * S,
        "P": (P := 1 + source.below(5)), "G": 2 * n * P,
        "s": source.below(S), "R": 5, "W": 12, "V": 1 + source.below(9), "O": source.below(200),
    }  # fmt: skip


def argument(
    source: Source, function: str, name: str, annotation: str, sizes: dict[str, int]
) -> Any:
    if annotation.split(" | ")[0] in DTYPES:
        dtype = DTYPES[annotation.split(" | ")[0]]
        shape = [sizes[letter] for letter in dimensions_of(function, name)]
        if name == "parents":
            return np.tile(np.arange(-1, shape[1] - 1, dtype=dtype), (shape[0], 1))
        return array(source, dtype, shape, 5 if name != "page_table" else 16)
    if annotation.startswith("int"):
        if source.is_rare(2):
            return source.pick(EDGES)
        return sizes[SIZES[name]] if name in SIZES else source.below(40)
    if annotation == "bool":
        return source.byte() % 2 == 1
    if annotation.startswith("float"):
        return source.pick((1.0, 0.5, 0.0, -1.0, float("nan"), float("inf"), 1e30))
    if annotation == "_Layout":
        return source.pick(("dense", "holey"))
    if annotation == "_Policy":
        return source.pick(("exact", "double_buffer"))
    if annotation == "str":
        return source.pick(("slots", "", "x" * 100, "\0"))
    if "Shape" in annotation:
        return (
            [shape_of(source) for _ in range(source.below(3))]
            if "Sequence" in annotation
            else shape_of(source)
        )
    if annotation.startswith("Sequence[tuple"):
        return [buffer_of(source) for _ in range(1 + source.below(2))]
    if annotation == "Sequence[_U8]" and function.endswith("_pages"):
        return [array(source, "u1", (sizes["W"], sizes["P"]), 200) for _ in range(2)]
    if annotation == "Sequence[_U8]":
        return [
            array(source, "u1", (source.below(3), sizes["n"], source.below(5)), 200)
            for _ in range(2)
        ]
    raise AssertionError(f"{name}: nothing makes a {annotation}")


def shape_of(source: Source) -> Any:
    try:
        return specpool.Shape.eagle(1 + source.below(5), 1 + source.below(4), 2 + source.below(9))
    except SpecpoolError:
        return specpool.Shape.none()


def buffer_of(source: Source) -> tuple[Any, Any]:
    widths = [source.below(5) for _ in range(1 + source.below(2))]
    pages, page_size = source.below(9), 1 + source.below(3)
    lead = source.below(3) if not source.is_rare(1) else source.pick((2**31, 2**40))
    size = page_size * sum(widths)
    return (
        array(source, "u1", (lead, pages, size), 250)
        if lead < 9
        else np.zeros((lead, 0, 0), np.uint8)
    ), widths


def writable(given: dict[str, Any]) -> list[Any]:
    """The arrays that a call could write, including those in lists."""
    flat = [
        part for value in given.values() for part in (value if isinstance(value, list) else [value])
    ]
    flat = [part[0] if isinstance(part, tuple) else part for part in flat]
    return [part for part in flat if isinstance(part, np.ndarray) and part.size < 1 << 20]


def one_input(data: bytes) -> str | None:
    """Make one call from the bytes.

    Returns:
        The function's name where the call was accepted.
    """
    source = Source(data)
    name = source.pick(NAMES)
    sizes = sizes_of(source)
    given: dict[str, Any] = {}
    for argument_name, annotation, optional in SIGNATURES[name]:
        if not (optional and source.is_rare(8)):
            made = argument(source, name, argument_name, annotation, sizes)
            if source.is_rare(1):
                made = (
                    spoiled(source, made)
                    if isinstance(made, np.ndarray)
                    else source.pick((*STRANGERS, *EDGES))
                )
            given[argument_name] = made
    arrays = [
        key
        for key, value in given.items()
        if isinstance(value, np.ndarray) and value.size < 1 << 16
    ]
    if source.is_rare(1):
        views = [np.ascontiguousarray(given[key]) for key in arrays]
        overlapping(source, views)
        given.update(zip(arrays, views, strict=True))
    watched = writable(given)
    before = [part.tobytes() for part in watched]
    try:
        getattr(_core, name)(**given)
    except REFUSALS:
        assert [part.tobytes() for part in watched] == before, f"{name} was refused and has written"
        return None
    return name
