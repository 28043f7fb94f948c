"""Laws of targets with recurrent layers: texts equal transformers', whatever is drafted."""

from __future__ import annotations

import copy
import logging
import random
import re
import types

import pytest
import torch
from transformers import AutoTokenizer

from conftest import DEVICE
from cuda_host import unavailable
from kernel_kit import backend
from lossless import Comparison, Reference
from recurrent_families import FAMILIES, VOCAB, make_config, make_model
from specpool import ConfigError, Engine, Grammar, RequestOutput, SamplingParams, Shape, ShapeError
from specpool.engine.assets import resolve
from specpool.engine.draft import DraftTree, NgramDrafter, ScriptedDrafter
from specpool.engine.models import TargetModel
from specpool.engine.models.gate import RECURRENT
from specpool.engine.models.outline import stated_layers
from specpool.engine.models.recurrent import RecurrentState
from specpool.kernels.launch import host_backend

CHAIN = Shape.eagle(3, 1, 4)
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
    defaults = {
        "shape": CHAIN if draft is not None else None,
        "page_size": 4,
        "max_batch": 3,
        "prefill_tokens": 16,
        "max_context_len": 80,
        "worker": "v1",
        "busy_check": 2,
    }
    options = {**defaults, **options}
    return Engine.from_pretrained(copy.deepcopy(reference.model), draft=draft, **options)


def compare(reference: Reference, outputs, num_tokens: list[int] | None = None) -> None:
    comparison = Comparison()
    for output, n in zip(outputs, num_tokens or [NUM_TOKENS] * len(outputs), strict=True):
        assert len(output.token_ids) == n, output.error
        comparison.add(reference, output.prompt_ids, output.token_ids)
    comparison.finish()


