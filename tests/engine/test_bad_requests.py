"""Laws of bad requests: each is refused, or fails, with a clear error; all others go on."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from conftest import assert_no_page_leaked
from lab.sim import Arrival, Settings
from specpool import ConfigError, Engine, EngineConfig, SamplingParams, Shape
from specpool.engine.assets import corpus, resolve
from specpool.engine.draft import DraftTree, EagleDrafter, ScriptedDrafter
from specpool.engine.models import TargetModel
from specpool.engine.output import Chunk, RequestOutput
from specpool.engine.sampling_params import NEUTRAL, TRUNCATIONS
from specpool.engine.scheduler.config import SchedulerConfig
from specpool.engine.scheduler.scheduler import Scheduler
from specpool.engine.scheduler.step import StepResult
from specpool.fields import declared

PROMPTS = corpus.prompts(4, 30)
PARAMS = SamplingParams(max_new_tokens=24, ignore_eos=True)
TREE = Shape.eagle(4, 4, 16)


@pytest.fixture(scope="module")
def target() -> Iterator[TargetModel]:
    with TargetModel.from_pretrained(resolve("specpool/tiny"), dtype="float32") as target:
        yield target


@pytest.fixture(scope="module")
def texts(target) -> list[list[int]]:
    engine = Engine(target, config=EngineConfig(max_context_len=256))
    return [output.token_ids for output in engine.generate(PROMPTS, PARAMS)]


def engine_of(target: TargetModel, depth: int = 0, drafter: Any = None, **options: Any) -> Engine:
    drafter = drafter or EagleDrafter.from_pretrained(resolve("specpool/tiny-eagle3"), target)
    config = EngineConfig(shape=TREE, max_context_len=256, overlap_depth=depth, **options)
    return Engine(target, drafter, config=config)


# --- limits and stops ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_new_tokens": -1}, r"max_new_tokens must be an integer in \[1, \d+\], got -1"),
        ({"max_new_tokens": 1 << 80}, rf"max_new_tokens .*got {1 << 80}"),
        ({"max_new_tokens": True}, "max_new_tokens .*got True"),
        ({"n": -3}, "n must be .*got -3"),
        ({"n": 1 << 17}, r"n must be an integer in \[1, 65536\], got 131072"),
        ({"top_k": 1 << 31}, "top_k .*got 2147483648"),
        ({"temperature": 1e300}, r"temperature must be a number in \[0, 10000\], got 1e\+300"),
        ({"logprobs": 1 << 40}, "logprobs .*got 1099511627776"),
        ({"stop_token_ids": (1 << 31,)}, "stop_token_ids .*got 2147483648"),
        ({"stop_token_ids": ("a",)}, "stop_token_ids .*got 'a'"),
        ({"stop": ""}, "stop must hold strings that are not empty, got ''"),
        ({"stop": 5}, "stop must be a tuple of strings, got 5"),
        ({"stop": ("end", 5)}, "stop must hold strings .*got 5"),
        ({"stop": (b"end",)}, "stop must hold strings .*got b'end'"),
        ({"stop": ("",)}, "stop must hold strings that are not empty, got ''"),
        ({"stop": ("a\ud800",)}, "lone surrogate at position 1"),
        ({"stop": ("a",) * 65}, "at most 64 strings, got 65"),
        ({"ignore_eos": "false"}, "ignore_eos must be True or False, got 'false'"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False, got 1"),
    ],
)
def test_limits_and_stops_of_a_wrong_kind_or_size_are_refused(options, says):
    with pytest.raises(ConfigError, match=says):
        SamplingParams(**options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"top_k": 50}, "top_k 50 does nothing at temperature 0, .* give a temperature above 0"),
        ({"top_p": 0.9}, "top_p 0.9 does nothing at temperature 0"),
        ({"max_tokens": 5}, "no field 'max_tokens': did you mean 'max_new_tokens'"),
        ({"colour": 5}, "no field 'colour'; the fields are temperature, max_new_tokens, "),
    ],
)
def test_what_would_be_ignored_is_refused(options, says):
    with pytest.raises(ConfigError, match=says):
        SamplingParams(**options)


def test_an_option_of_the_engine_is_refused_with_the_one_that_was_meant():
    with pytest.raises(ConfigError, match="no field 'max_batchs': did you mean 'max_batch'"):
        Engine.from_pretrained(max_batchs=5)


@pytest.mark.parametrize(
    ("name", "says"),
    [("page_sise", ": did you mean 'page_size'"), ("gpu_memory_utilization", "; the fields are")],
)
def test_a_configuration_names_the_field_that_was_meant(name, says):
    with pytest.raises(ConfigError, match=f"EngineConfig has no field '{name}'{says}"):
        EngineConfig(**{name: 3})
    with pytest.raises(ConfigError, match=f"EngineConfig has no field '{name}'"):
        dataclasses.replace(EngineConfig(), **{name: 3})


def test_a_configuration_is_copied_and_pickled():
    config = EngineConfig(page_size=4, shape=TREE)
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config
    assert dataclasses.replace(config, page_size=8).page_size == 8


def test_a_draft_of_none_is_plain_decoding_as_on_the_command_line():
    with Engine.from_pretrained(draft="none", max_context_len=64) as engine:
        assert engine.drafter is None


def test_unpin_takes_pins_alone(target):
    engine = Engine(target, config=EngineConfig(max_context_len=64, page_size=4))
    pin = engine.pin(PROMPTS[0][:8])
    with pytest.raises(ConfigError, match="unpin takes what pin gave, got 5"):
        engine.unpin(5)
    for _ in range(2):
        engine.unpin(pin)


def test_what_takes_the_likeliest_token_may_say_so_twice():
    assert SamplingParams(top_k=1).top_k == 1


def test_a_truncation_of_a_greedy_text_is_refused_with_what_to_do():
    for name, neutral in TRUNCATIONS.items():
        assert getattr(SamplingParams(**{name: neutral}), name) == neutral
        with pytest.raises(ConfigError) as caught:
            SamplingParams(**{name: 0.5 if isinstance(neutral, float) else 5})
        assert str(caught.value).endswith(
            " does nothing at temperature 0, which takes the likeliest token: give a temperature "
            "above 0, or leave top_k and min_p at 0 and top_p at 1"
        )


def test_every_field_that_may_be_none_has_a_neutral_value_or_a_meaning_of_none():
    """Law: the worker never gets None for a number that it computes with."""
    none_is_a_choice = {
        "structured", "seed", "drafter", "logprobs", "max_draft_steps", "tpot_ms", "priority",
    }  # fmt: skip
    optional = {field.name for field in declared(SamplingParams) if field.is_optional}
    assert optional == NEUTRAL.keys() | none_is_a_choice


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"stop_token_ids": (5, 259)},
            r"prompt 0 has 259 among its stop_token_ids.* the vocabulary is \[0, 259\)",
        ),
        ({"logprobs": 5000}, "prompt 0 asks for logprobs of 5000 tokens; the vocabulary has 259"),
    ],
)
def test_what_the_vocabulary_cannot_fulfil_is_refused(target, options, says):
    engine = Engine(target, config=EngineConfig(max_context_len=64))
    with pytest.raises(ConfigError, match=says):
        engine.generate(PROMPTS[0], SamplingParams(**options))
    assert not engine.turn()


def test_one_stop_string_needs_no_tuple():
    """A string counts as one stop string, not as its characters."""
    params = SamplingParams(stop="end")
    assert params.stop == ("end",) == SamplingParams(stop=("end",)).stop
    assert dataclasses.replace(params, n=2).stop == ("end",)
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == params


@pytest.mark.parametrize("kind", [EngineConfig, SamplingParams])
def test_a_field_with_any_value_is_taken_or_refused_in_one_short_line(kind):
    """An integer of more than 4300 digits has no repr, and an array has no truth value."""
    huge = 10**5000
    values = [huge, [huge], {huge: 1}, {1: huge}, "x" * 10**6, ["x"] * 10**5, np.array([1, 2])]
    num_refused = 0
    for field in dataclasses.fields(kind):
        for value in values:
            try:
                kind(**{field.name: value})
            except ConfigError as error:
                num_refused += 1
                assert len(str(error)) < 1200 and "\n" not in str(error), field.name
    assert num_refused > 5 * len(dataclasses.fields(kind))


def test_token_ids_are_a_list_of_integers_for_every_call(target):
    """A set has no order, bytes are a text, and True is no token; a number alone is no prompt."""
    engine = Engine(target, config=EngineConfig(max_context_len=256))
    before = engine.ledger.state_hash()
    with engine.open_session() as session:
        for wrong in ({1, 2}, iter([1, 2]), b"abc", [True], [1, False]):
            for call in (engine.submit, session.append, engine.pin):
                with pytest.raises(ConfigError, match="must be a string or integer token ids, got"):
                    call(wrong)
        with pytest.raises(ConfigError, match="a prompt is a string, token ids or a chat, got 5"):
            engine.submit(5)
        assert engine.ledger.state_hash() == before and not engine.turn()
        for right in ([1, 2], (1, 2), range(1, 3), np.array([1, 2]), torch.tensor([1, 2])):
            assert session.append(right, PARAMS).output().prompt_ids == [1, 2]
            session.rewind(0)


def test_what_is_no_model_and_no_rank_is_refused(target):
    for wrong in (5, None, "specpool/tiny", object()):
        with pytest.raises(ConfigError, match="target must be a TargetModel, got a "):
            Engine(wrong)
    with pytest.raises(ConfigError, match=r"ranks must be what `Ranks\.join` returns, got 5"):
        Engine.from_pretrained(ranks=5)
    with pytest.raises(ConfigError, match=r"feature_layers must be layer numbers, got \[True"):
        Engine.from_pretrained(draft="specpool/tiny-eagle3", feature_layers=[True, 1, 2])


HUGE = 10**5000  # Python itself refuses to write it


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda engine: engine.generate(PROMPTS[0], HUGE), "params"),
        (lambda engine: engine.generate(HUGE, PARAMS), "prompts"),
        (lambda engine: engine.submit(PROMPTS[0], PARAMS, on_item=HUGE), "on_item"),
        (lambda engine: engine.abort(HUGE), "request"),
        (lambda engine: engine.unpin(HUGE), "unpin"),
        (lambda engine: Engine.from_pretrained(HUGE), "target"),
        (lambda engine: Engine.from_pretrained(draft=[[HUGE]]), "draft"),
        (lambda engine: Engine.from_pretrained(trust_remote_code=HUGE), "trust_remote_code"),
        (lambda engine: Engine.from_pretrained(adaptive={"cost": HUGE}), "adaptive"),
    ],
)
def test_a_number_that_cannot_be_written_is_refused_as_any_other(target, call, name):
    with pytest.raises(ConfigError, match=name):
        call(engine_of(target))


@pytest.mark.parametrize("priority", [1 << 31, -(1 << 31) - 1, 0.5, True])
def test_a_priority_of_a_wrong_kind_or_size_is_refused(target, priority):
    engine = engine_of(target)
    with pytest.raises(ConfigError, match="priority must be an integer in"):
        engine.submit(PROMPTS[0], PARAMS, priority=priority)
    assert not engine.turn()


# --- what never fits -----------------------------------------------------------------------------


def test_a_prompt_that_can_never_fit_is_refused_with_the_numbers(target):
    """Other prompts of the same call are not queued either; the longest prompt that fits runs."""
    engine = engine_of(target, num_pages=30, page_size=16)
    with pytest.raises(ConfigError, match=r"prompt 1 has 256 tokens.* leaves room for 255"):
        engine.generate([PROMPTS[0], [1] * 256], PARAMS)
    assert not engine.turn()
    (output,) = engine.generate([[1] * 255], SamplingParams(max_new_tokens=1 << 30))
    assert len(output.token_ids) == 1


def test_a_pool_that_cannot_hold_a_row_is_refused_with_the_numbers(target):
    """A request that the engine accepts therefore fits its pools to the last token."""
    with pytest.raises(ConfigError, match=r"(?s)pages.*15|15.*pages"):
        engine_of(target, num_pages=15, page_size=16)


def request(number: int, *, prompt_len: int = 5, max_len: int = 30, shape: int = 0):
    arrival = Arrival(request_id=number, turn=0, prompt_len=prompt_len, max_len=max_len)
    return dataclasses.replace(arrival, shape=shape).request()


def scheduler_of(**options: Any) -> Scheduler:
    settings = {"page_sizes": (4,), "num_pages": (10,), "max_context_len": 32, "max_batch": 2}
    built = Settings(**{**settings, **options})
    return Scheduler(built.ledger(), SchedulerConfig(max_batch=built.max_batch, prefill_tokens=64))


def run(scheduler: Scheduler, most_turns: int = 200) -> None:
    """Run forwards of one token each until nothing is left."""
    for _ in range(most_turns):
        for step in scheduler.schedule():
            scheduler.launch(step)
            scheduler.take_over(step, StepResult.of_lanes([[7]] * len(step.requests)))
        if not scheduler.requests():
            return
    raise AssertionError("a livelock")


def test_a_row_that_cannot_grow_alone_ends_with_the_numbers():
    """The row fits alone, as `fits` has checked, but others hold the pages."""
    scheduler = scheduler_of()
    ledger = scheduler.state.ledger
    other = ledger.admit("somebody else")
    plan = ledger.prepare_extend([other], [20])
    ledger.launch(plan.step)
    ledger.complete(plan.step)
    first, second = request(1), request(2, max_len=12)
    assert scheduler.fits(first) and scheduler.max_pages(first).tolist() == [8]
    scheduler.submit(first)
    scheduler.submit(second)
    run(scheduler)
    needs = "alone it needs [6] pages for its next round, the groups have [10]"
    assert (first.finish_reason, first.error) == ("error", f"kv_exhausted: {needs}")
    assert (second.finish_reason, len(second.tokens)) == ("length", 12)
    ledger.finish(other)
    assert ledger.free_pages(0) == 10 and ledger.num_free_rows == 2


@pytest.mark.parametrize("shape", [0, 1])
def test_no_request_that_fits_is_exhausted_by_pins(shape):
    """Pins are dropped first, even if they hold all the pages that are left."""
    scheduler = scheduler_of(num_pages=(13,), shapes=((7, 1, 8),), keeps_draft_kv=False)
    for number in (1, 2):
        pin = request(number, prompt_len=16, max_len=17, shape=shape)
        pin.wants_pin = True
        scheduler.submit(pin)
        run(scheduler)
        assert pin.pin is not None
    assert len(scheduler.state.ledger.prefixes) == 2
    late = request(3, prompt_len=16, max_len=32, shape=shape)
    scheduler.submit(late)
    run(scheduler)
    assert (late.finish_reason, late.error) == ("length", None)
    scheduler.pins.drop_all()
    assert scheduler.state.ledger.free_pages(0) == 13


# --- who is who ----------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["waiting", "running", "ended", "number"])
def test_a_request_is_queued_once(when):
    scheduler = scheduler_of(max_batch=1)
    first, second = request(1), request(2)
    scheduler.submit(first)
    scheduler.submit(second)
    again = {"waiting": second, "running": first, "ended": first, "number": request(1)}[when]
    steps = scheduler.schedule()
    assert (first.row, second.row) == (1, 0)
    if when == "ended":
        scheduler.abort(first)
    with pytest.raises(ConfigError, match=rf"request {again.request_id} .*already"):
        scheduler.submit(again)
    for step in steps:
        if when == "ended":
            scheduler.cancel(step)
        else:
            scheduler.launch(step)
            scheduler.take_over(step, StepResult.of_lanes([[7]]))
    run(scheduler)
    assert [first.finish_reason, second.finish_reason] == [
        "abort" if when == "ended" else "length",
        "length",
    ]
    assert scheduler.state.ledger.free_pages(0) == 10


def test_engine_numbers_are_unique_and_an_unknown_one_is_refused(target):
    engine = engine_of(target)
    numbers = [engine.submit(p, PARAMS) for p in PROMPTS]
    streamed = engine.core.prompts.requests([PROMPTS[0]], dataclasses.replace(PARAMS, n=3), None, 0)
    assert len({*numbers, *(r.request_id for r in streamed)}) == 7
    for number in (0, -1, numbers[-1] + 100, "1", None, 1.0 + numbers[-1] + 9, streamed[0]):
        with pytest.raises(ConfigError, match="no request"):
            engine.abort(number)
    for number in numbers:
        engine.abort(number)
        engine.abort(number)  # twice is once, until its output has come
    engine.turn()
    with pytest.raises(ConfigError, match="no request"):
        engine.abort(numbers[0])


# --- drafters and devices that fail while others run ---------------------------------------------


class Greedy(ScriptedDrafter):
    """Gives back a tree with one more node, or a token that the target does not know."""

    def __init__(self, fault: str) -> None:
        super().__init__([], vocab_size=259)
        self.fault: str | None = fault

    def propose(self, lanes: Any, shape: Shape, *args: Any) -> DraftTree:
        if self.fault == "too many":
            shape = Shape.eagle(shape.num_steps, shape.topk, shape.num_draft_tokens + 1)
        tree = super().propose(lanes, shape, *args)
        if self.fault == "unknown token":
            tree.tokens[-1, -1] = 259
        return tree


class Crowd:
    """Requests of two shapes in one engine, and what they say."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.outputs: dict[int, RequestOutput] = {}

    def submit(self, index: int, shape: Shape) -> int:
        return self.engine.submit(PROMPTS[index], PARAMS, shape=shape, on_item=self._hear)

    def _hear(self, number: int, item: Chunk | RequestOutput) -> None:
        if not isinstance(item, Chunk):
            self.outputs[number] = item

    def run(self, turns: int = 1000) -> None:
        for _ in range(turns):
            if not self.engine.turn():
                return


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(
    ("fault", "says"),
    [("too many", r"int64 \[1, 16\] .*got int64 \[1, 17\]"), ("unknown token", "token 259")],
)
def test_a_bad_proposal_fails_its_round_and_no_other(target, texts, depth, fault, says):
    drafter = Greedy(fault)
    crowd = Crowd(engine_of(target, depth, drafter, max_batch=2))
    bad = crowd.submit(0, TREE)
    crowd.run(1 + depth)
    beside = crowd.submit(1, Shape.none())  # its prompt is prefilled while the other drafts
    waiting = crowd.submit(2, Shape.none())
    crowd.run()
    assert crowd.outputs[bad].finish_reason == "error"
    told = f"(a step failed: ShapeError|the drafter's tree is no tree): .*{says}"
    assert re.match(told, str(crowd.outputs[bad].error))
    assert crowd.outputs[beside].token_ids == texts[1]
    assert crowd.outputs[waiting].token_ids == texts[2]
    drafter.fault = None
    again = crowd.submit(0, TREE)
    crowd.run()
    assert crowd.outputs[again].token_ids == texts[0]


