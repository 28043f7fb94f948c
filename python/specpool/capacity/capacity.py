"""`Capacity`: how many requests the scheduler will run together, and what limits the number.

It answers two questions; tests/capacity/test_plan.py compares both answers with the scheduler:

- *at once*: how many requests of a given length are admitted together to an empty pool? The
  scheduler admits a request if the pages for its next round are free. The requests grow, so some
  may be retracted later.
- *to their ends*: how many requests run side by side from their prompts to their last tokens, so
  that none ever waits for a page or is retracted, whatever their drafts do?
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specpool._core import Shape, choose_shapes
from specpool.capacity.group_sizes import GroupSizes
from specpool.capacity.page_needs import chunk_pages, row_pages, step_pages
from specpool.checks import check_int
from specpool.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Fit:
    """An answer of `Capacity`."""

    num_requests: int
    pages: tuple[int, ...]  # pages of each group that one request needs
    limit: str  # what limits the number, such as "pages of kv" or "max_batch 8"


@dataclass(frozen=True, slots=True)
class Mix:
    """Rows whose shapes a budget chooses, all of one length and acceptance."""

    fit: Fit  # of the narrowest shape: admission counts each row with that
    rows: dict[int, int]  # the rows of each shape index in use, the narrowest first
    tokens: float  # expected of a round of all rows


class Capacity:
    """The room of a ledger of given sizes."""

    def __init__(self, sizes: GroupSizes, *, reads_tokens: bool = False, headroom: int = 0) -> None:
        """Keep the sizes and options.

        Args:
            sizes: the groups and their pages.
            reads_tokens: the same as the `Scheduler`'s option.
            headroom: the same as the `Scheduler`'s option, in tokens.

        Raises:
            ConfigError: `sizes` has more rows than a ledger can have.
        """
        self.sizes = sizes
        self._reads_tokens, self._headroom = reads_tokens, headroom
        if sizes.num_rows > sizes.most_rows:
            raise ConfigError(
                f"max_batch {sizes.num_rows} must be at most {sizes.most_rows}: max_batch * topk * "
                "row_width must be below 2^31"
            )

    def at_once(self, num_tokens: int, shape: int = -1, *, common: int = 0) -> Fit:
        """Count the requests of `num_tokens` tokens that are admitted together to an empty pool.

        Args:
            num_tokens: tokens of each prompt, or of prompt and output so far.
            shape: index into the shapes; -1 means the last.
            common: tokens that all of them begin with, whose KV the prefix cache has for all.

        Raises:
            ConfigError: `num_tokens` is not in [1, max_context_len - 1], or `common` is not below
                it.
        """
        check_int("tokens", num_tokens, 1, self.sizes.max_context_len - 1)
        check_int("common", common, 0, num_tokens - 1)
        lo, hi = num_tokens, self._admission_root(num_tokens)
        pages = row_pages(self.sizes, lo, hi, self._index(shape))
        # A row shares the whole pages below its window, and copies a partly filled one.
        shared = [
            0 if group.window is not None else common // group.page_size
            for group in self.sizes.groups
        ]
        own_pages = [n - num_shared for n, num_shared in zip(pages, shared, strict=True)]
        return self._fit(own_pages, shared, step_pages(self.sizes), self._chunks(num_tokens, pages))

    def mixed(self, num_tokens: int, choices: Sequence[int], rate: float) -> Mix:
        """Count as `at_once` where a budget chooses the rows' shapes, and choose them.

        The pages that the rows leave give the most tokens of a round; its seconds do not count. The
        core chooses as it does for the scheduler. O(rows x choices).

        Args:
            num_tokens: as in `at_once`.
            choices: indices of the shapes that a row may have, the narrowest first.
            rate: in [0, 1], how likely a draft is right where those before it are.

        Raises:
            ConfigError: as `at_once`.
        """
        fit = self.at_once(num_tokens, choices[0])
        lo, hi = num_tokens, self._admission_root(num_tokens)
        needs = np.array([row_pages(self.sizes, lo, hi, shape) for shape in choices], np.int32)
        sizes, num_rows = self.sizes, fit.num_requests
        free = np.array([group.num_pages for group in sizes.groups], np.int64)
        chunks = num_rows * np.array(self._chunks(num_tokens, needs[0]), np.int64)
        free -= np.minimum(step_pages(sizes), chunks) + num_rows * needs[0].astype(np.int64)
        tokens = [self.round_tokens(shape, rate) for shape in choices]
        zeros = np.zeros(len(choices))
        chosen, *_ = choose_shapes(
            np.tile(np.arange(len(choices), dtype=np.int32), (num_rows, 1)),
            np.tile(tokens, (num_rows, 1)),
            worth=np.ones(num_rows),
            gives=np.ones(num_rows),
            due=np.zeros((num_rows, 2)),
            base=1.0,
            charge=zeros,
            lane=zeros,
            pages=np.tile(np.maximum(needs - needs[0], 0), (num_rows, 1, 1)),
            free=np.maximum(free, 0),
        )
        counts = np.bincount(chosen, minlength=len(choices)).tolist()
        rows = {shape: count for shape, count in zip(choices, counts, strict=True) if count}
        return Mix(fit, rows, float(np.dot(counts, tokens)))

    def round_tokens(self, shape: int, rate: float) -> float:
        """Return the expected tokens of a row's round with a shape; see `mixed`."""
        return sum(rate**depth for depth in range(self.sizes.shapes[shape].num_steps + 1))

    def to_the_end(self, prompt_len: int, max_len: int, shape: int = -1) -> Fit:
        """Count the requests that run to their ends together without ever waiting for a page.

        Args:
            prompt_len: tokens of each prompt.
            max_len: the most tokens of each request, the prompt included.
            shape: index into the shapes; -1 means the last.

        Raises:
            ConfigError: `max_len` is not in [2, max_context_len], or `prompt_len` is not in
                [1, max_len - 1].
        """
        check_int("context", max_len, 2, self.sizes.max_context_len)
        check_int("prompt", prompt_len, 1, max_len - 1)
        last = self._last_root(prompt_len, max_len, shape)
        last = max(last, self._admission_root(prompt_len))
        index, sizes = self._index(shape), self.sizes
        fit = self._fit(sizes.most_pages(prompt_len, last, index), [0] * len(sizes.groups))
        if sizes.max_chunk < sizes.max_context_len:  # else a step may hold several whole prompts
            fit_together = self._fit(*sizes.shared_pages(prompt_len, last, index))
            fit = max(fit, fit_together, key=lambda candidate: candidate.num_requests)
        # Rows of a window group do not grow, so admission may be the tighter limit.
        return min(
            fit, self.at_once(prompt_len, shape), key=lambda candidate: candidate.num_requests
        )

    def _admission_root(self, num_tokens: int) -> int:
        """Return the greatest root that a request must have room for to be admitted."""
        return min(num_tokens + self._headroom, self.sizes.max_context_len - 1)

    def _last_root(self, prompt_len: int, max_len: int, shape: int) -> int:
        """Return the greatest root that a round of such a request is ever reserved for.

        With k rounds in flight, the scheduler prepares another one if the request still needs
        tokens when each of the k gives one token. So r is at most max_len - 2 - k.
        """
        sizes, last_root = self.sizes, prompt_len
        is_plain = sizes.shapes[shape] == Shape.none()
        depth = 0 if self._reads_tokens and not is_plain else sizes.overlap_depth
        # `double_buffer` reserves from the least root, one token per round; `exact` from the
        # greatest.
        step = sizes.shapes[shape].max_accept_len if sizes.policy == "exact" else 1
        for ahead in range(depth + 1):
            resolved_len = max_len - 2 - ahead
            if resolved_len >= prompt_len:
                last_root = max(last_root, resolved_len + ahead * step)
        return last_root

    def _index(self, shape: int) -> int:
        return range(len(self.sizes.shapes))[shape]

    def _chunks(self, num_tokens: int, pages: Sequence[int]) -> list[int]:
        """Return the pages of each group that a request's prefill takes beyond `pages`."""
        page_sizes = np.array([group.page_size for group in self.sizes.groups], np.int64)
        chunks: list[int] = chunk_pages(num_tokens, page_sizes, np.array(pages, np.int64)).tolist()
        return chunks

    def _fit(
        self,
        pages: Sequence[int],
        pages_aside: Sequence[int],
        step: Sequence[int] | None = None,
        chunks: Sequence[int] | None = None,
    ) -> Fit:
        """Return how many requests of `pages` pages each fit beside the pages set `pages_aside`.

        With them fits one prefill step of `step` pages, or of `chunks` for each request if that is
        less.
        """
        sizes, pages = self.sizes, tuple(pages)
        none = [0] * len(pages)
        counts = []
        for group, n, num_aside, of_step, of_chunk in zip(
            sizes.groups, pages, pages_aside, step or none, chunks or none, strict=True
        ):
            free = group.num_pages - num_aside
            # One alone always fits.
            counts.append(max(1, (free - of_step) // n, free // (n + of_chunk)))
        by_pages = min(counts)
        if sizes.num_rows <= by_pages:
            is_most = sizes.num_rows == sizes.most_rows
            limit = "int32 indices, 2^31" if is_most else f"max_batch {sizes.num_rows}"
            return Fit(sizes.num_rows, pages, limit)
        scarce = [group for group, n in zip(sizes.groups, counts, strict=True) if n == by_pages]
        names = " and ".join(group.name for group in scarce)
        return Fit(by_pages, pages, f"pages of {names}")
