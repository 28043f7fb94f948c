"""`Matcher`: which tokens may follow a request's output, at the root and along its drafts."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from specpool.arrays import Int32, Int64
from specpool.errors import ConfigError, is_fault

#: Tokens of an output that are followed at once by a new lexer; each mask gives it new strength.
_REPLAYED = 16
#: A forced span with more tokens than this is taken for endless.
MAX_SPAN = 4096


class Matcher:
    """A place in a grammar: behind the tokens of one request's output.

    It follows the output on the host. For the drafts of a tree it goes down each path and comes
    back. A token that ends the text may follow exactly where the form is complete, whatever its
    bytes are.

    Attributes:
        error: why no token can follow; None if one can.
    """

    def __init__(
        self,
        engine: Any,
        vocab_size: int,
        end_ids: frozenset[int],
        *,
        renewed: Callable[[Any], Any] | None = None,
    ) -> None:
        """Begin an empty output.

        Args:
            engine: an `llguidance.LLMatcher` at its start, which is not changed.
            vocab_size: the target's.
            end_ids: the tokens that end the output.
            renewed: returns an engine of the same grammar in the place of one whose lexer is full
                or worn by other texts, or None; None if there is no other.
        """
        self._start, self._cursor = engine, engine.deep_copy()
        self._renewed = renewed
        self._output: list[int] = []  # followed so far, without an end
        self._vocab_size = vocab_size
        self._end_ids = frozenset(token for token in end_ids if 0 <= token < vocab_size)
        self._num_words = -(-vocab_size // 32)
        self._end_bits = np.zeros(self._num_words, np.int32)
        for token in self._end_ids:
            self._end_bits.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)
        self._num_tokens = 0  # of the output, so far
        self._has_ended = False  # the last of them ends the text
        self._foresees = True
        self._is_lost = False  # the library has failed, so the cursor is of no use
        self.error: str | None = None

    def fresh(self) -> Matcher:
        """Return a matcher of the same grammar, at its start."""
        return Matcher(self._start, self._vocab_size, self._end_ids, renewed=self._renewed)

    def follow(self, tokens: Sequence[int], prompt_len: int) -> None:
        """Go on to the end of `tokens`: a prompt, the output followed so far, and new output."""
        new = tokens[prompt_len + self._num_tokens :]
        self._num_tokens += len(new)
        if new and new[-1] in self._end_ids:
            self._has_ended, new = True, new[:-1]
        with self._failing():
            self._output += new
            if new and not self._cursor.consume_tokens(list(new)) and not self._renew():
                why = shortened(self._cursor.get_error())
                is_other = "doesn't satisfy the grammar" in why  # another text than the form's
                self._fail("the form does not allow the output" if is_other else why)

    def masks(
        self, tokens: Int64, first_child: Int32, next_sibling: Int32
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """Return the tokens that may follow each node of a tree whose path is allowed.

        Args:
            tokens: [N]; the root is the last token of the output.
            first_child: [N]; -1 for none.
            next_sibling: [N]; -1 for none.

        Returns:
            The nodes, [n]: the root and all nodes whose path is allowed and goes on. And bits,
            [n, ceil(V / 32)]: bit t % 32 of word t // 32 is set if token t may follow. If nothing
            may follow the root, its bits are 0 and `error` says why.
        """
        if self._has_ended:
            return np.zeros(0, np.int64), np.zeros((0, self._num_words), np.int32)
        lines: dict[int, npt.NDArray[np.int32]] = {}
        if not self._is_lost:
            with self._failing():
                lines.update(self._lines_from(0, tokens, first_child, next_sibling))
                if self._renew():
                    lines = dict(self._lines_from(0, tokens, first_child, next_sibling))
                if not lines[0].any() and self.error is None:
                    self._fail(
                        "no token can follow, or only one that ends the text, which it may not yet"
                    )
        if self._is_lost:
            return np.zeros(1, np.int64), np.zeros((1, self._num_words), np.int32)
        return np.array([*lines]), np.array([*lines.values()])

    # A method, because a nested function that calls itself would leave its arrays to the collector.
    def _lines_from(
        self, node: int, tokens: Int64, first_child: Int32, next_sibling: Int32
    ) -> Iterator[tuple[int, npt.NDArray[np.int32]]]:
        """Yield what may follow a node, where the text now is, and then its allowed descendants."""
        line = self._mask()
        yield node, line
        child = int(first_child[node])
        while child != -1:
            token = int(tokens[child])
            if line[token // 32] >> (token % 32) & 1 and token not in self._end_ids:
                if self._cursor.consume_token(token):
                    yield from self._lines_from(child, tokens, first_child, next_sibling)
                if not self._cursor.rollback(1):
                    self._fail("the form's place was lost")
                    return
            child = int(next_sibling[child])

    def dead_end(self, tokens: Sequence[int], prompt_len: int) -> str | None:
        """Return why no token can follow the end of `tokens`, as in `follow`; None if one can."""
        self.follow(tokens, prompt_len)
        no_link = np.full(1, -1, np.int32)
        self.masks(np.zeros(1, np.int64), no_link, no_link)
        return self.error

    def forced(self, max_tokens: int) -> list[int]:
        """Return the next tokens, if the grammar leaves one string or one end.

        There are at most `max_tokens`, and none if it leaves a choice.
        """
        if self._has_ended or self.error is not None or max_tokens < 1:
            return []
        span: list[int] = []
        with self._failing():
            span = self._span(max_tokens)
            if self._renew():
                span = self._span(max_tokens)
        return span

    def _span(self, max_tokens: int) -> list[int]:
        """Return the forced tokens; see `forced`."""
        if self._cursor.is_stopped():
            return [min(self._end_ids)] if len(self._end_ids) == 1 else []
        if not self._foresees:
            return []
        tokens = self._cursor.compute_ff_tokens()
        span = [*itertools.takewhile(lambda token: token not in self._end_ids, tokens)]
        if len(span) > MAX_SPAN:  # each further call would take as long
            self._foresees = False
        if len(span) < max_tokens and len(self._end_ids) == 1 and self._ends_after(span):
            span = [*span, *self._end_ids]
        return [token for token in span[:max_tokens] if token < self._vocab_size]

    def _ends_after(self, span: list[int]) -> bool:
        if not span:
            return False
        is_over = bool(self._cursor.consume_tokens(span) and self._cursor.is_stopped())
        if not self._cursor.rollback(len(span)):
            self._fail("the form's place was lost")
        return is_over

    def _renew(self) -> bool:
        """Go on with another lexer if this one has failed; return whether there is one.

        It may have failed by what the texts of other requests have filled it with.
        """
        if self._renewed is None or not self._cursor.is_error():
            return False
        if not self._cursor.get_error().startswith("lexer error"):
            return False
        engine = self._renewed(self._start)
        if engine is None:
            return False
        self._start, self._cursor = engine, engine.deep_copy()
        self.error = None
        for start in range(0, len(self._output), _REPLAYED):
            self._cursor.compute_bitmask()
            if not self._cursor.consume_tokens(self._output[start : start + _REPLAYED]):
                return False
        return True

    def _mask(self) -> npt.NDArray[np.int32]:
        """Return the bits of the tokens that may follow here, int32 [ceil(V / 32)]."""
        bits = self._cursor.compute_bitmask()
        if self._cursor.is_error():
            self._fail(shortened(self._cursor.get_error()))
            return np.zeros(self._num_words, np.int32)
        words = np.zeros(max(self._num_words, -(-len(bits) // 4)), np.int32)
        words.view(np.uint8)[: len(bits)] = np.frombuffer(bits, np.uint8)
        words = words[: self._num_words]
        if self._cursor.is_accepting():
            return words | self._end_bits
        return words & ~self._end_bits

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Turn an error of the library within the block into this matcher's, which ends here."""
        try:
            yield
        except BaseException as error:
            if not is_fault(error):
                raise
            self._is_lost = True
            self._fail(shortened(f"{type(error).__name__}: {error}"))

    def _fail(self, why: str) -> None:
        if self.error is None:
            self.error = f"structured: {why}"


def shortened(message: str) -> str:
    """Return an error of the grammar library in one line of at most 300 characters."""
    return " ".join(re.split("<state>|<non-verbose", message)[0].split())[:300]


def refusal(message: str) -> ConfigError:
    """Return the error of a grammar that cannot be compiled."""
    return ConfigError(f"structured: {shortened(message)}")