class Gone:
    """A pending step whose results never come."""

    def result(self) -> StepResult:
        raise RuntimeError("the device is gone")


def failing(engine: Engine, phase: str, when: str) -> None:
    """The next forward of that phase fails."""
    working = engine.core.worker.run

    def run(steps: Any) -> Any:
        hits = [step.is_decode == (phase == "decode") for step in steps]
        if not any(hits):
            return working(steps)
        engine.core.worker.run = working
        if when == "launch":
            raise RuntimeError("the device is gone")
        pending = working(steps)
        return [Gone() if hit else each for hit, each in zip(hits, pending, strict=True)]

    engine.core.worker.run = run


@pytest.mark.sample(4)
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("when", ["launch", "result"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_device_error_in_a_round_ends_its_requests_and_no_other(
    target, texts, depth, when, phase
):
    crowd = Crowd(engine_of(target, depth, max_batch=3))
    early = [crowd.submit(0, TREE), crowd.submit(1, Shape.none())]
    crowd.run(3)
    late = [crowd.submit(2, Shape.none()), crowd.submit(3, TREE)]  # one has no row yet
    failing(crowd.engine, phase, when)
    crowd.run()
    hit = early if phase == "decode" else late[:1]
    for index, number in enumerate([*early, *late]):
        output = crowd.outputs[number]
        if number in hit:
            assert output.error == "a step failed: RuntimeError: the device is gone"
            assert output.token_ids == texts[index][: len(output.token_ids)]
        else:
            assert (output.finish_reason, output.token_ids) == ("length", texts[index])
    assert_no_page_leaked(crowd.engine)


@pytest.mark.parametrize("when", ["launch", "result"])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_device_error_spares_what_others_share(target, depth, when):
    """A pinned text keeps its KV, and a request that reads it speaks as before."""
    engine = engine_of(target, depth, page_size=4)
    pin = engine.pin(PROMPTS[0])
    first, second = ([*PROMPTS[0], *PROMPTS[i][:5]] for i in (1, 2))
    (expected,) = engine.generate([second], dataclasses.replace(PARAMS, logprobs=0))
    kept = [buffer.clone() for buffer in engine.cache.keys]
    (pages,) = (engine.ledger.ownership_map(0)[2] > 0).nonzero()
    failing(engine, "decode", when)
    (output,) = engine.generate([first], PARAMS)
    assert output.error == "a step failed: RuntimeError: the device is gone"
    before, now = (keys[0].view(-1, 4 * keys[0][0].numel()) for keys in (kept, engine.cache.keys))
    assert torch.equal(before[pages], now[pages])
    (again,) = engine.generate([second], dataclasses.replace(PARAMS, logprobs=0))
    assert again.token_ids == expected.token_ids
    assert [e.logprob for e in again.logprobs] == pytest.approx(
        [e.logprob for e in expected.logprobs], abs=1e-5
    )
    engine.unpin(pin)
