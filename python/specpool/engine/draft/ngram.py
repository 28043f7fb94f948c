"""`NgramDrafter`: prompt lookup. It proposes what followed an earlier copy of the last tokens.

An index per text maps each n-gram to its latest end. What a text has at first is sorted with NumPy,
because a prompt may have a hundred thousand tokens, and the round waits for them. Then the index
grows with the text, at O(log n) per token and n-gram length for a prompt of n tokens.
"""

from __future__ import annotations

import itertools
import secrets
from array import array
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from specpool._core import Shape
from specpool.checks import check_int
from specpool.engine.attention.lanes import Lanes
from specpool.engine.draft.base import DraftTree, TextDrafter
from specpool.engine.draft.texts import TextIndexes
from specpool.engine.models.files.names import DEFAULT_NGRAM, MAX_NGRAM
from specpool.errors import ConfigError

#: The most earlier occurrences that a tree takes, per length of the n-gram.
MAX_OCCURRENCES = 16
#: The first hit rates of a text's finds by 1, 2, 3, and 4 or more tokens.
FIRST_HIT_RATES = (0.3, 0.5, 0.7, 0.8)
#: The weight of the newest find in its rate, and the rate below which a row decodes plainly.
HIT_WEIGHT, MIN_HIT_RATE = 0.25, 0.3

# By which the tokens of an n-gram count in its hash. Nobody can know n-grams of one hash.
_FACTORS = [secrets.randbits(64) | 1 for _ in range(MAX_NGRAM)]
_WORD = (1 << 64) - 1


class NgramDrafter(TextDrafter):
    """A drafter by prompt lookup, for text that repeats itself or its prompt.

    It finds the longest end of the text, at most `max_ngram` tokens, that occurred before, and
    proposes the tokens that followed. It needs no draft model, keeps no KV, and costs microseconds.
    A chain continues the most recent occurrence of the longest end. A tree has the first `topk`
    different continuations: longer ends first, and recent occurrences first among equal lengths. A
    continuation that reaches the end of the text repeats itself. The rest of the shape, or all of
    it if nothing occurred before, repeats the root token; verify accepts it only where it is right.

    The drafter knows a text by the list that holds it, so pass the same list in each round. Another
    list is indexed anew, and so is a list whose last indexed tokens have changed. An index takes 16
    bytes per token and n-gram length for what a text has at first, and about 200 for what it grows
    by. An unused index is dropped after `KEPT_CALLS` turns.
    """

    def __init__(
        self,
        *,
        max_ngram: int = DEFAULT_NGRAM,
        min_ngram: int = 1,
        min_match: int = 1,
    ) -> None:
        """Look for ends of the text of `min_ngram` to `max_ngram` tokens.

        Args:
            max_ngram: longest end to search for.
            min_ngram: shortest end to search for.
            min_match: a row whose longest match is shorter decodes plainly (see `is_promising`);
                0 = it always drafts.

        Raises:
            ConfigError: a number is out of range: `1 <= min_ngram <= max_ngram <= MAX_NGRAM`, and
                `0 <= min_match <= max_ngram`.
        """
        check_int("max_ngram", max_ngram, 1, MAX_NGRAM)
        check_int("min_ngram", min_ngram, 1, max_ngram)
        check_int("min_match", min_match, 0, max_ngram)
        self._min_match = min_match
        self._lens = range(max_ngram, min_ngram - 1, -1)
        self._indexes = TextIndexes(lambda: _NgramIndex(self._lens))

    def propose(
        self,
        lanes: Lanes,
        shape: Shape,
        root_tokens: Tensor,
        tokens: Sequence[Sequence[int]] | None,
    ) -> DraftTree:
        """Propose a tree for each lane; see the class.

        Raises:
            ConfigError: no tokens were given.
        """
        if tokens is None:
            raise ConfigError("an n-gram drafter needs the lanes' tokens")
        self._indexes.begin_turn()
        trees = [_grow(self._indexes.index(text), shape) for text in tokens]
        return DraftTree.from_parents(
            np.array([t for t, _ in trees], np.int64), np.array([p for _, p in trees], np.int32)
        )

    def is_promising(self, tokens: Sequence[int]) -> bool:
        """Return whether the text's last `min_match` tokens occurred before and finds were right.

        A round that accepts nothing costs more than a plain one. If too few of the text's recent
        finds by as many tokens predicted the next token, the row decodes plainly. Its finds are
        counted on, so it drafts again when they improve.
        """
        return self._indexes.index(tokens).foresees(self._min_match)


