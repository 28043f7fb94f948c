"""vLLM's scheduler as its engine core makes it, for every release that the laboratory knows.

What differs between releases is asked for here, by its name or its signature, and nowhere else.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    KVTransferConfig,
    LoRAConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.lora.request import LoRARequest
from vllm.model_executor.models import registry
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched import interface
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from lab.engines.content import STOP
from lab.engines.vllm_home import MODEL, least_blocks
from lab.engines.vllm_images import features, install

#: Bytes of a block on the host: its pages have as many.
HOST_BLOCK = 4096
#: Since 0.15; None before.
PauseState: Any = getattr(interface, "PauseState", None)


def _described(*_: Any) -> Any:
    """What vLLM would find in the class of the model, for which it starts a process."""
    values: dict[str, Any] = {
        "architecture": "OPTForCausalLM",
        "attn_type": "decoder",
        "default_seq_pooling_type": "LAST",
        "default_tok_pooling_type": "ALL",
        "score_type": "bi-encoder",
        "supported_video_pruning_methods": (),
        "is_text_generation_model": True,
        "supports_pp": True,
    }
    names = [field.name for field in dataclasses.fields(registry._ModelInfo)]
    return registry._ModelInfo(**{name: values.get(name, False) for name in names})


registry._LazyRegisteredModel.inspect_model_cls = _described


def known_fields(kind: type, **given: Any) -> dict[str, Any]:
    """Return those of the arguments that a dataclass of this release has."""
    names = {field.name for field in dataclasses.fields(kind)}
    return {name: value for name, value in given.items() if name in names}


def make_scheduler(settings: Mapping[str, Any]) -> Any:
    """Return vLLM's `Scheduler` or `AsyncScheduler` over a KV cache without tensors."""
    config = _config(settings)
    sizes = [group["block"] for group in settings["groups"]]
    block_size = math.lcm(*sizes)
    kinds = [group["kind"] for group in settings["groups"]]
    if len(kinds) == 1 or "states" in kinds:
        config.cache_config.block_size = block_size  # as vLLM has it, and others read it
    if "states" in kinds:
        config.cache_config.mamba_cache_mode = "align"
        config.cache_config.mamba_block_size = block_size
    num_blocks = least_blocks(settings) + settings["spare"]
    config.cache_config.num_gpu_blocks = num_blocks
    cache = KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=_tensors(settings, num_blocks),
        kv_cache_groups=[
            KVCacheGroupSpec([f"layer{at}"], _spec(group, settings["drafts"]))
            for at, group in enumerate(settings["groups"])
        ],
    )
    kind = AsyncScheduler if settings["asynchronous"] else Scheduler
    given = {
        "vllm_config": config,
        "kv_cache_config": cache,
        "structured_output_manager": StructuredOutputManager(config),
        "block_size": block_size,
        "hash_block_size": math.gcd(*sizes),
        "log_stats": False,
    }
    takes = inspect.signature(Scheduler.__init__).parameters
    scheduler = kind(**{name: value for name, value in given.items() if name in takes})
    scheduler.use_v2_model_runner = False  # the worker here mirrors the first runner's rows
    if settings.get("images"):
        install(scheduler, settings["images"])
    return scheduler


def _config(settings: Mapping[str, Any]) -> Any:
    length = settings["most_len"]
    model = ModelConfig(
        model=MODEL, dtype="float16", seed=1, skip_tokenizer_init=True, max_model_len=length
    )
    scheduling = SchedulerConfig(
        max_num_seqs=settings["rows"],
        # vLLM refuses fewer tokens than rows and drafts need.
        max_num_batched_tokens=settings["budget"],
        max_model_len=length,
        long_prefill_token_threshold=settings["long_prefill"],
        enable_chunked_prefill=True,
        policy=settings["policy"],
        is_encoder_decoder=False,
        **known_fields(
            SchedulerConfig,
            watermark=settings.get("watermark", 0.0),
            prefill_schedule_interval=settings.get("interval", 1),
            scheduler_reserve_full_isl=settings.get("whole", True),
        ),
    )
    caching = CacheConfig(
        block_size=16,
        enable_prefix_caching=settings["caching"],
        **known_fields(CacheConfig, swap_space=0),
    )
    drafting = None
    if settings["drafter"]:
        drafting = SpeculativeConfig(
            model="ngram", method="ngram", num_speculative_tokens=settings["drafts"]
        )
    transfer = None
    if settings["connector"]:
        transfer = KVTransferConfig(
            kv_role="kv_both", **known_fields(KVTransferConfig, **_transfer(settings["connector"]))
        )
    config = VllmConfig(
        scheduler_config=scheduling,
        model_config=model,
        cache_config=caching,
        speculative_config=drafting,
        kv_transfer_config=transfer,
    )
    # What a CPU's platform turns off, what asks for several devices, and what needs the weights
    # of a draft model to be set.
    config.parallel_config.pipeline_parallel_size = settings.get("stages", 1)
    config.scheduler_config.async_scheduling = settings["asynchronous"]
    config.cache_config.enable_prefix_caching = settings["caching"]
    if settings["drafter"] == "eagle":
        config.speculative_config.method = "eagle"
    if settings.get("adapters"):
        config.lora_config = LoRAConfig(max_loras=settings["adapters"])
    return config


