"""`SuffixDrafter`: proposes what followed the end of the text before, by counts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from specpool._core import Shape, SuffixIndex
from specpool.checks import check_int, shown
from specpool.engine.attention.lanes import Lanes
from specpool.engine.draft.base import DraftTree, TextDrafter
from specpool.engine.draft.texts import TextIndexes
from specpool.errors import ConfigError

#: Tokens of an index of one text, and of an index of all.
TEXT_TOKENS, SHARED_TOKENS = 1 << 20, 1 << 22
#: A row decodes plainly if its best next token has followed less often than this share.
MIN_SHARE = 0.6


class _Text:
    """The place of a text in an index, which may be shared."""

    def __init__(self, index: SuffixIndex) -> None:
        self.index, self.number = index, index.begin()

    def extend(self, text: Sequence[int], begin: int) -> None:
        """See `TextIndex`."""
        self.index.extend(self.number, list(text[begin:]))

    def drop(self) -> None:
        """See `TextIndex`; a shared index keeps the tokens."""
        self.index.end(self.number)


class SuffixDrafter(TextDrafter):
    """A drafter with a suffix automaton (`SuffixIndex`), for text that repeats itself or others.

    It finds the longest end of the text, at most `max_context - 1` tokens, that occurred before,
    and proposes the likeliest paths after it: a path's probability is the product of the shares of
    its tokens. So a tree is deep where one continuation prevailed, and wide where several did. The
    rest of the shape repeats the root token. It needs no draft model and keeps no KV.

    With `shares`, one index has the texts of all requests. Then a request's speed reveals something
    of the others' texts: share only among requests that trust each other. The text stays the same.

    As `NgramDrafter`, it knows a text by the list that holds it.
    """

    def __init__(
        self,
        *,
        shares: bool = False,
        max_context: int = 32,
        min_match: int = 1,
        max_tokens: int | None = None,
    ) -> None:
        """Start without texts.

        Args:
            shares: keep the texts of all requests in one index.
            max_context: longest end that is counted, in tokens, with the token that follows.
            min_match: a row with a shorter known end decodes plainly (see `is_promising`); 0 = it
                always drafts.
            max_tokens: the most tokens of an index; None means 2^20, and 2^22 with `shares`.

        Raises:
            ConfigError: a number is out of range.
        """
        if not isinstance(shares, bool):
            raise ConfigError(f"shares must be True or False, got {shown(shares)}")
        self._max_tokens = (
            (SHARED_TOKENS if shares else TEXT_TOKENS) if max_tokens is None else max_tokens
        )
        check_int("max_tokens", self._max_tokens, 2, 1 << 28)
        check_int("max_context", max_context, 2, 256)
        check_int("min_match", min_match, 0, max_context - 1)
        self._max_context, self._min_match = max_context, min_match
        self._shared = self._new_index() if shares else None
        self._texts = TextIndexes(lambda: _Text(self._shared or self._new_index()))

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
            raise ConfigError("a suffix drafter needs the lanes' tokens")
        self._texts.begin_turn()
        size = len(tokens), shape.num_draft_tokens
        nodes, parents = np.empty(size, np.int64), np.zeros(size, np.int32)
        for lane, text in enumerate(tokens):
            at = self._texts.index(text)
            drafts, draft_parents, _, _ = at.index.propose(
                at.number,
                num_steps=shape.num_steps,
                topk=shape.topk,
                num_draft_tokens=shape.num_draft_tokens,
            )
            nodes[lane] = text[-1]
            nodes[lane, 1 : 1 + len(drafts)] = drafts
            parents[lane, 1 : 1 + len(drafts)] = draft_parents
            if shape.topk == 1:  # a chain goes on to its end
                parents[lane] = np.arange(-1, size[1] - 1)
        parents[:, 0] = -1
        return DraftTree.from_parents(nodes, parents)

    def is_promising(self, tokens: Sequence[int]) -> bool:
        """Return whether enough of the text's end is known, and one token has prevailed after it.

        A round that accepts nothing costs more than a plain one.
        """
        at = self._texts.index(tokens)
        match_len, share = at.index.best(at.number)
        return self._min_match == 0 or (match_len >= self._min_match and share >= MIN_SHARE)

    def _new_index(self) -> SuffixIndex:
        return SuffixIndex(self._max_tokens, max_context=self._max_context)
