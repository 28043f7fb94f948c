"""A request on its way through the engine, and what the user gets back."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from specpool._core import Shape
from specpool.config import SamplingParams


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probabilities at one position, from the target's logits before any truncation."""

    token_id: int
    logprob: float
    top: dict[int, float]  # the most likely tokens, most likely first

    def first(self, num_top: int) -> TokenLogprob:
        """The same with the `num_top` most likely tokens only."""
        return TokenLogprob(self.token_id, self.logprob, dict(list(self.top.items())[:num_top]))


@dataclass(slots=True, eq=False)
class Request:
    """One prompt and its output so far; two requests are never the same one.

    `tokens` are the prompt and the output; while it runs, the last one is the root: the only token
    without KV.
    """

    request_id: int
    index: int  # of its prompt in the call
    prompt_len: int
    tokens: list[int]
    params: SamplingParams
    shape: Shape
    max_len: int  # tokens at most, the prompt included
    stop_ids: frozenset[int]
    seed: int
    row: int = 0  # 0 = none
    prefilled_len: int = 0  # positions with KV, until the prompt is done
    finish_reason: str | None = None  # "stop", "length", "error", "abort"
    error: str | None = None
    tainted: bool = False  # saw logits that are not finite: its KV may be NaN
    accept_lens: list[int] = field(default_factory=list)  # one per verify
    from_draft: list[bool] = field(default_factory=list)  # per output token
    logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def is_prefilled(self) -> bool:
        """Whether the prompt's KV is complete and a root token is known."""
        return self.prefilled_len >= self.prompt_len

    @property
    def num_output_tokens(self) -> int:
        """How many tokens it has generated."""
        return len(self.tokens) - self.prompt_len

    @property
    def output_ids(self) -> list[int]:
        """The generated tokens."""
        return self.tokens[self.prompt_len :]

    def append(self, tokens: list[int], logprobs: list[TokenLogprob] | None = None) -> None:
        """Take over the tokens of one forward, the last of them not a draft.

        Stops at the first token that ends the request; what a verify accepted beyond it is dropped.
        A token of -1 stands for logits that are not finite.
        """
        for taken, token in enumerate(tokens):
            if token < 0:
                self.finish_reason = "error"
                self.error = f"the logits at position {len(self.tokens) - 1} are not finite"
                return
            self.tokens.append(token)
            self.from_draft.append(taken < len(tokens) - 1)
            if logprobs is not None:
                self.logprobs.append(logprobs[taken])
            if token in self.stop_ids:
                self.finish_reason = "stop"
            elif len(self.tokens) >= self.max_len:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                return


def fresh_seed() -> int:
    """A seed for a request that names none."""
    return secrets.randbits(64)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What `Engine.generate` returns per prompt.

    Attributes:
        index: which prompt of the call.
        prompt_ids: the prompt's tokens.
        token_ids: the generated tokens; an end-of-sequence token is the last of them.
        text: the decoded output without special tokens; "" without a tokenizer.
        finish_reason: `stop`, `length`, `error` or `abort`.
        error: what went wrong with finish_reason `error`.
        seed: the seed that reproduces a sampled text.
        accept_lens: the accept length of each, bonus included.
        from_draft: whether each generated token is an accepted draft.
        logprobs: one entry per generated token, if asked for.
    """

    index: int
    prompt_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    error: str | None
    seed: int
    accept_lens: list[int]
    from_draft: list[bool]
    logprobs: list[TokenLogprob] | None

    @property
    def verify_ct(self) -> int:
        """Verify rounds of the request."""
        return len(self.accept_lens)

    @property
    def accept_len(self) -> float:
        """Mean tokens per verify round, the bonus included; 0 without rounds."""
        return sum(self.accept_lens) / len(self.accept_lens) if self.accept_lens else 0.0
