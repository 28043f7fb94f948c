"""What a model with recurrent layers can do, found out when loading, before any pool exists.

A few tokens run through the model by itself, and through ours with its states put away and brought
back: whatever is not in them shows in the logits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specpool.memory.layer_kv import LayerKV
from specpool.models.gate import refusal
from specpool.models.probe import (
    PROBE_TEXTS,
    ProbeBatch,
    Probed,
    layers_seen,
    probe_batch,
    probe_tolerance,
)
from specpool.models.recurrent import (
    RecurrentState,
    StateSpec,
    attention_layers,
    paged_cache,
    states_in,
)

_NUM_TOKENS = 6
_CUT = 4  # tokens of the first forward, where there are several
# An error so much smaller than what the first part's tokens change is rounding.
_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class StateProbe:
    """What was found; see the attributes of `TargetModel`."""

    kv_layers: tuple[int, ...]
    layer_kv: tuple[LayerKV, ...]
    state_specs: tuple[StateSpec, ...]
    continues: bool


@torch.inference_mode()
def probe_states(target: Probed) -> StateProbe:
    """Runs a text at once, in two parts, and token by token behind the first part.

    Raises:
        ConfigError: names the model type, the reason and the numbers.
    """
    limit = probe_tolerance(target.dtype)
    worst = []
    for start in PROBE_TEXTS:
        text, other = (
            [(first + 7 * i) % target.vocab_size for i in range(_NUM_TOKENS)]
            for first in (start, 5)
        )
        lanes = torch.tensor([other, text], device=target.device)
        found = _found(target, lanes)
        plain = target.plain_logits(text).float()
        whole, _ = _in_parts(target, found, lanes, [_NUM_TOKENS])
        by_token, states = _in_parts(target, found, lanes, [_CUT, 1, 1])
        differences = [
            float((logits - plain).norm() / plain.norm()) for logits in (whole, by_token)
        ]
        if not max(differences) > limit:  # NaN passes: broken weights are no matter of states
            return replace(found, continues=_continues(target, found, lanes, states))
        worst.append(max(differences))
    raise refusal(
        target.config.model_type,
        "with its states put away and brought back it does not compute what it computes by itself:"
        f" its logits differ by {min(worst):.1e} (relative), more than {limit:.0e}",
    )


def _continues(target: Probed, found: StateProbe, lanes: Tensor, expected: list[Tensor]) -> bool:
    """Whether two tokens at once go on from a state, and do not begin anew.

    Logits would not tell: in weights that are small, or in 16 bits, a state changes them little. So
    the states are compared, with `expected` and with those of a text that begins there.
    """
    _, ours = _in_parts(target, found, lanes, [_CUT, _NUM_TOKENS - _CUT])
    _, anew = _in_parts(target, found, lanes[:, _CUT:], [_NUM_TOKENS - _CUT])
    return all(
        bool((one - right).norm() <= _SHARE * (wrong - right).norm())
        for one, wrong, right in zip(ours, anew, expected, strict=True)
    )


def _found(target: Probed, lanes: Tensor) -> StateProbe:
    """What the layers keep, by a forward that starts from nothing."""
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
    target: Probed, found: StateProbe, lanes: Tensor, widths: list[int]
) -> tuple[Tensor, list[Tensor]]:
    """In forwards of so many tokens: logits [n, V] of the second lane's text, and its states."""
    states = RecurrentState(target.config, found.state_specs, 2, target.device)
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
