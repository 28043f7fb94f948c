"""Laws of failure: any failure of an engine gives a clear error and leaves nothing behind."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from conftest import assert_no_page_leaked
from interrupter import FOLDER, Interrupter
from scheduler_loop import put_ledger
from specpool import ConfigError, Engine, EngineConfig, SamplingParams, Shape
from specpool.engine.assets import corpus, resolve
from specpool.engine.draft import BlockDrafter, DraftTree, EagleDrafter, ScriptedDrafter
from specpool.engine.models import EagleHead, TargetModel
from specpool.engine.output import Chunk, RequestOutput

PROMPTS = corpus.prompts(3, 30)
PARAMS = SamplingParams(max_new_tokens=20)
CONFIG = EngineConfig(shape=Shape.eagle(4, 4, 16), max_context_len=256, max_batch=2)


@pytest.fixture(scope="module")
def target() -> Iterator[TargetModel]:
    with TargetModel.from_pretrained(resolve("specpool/tiny"), dtype="float32") as target:
        yield target


@pytest.fixture(scope="module")
def texts(target) -> list[list[int]]:
    return tokens_of(Engine(target, config=EngineConfig(max_context_len=256)).generate(*JOB))


JOB = (PROMPTS, PARAMS)


def tokens_of(outputs):
    return [output.token_ids for output in outputs]


def eagle(target: TargetModel) -> EagleDrafter:
    return EagleDrafter.from_pretrained(resolve("specpool/tiny-eagle3"), target)


# --- interrupts ----------------------------------------------------------------------------------


class InterruptedLedger:
    """A ledger whose n-th call of one verb is hit by Ctrl-C, just before or just after it."""

    def __init__(self, ledger: Any, verb: str, when: str, countdown: int) -> None:
        self._ledger, self._verb, self._when, self._countdown = ledger, verb, when, countdown

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._ledger, name)
        if name != self._verb:
            return value

        def call(*args: Any, **options: Any) -> Any:
            self._countdown -= 1
            if self._countdown == 0 and self._when == "before":
                raise KeyboardInterrupt
            result = value(*args, **options)
            if self._countdown == 0:
                raise KeyboardInterrupt
            return result

        return call


VERBS = (
    "admit_cached",
    "index",
    "prepare_extend",
    "prepare_decode",
    "launch",
    "take_delta",
    "ack_delta",
)


@pytest.mark.sample(4)
@pytest.mark.parametrize("countdown", [1, 2])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("verb", [*VERBS, "resolve", "complete", "finish"])
def test_ctrl_c_at_any_verb_leaves_a_working_engine(target, texts, verb, when, countdown):
    engine = Engine(target, eagle(target), config=CONFIG)
    ledger = engine.ledger
    engine.ledger = InterruptedLedger(ledger, verb, when, countdown)
    put_ledger(engine.core.scheduler, engine.ledger)
    engine.cache._ledger = engine.ledger
    with pytest.raises(KeyboardInterrupt):
        engine.generate(*JOB)
    engine.ledger = ledger
    put_ledger(engine.core.scheduler, ledger)
    engine.cache._ledger = ledger
    assert_no_page_leaked(engine)
    assert tokens_of(engine.generate(*JOB)) == texts
    assert_no_page_leaked(engine)


def test_a_failed_step_ends_its_streams_with_the_reason(target, texts, monkeypatch):
    """Two streams share a batch; a third, which waited for a row, goes on."""
    engine = Engine(target, eagle(target), config=CONFIG)
    first, second = engine.stream(PROMPTS[0], PARAMS), engine.stream(PROMPTS[1], PARAMS)
    for _ in range(2):
        assert isinstance(next(first), Chunk) and isinstance(next(second), Chunk)
    third, forward, calls = engine.stream(PROMPTS[2], PARAMS), engine.target.forward, []

    def failing(*args: Any, **options: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            raise RuntimeError("the device is gone")
        return forward(*args, **options)

    monkeypatch.setattr(engine.target, "forward", failing)
    *_, last = third
    for *_, output in (first, second):
        assert output.finish_reason == "error"
        assert output.error == "a step failed: RuntimeError: the device is gone"
    assert last.token_ids == texts[2]
    assert_no_page_leaked(engine)


# --- drafters that break their protocol ----------------------------------------------------------


class BadDrafter(ScriptedDrafter):
    """Spoils each tree."""

    def __init__(self, spoil: Callable[[DraftTree], Any]) -> None:
        super().__init__([], vocab_size=259)
        self._spoil = spoil

    def propose(self, *args: Any) -> DraftTree:
        return self._spoil(super().propose(*args))


def changed(name: str, change: Callable[[Any], Any]) -> Callable[[DraftTree], DraftTree]:
    """A tree with the array of one field changed."""

    def spoil(tree: DraftTree) -> DraftTree:
        array = change(getattr(tree, name).numpy().copy())
        return dataclasses.replace(tree, **{name: torch.from_numpy(np.ascontiguousarray(array))})

    return spoil


def with_second_token(token: int) -> Callable[[DraftTree], DraftTree]:
    return changed("tokens", lambda t: np.where(np.arange(16) == 1, token, t))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda tree: None, "DraftTree, got None"),
        (with_second_token(259), r"token 259: .*vocabulary is \[0, 259\)"),
        (with_second_token(1 << 40), "token 1099511627776"),
        (with_second_token(-5), "token -5"),
        (changed("tokens", lambda t: np.roll(t, 1, 1)), "root"),
        (changed("tokens", lambda t: t[:0]), r"tokens .*int64 \[[12], 16\] .*got int64 \[0, 16\]"),
        (changed("tokens", lambda t: t.astype(float)), "got float64"),
        (
            lambda tree: dataclasses.replace(tree, tokens=tree.tokens.numpy()),
            "tokens .*got ndarray",
        ),
        (
            changed("mask", lambda m: m[:, :9]),
            r"mask .*bool \[[12], 16, 16\] .*got bool \[[12], 9, 16\]",
        ),
        (changed("mask", np.ones_like), "ancestors"),
        (changed("mask", np.zeros_like), "ancestors"),
        (changed("depths", lambda d: d * 100), "ancestors"),
        (changed("depths", lambda d: d - 50), "ancestors"),
        (changed("next_sibling", lambda n: np.where(np.arange(16) == 1, 1, n)), "next_sibling"),
        (changed("first_child", lambda c: np.where(np.arange(16) == 0, 99, c)), "first_child"),
    ],
)
def test_a_drafter_that_proposes_nonsense_is_named(target, spoil, message):
    engine = Engine(target, BadDrafter(spoil), config=CONFIG)
    for output in engine.generate(*JOB):
        assert output.finish_reason == "error"
        told = "a step failed: ShapeError|the drafter's tree is no tree"
        assert re.search(f"({told}): .*{message}", output.error, re.S)
    assert_no_page_leaked(engine)


@pytest.mark.parametrize("method", ["propose", "extend"])
def test_a_drafter_that_raises_returns_every_page(target, texts, monkeypatch, method):
    engine = Engine(target, drafter := eagle(target), config=CONFIG)
    working, calls = getattr(drafter, method), itertools.count()

    def failing(*args: Any) -> Any:
        if next(calls) == 2:
            raise RuntimeError("the head is gone")
        return working(*args)

    monkeypatch.setattr(drafter, method, failing)
    first, second, third = engine.generate(*JOB)  # the third waited for a row
    for output in (first, second):
        assert output.error == "a step failed: RuntimeError: the head is gone"
    assert third.token_ids == texts[2]
    assert_no_page_leaked(engine)
    assert tokens_of(engine.generate(*JOB)) == texts


@pytest.mark.sample(1)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(("shape", "layout"), [((3, 1, 4), "dense"), ((4, 4, 16), "holey")])
@pytest.mark.parametrize("draft", [EagleDrafter, BlockDrafter])
def test_a_broken_head_costs_speed_and_no_text(target, texts, value, shape, layout, draft):
    name = "specpool/tiny-block" if draft is BlockDrafter else "specpool/tiny-eagle3"
    drafter = draft.from_pretrained(resolve(name), target)
    drafter.head._fc = torch.full_like(drafter.head._fc, value)
    config = dataclasses.replace(CONFIG, shape=Shape.eagle(*shape), layout=layout)
    assert tokens_of(Engine(target, drafter, config=config).generate(*JOB)) == texts


def test_a_drafter_serves_one_engine(target):
    drafter = eagle(target)
    with pytest.raises(ConfigError, match="attached to another engine"):
        Engine(target, drafter, config=CONFIG), Engine(target, drafter, config=CONFIG)


def test_more_branches_than_the_head_has_tokens_are_refused(target):
    config = dataclasses.replace(CONFIG, shape=Shape.eagle(3, 129, 200))
    with pytest.raises(ConfigError, match=r"topk 129 .* 128"):
        Engine(target, eagle(target), config=config)


# --- closing -------------------------------------------------------------------------------------


def test_a_closed_engine_says_so():
    engine = Engine.from_pretrained(max_context_len=256)
    stream = engine.stream(*JOB)
    next(stream)
    engine.close()
    engine.close()
    assert {x.finish_reason for x in stream if not isinstance(x, Chunk)} == {"abort"}
    for call in (engine.generate, engine.stream):
        with pytest.raises(ConfigError, match="closed"):
            call(*JOB)


def test_a_model_in_memory_serves_one_engine_at_a_time(texts):
    model = AutoModelForCausalLM.from_pretrained(resolve("specpool/tiny")).float()
    with Engine.from_pretrained(model, max_context_len=256) as first:
        for taken in (model, copy.deepcopy(model)):
            with pytest.raises(ConfigError, match="in use by another"):
                Engine.from_pretrained(taken, max_context_len=256)
        assert tokens_of(first.generate(*JOB)) == texts
    with Engine.from_pretrained(model, max_context_len=256) as second:
        assert tokens_of(second.generate(*JOB)) == texts


# --- checkpoints ---------------------------------------------------------------------------------


def broken_copy(tmp_path: Path, config: dict[str, Any], weights: Any) -> str:
    """The shipped target with other settings and with `weights` applied to its tensors."""
    folder = tmp_path / "model"
    shutil.copytree(resolve("specpool/tiny"), folder)
    stated = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(stated | config))
    path = folder / "model.safetensors"
    if weights is None:
        path.write_bytes(path.read_bytes()[:1000])
    else:
        tensors = load_file(path)
        weights(tensors)
        save_file(tensors, path, metadata={"format": "pt"})
    return str(folder)


@pytest.mark.parametrize(
    ("config", "weights", "message"),
    [
        ({}, None, "header"),
        ({}, lambda w: w.pop("model.norm.weight"), "missing model.norm.weight"),
        ({"num_hidden_layers": 5}, len, "missing model.layers.4.input_layernorm.weight"),
        (
            {"intermediate_size": 99},
            len,
            r"layers.0.mlp.down_proj.weight is (\[128, \d+\]|of another shape), expected \[128, 99",
        ),
        ({"num_attention_heads": 0}, len, "num_attention_heads is 0, not an integer >= 1"),
        ({"hidden_size": "big"}, len, "cannot load a model"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, len, "cannot load a model"),
    ],
)
def test_a_target_that_does_not_fit_its_config_is_refused(tmp_path, config, weights, message):
    """transformers would go on with random numbers in place of what is missing."""
    with pytest.raises(ConfigError, match=message):
        Engine.from_pretrained(broken_copy(tmp_path, config, weights), max_context_len=64)


# --- arguments -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(target) -> Engine:
    return Engine(target, eagle(target), config=CONFIG)


@pytest.mark.parametrize(
    "prompts", [None, 5, {"a": 1}, {1, 2}, np.array(3), iter([[1]]), [[[1]]], [None]]
)
def test_prompts_of_another_kind_are_refused(engine, prompts):
    with pytest.raises(ConfigError, match="prompt"):
        engine.generate(prompts, PARAMS)


@pytest.mark.parametrize("params", [5, {"temperature": 1}, [5], iter([PARAMS]), "a"])
def test_parameters_of_another_kind_are_refused(engine, params):
    with pytest.raises(ConfigError, match="SamplingParams"):
        engine.generate(PROMPTS[0], params)


@pytest.mark.parametrize("as_ids", [tuple, np.array, torch.tensor, lambda ids: np.array([ids])])
def test_token_ids_come_in_any_sequence(engine, texts, as_ids):
    assert tokens_of(engine.generate(as_ids(PROMPTS[0]), PARAMS)) == texts[:1]


def test_text_that_is_no_text_is_refused():
    """A lone surrogate, as a shell makes it of bytes that are no UTF-8."""
    with (
        Engine.from_pretrained(max_context_len=64) as engine,
        pytest.raises(ConfigError, match=r"prompt 1 .*position 2"),
    ):
        engine.generate(["a", "ab\udcff"], PARAMS)


@pytest.mark.parametrize("name", ["temperature", "top_p"])
def test_a_number_too_large_for_a_float_is_refused(name):
    with pytest.raises(ConfigError, match=name):
        SamplingParams(**{name: 10**400})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": 42}, "target .*42"),
        ({"target": None}, "target .*None"),
        ({"target": "x" * 300}, "xxx"),
        ({"draft": 42}, "draft.* 42"),
        ({"draft": "x" * 300}, "xxx"),
        ({"device": object()}, "device"),
        ({"feature_layers": 5}, "feature_layers .*5"),
        ({"feature_layers": "abc"}, "feature_layers .*abc"),
        ({"feature_layers": ()}, r"features are the inputs of no layer \(the checkpoint or the "),
        ({"feature_layers": range(1 << 20)}, r"of layers \[0, 1, .{70,90} \(the checkpoint or"),
        ({"draft": None, "feature_layers": [0]}, r"feature_layers \[0\] are for an EAGLE"),
        ({"draft": "ngram", "feature_layers": [0]}, "and no draft is one"),
        ({"draft": "specpool/tiny-draft", "feature_layers": [0]}, "and no draft is one"),
        ({"draft": "specpool/tiny-block", "feature_layers": [0]}, "and no draft is one"),
        ({"draft": "mtp", "feature_layers": [0]}, "and no draft is one"),
        ({"draft": "specpool/tiny-eagle", "feature_layers": [0]}, "the target's last hidden"),
        ({"draft": None, "draft_window": 8}, "draft_window 8 is of draft KV, and no draft keeps"),
        ({"draft": ["ngram", "suffix"], "draft_window": 8}, "draft_window 8 is of draft KV, and"),
        (
            {"draft": "specpool/tiny-block", "forced_steps": 8},
            "forced_steps must be at most 7, what a block of 8 tokens drafts, got 8",
        ),
        ({"max_context_len": 1 << 30}, "1073741824 is above the model's 2048 positions"),
        ({"num_pages": 100_000_000}, r"100000000 pages need \d.* [TP]iB of KV, \d.* .iB are free"),
    ],
)
def test_options_of_another_kind_or_size_are_refused(options, message):
    """Before anything is allocated."""
    with pytest.raises(ConfigError, match=message):
        Engine.from_pretrained(
            **{"draft": "specpool/tiny-eagle3", "max_context_len": 256, **options}
        )


def test_a_device_that_cannot_even_scrub_gives_every_row_back(monkeypatch):
    """The step's own error is reported, and the engine goes on if the device does."""

    def fail(what):
        def raises(*args, **options):
            raise RuntimeError(what)

        return raises

    with Engine.from_pretrained() as engine:
        expected = engine.generate([[5, 6, 7]] * 3, SamplingParams(max_new_tokens=4))
        with monkeypatch.context() as patch:
            patch.setattr(engine.target, "forward", fail("out of memory"))
            patch.setattr(engine.cache, "scrub", fail("no scrub"))
            for output in engine.generate([[5, 6, 7]] * 3, SamplingParams(max_new_tokens=4)):
                assert output.error == "a step failed: RuntimeError: out of memory"
        assert engine.ledger.num_free_rows == engine.ledger.num_rows
        outputs = engine.generate([[5, 6, 7]] * 3, SamplingParams(max_new_tokens=4))
        assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]


