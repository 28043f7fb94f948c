"""`load_tokenizer`: loads a folder's tokenizer and checks that it works."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specpool.checks import shown
from specpool.engine.text.tokenizer_trial import check_growth, read_tokenizer, try_tokenizer
from specpool.errors import CheckpointError, ConfigError, needs_trust, reading, wants_trust

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: The files of tokenizers that transformers reads: its own, sentencepiece's, tiktoken's, Mistral's.
_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "*.model",
    "*.tiktoken",
)


def load_tokenizer(
    source: str | PathLike[str], *, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer of a folder, and try it on a line of text.

    Args:
        source: the folder.
        trust_remote_code: run Python code of the tokenizer; if False, a tokenizer that needs it is
            refused.

    Returns:
        The tokenizer; None if the folder holds none of its files. Subfolders are not looked at.

    Raises:
        CheckpointError: its files are broken, need a package that is not installed, or blow up (see
            `check_growth`).
    """
    folder = Path(source)
    files = [path for name in _FILES for path in sorted(folder.glob(name)) if path.is_file()]
    if not files:
        return None
    config = folder / "tokenizer_config.json"
    tokenizer: PreTrainedTokenizerBase | None = None
    try:
        with reading(f"cannot load the tokenizer of {str(source)!r}"):
            if config.is_file():
                _check_config(json.loads(config.read_text(encoding="utf-8")))
            if not trust_remote_code:  # else the folder's code may do anything
                check_growth(folder)
            tokenizer = read_tokenizer(str(folder), trust_remote_code=trust_remote_code)
            try_tokenizer(tokenizer)
            _take_template(tokenizer, folder / "chat_template.json")
    except CheckpointError as error:
        if not trust_remote_code and wants_trust(error):
            raise needs_trust(str(source), "tokenizer") from error
        if tokenizer is None and not (folder / "tokenizer.json").is_file():
            for path in files:
                if packages := _missing_packages(path):
                    raise CheckpointError(
                        f"cannot load the tokenizer of {str(source)!r}: {path.name} needs packages "
                        f"that are not installed: pip install {packages}, or give a tokenizer with "
                        "tokenizer="
                    ) from error
        raise CheckpointError(
            f"{error}; mend its files, or give a tokenizer with tokenizer="
        ) from error
    return tokenizer


def _take_template(tokenizer: PreTrainedTokenizerBase, file: Path) -> None:
    """Take the chat template of a processor, which older models with images have beside them."""
    if not tokenizer.chat_template and file.is_file():
        template = json.loads(file.read_text(encoding="utf-8"))["chat_template"]
        if not isinstance(template, str):
            raise ValueError(f"{file.name} holds {shown(template)}, which is no template")
        tokenizer.chat_template = template


def _missing_packages(path: Path) -> str:
    """Return the packages that a vocabulary of sentencepiece or tiktoken lacks, or ""."""
    if path.suffix not in (".model", ".tiktoken"):
        return ""
    with path.open("rb") as file:
        start = file.read(1)
    # sentencepiece's file begins with the tag of a field, tiktoken's with base64.
    readers = ("sentencepiece", "protobuf") if start == b"\n" else ("tiktoken",)
    return " ".join(name for name in readers if not _is_installed(name))


def _is_installed(package: str) -> bool:
    try:
        importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _check_config(content: Any) -> None:
    """Raise `ValueError` unless a tokenizer_config.json is an object that names files beside it."""
    if not isinstance(content, dict):
        raise ValueError(f"tokenizer_config.json holds a {type(content).__name__}, not an object")
    files = content.get("fast_tokenizer_files")
    for name in files if isinstance(files, list) else ():
        if not isinstance(name, str) or Path(name).name != name:
            raise ValueError(
                f"tokenizer_config.json names {shown(name)}, which is no file beside it"
            )


def cleans_spaces(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether `decode` takes spaces away before marks, which a text that streams keeps."""
    ids = tokenizer.encode("a , b . c", add_special_tokens=False)
    plain = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    return bool(tokenizer.decode(ids) != plain)


def decoder_of(tokenizer: PreTrainedTokenizerBase) -> Callable[[list[int], bool], str]:
    """Return what decodes token ids: `decoder(ids, skips_special)`, with all spaces.

    A tokenizer in Rust is called without transformers' own call around it, which costs twice as
    much as the tokenizer itself for the few tokens of a round. Others are called as they are.
    """
    from transformers import PreTrainedTokenizerFast

    kind, names = type(tokenizer), ("decode", "_decode")
    if issubclass(kind, PreTrainedTokenizerFast) and not vars(tokenizer).keys() & set(names):
        if all(getattr(kind, name) is getattr(PreTrainedTokenizerFast, name) for name in names):
            decode = tokenizer.backend_tokenizer.decode
            return lambda ids, skips_special: str(decode(ids, skip_special_tokens=skips_special))

    def decode_all(ids: list[int], skips_special: bool) -> str:
        return str(
            tokenizer.decode(
                ids, skip_special_tokens=skips_special, clean_up_tokenization_spaces=False
            )
        )

    return decode_all


def check_tokenizer(tokenizer: object) -> None:
    """Raise `ConfigError` unless `tokenizer` is a tokenizer or None."""
    verbs = ("encode", "decode", "convert_ids_to_tokens")
    if tokenizer is not None and not all(callable(getattr(tokenizer, v, None)) for v in verbs):
        raise ConfigError(
            f"tokenizer must be a transformers tokenizer or None, got {shown(tokenizer)}"
        )
