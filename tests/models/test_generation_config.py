"""Law: what a target's files say of its texts is taken as transformers takes it, or named once."""

from __future__ import annotations

import itertools
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import GenerationConfig

from paths import ROOT
from specpool import ConfigError, Engine, SamplingParams, Shape
from specpool import transformers as door
from specpool.engine.draft.scripted import ScriptedDrafter
from specpool.engine.models import generation_defaults
from specpool.engine.models.generation_defaults import NOT_TAKEN, TAKEN, GenerationDefaults
from specpool.engine.sampling_params import NEUTRAL

VOCAB, EOS, NUM_NEW = 96, 95, 28
PROMPTS = [[*range(40, 50), *range(40, 50), *range(40, 47)], [7], [*range(60, 72)]]


@pytest.fixture(scope="module")
def model() -> transformers.PreTrainedModel:
    """A decoder whose greedy text depends on all of it, and repeats itself."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        eos_token_id=EOS,
        bos_token_id=0,
        initializer_range=0.25,
    )
    return transformers.Qwen3ForCausalLM(config).eval()


@pytest.fixture
def says(model: transformers.PreTrainedModel) -> Iterator[Any]:
    """Set the model's generation_config for one test."""
    before = model.generation_config

    def set_config(**values: Any) -> None:
        model.generation_config = GenerationConfig(**{"eos_token_id": EOS, **values})

    yield set_config
    model.generation_config = before


def theirs(model: Any, prompt: list[int], **given: Any) -> list[int]:
    ids = torch.tensor([prompt])
    given = {"max_new_tokens": NUM_NEW, "pad_token_id": 0, "do_sample": False, **given}
    with torch.inference_mode():
        text = model.generate(ids, attention_mask=torch.ones_like(ids), **given)
    return text[0, len(prompt) :].tolist()


def ours(model: Any, expected: list[list[int]] | None, **given: Any) -> list[list[int]]:
    """The engine's texts, plain, or with drafts in trees along the expected texts."""
    options: dict[str, Any] = {}
    if expected is not None:
        texts = [prompt + text for prompt, text in zip(PROMPTS, expected, strict=True)]
        options["draft"] = ScriptedDrafter(texts, vocab_size=VOCAB)
        options["shape"] = Shape.eagle(4, 2, 8)
    params = SamplingParams(max_new_tokens=NUM_NEW, **given)
    with Engine.from_pretrained(
        model, max_batch=4, page_size=4, max_context_len=128, **options
    ) as engine:
        outputs = engine.generate(PROMPTS, params, progress=False)
    assert [output.error for output in outputs] == [None] * len(PROMPTS)
    if expected is not None:
        assert max(output.accept_len for output in outputs) > 1.5
    return [output.token_ids for output in outputs]


@pytest.fixture(scope="module")
def plain(model: Any) -> list[list[int]]:
    """What the model says before a file says anything."""
    return [theirs(model, prompt) for prompt in PROMPTS]


def cases(first: list[int]) -> dict[str, dict[str, Any]]:
    """Values of each key that is taken, which change the model's texts; `first` is one of them."""
    early = first[5]
    pairs = [list(pair) for pair in itertools.pairwise(first)]
    return {
        "repetition_penalty": {"repetition_penalty": 1.7},
        "repetition_penalty of a file that draws": {
            "repetition_penalty": 1.4,
            "do_sample": True,
            "temperature": 0.7,
            "top_k": 20,
            "top_p": 0.8,
        },
        "no_repeat_ngram_size 1": {"no_repeat_ngram_size": 1},
        "no_repeat_ngram_size 2": {"no_repeat_ngram_size": 2},
        "no_repeat_ngram_size 3": {"no_repeat_ngram_size": 3},
        "suppress_tokens": {"suppress_tokens": [first[0], first[3], VOCAB + 7]},
        "begin_suppress_tokens": {"begin_suppress_tokens": [first[0]]},
        "bad_words_ids": {"bad_words_ids": [[first[0]], *pairs[2:9], first[9:14], [EOS]]},
        "min_new_tokens": {"min_new_tokens": 20, "eos_token_id": [early, EOS]},
        "min_length": {"min_length": 33, "eos_token_id": [early, EOS]},
        "both lengths": {"min_new_tokens": 9, "min_length": 38, "eos_token_id": [early]},
        "eos_token_id": {"eos_token_id": [early]},
        "several": {
            "repetition_penalty": 1.1,
            "no_repeat_ngram_size": 2,
            "suppress_tokens": [first[0]],
            "min_new_tokens": 20,
            "eos_token_id": [early],
        },
        "temperature without do_sample": {"temperature": 0.3, "top_k": 3, "min_p": 0.2},
    }