# The scheduler and the loop, whatever their files are called.
FOLDERS = tuple(str(FOLDER / "engine" / name) for name in ("scheduler", "loop"))


def interrupted(target: TargetModel, head: EagleHead, at: int | None) -> int:
    """Requests that grow in a tight pool, samples, a pinned text; the lines that it all took."""
    config = EngineConfig(
        shape=Shape.eagle(3, 1, 4), page_size=4, num_pages=16, max_context_len=40, max_batch=4,
        headroom=0, overlap_depth=1, prefill_tokens=8,
    )  # fmt: skip
    engine = Engine(target, EagleDrafter(head), config=config)
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    told: dict[int, Any] = {}
    prompts = corpus.prompts(4, 10)
    with Interrupter(at, files=FOLDERS) as lines, contextlib.suppress(KeyboardInterrupt):
        numbers = [
            engine.submit(prompt, params, on_item=lambda n, item: told.__setitem__(n, item))
            for prompt in prompts
        ]
        engine.turn()
        engine.pin(prompts[0])
        engine.generate(prompts[0] + [1], dataclasses.replace(params, n=3))
    for _ in range(200):
        if not engine.turn():
            break
    else:
        raise AssertionError(f"Ctrl-C at line {at}: requests are lost, {engine.stats()}")
    engine.core.scheduler.pins.drop_all()
    assert {item.finish_reason for item in told.values()} <= {"length", "abort", "error"}
    assert all(isinstance(item, RequestOutput) for item in told.values()), at
    if at is None:
        assert sorted(told) == numbers and engine.stats().retracted_ct > 0
    engine.ledger.check()
    assert all(pool.used_pages == 0 for pool in engine.pool_stats()), at
    stats = engine.stats()
    assert stats.num_free_rows == stats.num_rows and not stats.num_running + stats.num_waiting
    return lines.count


