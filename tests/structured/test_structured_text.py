"""Laws: a text has its form; and it is the text of plain decoding with the form."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator

import jsonschema
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from conftest import DEVICE
from paths import ROOT
from schemas import OWN, closed, generated
from specpool import Engine, EngineConfig, Grammar, SamplingParams, Shape
from specpool.engine.assets import corpus, resolve
from specpool.engine.draft import EagleDrafter, NgramDrafter
from specpool.engine.models import EagleHead, TargetModel
from specpool.engine.models.generation_defaults import GenerationDefaults

HEADS = ("specpool/tiny-eagle", "specpool/tiny-eagle3")
# drafter, shape, options
ENGINES = {
    "plain": (None, None, {}),
    "plain D=1": (None, None, {"overlap_depth": 1}),
    "forced spans alone": (None, None, {"forced_steps": 12, "overlap_depth": 1}),
    "eagle chain D=1": (HEADS[0], (3, 1, 4), {"overlap_depth": 1}),
    "eagle-3 tree D=1": (HEADS[1], (4, 4, 16), {"overlap_depth": 1, "page_size": 3}),
    "eagle-3 long spans": (HEADS[1], (3, 2, 6), {"overlap_depth": 1, "forced_steps": 20}),
    "eagle-3 tree of fewer nodes than steps": (HEADS[1], (4, 2, 3), {"overlap_depth": 1}),
    "eagle-3 tree v1": (HEADS[1], (3, 2, 6), {"worker": "v1", "forced_steps": 9}),
    "eagle holey, mixed": (HEADS[0], (3, 4, 12), {"layout": "holey", "mixed_chunks": True}),
    "adaptive": (HEADS[0], None, {"adaptive": "ema", "forced_steps": 8, "overlap_depth": 1}),
    "ngram D=1": ("ngram", (4, 2, 8), {"overlap_depth": 1, "forced_steps": 6}),
    "few pages": (HEADS[1], (3, 2, 6), {"num_pages": 56, "page_size": 4, "overlap_depth": 1,
                                        "max_context_len": 200, "headroom": 0, "forced_steps": 5}),
}  # fmt: skip

Make = Callable[..., Engine]


@pytest.fixture(scope="module")
def target() -> Iterator[TargetModel]:
    with TargetModel.from_pretrained(
        resolve("specpool/tiny"), dtype="float32", device=DEVICE
    ) as model:
        yield model


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(resolve("specpool/tiny"))


@pytest.fixture(scope="module")
def heads(target: TargetModel) -> dict[str, EagleHead]:
    return {name: EagleDrafter.from_pretrained(resolve(name), target).head for name in HEADS}


@pytest.fixture(scope="module")
def make(
    target: TargetModel, heads: dict[str, EagleHead], tokenizer: PreTrainedTokenizerBase
) -> Make:
    def engine(case: str, **more: object) -> Engine:
        name, shape, options = ENGINES[case]
        drafter = None
        if name is not None:
            drafter = NgramDrafter() if name == "ngram" else EagleDrafter(heads[name])
        config = EngineConfig(
            shape=None if shape is None else Shape(*shape),
            **{"max_context_len": 420, **options, **more},
        )
        return Engine(target, drafter, tokenizer=tokenizer, config=config)

    return engine


# A tiny model ends nothing by itself: make quotes, brackets and the end likelier than commas.
ENDS = {34: 9.0, 125: 7.0, 93: 7.0, 44: -5.0, 257: 12.0}
DRAFTING = [case for case in ENGINES if not case.startswith("plain")]
FORMS = [
    Grammar.json_schema(closed(customer_identification_number={"type": "integer"}, note={
        "type": "string", "maxLength": 9})),
    Grammar.json_schema(OWN[-1]),
    Grammar.json_object(),
    Grammar.regex(r"[A-Z][a-z]{2,9} (was|were) [a-z ]{3,20}\."),
    Grammar.regex(r"(ab|cd){1,12}"),
    Grammar.choice(["yes", "no", "not at all", "not at all the same"]),
    Grammar.ebnf('root ::= "(" item ("," item){0,3} ")"\nitem ::= [a-z]{1,4} | "a longer item"'),
]  # fmt: skip


def check(grammar: Grammar, text: str) -> None:
    """Fail unless the text has the form, by means that know nothing of llguidance."""
    if grammar.kind.startswith("json"):
        value = json.loads(text)
        schema = json.loads(grammar.text or '{"type": "object"}')
        kind = jsonschema.Draft202012Validator
        jsonschema.validate(value, schema, cls=kind, format_checker=kind.FORMAT_CHECKER)
    elif grammar.kind == "regex":
        assert re.fullmatch(grammar.text, text, re.DOTALL), text
    elif grammar.kind == "choice":
        assert text in json.loads(grammar.text)


def prompts(count: int) -> list[str]:
    texts = corpus.prompts(count, 60)
    lens = [30, 11, 55, 3]
    return [bytes(text[: lens[i % 4]]).decode("latin-1") for i, text in enumerate(texts)]


def workload(rng: random.Random, count: int, drawn: bool) -> list[SamplingParams]:
    """Requests with and without a form, some with penalties and a bias, some with short limits."""
    requests = []
    for i in range(count):
        fields: dict[str, object] = {"max_new_tokens": rng.choice([25, 90, 120])}
        if drawn:
            fields |= {"temperature": rng.choice([0.6, 1.2]), "seed": rng.randrange(1 << 60)}
            fields |= {"min_p": rng.choice([0, 0.05])}
        if rng.random() < 0.3:
            fields |= {"presence_penalty": 0.8, "frequency_penalty": 0.2}
        if i % 3:
            grammar = rng.choice(FORMS)
            fields |= {"structured": grammar, "logit_bias": ENDS}
            if rng.random() < 0.2:
                fields["max_draft_steps"] = rng.choice([0, 1, 4])
        else:
            fields["ignore_eos"] = True
        requests.append(SamplingParams(**fields))
    return requests


def run(engine: Engine, texts: list[str], params: list[SamplingParams]) -> list[list[int]]:
    outputs = engine.generate(texts, params)
    for output, request_params in zip(outputs, params, strict=True):
        assert output.finish_reason in ("stop", "length"), output.error
        if request_params.structured is not None and output.finish_reason == "stop":
            check(request_params.structured, output.text)
    assert all(pool.used_pages == 0 for pool in engine.pool_stats())
    return [output.token_ids for output in outputs]


#: Every way to draft, by turns greedy and drawn; the other half is `make test-full`'s.
RUNS = [
    pytest.param(
        case,
        drawn,
        id=f"{case}-{'drawn' if drawn else 'greedy'}",
        marks=[pytest.mark.full] if (number + drawn) % 2 else [],
    )
    for number, case in enumerate([*DRAFTING, "plain D=1"])
    for drawn in (False, True)
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("case", "drawn"), RUNS)
def test_the_text_is_that_of_plain_decoding(make, case, drawn):
    rng = random.Random(f"{case} {drawn}")
    params = workload(rng, 12, drawn)
    texts = prompts(len(params))
    expected = run(make("plain"), texts, params)
    engine = make(case)
    assert run(engine, texts, params) == expected
    if case == "few pages":
        assert engine.stats().retracted_ct > 0


@pytest.mark.sample(2)
@pytest.mark.parametrize("part", range(5))
def test_fifty_schemas_give_valid_texts(make, part):
    _all_are_valid(make("eagle-3 long spans", max_batch=5), OWN[part::5], seed=part)


SUITE = json.loads((ROOT / "tests/vectors/json_schemas.json").read_text(encoding="utf-8"))


@pytest.mark.sample(1)
@pytest.mark.parametrize("part", range(25))
def test_each_keyword_gives_valid_texts(make, part):
    """At least two hundred schemas by keyword, as JSON-Schema-Test-Suite orders its own."""
    assert len(SUITE) >= 200
    schemas = [entry["schema"] for entry in SUITE[part::25]]
    _all_are_valid(make("eagle-3 tree D=1", max_batch=5), schemas, seed=part)


@pytest.mark.sample(1)
@pytest.mark.parametrize("part", range(10))
def test_two_hundred_generated_schemas_give_valid_texts(make, part):
    schemas = [generated(seed) for seed in range(20 * part, 20 * part + 20)]
    _all_are_valid(make("eagle-3 tree D=1"), schemas, seed=part)


def _all_are_valid(engine: Engine, schemas: list[dict[str, object]], seed: int) -> None:
    """Greedy and drawn texts of each schema come to their end, and are valid."""
    params = [
        SamplingParams(
            max_new_tokens=350,
            structured=Grammar.json_schema(schema),
            logit_bias=ENDS,
            frequency_penalty=0.3,
            temperature=(i + seed) % 2,
            seed=i,
        )
        for i, schema in enumerate(schemas)
    ]
    outputs = engine.generate(prompts(len(params)), params)
    for schema, output in zip(schemas, outputs, strict=True):
        assert output.finish_reason == "stop", (schema, output.text, output.error)
        check(Grammar.json_schema(schema), output.text)


def test_a_forced_span_is_drafted_without_the_head(make, monkeypatch):
    """A key of 30 bytes: rounds of 21 tokens, with no call of the drafter for the lane."""
    engine = make("eagle-3 long spans")
    asked = []
    propose = EagleDrafter.propose
    monkeypatch.setattr(
        EagleDrafter, "propose", lambda self, *rest: asked.append(rest) or propose(self, *rest)
    )
    schema = closed(a_key_of_more_than_thirty_bytes_length={"const": "and a text that is fixed"})
    (output,) = engine.generate(
        ["Once"], SamplingParams(structured=Grammar.json_schema(schema), max_new_tokens=200)
    )
    check(Grammar.json_schema(schema), output.text)
    assert not asked
    assert max(output.accept_lens) == 21
    # All tokens but the bonus of each round, and the first of all, were forced.
    forced_ct = sum(output.accept_lens) - output.verify_ct
    assert engine.stats().forced_token_ct == forced_ct > 40
    assert output.token_ids[-1] == 257  # the end is drafted too


def test_other_lanes_are_drafted_by_the_head_beside_a_forced_one(make):
    """One shape for both: the trees of a part come from two sources, in the lanes' order."""
    engine = make("eagle chain D=1")
    schema = Grammar.json_schema(closed(quite_a_long_key_for_an_object={"type": "null"}))
    params = [
        SamplingParams(max_new_tokens=60, ignore_eos=True),
        SamplingParams(max_new_tokens=60, structured=schema),
        SamplingParams(max_new_tokens=60, ignore_eos=True, temperature=1, seed=3),
        SamplingParams(max_new_tokens=60, structured=schema, temperature=1, seed=4),
    ]
    texts = prompts(4)
    outputs = engine.generate(texts, params)
    expected = make("plain").generate(texts, params)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
    assert outputs[0].accept_len > 2 and outputs[1].accept_len > 3


