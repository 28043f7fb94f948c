"""Laws of a target's folder: no code runs, no file elsewhere is read, one error says why."""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402

from eagle_checkpoints import Target, base_config, eagle_state, write  # noqa: E402
from families import make_config, make_model  # noqa: E402
from hostile import MODULE  # noqa: E402
from specpool import ConfigError, Engine, SamplingParams  # noqa: E402
from specpool.engine.assets import resolve  # noqa: E402
from specpool.engine.models import TargetModel  # noqa: E402
from specpool.engine.models.outline import head_outline, target_outline  # noqa: E402
from specpool.errors import CheckpointError  # noqa: E402

OPTIONS = {"max_context_len": 64, "num_pages": 16}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the shipped target."""
    return Path(shutil.copytree(resolve("specpool/tiny"), tmp_path / "target"))


def change(folder: Path, file: str = "config.json", **values: Any) -> Path:
    """Set keys of a JSON file; None takes one away."""
    path = folder / file
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({k: v for k, v in {**content, **values}.items() if v is not ...}))
    return folder


def refused(
    source: Any, match: str, kind: type[ConfigError] = CheckpointError, **given: Any
) -> str:
    with pytest.raises(kind, match=match) as caught:
        Engine.from_pretrained(source, **{**OPTIONS, **given})
    text = str(caught.value)
    assert "\n" not in text and len(text) < 1000
    return text


# --- Code ------------------------------------------------------------------------------------


@pytest.fixture
def no_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*args: object) -> str:
        raise AssertionError("a question on standard input")

    monkeypatch.setattr("builtins.input", asked)


def with_code(folder: Path, part: str) -> Path:
    """Give the folder a module that leaves a mark, and let its config ask for it."""
    mark = folder.parent / "mark"
    (folder / "own.py").write_text(MODULE.format(mark=str(mark)))
    if part == "tokenizer":
        auto_map = {"AutoTokenizer": [None, "own.OwnTokenizer"]}
        change(folder, "tokenizer_config.json", auto_map=auto_map, tokenizer_class="OwnTokenizer")
    else:
        auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
        change(folder, auto_map=auto_map, model_type="own", architectures=["OwnModel"])
    return mark


@pytest.mark.parametrize("part", ["model", "tokenizer"])
def test_a_folders_python_runs_only_if_the_user_says_so(
    part: str, folder: Path, no_stdin: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "hf"))
    mark = with_code(folder, part)
    refused(
        folder,
        rf"target.*: its {part} is Python code.*trust_remote_code=True \(--trust-remote-code\)",
    )
    if part == "model":
        with pytest.raises(CheckpointError, match="--trust-remote-code"):
            TargetModel.from_pretrained(folder)
        with pytest.raises(CheckpointError, match="--trust-remote-code"):
            target_outline(str(folder))
    assert not mark.exists()
    with Engine.from_pretrained(folder, trust_remote_code=True, **OPTIONS) as engine:
        (output,) = engine.generate("1, 2, ", SamplingParams(max_new_tokens=4))
    assert mark.exists() and len(output.token_ids) == 4


def test_code_beside_a_model_that_transformers_knows_is_left_alone(
    folder: Path, no_stdin: None
) -> None:
    mark = with_code(folder, "model")
    change(folder, model_type="llama")
    Engine.from_pretrained(folder, **OPTIONS).close()
    assert not mark.exists()


def test_trust_remote_code_is_true_or_false() -> None:
    refused(
        "specpool/tiny", "trust_remote_code must be True or False", ConfigError, trust_remote_code=1
    )


def test_a_config_fetches_no_attention_kernels(folder: Path) -> None:
    kernel = "kernels-community/flash-attn2"
    change(folder, attn_implementation=kernel, _attn_implementation=kernel)
    change(folder, experts_implementation=kernel, _experts_implementation=kernel)
    Engine.from_pretrained(folder, **OPTIONS).close()


# --- Files -----------------------------------------------------------------------------------


def sharded(folder: Path, file: str) -> Path:
    """Two shards, of which the index calls the second one `file`."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    for part, name in ((names[::2], "model-1.safetensors"), (names[1::2], "model-2.safetensors")):
        save_file({key: tensors[key] for key in part}, folder / name, {"format": "pt"})
    weight_map = dict.fromkeys(names[::2], "model-1.safetensors")
    weight_map |= dict.fromkeys(names[1::2], file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


@pytest.mark.parametrize("kind", ["up", "absolute", "below", "overlong", "null", "number"])
def test_an_index_leads_nowhere_else(kind: str, folder: Path) -> None:
    name = {
        "up": "../model-2.safetensors",
        "absolute": str(folder.parent / "model-2.safetensors"),
        "below": "below/model-2.safetensors",
        "overlong": "x" * 5000,
        "null": "model-2\0.safetensors",
        "number": 2,
    }[kind]
    sharded(folder, name)
    (folder / "below").mkdir()
    shutil.copy(folder / "model-2.safetensors", folder / "below")
    shutil.move(folder / "model-2.safetensors", folder.parent)
    refused(folder, "names '.*which is no file beside it")


def test_shards_may_be_links_as_in_the_hubs_cache(folder: Path) -> None:
    sharded(folder, "model-2.safetensors")
    blobs = folder.parent / "blobs"
    blobs.mkdir()
    for number, path in enumerate(sorted(folder.iterdir())):
        shutil.move(path, blobs / str(number))
        path.symlink_to(Path("..") / "blobs" / str(number))
    Engine.from_pretrained(folder, **OPTIONS).close()


@pytest.mark.parametrize(
    ("file", "key", "name"),
    [
        ("config.json", "configuration_files", "../config.4.0.0.json"),
        ("config.json", "transformers_weights", "../model.safetensors"),
        ("config.json", "transformers_weights", 5),
        ("tokenizer_config.json", "fast_tokenizer_files", "../tokenizer.4.0.0.json"),
    ],
)
def test_a_config_leads_nowhere_else(file: str, key: str, name: Any, folder: Path) -> None:
    for path in folder.iterdir():
        shutil.copy(path, folder.parent / path.name.replace(".json", ".4.0.0.json"))
    change(folder, file, **{key: [name] if key.endswith("files") else name})
    refused(folder, f"{name}.*no file beside it")


def test_an_adapter_is_not_followed_to_its_model(folder: Path) -> None:
    change(folder, "adapter_config.json", base_model_name_or_path="someone/else")
    refused(folder, r"PEFT adapter.*merge_and_unload\(\)", ConfigError)


# --- Weights ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.uint8])
@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_weights_that_are_no_floats_are_refused(form: str, dtype: Any, folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(dtype)
    if form == "safetensors":
        save_file(tensors, path, {"format": "pt"})
    else:
        path.unlink()
        torch.save(tensors, folder / "pytorch_model.bin")
    refused(folder, f"{name} is (torch.{str(dtype)[6:]}|U8) and no quantization_config")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"num_hidden_layers": 10**5}, "num_hidden_layers 100000, at most 16384"),
        ({"num_hidden_layers": 10**15}, "num_hidden_layers 1000000000000000, at most 16384"),
        ({"num_hidden_layers": 10**4}, "10000 layers, its weight files hold 39 tensors"),
        ({"vocab_size": 10**9}, "1.280e+11|2.560e.11 numbers, its weight files hold 1515248 bytes"),
        ({"hidden_size": 10**6, "head_dim": 250000}, "numbers, its weight files hold"),
        ({"intermediate_size": 10**12}, "numbers, its weight files hold"),
        ({"vocab_size": 260}, r"lm_head.weight is \[259, 128\], expected \[260, 128\]"),
    ],
)
def test_a_config_states_no_more_than_the_files_hold(
    changes: dict[str, Any], match: str, folder: Path
) -> None:
    refused(change(folder, **changes), match)


