"""Law of mixed drafters: whoever drafts for a row, each turn's text is that of plain decoding."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from drafter_mix import NAMES, Mix, Models, run_side_by_side

# 200 in all; the few that reach all that the last test asks for come first, the others in
# `make test-full`.
FIRST = (0, 1, 5, 8)
SEEDS = [
    *FIRST,
    *(pytest.param(n, marks=pytest.mark.full) for n in range(200) if n not in FIRST),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    made = Models(tmp_path_factory.mktemp("tiny-mtp"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def run(models: Models) -> Callable[[int], Any]:
    """Runs a seed's mix, once; returns it, the plain texts, the outputs and the engine's counts."""

    @functools.cache
    def run(seed: int) -> Any:
        mix = Mix(seed)
        expected = mix.expected(models.target)
        engine = mix.engine(models)
        outputs = run_side_by_side(engine, mix.talks, mix.rng)
        return mix, expected, outputs, engine.stats()

    return run


@pytest.mark.parametrize("seed", SEEDS)
def test_drafters_mixed_by_row_give_the_text_of_plain_decoding(run, seed):
    """Chains and trees, D = 0 and 1, retraction, sessions, a prefix cache, greedy and drawn."""
    mix, expected, outputs, _ = run(seed)
    for talk, found, texts in zip(mix.talks, outputs, expected, strict=True):
        assert [o.error for o in found] == [None] * len(talk.turns)
        assert [o.token_ids for o in found] == texts


def test_the_first_seeds_reach_what_they_are_for(run):
    """Every drafter drafts; there are trees, chains, conversations, retractions and cache hits."""
    seen: Counter[str] = Counter()
    for seed in FIRST:
        mix, _, outputs, stats = run(seed)
        seen["retracted"] += stats.retracted_ct
        seen["hits"] += stats.prefix.hit_ct if stats.prefix else 0
        seen[f"depth {mix.options['overlap_depth']}"] += 1
        for talk, found in zip(mix.talks, outputs, strict=True):
            seen["conversations"] += len(talk.turns) > 1
            for params, shape, output in zip(talk.params, talk.shapes, found, strict=True):
                if output.num_drafts:
                    shape = shape or mix.options["shape"]
                    seen["trees" if shape.topk > 1 else "chains"] += 1
                    seen[params.drafter or mix.names[0]] += 1
    reached = (
        *NAMES,
        "trees",
        "chains",
        "conversations",
        "retracted",
        "hits",
        "depth 0",
        "depth 1",
    )
    assert [name for name in reached if not seen[name]] == []
