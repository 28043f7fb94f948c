"""Laws of rounds with rows of several shapes: each row's text is the one that it has alone."""

from __future__ import annotations

import pytest

from cuda_host import unavailable
from kernel_kit import backend
from lossless import Comparison
from specpool import ConfigError, Engine, SamplingParams, Shape
from specpool.engine.assets import corpus
from specpool.kernels.launch import host_backend

NONE, SHORT, LONG = Shape.none(), Shape.eagle(3, 1, 4), Shape.eagle(7, 1, 8)
TREE, WIDE = Shape.eagle(4, 4, 16), Shape.eagle(2, 8, 12)
PROMPTS = corpus.prompts(6, 60)
GREEDY = SamplingParams(max_new_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(max_new_tokens=24, ignore_eos=True, temperature=0.9, seed=11)


def make(draft: str, shapes: tuple[Shape, ...], **options) -> Engine:
    first, *others = shapes
    return Engine.from_pretrained(
        draft=draft, shape=first, shapes=tuple(others), max_batch=6, **options
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("placement", ["split", "shared"])
@pytest.mark.parametrize("draft", ["specpool/tiny-eagle", "specpool/tiny-eagle3", "ngram"])
def test_rows_that_draft_0_3_and_7_tokens_side_by_side(draft, placement, depth, reference):
    seen = []
    options = {"placement": placement, "overlap_depth": depth, "page_size": 4}
    with make(draft, (SHORT, LONG), **options) as engine:
        run = engine.core.worker.run
        engine.core.worker.run = lambda steps: (
            seen.extend(set(s.plan.shapes.tolist()) for s in steps if s.is_decode),
            run(steps),
        )[1]
        outputs = engine.generate(PROMPTS, GREEDY, shape=[NONE, SHORT, LONG] * 2)
    assert {0, 1, 2} in seen
    comparison = Comparison()
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        comparison.add(reference, prompt, output.token_ids)
    comparison.finish()
    most = [max(output.accept_lens) for output in outputs[:3]]
    assert most[0] == 1 and 1 < most[1] <= 4
    if draft != "ngram":
        assert most[2] > 4


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", ["dense", "holey"])
@pytest.mark.parametrize("depth", [0, 1])
def test_chains_and_trees_side_by_side(layout, depth):
    options = {"layout": layout, "overlap_depth": depth, "page_size": 4, "max_context_len": 110}
    shapes = [SHORT, TREE, WIDE, LONG, NONE, TREE]
    with make("specpool/tiny-eagle3", (TREE, SHORT, LONG, WIDE), **options) as engine:
        mixed = engine.generate(PROMPTS, SAMPLED, shape=shapes)
        alone = [
            engine.generate(prompt, SAMPLED, shape=shape)[0]
            for prompt, shape in zip(PROMPTS, shapes, strict=True)
        ]
    assert [o.token_ids for o in mixed] == [o.token_ids for o in alone]
    assert sum(o.accept_len for o in mixed) / 5 > 1.8


@pytest.mark.skipif(bool(unavailable()), reason=str(unavailable()))
def test_chains_and_trees_side_by_side_on_the_device():
    shapes = [SHORT, TREE, WIDE, LONG, NONE, TREE]
    engines = (TREE, SHORT, LONG, WIDE)
    with make("specpool/tiny-eagle", engines) as engine:
        expected = engine.generate(PROMPTS, SAMPLED, shape=shapes)
    with host_backend(backend("fast", "forward")):
        with make("specpool/tiny-eagle", engines, overlap_depth=1) as engine:
            outputs = engine.generate(PROMPTS, SAMPLED, shape=shapes)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]


def test_shapes_that_cannot_be_are_refused():
    with make("specpool/tiny-eagle", (SHORT, LONG)) as engine:
        for shape, says in (
            (TREE, "is not among the engine's shapes"),
            ([SHORT, LONG], "one for each of 3 prompts"),
            ([SHORT, LONG, TREE], "is not among the engine's shapes"),
            ("3x1x4", "one for each of 3 prompts"),
        ):
            with pytest.raises(ConfigError, match=says):
                engine.generate(PROMPTS[:3], GREEDY, shape=shape)
    for shapes in ((SHORT, Shape(2, 3, 40)), (Shape(3, 1, 3),)):
        with pytest.raises(ConfigError):
            make("specpool/tiny-eagle", shapes)
    with pytest.raises(ConfigError, match="shapes must be a tuple"):
        make("specpool/tiny-eagle", (SHORT, "3x1x4"))
    with pytest.raises(ConfigError, match="drafts, but there is no draft model"):
        Engine.from_pretrained(shapes=(LONG,))
