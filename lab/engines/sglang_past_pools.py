"""Pools of old releases of SGLang for a case, and loops in the place of their Triton kernels."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache import allocator as allocators
from sglang.srt.mem_cache import memory_pool
from sglang_device import Device

HAS_STATES = hasattr(memory_pool, "HybridReqToTokenPool")
if importlib.util.find_spec("sglang.srt.mem_cache.swa_memory_pool"):
    from sglang.srt.mem_cache import swa_memory_pool
else:
    swa_memory_pool = memory_pool
#: Its module has moved twice.
WINDOW_ALLOCATOR: Any = getattr(
    swa_memory_pool,
    "SWATokenToKVPoolAllocator",
    getattr(allocators, "SWATokenToKVPoolAllocator", None),
)
if WINDOW_ALLOCATOR is None:
    WINDOW_ALLOCATOR = importlib.import_module(
        "sglang.srt.mem_cache.allocator.swa"
    ).SWATokenToKVPoolAllocator


class WindowPools(swa_memory_pool.SWAKVPool):  # type: ignore[misc]
    """The memories of two pools; what they hold is in the device."""

    def register_mapping(self, mapping: torch.Tensor) -> None:
        """Take the slots of the second pool, by those of the first."""
        self.full_to_swa_index_mapping = mapping

    def translate_loc_from_full_to_swa(self, slots: torch.Tensor) -> torch.Tensor:
        """Return slots of the second pool."""
        return self.full_to_swa_index_mapping[slots]

    def get_state_buf_infos(self) -> Any:
        """Nothing: nobody transfers."""


class Loops:
    """A loop in the place of a kernel, which is called with a grid."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return self.function


def _extend(before: Any, after: Any, last: Any, free: Any, out: Any, *sizes: Any) -> int:
    """Slots from the open page of each row, then from free pages in their order.

    Until 0.5.2 the sizes begin with a tensor that gets the number of new pages, shifted.
    """
    pages, taken, page = free.tolist(), 0, sizes[2 if torch.is_tensor(sizes[0]) else 1]
    new = int((-(-after // page) - -(-before // page)).sum())
    if torch.is_tensor(sizes[0]):
        sizes[0].fill_(new << 32)
    found: list[int] = []
    for low, high, slot in zip(before.tolist(), after.tolist(), last.tolist(), strict=True):
        while low < high and low % page:
            slot += 1
            low += 1
            found.append(slot)
        while low < high:
            if taken >= len(pages):
                return new  # the caller sees it next
            count = min(page, high - low)
            found += range(pages[taken] * page, pages[taken] * page + count)
            low, taken = low + count, taken + 1
    out[: len(found)] = torch.tensor(found, dtype=out.dtype)
    return new


def _decode(lens: Any, last: Any, free: Any, out: Any, *sizes: Any) -> None:
    new = _extend(lens - 1, lens, last, free, out, *sizes)
    if torch.is_tensor(sizes[0]):
        sizes[0].fill_(new)


def assign_rows(rows: Any, table: Any, start: Any, end: Any, slots: Any, *_: Any) -> None:
    """Write slots into rows, at `start` to `end` of each."""
    taken = 0
    for row, low, high in zip(rows.tolist(), start.tolist(), end.tolist(), strict=True):
        table[row, low:high] = slots[taken : taken + high - low].to(table.dtype)
        taken += high - low


def gather_rows(rows: Any, *kept: Any) -> tuple[Any, ...]:
    """The rows of each tensor that is kept."""
    return tuple(part if part is None else part[rows] for part in kept)


#: What is called with a grid, and what without.
KERNELS = {
    "alloc_extend_kernel": Loops(_extend),
    "alloc_decode_kernel": Loops(_decode),
    "assign_req_to_token_pool": Loops(assign_rows),
    "assign_req_to_token_pool_func": assign_rows,
    "gather_spec_extras": gather_rows,
}


def loops_for_kernels() -> None:
    """Put loops in the place of kernels, in each module that has them by name."""
    for name in (
        "mem_cache.allocator.paged",
        "speculative.eagle_info_v2",
        "speculative.spec_utils",
    ):
        with contextlib.suppress(ImportError):
            importlib.import_module(f"sglang.srt.{name}")
    for name, module in list(sys.modules.items()):
        if name.startswith("sglang.srt."):
            for kernel in KERNELS.keys() & vars(module).keys():
                setattr(module, kernel, KERNELS[kernel])


class StateRows(memory_pool.HybridReqToTokenPool if HAS_STATES else object):  # type: ignore[misc]
    """Rows with a recurrent state each, whose temporal part is the key of what it has consumed."""

    def __init__(self, settings: dict[str, Any]) -> None:
        takes = inspect.signature(memory_pool.HybridReqToTokenPool).parameters
        since = {"mamba_spec_state_size": 1, "mamba_layer_ids": [0]}  # 0.5.10
        since |= {"enable_mamba_extra_buffer": False, "enable_overlap_schedule": False}
        conv = [(2, 1)] if "mamba_layer_ids" in takes else (2, 1)
        shape = SimpleNamespace(conv=conv, temporal=(1, 1, 1))
        dtype = SimpleNamespace(conv=torch.int64, temporal=torch.int64)
        super().__init__(
            size=settings["rows"],
            mamba_size=3 * settings["rows"] + settings["spare_states"],  # the least that it takes
            max_context_len=settings["num_tokens"] + 64,
            device="cpu",
            enable_memory_saver=False,
            cache_params=SimpleNamespace(shape=shape, dtype=dtype, layers=[0]),
            **{name: value for name, value in since.items() if name in takes},
        )

    def keys(self) -> torch.Tensor:
        """The keys of all states, int64."""
        keys: torch.Tensor = self.mamba_pool.mamba_cache.temporal.reshape(-1)
        return keys


def make_rows(settings: dict[str, Any]) -> Any:
    """The table of rows, with recurrent states if the case has some."""
    if "spare_states" in settings:
        return StateRows(settings)
    width = settings["num_tokens"] + 64
    if "rows_to_come" in settings:
        from lab.engines import sglang_decode  # newer releases have other transfers

        return sglang_decode.make_rows(settings, width)
    return memory_pool.ReqToTokenPool(settings["rows"], width, "cpu", False)


def make_allocator(settings: dict[str, Any], device: Device) -> Any:
    """The allocator of slots, with a second pool if the case has a window."""
    page = settings["page"]
    size = settings["num_tokens"] // page * page
    if settings.get("window"):
        pair = WindowPools.__new__(WindowPools)
        pair.full_kv_pool, pair.swa_kv_pool = device.target, device.target
        size_swa = settings["window_tokens"] // page * page
        kind = WINDOW_ALLOCATOR
        return kind(size, size_swa, page, torch.float16, "cpu", pair, False)
    if page == 1:
        return allocators.TokenToKVPoolAllocator(size, torch.float16, "cpu", device.target, False)
    return allocators.PagedTokenToKVPoolAllocator(
        size, page, torch.float16, "cpu", device.target, False
    )