def test_the_controller_learns_from_the_drafter_alone(make, monkeypatch):
    """Forced drafts are always right; counted, they would make the drafter look better."""
    engine, learnt = make("adaptive", forced_steps=0), []
    controller = engine.core.scheduler.round_shapes.controller
    monkeypatch.setattr(controller, "on_verify_complete", lambda *a: learnt.extend(a[2].tolist()))
    schema = closed(a_key_of_more_than_thirty_bytes_length={"const": "and a text that is fixed"})
    params = SamplingParams(structured=Grammar.json_schema(schema), max_new_tokens=200)
    (output,) = engine.generate(["Once"], params)
    assert output.accept_len > 2
    assert not any(learnt)  # of the last round at most, with one token left


#: Fields that would leave a form no token somewhere, alone or as defaults of the target.
BANS: list[dict[str, object]] = [
    {"min_new_tokens": 80},
    {"suppress_tokens": [*b'"{:yn']},
    {"begin_suppress_tokens": [*range(128)]},
    {"bad_words_ids": [[ord(c)] for c in "aeoy{}"] + [[*b'":']]},
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 2, "min_new_tokens": 30, "repetition_penalty": 1.3},
    {"suppress_tokens": [*range(259)]},
    {"suppress_tokens": [*range(128)], "min_new_tokens": 90, "no_repeat_ngram_size": 3},
]


