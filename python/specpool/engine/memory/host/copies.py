"""`HostMemory`: the memory of host pages, and the copies between it and a cache's pages.

Copies are enqueued on torch's current stream. It must be the stream of the forwards, so that later
forwards run after the copies.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from specpool import kernels
from specpool._core import Ledger
from specpool.capacity.group_sizes import USUAL_ROW_TOKENS
from specpool.engine.memory.host.copy_cost import CopyCost
from specpool.engine.memory.host.handle import Moves
from specpool.engine.memory.host.pages import Pages
from specpool.engine.memory.kv_cache import KVCache
from specpool.engine.memory.pools import free_bytes
from specpool.errors import ConfigError
from specpool.kernels.transfer import upload
from specpool.kernels.twin_moves import PageBlocked

# Bytes of each group's staging space on the device, through which pages are copied.
_STAGED_BYTES = 32 << 20
# CUDA's flag: pinned for every device, not for the thread's current one alone.
_PORTABLE = 1
# Bytes of each group in a copy that is timed at the start, and the number of repetitions. The first
# repetition warms up.
_TIMED_BYTES = 4 << 20
_NUM_TIMED = 4


def whole_row_pages(ledger: Ledger) -> list[int]:
    """Return the most pages of each group that a row of the whole context holds."""
    last = ledger.max_context_len - 1
    needs = ledger.pages_needed(last, last, 0).tolist()
    row_pages = [-(-(last + 1) // group.page_size) for group in ledger.groups]
    return [min(pair) for pair in zip(needs, row_pages, strict=True)]


class HostMemory:
    """Memory for the host pages of every group, pinned if the device is a GPU.

    The slots of a state group are the pages of one more group.

    Attributes:
        num_pages: host pages of each group.
        page_bytes: bytes of a page of each group, in all of its layers.
    """

    def __init__(
        self,
        ledger: Ledger,
        cache: KVCache,
        host_bytes: int,
        slots: Sequence[torch.Tensor] = (),
    ) -> None:
        """Allocate the memory and time a few copies.

        Args:
            ledger: a new ledger, because timing copies pages of the cache to the host and back.
            cache: holds the KV of all layers.
            host_bytes: bytes for the pages of all groups.
            slots: the states of recurrent layers, each [num_slots + 1, ...].

        Raises:
            ConfigError: `host_bytes` does not hold one row of the whole context, or is more than
                the host has free.
        """
        self._device = cache.device
        pages = [
            [b.view(len(b) // group.page_size, -1) for b in group_buffers(cache, g)]
            for g, group in enumerate(ledger.groups)
        ]
        needs = whole_row_pages(ledger)
        on_device = [group.num_pages for group in ledger.groups]
        if slots:
            pages.append([s.view(len(s), -1).view(torch.uint8) for s in slots])
            needs.append(1)
            on_device.append(ledger.states[0].num_slots)
        self.page_bytes = [sum(b[0].numel() * b.itemsize for b in buffers) for buffers in pages]
        row_bytes = self._num_bytes(needs)
        if host_bytes < row_bytes:
            raise ConfigError(
                f"one row of {ledger.max_context_len} tokens needs {row_bytes} bytes on the host, "
                f"host_bytes is {host_bytes}: raise it, or lower max_context_len"
            )
        if host_bytes > (free := free_bytes(torch.device("cpu"))):
            raise ConfigError(f"host_bytes is {host_bytes}, {free} are free on the host: lower it")
        self.num_pages = [host_bytes * need // row_bytes for need in needs]
        if slots:
            self.num_pages = self._with_states(host_bytes, needs, ledger.max_context_len)
        self._groups = [
            _Group(buffers, n) for buffers, n in zip(pages, self.num_pages, strict=True)
        ]
        self.out, self.back = self._timed(on_device)

    def _with_states(self, host_bytes: int, needs: Sequence[int], context_len: int) -> list[int]:
        """Return the host pages of each group, and the state slots: for rows of usual length.

        A row of the whole context may have hundreds of times a state's bytes, and most rows are
        shorter. So there is a slot for every `USUAL_ROW_TOKENS` tokens of KV, or for as many as
        take a state's bytes.
        """
        *kv_needs, _ = needs
        kv_bytes, slot_bytes = self._num_bytes([*kv_needs, 0]), self.page_bytes[-1]
        if not kv_bytes:
            num_slots = host_bytes // slot_bytes
            return [*(num_slots * need for need in kv_needs), num_slots]
        usual_bytes = max(USUAL_ROW_TOKENS * kv_bytes // context_len, slot_bytes)
        num_slots = host_bytes // (slot_bytes + min(usual_bytes, kv_bytes))
        num_slots = max(min(num_slots, (host_bytes - kv_bytes) // slot_bytes), 1)
        kv_room = host_bytes - num_slots * slot_bytes
        return [*(kv_room * need // kv_bytes for need in kv_needs), num_slots]

    def save(self, moves: Moves) -> None:
        """Copy pages of the device to host pages."""
        start = time.perf_counter()
        for group, (device_pages, pages) in zip(self._groups, moves, strict=True):
            group.save(device_pages, pages)
        self._watch(self.out, moves, start)

    def load(self, moves: Moves) -> None:
        """Copy host pages to pages of the device."""
        start = time.perf_counter()
        for group, (device_pages, pages) in zip(self._groups, moves, strict=True):
            group.load(device_pages, pages)
        self._watch(self.back, moves, start)

    def seconds(self, num_pages: Sequence[int]) -> float:
        """Estimate the seconds to copy `num_pages` of each group to the host and back."""
        num_bytes = self._num_bytes(num_pages)
        return self.out.seconds(num_bytes) + self.back.seconds(num_bytes)

    def _num_bytes(self, num_pages: Sequence[int]) -> int:
        return sum(n * size for n, size in zip(num_pages, self.page_bytes, strict=True))

    def _watch(self, cost: CopyCost, moves: Moves, start: float) -> None:
        """Update the cost with the seconds of a copy, on a CPU, where the copy is done by now."""
        num_bytes = self._num_bytes([len(pages) for _, pages in moves])
        if num_bytes and self._device.type == "cpu":
            cost.observe(num_bytes, time.perf_counter() - start)

    def _timed(self, on_device: Sequence[int]) -> tuple[CopyCost, CopyCost]:
        """Measure the cost of copies to the host and back, with one page and with several."""
        several = [
            min(num_host, num_device, max(_TIMED_BYTES // max(size, 1), 1))
            for num_host, num_device, size in zip(
                self.num_pages, on_device, self.page_bytes, strict=True
            )
        ]
        single = [1] * len(several)
        least = [[float("inf")] * 2, [float("inf")] * 2]  # [few, most][out, back], seconds
        for _ in range(_NUM_TIMED):
            for seconds, num_pages in zip(least, (single, several), strict=True):
                for direction in (0, 1):
                    seconds[direction] = min(
                        seconds[direction], self._time(num_pages, back=direction == 1)
                    )
        sizes = self._num_bytes(single), self._num_bytes(several)
        out, back = (
            CopyCost(
                *((size, seconds[direction]) for size, seconds in zip(sizes, least, strict=True))
            )
            for direction in (0, 1)
        )
        return out, back

    def _time(self, num_pages: Sequence[int], *, back: bool) -> float:
        """Return the seconds of a copy of each group's first pages; their content stays."""
        _synchronize(self._device)
        start = time.perf_counter()
        for group, n in zip(self._groups, num_pages, strict=True):
            (group.load if back else group.save)(np.arange(1, n + 1, dtype=np.int32), np.arange(n))
        _synchronize(self._device)
        return time.perf_counter() - start


