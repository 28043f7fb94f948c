"""What the user hears of a request: chunks while it runs, its output when it is done."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING

from specpool.request import Request, RequestOutput, draft_flags
from specpool.tokens import TextStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Chunk:
    """What came new to one prompt's output.

    Attributes:
        index: which prompt.
        sample: which of its samples.
        token_ids: the new tokens.
        pieces: the new text in runs, each with whether it is accepted drafts. A character whose
            bytes are not complete yet waits for the next chunk.
    """

    index: int
    sample: int
    token_ids: list[int]
    pieces: list[tuple[str, bool]]

    @property
    def text(self) -> str:
        """The new text."""
        return "".join(text for text, _ in self.pieces)


class Report:
    """Tells what is new of one request, at a cost that depends on what is new alone."""

    def __init__(self, request: Request, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """Decode with `tokenizer`; without one, texts are empty."""
        self._request, self._tokenizer = request, tokenizer
        self._text = TextStream(tokenizer, request.params.stop)
        self._num_told = 0  # tokens of the output
        self._num_forwards = 0  # whose flags have been taken
        self._flags: deque[bool] = deque()  # of their tokens that have not been told
        self._is_done = False

    def news(self) -> Iterator[Chunk | RequestOutput]:
        """What came since the last time: a chunk, and the output once it is done."""
        request, start = self._request, self._num_told
        done, num_tokens = request.finish_reason is not None, request.num_output_tokens
        if self._is_done or (num_tokens <= start and not done):
            return
        self._num_told = max(start, num_tokens)
        ids = request.tokens[request.prompt_len + start :]
        new = zip(ids, self._take_flags(len(ids)), strict=True)
        pieces = []
        for from_draft, run in itertools.groupby(new, key=itemgetter(1)):
            tokens = _visible([token for token, _ in run], request)
            pieces.append((self._text.push(tokens), from_draft))
        if done:
            pieces.append((self._text.push([], last=True), False))
        pieces = [piece for piece in pieces if piece[0]]
        if ids or pieces:
            yield Chunk(request.index, request.sample, ids, pieces)
        # Who took the chunk may have raised, or asked for news in between.
        if done and not self._is_done:
            output = output_of(request, self._tokenizer)  # Ctrl-C may come: told it is only then
            self._is_done = True
            yield output

    def _take_flags(self, num_tokens: int) -> list[bool]:
        """Whether each of the next tokens is an accepted draft, as `Request.from_draft` says."""
        forwards = self._request.forwards
        while len(self._flags) < num_tokens:
            self._flags += draft_flags(forwards[self._num_forwards])
            self._num_forwards += 1
        return [self._flags.popleft() for _ in range(num_tokens)]


def _visible(tokens: list[int], request: Request) -> list[int]:
    return [token for token in tokens if token not in request.stop_ids]


def output_of(request: Request, tokenizer: PreTrainedTokenizerBase | None) -> RequestOutput:
    """What the user gets of a request that is done."""
    text = TextStream(tokenizer, request.params.stop)
    ids, times = request.output_ids, request.times
    hit = None if request.watch is None else request.watch.hit
    return RequestOutput(
        index=request.index,
        sample=request.sample,
        prompt_ids=request.tokens[: request.prompt_len],
        token_ids=ids,
        text=text.push(_visible(ids, request), last=True),
        finish_reason=request.finish_reason or "abort",
        error=request.error,
        seed=request.seed,
        accept_lens=request.accept_lens,
        from_draft=request.from_draft,
        logprobs=request.logprobs if request.params.logprobs is not None else None,
        num_reused=request.num_reused,
        params=request.params,
        stop_hit=None if hit is None else hit.stop,
        queue_seconds=times.since_queued("started"),
        first_token_seconds=times.since_queued("first_token"),
        seconds=times.since_queued("ended") or 0.0,
    )
