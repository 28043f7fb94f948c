"""`specpool.transformers.generate` beside the `generate` of the same model."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
)

from paths import ROOT
from specpool import ConfigError, Engine
from specpool import transformers as door
from specpool.engine.draft import NgramDrafter

EOS, PAD = 7, 0
LATE = RepetitionPenaltyLogitsProcessor(1.2, prompt_ignore_length=2)

TOO_EARLY = SuppressTokensAtBeginLogitsProcessor([3], begin_index=2)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=EOS,
        pad_token_id=PAD,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def batch():
    """Four prompts of different lengths, padded on the left."""
    generator = torch.Generator().manual_seed(5)
    ids, mask = torch.full((4, 12), PAD), torch.zeros(4, 12, dtype=torch.long)
    for row, length in enumerate((12, 5, 9, 1)):
        ids[row, 12 - length :] = torch.randint(8, 64, (length,), generator=generator)
        mask[row, 12 - length :] = 1
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("draft", [None, "ngram"])
def test_greedy_text_is_that_of_the_model(model, batch, draft):
    wanted = model.generate(**batch, max_new_tokens=40, do_sample=False)
    ended = (wanted[:, 12:] == EOS).any(dim=1)
    assert ended.any() and not ended.all(), "some rows end early, and some do not"
    found = model.generate(
        **batch, max_new_tokens=40, do_sample=False, custom_generate=door.generate, draft=draft
    )
    assert found.tolist() == wanted.tolist()
    direct = door.generate(model, **batch, max_new_tokens=40, do_sample=False, draft=draft)
    assert direct.tolist() == wanted.tolist()
    # The model is its own again.
    assert model.generate(**batch, max_new_tokens=40, do_sample=False).tolist() == wanted.tolist()


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 1.6},
        {"repetition_penalty": 0.6},
        {"sequence_bias": {(EOS,): -30.0, (20,): 2.0}},
        {"repetition_penalty": 1.3, "sequence_bias": {(20,): 3.0}},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[62, 31], [10, 57], [11], [EOS]]},
        {"suppress_tokens": [EOS, 20], "begin_suppress_tokens": [33, 12]},
        {"min_new_tokens": 25},
        {"min_length": 30},
        {"do_sample": True, "min_p": 1.0, "repetition_penalty": 1.6, "top_k": 0},
    ],
)
def test_penalties_and_biases_are_those_of_the_model(model, batch, fields):
    """Token by token; a padded row's penalty counts its own prompt, as in transformers."""
    plain = model.generate(**batch, max_new_tokens=30, do_sample=False)
    wanted = model.generate(**batch, max_new_tokens=30, **{"do_sample": False, **fields})
    assert wanted.tolist() != plain.tolist()
    found = door.generate(
        model, **batch, max_new_tokens=30, draft="ngram", **{"do_sample": False, **fields}
    )
    assert found.tolist() == wanted.tolist()


def test_unigrams_of_padding_are_refused(model, batch):
    """transformers bans the padding's token with them, which no prompt of an engine has."""
    options = {"max_new_tokens": 5, "do_sample": False, "no_repeat_ngram_size": 1}
    with pytest.raises(ConfigError, match="NoRepeatNGramLogitsProcessor is not supported here"):
        door.generate(model, **batch, **options)
    (row, *_) = batch["input_ids"]
    wanted = model.generate(row[None], **options)
    assert door.generate(model, row[None], **options).tolist() == wanted.tolist()


def test_an_engine_is_used_again(model, batch):
    wanted = model.generate(**batch, max_new_tokens=20, do_sample=False)
    with Engine.from_pretrained(model, draft=NgramDrafter(), max_batch=4, page_size=4) as engine:
        for _ in range(2):
            found = door.generate(model, **batch, max_new_tokens=20, do_sample=False, engine=engine)
            assert found.tolist() == wanted.tolist()
        assert engine.ledger.index_size[0] > 0
    assert (
        engine.ledger.free_pages(0) + engine.ledger.cached_pages(0)
        == engine.ledger.groups[0].num_pages
    )


