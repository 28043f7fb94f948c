"""`PageAccounts`: who holds each page of one of SGLang's allocators, by its calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from lab.engines.accounts import Accounts
from lab.engines.device import LateDevice


class PageAccounts:
    """Accounts of the pages of one allocator, whose calls are wrapped."""

    def __init__(self, device: LateDevice, allocator: Any, page_size: int) -> None:
        self.device, self.allocator, self.page_size = device, allocator, page_size
        self.accounts = Accounts(device, allocator.size // page_size + 1)
        self.depth = 0  # calls of the allocator that are under way: it calls itself
        self._wrap("alloc", self._taken)
        self._wrap("alloc_extend", self._named("alloc_extend", self._extended))
        self._wrap("alloc_decode", self._named("alloc_decode", self._decoded))
        self._wrap("free", lambda _, slots: self._freed(slots))
        self._wrap("free_segment", lambda _, slots, **__: self._freed(slots))
        self._wrap("free_page_ids", lambda _, pages: self.accounts.give_back(pages.tolist()))
        self._wrap("free_group_end", lambda _: None)  # counted when it was given
        self._wrap("clear", lambda _: self.accounts.holders.clear())

    def _wrap(self, name: str, note: Callable[..., None]) -> None:
        call = getattr(self.allocator, name, None)
        if call is None:
            return

        def counted(*args: Any, **given: Any) -> Any:
            if self.depth:
                return call(*args, **given)
            self.depth += 1
            try:
                result = call(*args, **given)
            finally:
                self.depth -= 1
            note(result, *args, **given)
            return result

        setattr(self.allocator, name, counted)

    def free_pages(self) -> list[int]:
        """Return the free list."""
        if hasattr(self.allocator, "get_all_free_pages"):
            pages: list[int] = self.allocator.get_all_free_pages().tolist()
            return pages
        return [*self.allocator.free_pages.tolist(), *self.allocator.release_pages.tolist()]

    def pages_of(self, slots: torch.Tensor) -> list[int]:
        """The pages of slots, each once; with pages of one slot, as often as they are named."""
        named = slots if self.page_size == 1 else torch.unique(slots // self.page_size)
        pages: list[int] = named.tolist()
        return pages

    def _taken(self, slots: Any, need_size: int) -> None:
        self._admitted(slots, need_size)
        if slots is not None:
            self.accounts.take(self.pages_of(slots))

    def _named(self, name: str, note: Callable[..., None]) -> Callable[..., None]:
        """Let a note have a call's arguments by their names: releases differ in their order."""
        call = getattr(self.allocator, name, None)
        takes = inspect.signature(call) if call is not None else inspect.Signature()

        def named(slots: Any, *args: Any, **given: Any) -> None:
            note(slots, **takes.bind(*args, **given).arguments)

        return named

    def _extended(
        self,
        slots: Any,
        prefix_lens: Any,
        seq_lens: Any,
        last_loc: Any,
        extend_num_tokens: int,
        **_: Any,
    ) -> None:
        self._admitted(slots, extend_num_tokens)
        if slots is not None:
            self._grown(slots, (seq_lens - prefix_lens).tolist(), last_loc.tolist())

    def _decoded(self, slots: Any, seq_lens: Any, last_loc: Any, **_: Any) -> None:
        self._admitted(slots, len(seq_lens))
        if slots is not None:
            self._grown(slots, [1] * len(slots), last_loc.tolist())

    def _grown(self, slots: torch.Tensor, counts: list[int], last: list[int]) -> None:
        """Rows grow behind their last slots, in whose pages there may be room."""
        begin = 0
        for count, before in zip(counts, last, strict=True):
            pages = self.pages_of(slots[begin : begin + count])
            begin += count
            has_room = (before + 1) % self.page_size
            open_page = before // self.page_size if has_room else -1
            self.accounts.take(page for page in pages if page != open_page)

    def _freed(self, slots: torch.Tensor) -> None:
        self.accounts.give_back(self.pages_of(slots))

    def _admitted(self, slots: Any, count: int) -> None:
        """L9: SGLang looks for room before it asks, so no call comes back with nothing."""
        if slots is None:
            free = len(self.accounts.blocks) - len(self.accounts.held())
            self.device.fault(
                "admission",
                "allocator",
                f"{count} slots are asked for what was admitted, {free} pages of "
                f"{self.page_size} are free",
            )
