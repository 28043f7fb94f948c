"""`generate`: a transformers model's own `generate`, run by specpool (docs/transformers.md).

`model.generate(..., custom_generate=specpool.transformers.generate)` is a decoding loop as
transformers knows them: it prepares the arguments, and this file runs them as an engine's requests.
What the engine cannot do as transformers would is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import (
    GenerationConfig,
    LogitNormalization,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    StoppingCriteriaList,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.stopping_criteria import EosTokenCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from specpool.engine.draft import Drafter
from specpool.engine.engine import Engine
from specpool.engine.sampling_params import NEUTRAL, SamplingParams
from specpool.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Requests that run at once, if `options` does not say.
MAX_BATCH = 64
#: The processors that the engine has, in the order in which it applies them.
_ORDER = [
    SequenceBiasLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    NoBadWordsLogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    SuppressTokensLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    MinPLogitsWarper,
    LogitNormalization,
]
#: The arguments of a model's forward that the engine makes by itself.
OWN_INPUTS = {
    "attention_mask",
    "position_ids",
    "cache_position",
    "use_cache",
    "logits_to_keep",
    "past_key_values",
    "cache",
}


def generate(
    model: PreTrainedModel,
    input_ids: torch.Tensor | None = None,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    generation_config: GenerationConfig | None = None,
    *,
    draft: str | PathLike[str] | Drafter | None = None,
    engine: Engine | None = None,
    options: Mapping[str, Any] | None = None,
    **model_kwargs: Any,
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """Run a model's `generate` with continuous batching, a paged KV cache and speculation.

    Give it to `model.generate(custom_generate=...)`, or call it with the model first; both take
    what `model.generate` takes. Greedy text equals transformers'. Sampled text follows the same
    distribution; `torch.manual_seed` decides it.

    Args:
        model: a decoder that `Engine` can run. Its attention is restored at the end.
        input_ids: `int64 [batch, n]`, padded on the left.
        logits_processor: as in `model.generate`: a bias of single tokens (`sequence_bias`), a
            repetition penalty, `no_repeat_ngram_size`, bad words, least lengths, suppressed tokens,
            temperature, top-k, top-p and min-p.
        stopping_criteria: as in `model.generate`: a length and end-of-sequence tokens.
        generation_config: as in `model.generate`.
        draft: the drafter, as in `Engine.from_pretrained`: an EAGLE head, `ngram` or a `Drafter`;
            None to decode without drafts.
        engine: an engine of this model, to be used again by the next call with its prefix cache.
            Without it each call builds one. It excludes `draft` and `options`.
        options: fields of `EngineConfig`.
        **model_kwargs: other arguments of `model.generate`.

    Returns:
        The tokens, `int64 [batch, length]`, prompts included, or a `GenerateDecoderOnlyOutput` with
        them if the configuration asks for it. A row that ended early is padded on the right.

    Raises:
        ConfigError: an argument that the engine cannot serve as transformers would.
    """
    if not hasattr(generation_config, "_eos_token_tensor"):  # transformers has not prepared it yet
        if model_kwargs.pop("streamer", None) is not None:
            raise ConfigError("streamer is not supported: Engine.stream yields text as it comes")
        arguments = {"draft": draft, "engine": engine, "options": options}
        call: Any = model.generate  # its stub does not know it as a method
        outcome: torch.Tensor | GenerateDecoderOnlyOutput = call(
            input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            custom_generate=generate,
            **{name: value for name, value in arguments.items() if value is not None},
            **model_kwargs,
        )
        return outcome
    assert generation_config is not None
    _check_config(generation_config)
    input_ids = _checked(input_ids, model_kwargs)
    prompts = _prompts(input_ids, model_kwargs.get("attention_mask"))
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    settings = generation_config, logits_processor, stopping_criteria
    params = _params(*settings, input_ids, prompts, vocab_size)
    with _engine(model, draft, engine, options, input_ids, generation_config) as runner:
        outputs = runner.generate(prompts, params, progress=False)
    for output in outputs:
        if output.error is not None:
            raise RuntimeError(f"request {output.index} ended with an error: {output.error}")
    sequences = _padded(input_ids, [output.token_ids for output in outputs], generation_config)
    if generation_config.return_dict_in_generate:
        return GenerateDecoderOnlyOutput(sequences=cast(torch.LongTensor, sequences))
    return sequences


def _check_config(config: GenerationConfig) -> None:
    """Refuse what no request of an engine can do."""
    if (config.num_beams or 1) > 1:
        raise ConfigError(f"num_beams must be 1, got {config.num_beams}: there is no beam search")
    for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
        if getattr(config, name, False):
            raise ConfigError(f"{name} is not supported: SamplingParams.logprobs has the scores")


def _checked(input_ids: torch.Tensor | None, model_kwargs: Mapping[str, Any]) -> torch.Tensor:
    """The tokens; inputs of a model that are none, and a cache that is begun, are refused."""
    if input_ids is None or input_ids.dim() != 2 or input_ids.is_floating_point():
        raise ConfigError("input_ids must be token ids [batch, n]")
    strange = sorted(
        name for name, value in model_kwargs.items() if value is not None and name not in OWN_INPUTS
    )
    if strange:
        raise ConfigError(f"only tokens can be given, got {', '.join(strange)}")
    # `cache` since transformers 5.24.
    cache = model_kwargs.get("cache", model_kwargs.get("past_key_values"))
    if cache is not None and cache.get_seq_length() > 0:
        raise ConfigError(
            f"the cache holds {cache.get_seq_length()} tokens already: the engine has its own cache"
        )
    return input_ids


def _prompts(input_ids: torch.Tensor, mask: torch.Tensor | None) -> list[list[int]]:
    """The rows without their padding."""
    if mask is None:
        return input_ids.tolist()
    if bool((mask[:, 1:] < mask[:, :-1]).any()):
        raise ConfigError("attention_mask must be zeros, then ones, in each row: pad on the left")
    rows = zip(input_ids.tolist(), mask.sum(dim=1).tolist(), strict=True)
    return [row[len(row) - int(length) :] for row, length in rows]


def _params(
    config: GenerationConfig,
    processors: LogitsProcessorList | None,
    criteria: StoppingCriteriaList | None,
    input_ids: torch.Tensor,
    prompts: Sequence[Sequence[int]],
    vocab_size: int,
) -> list[SamplingParams]:
    """The options of each row's request."""
    paddings = [input_ids.shape[1] - len(prompt) for prompt in prompts]
    fields = _sampling(processors or (), config.do_sample, paddings, input_ids.shape[1], vocab_size)
    for criterion in criteria or ():
        if not isinstance(criterion, MaxLengthCriteria | EosTokenCriteria):
            raise ConfigError(
                f"{type(criterion).__name__} is not supported: a request ends by its length or by "
                "an end-of-sequence token; SamplingParams.stop has stop strings"
            )
    eos = config._eos_token_tensor
    fields["stop_token_ids"] = () if eos is None else tuple(eos.tolist())
    fields["max_new_tokens"] = config.max_length - input_ids.shape[1]
    count = input_ids.shape[0]
    # One number of torch's generator for each row, so that its seed decides the text.
    seeds = torch.randint((1 << 63) - 1, (count,)).tolist() if config.do_sample else [None] * count
    return [SamplingParams(seed=seed, **fields) for seed in seeds]


