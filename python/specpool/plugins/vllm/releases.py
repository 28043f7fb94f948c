"""What the plug-in takes over of vLLM, or calls, as it is in the releases that it knows."""

from __future__ import annotations

from specpool.plugins import drift

_POOL = "vllm.v1.core.block_pool:BlockPool"
_BLOCK = "vllm.v1.core.kv_cache_utils:KVCacheBlock"
_QUEUE = "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue"
_COORDINATOR = "vllm.v1.core.kv_cache_coordinator:"
_MANAGER = "vllm.v1.core.kv_cache_manager:KVCacheManager"
_SINGLE = "vllm.v1.core.single_type_kv_cache_manager:"
_SPECULATIVE_CONFIG = "vllm.config.speculative:SpeculativeConfig"

# Parameters, by name: of level blocks, and what level speculative needs beside it.
SIGNATURES = {
    _POOL: "num_gpu_blocks, enable_caching, hash_block_size, enable_kv_cache_events, "
    "metrics_collector, num_hash_lookahead_tokens, medium",
    _POOL + ".get_new_blocks": "self, num_blocks",
    _POOL + ".touch": "self, blocks",
    _POOL + ".free_blocks": "self, ordered_blocks",
    _POOL + ".unpin_blocks": "self, blocks, on_reuse",
    _POOL + ".cache_full_blocks": "self, request, blocks, num_cached_blocks, num_full_blocks, "
    "block_size, kv_cache_group_id, block_mask",
    _POOL + "._insert_block_hash": "self, block_hash_with_group_id, block, num_tokens",
    _POOL + "._remove_cached_block_hashes": "self, block",
    _POOL + ".reset_prefix_cache": "self",
    _BLOCK: "block_id, ref_cnt, _block_hash, _block_hash_num_tokens, prev_free_block, "
    "next_free_block, is_null, pool",
    _MANAGER + ".allocate_slots": "self, request, num_new_tokens, num_new_computed_tokens, "
    "new_computed_blocks, num_lookahead_tokens, num_external_computed_tokens, "
    "delay_cache_blocks, num_encoder_tokens, full_sequence_must_fit, reserved_blocks, "
    "has_scheduled_reqs, skip_zeroing_group_ids",
}
SPECULATIVE_SIGNATURES = {
    _MANAGER + ".get_computed_blocks": "self, request, max_cache_hit_length",
    _SINGLE + "FullAttentionManager.find_longest_cache_hit": "block_hashes, max_length, "
    "kv_cache_group_ids, block_pool, kv_cache_spec, drop_eagle_block, alignment_tokens, "
    "dcp_world_size, pcp_world_size",
    _SPECULATIVE_CONFIG + ".use_multi_module_mtp": "self",
    _SPECULATIVE_CONFIG + ".use_gemma4_mtp": "self",
    _SPECULATIVE_CONFIG + ".use_step3p5_mtp": "self",
}
# Digests of the texts, per known release. `drift.text_digest` computes them.
BODIES = {
    _POOL: {"0.33.0": "4ce61ce012151092"},
    _BLOCK: {"0.33.0": "ee750bfd92d3381a"},
    _QUEUE: {"0.33.0": "5e91bb117b166081"},
}
# Who reserves, who drops the last block, and why.
SPECULATIVE_BODIES = {
    _MANAGER + ".allocate_slots": {"0.33.0": "5918e5642d3ce5cd"},
    _MANAGER + ".get_computed_blocks": {"0.33.0": "02fe8710564d572a"},
    _COORDINATOR + "UnitaryKVCacheCoordinator": {"0.33.0": "403bf426ebcc58e2"},
    _SINGLE + "FullAttentionManager.find_longest_cache_hit": {"0.33.0": "106b6cdd1641df4b"},
    "vllm.config.vllm:VllmConfig.num_lookahead_tokens.fget": {"0.33.0": "38130aa4a06dbd56"},
}
# Where drafts are written. These modules load the code of models, so their files are read.
_RUNNER_1 = "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer"
_RUNNER_2 = "vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator:"
DRAFTERS = {
    _RUNNER_1 + ".propose": {"0.33.0": "acfdd5112200df72"},
    _RUNNER_1 + "._update_positions_dependent_metadata": {"0.33.0": "fc5fee00b71b62de"},
    _RUNNER_2 + "TargetDependentARSpeculator": {"0.33.0": "689779b6c2f54ac6"},
}


def differences(level: str = "blocks", *, bodies: bool = True) -> list[str]:
    """Return in what vLLM differs from what is known, a line each; an empty list if in nothing.

    Args:
        level: the level of the plug-in.
        bodies: whether texts count, too.
    """
    signatures, texts, unimported = SIGNATURES, BODIES, {}
    if level == "speculative":
        signatures, texts = signatures | SPECULATIVE_SIGNATURES, texts | SPECULATIVE_BODIES
        unimported = DRAFTERS
    return drift.differences(signatures, texts if bodies else {}, unimported if bodies else {})
