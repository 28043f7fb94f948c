"""Laws of families with other kinds of attention: their texts equal those of transformers."""

from __future__ import annotations

import copy
import random

import pytest
import torch

from families import VOCAB, make_config, make_model
from lossless import Comparison, Reference
from specpool import Engine, SamplingParams, Shape
from specpool.engine.attention import lanes
from specpool.engine.draft import NgramDrafter, ScriptedDrafter
from specpool.engine.models import target as target_module

# Latents as expanded heads; two attentions a layer; chunks; torch's own attention function.
FAMILIES = ("deepseek_v2", "deepseek_v3", "minicpm3", "longcat_flash", "llama4", "falcon")
FAMILIES += ("falcon_multi_query", "afmoe")
CHAIN, TREE = Shape.eagle(3, 1, 4), Shape.eagle(4, 4, 16)
NUM_TOKENS = 30
GREEDY = SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True)


def make_prompts() -> list[list[int]]:
    rng = random.Random(3)
    texts = [[rng.randrange(3, VOCAB) for _ in range(n)] for n in (17, 33, 1, 8)]
    return [*texts, (texts[0][:5] * 5)[:22]]


PROMPTS = make_prompts()


@pytest.fixture(scope="module")
def references() -> dict[str, Reference]:
    """Made as they are asked for."""
    return {}


@pytest.fixture
def reference(family: str, references) -> Reference:
    if family not in references:
        config = make_config(family)
        if config is None:
            pytest.skip(f"this transformers has no {family}")
        references[family] = Reference(make_model(config))
    return references[family]


def drafter_of(kind: str | None, reference: Reference):
    if kind != "scripted":
        return NgramDrafter(min_match=0) if kind == "ngram" else None
    texts = [[*prompt, *reference.text(prompt, NUM_TOKENS)] for prompt in PROMPTS]
    return ScriptedDrafter(texts, vocab_size=VOCAB, error_rate=0.3)


def build(reference: Reference, draft, shape: Shape | None, **options) -> Engine:
    defaults = {"page_size": 4, "max_batch": 3, "prefill_tokens": 16, "max_context_len": 80}
    options = {**defaults, "busy_check": 2, **options}
    return Engine.from_pretrained(
        copy.deepcopy(reference.model), draft=draft, shape=shape if draft else None, **options
    )


def compare(reference: Reference, outputs) -> None:
    comparison = Comparison()
    for output in outputs:
        assert len(output.token_ids) == NUM_TOKENS, output.error
        comparison.add(reference, output.prompt_ids, output.token_ids)
    comparison.finish()


@pytest.mark.sample(3)
@pytest.mark.parametrize(("page_size", "layout"), [(1, "dense"), (16, "holey"), (4, "dense")])
@pytest.mark.parametrize(
    ("draft", "shape"),
    [(None, CHAIN), ("ngram", CHAIN), ("scripted", CHAIN), ("scripted", TREE)],
    ids=["plain", "ngram", "chain", "tree"],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_speaks_as_transformers_does(reference, draft, shape, page_size, layout):
    """More prompts than rows, in chunks, checked after each step."""
    options = {"page_size": page_size, "layout": layout, "policy": "double_buffer"}
    with build(reference, drafter_of(draft, reference), shape, **options) as engine:
        outputs = engine.generate(PROMPTS, GREEDY)
        if draft == "scripted":
            assert max(n for output in outputs for n in output.accept_lens) >= 4
    compare(reference, outputs)


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_retracted_row_says_the_same(reference):
    """A pool of little more than one row."""
    options = {"num_pages": 30, "headroom": 0, "mixed_chunks": True}
    with build(reference, drafter_of("scripted", reference), CHAIN, **options) as engine:
        compare(reference, engine.generate(PROMPTS, GREEDY))
        assert engine.core.scheduler.num_retracted > 0


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", ["llama4", "deepseek_v3"])
def test_a_conversation_goes_on_from_its_pages(reference):
    """A cut, a fork, and turns that begin in the middle of a chunk."""
    with build(reference, drafter_of("ngram", reference), CHAIN, max_context_len=160) as engine:
        said: list[int] = []
        with engine.open_session() as session:
            for text in (PROMPTS[1], PROMPTS[0]):
                output = session.append(text, GREEDY).output()
                said += text
                assert output.token_ids == reference.text(said, NUM_TOKENS)
                said += output.token_ids
            session.rewind(27)
            with session.fork() as other:
                for each in (session, other):
                    output = each.append(PROMPTS[0], GREEDY).output()
                    expected = reference.text([*said[:27], *PROMPTS[0]], NUM_TOKENS)
                    assert output.token_ids == expected


@pytest.mark.parametrize("family", ["llama4"])
@pytest.mark.parametrize("overlap_depth", [0, 1])
def test_chunks_under_overlap(reference, overlap_depth):
    """The host may not know where the lanes stand."""
    drafter = drafter_of("scripted", reference)
    with build(reference, drafter, TREE, overlap_depth=overlap_depth, busy_check=0) as engine:
        compare(reference, engine.generate(PROMPTS, GREEDY))


# --- the guards ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama4"])
@pytest.mark.parametrize("draft", [None, "scripted"])
def test_a_window_is_no_chunk(reference, draft, monkeypatch):
    """The keys of the chunk before are still there; only the mask hides them."""
    monkeypatch.setattr(lanes, "_chunks", lambda bias, *_: bias)
    with build(reference, drafter_of(draft, reference), TREE) as engine:
        with pytest.raises(AssertionError):
            compare(reference, engine.generate(PROMPTS, GREEDY))


@pytest.mark.parametrize("family", ["llama4"])
def test_queries_are_scaled_by_their_positions(reference, monkeypatch):
    """Their scale does not depend on their places in the batch."""

    class Careless(target_module._Standing):
        def get_seq_length(self, *_):
            return 0

    monkeypatch.setattr(target_module, "_Standing", Careless)
    with build(reference, None, None) as engine:
        with pytest.raises(AssertionError):
            compare(reference, engine.generate(PROMPTS, GREEDY))


def test_shared_heads_are_kept_once():
    """Falcon copies each KV head for all heads that read it."""
    with Engine.from_pretrained(make_model(make_config("falcon")), max_context_len=64) as engine:
        assert {layer.num_kv_heads for layer in engine.target.layer_kv} == {2}


@pytest.mark.parametrize("family", ["falcon"])
def test_torchs_attention_is_given_back(reference):
    model = copy.deepcopy(reference.model)
    tokens = torch.tensor([PROMPTS[0]])
    with torch.inference_mode():
        before = model(input_ids=tokens).logits
    with Engine.from_pretrained(model, max_context_len=64):
        pass
    assert model.config._attn_implementation == "eager"
    attention = model.transformer.h[0].self_attention
    assert attention.config is model.config
    with torch.inference_mode():
        assert torch.equal(model(input_ids=tokens).logits, before)