CASES = (
    "repetition_penalty",
    "repetition_penalty of a file that draws",
    "no_repeat_ngram_size 1",
    "no_repeat_ngram_size 2",
    "no_repeat_ngram_size 3",
    "suppress_tokens",
    "begin_suppress_tokens",
    "bad_words_ids",
    "min_new_tokens",
    "min_length",
    "both lengths",
    "eos_token_id",
    "several",
    "temperature without do_sample",
)


@pytest.mark.sample(8)
@pytest.mark.parametrize("case", CASES)
def test_a_greedy_text_is_that_of_generate(model, plain, says, case):
    """Plain, drafted, and by the door; a file's own values change the text, or are idle in both."""
    values = cases(plain[0])[case]
    says(**values)
    wanted = [theirs(model, prompt) for prompt in PROMPTS]
    assert (wanted == plain) == (case == "temperature without do_sample")
    assert ours(model, None) == wanted
    assert ours(model, wanted) == wanted
    given = {"max_new_tokens": NUM_NEW, "do_sample": False, "pad_token_id": 0}
    found = door.generate(model, torch.tensor(PROMPTS[:1]), draft="ngram:1", **given)
    assert found[0, len(PROMPTS[0]) :].tolist() == wanted[0]


def test_a_request_comes_before_the_file(model, plain, says):
    says(
        repetition_penalty=1.7,
        no_repeat_ngram_size=2,
        suppress_tokens=plain[0][:3],
        begin_suppress_tokens=[plain[1][0]],
        bad_words_ids=[[plain[2][1]]],
        min_new_tokens=20,
    )
    assert ours(model, None) != plain
    off = {name: value for name, value in NEUTRAL.items() if name not in ("top_k", "top_p")}
    assert ours(model, plain, **off) == plain


def test_a_drawn_text_takes_the_files_truncations(model, says):
    """At `top_k` 1 drawn text is greedy; a request's own `top_k` comes first."""
    plain = [theirs(model, prompt) for prompt in PROMPTS]
    says(do_sample=True, temperature=0.6, top_k=1)
    assert ours(model, plain, temperature=3.0, seed=1) == plain
    assert ours(model, None, temperature=3.0, seed=1, top_k=0) != plain
    assert ours(model, plain) == plain, "greedy, as with do_sample=False"


@pytest.mark.parametrize(
    ("values", "temperature"),
    [
        ({}, 1.0),
        ({"do_sample": True}, 1.0),
        ({"do_sample": True, "temperature": 0.6}, 0.6),
        ({"temperature": 0.6}, 0.6),
        ({"do_sample": False, "temperature": 0.6}, 0.0),
    ],
)
def test_a_server_draws_at_the_files_temperature(values, temperature):
    defaults = GenerationDefaults.from_config(GenerationConfig(**values), VOCAB)
    assert defaults.server_temperature == temperature


def value_of(key: str) -> Any:
    """A value of a key that would change a text; of an unknown key any."""
    ids = ("suppress_tokens", "begin_suppress_tokens", "dola_layers", "eos_token_id")
    if key == "bad_words_ids":
        return [[3], [4, 5]]
    if key == "min_p":
        return 0.25
    return [3, 4] if key in ids else True if key == "do_sample" else 2


def test_every_key_of_transformers_is_taken_idle_or_named(caplog):
    """Over transformers' own list: a key that is nowhere is named, as are those not taken."""
    idle = generation_defaults._NO_EFFECT
    known = vars(GenerationConfig()).keys()
    assert not TAKEN & idle and not TAKEN & NOT_TAKEN.keys() and not idle & NOT_TAKEN.keys()
    for key in known:
        config = GenerationConfig()
        setattr(config, key, 0.5 if key == "top_p" else value_of(key))
        defaults = GenerationDefaults.from_config(config, VOCAB)
        caplog.clear()
        with caplog.at_level(logging.INFO, "specpool"):
            defaults.log(draws=False)
        is_named = f" {key} " in caplog.text
        if key in ("temperature", "eos_token_id"):  # the end is the target's; no do_sample
            assert not is_named
        else:
            assert is_named != (key in idle), key
    undecided = known - TAKEN - idle - NOT_TAKEN.keys()
    assert not undecided, f"decide in generation_defaults.py: {sorted(undecided)}"


