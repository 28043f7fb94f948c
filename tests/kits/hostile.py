"""Hostile checkpoint folders from a seed, and a watch over files that nobody may open."""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from specpool.engine.assets import resolve

DEEP = "[" * 20000 + "]" * 20000
MODULE = """
import pathlib
pathlib.Path({mark!r}).write_text("ran")
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class OwnConfig(LlamaConfig): model_type = "own"
class OwnModel(LlamaForCausalLM): config_class = OwnConfig
class OwnTokenizer(PreTrainedTokenizerFast): pass
"""
MODEL_TYPES = """own llama mistral qwen2 qwen3 gemma2 gpt2 mixtral bert t5 bloom mamba opt phi3
deepseek_v3 llama4 gpt_oss falcon jamba vit clip encoder-decoder olmo2""".split()
TOKENIZERS = """LlamaTokenizer GPT2Tokenizer PreTrainedTokenizer PreTrainedTokenizerFast x
own.OwnTokenizer MarianTokenizer BertTokenizer TokenizersBackend T5Tokenizer""".split()
QUANTIZERS = "fp8 gptq awq bitsandbytes mxfp4 torchao compressed-tensors quanto hqq x".split()
TEMPLATES = [
    "{{ messages[0].content }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 'x' * 10**10 }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{% include '/etc/passwd' %}",
    "{{ 1 / 0 }}",
    "{%",
]


_ODD: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    3,
    7,
    100,
    10**5,
    1 << 31,
    10**12,
    10**30,
    -(10**12),
]
_ODD += [0.5, -1e9, 1e308, float("nan"), float("inf"), "", "x", "é\ud800", "x" * 5000, "a\0b"]
_ODD += [[], [0], ["x"], [[1]] * 3, [None], {}, {"a": 1}, {"": []}, {"x": {"y": 0}}]
_ODD += ["../secret/model.safetensors", "../secret"]


class _Bomb:
    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.mark, "w")


class Hostile:
    """A folder beside a `secret` one, spoilt in one to three ways.

    Attributes:
        folder: the checkpoint.
        secret: sound files that a hostile name could lead to.
        mark: a file that exists once code of the folder has run.
        done: what was spoilt, to read in a failure.
    """

    def __init__(self, root: Path, seed: int, kind: str = "specpool/tiny") -> None:
        self.rng = random.Random(f"{kind} {seed}")
        self.folder, self.secret, self.mark = root / "folder", root / "secret", root / "mark"
        shutil.copytree(resolve(kind), self.folder)
        shutil.copytree(resolve(kind), self.secret)
        for path in [*self.secret.iterdir()]:
            shutil.copy(path, self.secret / f"{path.stem}.4.0.0{path.suffix}")
        self.done: list[str] = []
        self._files = sorted(path.name for path in self.folder.iterdir())
        spoils = _TARGET if kind == "specpool/tiny" else _HEAD
        for spoil in self.rng.choices(spoils, k=self.rng.choice([1, 1, 1, 2, 3])):
            self.done.append(spoil.__name__)
            try:
                spoil(self)
            except Exception:  # what it would spoil is spoilt already
                self.done.append("not done")

    def odd(self) -> Any:
        """A value that few keys expect."""
        return self.rng.choice([*_ODD, *(str(self.secret / name) for name in self._files[-3:])])

    def change(self, file: str, key: str, value: Any) -> None:
        path = self.folder / file
        content = json.loads(path.read_text()) if path.is_file() else {}
        content[key] = value
        self.done.append(f"{file}: {key} = {value!r:.60}")
        path.write_text(json.dumps(content))


def config_value(case: Hostile) -> None:
    keys = [*json.loads((case.folder / "config.json").read_text())]
    keys += "sliding_window layer_types text_config rope_scaling quantization_config dtype".split()
    keys += "torch_dtype num_labels pruned_heads is_encoder_decoder is_decoder id2label".split()
    keys += "attention_chunk_size kv_lora_rank use_sliding_window vision_config auto_map".split()
    keys += "name_or_path _name_or_path transformers_version use_cache return_dict".split()
    case.change("config.json", case.rng.choice(keys), case.odd())


