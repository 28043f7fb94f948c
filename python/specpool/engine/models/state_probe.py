"""`probe_states`: checks a model with recurrent layers at loading, before any pool exists.

A few tokens run through the model itself, and in parts with its states saved and restored between
them. If the states are not complete, the logits differ.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specpool.capacity.layer_kv import LayerKV
from specpool.engine.models.gate import refusal
from specpool.engine.models.probe import (
    PROBE_TEXTS,
    ProbeBatch,
    Probed,
    layers_seen,
    probe_batch,
    probe_tolerance,
)
from specpool.engine.models.recurrent import (
    RecurrentState,
    StateSpec,
    attention_layers,
    paged_cache,
    states_in,
)

_NUM_TOKENS = 6
_CUT = 4  # tokens of the first forward, if the text runs in parts
# A state differs by rounding alone if its error is at most this share of the error of a state that
# ignores the first part.
_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class StateProbe:
    """The findings of the probe; `TargetModel` documents the attributes."""

    kv_layers: tuple[int, ...]
    layer_kv: tuple[LayerKV, ...]
    state_specs: tuple[StateSpec, ...]
    continues: bool


@torch.inference_mode()
def probe_states(target: Probed) -> StateProbe:
    """Run a text at once, in two parts, and token by token after the first part.

    Raises:
        ConfigError: the logits differ; the message has the model type and the numbers.
    """
    limit = probe_tolerance(target.dtype)
    worst = []
    for start in PROBE_TEXTS:
        text, other = (
            [(first + 7 * i) % target.vocab_size for i in range(_NUM_TOKENS)]
            for first in (start, 5)
        )
        lanes = torch.tensor([other, text], device=target.device)
        state_probe = _first_forward(target, lanes)
        plain = target.plain_logits(text).float()
        whole, _ = _in_parts(target, state_probe, lanes, [_NUM_TOKENS])
        by_token, states = _in_parts(target, state_probe, lanes, [_CUT, 1, 1])
        differences = [
            float((logits - plain).norm() / plain.norm()) for logits in (whole, by_token)
        ]
        if not max(differences) > limit:  # NaN passes: broken weights are not a fault of states
            return replace(state_probe, continues=_continues(target, state_probe, lanes, states))
        worst.append(max(differences))
    raise refusal(
        target.config.model_type,
        "with its states put away and brought back it does not compute what it computes by itself:"
        f" its logits differ by {min(worst):.1e} (relative), more than {limit:.0e}",
    )


def _continues(
    target: Probed, state_probe: StateProbe, lanes: Tensor, expected: list[Tensor]
) -> bool:
    """Return whether a forward of two tokens continues from a state instead of starting anew.

    With small weights or in 16 bits a state changes the logits little, so compare states instead:
    with `expected`, and with those of a text that begins at the cut.
    """
    _, states = _in_parts(target, state_probe, lanes, [_CUT, _NUM_TOKENS - _CUT])
    _, fresh_states = _in_parts(target, state_probe, lanes[:, _CUT:], [_NUM_TOKENS - _CUT])
    return all(
        bool((state - right).norm() <= _SHARE * (wrong - right).norm())
        for state, wrong, right in zip(states, fresh_states, expected, strict=True)
    )


def _first_forward(target: Probed, lanes: Tensor) -> StateProbe:
    """Run a forward without earlier states, and return what the layers keep."""
    cache = paged_cache(target.config)
    batch, positions = probe_batch(target.device, [_NUM_TOKENS] * 2, [0, 0], None)
    target.forward_from(cache, lanes, positions.view(2, -1), batch)
    kv_layers = attention_layers(cache)
    layer_kv = layers_seen(target, batch, kv_layers)
    specs = states_in(cache)
    if not specs:
        raise refusal(target.config.model_type, "its recurrent layers leave no state behind")
    return StateProbe(tuple(kv_layers), layer_kv, specs, continues=False)


def _in_parts(
    target: Probed, state_probe: StateProbe, lanes: Tensor, widths: list[int]
) -> tuple[Tensor, list[Tensor]]:
    """Run forwards of `widths` tokens; return logits [n, V] and states of the second lane."""
    states = RecurrentState(target.config, state_probe.state_specs, 2, target.device)
    rows = torch.tensor([2, 1], device=target.device)
    earlier: ProbeBatch | None = None
    start, logits = 0, []
    for width in widths:
        cache = states.lanes(rows, is_fresh=start == 0)
        batch, positions = probe_batch(target.device, [width] * 2, [start] * 2, earlier)
        tokens = lanes[:, start : start + width]
        hidden = target.forward_from(cache, tokens, positions.view(2, -1), batch)
        states.put(rows, states.values(cache))
        logits.append(target.compute_logits(hidden.view(2, width, -1)[1]).float())
        earlier, start = batch, start + width
    return torch.cat(logits), [value[1].float() for value in states.values(cache)]
