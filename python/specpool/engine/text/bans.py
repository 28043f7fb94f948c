"""`Bans`: the tokens that may not follow a request's text, at the root and along its drafts.

The rules are those of transformers: no n-gram twice, no bad words, suppressed tokens, and no end
before a least length. Each depends on the text alone, so drafts do not change the output. If they
would leave a form no token, they are not applied.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from specpool.arrays import Int32, Int64


class Bans:
    """A request's text so far, and what may not follow it.

    It follows the text on the host. For the drafts of a tree it goes down each path and comes back.
    It keeps a copy of the text, and with `ngram_size` an entry for each of its n-grams.
    """

    def __init__(
        self,
        prompt_len: int,
        end_ids: frozenset[int],
        *,
        always: Sequence[int],
        first: Sequence[int],
        words: Sequence[Sequence[int]],
        ngram_size: int,
        min_new_tokens: int,
    ) -> None:
        """Begin with an empty text.

        Args:
            prompt_len: tokens of the prompt.
            end_ids: tokens that end the text.
            always: tokens that never follow.
            first: tokens that are not the first of the output.
            words: sequences that the output must not have. A sequence that is one token of
                `end_ids` is ignored.
            ngram_size: n of the n-grams that must not repeat; 0 if they may.
            min_new_tokens: tokens of the output before one of `end_ids`.
        """
        single = [word[0] for word in words if len(word) == 1 and word[0] not in end_ids]
        self._always = frozenset(always) | frozenset(single)
        self._first, self._end_ids = frozenset(first), end_ids
        self._words = [list(word) for word in words if len(word) > 1]
        self._size = ngram_size
        self._min_len = prompt_len + min_new_tokens
        self._prompt_len = prompt_len
        self._text: list[int] = []
        # The first n - 1 tokens of each n-gram of the text -> its last one, in their order.
        self._lasts: dict[tuple[int, ...], list[int]] = {}

    def of_tree(
        self,
        text: Sequence[int],
        tokens: Int64,
        first_child: Int32,
        next_sibling: Int32,
        allowed: Mapping[int, Int32],
    ) -> tuple[Int64, Int64]:
        """Return what may not follow the nodes of a tree behind a text.

        Args:
            text: the prompt and the output, which begins with the text of the last call.
            tokens: [N]; the root is the last token of `text`.
            first_child: [N]; -1 for none.
            next_sibling: [N]; -1 for none.
            allowed: nodes at which a form allows only some tokens, each with these tokens as bits
                [ceil(V / 32)], as in `Matcher.masks`. Bans that would leave none are not applied.

        Returns:
            Pairs of a node and a token that may not follow it, as two arrays [n]. Nodes below a
            banned token are left out.
        """
        for token in text[len(self._text) :]:
            self._push(token)
        nodes: list[int] = []
        banned_tokens: list[int] = []

        def visit(node: int) -> None:
            banned = self._banned()
            if node in allowed and not _leaves_any(allowed[node], banned):
                banned = set()
            nodes.extend([node] * len(banned))
            banned_tokens.extend(banned)
            child = int(first_child[node])
            while child != -1:
                token = int(tokens[child])
                if token not in banned:
                    self._push(token)
                    visit(child)
                    self._pop()
                child = int(next_sibling[child])

        visit(0)
        return np.array(nodes, np.int64), np.array(banned_tokens, np.int64)

    def _banned(self) -> set[int]:
        """Return the tokens that may not follow the text."""
        text, size, banned = self._text, self._size, set(self._always)
        if len(text) < self._min_len:
            banned |= self._end_ids
        if len(text) == self._prompt_len:
            banned |= self._first
        for word in self._words:
            # As in transformers, a word as long as the text and its next token is not looked for.
            if len(text) >= len(word) and text[1 - len(word) :] == word[:-1]:
                banned.add(word[-1])
        if size and len(text) >= size:
            banned.update(self._lasts.get(tuple(text[len(text) + 1 - size :]), ()))
        return banned

    def _push(self, token: int) -> None:
        self._text.append(token)
        if self._size and len(self._text) >= self._size:
            *start, last = self._text[-self._size :]
            self._lasts.setdefault(tuple(start), []).append(last)

    def _pop(self) -> None:
        if self._size and len(self._text) >= self._size:
            self._lasts[tuple(self._text[-self._size : -1])].pop()
        self._text.pop()


def _leaves_any(allowed: Int32, banned: Collection[int]) -> bool:
    """Return whether a token whose bit is set in `allowed` is not banned."""
    remaining = allowed.view(np.uint32).copy()
    tokens = np.array([t for t in banned if t < 32 * len(remaining)], np.int64)
    np.bitwise_and.at(remaining, tokens // 32, ~(np.uint32(1) << (tokens % 32).astype(np.uint32)))
    return bool(remaining.any())
