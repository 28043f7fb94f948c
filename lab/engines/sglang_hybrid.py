"""`HybridLoop`: today's SGLang for models with windows or recurrent layers, on a CPU.

The pools and the tree are SGLang's own, as its constructor makes them for such a model. A window's
pool has slots of its own, which its steps find through SGLang's mapping of slots. A recurrent state
is the key of exactly the tokens that it has consumed.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import sglang_loop
import torch
from sglang.srt.mem_cache.allocation_sizing import get_req_to_token_extra_context_len
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_exec
from sglang.srt.server_args import ServerArgs
from sglang_device import KV, Device

from lab.engines.sglang_states import StateSteps, StateText, state_rows


@dataclasses.dataclass(frozen=True)
class HybridSetup(sglang_loop.Setup):  # type: ignore[misc]
    """A run of a model with other layers than full attention."""

    window: int = 0  # positions before a query that it reads; 0 is no window
    window_tokens: int = 0  # slots of the window's pool
    states: int = 0  # of the pool of recurrent states; 0 is none
    strategy: str = "auto"  # of SGLang for recurrent states
    grain: int = 64  # tokens between two states that a prefill leaves
    interval: int = 256  # and a decode
    most_states: int = -1  # cached on a path of the tree


class WindowPools(SWAKVPool):  # type: ignore[misc]
    """The memories of both pools; what they hold is in the device."""

    def __init__(self, device: HybridDevice) -> None:
        self.full_kv_pool, self.swa_kv_pool = device.target, device.window
        self.device, self.full_to_swa_index_mapping = "cpu", None


class HybridDevice(Device):  # type: ignore[misc]
    """A device whose steps also write and read the slots of a window.

    `begins` has the first position that the running step computes, by the request's id: a step
    reads the window before it, and what it writes.
    """

    def __init__(self, setup: HybridSetup, size: int) -> None:
        page = setup.page_size
        super().__init__(size + page, page)
        self.reach = setup.window
        self.window = KV(setup.window_tokens + page)
        self.pools = WindowPools(self)
        self.begins: dict[str, int] = {}

    def mapped(self, slots: Any) -> Any:
        """Return the window's slots of slots, by SGLang's mapping; 0 is none."""
        mapping: Any = self.pools.full_to_swa_index_mapping
        return mapping[torch.from_numpy(slots.astype(np.int64))].numpy()

    def write(self, kv: KV, slots: Any, keys: Any, what: str) -> None:
        """Write KV, of the target in both pools."""
        super().write(kv, slots, keys, what)
        if kv is self.target and self.reach:
            super().write(self.window, self.mapped(slots), keys, f"{what} of a window")

    def read(self, kv: KV, slots: Any, keys: Any, what: str) -> None:
        """Read KV, of the target in both pools; the positions that a window has left are free."""
        if kv is self.target and self.reach:
            begin = max(0, self.begins[what.partition(" ")[0]] - self.reach)
            mapped = self.mapped(slots)
            free = np.arange(len(slots)) < begin
            self.read(self.window, mapped, np.where(free, self.window.held[mapped], keys), what)
        known = len(self.faults)
        super().read(kv, slots, keys, what)
        if kv is self.window and len(self.faults) > known:
            self.faults[-1] = self.faults[-1].replace(" target slots", " window slots")


class HybridLoop(sglang_loop.Loop):  # type: ignore[misc]
    """SGLang's scheduler over a fake model with a window or with recurrent layers."""

    def _arguments(self) -> ServerArgs:
        given = super()._arguments()
        if self.setup.states:
            given.mamba_radix_cache_strategy = self.setup.strategy
            given.mamba_track_interval = self.setup.interval
            given.mamba_max_states_per_path = self.setup.most_states
            given._mamba_cache_chunk_size = max(self.setup.grain, self.setup.page_size)
        return given

    def _init_memory(self) -> None:
        setup = self.setup
        size = self.max_total_num_tokens = setup.num_tokens // setup.page_size * setup.page_size
        self.max_req_len = setup.num_tokens
        self.simulated = HybridDevice(setup, size)
        width = self.max_req_len + 4 + get_req_to_token_extra_context_len()
        self.req_to_token_pool = (
            state_rows(setup, width)
            if setup.states
            else ReqToTokenPool(setup.num_rows, width, setup.device, False)
        )
        self.token_to_kv_pool_allocator = self._make_allocator(size)
        kinds = [ComponentType.FULL]
        kinds += [ComponentType.SWA] if setup.window else []
        kinds += [ComponentType.MAMBA] if setup.states else []
        self.tree_cache = UnifiedRadixCache(
            CacheInitParams(
                disable=not setup.cache,
                req_to_token_pool=self.req_to_token_pool,
                token_to_kv_pool_allocator=self.token_to_kv_pool_allocator,
                page_size=setup.page_size,
                is_eagle=setup.shape is not None,
                chunked_prefill_size=setup.chunk_size,
                sliding_window_size=setup.window or None,
                enable_mamba_extra_buffer=get_exec().mamba.enable_mamba_extra_buffer,
                enable_mamba_extra_buffer_lazy=get_exec().mamba.enable_mamba_extra_buffer_lazy,
                tree_components=tuple(kinds),
            )
        )

    def _make_allocator(self, size: int) -> Any:
        setup, device = self.setup, self.simulated
        kind = (torch.float16, setup.device)
        if setup.window:
            sizes = (size, setup.window_tokens, setup.page_size)
            return SWATokenToKVPoolAllocator(*sizes, *kind, device.pools, False)
        if setup.page_size == 1:
            return TokenToKVPoolAllocator(size, *kind, device.target, False)
        return PagedTokenToKVPoolAllocator(size, setup.page_size, *kind, device.target, False)

    def _init_kinds(self) -> None:
        setup = self.setup
        self.is_hybrid_swa, self.is_hybrid_ssm = bool(setup.window), bool(setup.states)
        self.sliding_window_size = setup.window or None
        if setup.window:
            self.full_tokens_per_layer = self.max_total_num_tokens
            self.swa_tokens_per_layer = setup.window_tokens
        self.model_worker.hook = self._before
        if setup.states:
            self.model_config.hf_text_config = SimpleNamespace(mamba_chunk_size=setup.grain)
            torch.Tensor.pin_memory = lambda tensor, *_, **__: tensor  # type: ignore[method-assign]
            self.text_kind = StateText
            self.state_steps = StateSteps(self.model_worker, self.req_to_token_pool, setup)

    def _before(self, phase: str, batch: Any) -> None:
        """Say where each request's step begins, and what state it reads, before it runs."""
        if phase == "extend":
            begins = list(batch.prefix_lens)
        else:  # without drafts, the token that a step computes is in its length
            begins = [length - (self.setup.shape is None) for length in batch.seq_lens.tolist()]
        names = [req.rid for req in batch.reqs]
        self.simulated.begins = dict(zip(names, begins, strict=True))
        if self.setup.states:
            self.state_steps.begin(phase, batch, begins)

    def finish(self) -> sglang_loop.Outcome:
        """Close the sessions, and drop the cache."""
        self.traffic.close()
        self.on_idle()
        tree = self.tree_cache
        sizes = {"num_tokens": tree.full_evictable_size()}
        if self.is_hybrid_swa:
            sizes["swa_num_tokens"] = tree.swa_evictable_size()
        if self.is_hybrid_ssm:
            sizes["mamba_num"] = tree.mamba_evictable_size()
        tree.evict(EvictParams(**sizes))
        return self.outcome
