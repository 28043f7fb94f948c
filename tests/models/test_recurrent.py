"""Laws of targets with recurrent layers: texts equal transformers', whatever is drafted."""

from __future__ import annotations

import copy
import itertools
import random
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, DynamicCache

from conftest import DEVICE
from cuda_host import unavailable
from device_kit import kernels_run
from lossless import Comparison, Reference
from recurrent_families import (
    FAMILIES,
    VOCAB,
    WITHOUT_KERNELS,
    make_config,
    make_model,
    make_wide_model,
)
from specpool import ConfigError, Engine, Grammar, RequestOutput, SamplingParams, Shape
from specpool.engine.assets import resolve
from specpool.engine.draft import DraftTree, NgramDrafter, ScriptedDrafter
from specpool.engine.memory.host.copies import HostMemory
from specpool.engine.models import TargetModel, mixers, state_probe
from specpool.engine.models.gate import RECURRENT
from specpool.engine.models.lane_forward import LaneForward
from specpool.engine.models.lane_states import LaneStates, StateFolds
from specpool.engine.models.recurrent import (
    RecurrentState,
    StateSpec,
    cache_argument,
    check_transformers,
)
from specpool.engine.models.state_outline import outline_states
from specpool.engine.worker import forward
from specpool.errors import OutOfMemory
from specpool.kernels.state_lanes import MAX_NODES, StateLanes
from specpool.testing import assert_no_page_leaked

CHAIN = Shape.eagle(3, 1, 4)
TREE = Shape.eagle(3, 2, 7)
PAGE_SIZES = (1, 16, 64)
NUM_TOKENS = 24
# Goes on from a state many tokens at once; one by one; without any KV; with KV in every layer.
FEW = ("mamba", "bamba", "jamba", "falcon_h1")


def make_prompts() -> list[list[int]]:
    rng = random.Random(0)
    texts = [[rng.randrange(3, VOCAB) for _ in range(n)] for n in (17, 33, 1)]
    return [*texts, (texts[0][:5] * 5)[:22]]


PROMPTS = make_prompts()
GREEDY = SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def references() -> dict[str, Reference]:
    """Made as they are asked for."""
    return {}


@pytest.fixture
def reference(family: str, references) -> Reference:
    if family not in references:
        config = make_config(family)
        if config is None:
            pytest.skip(f"no {FAMILIES[family][0]} in this transformers")
        try:
            check_transformers(config)
        except ConfigError as error:
            pytest.skip(str(error))
        references[family] = Reference(make_model(config).to(DEVICE))
    return references[family]


def scripted(reference: Reference, error_rate: float = 0.3) -> ScriptedDrafter:
    """Knows the texts, and errs: a round keeps one to all of its tokens."""
    texts = [[*prompt, *reference.text(prompt, NUM_TOKENS)] for prompt in PROMPTS]
    return ScriptedDrafter(texts, vocab_size=VOCAB, error_rate=error_rate)


def drafter_of(draft: str | None, reference: Reference):
    if draft == "scripted":
        return scripted(reference)
    return NgramDrafter(min_match=0) if draft == "ngram" else None


def build(reference: Reference, draft=None, **options) -> Engine:
    model = copy.deepcopy(reference.model)
    return Engine.from_pretrained(model, draft=draft, **with_options(draft, options))


def with_options(draft, options: dict[str, object]) -> dict[str, object]:
    defaults = {
        "shape": CHAIN if draft is not None else None,
        "page_size": 4,
        "max_batch": 3,
        "prefill_tokens": 16,
        "max_context_len": 80,
        "busy_check": 2,
    }
    return {**defaults, **options}


def compare(reference: Reference, outputs, num_tokens: list[int] | None = None) -> None:
    comparison = Comparison()
    for output, n in zip(outputs, num_tokens or [NUM_TOKENS] * len(outputs), strict=True):
        assert len(output.token_ids) == n, output.error
        comparison.add(reference, output.prompt_ids, output.token_ids)
    comparison.finish()