class _Group:
    """One group's host pages. Each is one run of bytes, with the slots of all layers."""

    def __init__(self, layers: Sequence[torch.Tensor], num_pages: int) -> None:
        """Allocate `num_pages`; `layers` are keys and values, each [num_device_pages, ...].

        Without layers, as in a model without attention, there is nothing to copy.
        """
        self._has_layers = bool(layers)
        if not layers:
            return
        device = layers[0].device
        self._fields = kernels.Fields.of(layers, 1)
        widths = self._fields.widths
        page_bytes = sum(widths)
        self._memory = _host_memory(num_pages, page_bytes, device)
        num_staged = min(max(_STAGED_BYTES // page_bytes, 1), num_pages)
        self._staged = torch.empty(num_staged, page_bytes, dtype=torch.uint8, device=device)
        self._staging = kernels.Fields.of([PageBlocked(self._staged, 1, widths)], 1)

    def save(self, device_pages: npt.NDArray[np.int32], pages: Pages) -> None:
        for part, runs in self._parts(pages):
            (slots,) = upload(self._staged.device, device_pages[part])
            kernels.gather_kv(self._fields, slots, out=self._staging)
            for staged, first, end in runs:
                self._memory[first:end].copy_(self._staged[staged], non_blocking=True)

    def load(self, device_pages: npt.NDArray[np.int32], pages: Pages) -> None:
        for part, runs in self._parts(pages):
            for staged, first, end in runs:
                self._staged[staged].copy_(self._memory[first:end], non_blocking=True)
            (slots,) = upload(self._staged.device, device_pages[part])
            kernels.scatter_kv(self._fields, slots, self._staging)

    def _parts(self, pages: Pages) -> list[tuple[slice, list[tuple[slice, int, int]]]]:
        """Split pages into parts that fit the staging space; none if there is nothing to copy.

        Returns:
            For each part, its slice of `pages` and its runs of consecutive host pages. A run is
            (slice of the staging space, first host page, end of the host pages).
        """
        parts: list[tuple[slice, list[tuple[slice, int, int]]]] = []
        if not self._has_layers:
            return parts
        for start in range(0, len(pages), len(self._staged)):
            part = slice(start, min(start + len(self._staged), len(pages)))
            edges = (np.flatnonzero(np.diff(pages[part]) != 1) + 1).tolist()
            runs = [
                (slice(a, b), int(pages[start + a]), int(pages[start + b - 1]) + 1)
                for a, b in zip([0, *edges], [*edges, part.stop - start], strict=True)
            ]
            parts.append((part, runs))
        return parts


def _host_memory(num_pages: int, page_bytes: int, device: torch.device) -> torch.Tensor:
    """Return memory for the pages of `device`, uint8 [num_pages, page_bytes]; pinned for a GPU."""
    memory = torch.empty(num_pages, page_bytes, dtype=torch.uint8)
    if device.type == "cuda":
        _pin(memory)
    return memory


def _pin(memory: torch.Tensor) -> None:
    """Pin a tensor's pages in the host's memory for as long as it exists.

    `torch.empty(..., pin_memory=True)` would take the next power of two: 128 GiB for 65.

    Raises:
        ConfigError: the driver refuses.
    """
    torch_cuda: Any = torch.cuda  # only some versions of torch have types for it
    cuda = torch_cuda.cudart()
    address, num_bytes = memory.data_ptr(), memory.nbytes
    error = int(cuda.cudaHostRegister(address, num_bytes, _PORTABLE))
    if error:
        raise ConfigError(
            f"the CUDA driver cannot pin {num_bytes} bytes of host memory (error {error}): lower "
            "host_bytes, or raise the limit of locked memory (ulimit -l)"
        )
    weakref.finalize(memory.untyped_storage(), cuda.cudaHostUnregister, address).atexit = False


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def group_buffers(cache: KVCache, group: int) -> list[torch.Tensor]:
    """Return the keys and values of a group's layers, without empty buffers."""
    layers = [i for i, g in enumerate(cache.layer_groups) if g == group]
    return [buffer for buffer in cache.buffers(layers) if buffer.numel()]
