"""`KnownDrafter`: a drafter that knows the texts and is right as often as it is told to be.

A random model's drafts are never right, so `python -m benches nodes` drafts with what this file
makes up. The drafter runs a small model all the same, so drafting takes the time that it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specpool._core import Shape
from specpool.attention.lanes import Lanes
from specpool.draft import DraftTree, LMDrafter
from specpool.draft.side_by_side import Drafting, DraftPart
from specpool.memory.kv_cache import KVCache
from specpool.models import TargetModel

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]
#: What a drafter says of drafts that are right with these probabilities.
Says = Callable[[Float64], Float64]


@dataclass(frozen=True, slots=True)
class Guesses:
    """What the drafter proposes at each position of each text, if the tokens before are right.

    Attributes:
        ids: int64 [N, L, K], different tokens, the likeliest first.
        p: float32 [N, L, K], what the drafter says of them.
    """

    ids: Tensor
    p: Tensor


def guesses(
    texts: Int64, rates: Sequence[float], topk: int, vocab_size: int, says: Says
) -> Guesses:
    """Make up guesses.

    At each position one of K tokens is right with a probability of its own, whose mean over the
    text is its rate, the next one with half of what is left, and so on. Then they are sorted.

    Args:
        texts: int64 [N, L].
        rates: of each text, in (0, 1).
        topk: K, below `vocab_size`.
        vocab_size: tokens are below it.
        says: what the drafter says of these probabilities.
    """
    rng = np.random.default_rng(0)
    spread = 2.0 * np.array(rates)[:, None]
    first = rng.beta(spread, 2.0 - spread, texts.shape)
    halves = 0.5 ** np.arange(topk)
    p = np.concatenate([first[..., None], (1 - first)[..., None] * halves[1:]], axis=2)
    p = -np.sort(-p, axis=2)
    right = (rng.random(texts.shape)[..., None] > p.cumsum(axis=2)).sum(axis=2)  # K = none
    others = (texts[..., None] + 1 + np.arange(topk)) % vocab_size
    is_right = np.arange(topk) == right[..., None]
    ids = np.where(is_right, texts[..., None], others)
    return Guesses(torch.from_numpy(ids), torch.from_numpy(says(p).astype(np.float32)))


class KnownDrafter(LMDrafter):
    """A small model whose proposals are replaced by guesses of known texts.

    The last token of a prompt is the number of its text. It stands at one of the positions `at`,
    where no prompt has such a low number before.
    """

    def __init__(self, model: TargetModel, *, vocab_size: int, at: Sequence[int]) -> None:
        """Draft for a target with `vocab_size` tokens."""
        super().__init__(model, vocab_size=vocab_size)
        self._at = torch.tensor(at)
        self._guesses: Guesses | None = None

    def attach(
        self, cache: KVCache, first_layer: int, group: int, layout: str, shapes: Sequence[Shape]
    ) -> None:
        """Take the cache; see `Drafter.attach`."""
        super().attach(cache, first_layer, group, layout, shapes)
        self._text = torch.zeros(cache.tables[group].shape[0], dtype=torch.int64)  # of each row

    def know(self, guesses: Guesses) -> None:
        """Propose these from now on."""
        self._guesses = guesses

    def read(self, lanes: Lanes, tokens: Tensor) -> None:
        """Write draft KV, and note which text a row has."""
        super().read(lanes, tokens)
        if self._guesses is None:
            return
        is_number = torch.isin(lanes.positions, self._at) & (tokens < len(self._guesses.ids))
        at = is_number.nonzero().flatten()
        widths = torch.as_tensor(lanes.widths, dtype=torch.int64).expand(len(lanes.rows))
        rows = lanes.index.repeat_interleave(widths)
        self._text[rows[at]] = tokens[at]

    def _draft(self, part: DraftPart) -> Drafting:
        """Draft as the model does, but with the guesses in place of its results."""
        drafting, depth = super()._draft(part), 0
        ask = next(drafting)
        while True:
            level = yield ask
            depth += 1
            known = self._guesses
            if known is not None and level is not None:  # None = drafting ends early
                topk = level.ids.shape[1]
                texts = self._text[part.lanes.index].clamp(max=len(known.ids) - 1)
                places = (part.lanes.starts.long() + depth).clamp(max=known.ids.shape[1] - 1)
                each = len(level.ids) // len(texts)
                ids = known.ids[texts, places, :topk].repeat_interleave(each, 0)
                p = known.p[texts, places, :topk].repeat_interleave(each, 0)
                level = replace(level, ids=ids, p=None if level.p is None else p)
            try:
                ask = drafting.send(level)
            except StopIteration as end:
                tree: DraftTree = end.value
                return tree