def test_a_plan_of_absurd_depth_is_refused(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="num_hidden_layers 10000000000, at most 16384"):
        target_outline(str(change(folder, num_hidden_layers=10**10)))


# --- Values ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": 5},
        {"architectures": [5]},
        {"sliding_window": "x", "model_type": "mistral"},
        {"sliding_window": [8], "model_type": "mistral"},
        {"max_position_embeddings": "many"},
        {"max_position_embeddings": 1 << 40},
        {"max_position_embeddings": None},
        {"num_hidden_layers": "4"},
        {"num_hidden_layers": -1},
        {"num_hidden_layers": 0},
        {"num_attention_heads": 0},
        {"hidden_act": "no_such"},
        {"layer_types": 7, "model_type": "qwen3"},
        {"rope_parameters": {"rope_type": "no_such"}},
        {"dtype": "float99"},
        {"dtype": "float64"},
        {"text_config": 5},
        {"quantization_config": 5},
    ],
    ids=str,
)
def test_a_value_that_cannot_be_is_one_error(changes: dict[str, Any], folder: Path) -> None:
    refused(change(folder, **changes), ".", ConfigError, dtype="auto")


NAN, INF = float("nan"), float("inf")
SIZES = ("hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim")
NO_DTYPES = ("float4", "x", "", "torch.float16", "nn", "auto", 7, ["float16"])


