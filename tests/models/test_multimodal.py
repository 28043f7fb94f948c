"""Laws of multimodal folders: their text part runs, and nothing else of them is loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers

import multimodal
from lossless import Comparison, Reference
from specpool import ConfigError, Engine, SamplingParams, Shape
from specpool.cli import main
from specpool.engine.models import TargetModel
from specpool.engine.models.outline import target_outline

if not hasattr(transformers, "AutoModelForMultimodalLM"):
    pytest.skip("the small models are built with transformers 5", allow_module_level=True)

TYPES = [
    "gemma3",
    "glm4v",
    "idefics3",
    "internvl",
    "kimi_k25",
    "llava",
    "mistral3",
    "paligemma",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "voxtral",
]
PROMPTS = [[11 + (7 * i) % 40 for i in range(n)] for n in (17, 6)]
OPTIONS = {"num_pages": 200, "page_size": 4, "max_context_len": 64}


@pytest.mark.sample(1)
@pytest.mark.parametrize("model_type", TYPES)
def test_the_text_part_of_a_folder_speaks_as_the_whole_model(
    model_type: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Law: greedy text is that of transformers' generate for the whole model, given text alone."""
    model = multimodal.write(tmp_path, model_type)
    reference = Reference(model)
    caplog.clear()
    with Engine.from_pretrained(tmp_path, draft="ngram", **OPTIONS) as engine:
        compared, params = Comparison(), SamplingParams(max_new_tokens=16, ignore_eos=True)
        for shape in (Shape.none(), Shape.eagle(3, 1, 4)):
            outputs = engine.generate(PROMPTS, params, shape=shape, progress=False)
            for prompt, output in zip(PROMPTS, outputs, strict=True):
                compared.add(reference, prompt, output.token_ids)
        loaded = [name for name, _ in engine.target.model.named_parameters()]
    compared.finish()
    assert set(loaded) < {name for name, _ in model.named_parameters()}
    towers = ("vision", "visual", "audio", "projector", "connector")
    assert not [name for name in loaded if any(tower in name for tower in towers)]
    assert not [r for r in caplog.records if "UNEXPECTED" in r.getMessage()]


def test_a_plan_counts_the_text_part_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = multimodal.write(tmp_path, "qwen3_vl")
    with TargetModel.from_pretrained(tmp_path) as target:
        numbers = sum(parameter.numel() for parameter in target.model.parameters())
        layers = target.layer_kv
    assert numbers < sum(parameter.numel() for parameter in model.parameters()) / 4
    outline = target_outline(str(tmp_path))
    assert (outline.weight_bytes, outline.layers) == (numbers * 4, layers)
    plan = ["plan", "--memory", "1G", "--target", str(tmp_path), "--draft", "none", "--json"]
    monkeypatch.setattr("sys.argv", ["specpool", *plan])
    with pytest.raises(SystemExit, match="0"):
        main()
    assert json.loads(capsys.readouterr().out)["weights"] == numbers * 4


def test_a_multimodal_folder_drafts_too(tmp_path: Path) -> None:
    model = multimodal.write(tmp_path, "mistral3")
    with Engine.from_pretrained(tmp_path, draft=str(tmp_path), **OPTIONS) as engine:
        params = SamplingParams(max_new_tokens=16, ignore_eos=True)
        (output,) = engine.generate([PROMPTS[0]], params, progress=False)
    assert output.accept_len > 3
    assert output.token_ids == Reference(model).text(PROMPTS[0], 16)


def test_a_token_that_stands_for_an_image_is_refused(tmp_path: Path) -> None:
    multimodal.write(tmp_path, "mistral3")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["image_token_index"] == 10
    with Engine.from_pretrained(tmp_path, **OPTIONS) as engine:
        with pytest.raises(ConfigError, match=r"token id 10 at position 2, .*image_token_index"):
            engine.generate([[5, 6, 10, 7]], SamplingParams(max_new_tokens=2), progress=False)
        assert engine.generate([[5, 6]], SamplingParams(max_new_tokens=2), progress=False)


def test_missing_weights_of_the_text_part_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    multimodal.write(tmp_path, "llava")
    path = tmp_path / "model.safetensors"
    state = load_file(path)
    norm = next(name for name in state if name.endswith("layers.1.input_layernorm.weight"))
    kept = {n: t for n, t in state.items() if n != norm and "vision" not in n}
    save_file(kept, path, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"missing .*layers\.1\.input_layernorm\.weight$"):
        TargetModel.from_pretrained(tmp_path)


def test_a_decoder_that_reads_images_in_its_layers_is_refused(tmp_path: Path) -> None:
    config = multimodal.make_config("mllama")
    config.save_pretrained(tmp_path)
    shutil.copy(tmp_path / "config.json", tmp_path / "copy.json")
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="cross attention"):
        TargetModel.from_pretrained(tmp_path)
