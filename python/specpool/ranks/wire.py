"""A request as plain values, for another rank to make the same one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np

from specpool._core import Shape
from specpool.errors import RankError, SpecpoolError
from specpool.sampling_params import SamplingParams
from specpool.scheduler.requests.conversation import Conversation
from specpool.scheduler.requests.latency import Times
from specpool.scheduler.requests.request import Request
from specpool.text.structured.grammar import Grammar

#: Gives a request what follows its text, which is not sent: `Request.watch`, `Request.matcher`.
Equip = Callable[[Request], None]

_SAME = (
    "request_id",
    "index",
    "prompt_len",
    "shape_index",
    "max_len",
    "seed",
    "priority",
    "skips_cache",
    "sample",
    "wants_pin",
    "forced_shape",
    "drafter",
    "reads_tokens",
)


def wire_of(request: Request) -> dict[str, Any]:
    """Return a new request with its siblings as plain values."""
    shape, conversation = request.shape, request.conversation
    return {
        **{name: getattr(request, name) for name in _SAME},
        "tokens": np.array(request.tokens, np.int32),
        "params": params_wire(request.params),
        "shape": [shape.num_steps, shape.topk, shape.num_draft_tokens],
        "choices": None if request.choices is None else list(request.choices),
        "stop_ids": sorted(request.stop_ids),
        "conversation": None if conversation is None else conversation.number,
        "siblings": [[each.request_id, each.sample, each.seed] for each in request.siblings],
    }


def params_wire(params: SamplingParams) -> dict[str, Any]:
    """Return sampling parameters as plain values."""
    values = {field.name: getattr(params, field.name) for field in fields(params)}
    form = params.structured
    values["structured"] = None if form is None else [form.kind, form.text]
    return values


def params_of(wire: Any) -> SamplingParams:
    """Return the parameters of `params_wire`.

    Raises:
        RankError: the values are none of it.
    """
    try:
        values = dict(wire)
        form = values.pop("structured")
        for name in ("stop", "stop_token_ids"):
            values[name] = tuple(values[name])
        return SamplingParams(**values, structured=None if form is None else Grammar(*form))
    except (SpecpoolError, TypeError, ValueError, KeyError) as error:
        raise RankError(f"these are no sampling parameters: {error}") from error


def request_of(wire: Any, open_conversations: dict[int, Conversation], equip: Equip) -> Request:
    """Make the request of `wire_of`, with its siblings.

    Args:
        wire: the values.
        open_conversations: the conversations of this rank, by number.
        equip: called for the request and each sibling.

    Raises:
        RankError: the values are none of a request, or their conversation is not open.
    """
    try:
        same = {name: wire[name] for name in _SAME}
        number, choices, tokens = wire["conversation"], wire["choices"], wire["tokens"].tolist()
        if number is not None and number not in open_conversations:
            raise RankError(f"session {number} is not open on this rank")
        request = Request(
            **same,
            tokens=tokens,
            params=params_of(wire["params"]),
            shape=Shape(*wire["shape"]),
            choices=None if choices is None else tuple(choices),
            stop_ids=frozenset(wire["stop_ids"]),
            conversation=None if number is None else open_conversations[number],
        )
        request.siblings = [_sibling(request, *each) for each in wire["siblings"]]
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise RankError(f"these values make no request: {error!r:.200}") from error
    for each in (request, *request.siblings):
        equip(each)
    return request


def _sibling(first: Request, request_id: int, sample: int, seed: int) -> Request:
    return replace(
        first,
        request_id=request_id,
        sample=sample,
        seed=seed,
        tokens=list(first.tokens),
        forced=[],
        accept_lens=[],
        prefill_token_indices=[],
        logprobs=[],
        siblings=[],
        times=Times(),
    )
