"""`PrefixCache`: finds the KV of a prompt's beginning among the texts that were computed before."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import numpy as np

from specpool._core import Ledger
from specpool.arrays import Int64
from specpool.engine.scheduler.config import SchedulerConfig
from specpool.engine.scheduler.queues import Running
from specpool.engine.scheduler.request import Request
from specpool.engine.scheduler.rows import HostHandles
from specpool.engine.scheduler.state_cuts import WORTH_WAITING, StateCuts
from specpool.errors import SpecpoolError


@dataclass(frozen=True, slots=True)
class PrefixStats:
    """The contents and the counters of the prefix cache.

    Attributes:
        hit_ct: tokens of admitted requests whose KV was found.
        host_ct: tokens of admitted requests whose KV was found on the host.
        miss_ct: tokens of admitted requests whose KV was not found.
        num_entries: entries of the index: pieces of text of up to the least common multiple of the
            page sizes.
        num_tokens: tokens of these entries.
        cached_pages: pages of all groups that only the index holds.
        eviction_ct: how often an entry, or a page below a window, was given up to make room.
        num_bytes: bytes that the index takes, the pages not among them.
    """

    hit_ct: int
    host_ct: int
    miss_ct: int
    num_entries: int
    num_tokens: int
    cached_pages: int
    eviction_ct: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Hit:
    """What a request finds in the index.

    Attributes:
        length: tokens with KV.
        shared: int64 [num_groups], pages that its row would share.
        cached: int64 [num_groups], cached pages that its row would share or copy from.
    """

    length: int
    shared: Int64
    cached: Int64


class PrefixCache:
    """The part of the scheduler that keeps texts in the ledger's index, and finds them.

    Attributes:
        cuts: where prefills leave states, if the target has some.
    """

    def __init__(
        self, ledger: Ledger, config: SchedulerConfig, running: Running, handles: HostHandles
    ) -> None:
        """Start with no text.

        Args:
            ledger: has the index.
            config: says whether texts are kept, and whether there is draft KV.
            running: the requests whose prefill may be waited for.
            handles: keeps texts on the host, and brings them back.
        """
        self._ledger, self._config, self._running = ledger, config, running
        self._handles = handles
        self.cuts = StateCuts(ledger, config, running)
        self._hit_ct = self._host_ct = self._miss_ct = 0
        zeros = np.zeros(len(ledger.groups), np.int64)
        self._no_hit = Hit(0, zeros, zeros)

    @property
    def is_on(self) -> bool:
        """Whether texts are kept at all."""
        return self._config.prefix_cache

    def match(self, request: Request) -> Hit:
        """Return what a waiting request would find, if it needs a new row."""
        if not self._can_use_index(request):
            return self._no_hit
        length, shared, taken = self._ledger.match_prefix(
            request.token_array(), request.salt, needs_draft=self._needs_draft(request)
        )
        if not length or not self.cuts.pays(request, length):
            return self._no_hit
        return Hit(length, np.array(shared), taken - self._ledger.tail_pages(length))

    def admit(self, request: Request) -> tuple[int, int]:
        """Take a row with the KV that `match` found; return it and its number of tokens.

        Raises:
            OutOfRows: no row is free.
            OutOfPages: there is no page for the tail.
            OutOfMemory: there is no memory.
        """
        tag = str(request.request_id)
        if not self._can_use_index(request):
            return self._ledger.admit(tag), 0
        tokens, needs_draft = request.token_array(), self._needs_draft(request)
        if self.cuts.is_on:
            known = self.match(request).length
            start = max(known, self.cuts.most_unpaid(request))
            brought = self._handles.bring_text(request, tokens, start, needs_draft=needs_draft)
            if brought is not None:
                request.host_len = brought[1]
                return brought
            if not known:
                return self._ledger.admit(tag), 0
        row = self._ledger.admit_cached(tokens, request.salt, tag, needs_draft=needs_draft)
        length = int(self._ledger.resolved_len[row])
        self._handles.lend(request, tokens, length, needs_draft=needs_draft)
        return row, length

    def count(self, request: Request, length: int) -> None:
        """Count the tokens that an admitted request found, and those that it did not."""
        if not self.is_on:
            return
        handle, brought = request.handle, request.host_len
        lent = handle.length - length if handle is not None and handle.is_lent else 0
        self._hit_ct += length - brought
        self._host_ct += brought + lent
        self._miss_ct += len(request.tokens) - length - lent
        request.host_len = 0

    def is_coming(self, request: Request, length: int) -> bool:
        """Return whether a running prefill computes more of the request's first tokens.

        `length` tokens are there already.
        """
        if not self._can_use_index(request):
            return False
        if self.cuts.is_on:
            return self.cuts.is_coming(request, length)
        end, tokens = length + WORTH_WAITING, request.tokens
        if len(tokens) <= end:
            return False
        return any(
            other.indexed_len <= end < other.prefill_len
            and not other.tainted
            and other.salt == request.salt
            and other.tokens[length : end + 1] == tokens[length : end + 1]
            and other.tokens[:length] == tokens[:length]
            for other in self._running.prefilling.values()
        )

    def index(self, request: Request, end: int | None = None) -> None:
        """Keep the text of a running request whose KV is final: at most `end` tokens.

        If the target has states, a text that goes on is kept at its cuts.
        """
        if not self.is_on or request.tainted or not request.row:
            return
        if self.cuts.is_on and end is not None and end not in request.cuts:
            return
        num_tokens = min(len(request.tokens), int(self._ledger.resolved_len[request.row]))
        num_tokens = num_tokens if end is None else min(num_tokens, end)
        if num_tokens <= request.indexed_len:
            return
        tokens = request.token_array()[:num_tokens]
        with contextlib.suppress(SpecpoolError):  # then it is just not kept
            self._ledger.index(request.row, tokens, request.salt)
            request.indexed_len = num_tokens

    def leave(self, request: Request) -> None:
        """Keep the text of a request that is about to lose its row; also on the host if it ends."""
        self.index(request)
        has_ended = request.finish_reason is not None
        # The row of a pinned text is gone already, if it had a state.
        has_row = bool(request.row) and self._ledger.is_live(request.row)
        if self.is_on and has_row and has_ended and not request.tainted:
            self._handles.save_text(request)

    def forget(self, salt: bytes | None = None) -> None:
        """Drop all texts, or those of one salt."""
        self._ledger.forget(salt)
        self._handles.forget_texts(salt)
        for request in self._running:
            if salt in (None, request.salt):
                request.indexed_len = 0

    def stats(self) -> PrefixStats | None:
        """Return the present numbers; None if the cache is off."""
        if not self.is_on:
            return None
        num_entries, num_tokens, eviction_ct = self._ledger.index_size
        return PrefixStats(
            hit_ct=self._hit_ct,
            host_ct=self._host_ct,
            miss_ct=self._miss_ct,
            num_entries=num_entries,
            num_tokens=num_tokens,
            cached_pages=sum(map(self._ledger.cached_pages, range(len(self._ledger.groups)))),
            eviction_ct=eviction_ct,
            num_bytes=self._ledger.index_bytes(),
        )

    def _can_use_index(self, request: Request) -> bool:
        """Return whether the request takes a new row that may begin with indexed KV."""
        if not self.is_on or request.skips_cache or request.handle is not None:
            return False
        conversation = request.conversation
        return conversation is None or not (conversation.row or conversation.handle)

    def _needs_draft(self, request: Request) -> bool:
        return self._config.keeps_draft_kv and bool(request.shape_index)