def test_samples_follow_the_seed_of_torch_and_the_models_distribution(model):
    """One token after one prompt, drawn often: the frequencies are those of the logits."""
    ids = torch.tensor([[11, 12, 13]])
    options = {
        "do_sample": True,
        "temperature": 0.8,
        "top_k": 6,
        "top_p": 0.95,
        "max_new_tokens": 1,
    }

    def draws(seed: int) -> list[int]:
        torch.manual_seed(seed)
        found = door.generate(model, ids, num_return_sequences=600, **options)
        return found[:, -1].tolist()

    first = draws(1)
    assert first == draws(1) and first != draws(2)
    logits = model(ids).logits[0, -1] / 0.8
    kept, tokens = logits.topk(6)
    mass = kept.softmax(0)
    keep = mass.cumsum(0) - mass < 0.95
    wanted = (mass * keep / (mass * keep).sum()).tolist()
    for token, share in zip(tokens.tolist(), wanted, strict=True):
        spread = (share * (1 - share) / 600) ** 0.5
        assert abs(first.count(token) / 600 - share) <= 5 * spread, token


def test_a_dictionary_if_the_configuration_asks_for_it(model, batch):
    found = door.generate(model, **batch, max_new_tokens=3, return_dict_in_generate=True)
    assert found.sequences.shape == (4, 15)


def test_a_recipe_in_a_folder(model, batch, tmp_path):
    """`custom_generate="folder"`, as the page shows it."""
    wanted = model.generate(**batch, max_new_tokens=8, do_sample=False)
    recipe = ROOT / "examples/transformers"
    found = model.generate(
        **batch,
        max_new_tokens=8,
        do_sample=False,
        custom_generate=str(recipe),
        trust_remote_code=True,
    )
    assert found.tolist() == wanted.tolist()


def filled_cache(model):
    """The argument of `generate`, by its name in this version of transformers."""
    output = model(torch.tensor([[1, 2]]), use_cache=True)
    name = "cache" if "cache" in output else "past_key_values"
    return {name: output[name]}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_beams": 2}, "num_beams must be 1, got 2"),
        ({"repetition_penalty": 5e-324}, r"repetition_penalty must be .* \[0.01, 10\], got 5e-324"),
        ({"sequence_bias": {(11, 12): 2.0}}, r"the bias 2 of \[11, 12\] is not supported"),
        ({"sequence_bias": {(11,): 101.0}}, r"the bias 101 of \[11\] is not supported"),
        ({"encoder_no_repeat_ngram_size": 2}, "EncoderNoRepeatNGramLogitsProcessor is not supp"),
        ({"logits_processor": [TOO_EARLY]}, "SuppressTokensAtBeginLogitsProcessor is not supp"),
        ({"logits_processor": [MinPLogitsWarper(0.1)]}, "MinPLogitsWarper is not supported"),
        ({"logits_processor": [LATE]}, "RepetitionPenaltyLogitsProcessor is not supported here"),
        ({"do_sample": True, "typical_p": 0.5}, "TypicalLogitsWarper is not supported here"),
        ({"forced_eos_token_id": 3}, "ForcedEOSTokenLogitsProcessor"),
        ({"max_time": 1.0}, "MaxTimeCriteria"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores"),
        ({"streamer": object()}, "Engine.stream"),
        ({"options": {"pages": 3}}, "pages"),
        ({"attention_mask": torch.tensor([[1, 1, 0]])}, "pad on the left"),
    ],
)
def test_what_cannot_be_served_is_refused(model, arguments, words):
    before = model.config._attn_implementation
    with pytest.raises(ConfigError, match=words):
        door.generate(model, torch.tensor([[11, 12, 13]]), max_new_tokens=4, **arguments)
    assert model.config._attn_implementation == before


def test_a_begun_cache_is_refused(model):
    with pytest.raises(ConfigError, match="holds 2 tokens already"):
        ids = torch.tensor([[1, 2, 3]])
        door.generate(model, ids, **filled_cache(model), max_new_tokens=2)


def test_an_engine_of_another_model_is_refused(model):
    other = LlamaForCausalLM(model.config).eval()
    ids = torch.tensor([[1, 2, 3]])
    with Engine.from_pretrained(other, max_batch=1) as engine:
        with pytest.raises(ConfigError, match="another model"):
            door.generate(model, ids, max_new_tokens=2, engine=engine)
        with pytest.raises(ConfigError, match="give engine alone"):
            door.generate(other, ids, max_new_tokens=2, engine=engine, draft="ngram")
