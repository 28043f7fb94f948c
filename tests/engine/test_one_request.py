"""Law: code that fails for one request ends that request alone, and its neighbours' texts stay.

The request that fails says TILDE all the time, which no other does. So whatever reads its text
knows it, as a library that stumbles over a text would.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from conftest import assert_no_page_leaked
from specpool import ConfigError, Engine, EngineConfig, Grammar, SamplingParams, Shape
from specpool.engine.assets import corpus, resolve
from specpool.engine.draft import DraftTree, EagleDrafter, NgramDrafter, ScriptedDrafter
from specpool.engine.draft.ngram import _NgramIndex
from specpool.engine.memory.host.copies import HostMemory
from specpool.engine.memory.host.texts import HostTexts
from specpool.engine.memory.host.tier import HostTier
from specpool.engine.models import TargetModel
from specpool.engine.output import Chunk, RequestOutput
from specpool.engine.scheduler.conversations import Conversations
from specpool.engine.scheduler.prefix_cache import PrefixCache
from specpool.engine.scheduler.queues import Running
from specpool.engine.scheduler.request import Request, TokenLogprob
from specpool.engine.shapes import BudgetController
from specpool.engine.text.stop_search import StopSearch
from specpool.engine.text.structured.compiler import Compiler
from specpool.engine.text.structured.matcher import Matcher
from specpool.engine.text.tokenizer import load_tokenizer

TILDE = ord("~")
PROMPTS = [text[:40] for text in corpus.prompts(3, 60)]
NEIGHBOURS = (
    SamplingParams(max_new_tokens=20, ignore_eos=True, stop=("qqq",), logprobs=1),
    SamplingParams(max_new_tokens=25, ignore_eos=True, temperature=1.0, seed=3),
)
VICTIM = SamplingParams(max_new_tokens=30, ignore_eos=True, logit_bias={TILDE: 100})
TREE = Shape.eagle(3, 2, 6)


class PanicException(BaseException):
    """What a Rust library raises when it panics: it is no `Exception`."""


FAULTS = (RuntimeError("planted"), PanicException("planted"))


@pytest.fixture(params=FAULTS, ids=["an exception", "a panic"])
def fault(request: pytest.FixtureRequest) -> BaseException:
    found: BaseException = request.param
    return found


#: Worker and overlap depth.
RUNS = {"v2": {}, "v2, overlapping": {"overlap_depth": 1}, "v1": {"worker": "v1"}}


@pytest.fixture(params=RUNS)
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    found: dict[str, Any] = RUNS[request.param]
    return found


def make(target: TargetModel, draft: str | None = "eagle", **options: Any) -> Engine:
    drafters = {
        "eagle": lambda: EagleDrafter.from_pretrained(resolve("specpool/tiny-eagle3"), target),
        "ngram": NgramDrafter,
    }
    drafter = drafters[draft]() if draft in drafters else draft
    config = {"shape": TREE if drafter else None, "max_context_len": 160, "page_size": 4, **options}
    tokenizer = config.pop("tokenizer", load_tokenizer(resolve("specpool/tiny")))
    return Engine(target, drafter, config=EngineConfig(**config), tokenizer=tokenizer)


def run(engine: Engine, victim: SamplingParams) -> list[RequestOutput]:
    """The victim stands between its neighbours."""
    return engine.generate(PROMPTS, [NEIGHBOURS[0], victim, NEIGHBOURS[1]])


@pytest.fixture(scope="module")
def undisturbed(target: TargetModel) -> Callable[[SamplingParams], list[RequestOutput]]:
    """What the three say when nothing fails, by plain decoding."""
    known: dict[str, list[RequestOutput]] = {}

    def undisturbed(victim: SamplingParams) -> list[RequestOutput]:
        if repr(victim) not in known:
            known[repr(victim)] = run(make(target, None), victim)
        return known[repr(victim)]

    return undisturbed


def said(output: RequestOutput) -> tuple[Any, ...]:
    entries = [(entry.token_id, len(entry.top)) for entry in output.logprobs or ()]
    return output.finish_reason, output.token_ids, output.text, entries


def is_victims(tokens: Any) -> bool:
    return TILDE in list(tokens)


def failing(
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    error: BaseException,
    concerns: Callable[..., bool],
) -> list[int]:
    """Let a method raise where a call concerns the victim; the result counts these calls."""
    working, calls = getattr(owner, name), list[int]()

    def method(*args: Any, **options: Any) -> Any:
        if concerns(*args, **options):
            calls.append(len(calls))
            raise error
        return working(*args, **options)

    monkeypatch.setattr(owner, name, method)
    return calls


def check_alone(engine: Engine, victim: SamplingParams, calls: list[int], expected: Any) -> None:
    """Check the law while a fault is planted."""
    first, ended, last = run(engine, victim)
    assert calls, "the planted fault was never met"
    assert [said(first), said(last)] == [said(expected[0]), said(expected[2])]
    assert ended.finish_reason == "error" and "planted" in (ended.error or "")
    assert_no_page_leaked(engine)


@dataclass(frozen=True)
class Plant:
    """A method that fails for the victim alone."""

    owner: Any
    name: str
    concerns: Callable[..., bool]
    params: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    draft: str = "eagle"


def of_request(*args: Any) -> bool:
    """Whether one of the arguments is the victim's request."""
    return any(isinstance(a, Request) and a.params.logit_bias == {TILDE: 100} for a in args)


