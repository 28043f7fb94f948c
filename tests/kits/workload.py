"""Random engines and requests, run with submissions, streams and aborts in between."""

from __future__ import annotations

import random

import pytest

from specpool import Engine, SamplingParams, Shape
from specpool.engine.assets import corpus
from specpool.engine.config import EngineConfig
from specpool.engine.draft import EagleDrafter, NgramDrafter
from specpool.engine.models import EagleHead, TargetModel

HEADS = ("specpool/tiny-eagle", "specpool/tiny-eagle3")


SHAPES = [(3, 1, 4), (4, 4, 16), (2, 2, 4), (7, 1, 8)]


class Workload:
    """A random engine and random requests for it, a function of its seed."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.draft = rng.choice([*HEADS, *HEADS, "ngram", None])
        self.shape = Shape.eagle(*rng.choice(SHAPES)) if self.draft else None
        page_size = rng.choice([1, 3, 4, 16])
        # Half of them grow from little to much, so that all but the first are retracted.
        self.grows = rng.random() < 0.5
        max_prompt, (less, more) = (12, (40, 70)) if self.grows else (60, (1, 40))
        self.prompts = [
            p[: rng.randint(1, max_prompt)] for p in corpus.prompts(rng.randint(2, 7), 80)
        ]
        self.news = [rng.randint(less, more) for _ in self.prompts]
        longest = max(len(p) + n for p, n in zip(self.prompts, self.news, strict=True))
        self.options = {
            "page_size": page_size,
            "placement": rng.choice(["split", "shared"]),
            "layout": rng.choice(["dense", "holey"]),
            "overlap_depth": rng.randint(0, 1),
            "prefill_tokens": rng.choice([5, 32, 1024]),
            "max_batch": rng.randint(3, 7) if self.grows else rng.randint(1, 5),
            "headroom": 0 if self.grows else rng.choice([0, 16]),
            "max_context_len": longest + rng.randint(0, 9),
            "mixed_chunks": rng.random() < 0.3,
        }
        if self.draft and rng.random() < 0.5:
            self.options["shapes"] = (Shape.eagle(*rng.choice(SHAPES)),)

    def engine(self, target: TargetModel, heads: dict[str, EagleHead], pages: int | None) -> Engine:
        drafter = None
        if self.draft == "ngram":
            drafter = NgramDrafter()
        elif self.draft:
            drafter = EagleDrafter(heads[self.draft])
        config = EngineConfig(shape=self.shape, num_pages=pages, **self.options)
        return Engine(target, drafter, config=config)

    def tight(self, target: TargetModel, heads: dict[str, EagleHead]) -> Engine:
        """As few pages as a full row needs, in the group that needs most of them."""
        with_room = self.engine(target, heads, None)
        ledger = with_room.ledger
        least = max(ledger.pages_per_row(g) for g in range(len(ledger.groups)))
        return self.engine(target, heads, least + self.rng.randint(0, least // 2))


# 200 in all; those beyond the first are `make test-full`'s.
SEEDS = [*range(40), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(40, 200))]


def run_mixed(engine: Engine, work: Workload, params: list[SamplingParams]):
    """Streams side by side, some plain, some given up half-way."""
    rng = work.rng
    shapes = [None, None, Shape.none(), *work.options.get("shapes", ())]
    streams = {
        i: engine.stream(p, q, shape=rng.choice(shapes))
        for i, (p, q) in enumerate(zip(work.prompts, params, strict=True))
    }
    outputs = [None] * len(streams)
    while streams:
        index = rng.choice(list(streams))
        if rng.random() < 0.02:
            streams.pop(index).close()
            continue
        item = next(streams[index], None)
        if item is None:
            del streams[index]
        elif hasattr(item, "token_ids") and hasattr(item, "finish_reason"):
            outputs[index] = item
    return outputs