def config_trap(case: Hostile) -> None:
    kernel = "kernels-community/flash-attn2"
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    key, value = case.rng.choice(
        [
            ("auto_map", auto_map),
            ("auto_map", {"AutoModelForCausalLM": "someone/else--own.OwnModel"}),
            ("trust_remote_code", True),
            ("attn_implementation", kernel),
            ("_attn_implementation", kernel),
            ("_attn_implementation_internal", kernel),
            ("_experts_implementation", kernel),
            ("transformers_weights", "../secret/model.safetensors"),
            ("transformers_weights", "model.safetensors"),
            ("configuration_files", ["../secret/config.4.0.0.json"]),
            ("configuration_files", ["config.4.0.0.json", 5]),
            ("fusion_config", {"x": True}),
            ("per_layer_config", {"0": {"hidden_size": 5}}),
            ("tie_word_embeddings", True),
            ("quantization_config", {"quant_method": case.rng.choice(QUANTIZERS), "bits": 4}),
        ]
    )
    (case.folder / "own.py").write_text(MODULE.format(mark=str(case.mark)))
    case.change("config.json", key, value)


def config_type(case: Hostile) -> None:
    config_trap(case)
    case.change("config.json", "model_type", case.rng.choice(MODEL_TYPES))


def generation_value(case: Hostile) -> None:
    keys = "eos_token_id bos_token_id pad_token_id cache_implementation max_length x".split()
    case.change("generation_config.json", case.rng.choice(keys), case.odd())


def tokenizer_config(case: Hostile) -> None:
    keys = "bos_token eos_token model_max_length tokenizer_class auto_map chat_template".split()
    keys += "added_tokens_decoder extra_special_tokens model_specific_special_tokens".split()
    keys += "additional_special_tokens vocab_file merges_file backend padding_side x".split()
    keys += "clean_up_tokenization_spaces fast_tokenizer_files init_inputs tokenizer_file".split()
    case.change("tokenizer_config.json", case.rng.choice(keys), case.odd())


def tokenizer_trap(case: Hostile) -> None:
    key, value = case.rng.choice(
        [
            ("auto_map", {"AutoTokenizer": ["own.OwnTokenizer", "own.OwnTokenizer"]}),
            ("auto_map", ["own.OwnTokenizer", None]),
            ("trust_remote_code", True),
            ("vocab_file", "../secret/tokenizer.json"),
            ("tokenizer_file", str(case.secret / "tokenizer.json")),
            ("fast_tokenizer_files", ["../secret/tokenizer.4.0.0.json"]),
            ("tokenizer_class", case.rng.choice(TOKENIZERS)),
            ("chat_template", case.rng.choice(TEMPLATES)),
        ]
    )
    (case.folder / "own.py").write_text(MODULE.format(mark=str(case.mark)))
    case.change("tokenizer_config.json", key, value)


def json_node(case: Hostile) -> None:
    """Replace a value somewhere inside a JSON file."""
    file = case.rng.choice([name for name in case._files if name.endswith(".json")])
    path = case.folder / file
    content: Any = json.loads(path.read_text())
    container = content
    for _ in range(6):
        key = case.rng.choice(
            [*container] if isinstance(container, dict) else range(len(container))
        )
        if (
            not isinstance(container[key], dict | list)
            or not container[key]
            or case.rng.random() < 0.3
        ):
            break
        container = container[key]
    container[key] = case.odd()
    case.done.append(f"{file}: {key!r} = {container[key]!r:.60}")
    path.write_text(json.dumps(content))


def some_bytes(case: Hostile) -> None:
    path = case.folder / case.rng.choice(case._files)
    content = bytearray(path.read_bytes())
    for _ in range(case.rng.choice([1, 3, 20])):
        content[case.rng.randrange(min(len(content), 4000))] = case.rng.randrange(256)
    path.write_bytes(content)
    case.done.append(path.name)


def cut(case: Hostile) -> None:
    path = case.folder / case.rng.choice(case._files)
    content = path.read_bytes()
    path.write_bytes(content[: case.rng.randrange(len(content))])
    case.done.append(path.name)


def another_file(case: Hostile) -> None:
    """Something else in a file's place, or a file that is not expected."""
    more = "adapter_config.json chat_template.jinja added_tokens.json special_tokens_map.json"
    more += " tokenizer.model vocab.json merges.txt tekken.json model.safetensors.index.json"
    more += " .metadata shard-00001-model-00001-of-00001.safetensors pytorch_model.bin"
    path = case.folder / case.rng.choice([*case._files, *more.split()])
    kind = case.rng.randrange(6)
    case.done.append(f"{path.name} {kind}")
    path.unlink(missing_ok=True)
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        path.mkdir()
    elif kind == 2:
        path.symlink_to(path.name)
    elif kind == 3:
        path.write_text(case.rng.choice(["", "[]", "{}", "null", '{"a": ' + DEEP + "}", "\0\0"]))
    elif kind == 4:
        torch.save({"a": _Bomb(str(case.mark))}, path)


