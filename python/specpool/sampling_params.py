"""`SamplingParams`: options for choosing a request's tokens and for ending its text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specpool.checks import check_fields, check_int, check_salt
from specpool.errors import ConfigError

#: The most stop strings of one request.
MAX_STOP_STRINGS = 64


def check_stop(stop: object) -> None:
    """Raise `ConfigError` unless `stop` is a tuple of at most `MAX_STOP_STRINGS` valid strings."""
    if not isinstance(stop, tuple | list):
        raise ConfigError(f"stop must be a tuple of strings, got {stop!r:.80}")
    if len(stop) > MAX_STOP_STRINGS:
        raise ConfigError(
            f"stop must be at most {MAX_STOP_STRINGS} strings, got {len(stop)}: {stop!r:.80}"
        )
    for string in stop:
        if not isinstance(string, str) or not string:
            raise ConfigError(f"stop must hold strings that are not empty, got {string!r:.80}")
        try:
            string.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"stop must hold valid text, got a lone surrogate at position {error.start} of "
                f"{string!r:.80}"
            ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The sampling and stop options of one request.

    Attributes:
        max_new_tokens: the most tokens to generate.
        temperature: 0 = greedy.
        top_k: keep this many of the most likely tokens; 0 = all. Needs a temperature above 0.
        top_p: keep the smallest set of most likely tokens with at least this mass; 1 = all. Needs a
            temperature above 0.
        seed: a drawn token depends only on its distribution, the seed and its position; None = a
            fresh seed, reported in the output.
        n: number of samples of the prompt, each with its own output; sample i has seed + i.
        logprobs: None = none; n = the log probabilities of the chosen token and of the n most
            likely tokens, from the target's logits before temperature and truncation.
        ignore_eos: go on after an end-of-sequence token.
        stop_token_ids: tokens that end the request, beside the model's own.
        stop: a string or strings that end the request, also across token borders. The text ends
            before the first stop string; no part of the stop string is ever output.
        max_draft_steps: the most drafting steps of a round; 0 = plain decoding; None = no limit
            beyond the engine's shape or its controller. A shape that the request names must not
            have more steps.
        cache_salt: requests share cached KV only with requests of the same salt, for example of the
            same tenant; at most 256 bytes.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop: Sequence[str] = ()
    max_draft_steps: int | None = None
    cache_salt: str = ""

    def __new__(cls, **fields: object) -> SamplingParams:
        """Raise `ConfigError` for unknown field names; `__init__` would raise a TypeError."""
        check_fields(cls, fields)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        check_int("max_new_tokens", self.max_new_tokens, 1, 1 << 30)
        check_int("n", self.n, 1, 1 << 16)
        check_int("top_k", self.top_k, 0, (1 << 31) - 1)
        for name, value, most in (
            ("temperature", self.temperature, 1e4),
            ("top_p", self.top_p, 1.0),
        ):
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0 <= value <= most:  # NaN fails both comparisons
                raise ConfigError(f"{name} must be a number in [0, {most:g}], got {value!r}")
        if self.top_p == 0:
            raise ConfigError("top_p must be above 0, got 0")
        if self.seed is not None:
            check_int("seed", self.seed, 0, (1 << 64) - 1)
        if self.logprobs is not None:
            check_int("logprobs", self.logprobs, 0, 1 << 20)
        if not isinstance(self.stop_token_ids, tuple | list):
            raise ConfigError(f"stop_token_ids must be a tuple of ids, got {self.stop_token_ids!r}")
        for token in self.stop_token_ids:
            check_int("stop_token_ids", token, 0, (1 << 31) - 1)
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else self.stop)
        check_stop(self.stop)
        if self.max_draft_steps is not None:
            check_int("max_draft_steps", self.max_draft_steps, 0, (1 << 31) - 1)
        check_salt(self.cache_salt)
        if self.temperature == 0 and (self.top_k > 1 or self.top_p < 1):
            name, value = ("top_k", self.top_k) if self.top_k > 1 else ("top_p", self.top_p)
            raise ConfigError(
                f"{name} {value} does nothing at temperature 0, which takes the likeliest token: "
                "give a temperature above 0, or leave top_k at 0 and top_p at 1"
            )