def rope(*thetas: Any) -> dict[str, Any]:
    """The RoPE parameters of a base, or of one for each kind of layers."""
    parts = [{"rope_type": "default", "rope_theta": theta} for theta in thetas]
    kinds = ("full_attention", "sliding_attention")
    return {
        "rope_parameters": parts[0] if len(parts) == 1 else dict(zip(kinds, parts, strict=True))
    }


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        *(
            ({"rms_norm_eps": v}, f"rms_norm_eps of the config is {v}, not a number in (0, 1)")
            for v in (1.5, 1.0, 0.0, -1e-05, 1e30, NAN, INF)
        ),
        *(({"rms_norm_eps": v}, "rms_norm_eps") for v in ("x", True, [1], 0)),
        ({"layer_norm_epsilon": -1.0, "model_type": "gpt2"}, "layer_norm_epsilon of the config is"),
        *(
            (rope(v), f"rope_theta of the config is {v!r}, not a number > 0")
            for v in (0, -1, -1e-9, NAN, INF, "x", True, [1])
        ),
        ({"rope_parameters": None, "rope_theta": -3}, "rope_theta of the config is -3, not a"),
        ({**rope(1e6, -7), "model_type": "gemma3_text"}, "rope_theta of the config is -7, not a"),
        *(({"initializer_range": v}, "initializer_range") for v in ("x", -0.5, 2.0, NAN)),
        ({"attention_dropout": "x"}, "attention_dropout"),
        *(
            ({key: v}, f"{key} is {v}, not an integer >= 1")
            for key in SIZES
            for v in (0, -1, -(1 << 40))
        ),
        ({"intermediate_size": -1}, "intermediate_size is -1, not an integer >= 0"),
        ({"text_config": {"head_dim": -4}}, "head_dim is -4, not an integer >= 1"),
        *(
            ({key: v}, f"{key} is {v!r}, not the name of a torch dtype")
            for key in ("dtype", "torch_dtype")
            for v in NO_DTYPES
        ),
    ],
    ids=str,
)
def test_a_wrong_value_is_refused_by_name_before_weights_are_read(
    changes: dict[str, Any], told: str, folder: Path
) -> None:
    (folder / "model.safetensors").unlink()
    refused(change(folder, **{"dtype": ..., **changes}), re.escape(told), ConfigError)


@pytest.mark.parametrize(
    "changes",
    [
        *({"attention_dropout": v} for v in (7, -1, NAN, None)),
        *({"rope_theta": v} for v in (0, -1, "x")),  # rope_parameters has another
        *({"dtype": v} for v in (None, "int8")),  # OPTIONS say what weights become
        {"initializer_range": 0.0},
    ],
    ids=str,
)
def test_a_value_that_transformers_does_not_read_changes_nothing(
    changes: dict[str, Any], folder: Path
) -> None:
    with Engine.from_pretrained(change(folder, **changes), **OPTIONS) as engine:
        (output,) = engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=3, ignore_eos=True))
    assert output.token_ids == [97, 99, 101]