def _sampling(
    processors: Iterable[LogitsProcessor],
    draws: bool,
    paddings: Sequence[int],
    width: int,
    vocab_size: int,
) -> dict[str, Any]:
    """The fields of `SamplingParams` for these processors; others are refused.

    `width` is the tokens of each row of the batch, with its padding.
    """
    # All fields are given, because the model's own generation_config is in the processors already.
    fields: dict[str, Any] = {"ignore_eos": True, **NEUTRAL}
    if draws:
        fields["temperature"] = 1.0
    last = 0
    for processor in processors:
        rank = _ORDER.index(type(processor)) if type(processor) in _ORDER else -1
        is_warper = rank >= _ORDER.index(TemperatureLogitsWarper)
        if rank < last or (is_warper and not draws) or _is_beyond(processor, paddings, width):
            raise ConfigError(
                f"{type(processor).__name__} is not supported here: the engine has a bias of "
                "single tokens, repetition_penalty, no_repeat_ngram_size, bad words, least "
                "lengths, suppressed tokens, temperature, top_k, top_p, min_p, in this order"
            )
        last = rank
        if isinstance(processor, NoBadWordsLogitsProcessor):
            fields["bad_words_ids"] = [[*map(int, word)] for word in processor.sequence_bias]
        elif isinstance(processor, SequenceBiasLogitsProcessor):
            fields["logit_bias"] = _bias(processor)
        elif isinstance(processor, RepetitionPenaltyLogitsProcessor):
            fields["repetition_penalty"] = processor.penalty
        elif isinstance(processor, NoRepeatNGramLogitsProcessor):
            fields["no_repeat_ngram_size"] = processor.ngram_size
        elif isinstance(processor, MinLengthLogitsProcessor):
            num_tokens = processor.min_length - width
            fields["min_new_tokens"] = max(num_tokens, fields["min_new_tokens"])
        elif isinstance(processor, MinNewTokensLengthLogitsProcessor):
            num_tokens = processor.min_new_tokens + processor.prompt_length_to_skip - width
            fields["min_new_tokens"] = max(num_tokens, fields["min_new_tokens"])
        elif isinstance(processor, SuppressTokensLogitsProcessor):
            fields["suppress_tokens"] = _within(processor.suppress_tokens, vocab_size)
        elif isinstance(processor, SuppressTokensAtBeginLogitsProcessor):
            fields["begin_suppress_tokens"] = _within(processor.begin_suppress_tokens, vocab_size)
        for name in ("temperature", "top_k", "top_p", "min_p"):
            if is_warper and hasattr(processor, name):
                fields[name] = getattr(processor, name)
    return fields