@pytest.mark.sample(1)
@pytest.mark.parametrize("drawn", [False, True], ids=["greedy", "drawn"])
@pytest.mark.parametrize("case", DRAFTING)
def test_bans_yield_to_a_form_that_they_leave_no_token(make, target, monkeypatch, case, drawn):
    """Law: a request with a form ends with it, whatever its own bans or the target's files say."""
    short = [Grammar.choice(["yes", "no", "nothing"]), Grammar.regex("[a-c]{2}(xyz){3}")]
    forms = [*short, Grammar.json_schema(closed(id={"type": "boolean"}, id2={"type": "null"}))]
    texts = prompts(len(forms) * len(BANS))
    common = {"max_new_tokens": 90, "logit_bias": ENDS, "temperature": 0.8 if drawn else 0}
    params = [
        SamplingParams(structured=form, seed=i, **common, **bans)
        for i, (form, bans) in enumerate((f, b) for f in forms for b in BANS)
    ]
    expected = run(make("plain"), texts, params)
    outputs = make(case).generate(texts, params)
    assert [output.token_ids for output in outputs] == expected
    assert all(output.finish_reason == "stop" for output in outputs)
    for bans in BANS[::3]:
        defaults = GenerationDefaults(values=bans)
        monkeypatch.setattr(target, "generation_defaults", defaults)
        theirs = [SamplingParams(structured=form, seed=i, **common) for i, form in enumerate(forms)]
        with_bans = [SamplingParams(structured=form, seed=i, **common, **bans)
               for i, form in enumerate(forms)]  # fmt: skip
        assert run(make(case), texts[: len(forms)], theirs) == run(
            make("plain"), texts[: len(forms)], with_bans
        )