@pytest.mark.parametrize("num_lines", [5, pytest.param(30, marks=pytest.mark.full)])
def test_ctrl_c_at_any_line_loses_no_request(target, num_lines):
    """Every line counts, not only verbs: a request in neither queue would be lost."""
    head = eagle(target).head
    lines = interrupted(target, head, None)
    assert lines > 5_000
    for at in random.Random(0).sample(range(1, lines), num_lines):
        interrupted(target, head, at)


def failing_worker(engine: Engine, fails: Callable[[Any], bool]) -> None:
    """The first forward for which `fails(step)` does."""
    run, failed = engine.core.worker.run, []

    def once(steps: Any) -> Any:
        if not failed and any(map(fails, steps)):
            failed.append(steps)
            raise RuntimeError("the device says no")
        return run(steps)

    engine.core.worker.run = once  # type: ignore[method-assign]


@pytest.mark.parametrize("depth", [0, 1])
def test_a_sample_whose_page_copy_was_lost_with_a_step_comes_back(target, texts, depth):
    """The copy rides on a step of another row; that step's requests alone end."""
    options = {"page_size": 4, "prefill_tokens": 1, "max_context_len": 64, "max_batch": 3}
    engine = Engine(target, config=EngineConfig(overlap_depth=depth, **options))
    params = SamplingParams(max_new_tokens=9, temperature=1.0, seed=4, ignore_eos=True, n=2)
    expected = engine.generate(PROMPTS[0][:6], params)
    failing_worker(engine, lambda step: len(step.plan.page_copies) > 0)
    outputs = engine.generate(PROMPTS[0][:6], params)
    assert [o.finish_reason for o in outputs] == ["error", "length"]
    assert outputs[1].token_ids == expected[1].token_ids
    assert engine.stats().retracted_ct == 1


