"""Laws of a language model as drafter: its KV is its own, whatever happened to the row before."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from proposals import Logits, check, record
from recurrent_families import make_config, make_model
from specpool import CheckpointError, ConfigError, Engine, EngineConfig, SamplingParams, Shape
from specpool.cli.plan.model import model_of_files
from specpool.cli.plan.question import Question
from specpool.engine.assets import corpus, resolve
from specpool.engine.draft import EagleDrafter, LMDrafter, NgramDrafter
from specpool.engine.models import TargetModel
from specpool.engine.models.files.draft_kind import is_language_model

DRAFT = "specpool/tiny-draft"
PROMPTS = [p[:n] for p, n in zip(corpus.prompts(3), (17, 30, 9), strict=True)]
CHAIN, TREE = Shape.eagle(3, 1, 4), Shape.eagle(4, 4, 12)
LAYOUTS = [
    {},
    {"page_size": 3, "layout": "holey"},
    {"page_size": 4, "layout": "holey", "placement": "shared"},
    {"page_size": 1, "overlap_depth": 1},
    {"page_size": 4, "worker": "v1"},
]


@pytest.fixture(scope="module")
def target() -> Iterator[TargetModel]:
    with TargetModel.from_pretrained(resolve("specpool/tiny"), dtype="float32") as model:
        yield model


@pytest.fixture(scope="module")
def draft() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(resolve(DRAFT)).float().eval()


def make(**options: object) -> Engine:
    return Engine.from_pretrained(draft=DRAFT, max_context_len=400, **options)


def logits_after(draft: torch.nn.Module, text: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return draft(torch.tensor([text]), use_cache=False).logits[0, -1]


def logits_of(draft: torch.nn.Module) -> Logits:
    return lambda text, path: logits_after(draft, [*text, *path])


@pytest.mark.sample(2)
@pytest.mark.parametrize(("shape", "options"), list(itertools.product((CHAIN, TREE), LAYOUTS)))
def test_proposals_equal_the_plain_models(draft, shape, options):
    """Pages, masks and kept cells change nothing, in the first rounds and in late ones."""
    with make(shape=shape, **options) as engine:
        trees = record(engine)
        outputs = engine.generate(PROMPTS, SamplingParams(max_new_tokens=40, ignore_eos=True))
    texts = [o.prompt_ids + o.token_ids for o in outputs]
    whole = [each for each in trees if len(each[0]) == len(PROMPTS)]
    check(logits_of(draft), texts, [*whole[:2], whole[-1]])


def test_a_chain_that_was_accepted_as_a_whole_leaves_no_hole():
    """Its last draft has no KV until `keep` writes it."""
    with make(shape=CHAIN) as engine:
        keys = engine.drafter._kv[0][1]
        (output,) = engine.generate(PROMPTS[:1], SamplingParams(max_new_tokens=60, ignore_eos=True))
        num_written = keys.abs().sum((1, 2)).count_nonzero()
    assert max(output.accept_lens) == CHAIN.num_steps + 1
    # All but the last token, which no forward has read.
    assert num_written >= len(output.prompt_ids) + len(output.token_ids) - 1


@pytest.mark.sample(1)
@pytest.mark.parametrize("shape", [CHAIN, TREE])
def test_sessions_the_prefix_cache_and_retraction_keep_the_drafts(draft, shape):
    options = {"page_size": 4, "headroom": 0, "num_pages": 50, "max_context_len": 160}
    with Engine.from_pretrained(draft=DRAFT, shape=shape, **options) as engine:
        plain = SamplingParams(max_new_tokens=60, ignore_eos=True)
        outputs = engine.generate(PROMPTS, plain)
        assert engine.core.scheduler.num_retracted > 0
        with engine.open_session() as session:
            session.append(PROMPTS[0], plain).output()
            trees = record(engine)
            turn = session.append(PROMPTS[1][:11], plain).output()
        (again,) = engine.generate([PROMPTS[2]], plain)
    assert again.token_ids == outputs[2].token_ids
    text = [*turn.prompt_ids, *turn.token_ids]
    check(logits_of(draft), [text], trees[: len(turn.accept_lens)][:6])


@pytest.mark.sample(1)
@pytest.mark.parametrize("options", LAYOUTS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_is_that_of_plain_decoding(target, options, temperature):
    params = SamplingParams(max_new_tokens=40, temperature=temperature, seed=5, ignore_eos=True)
    plain = Engine(target, config=EngineConfig(max_context_len=300)).generate(PROMPTS, params)
    for shape in (CHAIN, TREE):
        drafter = LMDrafter.from_pretrained(resolve(DRAFT), target)
        config = EngineConfig(shape=shape, max_context_len=300, **options)
        outputs = Engine(target, drafter, config=config).generate(PROMPTS, params)
        assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
        assert max(o.accept_lens[0] for o in outputs) > 1


# --- several drafters ----------------------------------------------------------------------------


def test_each_row_is_drafted_by_the_drafter_that_its_request_names():
    drafts = {"small": DRAFT, "copy": "ngram", "head": "specpool/tiny-eagle"}
    with Engine.from_pretrained(draft=drafts, max_context_len=200) as engine:
        lanes = dict.fromkeys(drafts, 0)
        for name, one in engine.drafters.items():
            propose = one.propose

            def counting(which, *rest, propose=propose, name=name):
                lanes[name] += len(which.seq_lens)
                return propose(which, *rest)

            one.propose = counting
        given = [SamplingParams(drafter=name, ignore_eos=True) for name in ("copy", None, "head")]
        outputs = engine.generate(PROMPTS, given)
    rounds = [len(output.accept_lens) for output in outputs]
    assert lanes["small"] == rounds[1] and lanes["head"] == rounds[2]
    assert 0 < lanes["copy"] <= rounds[0] + 1


# --- bad input -----------------------------------------------------------------------------------


def folder_of(path: Path, **changes: int) -> Path:
    """A random model of the draft's family."""
    raw = json.loads((Path(resolve(DRAFT)) / "config.json").read_text())
    config = LlamaConfig(**{**raw, **changes})
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def test_another_vocabulary_is_refused_unless_a_tokenizer_explains_it(tmp_path, target):
    bare = folder_of(tmp_path / "bare", vocab_size=300)
    with pytest.raises(ConfigError, match=r"knows 300 tokens, the target 259"):
        LMDrafter.from_pretrained(bare, target)
    padded = folder_of(tmp_path / "padded", vocab_size=320)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(resolve(DRAFT)) / file, padded)
    with Engine.from_pretrained(draft=padded, max_context_len=128) as engine:
        assert len(engine.generate([PROMPTS[0]])[0].token_ids) > 0


