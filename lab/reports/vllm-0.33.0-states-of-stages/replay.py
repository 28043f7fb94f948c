"""Two prompts on vLLM's own scheduler, with the blocks that vLLM's start-up check asks for, and more.

    python replay.py        # vLLM's Python on the path, HF_HUB_OFFLINE=1 and the config of opt-125m

It needs vLLM alone, and no GPU: a step only says a token when the prompt is computed. A step's result
is given back when as many steps are launched as the pipeline has stages. If a prompt never ends in a
pool in which it ends without a pipeline, the exit code is 1.
"""

import inspect
import sys
from collections import deque
from dataclasses import fields

import torch
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK, LENGTH, BUDGET = 8, 64, 24  # tokens of a block, of the longest request, and of a step
PROMPTS = (57, 60)  # the second comes three turns later


def only(kind, **given):
    names = inspect.signature(kind).parameters
    return {name: value for name, value in given.items() if name in names}


def make_config(stages):
    config = VllmConfig(
        scheduler_config=SchedulerConfig(
            max_num_seqs=6, max_num_batched_tokens=BUDGET, max_model_len=LENGTH,
            enable_chunked_prefill=True, is_encoder_decoder=False,
        ),
        model_config=ModelConfig(
            model="facebook/opt-125m", dtype="float16", max_model_len=LENGTH,
            skip_tokenizer_init=True,
        ),
        cache_config=CacheConfig(block_size=BLOCK, **only(CacheConfig, swap_space=0)),
    )  # fmt: skip
    config.parallel_config.pipeline_parallel_size = stages
    config.scheduler_config.async_scheduling = False
    config.cache_config.enable_prefix_caching = True
    config.cache_config.block_size = BLOCK
    config.cache_config.mamba_cache_mode = "align"
    config.cache_config.mamba_block_size = BLOCK
    return config


SPECS = [
    FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32),
    MambaSpec(
        block_size=BLOCK, shapes=((1,),), dtypes=(torch.float32,), mamba_cache_mode="align"
    ),
]  # fmt: skip


def asked_for(config):
    """Blocks of a request of the greatest length, as vLLM counts them, and its null block."""
    return 1 + sum(-(-spec.max_memory_usage_bytes(config) // spec.page_size_bytes) for spec in SPECS)


def turns_to_end(stages, num_blocks):
    """Turns until both requests have ended; None if they have not after 1,000."""
    config = make_config(stages)
    config.cache_config.num_gpu_blocks = num_blocks
    scheduler = Scheduler(
        vllm_config=config, structured_output_manager=StructuredOutputManager(config),
        kv_cache_config=KVCacheConfig(
            num_blocks=num_blocks, kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec([f"layer{at}"], s) for at, s in enumerate(SPECS)],
        ),
        block_size=BLOCK, **only(Scheduler.__init__, hash_block_size=BLOCK),
    )  # fmt: skip
    scheduler.use_v2_model_runner = False
    kv_cache_utils.init_none_hash(sha256)
    hasher = kv_cache_utils.get_request_block_hasher(BLOCK, sha256)
    launched, coming = deque(), deque(enumerate(PROMPTS))
    for turn in range(1000):
        if coming and turn >= 3 * coming[0][0]:
            number, length = coming.popleft()
            scheduler.add_request(Request(**only(
                Request.__init__, request_id=str(number), arrival_time=float(number),
                prompt_token_ids=[*range(100 * number + 3, 100 * number + 3 + length)],
                sampling_params=SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True),
                pooling_params=None, eos_token_id=None, block_hasher=hasher,
            )))  # fmt: skip
        if not coming and not scheduler.requests:
            return turn
        if scheduler.requests:
            output = scheduler.schedule()
            done = {
                name: scheduler.requests[name].num_computed_tokens
                >= scheduler.requests[name].num_tokens
                for name in output.num_scheduled_tokens
            }
            launched.append((output, done))
            if output.total_num_scheduled_tokens and len(launched) < stages:
                continue
        if launched:
            process(scheduler, *launched.popleft())
    return None


def process(scheduler, output, done):
    names = list(output.num_scheduled_tokens)
    given = dict(req_ids=names, req_id_to_index={name: at for at, name in enumerate(names)},
                 sampled_token_ids=[[7] if done[name] else [] for name in names],
                 logprobs=None, prompt_logprobs_dict={}, pooler_output=[])  # fmt: skip
    has = {field.name for field in fields(ModelRunnerOutput)}
    result = ModelRunnerOutput(**{name: value for name, value in given.items() if name in has})
    scheduler.update_from_output(output, result)


is_bad = False
for stages in range(1, 5):
    asked = asked_for(make_config(stages))
    for spare in range(5):
        turns = turns_to_end(stages, asked + spare)
        is_bad |= turns is None
        ends = "one never ends" if turns is None else f"both end within {turns} turns"
        print(f"{stages} stages, {asked} blocks asked for, {spare} more: {ends}")
sys.exit(is_bad)
