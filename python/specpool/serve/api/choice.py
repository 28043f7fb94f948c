"""`AnswerChoice`: one text of an answer, as it grows."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from specpool.engine.sampling_params import SamplingParams
from specpool.engine.scheduler.request import TokenLogprob
from specpool.serve.api.logprobs import TokenLog
from specpool.serve.bridge.messages import Done, Tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(slots=True)
class Delta:
    """The new part of a choice."""

    text: str = ""
    # Special tokens: where each stands in the text, and its own text, if they are asked for.
    specials: list[tuple[int, str]] = field(default_factory=list)
    pieces: list[tuple[str, bool]] = field(default_factory=list)  # the text, by accepted draft
    entries: list[TokenLogprob] = field(default_factory=list)
    num_tokens: int = 0
    finish_reason: str | None = None


class AnswerChoice:
    """One text of an answer: it decodes the engine's tokens.

    Attributes:
        index: its place in the answer.
        done: the engine's last message about it; None while it runs.
        message: at its end, the text as a chat message with its calls; None if it has none.
        num_tokens: new tokens so far.
        text_len: characters so far.
    """

    def __init__(
        self,
        index: int,
        tokenizer: PreTrainedTokenizerBase,
        params: SamplingParams,
        eos_token_ids: frozenset[int],
        *,
        notes_special: bool = False,
    ) -> None:
        """Start an empty text; if `notes_special`, its special tokens are told beside it."""
        self.index = index
        self.done: Done | None = None
        self.message: dict[str, Any] | None = None
        self.num_tokens = self.text_len = 0
        stop_ids = params.stop_ids(eos_token_ids)
        self._text = params.text_stream(tokenizer, stop_ids, notes_special=notes_special)
        self._tokenizer = tokenizer

    @cached_property
    def log(self) -> TokenLog:
        """The writer of the text's log probabilities."""
        return TokenLog(self._tokenizer, self._text.shows)

    def take(self, news: list[Tokens | Done]) -> Delta:
        """Decode what came; several pieces of news become one delta."""
        delta = Delta()
        for item in news:
            if isinstance(item, Done):
                self.done = item
                delta.pieces.append((self._text.push([], last=True), False))
                delta.finish_reason = item.finish_reason
                self.num_tokens = len(item.token_ids)
                continue
            delta.num_tokens += len(item.ids)
            delta.entries += item.logprobs or ()
            new = zip(item.ids, item.from_draft, strict=True)
            for from_draft, run in itertools.groupby(new, key=itemgetter(1)):
                delta.pieces.append((self._text.push([token for token, _ in run]), from_draft))
            self.num_tokens += len(item.ids)
        delta.pieces = [piece for piece in delta.pieces if piece[0]]
        delta.text = "".join(text for text, _ in delta.pieces)
        start, self.text_len = self.text_len, self.text_len + len(delta.text)
        specials = self._text.specials
        while specials and specials[0][0] <= self.text_len:
            position, text = specials.pop(0)
            delta.specials.append((position - start, text))
        return delta
