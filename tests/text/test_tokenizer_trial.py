"""Law: a tokenizer that blows up is refused, and the process that loads it lives on."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import warm_kit
from specpool.engine.assets import resolve
from specpool.engine.text import second_process, tokenizer_trial
from specpool.engine.text.tokenizer import load_tokenizer
from specpool.engine.text.tokenizer_trial import _risk, check_growth
from specpool.errors import CheckpointError

Settings = dict[str, Any]


def settings() -> Settings:
    content: Settings = json.loads((Path(resolve("specpool/tiny")) / "tokenizer.json").read_text())
    return content


def folder_of(tmp_path: Path, content: Settings, config: Settings | None = None) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(resolve("specpool/tiny"), folder)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    if config is not None:
        known = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps(known | config))
    return folder


def times(number: int, letter: str = "a") -> Settings:
    return {"type": "Replace", "pattern": {"String": letter}, "content": letter * number}


def sequence(name: str, *steps: Settings) -> Settings:
    return {"type": "Sequence", name: list(steps)}


BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": False}
TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "x", "type_id": 0}}] * 20_000,
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"x": {"id": "x", "ids": [1] * 20_000, "tokens": ["x"] * 20_000}},
}
#: What aborts the process that loads it, and what the refusal says of it.
BOMBS: dict[str, tuple[Settings, str]] = {
    "a normalizer that multiplies": (
        {"normalizer": sequence("normalizers", *[times(1000)] * 3)},
        "could make 4000000000 characters of one",
    ),
    "one without a type": (
        {"normalizer": sequence("normalizers", *[times(1000) | {"type": None}] * 3)},
        "could make any number of characters of one",
    ),
    "one that puts letters in front": (
        {
            "normalizer": sequence(
                "normalizers", *[{"type": "Prepend", "prepend": "aa"}, times(1000)] * 3
            )
        },
        r"could make \d+ characters of one",
    ),
    "bytes of bytes": (
        {"pre_tokenizer": sequence("pretokenizers", *[BYTES] * 40)},
        r"could make \d+ characters of one",
    ),
    "a decoder that multiplies": (
        {"decoder": sequence("decoders", *[times(1000)] * 4)},
        "could make 1000000000000 characters of one",
    ),
    "a post-processor of many tokens": (
        {"post_processor": TEMPLATE},
        "could add 400000000 tokens",
    ),
}


@pytest.fixture
def warm_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials in processes that have transformers from their start."""

    def popen(command: list[str], **options: Any) -> warm_kit.Popen:
        return warm_kit.Popen([word for word in command if word != "-I"], **options)

    pipes = {"PIPE": subprocess.PIPE, "DEVNULL": subprocess.DEVNULL}
    monkeypatch.setattr(second_process, "subprocess", SimpleNamespace(Popen=popen, **pipes))


@pytest.mark.sample(2)  # each starts a process
@pytest.mark.parametrize("name", BOMBS)
def test_a_tokenizer_that_blows_up_is_refused(tmp_path, monkeypatch, warm_trials, name):
    monkeypatch.setattr(tokenizer_trial, "MOST_BYTES", 1 << 28)
    content, reason = BOMBS[name]
    folder = folder_of(tmp_path, settings() | content)
    with pytest.raises(
        CheckpointError, match=rf"cannot load the tokenizer of .*{reason}, so it was "
    ):
        load_tokenizer(folder)


def refuse(*args: Any) -> None:
    raise AssertionError("a second process was started")


def test_a_tokenizer_that_can_do_no_harm_starts_no_process(monkeypatch):
    monkeypatch.setattr(tokenizer_trial, "SecondProcess", refuse)
    assert load_tokenizer(resolve("specpool/tiny")) is not None


def test_a_tokenizer_that_only_might_blow_up_is_loaded(tmp_path, warm_trials):
    """Law: a trial that goes well changes nothing."""
    content = settings() | {"normalizer": sequence("normalizers", *[times(40)] * 2)}
    tokenizer = load_tokenizer(folder_of(tmp_path, content))
    assert tokenizer is not None and len(tokenizer.encode("a cat")) == 2 * 40 * 40 + 3