@pytest.mark.parametrize("eos", ["a", 1.5, [[1]], {"a": 1}, [1, "b"], True, 1 << 40], ids=str)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_an_odd_end_of_text_is_one_error(file: str, eos: Any, folder: Path) -> None:
    change(folder, "generation_config.json", eos_token_id=...)
    refused(change(folder, file, eos_token_id=eos), "eos_token_id|Validation|type", ConfigError)


def test_deep_json_is_one_error(folder: Path) -> None:
    for file in ("tokenizer_config.json", "config.json"):
        (folder / file).write_text('{"a": ' + "[" * 10**5 + "]" * 10**5 + "}")
        refused(folder, "RecursionError")


@pytest.mark.parametrize("dtype", [torch.float64, "float64", torch.int8, 5])
def test_a_dtype_that_no_request_runs_in_is_refused_at_once(dtype: Any) -> None:
    refused("./nowhere", "allowed are auto, float32, bfloat16, float16", ConfigError, dtype=dtype)
    if dtype is torch.float64:
        model = make_model(make_config("llama")).to(dtype)
        refused(model, r"weights are torch.float64: allowed are float32.*\.to\(\)", ConfigError)


# --- Tokenizers ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", b""),
        ("tokenizer.json", b"{"),
        ("tokenizer.json", b"[]"),
        ("tokenizer.json", b"{}"),
        ("tokenizer.json", b"\xff\xfe"),
        ("tokenizer.json", b'{"version": "1.0", "model": {"type": "BPE"}}'),
        ("tokenizer_config.json", b"{"),
        ("tokenizer_config.json", b"[]"),
        ("tokenizer_config.json", b'{"tokenizer_class": 5}'),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"x": {"content": "y"}}}'),
    ],
)
def test_a_broken_tokenizer_is_one_error(file: str, content: bytes, folder: Path) -> None:
    (folder / file).write_bytes(content)
    refused(folder, r"cannot load the tokenizer of .*target'.*tokenizer=")


def test_a_tokenizer_without_a_vocabulary_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    refused(folder, "cannot load the tokenizer of")


def test_without_tokenizer_files_prompts_are_token_ids(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    with Engine.from_pretrained(folder, **OPTIONS) as engine:
        assert engine.tokenizer is None
        assert engine.generate([1, 2, 3], SamplingParams(max_new_tokens=2))[0].token_ids


@pytest.mark.parametrize("text", ["", "{", "[]", "\0"])
def test_a_damaged_generation_config_is_refused(text: str, folder: Path) -> None:
    """It says where texts end; transformers would leave it out without a word."""
    (folder / "generation_config.json").write_text(text)
    refused(folder, r"generation_config\.json (cannot be read: |holds a list, not an object)")


# --- Arguments -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"tokenizer": 5}, "tokenizer must be a transformers tokenizer or None, got 5"),
        ({"draft": ""}, "draft must be a folder, a hub name, a model, a drafter or None, got ''"),
        ({"draft": 5}, "draft must be a folder.*got 5"),
        ({"target": ""}, "the target is '': give a folder"),
        ({"target": "typo"}, "no model at 'typo': there is no such folder, and the hub could not"),
        ({"target": "~no-such-user/x"}, "no model at '~no-such-user/x': there is no such folder"),
        ({"target": 5}, "the target is a folder, a hub name or a transformers model, got 5"),
        ({"device": "mps"}, "device 'mps': allowed are cpu, cuda"),
        ({"device": "meta"}, "device 'meta': allowed are cpu, cuda"),
    ],
    ids=str,
)
def test_an_argument_that_cannot_be_is_refused(given: dict[str, Any], match: str) -> None:
    refused(given.pop("target", "specpool/tiny"), match, ConfigError, **given)


def test_what_wraps_a_model_is_refused_with_the_way_in() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(make_model(make_config("llama")))
    refused(compiled, r"compiled module.*\._orig_mod", ConfigError)

    class Wrapper(torch.nn.Module):
        __module__ = "peft.peft_model"

    Wrapper.__name__ = "PeftModelForCausalLM"
    refused(
        Wrapper(),
        r"a PEFT model \(PeftModelForCausalLM\).*merge_and_unload\(\).*\.base_model\.model",
        ConfigError,
    )


