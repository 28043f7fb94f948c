"""How many pages fit: from free memory and the bytes of a page to the groups of a ledger."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from specpool._core import Group, Ledger, Shape, sizing_row_width
from specpool.config import EngineConfig
from specpool.errors import ConfigError
from specpool.kv_cache import LayerKV


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """The ledger to build, and where each layer's KV lies.

    Attributes:
        ledger: with its groups sized.
        layer_groups: the group of each layer: the target's layers, then the draft's.
        target_groups: the same for the target's layers alone.
        draft_group: the group that hosts the draft's layers.
    """

    ledger: Ledger
    layer_groups: list[int]
    target_groups: list[int]
    draft_group: int


def free_bytes(device: torch.device) -> int:
    """Memory that can be taken now on `device`."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def plan_pools(
    config: EngineConfig,
    target_layers: Sequence[LayerKV],
    draft_layers: Sequence[LayerKV],
    *,
    shape: Shape,
    max_context_len: int,
    dtype: torch.dtype,
    device: torch.device,
) -> PoolPlan:
    """Size the groups and build the ledger.

    Args:
        config: placement, policy, layout, page size, and `num_pages` or `kv_bytes` if given.
        target_layers: of the target model.
        draft_layers: of the drafter; empty if it keeps no KV.
        shape: the shape that will run beside shape 0.
        max_context_len: tokens of a sequence at most.
        dtype: of the KV.
        device: where the KV lives.

    Raises:
        ConfigError: the memory does not hold one full row, or not the pages asked for.
    """
    split = config.placement == "split" and bool(draft_layers)
    # A shared group hosts the branches whoever drafts, as upstream's does.
    hosts_drafts = split or (config.placement == "shared" and shape.num_draft_tokens > 1)
    layout = "dense" if config.layout == "auto" else config.layout
    target_groups = [0] * len(target_layers)
    draft_group = 1 if split else 0
    layer_groups = target_groups + [draft_group] * len(draft_layers)
    names = ["target", "draft"] if split else ["kv"]
    layers = [*target_layers, *draft_layers]
    page_bytes = [
        config.page_size
        * sum(
            layer.bytes_per_token(dtype)
            for layer, group in zip(layers, layer_groups, strict=True)
            if group == index
        )
        for index in range(len(names))
    ]

    def hosts(index: int) -> bool:
        return hosts_drafts and index == draft_group

    shapes = [Shape.none(), shape]
    if config.num_pages is not None:
        num_pages = [config.num_pages] * len(names)
    else:
        per_row = [
            sizing_row_width(
                shapes,
                page_size=config.page_size,
                max_context_len=max_context_len,
                overlap_depth=config.overlap_depth,
                policy=config.policy,
                hosts_drafts=hosts(index),
                layout=layout,
            )
            // config.page_size
            for index in range(len(names))
        ]
        budget = free_bytes(device) // 2 if config.kv_bytes is None else config.kv_bytes
        num_pages = _fit(config, per_row, page_bytes, budget, max_context_len)
    ledger = Ledger(
        [
            Group(
                name,
                page_size=config.page_size,
                num_pages=pages,
                hosts_drafts=hosts(index),
                layout=layout,
            )
            for index, (name, pages) in enumerate(zip(names, num_pages, strict=True))
        ],
        shapes,
        num_rows=config.max_batch,
        max_context_len=max_context_len,
        overlap_depth=config.overlap_depth,
        policy=config.policy,
        draft_kv=bool(draft_layers),
    )
    kv_bytes = sum((n + 1) * b for n, b in zip(num_pages, page_bytes, strict=True))
    free = free_bytes(device)
    if kv_bytes > free:
        raise ConfigError(
            f"{' + '.join(map(str, num_pages))} pages need {kv_bytes} bytes of KV, {free} are free:"
            " lower num_pages, kv_bytes or page_size"
        )
    return PoolPlan(ledger, layer_groups, target_groups, draft_group)


def _fit(
    config: EngineConfig,
    per_row: Sequence[int],
    page_bytes: Sequence[int],
    budget: int,
    max_context_len: int,
) -> list[int]:
    """Pages of each group for as many full rows as the bytes hold, at most `max_batch`."""
    sinks = sum(page_bytes)  # page 0 of each group
    row_bytes = sum(p * b for p, b in zip(per_row, page_bytes, strict=True))
    rows = min((budget - sinks) / row_bytes, config.max_batch)
    if rows < 1:
        raise ConfigError(
            f"one row of {max_context_len} tokens needs {row_bytes + sinks} bytes of KV, {budget} "
            "are to be had: lower max_context_len or the dtype, or raise kv_bytes"
        )
    most = (1 << 31) // config.page_size - 1  # slot ids are int32
    return [min(int(rows * pages), most) for pages in per_row]
