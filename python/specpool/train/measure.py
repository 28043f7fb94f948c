"""`measure`: how many tokens of a round are accepted on held-out prompts, by the engine itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specpool._core import Shape
from specpool.engine.config import EngineConfig
from specpool.engine.draft import Drafter, EagleDrafter, NgramDrafter
from specpool.engine.engine import Engine
from specpool.engine.models import TargetModel
from specpool.engine.sampling_params import SamplingParams

#: The drafts of a round; prompts that are measured; the most tokens of each text.
NUM_STEPS, NUM_PROMPTS, NUM_TOKENS = 3, 24, 64


def accept_lens(target: TargetModel, head: Path, prompts: Sequence[list[int]]) -> dict[str, float]:
    """Return the mean accept length, bonus included, of the head and of prompt lookup, greedy.

    Both draft chains of `NUM_STEPS` for the same prompts, so both write the same texts.

    Raises:
        ConfigError: the head cannot be loaded for the target.
    """
    longest = max(map(len, prompts)) + NUM_TOKENS + NUM_STEPS + 1
    drafters: dict[str, Drafter] = {
        "head": EagleDrafter.from_pretrained(head, target),
        "prompt lookup": NgramDrafter(),
    }
    engine = Engine(
        target,
        drafters,
        config=EngineConfig(
            shape=Shape.eagle(NUM_STEPS, 1, NUM_STEPS + 1),
            max_context_len=min(longest, target.max_context_len),
            prefix_cache=False,
            graph_sizes=(),
        ),
    )
    lens = {}
    for name in drafters:
        params = SamplingParams(max_new_tokens=NUM_TOKENS, drafter=name)
        outputs = engine.generate(list(prompts), params, progress=False)
        rounds = [length for output in outputs for length in output.accept_lens]
        lens[name] = sum(rounds) / len(rounds) if rounds else 0.0
    return lens