@pytest.mark.filterwarnings("ignore")
def test_torchs_own_quantization_is_refused() -> None:
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("this torch has no quantized engine")
    model = make_model(make_config("llama"))
    quantized = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, torch.qint8)
    refused(quantized, "DynamicQuantizedLinear|Linear of torch's own quantization", ConfigError)


def test_a_model_in_use_names_who_holds_it() -> None:
    model = make_model(make_config("llama"))
    with Engine.from_pretrained(model, **OPTIONS):
        with pytest.raises(ConfigError, match="close its Engine"):
            model(input_ids=torch.tensor([[1, 2]]))


# --- Heads -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: (folder / "model.safetensors").write_bytes(b"x"),
        lambda folder: (folder / "model.safetensors").unlink(),
        lambda folder: (folder / "config.json").write_text("{"),
        lambda folder: change(folder, hidden_size=0),
    ],
)
def test_an_error_names_the_folder_once(spoil: Any, tmp_path: Path) -> None:
    folder = write(tmp_path / "head", base_config(), eagle_state())
    spoil(folder)
    with pytest.raises(CheckpointError) as caught:
        head_outline(folder)
    assert str(caught.value).count(str(folder)) == 1


@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "max_position_embeddings"])
def test_an_absurd_head_is_refused(key: str, tmp_path: Path) -> None:
    folder = write(tmp_path, base_config(**{key: 10**12}), eagle_state())
    with pytest.raises(CheckpointError, match="1000000000000"):
        head_outline(folder)
    refused("specpool/tiny", "1000000000000", draft=folder)


def test_a_pickle_of_few_numbers_in_a_great_shape_is_refused(tmp_path: Path) -> None:
    state = eagle_state()
    state["fc.weight"] = torch.zeros(1).expand(state["fc.weight"].shape)
    folder = write(tmp_path, base_config(), None)
    torch.save(state, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"fc.weight is \[16, 32\] over fewer numbers"):
        Target().load(folder)


def test_a_head_of_an_odd_layer_type_is_one_error(tmp_path: Path) -> None:
    folder = write(tmp_path, base_config(layer_types=5), eagle_state())
    with pytest.raises(CheckpointError, match="layer_types is 5, not a list of names"):
        head_outline(folder)


def test_a_pipe_in_place_of_weights_is_not_waited_for(tmp_path: Path, folder: Path) -> None:
    head = write(tmp_path / "head", base_config(), None)
    os.mkfifo(head / "head.safetensors")
    with pytest.raises(CheckpointError, match=r"no model.safetensors.*found config.json, head"):
        head_outline(head)
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    refused(folder, "no model.safetensors or pytorch_model.bin")


def test_a_distributed_checkpoint_is_not_unpickled(folder: Path) -> None:
    shutil.move(
        folder / "model.safetensors", folder / "shard-00001-model-00001-of-00001.safetensors"
    )
    (folder / ".metadata").write_bytes(b"no pickle")
    refused(folder, "is a distributed checkpoint .*save_pretrained")


def test_of_many_faults_the_first_are_named(folder: Path) -> None:
    text = refused(change(folder, model_type="gpt2"), "missing .*; and [0-9]+ more")
    assert text.count("missing") == 12


# --- The command line ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        ["generate", "-p", "a", "-n", "1"],
        ["chat"],
        ["tune", "--draft", "ngram", "-p", "a"],
        ["plan", "--memory", "1GiB"],
        ["bench", "generate", "--draft", "ngram", "--tokens", "1"],
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_every_command_that_loads_a_target_asks_for_the_option(
    command: list[str], folder: Path, no_stdin: None
) -> None:
    from typer.testing import CliRunner

    from specpool.cli.commands import app

    mark, words = with_code(folder, "model"), [word for word in command[:2] if word.isalpha()]
    found = CliRunner().invoke(app, [*command, "--target", str(folder)], input="y\n" * 9)
    assert isinstance(found.exception, CheckpointError) and not mark.exists()
    assert "--trust-remote-code" in str(found.exception)
    assert (
        "--trust-remote-code"
        in CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "200"}).output
    )
