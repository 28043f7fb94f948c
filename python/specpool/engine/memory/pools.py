"""`plan_pools`: sizes an engine's groups by the device's free memory, and builds the ledger."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from specpool._core import Ledger, Shape
from specpool.capacity.group_sizes import size_groups
from specpool.capacity.layer_kv import LayerKV, bytes_by_window
from specpool.capacity.state_sizes import StateBytes
from specpool.engine.config import EngineConfig
from specpool.errors import ConfigError
from specpool.num_bytes import show_bytes


@dataclass(frozen=True, slots=True)
class Pools:
    """The ledger of an engine, and the group of each layer's KV.

    Attributes:
        ledger: the new ledger.
        layer_groups: the group of each layer: the target's layers, then the draft's.
        target_groups: the same for the target's layers alone.
        draft_group: the group that hosts the draft's layers.
    """

    ledger: Ledger
    layer_groups: list[int]
    target_groups: list[int]
    draft_group: int


# The part of a CUDA device that is left for prompts, logits and graphs.
_PERCENT_FOR_WORK = 12

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


def free_bytes(device: torch.device) -> int:
    """Return the free bytes on `device`; on a CPU, the least of the host's and cgroups' limits."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min([_free_bytes_of_host(), *_free_bytes_of_cgroups()])


def _free_bytes_of_cgroups() -> Iterator[int]:
    """Yield the bytes left under each cgroup memory limit of a container or service manager."""
    if not _OWN_CGROUPS.exists():
        return
    for line in _OWN_CGROUPS.read_text().splitlines():
        _, controllers, own_path = line.split(":", 2)
        if not controllers:  # version 2
            root, limit, used, cached = _CGROUPS, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, cached = _CGROUPS / "memory", "total_inactive_file"
            limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        # A container may see its own group as the root.
        group = root / own_path.lstrip("/")
        for folder in [*([group, *group.parents] if group.is_dir() else []), root]:
            if not folder.is_relative_to(root) or not (folder / limit).exists():
                continue
            max_bytes = (folder / limit).read_text().strip()
            if max_bytes == "max":
                continue
            # Do not count cached files: the system drops them when memory is needed.
            stat = dict(
                entry.split() for entry in (folder / "memory.stat").read_text().splitlines()
            )
            taken = int((folder / used).read_text()) - int(stat.get(cached, 0))
            yield max(int(max_bytes) - taken, 0)


def _free_bytes_of_host() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def kv_budget(
    config: EngineConfig,
    device: torch.device,
    *,
    graph_layers: int = 0,
    least: Callable[[int], int] | None = None,
    sharers: int = 1,
) -> int:
    """Return the bytes for KV and states: what an option says, else a share of free memory.

    Half of what is free. On a CUDA device, where prompts and logits take less than that, all but
    12 % of the device if that is more.

    Args:
        config: `num_pages` or `kv_bytes` if given.
        device: where the KV lives.
        graph_layers: the layers of the models, if graphs read the KV of one of them into memory of
            their own; 0 if there are no graphs.
        least: returns the least of all ranks' values: they have the same pages; None without ranks.
        sharers: the ranks that share the device's memory.
    """
    budget = config.kv_bytes
    if budget is None and config.num_pages is not None:
        budget = 0
    elif budget is None:
        budget = free_bytes(device) // 2
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            spare = free - total * _PERCENT_FOR_WORK // 100
            if graph_layers:
                spare = spare * graph_layers // (graph_layers + 1)
            budget = max(budget, spare)
        budget //= sharers
    return budget if least is None else least(budget)


def plan_pools(
    config: EngineConfig,
    target_layers: Sequence[LayerKV],
    draft_layers: Sequence[LayerKV],
    *,
    shapes: Sequence[Shape],
    max_context_len: int,
    dtype: torch.dtype,
    device: torch.device,
    kv_bytes: int,
    states: StateBytes | None = None,
    least: Callable[[int], int] | None = None,
    record: Path | None = None,
) -> Pools:
    """Size the groups and build the ledger.

    Args:
        config: placement, policy, layout, page size, and `num_pages` or `kv_bytes` if given.
        target_layers: the KV layers of the target model.
        draft_layers: the KV layers of the drafter; empty if it keeps no KV.
        shapes: the shapes that will run beside shape 0.
        max_context_len: the most tokens of a sequence.
        dtype: dtype of the KV.
        device: where the KV lives.
        kv_bytes: bytes for all buffers and states, of `kv_budget`.
        states: what the target's recurrent layers keep; None if it has none.
        least: returns the least of all ranks' values: they have the same pages; None without ranks.
        record: a file for the ledger's event log, if there are ranks.

    Raises:
        ConfigError: the memory does not hold one row of the whole context, or not the pages that
            were asked for.
    """
    sizes = size_groups(
        config,
        bytes_by_window(target_layers, dtype.itemsize),
        sum(layer.bytes_per_token(dtype.itemsize) for layer in draft_layers),
        shapes=shapes,
        max_context_len=max_context_len,
        kv_bytes=kv_bytes,
        states=states,
    )
    ledger = sizes.ledger(digest=least is not None, record=record)
    free = free_bytes(device)
    free = free if least is None else least(free)
    if sizes.num_bytes > free:
        num_pages = " + ".join(str(group.num_pages) for group in sizes.groups)
        states_text = ""
        if sizes.states is not None:
            num_slots = sizes.states.num_slots
            states_text = f" and {num_slots} recurrent states {show_bytes(sizes.state_bytes)}"
        raise ConfigError(
            f"{num_pages} pages need {show_bytes(sizes.num_bytes - sizes.state_bytes)} of KV"
            f"{states_text}, {show_bytes(free)} are free: lower num_pages, kv_bytes, page_size or "
            "max_batch"
        )
    target_groups = [sizes.group_of(layer.window) for layer in target_layers]
    layer_groups = target_groups + [sizes.draft_group] * len(draft_layers)
    return Pools(ledger, layer_groups, target_groups, sizes.draft_group)
