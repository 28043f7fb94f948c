"""`Chunk` and `RequestOutput`: what a request gives while it runs, and when it is done."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING

from specpool.engine.sampling_params import SamplingParams
from specpool.engine.scheduler.request import Request, TokenLogprob
from specpool.engine.text.stream import TextStream
from specpool.errors import is_fault

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Chunk:
    """The new part of one prompt's output.

    Attributes:
        index: the prompt's index in the call.
        sample: the index among the prompt's samples.
        token_ids: the new tokens.
        pieces: the new text in runs, each with True if the run is accepted drafts. A character
            whose bytes are not complete yet waits for the next chunk.
        from_draft: for each new token, whether it is an accepted draft.
        logprobs: one entry per new token; None unless asked for.
    """

    index: int
    sample: int
    token_ids: list[int]
    pieces: list[tuple[str, bool]]
    from_draft: list[bool] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None

    @property
    def text(self) -> str:
        """The new text."""
        return "".join(text for text, _ in self.pieces)


class Report:
    """A reader of one request's news. Its cost grows with the news alone, not with the output."""

    def __init__(
        self, request: Request, tokenizer: PreTrainedTokenizerBase | None, *, decodes: bool = True
    ) -> None:
        """Decode with `tokenizer`; without one, or without `decodes`, texts are empty."""
        self._request = request
        self._tokenizer = tokenizer if decodes else None
        self._text = request.params.text_stream(tokenizer, request.stop_ids) if decodes else None
        self._num_reported = 0  # tokens of the output
        self._is_done = False
        self.error: str | None = None  # why the text cannot be decoded: the request has to end

    def news(self) -> Iterator[Chunk | RequestOutput]:
        """Yield what came since the last call: a chunk, and the output once the request is done."""
        request, start = self._request, self._num_reported
        done, num_tokens = request.finish_reason is not None, request.num_output_tokens
        if self._is_done or (num_tokens <= start and not done):
            return
        self._num_reported = max(start, num_tokens)
        ids = request.tokens[request.prompt_len + start :]
        flags = request.from_draft_since(start)
        pieces = self._pieces(ids, flags, done)
        if ids or pieces:
            entries = None
            if request.params.logprobs is not None:
                entries = request.logprobs[start : start + len(ids)]
            yield Chunk(request.index, request.sample, ids, pieces, flags, entries)
        # The consumer of the chunk may have raised, or called `news` itself meanwhile.
        if done and not self._is_done:
            yield output_of(request, self._tokenizer, self.error)
            self._is_done = True  # last: if Ctrl-C comes before, the output is reported again

    def _pieces(self, ids: list[int], flags: list[bool], done: bool) -> list[tuple[str, bool]]:
        """Return the new text in runs; none from where the tokenizer has failed on."""
        if self._text is None or self.error is not None:
            return []
        try:
            return self._decode(self._text, ids, flags, done)
        except BaseException as error:
            self.error = _undecoded(error)
            return []

    def _decode(
        self, text: TextStream, ids: list[int], flags: list[bool], done: bool
    ) -> list[tuple[str, bool]]:
        """Return the new text in runs, each with whether it is accepted drafts."""
        pieces = []
        for from_draft, run in itertools.groupby(zip(ids, flags, strict=True), key=itemgetter(1)):
            pieces.append((text.push([token for token, _ in run]), from_draft))
        if done:
            pieces.append((text.push([], last=True), False))
        return [piece for piece in pieces if piece[0]]


def _text_of(request: Request, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Decode the output of a request that is done, up to the first stop string."""
    params = request.params if tokenizer is not None else SamplingParams()
    return params.text_stream(tokenizer, request.stop_ids).push(request.output_ids, last=True)


def _undecoded(error: BaseException) -> str:
    """Return what an output says of an error of the tokenizer; raise one that is no fault."""
    if not is_fault(error):
        raise error
    return f"the tokenizer cannot decode the output: {type(error).__name__}: {error}"


def output_of(
    request: Request, tokenizer: PreTrainedTokenizerBase | None, undecoded: str | None = None
) -> RequestOutput:
    """Build the output of a request that is done; an error if its tokens cannot be decoded.

    `undecoded` says why a part of them could not; None if they could, as far as is known.
    """
    ids, times = request.output_ids, request.times
    finish_reason, error, text = request.finish_reason or "abort", request.error, ""
    try:
        text = _text_of(request, tokenizer)
    except BaseException as failure:
        undecoded = _undecoded(failure)
    if undecoded is not None and error is None:
        finish_reason, error = "error", undecoded
    hit = None if request.watch is None else request.watch.hit
    return RequestOutput(
        index=request.index,
        sample=request.sample,
        prompt_ids=request.tokens[: request.prompt_len],
        token_ids=ids,
        text=text,
        finish_reason=finish_reason,
        error=error,
        seed=request.seed,
        accept_lens=request.accept_lens,
        from_draft=request.from_draft,
        logprobs=request.logprobs if request.params.logprobs is not None else None,
        num_reused=request.num_reused,
        num_drafts=request.num_drafts,
        params=request.params,
        stop_hit=None if hit is None else hit.stop,
        queue_seconds=times.since_queued("started"),
        first_token_seconds=times.since_queued("first_token"),
        seconds=times.since_queued("ended") or 0.0,
    )


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The result of one sample of a prompt, as `Engine.generate` returns it.

    Attributes:
        index: the prompt's index in the call.
        sample: the index among the prompt's samples.
        prompt_ids: the prompt's tokens.
        token_ids: the generated tokens; an end-of-sequence token is the last of them.
        text: the decoded output without special tokens; "" without a tokenizer.
        finish_reason: `stop`, `length`, `error`, `abort`, or `moved` to another engine.
        error: what went wrong, if finish_reason is `error`; else None.
        seed: the seed that reproduces a sampled text.
        accept_lens: the accept length of each round, bonus included; 1 for a round without drafts.
            The last one counts tokens behind a stop too, which `token_ids` does not have.
        from_draft: for each generated token, whether it is an accepted draft.
        logprobs: one entry per generated token; None unless asked for.
        num_reused: prompt tokens that were not computed, because an earlier turn of the session or
            a pinned text had left their KV.
        num_drafts: tokens that were proposed to the target, right or wrong.
        params: the parameters of the call.
        stop_hit: the stop string that ended the text; None if none did.
        queue_seconds: seconds from arrival until the request got a row; None if it never did.
        first_token_seconds: seconds from arrival to the first token; None if there is none.
        seconds: seconds from arrival to the end.
    """

    index: int
    sample: int
    prompt_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    error: str | None
    seed: int
    accept_lens: list[int]
    from_draft: list[bool]
    logprobs: list[TokenLogprob] | None
    num_reused: int
    num_drafts: int
    params: SamplingParams
    stop_hit: str | None
    queue_seconds: float | None = field(compare=False)
    first_token_seconds: float | None = field(compare=False)
    seconds: float = field(compare=False)

    @property
    def verify_ct(self) -> int:
        """Number of verify rounds of the request."""
        return len(self.accept_lens)

    @property
    def accept_len(self) -> float:
        """Mean tokens per verify round, the bonus included; 0 without rounds."""
        return sum(self.accept_lens) / len(self.accept_lens) if self.accept_lens else 0.0
