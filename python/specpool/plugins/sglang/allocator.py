"""SGLang's allocators of KV slots, on `specpool.BlockPool`.

A page freed twice, or one that was never handed out, is seen at that call, and kept from everybody.
Imported by the plug-in only, because it imports SGLang and torch.
"""

from __future__ import annotations

import importlib.util
import os
import re
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator

from specpool import BlockPool, OutOfPages, SpecpoolError
from specpool.plugins import record
from specpool.plugins.quarantine import Quarantine
from specpool.plugins.sglang import leaks, slots
from specpool.plugins.sglang.frees import MOST_COPIES, FreesInFlight
from specpool.plugins.sglang.history import VERBS, History
from specpool.plugins.status import status_of

_ALLOCATOR = "sglang.srt.mem_cache.allocator."
_ALLOC, _EXTEND, _DECODE = range(len(VERBS))


class AllocatorError(SpecpoolError, AssertionError):
    """A call that SGLang's allocator cannot serve; it is an `AssertionError`, as SGLang's own."""


class SpecpoolPagedAllocator(BaseTokenToKVPoolAllocator):  # type: ignore[misc] # no stubs
    """Takes the place of `PagedTokenToKVPoolAllocator`; slots 0 to page_size - 1 are for padding.

    Pages live on the host. On an accelerator no call waits for the device, except `free`, which
    SGLang's own waits in too: ids of new pages go down by a copy that is not waited for, and freed
    ids come up the same way (`FreesInFlight`). What is free is known at once in both cases.
    `SPECPOOL_SGLANG_STRICT=1` checks every free at once, and waits.

    `pool` is the pool: `pool.taken()`, `pool.record_of(page)`, `pool.digest`. `history` knows which
    call took a page, and for which request if SGLang's own functions made the call.
    """

    #: Whether a proof tries the class: then wrong frees raise, and no log is written.
    is_tried = False
    # Of the base, which has no types.
    size: int
    page_size: int
    free_group: list[torch.Tensor] | None

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        device: str,
        kvcache: Any,
        need_sort: bool,
    ) -> None:
        self.pool: BlockPool | None = None  # None if no page fits in `size`
        super().__init__(size, page_size, dtype, device, kvcache, need_sort)
        self.debug_mode = False  # composites of SGLang read it; the checks here are always on
        self.is_on_host = torch.device(device).type == "cpu"
        self.is_strict = os.environ.get("SPECPOOL_SGLANG_STRICT") == "1"
        self.is_recorded = bool(os.environ.get("SPECPOOL_SGLANG_RECORD"))
        self.free_group = None
        self.clear()

    def resize(self, config: Any) -> None:
        """Begin a new pool of `config.max_total_num_tokens` slots.

        Raises:
            AllocatorError: a group of frees is open, or the pool would have no page.
        """
        if config.max_total_num_tokens < self.page_size:
            raise AllocatorError(
                f"resize to {config.max_total_num_tokens} tokens: a page has {self.page_size}"
            )
        self._refuse_in_group("resize")
        super().resize(config)

    def clear(self) -> None:
        """Forget all that was handed out; `resize` calls it with a new `size`.

        Raises:
            AllocatorError: a group of frees is open; its pages would be of the pool before.
        """
        self._refuse_in_group("clear")
        if self.pool is not None:
            self.pool.close()
        self.num_pages = self.size // self.page_size
        log = None if self.is_tried else record.log_path("SPECPOOL_SGLANG_RECORD")
        self.pool = _new_pool(self.num_pages, self.page_size, log)
        # None if a wrong free raises.
        self.quarantine: Quarantine | None = None
        is_raising = self.is_tried or os.environ.get("SPECPOOL_SGLANG_FAULTS") == "raise"
        if self.pool is not None and not is_raising:
            self.quarantine = Quarantine(
                status_of("sglang"),
                self.pool,
                log,
                owner_of=lambda page: self.history.owner(page),
                freer_of=lambda page: " and ".join(self._freers(page)),
            )
        self.free_group = None
        self.page_group: list[torch.Tensor] = []
        self.freers: list[tuple[torch.Tensor, int, str]] = []
        self.frees = FreesInFlight()
        self.history = History(self.num_pages)

    def _refuse_in_group(self, verb: str) -> None:
        if self.free_group is not None:
            raise AllocatorError(f"{verb} inside a group of frees: end the group first")

    # What is free.

    def available_size(self) -> int:
        """Return how many tokens can be allocated, frees on their way counted. O(1)."""
        free = 0 if self.pool is None else self.pool.num_free
        return (free + self.frees.num_pages) * self.page_size

    def get_all_free_pages(self) -> torch.Tensor:
        """Return the free pages, int64, ascending. It waits for frees that are on their way."""
        self._land(0)
        is_free = np.ones(self.num_pages + 1, np.bool_)
        is_free[0] = False
        if self.pool is not None:
            is_free[self.pool.taken()] = False
        return torch.from_numpy(np.flatnonzero(is_free)).to(self.device)

    def merge_and_sort_free(self) -> None:
        """Nothing is staged."""

    # SGLang's checks and its tests read the two lists, and its tests set the first.
    @property
    def free_pages(self) -> torch.Tensor:
        """As `get_all_free_pages`; when set, these pages are free and the rest is taken."""
        return self.get_all_free_pages()

    @free_pages.setter
    def free_pages(self, pages: torch.Tensor | None) -> None:
        if pages is not None and self.pool is not None:
            self.clear()
            self.pool.take(self.num_pages, tag="free_pages was set")
            self._drop(_host(pages)[::-1])  # the page dropped last is taken first

    @property
    def release_pages(self) -> torch.Tensor:
        """No page: none is staged."""
        return torch.empty((0,), dtype=torch.int64, device=self.device)

    @release_pages.setter
    def release_pages(self, pages: torch.Tensor | None) -> None:
        pass

    # Allocation. None means that pages lack, and nothing has changed.

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Take whole pages and return all their slots, int64 [need_size].

        Raises:
            AllocatorError: `need_size` is not a multiple of the page size.
        """
        if need_size % self.page_size:
            raise AllocatorError(
                f"alloc of {need_size} tokens: not a multiple of the page size {self.page_size}"
            )
        pages = self._take(need_size // self.page_size, _ALLOC)
        if pages is None:
            return None
        if self.is_on_host:
            if self.page_size == 1:
                return torch.from_numpy(pages)
            return torch.from_numpy(slots.of_pages(pages, self.page_size))
        down = upload(pages, self.device)
        offsets = torch.arange(self.page_size, device=self.device)
        return (down[:, None] * self.page_size + offsets).reshape(-1)

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> torch.Tensor | None:
        """Return the slots that each request gets to grow, int64 [extend_num_tokens].

        Args:
            prefix_lens: tokens with slots, int64 [requests], on the device; `_cpu` on the host.
            prefix_lens_cpu: the same.
            seq_lens: tokens that are to have slots; `_cpu` on the host.
            seq_lens_cpu: the same.
            last_loc: slot of each request's last token, int64 [requests], on the device.
            extend_num_tokens: sum of the differences.
            num_new_pages: not needed.

        Raises:
            AllocatorError: a request shrinks, or `extend_num_tokens` is another number.
        """
        prefix, seq = _host(prefix_lens_cpu), _host(seq_lens_cpu)
        if int((seq - prefix).sum()) != extend_num_tokens or (seq < prefix).any():
            lens = f"from {prefix.tolist()} to {seq.tolist()}"
            raise AllocatorError(f"alloc_extend of {extend_num_tokens} tokens: {lens}")
        counts = slots.new_pages(prefix, seq, self.page_size)
        pages = self._take(int(counts.sum()), _EXTEND, counts)
        if pages is None:
            return None
        if self.is_on_host:
            new = slots.of_extension(prefix, seq, _host(last_loc), counts, pages, self.page_size)
            return torch.from_numpy(new)
        from sglang.srt.mem_cache.allocator import paged

        out = torch.empty((extend_num_tokens,), dtype=torch.int64, device=self.device)
        kernel = paged.alloc_extend_kernel[(len(prefix),)]
        lanes = paged.next_power_of_2(len(prefix))
        # One entry more: the kernel reads an id for a request that takes none, and drops it.
        down = upload(np.append(pages, 0), self.device)
        kernel(prefix_lens, seq_lens, last_loc, down, out, lanes, self.page_size)
        return out

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        """Return the slot of one more token for each request, int64 [requests].

        Args:
            seq_lens: tokens with that one counted, int64 [requests], on the device.
            seq_lens_cpu: the same, on the host.
            last_loc: slot of each request's last token, int64 [requests], on the device.
        """
        opens = (_host(seq_lens_cpu) - 1) % self.page_size == 0
        pages = self._take(int(np.count_nonzero(opens)), _DECODE, opens)
        if pages is None:
            return None
        if self.is_on_host:
            starts = pages * self.page_size
            return torch.from_numpy(slots.of_next_token(_host(last_loc), opens, starts))
        from sglang.srt.mem_cache.allocator import paged

        out = torch.empty((len(opens),), dtype=torch.int64, device=self.device)
        kernel = paged.alloc_decode_kernel[(len(opens),)]
        down = upload(np.append(pages, 0), self.device)
        kernel(seq_lens, last_loc, down, out, paged.next_power_of_2(len(opens)), self.page_size)
        return out

    def _take(self, count: int, verb: int, counts: Any = None) -> npt.NDArray[np.int64] | None:
        pool = self.pool
        if pool is None:
            return None if count else np.empty(0, np.int64)
        # The oldest frees are waited for as long as pages lack; the others are on their way.
        while count > pool.num_free and self.frees.num_pages:
            self._land(self.frees.num_copies - 1)
        try:
            # The history has it too; a log is read where there is none.
            tag = f"{VERBS[verb]}, call {self.history.call + 1}" if self.is_recorded else None
            pages = pool.take(count, tag=tag, int64=True)
        except OutOfPages:
            return None
        except SpecpoolError as error:
            raise AllocatorError(f"{VERBS[verb]}: {error}") from error
        self.history.took(verb, pages, counts)
        return pages

    # Freeing. Inside a group frees wait for its end.

    def free(self, free_index: torch.Tensor) -> None:
        """Free the pages of these slots, each page once."""
        if self.free_group is not None:
            self._defer(self.free_group, free_index, self.page_size)
        elif self.page_size == 1 and self.is_on_host:
            # A slot that is named twice is a double free.
            self._drop(free_index.numpy())
        elif free_index.numel():
            pages = free_index // self.page_size if self.page_size > 1 else free_index
            self._give(torch.unique(pages) if self.page_size > 1 else pages)

    def free_segment(self, free_index: torch.Tensor, *, start_pos: int) -> None:
        """Free the pages of a request's neighbouring slots, which begin on a page's edge."""
        if free_index.numel() == 0:
            return
        if start_pos % self.page_size:
            raise AllocatorError(f"segment start {start_pos} is not page-aligned")
        first_slots = free_index[:: self.page_size]
        if self.free_group is None and self.is_on_host:
            self._drop(_host(first_slots) // self.page_size)
        else:
            self.free_page_ids(first_slots // self.page_size)

    def free_page_ids(self, page_ids: torch.Tensor) -> None:
        """Free these pages; inside a group, at its end.

        A page that is free, or is named twice, goes into quarantine, and the rest is freed. If
        `SPECPOOL_SGLANG_FAULTS` is raise, the call changes nothing.

        Raises:
            AllocatorError: a page is free, is named twice, or is none of the pool's.
        """
        if self.free_group is not None:
            self._defer(self.page_group, page_ids, 1)
        elif page_ids.numel():
            self._give(page_ids)

    def free_group_begin(self) -> None:
        """Keep what is freed from here on until `free_group_end`.

        Raises:
            AllocatorError: a group of frees is open.
        """
        self._refuse_in_group("free_group_begin")
        self.free_group = []

    @property
    def is_not_in_free_group(self) -> bool:
        """Whether no group of frees is open, as SGLang before 0.5.17 asks."""
        return self.free_group is None

    @is_not_in_free_group.setter
    def is_not_in_free_group(self, value: bool) -> None:
        pass

    def free_group_end(self) -> None:
        """Free what was named since `free_group_begin`."""
        try:
            slots_pending, self.free_group = self.free_group, None
            if slots_pending:
                self.free(torch.cat(slots_pending))
            pages_pending, self.page_group = self.page_group, []
            if pages_pending:
                self.free_page_ids(torch.cat(pages_pending))
            for index, tokens, request in self.freers:
                self.history.freed(_host(index) // tokens, request)
        finally:
            self.page_group, self.freers = [], []

    def _defer(self, group: list[torch.Tensor], index: torch.Tensor, tokens: int) -> None:
        """Keep a free for the group's end, with its request; reading a device here would wait."""
        index_copy = index.clone()  # the caller may change it
        group.append(index_copy)
        if self.history.freer is not None and self.is_on_host:
            self.freers.append((index_copy, tokens, self.history.freer))

    def _give(self, pages: torch.Tensor) -> None:
        if pages.device.type == "cpu":
            self._drop(_host(pages))
        else:
            self.frees.start(pages)
            self._land(0 if self.is_strict else MOST_COPIES)

    def _land(self, leave: int) -> None:
        for pages in self.frees.oldest(leave):
            self._drop(pages)

    def _drop(self, pages: npt.NDArray[np.int64]) -> None:
        if self.pool is None:
            raise AllocatorError(f"free of pages {pages.tolist()}: the pool has no page")
        quarantine = self.quarantine
        if quarantine is not None and quarantine.blocks and quarantine.has_any(pages):
            pages = self._drop_each(quarantine, pages)
        else:
            try:
                self.pool.drop(pages)
            except SpecpoolError as error:
                if quarantine is None or not leaks.counts_quarantine():
                    raise AllocatorError(self._with_history(str(error))) from error
                pages = self._drop_each(quarantine, pages)
        self.history.freed(pages, self.history.freer)

    def _drop_each(
        self, quarantine: Quarantine, pages: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Free the pages that are held, and put the others into quarantine; return the former."""
        return np.array(quarantine.drop(pages.tolist(), self._with_history), np.int64)

    def _with_history(self, message: str) -> str:
        """Return a refusal with the history of its page, and the requests that free it now."""
        named = re.search(r"block (-?\d+)", message)
        if named is None:
            return message
        page = int(named[1])
        freers = self._freers(page)
        requests = f"; freed now by request {' and '.join(freers)}" if freers else ""
        return f"{message}; {self.history.tell(page)}{requests}"

    def _freers(self, page: int) -> list[str]:
        """Return the requests that free a page now, as far as that is known."""
        freers = [
            request
            for index, tokens, request in self.freers
            if (_host(index) // tokens == page).any()
        ]
        return freers if self.history.freer is None else [*freers, self.history.freer]

    # The KV itself.

    def get_cpu_copy(self, indices: Any, *rest: Any, **named: Any) -> Any:
        """Return a copy of the KV at these slots, on the host."""
        return self._kvcache.get_cpu_copy(indices, *rest, **named)

    def load_cpu_copy(self, kv_cache_cpu: Any, indices: Any, *rest: Any, **named: Any) -> Any:
        """Put a copy of `get_cpu_copy` back."""
        return self._kvcache.load_cpu_copy(kv_cache_cpu, indices, *rest, **named)


class SpecpoolTokenAllocator(SpecpoolPagedAllocator):
    """Takes the place of `TokenToKVPoolAllocator`: pages of one slot."""

    def __init__(
        self, size: int, dtype: torch.dtype, device: str, kvcache: Any, need_sort: bool
    ) -> None:
        super().__init__(size, 1, dtype, device, kvcache, need_sort)


def install() -> None:
    """Put both classes in the place of SGLang's."""
    # It derives from SGLang's class, whose lists it changes: it has to derive before the exchange.
    # Before SGLang 0.5.20 there is none.
    if importlib.util.find_spec(_ALLOCATOR + "page_interleave") is not None:
        importlib.import_module(_ALLOCATOR + "page_interleave")
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, cls in (
        ("paged.PagedTokenToKVPoolAllocator", SpecpoolPagedAllocator),
        ("token.TokenToKVPoolAllocator", SpecpoolTokenAllocator),
    ):
        HookRegistry.register(_ALLOCATOR + target, cls, HookType.REPLACE)


def _new_pool(num_pages: int, page_size: int, log: str | None) -> BlockPool | None:
    if not num_pages:
        return None
    pool = BlockPool(num_pages, page_size, first_id=1, caching=False, record=log)
    if log:
        record.close_at_exit(pool)
    return pool


def upload(ints: npt.NDArray[Any], device: Any) -> torch.Tensor:
    """Return the numbers on the device, by a copy that is not waited for."""
    return torch.from_numpy(ints).pin_memory().to(device, non_blocking=True)


def _host(ints: Any) -> npt.NDArray[np.int64]:
    if isinstance(ints, torch.Tensor):
        ints = ints.numpy()
    array: npt.NDArray[np.int64] = np.asarray(ints, np.int64)
    return array