def test_bans_hold_where_the_form_leaves_another_token(make):
    """Law: a ban yields only where nothing else fits, and everywhere else it holds."""
    (text,) = prompts(1)
    params = [
        SamplingParams(structured=Grammar.regex("[a-z]{2,40}"), max_new_tokens=60, **bans)
        for bans in (
            {"min_new_tokens": 20, "logit_bias": {257: 50}},
            {"suppress_tokens": [*b"aeiou"], "logit_bias": dict.fromkeys(b"aeiou", 50.0)},
        )
    ]
    late, consonants = make("eagle-3 tree D=1").generate([text] * 2, params)
    assert len(late.token_ids) == 21 and late.finish_reason == "stop"
    assert not set(consonants.text) & set("aeiou") and len(consonants.text) >= 2


@pytest.mark.sample(1)
@pytest.mark.parametrize("drawn", [False, True], ids=["greedy", "drawn"])
@pytest.mark.parametrize("case", [case for case in DRAFTING if case != "few pages"])
def test_an_end_that_is_ordinary_text_ends_no_form_early(make, target, monkeypatch, case, drawn):
    """As the target's own end, as a stop token, in forms and beside them: as in plain decoding."""
    likely = {ord("e"): 6.0, ord(" "): 4.0}
    schema = closed(id={"type": "integer"}, a_word={"type": "string", "maxLength": 9})
    forms = [Grammar.regex("[a-f]{3,30}"), Grammar.regex("([a-e]+ ?){2,9}[.]"), None]
    forms.append(Grammar.json_schema(schema))
    params = [
        SamplingParams(
            max_new_tokens=90,
            structured=form,
            stop_token_ids=stops,
            logit_bias=ENDS | likely if form else {},
            temperature=0.9 if drawn else 0,
            seed=i,
        )
        for i, (form, stops) in enumerate((f, s) for f in forms for s in ((), (32,), (258, 34)))
    ]
    monkeypatch.setattr(target, "eos_token_ids", frozenset([ord("e")]))
    texts = prompts(len(params))
    expected = make("plain").generate(texts, params)
    outputs = make(case).generate(texts, params)
    num_whole = 0
    for output, plain, request_params in zip(outputs, expected, params, strict=True):
        assert output.token_ids == plain.token_ids and output.text == plain.text
        if output.finish_reason == "error":  # JSON without quotes
            assert 34 in request_params.stop_token_ids and "no token can follow" in output.error
        elif request_params.structured is not None and output.finish_reason == "stop":
            check(request_params.structured, output.text)
            num_whole += 1
    assert num_whole > 4


def test_a_stop_string_ends_a_form_where_it_stands(make):
    """A stop string is the user's own wish: the text before it is a beginning of the form."""
    params = SamplingParams(
        max_new_tokens=40, structured=Grammar.choice(["no, not at all"]), stop="t at"
    )
    for case in ("plain", "eagle-3 long spans"):
        (output,) = make(case).generate(["Once"], params)
        assert (output.text, output.stop_hit) == ("no, no", "t at")


def test_samples_and_turns_have_their_form(make):
    """Samples of one prompt each follow the form; a session's turns may each have another."""
    engine, plain = make("eagle-3 tree D=1"), make("plain")
    params = SamplingParams(
        n=3, temperature=1.3, seed=1, max_new_tokens=40, structured=Grammar.regex("[a-z ]{5,20}[.]")
    )
    outputs = engine.generate("Once", params)
    assert len({output.text for output in outputs}) == 3
    for output, other in zip(outputs, plain.generate("Once", params), strict=True):
        assert output.token_ids == other.token_ids
        check(params.structured, output.text)
    with engine.open_session() as session:
        for grammar in (FORMS[5], None, FORMS[0], FORMS[3]):
            turn_params = SamplingParams(max_new_tokens=80, structured=grammar, logit_bias=ENDS)
            output = session.append("And then? ", turn_params).output()
            assert output.finish_reason == ("length" if grammar is None else "stop")
            if grammar is not None:
                check(grammar, output.text)


def test_a_form_that_cannot_go_on_ends_its_request_alone(make, monkeypatch):
    """The library gives up in the middle: an error with the reason, and the others go on."""
    from specpool.engine.text.structured.matcher import Matcher

    engine, calls = make("eagle chain D=1"), []
    mask = Matcher._mask

    def fails(self: Matcher) -> object:
        calls.append(self)
        if len(calls) > 6:
            self._fail("the grammar is too complex")
            return mask(self) * 0
        return mask(self)

    monkeypatch.setattr(Matcher, "_mask", fails)
    params = [
        SamplingParams(max_new_tokens=30, structured=Grammar.regex("[a-z]{20,40}")),
        SamplingParams(max_new_tokens=30, ignore_eos=True),
    ]
    broken, whole = engine.generate(["Once", "Once"], params)
    assert broken.finish_reason == "error"
    assert re.match(r"structured: the grammar is too complex, at position \d+", broken.error)
    assert whole.finish_reason == "length" and len(whole.token_ids) == 30
    assert all(pool.used_pages == 0 for pool in engine.pool_stats())
