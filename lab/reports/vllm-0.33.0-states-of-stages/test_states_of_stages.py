"""For vLLM's tests/v1/core: the least pool, states in `align` mode, and steps in flight."""

from collections import deque

import pytest
import torch

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.structured_output import StructuredOutputManager

from .utils import create_requests, create_scheduler

pytestmark = pytest.mark.cpu_test

BLOCK = 16


def hybrid_scheduler(stages):
    """A scheduler with as many blocks as the start-up check asks for, and the null block."""
    config = create_scheduler(
        max_num_batched_tokens=3 * BLOCK,
        max_model_len=8 * BLOCK,
        block_size=BLOCK,
        enable_prefix_caching=True,
        pipeline_parallel_size=stages,
    ).vllm_config
    config.cache_config.mamba_cache_mode = "align"
    assert config.max_concurrent_batches == stages
    specs = [
        FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32),
        MambaSpec(
            block_size=BLOCK,
            shapes=((1, 1),),
            dtypes=(torch.float32,),
            mamba_cache_mode="align",
        ),
    ]
    num_blocks = 1 + sum(
        spec.max_memory_usage_bytes(config) // spec.page_size_bytes for spec in specs
    )
    config.cache_config.num_gpu_blocks = num_blocks
    return Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[
                KVCacheGroupSpec([f"layer{at}"], spec) for at, spec in enumerate(specs)
            ],
        ),
        block_size=BLOCK,
        hash_block_size=BLOCK,
        structured_output_manager=StructuredOutputManager(config),
    )


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_two_prompts_end_in_the_pool_that_is_asked_for_at_the_start(stages):
    scheduler = hybrid_scheduler(stages)
    scheduler.use_v2_model_runner = False
    coming = deque(create_requests(num_requests=2, num_tokens=8 * BLOCK - 4, max_tokens=2))
    launched = deque()
    for turn in range(300):
        if coming and turn % 3 == 0:
            scheduler.add_request(coming.popleft())
        if not coming and not scheduler.requests:
            return
        if scheduler.requests:
            output = scheduler.schedule()
            requests = [scheduler.requests[name] for name in output.num_scheduled_tokens]
            done = [request.num_computed_tokens >= request.num_tokens for request in requests]
            launched.append((output, done))
            if output.total_num_scheduled_tokens and len(launched) < stages:
                continue
        if launched:
            output, done = launched.popleft()
            names = list(output.num_scheduled_tokens)
            result = ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: index for index, name in enumerate(names)},
                sampled_token_ids=[[7] if is_done else [] for is_done in done],
            )
            scheduler.update_from_output(output, result)
    raise AssertionError(f"{len(scheduler.requests)} requests never end")