def family_cases():
    """Every family with every kind of draft; page sizes, workers and depths take turns."""
    for i, family in enumerate(FAMILIES):
        for j, draft in enumerate((None, "ngram", "chain", "tree")):
            yield family, draft, PAGE_SIZES[(i + j) % 3], (i // 3 + j) % 3
    for i, family in enumerate(FAMILIES):
        for j, draft in enumerate((None, "ngram", "chain", "tree")):
            for page_size in PAGE_SIZES:
                for way in range(3):
                    if (page_size, way) != (PAGE_SIZES[(i + j) % 3], (i // 3 + j) % 3):
                        yield pytest.param(family, draft, page_size, way, marks=pytest.mark.full)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("family", "draft", "page_size", "way"), [*family_cases()])
def test_every_family_speaks_as_transformers_does(reference, draft, page_size, way):
    """Several prompts on three rows, in chunks; a round keeps one token, some or all."""
    knows = draft in ("chain", "tree")
    drafter = drafter_of("scripted" if knows else draft, reference)
    options = [{"worker": "v1"}, {"mixed_chunks": True}, {"overlap_depth": 1}][way]
    if draft == "tree":
        options["shape"] = TREE
    with build(reference, drafter, page_size=page_size, **options) as engine:
        outputs = engine.generate(PROMPTS, GREEDY)
        if knows:
            assert {n for output in outputs for n in output.accept_lens} == {1, 2, 3, 4}
    compare(reference, outputs)


def test_every_type_that_is_said_to_run_is_tested():
    found = {config.model_type for family in FAMILIES if (config := make_config(family))}
    assert found == set(RECURRENT)


class Workload:
    """Random requests for a random engine, a function of its seed."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.family = rng.choice(sorted(FAMILIES))
        sizes = [rng.randint(1, 40) for _ in range(rng.randint(1, 6))]
        self.prompts = [[rng.randrange(3, VOCAB) for _ in range(n)] for n in sizes]
        for i in range(1, len(self.prompts)):  # some begin alike
            start = rng.choice(self.prompts[:i])
            self.prompts[i] = (start[: rng.randint(0, 40)] + self.prompts[i])[:40]
        self.news = [rng.randint(1, 40) for _ in self.prompts]
        self.draft, depth = rng.choice([None, "ngram", "scripted", "scripted"]), rng.choice([1, 5])
        shapes = [Shape.eagle(depth, 1, depth + 1), Shape.eagle(depth, 3, 3 * depth)]
        worker = rng.choice(["v1", "v2", "v2"])
        longest = max(len(p) + n for p, n in zip(self.prompts, self.news, strict=True))
        self.options = {
            "shape": rng.choice(shapes) if self.draft else None,
            "shapes": (Shape.eagle(2, 1, 3), Shape.eagle(2, 2, 4)) if self.draft else (),
            "worker": worker,
            "overlap_depth": int(worker == "v2" and rng.random() < 0.5),
            "page_size": rng.choice([1, 3, 4, 16]),
            "policy": rng.choice(["exact", "double_buffer"]),
            "placement": rng.choice(["split", "shared"]),
            "layout": rng.choice(["dense", "holey"]),
            "max_batch": rng.randint(1, 5),
            "prefill_tokens": rng.choice([3, 11, 64]),
            "headroom": rng.choice([0, 16]),
            "mixed_chunks": rng.random() < 0.4,
            "max_context_len": longest + rng.randint(0, 9),
            "host_bytes": rng.choice([0, 1 << 24]),
            "offload": "always",
        }

    def engine(self, reference: Reference, num_pages: int | None) -> Engine:
        drafter = NgramDrafter(min_match=0) if self.draft == "ngram" else None
        if self.draft == "scripted":
            texts = [
                [*p, *reference.text(p, n)] for p, n in zip(self.prompts, self.news, strict=True)
            ]
            error_rate = self.rng.choice([0, 0.2, 0.6])
            drafter = ScriptedDrafter(texts, vocab_size=VOCAB, error_rate=error_rate)
        return build(reference, drafter, num_pages=num_pages, **self.options)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(12, 120))]
)
def test_random_workloads_speak_as_alone(seed, references):
    """In as few pages as one row needs, some plain, some given up half-way."""
    work = Workload(seed)
    if work.family not in references:
        references[work.family] = Reference(make_model(make_config(work.family)).to(DEVICE))
    reference = references[work.family]
    with work.engine(reference, None) as with_room:
        ledger = with_room.ledger
        least = max(ledger.pages_per_row(g) for g in range(len(ledger.groups)))
    shapes = [None, Shape.none(), *work.options["shapes"]]
    with work.engine(reference, least + work.rng.randint(0, least // 2)) as engine:
        streams = {
            i: engine.stream(
                prompt,
                SamplingParams(max_new_tokens=n, ignore_eos=True),
                shape=work.rng.choice(shapes),
            )
            for i, (prompt, n) in enumerate(zip(work.prompts, work.news, strict=True))
        }
        outputs = {}
        while streams:
            index = work.rng.choice(list(streams))
            if work.rng.random() < 0.02:
                streams.pop(index).close()
                continue
            item = next(streams[index], None)
            if item is None:
                del streams[index]
            elif isinstance(item, RequestOutput):
                outputs[index] = item
    compare(reference, [*outputs.values()], [work.news[index] for index in outputs])


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", FEW)
def test_a_retracted_row_comes_back(reference):
    """A pool of little more than one row: what is kept of its pages and states gives way."""
    with build(reference, scripted(reference), num_pages=24, headroom=0) as engine:
        compare(reference, engine.generate(PROMPTS, GREEDY))
        assert engine.core.scheduler.num_retracted > 1


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", FEW)
def test_rows_of_several_kinds_run_side_by_side(reference):
    """Plain ones, drafting ones, prompts in chunks, in one turn; some are given up."""
    options = {"shapes": (Shape.eagle(2, 1, 3),), "mixed_chunks": True, "prefill_tokens": 7}
    shapes = [None, Shape.none(), Shape.eagle(2, 1, 3)]
    with build(reference, scripted(reference), **options) as engine:
        outputs = {}
        for i, prompt in enumerate([*PROMPTS, *PROMPTS]):
            number = engine.submit(
                prompt,
                GREEDY,
                shape=shapes[i % 3],
                on_item=lambda n, item: outputs.__setitem__(n, item),
            )
            for _ in range(2):
                engine.turn()
            if i % 4 == 3:
                engine.abort(number)
        while engine.turn():
            pass
        reasons = [output.finish_reason for output in outputs.values()]
        assert sorted(reasons) == ["abort"] * 2 + ["length"] * 6
        compare(reference, [o for o in outputs.values() if o.finish_reason == "length"])


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", FEW)
def test_samples_draw_the_same_with_and_without_drafts(reference):
    """Samples run on forks of the row, which share its state."""
    params = SamplingParams(max_new_tokens=30, ignore_eos=True, temperature=0.8, seed=5, n=3)
    texts = []
    for draft in (None, NgramDrafter(min_match=0)):
        with build(reference, draft) as engine:
            texts.append([output.token_ids for output in engine.generate(PROMPTS[:2], params)])
    assert texts[0] == texts[1]
    assert len({tuple(text) for text in texts[0]}) == 6


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", FEW)
@pytest.mark.parametrize("drawn", [False, True], ids=["greedy", "drawn"])
def test_forms_and_penalties_hold_with_a_state(reference, drawn):
    """A form, penalties, a bias, and none: the texts are those of plain decoding."""
    more = {"temperature": 0.9, "min_p": 0.01, "seed": 3} if drawn else {}
    bias = {ord("."): 3.0, ord("9"): -5.0}
    forms = [
        {"structured": Grammar.regex("a long beginning[a-f]{3,20}[.] and the end")},
        {"structured": Grammar.choice(["yes, of course", "yes, but", "no"]), "logit_bias": bias},
        {"frequency_penalty": 0.8, "repetition_penalty": 1.3, "ignore_eos": True},
        {"presence_penalty": -1.0, "logit_bias": {65: 2.5}, "ignore_eos": True},
        {"ignore_eos": True},
    ]
    params = [SamplingParams(max_new_tokens=60, **form, **more) for form in forms]
    prompts = [*PROMPTS, PROMPTS[0]]
    tokenizer = AutoTokenizer.from_pretrained(resolve("specpool/tiny"))
    options = {"max_context_len": 128, "tokenizer": tokenizer}
    with Engine.from_pretrained(reference.model, **options) as engine:
        plain = engine.generate(prompts, params)
    for forced_steps in (0, 12):
        drafter = NgramDrafter(min_match=0)
        with Engine.from_pretrained(
            reference.model, draft=drafter, shape=CHAIN, forced_steps=forced_steps, **options
        ) as engine:
            outputs = engine.generate(prompts, params)
            assert engine.stats().forced_token_ct > 20
        assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
    assert re.fullmatch("a long beginning[a-f]{3,20}[.] and the end", plain[0].text)
    assert plain[1].text in ("yes, of course", "yes, but", "no")


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", FEW)
def test_a_failed_forward_takes_its_rows_and_no_other(reference, monkeypatch):
    with build(reference, scripted(reference), max_batch=5) as engine:
        mixers, calls = engine.target.mixers, [0]
        load = type(mixers.specs[0].states[0]).put

        def failing(*args):
            calls[0] += 1
            if calls[0] == 60:  # some mixers have folded then, others have not
                raise RuntimeError("no such luck")
            load(*args)

        with monkeypatch.context() as patch:
            patch.setattr(type(mixers.specs[0].states[0]), "put", failing)
            outputs = engine.generate(PROMPTS, GREEDY)
        assert any(output.error for output in outputs)
        compare(reference, [output for output in outputs if not output.error])
        compare(reference, engine.generate(PROMPTS, GREEDY))


def test_a_state_that_is_no_number_ends_with_its_request():
    model = make_model(make_config("mamba2"))
    poison = 250
    model.get_input_embeddings().weight.data[poison] = torch.nan
    with Engine.from_pretrained(model, max_batch=1, max_context_len=96) as engine:
        bad, good = engine.generate([[5, poison, 7], PROMPTS[1]], GREEDY)
        assert bad.finish_reason == "error" and "not finite" in bad.error
        whole = Reference(make_model(make_config("mamba2")))
        assert good.token_ids == whole.text(PROMPTS[1], NUM_TOKENS)


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", FEW)
@pytest.mark.parametrize("depth", [0, 1])
def test_a_conversation_goes_on_from_its_state(reference, depth):
    """A stop within a round, a cut beyond the state and far below it, and a fork."""
    prompt, more, *_ = PROMPTS
    options = {"max_context_len": 160, "max_batch": 2, "overlap_depth": depth}
    with build(reference, NgramDrafter(min_match=0), **options) as engine:
        with engine.open_session() as session:
            said: list[int] = []
            stop = reference.text(prompt, 9)[7]  # in the middle of a round
            for text, params in (
                (prompt, SamplingParams(max_new_tokens=20, stop_token_ids=(stop,))),
                (more, SamplingParams(max_new_tokens=9, ignore_eos=True)),
                (prompt[:5], SamplingParams(max_new_tokens=9, ignore_eos=True)),
            ):
                num_computed = engine.stats().prefilled_token_ct
                turn = session.append(text, params)
                output = turn.output()
                num_computed = engine.stats().prefilled_token_ct - num_computed
                assert num_computed <= len(text) + CHAIN.max_accept_len + 1
                said += text
                assert output.finish_reason in ("stop", "length"), output.error
                assert output.token_ids == reference.text(said, len(output.token_ids))
                said += output.token_ids
                assert session.tokens == said
            for length in (len(said) - 1, 20):
                session.rewind(length)
                with session.fork() as other:
                    for each in (session, other):
                        params = SamplingParams(max_new_tokens=5, ignore_eos=True)
                        output = each.append(more, params).output()
                        assert not output.error, output.error
                        assert output.token_ids == reference.text([*said[:length], *more], 5)
                session.rewind(length)


@pytest.mark.sample(1)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("draft", [None, "ngram", "scripted"])
@pytest.mark.parametrize("family", FEW)
def test_a_conversation_waits_on_the_host_with_its_state(reference, draft, page_size):
    """One session keeps its row, the others wait on the host; a turn is cut below its state."""
    options = {"max_sessions": 1, "page_size": page_size, "max_context_len": 160}
    options |= {"host_bytes": 1 << 24, "offload": "always", "prefix_cache": False}
    params = SamplingParams(max_new_tokens=7, ignore_eos=True)
    with build(reference, drafter_of(draft, reference), **options) as engine:
        sessions = [engine.open_session() for _ in range(3)]
        said: list[list[int]] = [[] for _ in sessions]
        for turn in range(3):
            for at, session in enumerate(sessions):
                text = PROMPTS[(at + turn) % 2]
                said[at] += text
                output = session.append(text, params).output()
                assert output.token_ids == reference.text(said[at], 7), (turn, at)
                assert not turn or output.num_reused >= len(said[at]) - len(text) - 40
                said[at] += output.token_ids
        host = engine.stats().host
        assert (host.offload_ct, host.reload_ct, host.failed_ct) == (8, 6, 0)
        assert host.num_handles == 2
        sessions[0].rewind(5)
        output = sessions[0].append(PROMPTS[1], params).output()
        assert output.token_ids == reference.text([*said[0][:5], *PROMPTS[1]], 7)
        for session in sessions:
            session.close()
        assert_no_page_leaked(engine.ledger)
        host = engine.stats().host
        assert all(group.free_pages == group.num_pages for group in host.groups)


@pytest.mark.sample(1)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("family", FEW)
def test_a_pinned_text_has_its_state(reference, depth, page_size):
    """It serves as a whole, also an identical prompt, and gives way when its slot is needed."""
    options = {"overlap_depth": depth, "page_size": page_size, "prefix_cache": False}
    text = PROMPTS[1]
    prompts = [[*text, *PROMPTS[0]], text, text[:20], PROMPTS[0]]
    with build(reference, NgramDrafter(min_match=0), **options) as engine:
        pin = engine.pin(text)
        assert pin.tokens == text[:-1]
        outputs = engine.generate(prompts, GREEDY)
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output.token_ids == reference.text(prompt, NUM_TOKENS)
        assert [output.num_reused for output in outputs] == [len(text) - 1] * 2 + [0, 0]
        with pytest.raises(ConfigError, match=r"cannot be pinned: .* 0 of 1 tokens"):
            engine.pin(text[:1])
        engine.unpin(pin)
        assert_no_page_leaked(engine.ledger)
        for at in range(engine.ledger.states[0].num_slots + 1):
            engine.pin([at + 3, *PROMPTS[0]])
        assert 0 < len(engine.core.scheduler.pins) <= engine.ledger.states[0].num_slots
        (output,) = engine.generate([text], GREEDY)
        assert output.token_ids == reference.text(text, NUM_TOKENS)


@pytest.mark.sample(1)
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("family", FEW)
def test_a_retracted_row_comes_back_from_the_host(reference, depth):
    options = {"host_bytes": 1 << 24, "offload": "always", "prefix_cache": False}
    options |= {"num_pages": 24, "headroom": 0, "overlap_depth": depth}
    prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[1][3:]]  # long enough for a state
    with build(reference, scripted(reference), **options) as engine:
        for prompt, output in zip(prompts, engine.generate(prompts, GREEDY), strict=True):
            assert output.token_ids == reference.text(prompt, NUM_TOKENS)
        host = engine.stats().host
        assert 0 < host.reload_ct == host.offload_ct


@pytest.mark.sample(1)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("draft", [None, "scripted"])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("family", FEW)
def test_a_text_comes_back_from_the_host_with_its_state(reference, draft, depth, page_size):
    """Law: a prompt that the device has no slot for computes its last token alone."""
    options = {"host_bytes": 1 << 24, "offload": "always", "page_size": page_size, "max_batch": 1}
    options |= {"cached_states": 0, "max_sessions": 0, "overlap_depth": depth}
    prompts = [[3 + at, *PROMPTS[1]] for at in range(2)]
    with build(reference, drafter_of(draft, reference), **options) as engine:
        for number in range(2):
            for prompt in prompts:
                (output,) = engine.generate([prompt], GREEDY)
                assert output.token_ids == reference.text(prompt, NUM_TOKENS)
                assert output.num_reused == (len(prompt) - 1 if number else 0)
        host, prefix = engine.stats().host, engine.stats().prefix
        assert host.lent_ct == host.reload_ct == 2 and host.failed_ct == 0
        assert prefix.host_ct == 2 * (len(prompt) - 1) and not prefix.hit_ct
        branch, longer = prompts[0][:20] + [5] * 12, [*prompts[0], *output.token_ids[:9], 7]
        for prompt in (branch, longer, branch):
            (output,) = engine.generate([prompt], GREEDY)
            assert output.token_ids == reference.text(prompt, NUM_TOKENS)
        engine.forget_prefixes()
        host = engine.stats().host
        assert all(group.free_pages == group.num_pages for group in host.groups)
        assert engine.generate([prompts[0]], GREEDY)[0].num_reused == 0


@pytest.mark.parametrize("family", ["bamba"])
def test_a_pinned_text_whose_row_is_gone_is_not_copied_to_the_host(reference):
    options = {"host_bytes": 1 << 24, "offload": "always", "max_batch": 1}
    with build(reference, **options) as engine:
        engine.unpin(engine.pin(PROMPTS[1]))
        engine.ledger.forget()  # on the device alone
        (output,) = engine.generate([[*PROMPTS[1], 5]], GREEDY)
        assert output.token_ids == reference.text([*PROMPTS[1], 5], NUM_TOKENS)


def test_a_copy_that_fails_costs_speed_alone(tiny, monkeypatch):
    options = {"max_sessions": 0, "host_bytes": 1 << 24, "offload": "always", "page_size": 4}
    params = SamplingParams(max_new_tokens=7, ignore_eos=True)

    def failing(*_) -> None:
        raise RuntimeError("no copy today")

    with Engine.from_pretrained(tiny, max_context_len=96, prefix_cache=False, **options) as engine:
        session, texts = engine.open_session(), []
        for way in ("save", None, "load", None):
            with monkeypatch.context() as patch:
                if way is not None:
                    patch.setattr(HostMemory, way, failing)
                texts.append(session.append(PROMPTS[0], params).output().token_ids)
        assert engine.stats().host.failed_ct == 2
        with engine.open_session() as other:
            again = [other.append(PROMPTS[0], params).output().token_ids for _ in texts]
        assert texts == again
        session.close()
        assert_no_page_leaked(engine.ledger)


def test_a_row_from_the_host_that_cannot_start_is_given_back(tiny, monkeypatch):
    options = {"host_bytes": 1 << 24, "offload": "always", "max_context_len": 96}
    params = SamplingParams(max_new_tokens=3, ignore_eos=True)

    def failing(*_) -> None:
        raise OutOfMemory("no memory today")

    with (
        Engine.from_pretrained(tiny, prefix_cache=False, max_sessions=0, **options) as engine,
        engine.open_session() as session,
    ):
        session.append(PROMPTS[0], params).output()
        monkeypatch.setattr(engine.core.scheduler.conversations, "start", failing)
        assert session.append(PROMPTS[0], params).output().finish_reason == "error"
        assert engine.stats().host.reload_ct == 1
        assert_no_page_leaked(engine.ledger)


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", FEW)
def test_an_aborted_turn_leaves_the_turn_before(reference):
    prompt, more, *_ = PROMPTS
    with build(reference, scripted(reference), max_context_len=160) as engine:
        with engine.open_session() as session:
            said = prompt + session.append(prompt, GREEDY).output().token_ids
            turn = session.append(more, GREEDY)
            for _ in range(4):
                engine.turn()
            turn.close()
            assert session.tokens == said
            output = session.append(more, SamplingParams(max_new_tokens=5)).output()
            assert output.token_ids == reference.text([*said, *more], 5)


def drafter_cases():
    """Every family with every drafter of a model's width; page sizes and depths take turns."""
    drafters = itertools.product(("eagle", "eagle3", "block", "draft", "suffix"), (CHAIN, TREE))
    for (i, family), (j, (draft, shape)), k in itertools.product(
        enumerate(FAMILIES), enumerate(drafters), range(3)
    ):
        if (family, draft) == ("zamba", "block"):
            continue  # made for as many layers as its target has
        is_few = family in ("mamba", "falcon_h1", "qwen3_next", "lfm2") and (i + j) % 3 == k
        marks = () if is_few else pytest.mark.full
        yield pytest.param(family, draft, shape, PAGE_SIZES[k], (i + j + k) % 2, marks=marks)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("family", "draft", "shape", "page_size", "depth"), [*drafter_cases()])
def test_every_drafter_drafts_for_it(family, draft, shape, page_size, depth):
    """The heads were trained for another model, so most of their drafts are refused."""
    model = make_wide_model(family)
    reference = Reference(model)
    source = draft if draft == "suffix" else f"specpool/tiny-{draft}"
    options = {"shape": shape, "overlap_depth": depth, "page_size": page_size, "dtype": "float32"}
    with Engine.from_pretrained(model, draft=source, **with_options(draft, options)) as engine:
        compare(reference, engine.generate(PROMPTS, GREEDY))


# --- the guards ---------------------------------------------------------------------------------


def skip_compaction(monkeypatch):
    """The records of accepted nodes stay where the tree had them."""
    monkeypatch.setattr(RecurrentState, "compact", lambda *args, **options: None)


def fold_one_more(monkeypatch):
    """The first draft is folded too, whether it was accepted or not."""
    of_plans = StateFolds.of_plans

    def careless(plans):
        folds = of_plans(plans)
        is_round = np.concatenate([np.full(len(p), p.kind == "decode") for p in plans])
        return replace(folds, end=folds.end + (is_round & (folds.dst > 0)))

    monkeypatch.setattr(StateFolds, "of_plans", careless)


def read_late(monkeypatch):
    """A slot is read as if it were one token shorter."""
    of_plans = StateFolds.of_plans

    def careless(plans):
        folds = of_plans(plans)
        return replace(folds, begin=folds.begin - (folds.src > 0))

    monkeypatch.setattr(StateFolds, "of_plans", careless)


@pytest.mark.sample(2)
@pytest.mark.parametrize("plant", [skip_compaction, fold_one_more, read_late])
@pytest.mark.parametrize("family", FEW)
def test_a_state_of_another_length_gives_another_text(reference, monkeypatch, plant):
    plant(monkeypatch)
    with build(reference, scripted(reference), shape=TREE) as engine:
        with pytest.raises(AssertionError):
            compare(reference, engine.generate(PROMPTS, GREEDY))


def device_cases():
    """Mixers of each kind: delta rule, Mamba-2, convolution alone; and some without kernels."""
    ways = [(None, 1), (CHAIN, 1), (TREE, 1), (CHAIN, 0)]
    first = ["qwen3_next", "bamba", "lfm2", "mamba"]
    for i, family in enumerate([*first, *(name for name in FAMILIES if name not in first)]):
        for j, way in enumerate(ways):
            marks = () if (i, j) in ((0, 2), (1, 1), (2, 0), (3, 1)) else pytest.mark.full
            yield pytest.param(family, *way, marks=marks)


@pytest.mark.sample(4)
@pytest.mark.parametrize(("family", "shape", "depth"), [*device_cases()])
def test_it_runs_with_the_kernels_of_a_device(reference, family, shape, depth):
    """Compiled for the host. Only mixers without kernels make the host wait for lengths."""
    if unavailable():
        pytest.skip(unavailable())
    draft = None if shape is None else scripted(reference)
    options = {"overlap_depth": depth, "mixed_chunks": True, "prefill_tokens": 20}
    has_kernels = family not in WITHOUT_KERNELS
    with kernels_run() as launches, build(reference, draft, shape=shape, **options) as engine:
        assert engine.target.mixers.has_kernels == has_kernels
        lengths = engine.core.worker._context.rows
        assert lengths._needs_host_lengths == (not has_kernels)
        compare(reference, engine.generate(PROMPTS, GREEDY))
    assert ("convolve_lanes" in launches) == has_kernels
    is_scanned = has_kernels and not family.startswith("lfm")
    assert ("scan_lanes" in launches) == is_scanned


def test_a_long_chunk_is_scanned_by_no_kernel(monkeypatch):
    """Law: also beside a round whose lengths the host does not know, or one of trees."""
    if unavailable():
        pytest.skip(unavailable())
    monkeypatch.setattr(forward, "_MAX_SCANNED", 12)
    scanned, build_lanes = [], StateLanes.build

    def noted(**lanes):
        scanned.append(int(lanes["num_tokens"].max()))
        return build_lanes(**lanes)

    monkeypatch.setattr(StateLanes, "build", noted)
    reference = Reference(make_model(make_config("qwen3_next")))
    options = {"shape": TREE, "overlap_depth": 1, "mixed_chunks": True, "prefill_tokens": 40}
    with kernels_run(), build(reference, scripted(reference), max_batch=2, **options) as engine:
        scanned.clear()
        compare(reference, engine.generate([PROMPTS[2], *PROMPTS[:2]], GREEDY))
    assert TREE.num_draft_tokens <= max(scanned) <= 12


#: What kernels cannot run, and what the log says of each.
KERNEL_FAULTS = {
    "wide keys": "the width of q must be in [1, 256], got 257",
    "long convolution": "the width of weight must be in [1, 8], got 9",
    "another decay": "differ by",
    "another name": "unexpected keyword argument 'g'",
    "another state": "differ by",
    "a short fold": "differ by",
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fault", ["none", *KERNEL_FAULTS])
def test_mixers_that_kernels_cannot_run_are_found_out(fault, dtype, monkeypatch, caplog):
    """Law: a kernel runs a mixer only if it gives the model's own logits and states."""
    monkeypatch.setattr(mixers, "runs_kernels", lambda device: True)
    config = make_config("qwen3_next")
    if fault == "wide keys":
        config.linear_key_head_dim = 257
    elif fault == "long convolution":
        config.linear_conv_kernel_dim = 9
    elif fault == "another decay":
        rule = LaneForward._delta_rule

        def other(self, *args, g, **options):
            return rule(self, *args, g=g - 1, **options)

        monkeypatch.setattr(LaneForward, "_delta_rule", other)
    elif fault == "another name":
        monkeypatch.setattr(LaneForward, "_delta_rule", lambda self, *args, decay: None)
    elif fault != "none":
        build_lanes = StateLanes.build

        def other_lanes(**lanes):
            wrong = {"src": 0 * lanes["src"]} if fault == "another state" else {}
            # The logits of this text do not show what its last fold leaves.
            wrong |= {"end": np.minimum(lanes["end"], 4)} if fault == "a short fold" else {}
            return build_lanes(**{**lanes, **wrong})

        monkeypatch.setattr(StateLanes, "build", other_lanes)
    with TargetModel.from_pretrained(make_model(config).to(dtype)) as target:
        assert target.mixers.has_kernels == (fault == "none")
    reasons = [record.getMessage() for record in caplog.records if "no kernels" in record.msg]
    assert [KERNEL_FAULTS[fault] in reason for reason in reasons] == [True] * (fault != "none")


def test_a_tree_that_no_kernel_takes_is_refused(monkeypatch):
    monkeypatch.setattr(mixers, "runs_kernels", lambda device: True)
    reference = Reference(make_model(make_config("lfm2")))
    shape = Shape.eagle(12, 8, MAX_NODES + 1)
    with pytest.raises(ConfigError, match=f"has {MAX_NODES + 1} nodes.* at most {MAX_NODES}"):
        build(reference, scripted(reference), shape=shape)


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", ["mamba", "falcon_mamba", "jamba"])
def test_what_cannot_go_on_many_tokens_at_once_is_found_out(reference):
    """Their scan restarts; treated as one that continues, it would give a wrong text."""
    with build(reference, scripted(reference)) as engine:
        assert not engine.target.mixers.continues
        engine.target.mixers.continues = True
        with pytest.raises(AssertionError):
            compare(reference, engine.generate(PROMPTS, GREEDY))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["mamba", "mamba2", "bamba"])
def test_that_is_found_out_in_16_bits_too(family, dtype):
    with TargetModel.from_pretrained(make_model(make_config(family)).to(dtype)) as target:
        assert target.mixers.continues == (family != "mamba")


def test_a_model_whose_state_does_not_come_back_is_refused(monkeypatch):
    model = make_model(make_config("mamba2"))
    put = StateSpec.put
    monkeypatch.setattr(StateSpec, "put", lambda *args: put(*args[:-1], torch.zeros_like(args[-1])))
    with pytest.raises(ConfigError, match=r"'mamba2'.*with its states put away and brought back"):
        TargetModel.from_pretrained(model)


@pytest.mark.parametrize("family", ["qwen3_next", "nemotron_h"])
def test_scenario_86_a_fold_is_the_mixers_own_forward(family, monkeypatch):
    """Law: recorded inputs, folded in parts, give the state of one forward of the whole text."""
    model = make_model(make_config(family))
    with TargetModel(model) as target:
        lanes, specs = state_probe._lanes(target, 17), states_of(target)
        name = cache_argument(target.decoder, target.config)

        def folded() -> list[torch.Tensor]:
            return state_probe._in_parts(target, target.mixers, lanes, [2, 1, 2, 1])[1]

        ours, build = folded(), LaneStates.build

        def altered(state, *args):
            for ring in state.rings:
                ring *= 1.001
            return build(state, *args)

        monkeypatch.setattr(LaneStates, "build", altered)
        derived = folded()
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model.get_decoder()(lanes[1:, :-1], **{name: cache, "use_cache": True})
    own = [spec.get(cache)[0] for spec in specs]
    for states, limit in ((ours, 1e-5), (derived, 1e-2)):
        assert max(difference(pair) for pair in zip(states, own, strict=True)) <= limit
    assert max(difference(pair) for pair in zip(derived, own, strict=True)) > 1e-4


def states_of(target: TargetModel) -> list[StateSpec]:
    return [state for mixer in target.mixers.specs for state in mixer.states]


def difference(pair: tuple[torch.Tensor, torch.Tensor]) -> float:
    states, own = pair
    return float((states - own).norm() / own.norm())


# --- the way there ------------------------------------------------------------------------------


@pytest.fixture
def tiny():
    return make_model(make_config("bamba"))


def test_it_runs_on_v2_and_says_nothing(tiny, caplog):
    with Engine.from_pretrained(tiny, max_context_len=96) as engine:
        assert not engine.core.scheduler.state.config.trims_rounds
        assert not caplog.text
        (group,) = engine.ledger.states
        assert group.num_slots == engine.ledger.num_rows + engine.ledger.max_batch  # some cached
        assert group.eager and group.flush == 16


def test_a_closed_model_has_its_own_mixers(tiny):
    with TargetModel.from_pretrained(tiny):
        assert any("forward" in module.__dict__ for module in tiny.modules())
    assert not any("forward" in module.__dict__ for module in tiny.modules())


def test_other_types_are_refused_with_the_list_of_those_that_run():
    import transformers

    config = transformers.RwkvConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2)
    with pytest.raises(
        ConfigError, match=r"'rwkv'.*these types run: bailing_hybrid, .*, qwen3_next"
    ):
        TargetModel.from_pretrained(make_model(config))


def test_a_tree_has_a_path_to_each_leaf():
    parents = np.array([[-1, 0, 1, 0, 3, 3], [-1, 0, 1, 2, 3, 4]], np.int32)
    tree = DraftTree.from_parents(np.arange(12, dtype=np.int64).reshape(2, 6), parents)
    branching, chain = tree.paths()
    assert branching.tolist() == [[0, 1, 2], [0, 3, 4], [0, 3, 5]]
    assert chain.tolist() == [[0, 1, 2, 3, 4, 5]]
    uneven = np.array([[-1, 0, 1, 0]], np.int32)
    (paths,) = DraftTree.from_parents(np.zeros((1, 4), np.int64), uneven).paths()
    assert paths.tolist() == [[0, 1, 2], [0, 3, 3]]


@pytest.mark.sample(8)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_says_what_the_model_keeps(family):
    """Law: without weights a plan knows the KV, states and records of the loaded model."""
    config = make_config(family)
    outline = outline_states(config, torch.float32)
    with TargetModel(make_model(config)) as target:
        assert (outline.layers, outline.states) == (target.layer_kv, target.state_bytes)
        assert outline.num_parameters == sum(p.numel() for p in target.model.parameters())