def test_another_tokenizer_is_refused(tmp_path):
    folder = shutil.copytree(resolve(DRAFT), tmp_path / "other")
    raw = json.loads((folder / "tokenizer.json").read_text())
    vocab = raw["model"]["vocab"]
    (a, i), (b, j) = list(vocab.items())[40:42]
    vocab[a], vocab[b] = j, i
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=r"another tokenizer: 2 of 259 tokens differ; token"):
        Engine.from_pretrained(draft=folder)


def test_a_recurrent_model_is_refused_before_its_weights_are_read(tmp_path):
    """Also one that is loaded already."""
    config = make_config("lfm2")
    config.save_pretrained(tmp_path)
    save_file({"model.embed_tokens.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    for draft in (str(tmp_path), make_model(config)):
        with pytest.raises(
            ConfigError, match=r"'lfm2' has recurrent layers, .* follow every draft"
        ):
            Engine.from_pretrained("specpool/tiny", draft=draft)


def test_a_shorter_context_limits_the_engine_or_is_refused(tmp_path, caplog):
    short = folder_of(tmp_path / "short", max_position_embeddings=64)
    with Engine.from_pretrained(draft=short) as engine:
        assert engine.max_context_len == 64
    said = f"max_context_len is 64: the draft model {short} has 64 positions, the target 2048"
    assert [record.getMessage() for record in caplog.records].count(said) == 1
    outline = model_of_files(Question(memory="1G", target="specpool/tiny", draft=str(short)))
    assert (outline.max_context_len, outline.context_reason) == (
        64,
        said.partition(": ")[2].replace(f" {short}", ""),
    )
    with pytest.raises(ConfigError, match=r"has 64 positions, a sequence may have 100 tokens"):
        Engine.from_pretrained(draft=short, max_context_len=100)
    longer = folder_of(tmp_path / "longer", max_position_embeddings=1 << 14)
    with Engine.from_pretrained(draft=longer, max_context_len=100) as engine:
        assert engine.max_context_len == 100


@pytest.mark.sample(1)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("shape", [CHAIN, TREE])
def test_probabilities_that_are_not_numbers_or_lie_leave_the_text_alone(tmp_path, value, shape):
    folder = shutil.copytree(resolve(DRAFT), tmp_path / "bad")
    state = load_file(folder / "model.safetensors")
    state["lm_head.weight"] = torch.full_like(state["lm_head.weight"].float(), value)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    params = SamplingParams(max_new_tokens=24)
    with Engine.from_pretrained(max_context_len=128) as engine:
        expected = [o.token_ids for o in engine.generate(PROMPTS, params)]
    with Engine.from_pretrained(draft=folder, shape=shape, max_context_len=128) as engine:
        assert [o.token_ids for o in engine.generate(PROMPTS, params)] == expected


def test_names_of_drafters_are_checked(target):
    with Engine.from_pretrained(draft=[DRAFT, "ngram"], max_context_len=128) as engine:
        with pytest.raises(
            ConfigError, match=r"drafter: prompt 0 names 'eagle'; the engine has .*, 'ngram'"
        ):
            engine.generate(PROMPTS, SamplingParams(drafter="eagle"))
    with pytest.raises(ConfigError, match="drafter must be a name or None, got 3"):
        SamplingParams(drafter=3)
    with pytest.raises(ConfigError, match="two drafters are named 'ngram'"):
        Engine.from_pretrained(draft=["ngram", "ngram"])
    with pytest.raises(ConfigError, match="draft is empty"):
        Engine.from_pretrained(draft=[])
    with pytest.raises(ConfigError, match="got 3"):
        Engine.from_pretrained(draft=["ngram", 3])
    drafter, config = LMDrafter.from_pretrained(resolve(DRAFT), target), EngineConfig()
    Engine(target, drafter, config=config)
    with pytest.raises(ConfigError, match="attached to another engine"):
        Engine(target, drafter, config=config)


def test_a_head_is_told_from_a_language_model(tmp_path):
    assert is_language_model(resolve(DRAFT)) and is_language_model(resolve("specpool/tiny"))
    for name in ("specpool/tiny-block", "specpool/tiny-eagle", "specpool/tiny-eagle3"):
        assert not is_language_model(resolve(name))
    (tmp_path / "config.json").write_text("{")
    assert not is_language_model(tmp_path)
    with pytest.raises(CheckpointError):
        Engine.from_pretrained(draft=tmp_path)


def test_a_loaded_model_drafts_and_is_restored(draft):
    before = draft.config._attn_implementation
    with Engine.from_pretrained(
        draft={"lm": draft, "copy": NgramDrafter()}, max_context_len=128
    ) as engine:
        assert not isinstance(engine.drafter, EagleDrafter)
        (output,) = engine.generate([PROMPTS[0]])
        assert max(output.accept_lens) > 1
        assert draft.config._attn_implementation == "specpool"
    assert draft.config._attn_implementation == before