def _within(tokens: torch.Tensor, vocab_size: int) -> list[int]:
    """The tokens that the vocabulary has; no text has the others."""
    return [token for token in tokens.tolist() if 0 <= token < vocab_size]


def _is_beyond(processor: LogitsProcessor, paddings: Sequence[int], width: int) -> bool:
    """Whether a processor of a known type has options that the engine has not."""
    if getattr(processor, "min_tokens_to_keep", 1) > 1:
        return True
    if getattr(processor, "begin_index", width) != width:
        return True
    if getattr(processor, "ngram_size", 0) == 1 and any(paddings):
        return True  # it bans the padding's token, which no prompt here has
    ignored = getattr(processor, "prompt_ignore_length", None)
    # The padding of each row is none of its prompt. This the engine does too, and no more.
    return ignored is not None and (isinstance(ignored, int) or ignored.tolist() != [*paddings])


def _bias(processor: SequenceBiasLogitsProcessor) -> dict[int, float]:
    """The bias of single tokens.

    Raises:
        ConfigError: it is one of several tokens in a row, or a word that is ruled out.
    """
    bias = {}
    for sequence, value in dict(processor.sequence_bias).items():
        if len(sequence) != 1 or not abs(value) <= 100:
            raise ConfigError(
                f"the bias {value:g} of {list(sequence)} is not supported: a bias is of one token "
                "and in [-100, 100]; a token with -100 is hardly ever chosen"
            )
        bias[int(sequence[0])] = float(value)
    return bias


def _engine(
    model: PreTrainedModel,
    draft: str | PathLike[str] | Drafter | None,
    engine: Engine | None,
    options: Mapping[str, Any] | None,
    input_ids: torch.Tensor,
    config: GenerationConfig,
) -> contextlib.AbstractContextManager[Engine]:
    """The given engine, which stays open, or one for this call."""
    if engine is not None:
        if draft is not None or options is not None:
            raise ConfigError("an engine has its draft and its options: give engine alone")
        if engine.target.model is not model:
            raise ConfigError("the engine runs another model")
        return contextlib.nullcontext(engine)
    chosen = {"max_batch": min(input_ids.shape[0], MAX_BATCH), **(options or {})}
    chosen.setdefault("max_context_len", max(config.max_length, 2))
    return Engine.from_pretrained(model, draft=draft, **chosen)


def _padded(
    input_ids: torch.Tensor, new: list[list[int]], config: GenerationConfig
) -> torch.Tensor:
    """Prompts and new tokens, `int64 [batch, length]`."""
    pad = config._pad_token_tensor
    width = max(map(len, new))
    tail = input_ids.new_full((len(new), width), 0 if pad is None else int(pad))
    for row, tokens in zip(tail, new, strict=True):
        row[: len(tokens)] = torch.tensor(tokens, dtype=tail.dtype)
    return torch.cat([input_ids, tail], dim=1)
