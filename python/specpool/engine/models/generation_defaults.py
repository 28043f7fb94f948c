"""`GenerationDefaults`: what a target's generation_config.json says of texts.

transformers keeps the file's keys as attributes of `model.generation_config`. Each key that its
`generate` acts on is taken for requests that do not give it, changes no text here, or is named in
the log with its value. A key of a newer transformers that is not decided here is named too.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specpool.checks import check_int, check_number, shown
from specpool.engine.sampling_params import NEUTRAL, SamplingParams
from specpool.errors import ConfigError

_log = logging.getLogger("specpool")

#: Keys that a request takes, if it does not give them: the fields of `SamplingParams` in `NEUTRAL`,
#: a least length of prompt and output, whether and how hot the server draws, and where texts end.
TAKEN = frozenset(NEUTRAL) | {"min_length", "do_sample", "temperature", "eos_token_id"}
#: Keys that change no text here, by the reason.
NO_EFFECT: Mapping[str, str] = {
    "beam search alone reads it": "early_stopping length_penalty diversity_penalty",
    "the engine has a KV cache of its own": (
        "use_cache cache_implementation cache_config max_cache_len prefill_chunk_size low_memory "
        "continuous_batching_config"
    ),
    "it changes the speed of transformers' loop alone": "compile_config disable_compile",
    "the engine's drafters draft, and drafts change no text": (
        "use_mtp is_assistant num_assistant_tokens num_assistant_tokens_schedule "
        "assistant_confidence_threshold prompt_lookup_num_tokens max_matching_ngram_size "
        "assistant_early_exit assistant_lookbehind target_lookbehind speculation_type"
    ),
    "it is about the form of what `generate` returns": (
        "output_attentions output_hidden_states output_scores output_logits return_dict_in_generate"
    ),
    "the softmax of normalized logits is the same": "renormalize_logits",
    "nothing is padded, and a prompt begins as the tokenizer says": "pad_token_id bos_token_id",
    "a decoder's text begins with its prompt": "decoder_start_token_id",
    "it is about the file": "transformers_version _from_model_config",
}
#: Keys that are not taken, each with the values that change nothing. Others are named in the log.
NOT_TAKEN: Mapping[str, tuple[Any, ...]] = {
    "max_length": (),
    "max_new_tokens": (),
    "max_time": (),
    "stop_strings": (),
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "num_return_sequences": (1,),
    "top_h": (),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "encoder_repetition_penalty": (1,),
    "encoder_no_repeat_ngram_size": (0,),
    "exponential_decay_length_penalty": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "sequence_bias": ({},),
    "guidance_scale": (1,),
    "watermarking_config": (),
    "token_healing": (False,),
    "remove_invalid_values": (False,),
    "assistant_ensemble_weight": (),
    "penalty_alpha": (0,),
    "dola_layers": (),
    "constraints": (),
    "force_words_ids": (),
}
_NO_EFFECT = frozenset(" ".join(NO_EFFECT.values()).split())


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """The values of a generation_config that requests take, and those that they do not.

    Attributes:
        values: fields of `SamplingParams`.
        min_length: the least tokens of prompt and output; `min_new_tokens` comes before it.
        do_sample: whether `generate` draws; None if not said.
        temperature: of drawn text; None if not said.
        not_taken: keys with values that would change texts, and that no request takes.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    min_length: int = 0
    do_sample: bool | None = None
    temperature: float | None = None
    not_taken: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_config(cls, config: Any, vocab_size: int) -> GenerationDefaults:
        """Read a model's `generation_config`; None if it has none.

        Tokens that the vocabulary does not have are left out: no text has them.

        Raises:
            ConfigError: a value that requests would take is of a wrong type or out of its range.
        """
        if config is None:
            return cls()
        neutral = vars(type(config)())  # before transformers 5 not all of it is None
        settings = {
            key: value
            for key, value in vars(config).items()
            if key in neutral and value is not None and value != neutral[key]
        }
        values = {
            key: _within(value, vocab_size) for key, value in settings.items() if key in NEUTRAL
        }
        do_sample, temperature = settings.get("do_sample"), settings.get("temperature")
        min_length = settings.get("min_length", 0)
        try:
            # Any temperature and length with which all the fields may be given.
            SamplingParams(temperature=1.0, max_new_tokens=1 << 30, **values)
            check_int("min_length", min_length, 0, (1 << 31) - 1)
            if temperature is not None:
                check_number("temperature", temperature, 0, 1e4)
            if do_sample is not None and not isinstance(do_sample, bool):
                raise ConfigError(f"do_sample must be true or false, got {shown(do_sample)}")
        except ConfigError as error:
            raise ConfigError(f"the target's generation_config: {error}") from None
        not_taken = {
            key: value
            for key, value in settings.items()
            if key not in TAKEN | _NO_EFFECT and value not in NOT_TAKEN.get(key, ())
        }
        return cls(values, min_length, do_sample, temperature, not_taken)

    @property
    def server_temperature(self) -> float:
        """The temperature of a server's request that gives none; 1 as OpenAI's, if not said."""
        if self.do_sample is False:
            return 0.0
        return 1.0 if self.temperature is None else self.temperature

    def fill(self, params: SamplingParams, prompt_len: int) -> SamplingParams:
        """Return a request's parameters with the values that it does not give."""
        least = max(self.min_length - prompt_len, 0)
        return params.filled({"min_new_tokens": least, **self.values})

    def log(self, *, draws: bool) -> None:
        """Log once what is taken, and what is not; `draws`: requests draw by default."""
        taken = dict(self.values)
        not_taken = dict(self.not_taken)
        if self.min_length:
            taken["min_length"] = self.min_length
        if draws:
            taken["temperature"] = self.server_temperature
        elif self.do_sample:
            temperature = 1.0 if self.temperature is None else self.temperature
            not_taken |= {"do_sample": True, "temperature": temperature}
        if taken:
            _log.info("generation_config: taken where a request does not say: %s", _listed(taken))
        if not_taken:
            _log.warning(
                "generation_config: not taken, a request has to say what it wants: %s",
                _listed(not_taken),
            )


def _within(value: Any, vocab_size: int) -> Any:
    """Return a value without the token ids, and the sequences, that the vocabulary has not."""
    if not isinstance(value, list | tuple):
        return value

    def fits(item: Any) -> bool:
        if isinstance(item, list | tuple):
            return all(map(fits, item))
        return type(item) is not int or 0 <= item < vocab_size

    return tuple(item for item in value if fits(item))


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {shown(value)}" for key, value in sorted(values.items()))