PLANTS = {
    "the stop search": Plant(
        StopSearch, "feed", lambda self, *_: "zzz" in self._strings, {"stop": ("zzz",)}
    ),
    "logprobs": Plant(TokenLogprob, "first", lambda self, num_top: num_top == 3, {"logprobs": 3}),
    "prompt lookup": Plant(
        _NgramIndex, "occurrences", lambda self: is_victims(self.text), draft="ngram"
    ),
    "whether prompt lookup is promising": Plant(
        _NgramIndex, "foresees", lambda self, _: is_victims(self.text), draft="ngram"
    ),
    "the admission to the budget": Plant(
        BudgetController,
        "admit",
        lambda self, row, tpot_ms, priority: priority == 7,
        {"priority": 7},
        {"adaptive": "budget", "shape": None},
    ),
    "the look for its first tokens' KV": Plant(
        PrefixCache, "match", lambda self, *args: of_request(*args)
    ),
    "its start": Plant(Running, "start", lambda self, *args: of_request(*args)),
    "the end of its turn": Plant(Conversations, "end", lambda self, *args: of_request(*args)),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", PLANTS)
def test_a_piece_that_fails_for_one_request_ends_it_alone(
    target, undisturbed, monkeypatch, name, options, fault
):
    plant = PLANTS[name]
    victim = replace(VICTIM, **plant.params)
    engine = make(target, plant.draft, **plant.options, **options)
    expected = undisturbed(replace(victim, priority=0))
    assert {output.finish_reason for output in expected} == {"length"}
    with monkeypatch.context() as patch:
        calls = failing(patch, plant.owner, plant.name, fault, plant.concerns)
        check_alone(engine, victim, calls, expected)
    assert [*map(said, run(engine, victim))] == [*map(said, expected)]


class Stumbling:
    """An `LLMatcher` one verb of which raises from some call on."""

    def __init__(self, matcher: Any, verb: str, error: BaseException, calls: list[int]) -> None:
        self._matcher, self._verb, self._error, self._calls = matcher, verb, error, calls
        self._left = 2

    def deep_copy(self) -> Stumbling:
        return Stumbling(self._matcher.deep_copy(), self._verb, self._error, self._calls)

    def __getattr__(self, name: str) -> Any:
        if name == self._verb:
            self._left -= 1
            if self._left < 0:
                self._calls.append(len(self._calls))
                raise self._error
        return getattr(self._matcher, name)


#: What a form asks of its library.
VERBS = (
    "consume_tokens", "consume_token", "compute_bitmask", "compute_ff_tokens", "is_stopped",
    "rollback", "is_error",
)  # fmt: skip


@pytest.mark.sample(3)
@pytest.mark.parametrize("verb", VERBS)
def test_a_form_that_fails_ends_its_request_alone(
    target, undisturbed, monkeypatch, verb, options, fault
):
    victim = replace(VICTIM, ignore_eos=False, structured=Grammar.regex("~{9}[a-z~]{5}~{9}"))
    engine = make(target, **options)
    expected = undisturbed(victim)
    matcher, calls = Compiler.matcher, list[int]()

    def stumbling(*args: Any) -> Matcher:
        sound = matcher(*args)
        planted = Stumbling(sound._start, verb, fault, calls)
        return Matcher(planted, sound._vocab_size, sound._end_ids)

    with monkeypatch.context() as patch:
        patch.setattr(Compiler, "matcher", stumbling)
        check_alone(engine, victim, calls, expected)
    assert [*map(said, run(engine, victim))] == [*map(said, expected)]


class Choking(ScriptedDrafter):
    """A drafter of the user's that fails for some texts, or proposes nonsense for them."""

    def __init__(self, spoil: Callable[[DraftTree, int], DraftTree] | BaseException) -> None:
        super().__init__([], vocab_size=259)
        self._spoil, self.calls = spoil, list[int]()

    def propose(self, lanes: Any, shape: Any, roots: Any, tokens: Any) -> DraftTree:
        tree = super().propose(lanes, shape, roots, tokens)
        for lane, text in enumerate(tokens):
            if is_victims(text):
                self.calls.append(lane)
                if isinstance(self._spoil, BaseException):
                    raise self._spoil
                tree = self._spoil(tree, lane)
        return tree


def with_cell(name: str, value: int, *index: int) -> Callable[[DraftTree, int], DraftTree]:
    def spoil(tree: DraftTree, lane: int) -> DraftTree:
        array = getattr(tree, name).clone()
        array[(lane, *index)] = value
        return replace(tree, **{name: array})

    return spoil


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (RuntimeError("planted"), "the drafter failed: RuntimeError: planted"),
        (PanicException("planted"), "the drafter failed: PanicException: planted"),
        (with_cell("tokens", 259, 1), "is no tree: .*token 259"),
        (with_cell("tokens", 7, 0), "is no tree: .*root"),
        (with_cell("mask", True, 1, 2), "is no tree: .*ancestors"),
        (with_cell("first_child", 99, 0), "is no tree: .*first_child"),
        (with_cell("next_sibling", -9, 1), "is no tree: .*next_sibling"),
        (with_cell("depths", -3, 2), "is no tree: .*ancestors"),
    ],
)  # fmt: skip
def test_a_draft_that_fails_for_one_text_ends_it_alone(target, undisturbed, spoil, told, options):
    expected = undisturbed(VICTIM)
    engine = make(target, drafter := Choking(spoil), **options)
    first, ended, last = run(engine, VICTIM)
    assert drafter.calls and [said(first), said(last)] == [said(expected[0]), said(expected[2])]
    assert ended.finish_reason == "error"
    assert re.search(told + r".*, at position \d+$", ended.error)
    assert_no_page_leaked(engine)
    plain = replace(VICTIM, max_draft_steps=0)  # it does not draft, so it is not concerned
    assert [*map(said, run(engine, plain))] == [*map(said, expected)]


