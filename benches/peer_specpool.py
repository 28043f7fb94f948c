"""`python -m benches.peer_specpool MODEL THREADS DRAFTS [POLICY]`: our side in `benches peers`."""

from __future__ import annotations

import sys

from benches.peer_turns import answer, take_stdout


def main(model: str, threads: str, drafts: str, adaptive: str | None = None) -> None:
    """Load the model, and answer traces."""
    answers = take_stdout()
    import torch

    from specpool import Engine, SamplingParams, Shape
    from specpool.engine.shapes import AdaptiveConfig

    torch.set_num_threads(int(threads))
    num_drafts = int(drafts)
    chains = [f"chain:{depth}" for depth in range(1, num_drafts + 1)]
    choice = adaptive and AdaptiveConfig.from_dict(
        {"policy": adaptive, "1": {"candidates": ["none", *chains]}}
    )
    with Engine.from_pretrained(
        model,
        draft="ngram" if num_drafts else None,
        adaptive=choice,
        shape=Shape.eagle(num_drafts, 1, num_drafts + 1) if num_drafts and not choice else None,
        page_size=32,
        max_batch=32,
        kv_bytes=1 << 30,
        dtype="float32",
    ) as engine:

        def generate(prompts: list[list[int]], num_new: int) -> list[list[int]]:
            params = SamplingParams(max_new_tokens=num_new, temperature=0.0, ignore_eos=True)
            outputs = engine.generate(prompts, params, progress=False)
            return [list(output.token_ids) for output in outputs]

        answer(answers, engine.forget_prefixes, generate)


if __name__ == "__main__":
    main(*sys.argv[1:])