def test_a_failed_prefill_makes_the_round_behind_it_stale(target, texts):
    """Under overlap its failure brings older results in, and those may end a row of the round."""
    cancelled = []
    for turns in range(2, 12):
        config = EngineConfig(overlap_depth=1, max_context_len=128, max_batch=3)
        engine = Engine(target, config=config)
        stop = texts[0][8]
        first = texts[0].index(stop)
        outputs: dict[int, Any] = {}
        params = dataclasses.replace(PARAMS, stop_token_ids=(stop,))
        cancel = engine.core.scheduler.cancel
        engine.core.scheduler.cancel = lambda step, cancel=cancel: (
            cancelled.append(step),
            cancel(step),
        )  # type: ignore[method-assign]
        on_item = outputs.__setitem__
        for prompt, own in ((PROMPTS[0], params), (PROMPTS[1], PARAMS)):
            engine.submit(prompt, own, on_item=on_item)
        for _ in range(turns):
            engine.turn()
        failing_worker(engine, lambda step: not step.is_decode)
        engine.submit(PROMPTS[2], PARAMS, on_item=on_item)
        while engine.turn():
            pass
        stopped, other, failed = (outputs[n] for n in sorted(outputs))
        assert stopped.token_ids == texts[0][: first + 1]
        assert other.finish_reason in ("stop", "length") and failed.finish_reason == "error"
    assert cancelled


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_stale_step_takes_the_steps_behind_it_along(target, texts, depth, mixed):
    """They are prepared anew in the next turn, because only the newest step can be undone."""
    config = EngineConfig(overlap_depth=depth, max_context_len=128, max_batch=3, mixed_chunks=mixed)
    engine = Engine(target, config=config)
    scheduler, outputs = engine.core.scheduler, dict[int, Any]()
    launch, aborted = scheduler.launch, []

    def launch_behind_an_abort(step):
        if not step.is_decode and scheduler.num_running == 2:  # a round is prepared behind it
            aborted.append(step)
            scheduler.abort(step.requests[0])
        launch(step)

    engine.submit(PROMPTS[0], PARAMS, on_item=outputs.__setitem__)
    for _ in range(3):
        engine.turn()
    scheduler.launch = launch_behind_an_abort  # type: ignore[method-assign]
    engine.submit(PROMPTS[1], PARAMS, on_item=outputs.__setitem__)
    while engine.turn():
        pass
    first, second = (outputs[n] for n in sorted(outputs))
    assert len(aborted) == 1
    assert first.token_ids == texts[0] and first.error is None
    assert second.finish_reason == "abort"
    assert_no_page_leaked(engine)


@pytest.mark.parametrize("number", [3, 6])
def test_what_came_before_a_failed_round_is_not_lost(target, texts, number):
    """Results that are on their way when a later forward fails are taken over first."""
    lens = []
    for depth in (0, 1):
        config = EngineConfig(overlap_depth=depth, max_context_len=128)
        engine = Engine(target, config=config)
        rounds = itertools.count(1)
        failing_worker(engine, lambda step, r=rounds: step.is_decode and next(r) == number)
        (output,) = engine.generate([PROMPTS[0]], PARAMS)
        assert output.finish_reason == "error" and "the device says no" in output.error
        lens.append(len(output.token_ids))
    assert lens == [number, number]  # the prefill's token, and one of each round before
