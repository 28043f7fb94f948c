"""What the ledger's tests share: ledgers, steps run to their end, refusals."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from specpool import Group, Ledger, Shape, _core

CHAIN = Shape.eagle(3, 1, 4)


def make(
    *shapes,
    page_size=4,
    num_pages=None,
    num_rows=3,
    context=64,
    layout="dense",
    window=None,
    **options,
) -> Ledger:
    """A ledger with one group that hosts drafts, by default with pages for every row's width."""
    shapes = list(shapes or [CHAIN])
    group = {"page_size": page_size, "hosts_drafts": True, "layout": layout}
    build = {"num_rows": num_rows, "max_context_len": context, **options}
    if num_pages is None:
        sizes = {name: build[name] for name in ("overlap_depth", "policy") if name in build}
        width = _core.sizing_row_width(shapes, max_context_len=context, **group, **sizes)
        num_pages = num_rows * width // page_size
    group = Group("kv", num_pages=num_pages, window=window, **group)
    return Ledger([group], shapes, **build)


def prefill(ledger: Ledger, length: int, tag: str | None = None) -> int:
    row = ledger.admit(tag)
    extend(ledger, row, length)
    return row


def extend(ledger: Ledger, row: int, length: int) -> None:
    plan = ledger.prepare_extend([row], [length])
    ledger.launch(plan.step)
    ledger.complete(plan.step)


def start(ledger: Ledger, *rows: int, shape: int = 1, writes_draft: bool = True) -> int:
    """A decode of the rows, prepared and launched; its step."""
    plan = ledger.prepare_decode(list(rows), [shape] * len(rows), writes_draft=writes_draft)
    ledger.launch(plan.step)
    return plan.step


def end(ledger: Ledger, step: int, *accept_lens: int) -> None:
    ledger.resolve(step, list(accept_lens))
    ledger.complete(step)


def state(ledger: Ledger) -> list:
    """Everything that decides what the ledger will do, spelled out as far as it can be read."""
    groups = range(len(ledger.groups))
    pools = ("free_pages", "fenced_pages", "reclaimable_pages")
    lengths = ("full_table", "allocated_len", "protected_len", "evicted_len")
    rows = ("resolved_len", "in_flight", "drafted_len", "epoch", "idle")
    return (
        [[getattr(ledger, name)(g) for name in pools] for g in groups]
        + [[getattr(ledger, name)(g).tolist() for name in lengths] for g in groups]
        + [getattr(ledger, name).tolist() for name in rows]
        + [ledger.num_free_rows, ledger.steps(), ledger.prefixes, ledger.state_hash()]
    )


def refuses(ledger: Ledger, error: type[Exception], call, *args, match=None, **kwargs):
    """The call raises `error` and changes nothing."""
    before = state(ledger)
    with pytest.raises(error, match=match) as caught:
        call(*args, **kwargs)
    assert state(ledger) == before
    ledger.check()
    return caught.value


def assert_all_back(ledger: Ledger) -> None:
    ledger.check()
    for g, group in enumerate(ledger.groups):
        assert ledger.free_pages(g) == group.num_pages
        assert not ledger.full_table(g).any()
    assert ledger.num_free_rows == ledger.num_rows


def poke(view: np.ndarray, index: tuple[int, ...], value: int) -> None:
    """Writes behind the ledger's back what no public call can bring about."""
    offset = sum(i * stride for i, stride in zip(index, view.strides, strict=True))
    ctypes.c_int32.from_address(view.ctypes.data + offset).value = value
