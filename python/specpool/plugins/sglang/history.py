"""Which call took each page of SGLang's pool, for which request, and who freed it.

A call only appends a line. Lines become arrays by page now and then, or when an error asks.
"""

from __future__ import annotations

import pkgutil
from collections import deque
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

_I64 = npt.NDArray[np.int64]

# Lines that are kept as lines; frees beyond them are forgotten.
MOST_LINES = 512
# Requests that a row of SGLang's table is remembered for.
MOST_REQUESTS = 64
VERBS = ("alloc", "alloc_extend", "alloc_decode")


class History:
    """The takes and frees of one pool. `call` counts both; call 0 is none."""

    def __init__(self, num_pages: int) -> None:
        self.call = 0
        self.freer: str | None = None  # the request that SGLang gives back now
        self._take_of = np.zeros(num_pages + 1, np.int64)  # call * len(VERBS) + verb
        self._row_of = np.zeros(num_pages + 1, np.int64)  # row of SGLang's table; 0: not known
        self._takes: list[tuple[int, _I64, Any, Any]] = []
        # Pages as bytes, which take less time than a copy of their array.
        self._frees: deque[tuple[int, bytes, Any, str | None]] = deque(maxlen=MOST_LINES)
        self._requests: dict[int, deque[tuple[int, str]]] = {}

    def took(self, verb: int, pages: npt.NDArray[Any], counts: Any = None) -> None:
        """Note pages that were handed out. O(1).

        Args:
            verb: index of `VERBS`.
            pages: their ids, request by request.
            counts: how many each request got; None if only the caller knows.
        """
        self.call += 1
        self._takes.append((self.call * len(VERBS) + verb, pages, counts, None))
        if len(self._takes) >= MOST_LINES:
            self._write()

    def freed(self, pages: npt.NDArray[Any], request: str | None) -> None:
        """Note pages that were given back, and by which request if that is known. O(pages)."""
        self.call += 1
        self._frees.append((self.call, pages.tobytes(), pages.dtype, request))

    def note_rows(self, since: int, rows: Any, counts: Any = None) -> None:
        """Note the rows that the pages since call `since` were taken for, and a count for each."""
        if self._takes and self._takes[-1][0] >= (since + 1) * len(VERBS):
            call, pages, known_counts, _ = self._takes[-1]
            self._takes[-1] = (call, pages, counts if known_counts is None else known_counts, rows)

    def admit(self, row: int, request: str) -> None:
        """Note that a row of SGLang's table is now a request's."""
        requests = self._requests.setdefault(row, deque(maxlen=MOST_REQUESTS))
        if not requests or requests[-1][1] != request:
            requests.append((self.call, request))

    def tell(self, page: int) -> str:
        """Return which call took a page, and which freed it since, as far as that is known."""
        self._write()
        if not 0 <= page < len(self._take_of) or not self._take_of[page]:
            return "no call took it"
        call, verb = divmod(int(self._take_of[page]), len(VERBS))
        line = f"taken by {VERBS[verb]}, call {call}"
        request = self._request(int(self._row_of[page]), call)
        if request is not None:
            line += f", for request {request}"
        for freed, pages, dtype, freer in reversed(self._frees):
            if freed > call and page in np.frombuffer(pages, dtype):
                line += f"; freed by call {freed}" + (f" of request {freer}" if freer else "")
                break
        return line

    def owner(self, page: int) -> str | None:
        """Return the request that a page was taken for last, as far as that is known."""
        self._write()
        return self._request(int(self._row_of[page]), int(self._take_of[page]) // len(VERBS))

    def _request(self, row: int, call: int) -> str | None:
        # A row is filled before its request is noted, in the call that admits it.
        requests = [name for since, name in self._requests.get(row, ()) if since <= call]
        return requests[-1] if requests else None

    def _write(self) -> None:
        for call, pages, counts, rows in self._takes:
            page_ids = np.asarray(pages, np.int64)
            self._take_of[page_ids] = call
            self._row_of[page_ids] = 0
            if rows is not None and counts is not None:
                lanes = np.repeat(np.asarray(rows, np.int64), np.asarray(counts, np.int64))
                if len(lanes) == len(page_ids):
                    self._row_of[page_ids] = lanes
        self._takes.clear()


#: A release may keep a request's row or lengths elsewhere. Then an error names no request.
_left_out = suppress(AttributeError, IndexError, KeyError, TypeError, ValueError)


def alloc_for_extend(original: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Around SGLang's: name the requests that a prefill takes pages for."""
    history = _history_of(batch)
    call = 0 if history is None else history.call
    out = original(batch, *args, **kwargs)
    if history is not None:
        with _left_out:
            for req in batch.reqs:
                history.admit(req.kv.req_pool_idx, req.rid)
            history.note_rows(call, out[2], batch.extend_lens)
    return out


def alloc_for_decode(original: Any, batch: Any, token_per_req: int, *args: Any) -> Any:
    """Around SGLang's: name the requests of a plain decode step."""
    history = _history_of(batch)
    call = 0 if history is None else history.call
    out = original(batch, token_per_req, *args)
    if history is not None:
        with _left_out:
            history.note_rows(call, _rows(batch), np.full(len(batch.reqs), token_per_req, np.int64))
    return out


def alloc_for_spec_decode(original: Any, tree_cache: Any, *args: Any, **kwargs: Any) -> Any:
    """Around SGLang's: name the requests of a round."""
    history, batch = _history_of(tree_cache), kwargs.get("batch")
    call = 0 if history is None else history.call
    out = original(tree_cache, *args, **kwargs)
    if history is not None and batch is not None:
        with _left_out:
            counts = kwargs["nxt_kv_lens_cpu"] - kwargs["cur_kv_lens_cpu"]
            history.note_rows(call, _rows(batch), counts)
    return out


def release_kv_cache(original: Any, req: Any, tree_cache: Any, *args: Any, **kwargs: Any) -> Any:
    """Around SGLang's: name the request that gives its pages back."""
    history = _history_of(tree_cache)
    if history is None:
        return original(req, tree_cache, *args, **kwargs)
    history.freer = getattr(req, "rid", None)
    try:
        return original(req, tree_cache, *args, **kwargs)
    finally:
        history.freer = None


def install() -> None:
    """Put the functions around those of SGLang's that this release has at these places."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    cache = "sglang.srt.mem_cache."
    for target, hook in (
        ("allocation.alloc_for_extend", alloc_for_extend),
        ("allocation.alloc_for_decode", alloc_for_decode),
        ("allocation.alloc_for_spec_decode", alloc_for_spec_decode),
        ("common.release_kv_cache", release_kv_cache),
    ):
        try:
            pkgutil.resolve_name(cache + target)
        except (ImportError, AttributeError):
            continue
        HookRegistry.register(cache + target, hook, HookType.AROUND)


def _history_of(holder: Any) -> History | None:
    """Return the history of a batch's or a tree's allocator, if that is one of this plug-in's."""
    history = getattr(getattr(holder, "token_to_kv_pool_allocator", None), "history", None)
    return history if isinstance(history, History) else None


def _rows(batch: Any) -> Any:
    """Return the rows of a batch on the host; None if SGLang has them on the device only."""
    return getattr(batch, "req_pool_indices_cpu", None)