@pytest.mark.sample(5)
@pytest.mark.parametrize("draft", [None, "ngram", "scripted"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_speaks_as_transformers_does(reference, draft):
    """Several prompts on three rows, in chunks; a round keeps one token, some or all."""
    drafter = drafter_of(draft, reference)
    with build(reference, drafter) as engine:
        outputs = engine.generate(PROMPTS, GREEDY)
        if draft == "scripted":
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
        self.news = [rng.randint(1, 40) for _ in self.prompts]
        self.draft, depth = rng.choice([None, "ngram", "scripted", "scripted"]), rng.choice([1, 5])
        longest = max(len(p) + n for p, n in zip(self.prompts, self.news, strict=True))
        self.options = {
            "shape": Shape.eagle(depth, 1, depth + 1) if self.draft else None,
            "shapes": (Shape.eagle(2, 1, 3),) if self.draft else (),
            "page_size": rng.choice([1, 3, 4, 16]),
            "policy": rng.choice(["exact", "double_buffer"]),
            "placement": rng.choice(["split", "shared"]),
            "layout": rng.choice(["dense", "holey"]),
            "max_batch": rng.randint(1, 5),
            "prefill_tokens": rng.choice([3, 11, 64]),
            "headroom": rng.choice([0, 16]),
            "mixed_chunks": rng.random() < 0.4,
            "max_context_len": longest + rng.randint(0, 9),
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


@pytest.mark.sample(2)
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


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", FEW)
def test_a_retracted_row_begins_anew(reference):
    """A pool of little more than one row: its state goes with its pages."""
    with build(reference, scripted(reference), num_pages=24, headroom=0) as engine:
        compare(reference, engine.generate(PROMPTS, GREEDY))
        assert engine.core.scheduler.num_retracted > 1


@pytest.mark.sample(2)
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


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", FEW)
def test_samples_draw_the_same_with_and_without_drafts(reference):
    """Each sample of a prompt computes the prompt: a fork would have pages but no state."""
    params = SamplingParams(max_new_tokens=30, ignore_eos=True, temperature=0.8, seed=5, n=3)
    texts = []
    for draft in (None, NgramDrafter(min_match=0)):
        with build(reference, draft) as engine:
            texts.append([output.token_ids for output in engine.generate(PROMPTS[:2], params)])
    assert texts[0] == texts[1]
    assert len({tuple(text) for text in texts[0]}) == 6


@pytest.mark.sample(2)
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
    options = {"worker": "v1", "max_context_len": 128, "tokenizer": tokenizer}
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


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", FEW)
def test_a_failed_forward_takes_its_rows_and_no_other(reference, monkeypatch):
    with build(reference, scripted(reference), max_batch=5) as engine:
        forward, calls = engine.target.forward_from, [0]

        def failing(*args):
            calls[0] += 1
            if calls[0] == 20:
                raise RuntimeError("no such luck")
            return forward(*args)

        with monkeypatch.context() as patch:
            patch.setattr(engine.target, "forward_from", failing)
            outputs = engine.generate(PROMPTS, GREEDY)
        assert any(output.error for output in outputs)
        compare(reference, [output for output in outputs if not output.error])
        compare(reference, engine.generate(PROMPTS, GREEDY))


def test_a_state_that_is_no_number_ends_with_its_request():
    model = make_model(make_config("mamba2"))
    poison = 250
    model.get_input_embeddings().weight.data[poison] = torch.nan
    with Engine.from_pretrained(model, worker="v1", max_batch=1, max_context_len=96) as engine:
        bad, good = engine.generate([[5, poison, 7], PROMPTS[1]], GREEDY)
        assert bad.finish_reason == "error" and "not finite" in bad.error
        whole = Reference(make_model(make_config("mamba2")))
        assert good.token_ids == whole.text(PROMPTS[1], NUM_TOKENS)


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", FEW)
def test_a_conversation_computes_each_turn_anew(reference):
    """No row stays between turns, because its state cannot be cut to the session's tokens."""
    prompt, more, *_ = PROMPTS
    drafter = NgramDrafter(min_match=0)
    with build(reference, drafter, max_context_len=160, max_batch=2) as engine:
        with engine.open_session() as session:
            said: list[int] = []
            stop = reference.text(prompt, 9)[7]  # in the middle of a round
            for text, params in (
                (prompt, SamplingParams(max_new_tokens=20, stop_token_ids=(stop,))),
                (more, SamplingParams(max_new_tokens=9, ignore_eos=True)),
                (prompt[:5], SamplingParams(max_new_tokens=9, ignore_eos=True)),
            ):
                turn = session.append(text, params)
                output = turn.output()
                said += text
                assert output.finish_reason in ("stop", "length"), output.error
                assert output.token_ids == reference.text(said, len(output.token_ids))
                said += output.token_ids
                assert session.tokens == said
            session.rewind(20)
            with session.fork() as other:
                for each in (session, other):
                    output = each.append(more, SamplingParams(max_new_tokens=5)).output()
                    assert output.token_ids == reference.text([*said[:20], *more], 5)


# --- the guards ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FEW)
def test_without_its_replay_a_text_goes_wrong(reference, monkeypatch):
    """The state that a round has left holds the drafts that were refused."""

    def careless(self, verified, lanes, length):
        width = verified.bundle.tokens.shape[1]
        rows = verified.bundle.rows[torch.from_numpy(lanes)]
        self.state.put(rows, [state[lanes] for state in verified.states[width]])

    with build(reference, scripted(reference)) as engine:
        with pytest.raises(AssertionError):
            compare(reference, engine.generate(PROMPTS, GREEDY))


@pytest.mark.parametrize("family", ["mamba", "bamba"])
def test_a_row_that_was_cut_is_not_gone_on_from(reference):
    """The state holds tokens that are gone: this is an error, never a wrong text."""
    with build(reference) as engine:
        outputs = {}
        engine.submit(PROMPTS[0], GREEDY, on_item=lambda n, item: outputs.__setitem__(n, item))
        for _ in range(6):
            engine.turn()
        (request,) = engine.core.scheduler.requests()
        row, length = request.row, int(engine.ledger.resolved_len[request.row])
        assert engine.ledger.trim(row, length - 2) == length - 2
        request.epoch = int(engine.ledger.epoch[row])
        request.prefilled_len, request.prefill_len = length - 2, len(request.tokens)
        running = engine.core.scheduler.state.running
        running.prefilling[row], running.limits[row] = request, 0
        while engine.turn():
            pass
        (output,) = outputs.values()
        assert f"state of row {row} holds {length} tokens" in output.error
        assert f"back to {length - 2}: prefill the row from 0" in output.error
        compare(reference, engine.generate(PROMPTS, GREEDY))


@pytest.mark.parametrize("family", ["bamba", "mamba"])
@pytest.mark.parametrize("draft", [None, "scripted"])
def test_it_runs_with_the_kernels_of_a_device(reference, draft):
    """Compiled for the host."""
    if unavailable():
        pytest.skip(unavailable())
    with host_backend(backend("fast", "forward")):
        with build(reference, drafter_of(draft, reference), busy_check=0) as engine:
            compare(reference, engine.generate(PROMPTS, GREEDY))


@pytest.mark.parametrize("family", ["mamba", "falcon_mamba", "jamba"])
def test_what_cannot_go_on_many_tokens_at_once_is_found_out(reference):
    """Their scan restarts; treated as one that continues, it would give a wrong text."""
    with build(reference, scripted(reference)) as engine:
        assert not engine.target.continues
        engine.target.continues = True
        with pytest.raises(AssertionError):
            compare(reference, engine.generate(PROMPTS, GREEDY))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["mamba", "mamba2", "bamba"])
def test_that_is_found_out_in_16_bits_too(family, dtype):
    with TargetModel.from_pretrained(make_model(make_config(family)).to(dtype)) as target:
        assert target.continues == (family != "mamba")


def test_a_model_whose_state_does_not_come_back_is_refused(monkeypatch):
    model = make_model(make_config("mamba2"))
    monkeypatch.setattr(RecurrentState, "put", lambda self, rows, values: None)
    with pytest.raises(ConfigError, match=r"'mamba2'.*with its states put away and brought back"):
        TargetModel.from_pretrained(model)


# --- the way there ------------------------------------------------------------------------------


@pytest.fixture
def tiny():
    return make_model(make_config("bamba"))


def test_it_runs_on_v1_with_a_warning_that_says_why(tiny, caplog):
    with caplog.at_level(logging.WARNING, "specpool"):
        with Engine.from_pretrained(tiny, max_context_len=96) as engine:
            assert engine.core.scheduler.state.config.trims_rounds
    assert "'bamba' has recurrent layers" in caplog.text
    assert "saved before each round and replayed" in caplog.text
    caplog.clear()
    with Engine.from_pretrained(tiny, max_context_len=96, worker="v1"):
        assert not caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"worker": "v2"}, "needs worker 'v1' and overlap_depth 0, got 'v2' and 0"),
        ({"overlap_depth": 1}, "needs worker 'v1' and overlap_depth 0, got 'auto' and 1"),
        ({"host_bytes": 1 << 20}, "cannot wait on the host: host_bytes must be 0, got 1048576"),
        ({"draft": "ngram", "shape": Shape.eagle(3, 2, 6)}, r"one for each node: .*topk=2"),
        ({"draft": "ngram", "shapes": (Shape(2, 1, 4),)}, r"one for each node: .*4"),
        (
            {"draft": types.SimpleNamespace(propose=None, layers=(1,), reads_tokens=True)},
            "draft with 'ngram'",
        ),
        (
            {"draft": types.SimpleNamespace(propose=None, layers=(), reads_tokens=False)},
            "draft with 'ngram'",
        ),
    ],
)
def test_what_a_state_does_not_allow_is_refused(tiny, options, message):
    with pytest.raises(ConfigError, match=f"'bamba' has recurrent layers.*{message}"):
        Engine.from_pretrained(tiny, max_context_len=96, **options)
    with Engine.from_pretrained(tiny, max_context_len=96, worker="v1") as engine:
        assert engine.generate([PROMPTS[0]], GREEDY)[0].finish_reason == "length"


def test_a_text_cannot_be_pinned(tiny):
    with Engine.from_pretrained(tiny, max_context_len=96, worker="v1") as engine:
        with pytest.raises(ConfigError, match=r"recurrent layers: .* cannot be pinned"):
            engine.pin(PROMPTS[1])


def test_other_types_are_refused_with_the_list_of_those_that_run():
    import transformers

    config = transformers.RwkvConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2)
    with pytest.raises(
        ConfigError, match=r"'rwkv'.*these types run: bailing_hybrid, .*, qwen3_next"
    ):
        TargetModel.from_pretrained(make_model(config))


def test_a_tree_is_no_chain():
    tokens = torch.tensor([[5, 6, 7], [5, 6, 7]])
    DraftTree.chain(tokens).check_chain()
    fork = torch.tensor([[-1, 0, 1], [-1, 0, 0]], dtype=torch.int32)
    with pytest.raises(ShapeError, match="node 2 of a draft tree does not continue"):
        DraftTree.from_parents(tokens.numpy(), fork.numpy()).check_chain()


def test_a_plan_says_that_it_does_not_know_states():
    with pytest.raises(ConfigError, match=r"has recurrent layers, .* give --layers"):
        stated_layers(make_config("bamba"))