def header(case: Hostile) -> None:
    """Replace the header of the safetensors file."""
    path = case.folder / "model.safetensors"
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    entries = json.loads(content[8 : 8 + length])
    name = case.rng.choice([*entries])
    kind = case.rng.randrange(7)
    case.done.append(f"header {kind} of {name}")
    if kind == 0:
        content = struct.pack("<Q", case.rng.choice([0, 1, 1 << 40, (1 << 64) - 1])) + content[8:]
    elif kind == 1:
        entries[name]["dtype"] = case.rng.choice(["F64", "I8", "BOOL", "I64", "F8_E4M3", "X", 5])
    elif kind == 2:
        entries[name]["shape"] = case.rng.choice([[], [1 << 40, 1 << 40], [-1], [0], "x", [128]])
    elif kind == 3:
        entries[name]["data_offsets"] = case.rng.choice([[0, 0], [0, 1 << 60], [9, 1], [0], "x"])
    elif kind == 4:
        del entries[name]
    elif kind == 5:
        entries[case.rng.choice(["x" * 9000, "", "a.weight", "é"])] = entries.pop(name)
    else:
        entries["__metadata__"] = case.odd()
    if kind:
        text = json.dumps(entries).encode()
        content = struct.pack("<Q", len(text)) + text + content[8 + length :]
    path.write_bytes(content)


def index(case: Hostile) -> None:
    """An index in place of the one file."""
    names = load_file(case.folder / "model.safetensors").keys()
    value = case.rng.choice(["model.safetensors", case.odd()])
    weight_map: Any = dict.fromkeys(names, "part.safetensors")
    weight_map[sorted(names)[0]] = value
    shutil.move(case.folder / "model.safetensors", case.folder / "part.safetensors")
    path = case.folder / "model.safetensors.index.json"
    metadata = case.rng.choice([{}, {"total_size": case.odd()}, case.odd()])
    path.write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}))
    case.done.append(f"index: {value!r:.60} {metadata!r:.60}")


def pickle_bomb(case: Hostile) -> None:
    """The weights as a pickle, of which one entry may be something else."""
    state: dict[Any, Any] = dict(load_file(case.folder / "model.safetensors"))
    (case.folder / "model.safetensors").unlink()
    name = case.rng.choice(sorted(state))
    kind = case.rng.randrange(5)
    case.done.append(f"pickle {kind} of {name}")
    if kind == 0:
        state[name] = _Bomb(str(case.mark))
    elif kind == 1:
        state[name] = torch.zeros(1).expand(1 << 20, 1 << 20)
    elif kind == 2:
        state[name] = state[name].to_sparse()
    elif kind == 3:
        state[5] = state[name]
    torch.save(state, case.folder / "pytorch_model.bin")


def distributed(case: Hostile) -> None:
    """The weights as torch.distributed saves them, with a pickle beside."""
    path = case.folder / "shard-00001-model-00001-of-00001.safetensors"
    shutil.copy(case.folder / "model.safetensors", path)
    (case.folder / ".metadata").write_bytes(pickle.dumps(_Bomb(str(case.mark))))


def weights(case: Hostile) -> None:
    """Numbers that are none."""
    path = case.folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-3000] + b"\xff" * 3000)


Spoil = Callable[[Hostile], None]
_HEAD: list[Spoil] = [config_value, config_trap, json_node, some_bytes, cut, header, index]
_HEAD += [another_file, pickle_bomb, weights, header, config_value]
_TARGET: list[Spoil] = [
    *_HEAD,
    config_type,
    distributed,
    generation_value,
    tokenizer_config,
    tokenizer_trap,
]
_TARGET += [json_node, json_node, tokenizer_config]


class Opened:
    """Whether a file of a folder was opened while the block ran, in any way (Linux)."""

    _OPEN = 0x20

    def __init__(self, folder: Path) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._folder = folder

    def __enter__(self) -> Opened:
        self._file = self._libc.inotify_init1(os.O_NONBLOCK)
        assert self._libc.inotify_add_watch(self._file, str(self._folder).encode(), self._OPEN) > 0
        return self

    def names(self) -> list[bytes]:
        """The names of the files that were opened since."""
        try:
            events = os.read(self._file, 1 << 16)
        except BlockingIOError:
            return []
        names = []
        while events:
            _, _, _, length = struct.unpack("iIII", events[:16])
            names.append(events[16 : 16 + length].rstrip(b"\0"))
            events = events[16 + length :]
        return names

    def __exit__(self, *error: object) -> None:
        os.close(self._file)
