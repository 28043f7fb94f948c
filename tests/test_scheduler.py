"""Laws of the scheduler: whatever comes, each request's text is what it is alone."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from transformers import AutoModelForCausalLM

from lossless import Comparison, Reference
from specpool import Engine, SamplingParams, Shape, corpus
from specpool.assets import resolve
from specpool.config import EngineConfig
from specpool.draft import EagleDrafter, NgramDrafter
from specpool.models import EagleHead, TargetModel

HEADS = ("specpool/tiny-eagle", "specpool/tiny-eagle3")
SHAPES = [(3, 1, 4), (4, 4, 16), (2, 2, 4), (7, 1, 8)]


@pytest.fixture(scope="module")
def target() -> Iterator[TargetModel]:
    with TargetModel.from_pretrained(resolve("specpool/tiny"), dtype="float32") as model:
        yield model


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(AutoModelForCausalLM.from_pretrained(resolve("specpool/tiny")).float())


@pytest.fixture(scope="module")
def heads(target) -> dict[str, EagleHead]:
    return {n: EagleDrafter.from_pretrained(resolve(n), target).head for n in HEADS}


class Workload:
    """A random engine and random requests for it, a function of its seed."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.draft = rng.choice([*HEADS, *HEADS, "ngram", None])
        self.shape = Shape.eagle(*rng.choice(SHAPES)) if self.draft else None
        page_size = rng.choice([1, 3, 4, 16])
        self.prompts = [p[: rng.randint(1, 60)] for p in corpus.prompts(rng.randint(2, 7), 80)]
        self.news = [rng.randint(1, 40) for _ in self.prompts]
        longest = max(len(p) + n for p, n in zip(self.prompts, self.news, strict=True))
        self.options = {
            "page_size": page_size,
            "placement": rng.choice(["split", "shared"]),
            "layout": rng.choice(["dense", "holey"]),
            "overlap_depth": rng.randint(0, 1),
            "prefill_tokens": rng.choice([5, 32, 1024]),
            "max_batch": rng.randint(1, 5),
            "max_context_len": longest + rng.randint(0, 9),
        }

    def engine(self, target: TargetModel, heads: dict[str, EagleHead], pages: int | None) -> Engine:
        drafter = None
        if self.draft == "ngram":
            drafter = NgramDrafter()
        elif self.draft:
            drafter = EagleDrafter(heads[self.draft])
        config = EngineConfig(shape=self.shape, num_pages=pages, **self.options)
        return Engine(target, drafter, config=config)

    def tight(self, target: TargetModel, heads: dict[str, EagleHead]) -> Engine:
        """With as few pages as a full row needs in the group that needs most of them."""
        with_room = self.engine(target, heads, None)
        ledger = with_room.ledger
        least = max(ledger.pages_per_row(g) for g in range(len(ledger.groups)))
        return self.engine(target, heads, least + self.rng.randint(0, least // 2))


@pytest.mark.parametrize("seed", range(40))
def test_random_workloads_speak_as_alone(seed, target, heads, reference):
    work = Workload(seed)
    params = [SamplingParams(max_new_tokens=n, ignore_eos=True) for n in work.news]
    engine = work.tight(target, heads)
    if work.shape is None:
        outputs = engine.generate(work.prompts, params)
    else:
        outputs = run_mixed(engine, work, params)
    comparison = Comparison()
    for prompt, output, n in zip(work.prompts, outputs, work.news, strict=True):
        if output is not None:
            assert output.finish_reason == "length" and len(output.token_ids) == n, output.error
            comparison.add(reference, prompt, output.token_ids)
    comparison.finish()


def run_mixed(engine: Engine, work: Workload, params: list[SamplingParams]):
    """Streams side by side, some plain, some given up half-way."""
    rng = work.rng
    streams = {
        i: engine.stream(p, q, shape=Shape.none() if rng.random() < 0.3 else None)
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
