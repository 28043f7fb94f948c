"""Laws of the exceptions: they name what was wrong; pickling and copying keep text and numbers."""

from __future__ import annotations

import concurrent.futures
import copy
import inspect
import multiprocessing
import pickle
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from specpool import (
    BlockPool,
    ConfigError,
    Group,
    Ledger,
    OutOfPages,
    Shape,
    ShapeError,
    SpecpoolError,
    _core,
    errors,
)

# Made-up arguments, by the names that the constructors give them.
VALUES = {
    "message": "need 12 pages, 7 free",
    "group": "kv",
    "state": "owned",
    "owner": "row 3",
    "rows": [1, 4],
}
CLASSES = [
    one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, SpecpoolError)
]


def made(kind: type[SpecpoolError]) -> SpecpoolError:
    if not inspect.isfunction(kind.__init__):
        return kind(VALUES["message"])
    names = list(inspect.signature(kind).parameters)
    return kind(*(VALUES.get(name, 10 + at) for at, name in enumerate(names)))


def same(one: BaseException, two: BaseException) -> bool:
    seen = [(type(error), str(error), error.args, vars(error)) for error in (one, two)]
    return one is not two and seen[0] == seen[1]


def test_every_class_is_tried():
    assert {"OutOfPages", "StalePlan", "ConfigError"} <= {kind.__name__ for kind in CLASSES}
    assert len(CLASSES) == 18
    assert sum(len(vars(made(kind))) for kind in CLASSES) == 22


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickling_keeps_class_message_and_numbers(kind, protocol):
    error = made(kind)
    assert same(pickle.loads(pickle.dumps(error, protocol)), error)


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copying_keeps_class_message_and_numbers(kind, copied):
    error = made(kind)
    assert same(copied(error), error)


class Late(OutOfPages):
    """An embedder's own, with arguments of its own."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"{seconds} s late", "kv", 1, 2, 3, 4, 5)
        self.seconds = seconds


def test_a_subclass_and_what_was_hung_on_it_travel_too():
    error = Late(0.5)
    error.request = "r7"
    assert same(pickle.loads(pickle.dumps(error)), error)
    assert copy.copy(error).request == "r7"


def overfill() -> None:
    groups = [Group("kv", page_size=4, num_pages=20)]
    ledger = Ledger(groups, [Shape.eagle(3, 1, 4)], num_rows=2, max_context_len=64)
    ledger.prepare_extend([ledger.admit(), ledger.admit()], [60, 60])


def test_a_worker_process_hands_on_what_the_ledger_said():
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        with pytest.raises(OutOfPages) as here:
            overfill()
        with pytest.raises(OutOfPages) as there:
            pool.submit(overfill).result(timeout=60)
    assert (here.value.group, here.value.need, here.value.free) == ("kv", 30, 20)
    assert str(there.value) == str(here.value) and vars(there.value) == vars(here.value)


SIZES = {"page_size": 4, "num_steps": 1, "topk": 1, "num_draft_tokens": 2}
TABLE = np.ones((2, 4), np.int32)
LANES = np.ones(1, np.int32)
# A call that takes whole numbers, what it needs beside them, and good numbers for all of them.
INT_CALLS: list[tuple[Callable[..., Any], dict[str, Any], dict[str, int]]] = [
    (Shape, {}, {name: SIZES[name] for name in ("num_steps", "topk", "num_draft_tokens")}),
    (Group, {"name": "kv"}, {"page_size": 4, "num_pages": 8, "window": 4}),
    (
        Ledger,
        {"groups": [Group("kv", page_size=4, num_pages=8)], "shapes": [Shape.none()]},
        {
            "num_rows": 2,
            "max_context_len": 16,
            "max_batch": 2,
            "overlap_depth": 1,
            "max_chunk": 8,
            "record_limit": 1,
        },
    ),
    (BlockPool, {}, {"num_blocks": 4, "block_size": 2, "first_id": 1, "record_limit": 1}),
    (lambda **given: BlockPool(4, 2).take(**given), {}, {"count": 1}),
    (lambda **given: BlockPool(4, 2).fits(**given), {}, {"count": 1}),
    (lambda **given: BlockPool(4, 2).preview(**given), {}, {"count": 1}),
    (lambda **given: BlockPool(4, 2).match([1, 2], **given), {}, {"limit": 1}),
    (lambda **given: BlockPool(4, 2).put([], [], **given), {}, {"start": 0}),
    (_core.SuffixIndex, {}, {"max_tokens": 64, "max_context": 8}),
    (lambda **given: _core.SuffixIndex(64).best(**given), {}, {"text": 0}),
    (_core.sizing_alloc_len_per_decode, {}, SIZES),
    (_core.sizing_row_headroom, {}, SIZES),
    (_core.sizing_need_exact, {}, SIZES | {"lo": 8, "hi": 9}),
    (_core.sizing_need_double_buffer, {}, {"lo": 8, "alloc_len": 4, "overlap_depth": 1}),
    (_core.sizing_next_allocated, {}, {"allocated": 4, "need": 8, "page_size": 4}),
    (
        _core.sizing_row_width,
        {"shapes": [Shape.none()]},
        {"page_size": 4, "max_context_len": 16, "overlap_depth": 0},
    ),
    (
        _core.sizing_pages_needed,
        {"shapes": [Shape.none()]},
        {"shape": 0, "lo": 8, "hi": 8, "page_size": 4, "overlap_depth": 0},
    ),
    (
        _core.sizing_most_window_pages,
        {"shapes": [Shape.none()]},
        {"window": 4, "max_chunk": 8, "page_size": 4, "overlap_depth": 0},
    ),
    (_core.slots_at, {"page_table": TABLE, "rows": LANES, "positions": LANES}, {"page_size": 4}),
    (
        _core.draft_write_positions,
        {"roots": LANES, "layout": "dense"},
        {"num_steps": 1, "topk": 1, "page_size": 4},
    ),
    (
        _core.branch_pages,
        {"page_table": TABLE, "rows": LANES, "roots": LANES},
        {"page_size": 4, "num_steps": 1, "topk": 1, "step": 0},
    ),
    (
        _core.attention_mask,
        {"starts": LANES, "q_lens": LANES},
        {"num_columns": 4, "num_queries": 1, "window": 4},
    ),
    (_core.check_slots, {"name": "slots", "slots": np.ones(1, np.int64)}, {"num_slots": 4}),
]


@pytest.mark.parametrize("wrong", ["many", 2**63, 1.5])
def test_a_number_that_is_none_is_named(wrong: object) -> None:
    for call, others, numbers in INT_CALLS:
        for name in numbers:
            says = f"^{name} must be a whole number of 64 bits, got {re.escape(repr(wrong))}$"
            with pytest.raises((ConfigError, ShapeError), match=says):
                call(**others, **(numbers | {name: wrong}))
