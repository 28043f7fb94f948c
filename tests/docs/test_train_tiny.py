"""The training example runs, and what it writes is what the package reads."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file

from paths import ROOT
from specpool import Engine, SamplingParams
from specpool.engine.models.eagle.head import EagleHead

EXAMPLE = ROOT / "examples" / "train_tiny"
MODULES = ("corpus", "byte_tokenizer", "train_target", "block_head", "train_head")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """The example's modules, with windows short enough for a test."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    modules = {name: importlib.import_module(name) for name in MODULES}
    monkeypatch.setattr(modules["train_target"], "LENGTH", 24)
    monkeypatch.setattr(modules["train_head"], "LENGTH", 24)
    yield modules
    for name in MODULES:
        sys.modules.pop(name)


def load(folder: Path, target: torch.nn.Module) -> EagleHead:
    config = target.config
    return EagleHead.from_pretrained(
        folder,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        embedding_weight=target.model.embed_tokens.weight,
        lm_head_weight=target.lm_head.weight,
    )


def test_target_and_heads_train_in_a_second_and_load(
    example: dict[str, ModuleType], tmp_path: Path
) -> None:
    from transformers import LlamaForCausalLM

    train_head, kinds = example["train_head"], example["train_head"].Kind
    example["train_target"].main(tmp_path / "target", minutes=0.003, hidden_size=64, num_layers=4)
    target = LlamaForCausalLM.from_pretrained(tmp_path / "target").float()
    train_head.main(tmp_path / "target", tmp_path / "mtp", kind=kinds.mtp, minutes=0.003)
    with Engine.from_pretrained(tmp_path / "mtp", draft="mtp", max_context_len=64) as engine:
        (output,) = engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=8, ignore_eos=True))
    assert output.num_drafts > 0
    train_head.main(tmp_path / "target", tmp_path / "block", kind=kinds.block, minutes=0.003)
    with Engine.from_pretrained(
        tmp_path / "target", draft=tmp_path / "block", max_context_len=64
    ) as engine:
        (output,) = engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=8, ignore_eos=True))
    assert output.num_drafts > 0
    for kind in (kinds.eagle, kinds.eagle3):
        train_head.main(tmp_path / "target", tmp_path / kind.value, kind=kind, minutes=0.003)
        assert load(tmp_path / kind.value, target).kind == kind.value


@pytest.mark.parametrize("name", ["eagle1", "eagle3"])
def test_the_shipped_heads_are_heads_of_the_example(
    name: str, example: dict[str, ModuleType]
) -> None:
    from transformers import LlamaForCausalLM

    tiny = Path(str(resources.files("specpool.engine.assets") / "tiny"))
    target = LlamaForCausalLM.from_pretrained(tiny / "target").float().eval()
    train_head = example["train_head"]
    kind = train_head.Kind(name.removesuffix("1"))
    layers = (1, 2, 3) if name == "eagle3" else ()
    config = train_head.head_config(target, kind, layers)
    shipped = json.loads((tiny / name / "config.json").read_text())
    assert config == shipped
    head = train_head.Head(config, kind, target)
    state = load_file(tiny / name / "model.safetensors")
    missing, unexpected = head.load_state_dict(state, strict=False)
    assert missing == []
    assert set(unexpected) <= {"embed_tokens.weight"}
    tokens = next(example["corpus"].batches(example["corpus"].validation_tokens(), 2, 64, seed=9))
    with torch.no_grad():
        inputs = train_head.run_target(target, tokens, layers)
        agreement = train_head.unroll(head, tokens, *inputs)[1]
    # Trained to 0.9 in every step of the unroll.
    assert agreement.min() > 0.75


def test_the_shipped_block_drafter_is_that_of_the_example(example: dict[str, ModuleType]) -> None:
    from transformers import LlamaForCausalLM

    tiny = Path(str(resources.files("specpool.engine.assets") / "tiny"))
    target = LlamaForCausalLM.from_pretrained(tiny / "target").float().eval()
    block_head = example["block_head"]
    config = block_head.block_config(target)
    assert config == json.loads((tiny / "block" / "config.json").read_text())
    head = block_head.BlockHead(config, target).eval()
    head.load_state_dict(load_file(tiny / "block" / "model.safetensors"))
    torch.manual_seed(0)
    tokens = next(example["corpus"].batches(example["corpus"].validation_tokens(), 2, 64, seed=9))
    layers = tuple(i + 1 for i in config["dflash_config"]["target_layer_ids"])
    with torch.no_grad():
        inputs = example["train_head"].run_target(target, tokens, layers)
        agreement = block_head.block_loss(head, tokens, *inputs)[1]
    # Training printed 87 % for the first mask and 38 % for the last.
    assert agreement[0] > 0.75 and agreement.min() > 0.25


def test_the_shipped_tokenizer_is_the_examples(
    example: dict[str, ModuleType], tmp_path: Path
) -> None:
    """Its ids are bytes, and any bytes survive encoding and decoding."""
    from transformers import AutoTokenizer

    example["byte_tokenizer"].save_tokenizer(tmp_path, 2048)
    shipped = Path(str(resources.files("specpool.engine.assets") / "tiny" / "target"))
    made = json.loads((tmp_path / "tokenizer.json").read_text())
    assert made == json.loads((shipped / "tokenizer.json").read_text())
    for folder in (tmp_path, shipped):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        text = 'def f(x):\n    return "\u00e9\u2603"  \n'
        assert tokenizer.encode(text) == list(text.encode())
        assert tokenizer.decode(list(text.encode())) == text
        assert (tokenizer.eos_token_id, len(tokenizer)) == (257, 259)


def test_a_target_of_another_kind_is_refused_and_nothing_is_written(
    example: dict[str, ModuleType], tmp_path: Path
) -> None:
    """A head of Llama's kind for byte tokens would be worth nothing for another model."""
    tiny = json.loads(
        (resources.files("specpool.engine.assets") / "tiny" / "target" / "config.json").read_text()
    )
    check = example["train_head"].check_target
    target, out = tmp_path / "target", tmp_path / "head"
    target.mkdir()
    for change, says in (
        (
            {"model_type": "qwen3"},
            "has model_type 'qwen3', a target of train_target.py has 'llama'",
        ),
        ({"vocab_size": 32000}, "has vocab_size 32000, a target of train_target.py has 259"),
        ({"eos_token_id": None}, "has eos_token_id None"),
    ):
        (target / "config.json").write_text(json.dumps(tiny | change))
        with pytest.raises(SystemExit, match=says):
            example["train_head"].main(target, out, minutes=0.003)
    (target / "config.json").write_text("{")
    with pytest.raises(SystemExit, match="is not a target"):
        example["train_head"].main(target, out, minutes=0.003)
    assert not out.exists()
    (target / "config.json").write_text(json.dumps(tiny))
    check(target)
