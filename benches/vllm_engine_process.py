"""`python -m benches.vllm_engine_process JOB`: the process with vLLM's whole engine, on a CPU.

It writes one line of JSON: the texts of each part of the job, and what its pool says. Run it with
the Python and the path of `make engine-cpu`; the environment says at which level the plug-in is.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from benches.peer_turns import take_stdout
from benches.peer_vllm import ENVIRONMENT, LOOKUP

BLOCK_SIZE = 32  # tokens; a CPU needs multiples of 32
NUM_DRAFTS = 3
#: Turns of the engine before half of the requests are aborted.
TURNS = 6


def main(job_text: str) -> None:
    """Run the job: the prompts cold and warm, with aborts, and with a planted double free."""
    answers = take_stdout()
    job = json.loads(job_text)
    os.environ.update(ENVIRONMENT)
    import torch

    torch.set_num_threads(1)
    import vllm

    speculative = {
        "plain": None,
        "ngram": LOOKUP | {"num_speculative_tokens": NUM_DRAFTS},
        "eagle": {"method": "eagle", "model": job["head"], "num_speculative_tokens": NUM_DRAFTS},
    }[job["mode"]]
    llm: Any = vllm.LLM(
        model=job["model"],
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=job["max_len"],
        max_num_seqs=32,
        max_num_batched_tokens=1024,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=job["num_blocks"],
        enable_prefix_caching=True,
        disable_log_stats=True,
        speculative_config=speculative,
    )
    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    manager = scheduler.kv_cache_manager
    pool = manager.block_pool
    counts = {"preemptions": 0, "hits": 0}
    params = vllm.SamplingParams(
        max_tokens=job["num_new"], temperature=0.0, ignore_eos=True, detokenize=False
    )

    def counted(owner: Any, name: str, counter: str) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            given = original(*args, **kwargs)
            counts[counter] += not isinstance(given, tuple) or given[1] > 0
            return given

        setattr(owner, name, call)

    counted(scheduler, "_preempt_request", "preemptions")
    counted(manager, "get_computed_blocks", "hits")

    def texts() -> list[list[int]]:
        requests = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
        outputs = llm.generate(requests, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def aborted() -> dict[str, list[int]]:
        """Run all, and abort every second one on the way; return the texts of the others."""
        for number, prompt in enumerate(job["prompts"]):
            engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
        done: dict[str, list[int]] = {}
        for turn in range(10_000):
            if not engine.has_unfinished_requests():
                return done
            if turn == TURNS:
                engine.abort_request([str(n) for n in range(1, len(job["prompts"]), 2)])
            for output in engine.step():
                if output.finished and output.outputs[0].finish_reason != "abort":
                    number = output.request_id.partition("-")[0]
                    done[number] = list(output.outputs[0].token_ids)
        raise SystemExit("requests do not end")

    answer: dict[str, Any] = {"pool": type(pool).__module__, "version": vllm.__version__}
    answer |= {"cold": texts(), "warm": texts(), "aborted": aborted()}
    answer |= {"held": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(), **counts}
    answer["is_reset"] = llm.reset_prefix_cache()
    if job["plant"]:
        _plant_double_free(manager)
        answer["planted"] = texts()
        core, quarantine = pool.core, pool.quarantine.blocks
        answer["held_planted"] = core.num_blocks - core.available() - len(quarantine)
        answer["quarantined"] = len(quarantine)
        answer["is_reset_planted"] = llm.reset_prefix_cache() and not quarantine
    print(json.dumps(answer), file=answers, flush=True)


def _plant_double_free(manager: Any) -> None:
    """Let vLLM's own manager free the last block of the first request twice."""
    (single,) = manager.coordinator.single_type_managers
    own_pop = single.pop_blocks_for_free
    done: list[str] = []

    def pop_blocks_for_free(request_id: str) -> Any:
        blocks = own_pop(request_id)
        if not done and blocks and blocks[-1].ref_cnt == 1:
            done.append(request_id)
            return [*blocks, blocks[-1]]
        return blocks

    single.pop_blocks_for_free = pop_blocks_for_free


if __name__ == "__main__":
    main(sys.argv[1])