# --- what the tokenizer, the host tier and the callers do ---------------------------------------


class Mute:
    """A tokenizer that cannot decode the victim's tokens."""

    def __init__(self, error: BaseException) -> None:
        self._sound, self._error = load_tokenizer(resolve("specpool/tiny")), error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sound, name)

    def __len__(self) -> int:
        return len(self._sound)

    def decode(self, tokens: list[int], **options: Any) -> str:
        if is_victims(tokens):
            raise self._error
        return self._sound.decode(tokens, **options)


def by_generate(engine: Engine, params: list[SamplingParams]) -> list[RequestOutput]:
    return engine.generate(PROMPTS, params)


def by_stream(engine: Engine, params: list[SamplingParams]) -> list[RequestOutput]:
    items = [*engine.stream(PROMPTS, params)]
    outputs = sorted((x for x in items if isinstance(x, RequestOutput)), key=lambda x: x.index)
    for output in outputs:
        chunks = [x for x in items if isinstance(x, Chunk) and x.index == output.index]
        assert [token for chunk in chunks for token in chunk.token_ids] == output.token_ids
        assert "".join(chunk.text for chunk in chunks) == output.text
    return outputs


def by_turns(engine: Engine, params: list[SamplingParams]) -> list[RequestOutput]:
    told: dict[int, Any] = {}
    for prompt, own in zip(PROMPTS, params, strict=True):
        engine.submit(prompt, own, on_item=told.__setitem__)
    while engine.turn():
        pass
    return [told[number] for number in sorted(told)]


