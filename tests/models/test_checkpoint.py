"""Checkpoint folders: where weights are found, what is refused, and that no file is executed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from safetensors.torch import save_file

from eagle_checkpoints import (
    DRAFT_VOCAB,
    VOCAB,
    H,
    Target,
    base_config,
    eagle3_state,
    eagle_state,
    layer_state,
    write,
)
from specpool.engine.models.eagle.config import EagleConfig
from specpool.engine.models.files.checkpoint import (
    Weights,
    find_folder,
    read_config,
    weight_bytes,
    weight_files,
)
from specpool.engine.models.files.draft_kind import is_language_model
from specpool.engine.models.outline import head_outline
from specpool.errors import CheckpointError, ConfigError

FORMS = ["safetensors", "bin", "sharded safetensors", "sharded bin"]


def load_fails(folder: Path | str, match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        Target().load(folder)


@pytest.mark.parametrize("form", FORMS)
def test_weights_are_read_in_every_form(form: str, tmp_path: Path) -> None:
    state = eagle3_state()
    weights = Weights(write(tmp_path, base_config(), state, form=form, rename="model.{}".format))
    assert set(weights) == set(state)
    assert len(weights) == len(state)
    assert weights.file_name("norm.weight") == "model.norm.weight"
    assert all(torch.equal(weights[name], state[name]) for name in state)


def test_one_weight_file_of_another_name_will_do(tmp_path: Path) -> None:
    folder = write(tmp_path, base_config(), eagle_state())
    (folder / "model.safetensors").rename(folder / "head.safetensors")
    assert "fc.weight" in Weights(folder)
    (folder / "second.safetensors").write_bytes(b"")
    load_fails(folder, "found config.json, head.safetensors, second.safetensors")


def test_safetensors_go_before_a_pickle(tmp_path: Path) -> None:
    write(tmp_path, base_config(), {"fc.weight": torch.zeros(1)}, form="bin")
    write(tmp_path, base_config(), eagle_state())
    assert Target().load(tmp_path).kind == "eagle"


def test_paths_may_be_strings_or_paths(tmp_path: Path) -> None:
    write(tmp_path, base_config(), eagle_state())
    assert find_folder(str(tmp_path)) == find_folder(tmp_path) == tmp_path


@pytest.mark.parametrize("source", ["nowhere", "./no/where", "/no/where", Path("no/where")])
def test_a_wrong_path_is_refused(source: Path | str) -> None:
    load_fails(source, "where: no such folder, nor a hub name")


def test_a_file_in_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    write(tmp_path, base_config(), eagle_state())
    load_fails(tmp_path / "config.json", "is a file; give the folder")


@pytest.mark.parametrize("form", FORMS)
def test_a_hub_name_is_downloaded(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def snapshot_download(name: str, *, allow_patterns: list[str], **_: object) -> str:
        asked.append((name, allow_patterns))
        if any(pattern.startswith("*." + form.split()[-1]) for pattern in allow_patterns):
            write(tmp_path, None, eagle_state(), form=form)
        write(tmp_path, base_config(), None)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert Target().load("someone/a-head.v2").kind == "eagle"
    assert all(name == "someone/a-head.v2" for name, _ in asked)
    # Pickles are asked for only when there are no safetensors.
    assert len(asked) == (1 if "safetensors" in form else 2)


def test_a_hub_that_cannot_give_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(name: str, *, allow_patterns: list[str], **_: object) -> str:
        raise OSError("404 Client Error.\nRepository Not Found")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    load_fails("someone/gone", "'someone/gone': there is no such folder, and.*404 Client Error")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "no config.json"),
        ("{", "config.json cannot be read"),
        ("[1]", "config.json holds a list, not an object"),
        ("\x00", "config.json cannot be read"),
    ],
)
def test_a_bad_config_file_is_refused(config: str | None, message: str, tmp_path: Path) -> None:
    load_fails(write(tmp_path, config, eagle_state()), message)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    load_fails(write(tmp_path, base_config(), None), "no model.safetensors.*found config.json")


@pytest.mark.parametrize("keep", [0, 4, 100, -7])
@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_a_truncated_weight_file_is_refused(form: str, keep: int, tmp_path: Path) -> None:
    write(tmp_path, base_config(), eagle_state(), form=form)
    (path,) = [p for p in tmp_path.iterdir() if p.suffix == "." + form]
    path.write_bytes(path.read_bytes()[:keep])
    load_fails(tmp_path, f"{path.name} is not a sound")


def test_a_safetensors_file_of_noise_is_refused(tmp_path: Path) -> None:
    write(tmp_path, base_config(), eagle_state())
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    load_fails(tmp_path, "model.safetensors is not a sound safetensors file")


class _Bomb:
    """Pickles to a call of `open(path, "w")`: loading it would leave a file behind."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return open, (self.path, "w")


