"""The part of `held_states` that imports SGLang: `python -m benches.held_states_sglang`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.mem_cache.memory_pool import GB, HybridReqToTokenPool, MambaPool

from benches.held_states import NUM_DRAFTS, Recurrent, StateMemory, read_job, replay

NODES = 1 + NUM_DRAFTS
#: Types of models whose drafts SGLang can keep as records (`--enable-linear-replayssm-spec`).
RINGS = ("qwen3_next", "qwen3_5_moe_text")


class PoolStates(StateMemory):
    """The states that SGLang's rows hold; `tracked` is its strategy `extra_buffer`."""

    def __init__(self, params: Any, num_requests: int, *, tracked: bool) -> None:
        self.size = 3 * num_requests
        self.rows = HybridReqToTokenPool(
            size=num_requests,
            mamba_size=self.size,
            mamba_spec_state_size=num_requests,
            max_context_len=8,
            device="cpu",
            enable_memory_saver=False,
            cache_params=params,
            mamba_layer_ids=params.layers,
            enable_mamba_extra_buffer=tracked,
            speculative_num_draft_tokens=NODES,
            speculative_eagle_topk=1,
        )
        self._requests: dict[int, Any] = {}

    def begin(self, number: int, prompt_len: int) -> None:
        """Take a row."""
        wanted = SimpleNamespace(kv=ReqKvInfo())
        assert self.rows.alloc([wanted]) is not None
        self._requests[number] = wanted

    def decode(self, accept_lens: Mapping[int, int]) -> None:
        """Drafts have states of their own in each row, whatever is accepted."""

    def end(self, number: int) -> None:
        """Give back the states and the row."""
        wanted = self._requests.pop(number)
        self.rows.free_mamba_cache(wanted)
        self.rows.free_rows([wanted.kv.req_pool_idx])

    def num_held(self) -> int:
        """States that are not free."""
        num_free: int = self.rows.mamba_allocator.available_size()
        return self.size - num_free


def params_of(model: Recurrent, *, num_layers: int) -> Any:
    """Return what SGLang keeps of recurrent layers, with its own shapes."""
    dim, width = model.conv
    shape = Mamba2StateShape.create_full_rank(
        tp_world_size=1, intermediate_size=dim, state_size=0, conv_kernel=width
    )
    if model.state:
        # Mamba-1 has a head for each channel.
        heads, *sizes = model.state
        state = (heads, *([1] * (2 - len(sizes))), *sizes)
        shape = replace(shape, temporal=state, num_k_heads_per_tp=model.num_groups)
    dtype = Mamba2StateDType(conv=torch.bfloat16, temporal=torch.float32)
    return Mamba2CacheParams(shape=shape, dtype=dtype, layers=[*range(num_layers)])


def num_bytes(params: Any, size: int, num_requests: int, *, ring: bool) -> int:
    """Return what SGLang's pool of so many states and requests takes; nothing is allocated."""
    pool = MambaPool(
        size=size,
        spec_state_size=num_requests,
        cache_params=params,
        mamba_layer_ids=params.layers,
        device="meta",
        speculative_num_draft_tokens=NODES,
        speculative_eagle_topk=1,
        enable_linear_replayssm_spec=ring,
    )
    total: int = round(pool.mem_usage * GB)
    return total


def main() -> None:
    """Answer the job on the standard input."""
    visits, models = read_job()
    least = params_of(Recurrent(1, "", (1, 2), (1, 1, 1), 1), num_layers=1)
    held = {
        tracked: replay(visits, PoolStates(least, len(visits), tracked=tracked))
        for tracked in (False, True)
    }
    answer: dict[str, dict[str, list[float]]] = {}
    for name, model in models.items():
        params = params_of(model, num_layers=model.num_layers)
        answer[name] = {}
        for way, tracked, ring in (
            ("none", False, False),
            ("tracked", True, False),
            ("ring", False, True),
        ):
            if ring and model.kind not in RINGS:
                continue
            once = num_bytes(params, 1, 1, ring=ring)
            state = num_bytes(params, 2, 1, ring=ring) - once
            row = num_bytes(params, 1, 2, ring=ring) - once
            answer[name][way] = [held[tracked], held[tracked] * state + row]
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
