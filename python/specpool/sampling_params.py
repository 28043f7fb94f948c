"""`SamplingParams`: options for choosing a request's tokens and for ending its text."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specpool.checks import check_bool, check_fields, check_int, check_salt, shown
from specpool.errors import ConfigError
from specpool.text.stop_search import check_stop
from specpool.text.stream import TextStream
from specpool.text.structured.grammar import Grammar

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: The least `repetition_penalty`. With a much smaller one, logits of float32 would be infinite.
LEAST_PENALTY = 0.01
#: The most tokens of one `logit_bias`.
MAX_BIASES = 1024


def check_number(name: str, value: object, least: float, most: float) -> None:
    """Raise `ConfigError` unless `value` is an int or float in `[least, most]`."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not least <= value <= most:  # type: ignore[operator]  # NaN fails
        raise ConfigError(f"{name} must be a number in [{least:g}, {most:g}], got {shown(value)}")


def check_bias(bias: object) -> None:
    """Raise `ConfigError` unless `bias` maps at most `MAX_BIASES` token ids to [-100, 100]."""
    if not isinstance(bias, Mapping):
        raise ConfigError(f"logit_bias must map token ids to numbers, got {shown(bias)}")
    if len(bias) > MAX_BIASES:
        raise ConfigError(f"logit_bias must have at most {MAX_BIASES} tokens, got {len(bias)}")
    for token, value in bias.items():
        check_int("a token id in logit_bias", token, 0, (1 << 31) - 1)
        check_number(f"logit_bias of token {token}", value, -100, 100)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The sampling and stop options of one request.

    Attributes:
        max_new_tokens: the most tokens to generate.
        temperature: 0 = greedy.
        top_k: keep this many of the most likely tokens; 0 = all. Needs a temperature above 0.
        top_p: keep the smallest set of most likely tokens with at least this mass; 1 = all. Needs a
            temperature above 0.
        min_p: drop the tokens that are less likely than this share of the likeliest, after top_k
            and top_p; 0 = none. Needs a temperature above 0.
        repetition_penalty: above 1 = make the tokens of the prompt and the output less likely:
            logits above 0 are divided by it, others multiplied; 1 = none; in [0.01, 10]. As in
            transformers.
        presence_penalty: subtract this from the logit of each token of the output; in [-2, 2].
            The prompt does not count. As OpenAI defines it.
        frequency_penalty: subtract this for each time that the output has the token; in [-2, 2].
        logit_bias: token id -> what is added to its logit, in [-100, 100].
        structured: the form that the whole output has; None = any. The output ends when the form
            is complete.
        seed: a drawn token depends only on its distribution, the seed and its position; None = a
            fresh seed, reported in the output.
        n: number of samples of the prompt, each with its own output; sample i has seed + i.
        logprobs: None = none; n = the log probabilities of the chosen token and of the n most
            likely tokens, from the target's logits before bias, penalties, form, temperature and
            truncation.
        ignore_eos: go on after an end-of-sequence token.
        stop_token_ids: tokens that end the request, beside the model's own.
        stop: a string or strings that end the request, also across token borders. The text ends
            before the first stop string; no part of the stop string is ever output. A stop string
            may hold the name of a special token, such as `<|im_end|>`.
        skip_special_tokens: leave special tokens out of the text.
        max_draft_steps: the most drafting steps of a round; 0 = plain decoding; None = no limit
            beyond the engine's shape or its controller. A shape that the request names must not
            have more steps.
        tpot_ms: the target of the request's milliseconds per token after the first, above 0; None =
            it has none. It needs `adaptive="budget"`. A target that cannot be met is missed: the
            request then drafts for throughput, and `EngineStats.adaptive` counts it.
        priority: the greater comes first for rows and is retracted last. With a budget a token of
            it counts twice as much as one of the priority below. None = that of the call.
        drafter: the name of the drafter, of those that the engine has; None = its first.
        cache_salt: requests share cached KV only with requests of the same salt, for example of the
            same tenant; at most 256 bytes.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    structured: Grammar | None = None
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop: Sequence[str] = ()
    skip_special_tokens: bool = True
    max_draft_steps: int | None = None
    tpot_ms: float | None = None
    priority: int | None = None
    drafter: str | None = None
    cache_salt: str = ""

    def __new__(cls, **fields: object) -> SamplingParams:
        """Raise `ConfigError` for unknown field names; `__init__` would raise a TypeError."""
        check_fields(cls, fields)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        check_int("max_new_tokens", self.max_new_tokens, 1, 1 << 30)
        check_int("n", self.n, 1, 1 << 16)
        check_int("top_k", self.top_k, 0, (1 << 31) - 1)
        check_number("temperature", self.temperature, 0, 1e4)
        check_number("top_p", self.top_p, 0, 1)
        check_number("min_p", self.min_p, 0, 1)
        check_number("repetition_penalty", self.repetition_penalty, LEAST_PENALTY, 10)
        check_number("presence_penalty", self.presence_penalty, -2, 2)
        check_number("frequency_penalty", self.frequency_penalty, -2, 2)
        if self.top_p == 0:
            raise ConfigError("top_p must be above 0, got 0")
        check_bias(self.logit_bias)
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        if self.seed is not None:
            check_int("seed", self.seed, 0, (1 << 64) - 1)
        if self.logprobs is not None:
            check_int("logprobs", self.logprobs, 0, 1 << 20)
        check_bool("ignore_eos", self.ignore_eos)
        if not isinstance(self.stop_token_ids, tuple | list):
            raise ConfigError(
                f"stop_token_ids must be a tuple of ids, got {shown(self.stop_token_ids)}"
            )
        for token in self.stop_token_ids:
            check_int("stop_token_ids", token, 0, (1 << 31) - 1)
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else self.stop)
        check_stop(self.stop)
        check_bool("skip_special_tokens", self.skip_special_tokens)
        if self.max_draft_steps is not None:
            check_int("max_draft_steps", self.max_draft_steps, 0, (1 << 31) - 1)
        if self.tpot_ms is not None:
            check_number("tpot_ms", self.tpot_ms, 1e-3, 1e9)
        if self.priority is not None:
            check_int("priority", self.priority, -(1 << 31), (1 << 31) - 1)
        if self.drafter is not None and not (isinstance(self.drafter, str) and self.drafter):
            raise ConfigError(f"drafter must be a name or None, got {shown(self.drafter)}")
        check_salt(self.cache_salt)
        if self.structured is not None and not isinstance(self.structured, Grammar):
            raise ConfigError(
                f"structured must be a specpool.Grammar or None, got {shown(self.structured)}"
            )
        if self.structured is not None and self.ignore_eos:
            raise ConfigError(
                "ignore_eos does not go with structured: the end of the text is part of its form"
            )
        self._check_truncation()

    def _check_truncation(self) -> None:
        """Raise `ConfigError` for truncations that have no effect on a greedy choice."""
        cuts = ("top_k", self.top_k, self.top_k > 1), ("top_p", self.top_p, self.top_p < 1)
        for name, value, is_set in (*cuts, ("min_p", self.min_p, self.min_p > 0)):
            if self.temperature == 0 and is_set:
                raise ConfigError(
                    f"{name} {value} does nothing at temperature 0, which takes the likeliest "
                    "token: give a temperature above 0, or leave top_k and min_p at 0 and top_p at "
                    "1"
                )

    def text_stream(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        stop_ids: Collection[int],
        *,
        notes_special: bool = False,
    ) -> TextStream:
        """Return a decoder of the output's tokens.

        Args:
            tokenizer: the target's; None = every text is empty.
            stop_ids: tokens that end the output; they have no text.
            notes_special: see `TextStream`.

        Raises:
            ConfigError: there are stop strings without a tokenizer.
        """
        return TextStream(
            tokenizer,
            self.stop,
            hidden=stop_ids,
            shows_special=not self.skip_special_tokens,
            notes_special=notes_special,
        )

    @property
    def penalizes(self) -> bool:
        """Whether a token's logit depends on the tokens before it."""
        return bool(self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty)

    @property
    def changes_logits(self) -> bool:
        """Whether the target's logits are changed before a token is chosen."""
        return bool(self.penalizes or self.logit_bias or self.structured is not None)
