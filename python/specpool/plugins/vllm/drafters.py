"""Whether vLLM's drafters are those whose writes are known."""

from __future__ import annotations

from specpool.plugins import drift

_SPECULATIVE_CONFIG = "vllm.config.speculative:SpeculativeConfig"
SIGNATURES = {
    _SPECULATIVE_CONFIG + ".use_multi_module_mtp": "self",
    _SPECULATIVE_CONFIG + ".use_gemma4_mtp": "self",
    _SPECULATIVE_CONFIG + ".use_step3p5_mtp": "self",
}
#: What is reserved for drafts, and where they are written. The modules of the second load the code
#: of models, so their files are read.
LOOKAHEAD = {
    "vllm.config.vllm:VllmConfig.num_lookahead_tokens.fget": {"0.33.0": "38130aa4a06dbd56"}
}
_RUNNER_1 = "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer"
_RUNNER_2 = "vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator:"
DRAFTERS = {
    _RUNNER_1 + ".propose": {"0.33.0": "acfdd5112200df72"},
    _RUNNER_1 + "._update_positions_dependent_metadata": {"0.33.0": "fc5fee00b71b62de"},
    _RUNNER_2 + "TargetDependentARSpeculator": {"0.33.0": "689779b6c2f54ac6"},
}


def differences() -> list[str]:
    """Return in what vLLM's drafters differ from the known ones, a line each.

    Where they write cannot be tried without a model, so their texts are compared.
    """
    return drift.differences(SIGNATURES, LOOKAHEAD, DRAFTERS)