def test_a_pickle_that_would_run_code_is_refused_and_not_run(tmp_path: Path) -> None:
    write(tmp_path, base_config(), None)
    trace = tmp_path / "executed"
    torch.save({**eagle_state(), "bomb": _Bomb(str(trace))}, tmp_path / "pytorch_model.bin")
    load_fails(tmp_path, "not a sound state dict of plain tensors, and anything else is not run")
    assert not trace.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([torch.zeros(2)], "holds a list, not a state dict"),
        ({1: torch.zeros(2)}, "holds a dict, not a state dict"),
        ({"fc.weight": 3}, "fc.weight is a int, not a tensor"),
    ],
)
def test_a_pickle_of_something_else_is_refused(content: Any, message: str, tmp_path: Path) -> None:
    write(tmp_path, base_config(), None)
    torch.save(content, tmp_path / "pytorch_model.bin")
    load_fails(tmp_path, message)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"fc.weight": "gone.safetensors"}}, "names 'gone.safetensors'"),
        ({"weight_map": {"fc.weight": "../model.safetensors"}}, r"names '\.\./model"),
        ({"weight_map": {}}, "no weight_map"),
        ({}, "no weight_map"),
    ],
)
def test_an_index_names_files_beside_it(
    index: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write(tmp_path, None, eagle_state())  # what `../` would reach
    folder = write(tmp_path / "head", base_config(), None)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    load_fails(folder, message)


NAMES = [
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "consolidated.safetensors",
    "model.fp16.safetensors",
]


@pytest.mark.parametrize("named", [None, "other.safetensors", "other.safetensors.index.json"])
def test_the_weights_are_those_that_transformers_takes(named: str | None, tmp_path: Path) -> None:
    """Law: whatever else lies in a folder, all readers here read what transformers reads."""
    resolve = transformers.modeling_utils._get_resolved_checkpoint_files
    state = eagle_state()
    for number in range(1 << len(NAMES)):
        files = [name for i, name in enumerate(NAMES) if number >> i & 1]
        folder = tmp_path / str(number)
        write(folder, base_config(**({"transformers_weights": named} if named else {})), None)
        for file in [*files, named] if named else files:
            shards = {}
            if file.endswith(".index.json"):
                shard = file.replace(".index.json", "-1." + file.split(".")[1])
                shards = {shard: state}
                (folder / file).write_text(
                    json.dumps({"weight_map": dict.fromkeys(state, shard), "metadata": {}})
                )
            for path, tensors in (shards or {file: state}).items():
                if path.endswith(".bin"):
                    torch.save(tensors, folder / path)
                else:
                    save_file(tensors, folder / path)
        try:
            theirs, _ = resolve(str(folder), None, None, None, {}, False, named)
        except OSError:
            continue
        assert [str(path) for path in weight_files(folder)] == theirs, files


def test_a_stale_index_beside_a_whole_file_is_read_by_nobody(tmp_path: Path) -> None:
    """Law: an index of an earlier save in shards changes no reader's answer."""
    state = {**eagle_state(), "embed_tokens.weight": torch.zeros(VOCAB, H)}
    folder = write(tmp_path, base_config(), state)
    size = (folder / "model.safetensors").stat().st_size
    answers = []
    for stale in (None, {"embed_tokens.weight": "model-00001-of-00002.safetensors"}):
        if stale is not None:
            index = {"metadata": {"total_size": 12345}, "weight_map": stale}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        outline = head_outline(folder)
        answers.append(
            (Target().load(folder).kind, set(Weights(folder)), is_language_model(folder), outline)
        )
    assert answers[0] == answers[1]
    assert answers[0][3].weight_bytes == weight_bytes(folder) == size


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    state = {**eagle_state(), "model.fc.weight": torch.zeros(H, 2 * H)}
    load_fails(write(tmp_path, base_config(), state), "fc.weight and .*fc.weight are the same")


def test_a_whole_model_is_no_head(tmp_path: Path) -> None:
    state = {"model.embed_tokens.weight": torch.zeros(VOCAB, H), "model.norm.weight": torch.ones(H)}
    for i in range(3):
        state |= {"model." + name: t for name, t in layer_state(i, H).items()}
        state[f"model.layers.{i}.input_layernorm.weight"] = torch.ones(H)
    folder = write(tmp_path, base_config(num_hidden_layers=32), state)
    load_fails(folder, "a language model .*not an EAGLE head: drafts come from")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speculators_model_type": "dflash"}, "a 'dflash' speculator, not an EAGLE head"),
        ({"num_local_experts": 8}, "mixture-of-experts"),
        ({"quantization_config": {"bits": 4}}, "quantized heads are not supported"),
        ({"hidden_size": None}, "no hidden_size"),
        ({"vocab_size": None}, "no vocab_size"),
        ({"intermediate_size": None}, "no intermediate_size"),
        ({"hidden_size": 0}, "hidden_size is 0, not an integer >= 1"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"num_attention_heads": "4"}, "num_attention_heads is '4'"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
        ({"num_key_value_heads": 3}, "4 heads over 3 key-value heads"),
        ({"head_dim": 7}, "of size 7"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1"),
        ({"rms_norm_eps": 1.5}, r"rms_norm_eps is 1.5, not a number in \(0, 1\)"),
        ({"rope_theta": -1}, "rope_theta is -1, not a number > 0"),
        ({"rope_theta": "big"}, "rope_theta is 'big'"),
        ({"rope_scaling": "linear"}, "RoPE parameters are 'linear'"),
        ({"norm_output": "yes"}, "norm_output is 'yes', neither true nor false"),
        ({"fc_norm": 1}, "fc_norm is 1, neither true nor false"),
        ({"eagle_config": 0}, "eagle_config is 0, not an object"),
        ({"eagle_config": []}, r"eagle_config is \[\], not an object"),
        ({"transformer_layer_config": "x"}, "transformer_layer_config is 'x', not an object"),
        ({"hidden_act": 0}, "hidden_act is 0, not a name"),
        ({"hidden_act": []}, r"hidden_act is \[\], not a name"),
    ],
)
def test_bad_config_values_are_refused_by_name(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = write(tmp_path, base_config(**changes), eagle_state())
    with pytest.raises(ConfigError, match=message) as caught:
        Target().load(folder)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    ("config", "state", "kind"),
    [
        ({}, eagle_state(), "eagle"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, eagle_state(), "eagle"),
        ({"architectures": ["LlamaForCausalLM"]}, eagle3_state(), "eagle3"),
        ({"architectures": ["LlamaForCausalLMEagle"]}, eagle3_state(draft_vocab=None), "eagle3"),
        ({"draft_vocab_size": DRAFT_VOCAB}, {}, "eagle3"),
        ({"draft_vocab_size": None}, eagle_state(), "eagle"),
    ],
)
def test_the_kind_is_told_by_keys_and_tensors_not_by_architectures(
    config: dict[str, Any], state: dict[str, torch.Tensor], kind: str
) -> None:
    assert EagleConfig.parse(base_config(**config), state).kind == kind


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({}, None),
        ({"sliding_window": 8}, 8),
        ({"sliding_window": 8, "use_sliding_window": False}, None),
        ({"sliding_window": 8, "layer_types": ["full_attention"]}, None),
        ({"sliding_window": 8, "layer_types": ["sliding_attention"]}, 8),
    ],
)
def test_a_sliding_draft_layer_says_its_window(changes: dict[str, Any], window: int | None) -> None:
    assert EagleConfig.parse(base_config(**changes), eagle_state()).sliding_window == window


@pytest.mark.parametrize(
    ("changes", "theta", "scaling"),
    [
        ({}, 100.0, None),
        ({"rope_theta": None}, 10000.0, None),
        ({"rope_scaling": {"type": "default"}}, 100.0, None),
        ({"rope_parameters": {"rope_theta": 5, "rope_type": "default"}}, 5.0, None),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}},
            100.0,
            {"rope_type": "linear", "factor": 2},
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 7.0}}, "rope_theta": None},
            7.0,
            None,
        ),
    ],
)
def test_rope_is_read_in_every_spelling(
    changes: dict[str, Any], theta: float, scaling: dict[str, Any] | None
) -> None:
    config = EagleConfig.parse(base_config(**changes), eagle_state())
    assert (config.rope_theta, config.rope_scaling) == (theta, scaling)


def test_read_config_gives_the_object(tmp_path: Path) -> None:
    assert read_config(write(tmp_path, {"a": 1}, None)) == {"a": 1}
