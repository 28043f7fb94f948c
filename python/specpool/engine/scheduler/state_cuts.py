"""`StateCuts`: where prefills leave the states that later requests of a recurrent model begin from.

A text has KV at every token, but a recurrent state only where one is kept. A prefill leaves one,
and the text so far, in the prefix cache at each of its *cuts*: its chunk ends there, and the state
contains all tokens but the last of the chunk. There are cuts at a prompt's end, where it leaves a
text that was computed before or that a waiting request begins with, and every few thousand tokens.
"""

from __future__ import annotations

from specpool._core import Ledger
from specpool.capacity.group_sizes import USUAL_ROW_TOKENS
from specpool.engine.scheduler.config import SchedulerConfig
from specpool.engine.scheduler.queues import Running
from specpool.engine.scheduler.request import Request

# A cut, and the wait for one, is for more than this many tokens.
WORTH_WAITING = 32

# One token after the other takes about this many times longer than all at once: measured on jamba,
# mamba and zamba, of random weights, on a CPU.
_SLOWER = 16


class StateCuts:
    """The part of the scheduler that says where chunks of prompts end, and which states are kept.

    Attributes:
        is_on: whether states are kept: the target has some, and there is a prefix cache.
        is_slow: whether tokens behind a state run one after the other.
    """

    def __init__(self, ledger: Ledger, config: SchedulerConfig, running: Running) -> None:
        """Plan the cuts of running requests."""
        self._ledger, self._running = ledger, running
        self.is_on = config.prefix_cache and bool(ledger.states)
        self.is_slow = self.is_on and config.goes_on_slowly

    def pays(self, request: Request, length: int) -> bool:
        """Return whether to go on from `length` tokens is quicker than to compute all."""
        return length > self.most_unpaid(request)

    def most_unpaid(self, request: Request) -> int:
        """Return the greatest length that does not pay; -1 if all do."""
        num_tokens = len(request.tokens)
        return num_tokens - num_tokens // _SLOWER - 1 if self.is_slow else -1

    def start(self, request: Request) -> None:
        """Plan the cuts of a request that got a row: at its end, and where others part from it."""
        if not self.is_on:
            return
        request.cuts = {request.prefill_len}
        if self.is_slow:
            return
        known = self._ledger.known_prefix(request.token_array(), request.salt)
        if known > request.prefilled_len + WORTH_WAITING:
            request.cuts.add(known + 1)

    def chunk_end(self, request: Request, end: int) -> int:
        """Return where the request's next chunk ends, which could reach `end`."""
        if not self.is_on:
            return end
        start = request.prefilled_len
        end = min((cut for cut in request.cuts if start < cut <= end), default=end)
        last = max((cut for cut in request.cuts if cut <= start), default=request.shared_len)
        # A state takes the memory of thousands of tokens' KV: more would push each other out.
        if end - last >= USUAL_ROW_TOKENS:
            request.cuts.add(end)
        return end

    def is_coming(self, request: Request, length: int) -> bool:
        """Return whether a running prefill has a cut that saves a waiting request many tokens.

        Such a prefill gets a cut where the request's text leaves its own. The request finds a state
        of `length` tokens already.
        """
        tokens = request.token_array()
        least = length + WORTH_WAITING + 1
        if len(tokens) <= least:
            return False
        is_any = False
        for other in self._running:
            is_over = len(other.tokens) > other.prefill_len or not other.cuts
            if is_over or other.tainted or other.salt != request.salt:
                continue
            size = min(len(tokens) - 1, other.prefill_len - 1)
            differs = tokens[:size] != other.token_array()[:size]
            common = int(differs.argmax()) if differs.any() else size
            if common < least:
                continue
            if other.prefilled_len <= common and not self.is_slow:
                other.cuts.add(common + 1)
            missing = max(least, other.indexed_len)
            ahead = (cut - 1 for cut in other.cuts if missing < cut <= common + 1)
            is_any |= any(self.pays(request, end) for end in ahead)
        return is_any