class _NgramIndex:
    """The ends of each n-gram of one text, for several n.

    `_first[n]` has the n-grams of the text as it was at first. `_last[n]` maps an n-gram that ended
    since to its last end. `_before[n][e - n + 1]` is the end of the occurrence before the one that
    ends at `e`, or -1. Another n-gram of the same hash may stand there, so a reader of an end
    compares the tokens.
    """

    def __init__(self, lens: Sequence[int]) -> None:
        self.text: Sequence[int] = ()
        self._lens = lens  # longest first
        self._first: dict[int, _Sorted] = {}
        self._last: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in lens}
        self._before = {n: array("q") for n in lens}
        self._num_indexed = 0
        # The token that the latest find predicts, and the place of the find's rate.
        self._foreseen: tuple[int, int] | None = None
        self._hit_rates = list(FIRST_HIT_RATES)  # running shares of predictions that were right

    def extend(self, text: Sequence[int], begin: int) -> None:
        """Index the new tokens of the text, and update the hit rate with the first of them."""
        self.text = text
        if self._foreseen is not None and len(text) > begin:
            token, rate_index = self._foreseen
            self._hit_rates[rate_index] += (
                (text[begin] == token) - self._hit_rates[rate_index]
            ) * HIT_WEIGHT
            self._foreseen = None
        if begin == 0:
            tokens = np.array(text, np.int64).view(np.uint64)
            for n in self._lens:
                self._first[n] = _Sorted(tokens, n)
                self._before[n] = self._first[n].before()
        else:
            for n in self._lens:
                self._grow(n, text, begin)
        self._num_indexed = len(text)

    def _grow(self, n: int, text: Sequence[int], begin: int) -> None:
        """Index the n-grams that end at `begin` or behind it."""
        start = max(0, begin - n + 1)
        new, last, before = text[start:], self._last[n], self._before[n]
        ngrams = zip(*(new[at:] for at in range(n)), strict=False)
        for end, ngram in enumerate(ngrams, start + n - 1):
            known = last.get(ngram)
            before.append(self._first[n].last_end(ngram) if known is None else known)
            last[ngram] = end

    def drop(self) -> None:
        """Do nothing, because the index is its own."""

    def occurrences(self) -> Iterator[int]:
        """Yield the earlier ends of the text's longest end, most recent first; then shorter ends.

        At most `MAX_OCCURRENCES` for each length.
        """
        for n in self._lens:
            yield from itertools.islice(self._occurrences_of(n), MAX_OCCURRENCES)

    def foresees(self, min_match: int) -> bool:
        """Return whether an end of `min_match` tokens occurred before and finds were right lately.

        Also remember the token that this find predicts, for the hit rate.
        """
        ends = ((n, end) for n in self._lens if n >= min_match for end in self._occurrences_of(n))
        n, end = next(ends, (0, None))
        if end is None:
            return min_match == 0
        rate_index = min(n, len(FIRST_HIT_RATES)) - 1
        self._foreseen = self.text[end + 1], rate_index
        return min_match == 0 or self._hit_rates[rate_index] >= MIN_HIT_RATE

    def _occurrences_of(self, n: int) -> Iterator[int]:
        suffix, before = list(self.text[-n:]), self._before[n]
        end = self._num_indexed - 1
        while end >= n - 1:
            end = before[end - n + 1]
            if end >= 0 and list(self.text[end - n + 1 : end + 1]) == suffix:
                yield end

    def continuation(self, end: int, num_tokens: int) -> list[int]:
        """Return the tokens after position `end`; past the end of the text they repeat."""
        period = self._num_indexed - 1 - end
        known = list(self.text[end + 1 : end + 1 + num_tokens])
        for at in range(len(known), num_tokens):
            known.append(known[at - period])
        return known


class _Sorted:
    """The n-grams of a text in the order of their hashes, and of their places among equal ones.

    A key is a word: its high bits are those of the hash, its low bits the place of the n-gram.
    """

    def __init__(self, tokens: npt.NDArray[np.uint64], n: int) -> None:
        """Sort the n-grams of these tokens. O(t log t) for t tokens."""
        self._n, self._num = n, max(0, len(tokens) - n + 1)
        self._places = (1 << self._num.bit_length()) - 1
        keys = np.zeros(self._num, np.uint64)
        for at in range(n):
            keys += tokens[at : at + self._num] * np.uint64(_FACTORS[at])
        keys &= np.uint64(_WORD ^ self._places)
        keys |= np.arange(self._num, dtype=np.uint64)
        keys.sort()
        self._keys = keys

    def before(self) -> array[int]:
        """Return the end of the n-gram of the same hash before each; -1 if there is none."""
        ends = np.full(self._num, -1, np.int64)
        places = (self._keys & np.uint64(self._places)).astype(np.int64)
        is_same = (self._keys[1:] ^ self._keys[:-1]) <= np.uint64(self._places)
        ends[places[1:][is_same]] = places[:-1][is_same] + self._n - 1
        return array("q", ends.tobytes())

    def last_end(self, ngram: Sequence[int]) -> int:
        """Return the last end of an n-gram of the same hash; -1 if there is none."""
        key = sum(token * factor for token, factor in zip(ngram, _FACTORS, strict=False)) & _WORD
        at = int(self._keys.searchsorted(np.uint64(key | self._places), side="right")) - 1
        if at < 0 or int(self._keys[at]) ^ key > self._places:
            return -1
        return (int(self._keys[at]) & self._places) + self._n - 1


def _grow(index: _NgramIndex, shape: Shape) -> tuple[list[int], list[int]]:
    """Return one lane's tree as N tokens and N parents."""
    num_steps, num_nodes = shape.num_steps, shape.num_draft_tokens
    root = index.text[-1]
    tokens, parents = [root], [-1]
    children: dict[tuple[int, int], int] = {}  # (node, token) -> node

    def insert(path: list[int]) -> bool:
        """Add a path below the root until no node is left; return whether it added any node."""
        node, before = 0, len(tokens)
        for token in path:
            child = children.get((node, token))
            if child is None:
                if len(tokens) == num_nodes:
                    break
                child = children[node, token] = len(tokens)
                tokens.append(token)
                parents.append(node)
            node = child
        return len(tokens) > before

    num_branches = 0
    for end in index.occurrences():
        if num_branches == shape.topk or len(tokens) == num_nodes:
            break
        num_branches += insert(index.continuation(end, num_steps))
    insert([root] * num_steps)
    missing = num_nodes - len(tokens)
    return tokens + [root] * missing, parents + [0] * missing
