"""Laws of mixed forwards: a prompt's chunk and the running rows' round in one forward."""

from __future__ import annotations

import dataclasses

import pytest

from cuda_host import unavailable
from kernel_kit import backend
from lossless import Comparison
from specpool import ConfigError, Engine, SamplingParams, Shape
from specpool.engine.assets import corpus
from specpool.engine.attention import BACK_ENDS
from specpool.engine.attention.backend import BackEnd
from specpool.kernels.launch import host_backend

PROMPTS = corpus.prompts(4, 70)
GREEDY = SamplingParams(max_new_tokens=20, ignore_eos=True)
SAMPLED = dataclasses.replace(GREEDY, temperature=1.0, seed=5)
CASES = {
    "plain": (None, None, {}),
    "chain": ("specpool/tiny-eagle", (3, 1, 4), {}),
    "tree": ("specpool/tiny-eagle3", (4, 4, 16), {"page_size": 4}),
    "holey": ("specpool/tiny-eagle", (2, 2, 4), {"page_size": 4, "layout": "holey"}),
    "shared": ("specpool/tiny-eagle3", (3, 1, 4), {"placement": "shared"}),
    "ngram": ("ngram", (3, 1, 4), {}),
}


def make(case: str, **options) -> Engine:
    draft, shape, more = CASES[case]
    options = {"prefill_tokens": 16, "max_batch": 4, "mixed_chunks": True, **more, **options}
    return Engine.from_pretrained(draft=draft, shape=shape and Shape.eagle(*shape), **options)


def staggered(engine: Engine, params: SamplingParams):
    """Requests that come while others run; two of five decode plainly."""
    outputs = {}
    numbers = []
    for i in range(5):
        numbers.append(
            engine.submit(
                PROMPTS[i % 4][: 70 - 3 * i],
                params,
                shape=Shape.none() if i in (1, 4) else None,
                on_item=lambda n, item: outputs.__setitem__(n, item),
            )
        )
        for _ in range(3):
            engine.turn()
    while engine.turn():
        pass
    return [outputs[number] for number in numbers]


@pytest.mark.sample(1)
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("case", CASES)
def test_mixed_forwards_speak_as_plain_decoding(case, depth, reference, monkeypatch):
    with make(case, overlap_depth=depth) as engine:
        forwards = [0]
        forward = engine.target.forward

        def counted(*args, **options):
            forwards[0] += 1
            return forward(*args, **options)

        monkeypatch.setattr(engine.target, "forward", counted)
        steps = []
        run = engine.core.worker.run
        monkeypatch.setattr(engine.core.worker, "run", lambda s: (steps.append(len(s)), run(s))[1])
        outputs = staggered(engine, GREEDY)
    assert steps.count(2) > 5  # side by side, in one forward of the target
    assert forwards[0] == len(steps)
    comparison = Comparison()
    for output in outputs:
        assert len(output.token_ids) == GREEDY.max_new_tokens
        comparison.add(reference, output.prompt_ids, output.token_ids)
    comparison.finish()


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", ["plain", "chain", "tree"])
def test_sampled_text_is_the_same_mixed_or_not(case):
    with make(case) as engine:
        mixed = staggered(engine, SAMPLED)
    with make(case, mixed_chunks=False) as engine:
        apart = staggered(engine, SAMPLED)
    assert [o.token_ids for o in mixed] == [o.token_ids for o in apart]
    assert [o.accept_lens for o in mixed] == [o.accept_lens for o in apart]


@pytest.mark.sample(1)
@pytest.mark.skipif(bool(unavailable()), reason=str(unavailable()))
@pytest.mark.parametrize("case", ["plain", "chain", "tree", "holey"])
def test_mixed_forwards_on_the_device(case):
    """Kernels run on the host runner, and only the device knows the lengths."""
    with make(case) as engine:
        expected = staggered(engine, SAMPLED)
    with host_backend(backend("fast", "forward")), make(case, overlap_depth=1) as engine:
        outputs = staggered(engine, SAMPLED)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]


@pytest.mark.parametrize("depth", [0, 1])
def test_a_failed_mixed_forward_ends_its_requests_alone(depth, monkeypatch):
    with make("chain", overlap_depth=depth, max_batch=2) as engine:
        (expected,) = engine.generate([PROMPTS[3]], GREEDY)
        run = engine.core.worker.run

        def fails(steps):
            if len(steps) == 2:
                raise RuntimeError("no such luck")
            return run(steps)

        outputs = {}
        with monkeypatch.context() as patch:
            patch.setattr(engine.core.worker, "run", fails)
            for i in (0, 1, 3):  # the third waits for a row
                engine.submit(PROMPTS[i], GREEDY, on_item=lambda n, o: outputs.__setitem__(n, o))
                for _ in range(6 if i == 0 else 1):
                    engine.turn()
            while engine.turn():
                pass
        errors = [outputs[n].error for n in sorted(outputs)]
        assert errors[:2] == ["a step failed: RuntimeError: no such luck"] * 2
        assert outputs[max(outputs)].token_ids == expected.token_ids


def test_a_back_end_without_ragged_masks_is_refused_while_drafting(monkeypatch):
    monkeypatch.setitem(BACK_ENDS, "square", BackEnd("square", False, True, False))
    message = (
        r"needs a back end that reads ragged masks \(torch, flashinfer\), attention is 'square'"
    )
    with pytest.raises(ConfigError, match=message):
        make("chain", attention="square")
    with make("plain", attention="square") as engine:
        assert engine.generate(PROMPTS[:1], GREEDY)[0].finish_reason == "length"
    with pytest.raises(
        ConfigError, match="attention must be one of auto, torch, flashinfer, square, got 'none'"
    ):
        make("chain", attention="none")
    with pytest.raises(ConfigError, match="mixed_chunks must be True or False, got 1"):
        make("chain", mixed_chunks=1)
