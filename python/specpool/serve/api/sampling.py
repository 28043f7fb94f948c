"""`params_of`: what a request's fields mean to the engine."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from specpool.engine.sampling_params import TRUNCATIONS, SamplingParams
from specpool.errors import ConfigError
from specpool.serve.api.errors import ApiError, bad, too_long
from specpool.serve.api.requests import GenerationBody
from specpool.serve.api.structured import grammar_of

#: What the engine can do.
_FIELDS = {field.name for field in fields(SamplingParams)}
#: Fields of the bodies about sessions that an engine's session checks.
_SESSION_FIELDS = {"max_tokens", "offset"}
#: Those that a request has by the same name; `params_of` passes them on.
_SHARED_FIELDS = tuple(name for name in GenerationBody.model_fields if name in _FIELDS)

#: Fields whose values other than these, and None, ask for something that is not there: another
#: text, or another prompt. What only asks for more in the answer is named in it as ignored.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": ([], ["text"]),
    "prediction": (),
    "web_search_options": (),
    "suffix": ("",),
    # vLLM's
    "use_beam_search": (False,),
    "watermarking": (False,),
    "prompt_logprobs": (),
    "logprob_token_ids": (),
    "include_stop_str_in_output": (False,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "truncate_prompt_tokens": (),
    "prompt_embeds": (),
    "chat_template": (),
    "guided_whitespace_pattern": (),
    "structural_tag": (),
    # SGLang's
    "stop_regex": ([],),
    "no_stop_trim": (False,),
    "lora_path": (),
    "session_params": (),
    "custom_logit_processor": (),
    "input_ids": (),
    "extra_key": (),
}
#: Values of further fields that are what is done anyway, so that nothing is ignored.
_ANYWAY: dict[str, tuple[Any, ...]] = {
    "store": (False,),
    "service_tier": ("auto", "default"),
    "length_penalty": (1.0,),
    "detokenize": (True,),
    "spaces_between_special_tokens": (False, True),
    "echo": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}
#: How errors about prompts begin, and the fields that they are about.
_PARAM_PATTERNS = [
    (re.compile(pattern), field)
    for pattern, field in (
        (r"^part (\d+) of the content of message (\d+) of prompt", "messages[{1}].content[{0}]"),
        (r"^'(\w+)' of message (\d+) of prompt", "messages[{1}].{0}"),
        (r"^message (\d+) of prompt", "messages[{0}].content"),
        (r"^prompt \d+ .*? (stop_token_ids|logit_bias|logprobs|tpot_ms)\b", "{0}"),
        (r"^prompt (\d+) ", "prompt[{0}]"),
        (r"^the (?:chat template refuses|first \d+ of the) prompt", "prompt[0]"),
    )
]


def check_supported(request: GenerationBody, *names: str) -> list[str]:
    """Refuse fields that ask for something that is not there; return those that are ignored.

    Raises:
        ApiError: a field has a value that cannot be honoured.
    """
    values = (request.model_extra or {}) | {name: getattr(request, name) for name in names}
    values = {name: value for name, value in values.items() if value is not None}
    for name in _UNSUPPORTED.keys() & values.keys():
        if values[name] not in _UNSUPPORTED[name]:
            raise bad(f"{name} is not supported", name, "unsupported_parameter")
    ignored = values.keys() - _UNSUPPORTED.keys()
    ignored = {name for name in ignored if values[name] not in _ANYWAY.get(name, ())}
    options = request.stream_options
    more = {} if options is None else options.model_extra or {}
    return sorted(ignored | {f"stream_options.{name}" for name in more})


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    """Return the header of an answer that names the fields of the request that were ignored."""
    text = ", ".join(name.encode("unicode_escape").decode() for name in names)
    return {"x-specpool-ignored": text[:500]} if text else {}


def params_of(
    request: GenerationBody, max_new_tokens: int, logprobs: int | None, temperature: float
) -> SamplingParams:
    """Return the sampling parameters of a request.

    `temperature` is that of a request which gives none. At temperature 0, and with `top_p` 0, the
    likeliest token is taken, and the truncations do nothing. Other fields that the request does not
    give are left to the engine, which knows the target's defaults.

    Raises:
        ApiError: a field cannot work.
    """
    values: dict[str, Any] = {
        name: value for name in _SHARED_FIELDS if (value := getattr(request, name)) is not None
    }
    values.setdefault("temperature", temperature)
    values["max_new_tokens"] = max_new_tokens
    values["logprobs"] = logprobs
    values["stop"] = request.stop or ()
    values["logit_bias"] = _bias_by_token(request.logit_bias)
    values["structured"] = grammar_of(request)
    if request.top_p == 0:
        values["temperature"] = 0.0
    if not values["temperature"]:
        values = {name: value for name, value in values.items() if name not in TRUNCATIONS}
    elif request.top_k is not None:
        values["top_k"] = max(request.top_k, 0)
    if request.seed is not None:
        values["seed"] = request.seed % (1 << 64)
    if request.min_tokens is not None:
        values["min_new_tokens"] = min(request.min_tokens, max_new_tokens)
    try:
        return SamplingParams(**values)
    except ConfigError as error:
        raise bad(str(error), param_of(str(error))) from None


def _bias_by_token(bias_by_key: dict[str, float] | None) -> dict[int, float]:
    """Return the bias by token id; JSON has strings for keys."""
    bias = {}
    for key, value in (bias_by_key or {}).items():
        if not key.isascii() or not key.isdigit() or len(key) > 10:
            raise bad(f"logit_bias: {key!r:.40} is no token id", "logit_bias")
        if not -100 <= value <= 100:  # NaN fails it too
            raise bad(f"logit_bias: {key} must have a value in [-100, 100]", "logit_bias")
        bias[int(key)] = float(value)
    return bias


def param_of(message: str) -> str | None:
    """Return the request's field that an error of the engine is about, if its message says so."""
    for pattern, field in _PARAM_PATTERNS:
        if (match := pattern.search(message)) is not None:
            return field.format(*match.groups())
    name = message.split(" ", 1)[0].rstrip(":")
    if name == "max_new_tokens":
        return "max_tokens"
    if name == "structured":
        return "response_format"
    return name if name in _FIELDS | _SESSION_FIELDS else None


def refused(error: ConfigError) -> ApiError:
    """Return the error for a request that the engine refuses."""
    text = str(error)
    make = too_long if "max_context_len" in text else bad
    return make(text, param_of(text))
