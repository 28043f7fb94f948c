"""Law: a tokenizer loads from the files that transformers takes, or one line says why not."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from specpool import ConfigError, Engine, SamplingParams
from specpool.engine.assets import resolve
from specpool.engine.text import tokenizer as module
from specpool.engine.text.tokenizer import load_tokenizer
from specpool.errors import CheckpointError

TINY = Path(resolve("specpool/tiny"))
CHARS = {chr(code): number for number, code in enumerate(range(33, 127))}
#: As GPT-2 writes a space; the unknown token is its own.
VOCAB = CHARS | {"\u0120": len(CHARS), "ab": len(CHARS) + 1, "<|endoftext|>": len(CHARS) + 2}
#: The head of a sentencepiece model: its first piece is <unk>.
SENTENCEPIECE = b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02"


def base64_of(token: int) -> str:
    return base64.b64encode(bytes([token])).decode()


def tekken() -> dict[str, Any]:
    """A Mistral tokenizer of all bytes and a few special tokens."""
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]"]
    return {
        "config": {
            "pattern": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s+",
            "num_vocab_tokens": 256,
            "default_vocab_size": 256 + len(special),
            "default_num_special_tokens": len(special),
            "version": "v11",
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64_of(rank), "token_str": None} for rank in range(256)
        ],
        "special_tokens": [
            {"rank": rank, "token_str": name, "is_control": True}
            for rank, name in enumerate(special)
        ],
    }


def folder_of(path: Path, model_type: str, files: dict[str, str | bytes]) -> Path:
    """A model's folder without weights, and with these files of a tokenizer."""
    path.mkdir()
    config = json.loads((TINY / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"model_type": model_type}))
    for name, content in files.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize(
    ("model_type", "files"),
    [
        ("llama", {"tokenizer.json": (TINY / "tokenizer.json").read_text()}),
        ("mistral", {"tekken.json": json.dumps(tekken())}),
        ("mistral3", {"tekken.json": json.dumps(tekken())}),
        ("llama", {"tekken.json": json.dumps(tekken()), "tokenizer_config.json": "{}"}),
        (
            "mistral",
            {
                "tekken.json": json.dumps(tekken()),
                "tokenizer.json": (TINY / "tokenizer.json").read_text(),
            },
        ),
        ("gpt2", {"vocab.json": json.dumps(VOCAB), "merges.txt": "#version: 0.2\na b\n"}),
        ("qwen2", {"vocab.json": json.dumps(VOCAB), "merges.txt": "#version: 0.2\na b\n"}),
        ("bert", {"vocab.txt": "\n".join(("[UNK]", "[CLS]", "[SEP]", "a", "b", "c", "ab"))}),
    ],
    ids=lambda value: value if isinstance(value, str) else "+".join(value),
)
def test_files_that_transformers_loads_are_loaded(tmp_path, model_type, files):
    folder = folder_of(tmp_path / "model", model_type, files)
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(str(folder))
    assert type(ours) is type(theirs)
    text = "ab c, a1"
    assert ours.encode(text) == theirs(text).input_ids
    assert len(theirs(text).input_ids) > 2


@pytest.mark.parametrize(
    ("name", "content", "packages"),
    [
        ("tokenizer.model", SENTENCEPIECE, "sentencepiece protobuf"),
        ("spiece.model", SENTENCEPIECE, "sentencepiece protobuf"),
        ("tokenizer.model", f"{base64_of(0)} 0\n{base64_of(1)} 1\n", "tiktoken"),
        ("tiktoken.model", f"{base64_of(0)} 0\n{base64_of(1)} 1\n", "tiktoken"),
        ("model.tiktoken", f"{base64_of(0)} 0\n{base64_of(1)} 1\n", "tiktoken"),
    ],
)
def test_a_missing_package_is_named_in_one_line(tmp_path, monkeypatch, name, content, packages):
    folder = folder_of(tmp_path / "model", "llama", {name: content})

    def fails(*_: Any, **__: Any) -> None:
        raise ValueError("`tiktoken` is required,\nor another package")

    monkeypatch.setattr(module, "_is_installed", lambda _: False)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", fails)
    with pytest.raises(CheckpointError) as caught:
        load_tokenizer(folder)
    needs = f"{name} needs packages that are not installed: pip install {packages}, or give"
    assert needs in str(caught.value) and "\n" not in str(caught.value)
    monkeypatch.setattr(module, "_is_installed", lambda _: True)
    with pytest.raises(CheckpointError, match="required, or another package; mend its files, or"):
        load_tokenizer(folder)


def test_a_tokenizer_without_tokens_is_refused(tmp_path):
    """transformers makes one of files that its class for the model does not read."""
    ranks = "\n".join(f"{base64_of(rank)} {rank}" for rank in range(256))
    folder = folder_of(tmp_path / "model", "qwen2", {"qwen.tiktoken": ranks})
    with pytest.raises(CheckpointError, match="it knows 1 tokens, and encodes 'a 1, b' to none"):
        load_tokenizer(folder)


@pytest.mark.parametrize("subfolder", [None, "tokenizer"])
def test_without_a_tokenizer_beside_the_model_token_ids_run(tmp_path, subfolder):
    folder = Path(shutil.copytree(TINY, tmp_path / "model"))
    for path in folder.glob("tokenizer*"):
        if subfolder is not None:
            (folder / subfolder).mkdir(exist_ok=True)
            shutil.copy(path, folder / subfolder)
        path.unlink()
    with Engine.from_pretrained(folder, draft="ngram", max_context_len=64, num_pages=16) as engine:
        assert engine.tokenizer is None
        (output,) = engine.generate([[115, 101, 113]], SamplingParams(max_new_tokens=4))
        assert len(output.token_ids) == 4 and output.text == ""
        with pytest.raises(ConfigError, match="the target has no tokenizer: give token ids"):
            engine.generate("a text")
