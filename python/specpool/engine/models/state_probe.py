"""`probe_states`: checks a model with recurrent layers at loading, before any pool exists.

A few tokens run through the model itself, and in parts with its states saved and restored between
them. If the states are not complete, the logits differ.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from specpool.capacity.layer_kv import LayerKV
from specpool.engine.attention import AttentionBatch
from specpool.engine.attention.seq_lens import SeqLens
from specpool.engine.models.device_lanes import DeviceLanes
from specpool.engine.models.gate import refusal
from specpool.engine.models.lane_states import LaneStates, StateFolds
from specpool.engine.models.mixers import Mixer, Mixers, tracing_mixers
from specpool.engine.models.probe import (
    PROBE_TEXTS,
    ProbeBatch,
    Probed,
    layers_seen,
    probe_batch,
    probe_tolerance,
)
from specpool.engine.models.recurrent import RecurrentState, attention_layers, paged_cache
from specpool.errors import ShapeError

_log = logging.getLogger("specpool")

_NUM_TOKENS = 6
_CUT = 4  # tokens of the first forward, if the text runs in parts
# A state differs by rounding alone if its error is at most this share of the error of a state that
# ignores the first part.
_SHARE = 0.1


class ProbedMixers(Probed, Protocol):
    """The attributes of a model with recurrent layers that the probe needs."""

    mixers: Mixers | None

    @property
    def decoder(self) -> Any:
        """The module that turns token ids into hidden states."""

    def forward_from(
        self, cache: Any, tokens: Tensor, positions: Tensor, batch: AttentionBatch
    ) -> None:
        """Run one forward of the decoder as it is; see `TargetModel.forward_from`."""


@torch.inference_mode()
def probe_states(target: ProbedMixers) -> tuple[tuple[int, ...], tuple[LayerKV, ...]]:
    """Wrap the mixers, and run a text at once, in two parts, and token by token after the first.

    Returns:
        The layers with KV, and what each keeps.

    Raises:
        ConfigError: the logits differ; the message has the model type and the numbers.
    """
    limit = probe_tolerance(target.dtype)
    worst = []
    kv_layers, layer_kv, mixers = first_forward(target)
    target.mixers = mixers
    for start in PROBE_TEXTS:
        lanes = _lanes(target, start)
        plain = target.plain_logits(lanes[1].tolist()).float()
        whole, _ = _in_parts(target, mixers, lanes, [_NUM_TOKENS])
        by_token, states = _in_parts(target, mixers, lanes, [_CUT, 1, 1])
        differences = [
            float((logits - plain).norm() / plain.norm()) for logits in (whole, by_token)
        ]
        if not max(differences) > limit:  # NaN passes: broken weights are not a fault of states
            mixers.continues = _continues(target, mixers, lanes, states)
            mixers.has_kernels = mixers.has_kernels and _agree(
                target, mixers, lanes, [plain, *states]
            )
            return kv_layers, layer_kv
        worst.append(max(differences))
    raise refusal(
        target.config.model_type,
        "with its states put away and brought back it does not compute what it computes by itself:"
        f" its logits differ by {min(worst):.1e} (relative), more than {limit:.0e}",
    )


def _lanes(target: Probed, start: int) -> Tensor:
    """Return int64 [2, n]: another text, and the one that begins with token `start`."""
    first = torch.tensor([[5], [start]], device=target.device)
    return (first + 7 * torch.arange(_NUM_TOKENS, device=target.device)) % target.vocab_size


def _continues(target: ProbedMixers, mixers: Mixers, lanes: Tensor, expected: list[Tensor]) -> bool:
    """Return whether two tokens at once continue from a state instead of starting anew.

    With small weights or in 16 bits a state changes the logits little, so compare states instead:
    with `expected`, and with those of a text that begins with these two tokens. A state of the last
    tokens alone is the same in both, up to rounding.
    """
    rounding = probe_tolerance(target.dtype)
    _, states = _in_parts(target, mixers, lanes, [_CUT, _NUM_TOKENS - _CUT])
    _, fresh_states = _in_parts(target, mixers, lanes[:, _CUT - 1 :], [_NUM_TOKENS - _CUT + 1])
    return all(
        bool((state - right).norm() <= _SHARE * (wrong - right).norm() + rounding * right.norm())
        for state, wrong, right in zip(states, fresh_states, expected, strict=True)
    )


def _agree(target: ProbedMixers, mixers: Mixers, lanes: Tensor, expected: Sequence[Tensor]) -> bool:
    """Return whether kernels give the second lane's logits, then its states, up to rounding.

    If not, log why.
    """
    try:
        logits, states = _in_parts(target, mixers, lanes, [_CUT, 1, 1], by_kernels=True)
    # A size that no kernel takes; a call that no cache has; an argument that another release names.
    except (ShapeError, AttributeError, TypeError) as error:
        reason = str(error)
    else:
        limit = probe_tolerance(target.dtype)
        differences = [
            float((result - right).norm() / right.norm())
            for result, right in zip([logits, *states], expected, strict=True)
            if bool((result - right).norm() > limit * right.norm())
        ]
        if not differences:
            return True
        reason = f"their results differ by {max(differences):.1e} (relative), more than {limit:.0e}"
    _log.warning(
        "%s: no kernels for its recurrent layers, so each round waits for the last one's lengths: "
        "%s",
        target.config.model_type,
        reason,
    )
    return False


def first_forward(
    target: ProbedMixers,
) -> tuple[tuple[int, ...], tuple[LayerKV, ...], Mixers]:
    """Run a forward of the model as it is; wrap its mixers, and return the layers with KV."""
    cache, mixers = paged_cache(target.config), list[Mixer]()
    batch, positions = probe_batch(target.device, [_NUM_TOKENS] * 2, [0, 0], None)
    with tracing_mixers(target.decoder, cache, mixers):
        lanes = _lanes(target, PROBE_TEXTS[0])
        target.forward_from(cache, lanes, positions.view(2, -1), batch)
    kv_layers = attention_layers(cache)
    layer_kv = layers_seen(target, batch, kv_layers)
    if not mixers:
        raise refusal(target.config.model_type, "its recurrent layers leave no state behind")
    return tuple(kv_layers), layer_kv, Mixers(target.config, mixers, target.device)


def _in_parts(
    target: ProbedMixers,
    mixers: Mixers,
    lanes: Tensor,
    widths: list[int],
    *,
    by_kernels: bool = False,
) -> tuple[Tensor, list[Tensor]]:
    """Run prompts of two rows in chunks of `widths` tokens.

    Returns:
        The logits [n, V] of the second lane, and its states after all tokens but the last.
    """
    rows = slots = np.array([2, 1], np.int32)
    state = RecurrentState(mixers.specs, num_slots=2, num_rows=2, ring_len=1, device=target.device)
    earlier: ProbeBatch | None = None
    start, logits = 0, []
    for width in widths:
        starts = np.full(2, start, np.int32)
        held = np.maximum(starts - 1, 0)
        end = starts + width - 1
        dst = np.where(end > held, slots, 0)
        folds = StateFolds(rows, slots if start > 1 else 0 * slots, dst, held, end)
        counts = np.full(2, width, np.int32)
        reads: LaneStates | DeviceLanes
        if by_kernels:
            on_device = torch.full((2,), start, dtype=torch.int32, device=target.device)
            reads = DeviceLanes.build(state, folds, SeqLens(on_device, starts, starts), counts)
        else:
            reads = LaneStates.build(state, folds, starts, counts, {}, target.device)
        batch, positions = probe_batch(target.device, [width] * 2, [start] * 2, earlier)
        tokens = lanes[:, start : start + width].reshape(-1)
        output = target.forward(tokens, positions, batch, states=[reads])
        logits.append(output.logits.view(2, width, -1)[1].float())
        earlier, start = batch, start + width
    return torch.cat(logits), [part[1].float() for parts in state.slots for part in parts]