def charsmap(*entries: str) -> str:
    table = "\0".join(entries).encode()
    return base64.b64encode((8).to_bytes(4, "little") + bytes(8) + table).decode()


@pytest.mark.parametrize(
    "content",
    [
        {"normalizer": None, "pre_tokenizer": None, "decoder": None, "post_processor": None},
        {  # as Llama 2
            "normalizer": sequence(
                "normalizers", {"type": "Prepend", "prepend": "▁"}, times(1, " ")
            ),
            "decoder": sequence(
                "decoders", times(1, "▁"), {"type": "ByteFallback"}, {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ),
        },
        {  # as BERT
            "normalizer": {"type": "BertNormalizer"},
            "pre_tokenizer": {"type": "BertPreTokenizer"},
            "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        },
        {  # as ALBERT
            "normalizer": sequence(
                "normalizers", times(1, "``"), times(1, "\'\'"), {"type": "NFKD"},
                {"type": "StripAccents"}, {"type": "Lowercase"},
                {"type": "Precompiled", "precompiled_charsmap": charsmap("ffi", "a" * 18)},
            ),
            "pre_tokenizer": sequence(
                "pretokenizers", {"type": "WhitespaceSplit"}, {"type": "Metaspace"}
            ),
            "decoder": {"type": "Metaspace"},
        },
        {  # as Llama 3
            "pre_tokenizer": sequence(
                "pretokenizers", {"type": "Split", "pattern": {"Regex": "x+"}}, BYTES
            ),
            "post_processor": sequence("processors", BYTES, TEMPLATE | {"single": []}),
            "decoder": BYTES,
        },
    ],
)  # fmt: skip
def test_the_steps_of_published_tokenizers_are_no_risk(content: Settings) -> None:
    assert _risk(content, 1 << 16) is None


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"normalizer": {"type": "New"}}, "any number of characters"),
        ({"normalizer": ["x"]}, "any number of characters"),
        ({"pre_tokenizer": {"type": ["x"]}}, "any number of characters"),
        ({"normalizer": {"type": "Replace", "pattern": {"Regex": ""}, "content": "x" * 2000}},
         "8004 characters"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap("x" * 5000)}},
         "20000 characters"),
        ({"normalizer": times(500), "added_tokens": [{"content": "a" * (1 << 20)}]},
         "added tokens could become"),
    ],
)  # fmt: skip
def test_what_could_blow_up_is_a_risk(change: Settings, told: str) -> None:
    assert told in str(_risk(settings() | change, 0))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "change",
    [
        {"padding": {"strategy": {"Fixed": 1 << 40}, "direction": "Right", "pad_id": 0,
                     "pad_to_multiple_of": None, "pad_type_id": 0, "pad_token": "x"}},
        {"padding": {"strategy": "BatchLongest", "direction": "Right", "pad_id": 0,
                     "pad_to_multiple_of": 1 << 40, "pad_type_id": 0, "pad_token": "x"}},
        {"added_tokens": [{"id": (1 << 32) - 1, "content": "<x>", "single_word": False,
                           "lstrip": False, "rstrip": False, "normalized": True, "special": True}]},
    ],
)  # fmt: skip
def test_settings_that_no_prompt_uses_take_no_memory(tmp_path: Path, change: Settings) -> None:
    """The library pads and numbers only what it is asked to; transformers asks for none."""
    code = (
        "import resource, sys\nfrom specpool.engine.text.tokenizer import load_tokenizer\n"
        "import torch, transformers\nfrom specpool.engine.text.second_process import limit_memory\n"
        "limit_memory(1 << 29)\nassert len(load_tokenizer(sys.argv[1]).encode('a cat')) == 5"
    )
    folder = folder_of(tmp_path, settings() | change)
    done = warm_kit.run([sys.executable, "-c", code, str(folder)], capture_output=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_files_that_are_broken_are_left_to_the_library(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, settings())
    for text in ("[]", "5", "{}"):
        (folder / "tokenizer.json").write_text(text)
        check_growth(folder)
