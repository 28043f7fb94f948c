"""The part of `held_states` that imports vLLM: `python -m benches.held_states_vllm`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from vllm.config.mamba import MambaBackendEnum
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Shapes
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
)

from benches.held_states import (
    NUM_DRAFTS,
    PAGE_SIZE,
    Recurrent,
    StateMemory,
    read_job,
    replay,
)
from benches.vllm_setup import request

MAX_LEN = 1 << 13
#: Tokens of a block in mode `align`: as few as vLLM takes (docs/vllm.md).
ALIGNED = 528
#: Records of a ring; vLLM's own default.
RING = 16
#: Types of models whose states vLLM can keep as records (`supports_replayssm`).
RINGS = ("nemotron_h",)


class BlockStates(StateMemory):
    """The blocks of vLLM's `MambaManager`, beside a group with attention."""

    def __init__(self, spec: Any, num_requests: int) -> None:
        aligned = spec.mamba_cache_mode == "align"
        self.block_size = spec.block_size if aligned else PAGE_SIZE
        attention = FullAttentionSpec(
            block_size=self.block_size, num_kv_heads=1, head_size=1, dtype=torch.bfloat16
        )
        groups = [KVCacheGroupSpec(["full"], attention), KVCacheGroupSpec(["states"], spec)]
        self.manager = KVCacheManager(
            KVCacheConfig(
                num_blocks=num_requests * (MAX_LEN // PAGE_SIZE),
                kv_cache_tensors=[],
                kv_cache_groups=groups,
            ),
            max_model_len=MAX_LEN,
            scheduler_block_size=spec.block_size,
            hash_block_size=self.block_size,
            enable_caching=aligned,
        )
        self._requests: dict[int, Any] = {}

    def begin(self, number: int, prompt_len: int) -> None:
        """Prefill in chunks of whole blocks where states are kept; no two texts are alike."""
        first = number * MAX_LEN
        wanted = request(str(number), range(first, first + prompt_len), self.block_size)
        self._requests[number] = wanted
        chunk = self.block_size if self.manager.enable_caching else prompt_len
        while wanted.num_computed_tokens < prompt_len:
            self._allocate(wanted, min(chunk, prompt_len - wanted.num_computed_tokens))
        wanted.append_output_token_ids([first])

    def decode(self, accept_lens: Mapping[int, int]) -> None:
        """A round reads the root and its drafts; what they accept is computed behind it."""
        for number, accept_len in accept_lens.items():
            wanted = self._requests[number]
            self._allocate(wanted, 1 + NUM_DRAFTS)
            wanted.num_computed_tokens += accept_len - 1 - NUM_DRAFTS
            wanted.append_output_token_ids([number] * accept_len)

    def _allocate(self, wanted: Any, num_tokens: int) -> None:
        given = self.manager.allocate_slots(wanted, num_tokens, num_lookahead_tokens=NUM_DRAFTS)
        assert given is not None
        wanted.num_computed_tokens += num_tokens

    def end(self, number: int) -> None:
        """Free the request."""
        self.manager.free(self._requests.pop(number))

    def num_held(self) -> int:
        """The blocks of states that requests hold."""
        _, states = self.manager.coordinator.single_type_managers
        return sum(
            not block.is_null for blocks in states.req_to_blocks.values() for block in blocks
        )


def spec_of(model: Recurrent, way: str) -> Any:
    """Return what vLLM keeps of a recurrent layer, with its own shapes."""
    dim, width = model.conv
    shapes = Shapes.short_conv_state_shape(1, dim, width, num_spec=NUM_DRAFTS)
    dtypes: tuple[Any, ...] = (torch.bfloat16,)
    if model.state:
        shapes, dtypes = (*shapes, tuple(model.state)), (*dtypes, torch.float32)
    if way == "ring":
        rest = {"n_groups": model.num_groups, "tp_world_size": 1, "logical_window": RING}
        rest |= {"backend": MambaBackendEnum.FLASHINFER, "num_speculative_tokens": NUM_DRAFTS}
        shapes = Shapes.append_replayssm_ring(shapes, **rest)
        dtypes = (*dtypes, torch.bfloat16, torch.float32, torch.bfloat16)
    return MambaSpec(
        block_size=ALIGNED if way == "align" else MAX_LEN,
        shapes=shapes,
        dtypes=dtypes,
        mamba_cache_mode="align" if way == "align" else "none",
        num_speculative_blocks=0 if way == "ring" else NUM_DRAFTS,
    )


def main() -> None:
    """Answer the job on the standard input."""
    visits, models = read_job()
    answer = {}
    for name, model in models.items():
        ways = ["none", "align", *(["ring"] if model.kind in RINGS else [])]
        specs = {way: spec_of(model, way) for way in ways}
        answer[name] = {
            way: [
                num_states := replay(visits, BlockStates(spec, len(visits))),
                num_states * model.num_layers * spec.page_size_bytes,
            ]
            for way, spec in specs.items()
        }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
