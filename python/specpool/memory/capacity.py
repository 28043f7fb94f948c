"""How many requests fit, and what keeps one more out: what the scheduler will do, said in advance.

Two questions, each with the scheduler's own answer (tests/memory/test_plan.py asks both):

- *at once*: so many requests, each with so many tokens, are admitted together to an empty pool.
  The scheduler admits while what each needs for its next round fits. They grow: some may be
  retracted later, and then come back.
- *to their ends*: so many requests run side by side from their prompts to their last tokens, none
  ever waits for a page, and so none is retracted, whatever their drafts do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specpool._core import Shape
from specpool.checks import check_int
from specpool.errors import ConfigError
from specpool.memory.group_sizes import GroupSizes
from specpool.memory.page_needs import row_pages, step_pages


@dataclass(frozen=True, slots=True)
class Fit:
    """How many requests of one kind fit."""

    num_requests: int
    pages: tuple[int, ...]  # of each group, that one request asks for
    limit: str  # what keeps one more out


class Capacity:
    """What a ledger of these sizes has room for."""

    def __init__(self, sizes: GroupSizes, *, reads_tokens: bool = False, headroom: int = 0) -> None:
        """Reckon with `sizes`.

        Args:
            sizes: the groups and their pages.
            reads_tokens: as the `Scheduler` will have it.
            headroom: likewise.

        Raises:
            ConfigError: a ledger of these sizes is refused.
        """
        self.sizes = sizes
        self._reads_tokens, self._headroom = reads_tokens, headroom
        if sizes.num_rows > sizes.most_rows:
            raise ConfigError(
                f"max_batch {sizes.num_rows} must be at most {sizes.most_rows}: max_batch * topk * "
                "row_width must be below 2^31"
            )

    def at_once(self, num_tokens: int, shape: int = -1) -> Fit:
        """Requests of `num_tokens` tokens each that are admitted together to an empty pool.

        Args:
            num_tokens: of the prompt, or of prompt and output so far.
            shape: index into the shapes; -1 = the last.

        Raises:
            ConfigError: no request of so many tokens can go on within the context.
        """
        check_int("tokens", num_tokens, 1, self.sizes.max_context_len - 1)
        lo, hi = num_tokens, self._admission_root(num_tokens)
        pages = row_pages(self.sizes, lo, hi, self._index(shape))
        return self._fit(pages, step_pages(self.sizes))

    def to_the_end(self, prompt_len: int, max_len: int, shape: int = -1) -> Fit:
        """Requests that run side by side to their ends without ever waiting for a page.

        Args:
            prompt_len: tokens of each prompt.
            max_len: tokens of each request at most, the prompt included.
            shape: index into the shapes; -1 = the last.

        Raises:
            ConfigError: the lengths do not go together.
        """
        check_int("context", max_len, 2, self.sizes.max_context_len)
        check_int("prompt", prompt_len, 1, max_len - 1)
        last = self._last_root(prompt_len, max_len, shape)
        last = max(last, self._admission_root(prompt_len))
        index, sizes = self._index(shape), self.sizes
        fit = self._fit(sizes.most_pages(prompt_len, last, index), [0] * len(sizes.groups))
        if sizes.max_chunk < sizes.max_context_len:  # else a step may hold several whole prompts
            together = self._fit(*sizes.shared_pages(prompt_len, last, index))
            fit = max(fit, together, key=lambda each: each.num_requests)
        # Behind a window a row does not grow: those admitted together may be what binds.
        return min(fit, self.at_once(prompt_len, shape), key=lambda each: each.num_requests)

    def _admission_root(self, num_tokens: int) -> int:
        """The greatest root that a request must have room for to be admitted."""
        return min(num_tokens + self._headroom, self.sizes.max_context_len - 1)

    def _last_root(self, prompt_len: int, max_len: int, shape: int) -> int:
        """The greatest root that a round of such a request is ever reserved for.

        The scheduler prepares another round, with k of them in flight, as long as these may give
        one token each and the request still want more: r is max_len - 2 - k at most.
        """
        sizes, found = self.sizes, prompt_len
        is_plain = sizes.shapes[shape] == Shape.none()
        depth = 0 if self._reads_tokens and not is_plain else sizes.overlap_depth
        # `double_buffer` looks at the least root, a token for each round; `exact` at the greatest.
        step = sizes.shapes[shape].max_accept_len if sizes.policy == "exact" else 1
        for ahead in range(depth + 1):
            resolved_len = max_len - 2 - ahead
            if resolved_len >= prompt_len:
                found = max(found, resolved_len + ahead * step)
        return found

    def _index(self, shape: int) -> int:
        return range(len(self.sizes.shapes))[shape]

    def _fit(self, pages: Sequence[int], aside: Sequence[int]) -> Fit:
        """Requests that hold so many pages each, beside those set aside."""
        sizes, pages = self.sizes, tuple(pages)
        counts = [
            max(1, (group.num_pages - kept) // n)  # one alone always fits
            for group, n, kept in zip(sizes.groups, pages, aside, strict=True)
        ]
        by_pages = min(counts)
        if sizes.num_rows <= by_pages:
            is_most = sizes.num_rows == sizes.most_rows
            limit = "int32 indices, 2^31" if is_most else f"max_batch {sizes.num_rows}"
            return Fit(sizes.num_rows, pages, limit)
        short = [group for group, n in zip(sizes.groups, counts, strict=True) if n == by_pages]
        names = " and ".join(group.name for group in short)
        return Fit(by_pages, pages, f"pages of {names}")
