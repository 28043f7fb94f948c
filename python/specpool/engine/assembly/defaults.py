"""`with_defaults`: what an engine takes where no option says it, by its device."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from specpool.capacity.group_sizes import DEFAULT_BATCH, USUAL_ROW_TOKENS
from specpool.capacity.layer_kv import LayerKV
from specpool.capacity.state_sizes import StateBytes
from specpool.engine.config import MOST_BATCH, EngineConfig
from specpool.engine.draft import Drafter
from specpool.num_bytes import show_bytes

_log = logging.getLogger("specpool")


def with_defaults(
    config: EngineConfig,
    device: torch.device,
    drafters: Sequence[Drafter],
    layers: Sequence[LayerKV],
    *,
    itemsize: int,
    max_context_len: int,
    kv_bytes: int,
    states: StateBytes | None,
) -> EngineConfig:
    """Return the configuration with a batch and an overlap depth; options that are given stay.

    On a CUDA device one line of the log says what was taken.

    Args:
        config: `max_batch` and `overlap_depth` may be None.
        device: where the engine runs.
        drafters: the engine's.
        layers: all layers with KV.
        itemsize: bytes of a number of the KV.
        max_context_len: the most tokens of a sequence.
        kv_bytes: memory for KV and states, on all ranks the same; unused if `config.num_pages` is
            given.
        states: what the target's recurrent layers keep; None if it has none.
    """
    on_cuda = device.type == "cuda"
    max_batch, depth = config.max_batch, config.overlap_depth
    if max_batch is None:
        max_batch = DEFAULT_BATCH
        if on_cuda:
            num_tokens = min(USUAL_ROW_TOKENS, max_context_len)
            if config.num_pages is None:
                row_bytes = num_tokens * sum(layer.bytes_per_token(itemsize) for layer in layers)
                row_bytes += 0 if states is None else states.slot
                max_batch = kv_bytes // max(row_bytes, 1)
            else:
                max_batch = config.num_pages * config.page_size // num_tokens
            max_batch = min(max(max_batch - max_batch % 8, DEFAULT_BATCH), MOST_BATCH)
        max_batch = max(max_batch, *(config.graph_sizes or (1,)))
    if depth is None:
        waits = states is not None or any(drafter.reads_tokens for drafter in drafters)
        depth = int(on_cuda and config.worker != "v1" and not waits)
    if on_cuda:
        memory = "" if config.num_pages is not None else f", {show_bytes(kv_bytes)} for KV at most"
        _log.info("on %s: max_batch %d, overlap_depth %d%s", device, max_batch, depth, memory)
    return replace(config, max_batch=max_batch, overlap_depth=depth)