def by_session(engine: Engine, params: list[SamplingParams]) -> list[RequestOutput]:
    told: dict[int, Any] = {}
    with engine.open_session() as session:
        for index in (0, 2):
            engine.submit(PROMPTS[index], params[index], on_item=told.__setitem__)
        ended = session.append(PROMPTS[1], params[1]).output()
        while engine.turn():
            pass
        assert session.num_tokens == 0  # a turn that failed leaves the session as it was
        own = replace(params[1], logit_bias={}, max_new_tokens=3)
        assert session.append(PROMPTS[1], own).output().finish_reason == "length"
    first, last = (told[number] for number in sorted(told))
    return [first, ended, last]


@pytest.mark.sample(4)
@pytest.mark.parametrize("way", [by_generate, by_stream, by_turns, by_session])
@pytest.mark.parametrize("stop", [(), ("zzz",)], ids=["no stop", "a stop string"])
def test_a_text_that_cannot_be_decoded_ends_its_request_alone(
    target, undisturbed, way, stop, options, fault
):
    victim = replace(VICTIM, stop=stop)
    expected = undisturbed(VICTIM)
    engine = make(target, tokenizer=Mute(fault), **options)
    if way is by_session and not stop:
        victim = replace(victim, max_new_tokens=140 - len(PROMPTS[1]))
    first, ended, last = way(engine, [NEIGHBOURS[0], victim, NEIGHBOURS[1]])
    assert [said(first), said(last)] == [said(expected[0]), said(expected[2])]
    assert ended.finish_reason == "error" and ended.text == ""
    assert f"{type(fault).__name__}: planted" in ended.error
    if way is not by_generate:  # it goes no further than its first tokens
        assert len(ended.token_ids) < 20
    assert_no_page_leaked(engine)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (HostTexts, "save"),
        (HostTexts, "lend"),
        (HostTier, "pays"),
        (HostTier, "save"),
        (HostTier, "next_extend"),
        (HostMemory, "save"),
        (HostMemory, "load"),
    ],
)
def test_what_the_host_tier_cannot_do_costs_speed_alone(
    target, undisturbed, monkeypatch, owner, name
):
    """Law: KV that cannot go to the host or come back is computed again, and no request ends."""
    expected = undisturbed(VICTIM)
    engine = make(
        target, num_pages=46, headroom=0, host_bytes=1 << 24, offload="always", overlap_depth=1
    )
    with monkeypatch.context() as patch:
        calls = failing(patch, owner, name, RuntimeError("planted"), lambda *args, **options: True)
        for _ in range(2):
            assert [*map(said, run(engine, VICTIM))] == [*map(said, expected)]
    assert calls, "the planted fault was never met"
    assert_no_page_leaked(engine)


