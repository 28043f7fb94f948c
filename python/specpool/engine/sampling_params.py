"""`SamplingParams`: options for choosing a request's tokens and for ending its text."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

from specpool.checks import check_fields, check_int, check_number, check_salt, shown
from specpool.engine.text.stop_search import check_stop
from specpool.engine.text.stream import TextStream
from specpool.engine.text.structured.grammar import Grammar
from specpool.errors import ConfigError
from specpool.fields import Option, Within, check_values

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: The least `repetition_penalty`. With a much smaller one, logits of float32 would be infinite.
LEAST_PENALTY = 0.01
#: The most tokens of one `logit_bias`.
MAX_BIASES = 1024
#: The truncations of what a drawn token is drawn from, each with the value that drops no token.
#: They do nothing at temperature 0.
TRUNCATIONS: Mapping[str, float] = MappingProxyType({"top_k": 0, "top_p": 1.0, "min_p": 0.0})
#: Fields whose None means "as the target's generation_config says", each with the value that
#: changes nothing. `SamplingParams.filled` takes that value if the file does not say one;
#: `engine/models/generation_defaults.py` reads these keys of the file; `specpool.transformers`
#: gives every one of these fields, because transformers has read the file already.
NEUTRAL: Mapping[str, Any] = MappingProxyType(
    {
        **TRUNCATIONS,
        "repetition_penalty": 1.0,
        "no_repeat_ngram_size": 0,
        "min_new_tokens": 0,
        "bad_words_ids": (),
        "suppress_tokens": (),
        "begin_suppress_tokens": (),
    }
)


def check_bias(bias: object) -> None:
    """Raise `ConfigError` unless `bias` maps at most `MAX_BIASES` token ids to [-100, 100]."""
    if not isinstance(bias, Mapping):
        raise ConfigError(f"logit_bias must map token ids to numbers, got {shown(bias)}")
    if len(bias) > MAX_BIASES:
        raise ConfigError(f"logit_bias must have at most {MAX_BIASES} tokens, got {len(bias)}")
    for token, value in bias.items():
        check_int("a token id in logit_bias", token, 0, (1 << 31) - 1)
        check_number(f"logit_bias of token {token}", value, -100, 100)


def _neutral_truncations() -> str:
    """Return how no truncation is asked for: `top_k and min_p at 0 and top_p at 1`."""
    names_by_value: dict[float, list[str]] = {}
    for name, value in TRUNCATIONS.items():
        names_by_value.setdefault(value, []).append(name)
    return " and ".join(
        f"{' and '.join(names)} at {value:g}" for value, names in names_by_value.items()
    )


def _read_biases(name: str, texts: Sequence[str]) -> dict[int, float]:
    """Return the biases that texts such as `257:-5` name."""
    biases: dict[int, float] = {}
    for text in texts:
        token_text, _, value_text = text.partition(":")
        try:
            token, value = int(token_text), float(value_text)
        except ValueError:
            raise ConfigError(
                f"{name} must be TOKEN:VALUE, such as 257:-5, got {shown(text)}"
            ) from None
        if token in biases:
            raise ConfigError(
                f"{name} of token {token} is given twice: {biases[token]:g} and {value:g}"
            )
        biases[token] = value
    return biases


def _ids(name: str, value: object) -> tuple[int, ...]:
    """Return token ids as a tuple; raise `ConfigError` if `value` is something else."""
    if not isinstance(value, tuple | list):
        raise ConfigError(f"{name} must be a tuple of ids, got {shown(value)}")
    for token in value:
        check_int(name, token, 0, (1 << 31) - 1)
    return tuple(value)


def _words(value: object) -> tuple[tuple[int, ...], ...]:
    """Return sequences of token ids as tuples; raise `ConfigError` if `value` is something else."""
    if not isinstance(value, tuple | list):
        raise ConfigError(f"bad_words_ids must be a tuple of sequences of ids, got {shown(value)}")
    words = tuple(_ids("bad_words_ids", word) for word in value)
    if () in words:
        raise ConfigError("bad_words_ids has a sequence without tokens")
    return words


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The sampling and stop options of one request.

    A field that is None takes the value of the target's generation_config.json. If the file does
    not have it either, the field changes nothing. The first sentence of a field's description is
    also the help of its option.

    Attributes:
        temperature: 0 = greedy.
        max_new_tokens: most tokens of each text.
        top_k: keep this many of the most likely tokens; 0 = all. Needs a temperature above 0.
        top_p: keep the likeliest tokens with this mass; 1 = all. They are the smallest set with at
            least the mass. Needs a temperature above 0.
        min_p: drop tokens less likely than this share of the likeliest; 0 = none. It comes after
            top_k and top_p. Needs a temperature above 0.
        repetition_penalty: above 1 = tokens of prompt and output become less likely. Logits above 0
            are divided by it, others multiplied; 1 = none; in [0.01, 10]. As in transformers.
        presence_penalty: taken from the logit of each token of the output; -2 to 2. The prompt does
            not count. As OpenAI defines it.
        frequency_penalty: taken for each time that the output has the token; -2 to 2.
        logit_bias: what is added to the logits of tokens, -100 to 100. It maps token ids to
            numbers.
        structured: the form that the whole output has; None = any. The output ends when the form
            is complete.
        seed: seed of the sampled text. A drawn token depends only on its distribution, the seed and
            its position. None = a fresh seed, reported in the output.
        n: samples of each prompt; seeds count up. Each has its own output; sample i has seed + i.
        stop: a text ends before these strings. They also match across token borders. No part of a
            stop string is ever output. A stop string may hold the name of a special token, such as
            `<|im_end|>`. One string alone need not be in a list.
        drafter: which of several drafters drafts. It is a name of those that the engine has; None =
            its first.
        logprobs: log probabilities of each token and of this many likeliest ones. They are from the
            target's logits before bias, penalties, form, temperature and truncation. None = none.
        ignore_eos: go on after an end-of-sequence token.
        stop_token_ids: tokens that end the request, beside the model's own.
        no_repeat_ngram_size: n = no n tokens in a row occur twice in prompt and output; 0 = they
            may. This field and the next four are as in transformers. Each makes a round wait for
            the tokens of the last one.
        min_new_tokens: the output has at least so many tokens before one that ends it.
        bad_words_ids: sequences of tokens that the output must not have.
        suppress_tokens: tokens that the output must not have.
        begin_suppress_tokens: tokens that the output must not begin with.
        skip_special_tokens: leave special tokens out of the text.
        max_draft_steps: the most drafting steps of a round; 0 = plain decoding; None = no limit
            beyond the engine's shape or its controller. A shape that the request names must not
            have more steps.
        tpot_ms: the target of the request's milliseconds per token after the first, above 0; None =
            it has none. It needs `adaptive="budget"`. A target that cannot be met is missed: the
            request then drafts for throughput, and `EngineStats.adaptive` counts it.
        priority: the greater comes first for rows and is retracted last. With a budget a token of
            it counts twice as much as one of the priority below. None = that of the call.
        cache_salt: requests share cached KV only with requests of the same salt, for example of the
            same tenant; at most 256 bytes.
    """

    temperature: Annotated[float, Within(0, 1e4), Option()] = 0.0
    max_new_tokens: Annotated[int, Within(1, 1 << 30), Option(names=["--max-new-tokens", "-n"])] = (
        128
    )
    top_k: Annotated[int | None, Within(0, (1 << 31) - 1), Option("Sampling")] = None
    top_p: Annotated[float | None, Within(0, 1), Option("Sampling")] = None
    min_p: Annotated[float | None, Within(0, 1), Option("Sampling")] = None
    repetition_penalty: Annotated[float | None, Within(LEAST_PENALTY, 10), Option("Sampling")] = (
        None
    )
    presence_penalty: Annotated[float, Within(-2, 2), Option("Sampling")] = 0.0
    frequency_penalty: Annotated[float, Within(-2, 2), Option("Sampling")] = 0.0
    logit_bias: Annotated[
        Mapping[int, float],
        Option("Sampling", kind=list[str], read=_read_biases, form=", as TOKEN:VALUE"),
    ] = field(default_factory=dict, hash=False)
    structured: Grammar | None = None
    seed: Annotated[int | None, Within(0, (1 << 64) - 1), Option("Sampling")] = None
    n: Annotated[int, Within(1, 1 << 16), Option("Sampling", names=["--samples"])] = 1
    stop: Annotated[Sequence[str], Option("Sampling", kind=list[str])] = ()
    drafter: Annotated[
        str | None, Option("Drafts", form=", one of --draft", default="the first")
    ] = None
    logprobs: Annotated[int | None, Within(0, 1 << 20), Option("Sampling")] = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    no_repeat_ngram_size: Annotated[int | None, Within(0, 1 << 20)] = None
    min_new_tokens: Annotated[int | None, Within(0, 1 << 30)] = None
    bad_words_ids: Sequence[Sequence[int]] | None = None
    suppress_tokens: Sequence[int] | None = None
    begin_suppress_tokens: Sequence[int] | None = None
    skip_special_tokens: bool = True
    max_draft_steps: Annotated[int | None, Within(0, (1 << 31) - 1)] = None
    tpot_ms: Annotated[float | None, Within(1e-3, 1e9)] = None
    priority: Annotated[int | None, Within(-(1 << 31), (1 << 31) - 1)] = None
    cache_salt: str = ""

    def __new__(cls, **fields: object) -> "SamplingParams":
        """Raise `ConfigError` for unknown field names; `__init__` would raise a TypeError."""
        check_fields(cls, fields)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        check_values(self)
        if self.top_p == 0:
            raise ConfigError("top_p must be above 0, got 0")
        check_bias(self.logit_bias)
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        for name in ("stop_token_ids", "suppress_tokens", "begin_suppress_tokens"):
            ids = getattr(self, name)
            if ids is not None or name == "stop_token_ids":
                object.__setattr__(self, name, _ids(name, ids))
        if self.bad_words_ids is not None:
            object.__setattr__(self, "bad_words_ids", _words(self.bad_words_ids))
        if (self.min_new_tokens or 0) > self.max_new_tokens:
            raise ConfigError(
                f"min_new_tokens {self.min_new_tokens} is above max_new_tokens "
                f"{self.max_new_tokens}"
            )
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        check_stop(stop)
        object.__setattr__(self, "stop", tuple(stop))
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
        if self.temperature:
            return
        for name, neutral in TRUNCATIONS.items():
            value = getattr(self, name)
            is_set = value is not None and value != neutral
            if is_set and (name, value) != ("top_k", 1):
                raise ConfigError(
                    f"{name} {value} does nothing at temperature 0, which takes the likeliest "
                    f"token: give a temperature above 0, or leave {_neutral_truncations()}"
                )

    def stop_ids(self, eos_token_ids: frozenset[int]) -> frozenset[int]:
        """Return the tokens that end the output, if `eos_token_ids` are the target's own."""
        eos = frozenset[int]() if self.ignore_eos else eos_token_ids
        return eos | frozenset(self.stop_token_ids)

    def text_stream(
        self,
        tokenizer: "PreTrainedTokenizerBase | None",
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

    def filled(self, defaults: Mapping[str, Any] = NEUTRAL) -> "SamplingParams":
        """Return these parameters without None in the fields of `NEUTRAL`.

        Args:
            defaults: values by field; a field that is not among them changes nothing.
        """
        missing = [name for name in NEUTRAL if getattr(self, name) is None]
        if not missing:
            return self
        if not self.temperature:  # as in transformers, they are for drawn text
            defaults = {k: v for k, v in defaults.items() if k not in TRUNCATIONS}
        values = {name: defaults.get(name, NEUTRAL[name]) for name in missing}
        if "min_new_tokens" in values:  # a file's may be above a request's `max_new_tokens`
            values["min_new_tokens"] = min(values["min_new_tokens"], self.max_new_tokens)
        return replace(self, **values)

    @property
    def penalizes(self) -> bool:
        """Whether a token's logit depends on the tokens before it."""
        repeats = self.repetition_penalty not in (None, 1)
        return bool(repeats or self.presence_penalty or self.frequency_penalty)

    @property
    def bans(self) -> bool:
        """Whether some tokens may not follow some texts."""
        return bool(
            self.no_repeat_ngram_size
            or self.min_new_tokens
            or self.bad_words_ids
            or self.suppress_tokens
            or self.begin_suppress_tokens
        )

    @property
    def changes_logits(self) -> bool:
        """Whether the target's logits are changed before a token is chosen.

        `engine/worker/processors.py` processes no other request, so a field that acts there must
        count here. A round with such a request runs without CUDA graphs
        (`engine/worker/graphs/graphs.py`).
        """
        return bool(self.penalizes or self.bans or self.logit_bias or self.structured is not None)