def test_the_page_names_the_keys_that_are_taken():
    page = (ROOT / "docs/engine.md").read_text(encoding="utf-8")
    table = page.split("| key of generation_config.json | here |\n")[1].split("\n\n")[0]
    rows = [set(re.findall(r"`(\w+)`", line.split("|")[1])) for line in table.splitlines()]
    *taken, others = [names for names in rows if names]
    assert set().union(*taken) == TAKEN
    assert others <= NOT_TAKEN.keys()


def test_a_key_of_a_newer_transformers_is_named(caplog, monkeypatch):
    class Newer(GenerationConfig):
        def __init__(self, **given: Any) -> None:
            self.mirostat_tau = given.pop("mirostat_tau", None)
            super().__init__(**given)

    defaults = GenerationDefaults.from_config(Newer(mirostat_tau=5.0, chat_format="chatml"), VOCAB)
    defaults.log(draws=False)
    assert "mirostat_tau 5.0" in caplog.text
    assert "chat_format" not in caplog.text, "generate does not act on it"


@pytest.mark.parametrize("key", sorted(NOT_TAKEN))
def test_a_value_that_changes_nothing_is_not_named(key, caplog):
    for value in NOT_TAKEN[key]:
        config = GenerationConfig()
        setattr(config, key, value)
        assert not GenerationDefaults.from_config(config, VOCAB).not_taken


def test_what_is_not_taken_is_named_once_with_its_value(model, says, caplog):
    says(do_sample=True, temperature=0.7, typical_p=0.9, max_length=99, top_k=30)
    with Engine.from_pretrained(model, max_batch=4, page_size=4, max_context_len=128) as engine:
        for _ in range(2):
            engine.generate(PROMPTS, SamplingParams(max_new_tokens=2), progress=False)
    (line,) = [one.message for one in caplog.records if one.levelno == logging.WARNING]
    named = "do_sample True, max_length 99, temperature 0.7, typical_p 0.9"
    assert line.endswith(f"a request has to say what it wants: {named}")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"repetition_penalty": "much"}, "repetition_penalty must be a number"),
        ({"repetition_penalty": -1.0}, r"repetition_penalty must be a number in \[0.01, 10\]"),
        ({"no_repeat_ngram_size": 2.5}, "no_repeat_ngram_size must be an integer"),
        ({"suppress_tokens": "all"}, "suppress_tokens must be a tuple of ids, got 'all'"),
        ({"suppress_tokens": [1.5]}, "suppress_tokens must be an integer"),
        ({"bad_words_ids": [3]}, "bad_words_ids must be a tuple of ids, got 3"),
        ({"bad_words_ids": [[]]}, "bad_words_ids has a sequence without tokens"),
        ({"min_new_tokens": -1}, "min_new_tokens must be an integer"),
        ({"min_length": "5"}, "min_length must be an integer"),
        ({"top_k": True}, "top_k must be an integer"),
        ({"do_sample": "yes"}, "do_sample must be true or false, got 'yes'"),
        ({"do_sample": True, "temperature": "hot"}, "temperature must be a number"),
    ],
)
def test_a_value_that_cannot_be_taken_is_refused(model, values, message):
    config = GenerationConfig()
    for key, value in values.items():  # its constructor checks some of them
        setattr(config, key, value)
    before = model.generation_config
    model.generation_config = config
    try:
        with pytest.raises(ConfigError, match=f"the target's generation_config: {message}"):
            Engine.from_pretrained(model, max_batch=2, page_size=4, max_context_len=64)
    finally:
        model.generation_config = before
    Engine.from_pretrained(model, max_batch=2, page_size=4, max_context_len=64).close()


def test_the_file_in_a_folder_is_read(model, tmp_path: Path):
    """Written as a publisher writes it, with keys that this version of transformers lacks."""
    first = theirs(model, PROMPTS[0])[0]
    model.save_pretrained(tmp_path)
    content = {"suppress_tokens": [first], "eos_token_id": EOS, "chat_format": "chatml"}
    (tmp_path / "generation_config.json").write_text(json.dumps(content))
    wanted = [theirs(model, prompt, suppress_tokens=[first]) for prompt in PROMPTS]
    assert ours(str(tmp_path), wanted) == wanted