def test_a_callback_that_raises_keeps_nobody_elses_news_back(target, undisturbed):
    """Law: `turn` raises its error after all others were told, and no request ends by it."""
    engine, told, errors = make(target), dict[int, list[Any]](), list[str]()

    def raising(number: int, item: Chunk | RequestOutput) -> None:
        told.setdefault(number, []).append(item)
        raise RuntimeError(f"of {number}")

    def hearing(number: int, item: Chunk | RequestOutput) -> None:
        told.setdefault(number, []).append(item)

    params = (NEIGHBOURS[0], VICTIM, NEIGHBOURS[1])
    for prompt, own, on_item in zip(PROMPTS, params, (raising, hearing, hearing), strict=True):
        engine.submit(prompt, own, on_item=on_item)
    others = [*engine.core._submitted.values()][1:]
    goes_on = True
    while goes_on:
        try:
            goes_on = engine.turn()
        except RuntimeError as error:
            errors.append(str(error))
        for submitted in others:  # nothing of theirs is kept back
            request = submitted.request
            chunks = [x for x in told.get(request.request_id, ()) if isinstance(x, Chunk)]
            assert sum(len(chunk.token_ids) for chunk in chunks) == request.num_output_tokens
    assert {*errors} == {"of 1"} and len(errors) > 3
    outputs = [told[number][-1] for number in (1, 2, 3)]
    assert [*map(said, outputs)] == [*map(said, undisturbed(VICTIM))]


EXTREME = {
    "hot": {"temperature": 1e4, "top_k": (1 << 31) - 1},
    "cold": {"temperature": 1e-300},
    "barely warm": {"temperature": 5e-324, "top_p": 5e-324, "min_p": 1},
    "one token": {"temperature": 1, "top_k": 1, "min_p": 1.0, "top_p": 1e-45},
    "penalties": {"repetition_penalty": 0.01, "presence_penalty": -2, "frequency_penalty": 2},
    "more penalties": {"repetition_penalty": 10, "presence_penalty": 2, "frequency_penalty": -2},
    "biases": {"logit_bias": {token: (-1) ** token * 100 for token in range(259)}},
    "seed": {"temperature": 1, "seed": (1 << 64) - 1},
    "logprobs": {"logprobs": 259},
    "lengths": {"max_new_tokens": 1},
    "priorities": {"priority": -(1 << 31)},
    "integers": {"temperature": 1, "top_p": 1, "presence_penalty": 2, "logit_bias": {5: 1}},
    "a bool's number": {"temperature": np.float64(0.5), "top_p": np.float64(0.5)},
    "stop strings": {"stop": tuple("\0" * n for n in range(1, 65))},
    "stop tokens": {"stop_token_ids": tuple(range(259))},
    "steps": {"max_draft_steps": (1 << 31) - 1},
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", EXTREME)
def test_extreme_parameters_change_no_neighbour(target, undisturbed, name):
    engine = make(target, overlap_depth=1)
    expected = undisturbed(VICTIM)
    params = replace(VICTIM, logit_bias={}) if "logit_bias" not in EXTREME[name] else VICTIM
    first, middle, last = run(engine, replace(params, **EXTREME[name]))
    assert [said(first), said(last)] == [said(expected[0]), said(expected[2])]
    assert middle.finish_reason in ("stop", "length"), middle.error


@pytest.mark.parametrize(
    "priority", ["1", 1.0, None, True, np.int64(1), 1 << 31, -(1 << 40), [1], object()]
)
def test_a_priority_of_another_kind_is_refused_and_changes_nothing(target, priority):
    engine = make(target)
    with pytest.raises(ConfigError, match="priority must be an integer in"):
        engine.submit(PROMPTS[0], VICTIM, priority=priority)
    assert not engine.turn()