def _transfer(connector: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a connector: vLLM's own with a host's memory, or the lab's."""
    if "host_blocks" in connector:
        extra = {
            "cpu_bytes_to_use": connector["host_blocks"] * HOST_BLOCK,
            "offload_prompt_only": connector["prompt_only"],
        }
        return {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra}
    policy = connector.get("policy", "fail")
    return {"kv_connector": "LateConnector", "kv_load_failure_policy": policy}


def _tensors(settings: Mapping[str, Any], num_blocks: int) -> list[Any]:
    """What says to the connector with a host's memory how many bytes a block has."""
    if "host_blocks" not in (settings["connector"] or {}):
        return []
    sizes = {"size": num_blocks * HOST_BLOCK, "shared_by": ["layer0"], "layers": ["layer0"]}
    strides = {"layer_stride": num_blocks * HOST_BLOCK, "block_stride": HOST_BLOCK}
    return [KVCacheTensor(**known_fields(KVCacheTensor, **sizes, **strides))]


def _spec(group: Mapping[str, Any], drafts: int) -> Any:
    sizes: dict[str, Any] = {
        "block_size": group["block"],
        "num_kv_heads": 1,
        "head_size": 1,
        "dtype": torch.float32,
    }
    if group["kind"] == "window":
        return SlidingWindowSpec(**sizes, sliding_window=group["window"])
    if group["kind"] == "states":
        recurrent = {"shapes": ((1,),), "dtypes": (torch.float32,), "mamba_cache_mode": "align"}
        return MambaSpec(
            block_size=group["block"],
            **known_fields(MambaSpec, num_speculative_blocks=drafts, **recurrent),
        )
    return FullAttentionSpec(**sizes)


def make_request(
    scheduler: Any,
    name: str,
    tokens: list[int],
    most: int,
    salt: int,
    priority: int,
    arrival: int,
    images: Sequence[Sequence[int]] = (),
    adapter: int = 0,
) -> Any:
    """Return a request as the engine core makes it of one that came."""
    sampling = SamplingParams(max_tokens=most, temperature=0.0, stop_token_ids=[STOP])
    given = {
        "request_id": name,
        "prompt_token_ids": tokens,
        "sampling_params": sampling,
        "pooling_params": None,
        "eos_token_id": None,
        "priority": priority,
        "cache_salt": str(salt) if salt else None,
        "arrival_time": float(arrival),
        "block_hasher": _hasher(scheduler),
        "mm_features": features(images),
        "lora_request": LoRARequest(f"adapter {adapter}", adapter, "/none") if adapter else None,
    }
    takes = inspect.signature(Request.__init__).parameters
    return Request(**{key: value for key, value in given.items() if key in takes})


def _hasher(scheduler: Any) -> Any:
    made = scheduler.__dict__.get("_lab_hasher")
    if made is None:
        kv_cache_utils.init_none_hash(sha256)
        manager = scheduler.kv_cache_manager
        size = getattr(manager.block_pool, "hash_block_size", scheduler.block_size)
        extra = {}
        takes = inspect.signature(kv_cache_utils.get_request_block_hasher).parameters
        if "num_hash_lookahead_tokens" in takes:
            extra["num_hash_lookahead_tokens"] = getattr(scheduler, "num_hash_lookahead_tokens", 0)
        made = kv_cache_utils.get_request_block_hasher(size, sha256, **extra)
        scheduler._lab_hasher = made
    return made


def make_output(**given: Any) -> Any:
    """Return a runner's output with the fields that this release has."""
    defaults: dict[str, Any] = {"logprobs": None, "prompt_logprobs_dict": {}, "pooler_output": []}
    return ModelRunnerOutput(**known_fields(ModelRunnerOutput, **defaults, **given))
