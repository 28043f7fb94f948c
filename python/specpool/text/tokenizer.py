"""`load_tokenizer`: loads a folder's tokenizer and checks that it works."""

from __future__ import annotations

import json
import os
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specpool.checks import shown
from specpool.errors import CheckpointError, ConfigError, needs_trust, reading, wants_trust
from specpool.text.tokenizer_trial import check_growth, try_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(
    source: str | PathLike[str], *, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer of a folder, and try it on a line of text.

    Args:
        source: the folder.
        trust_remote_code: run Python code of the tokenizer; if False, a tokenizer that needs it is
            refused.

    Returns:
        The tokenizer; None if the folder holds none of its files.

    Raises:
        CheckpointError: its files are broken, need a package that is not installed, or blow up (see
            `check_growth`).
    """
    folder = Path(source)
    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
    if not any(os.path.isfile(folder / name) for name in names):
        return None
    config = folder / "tokenizer_config.json"
    try:
        with reading(f"cannot load the tokenizer of {str(source)!r}"):
            if config.is_file():
                _check_config(json.loads(config.read_text(encoding="utf-8")))
            if not trust_remote_code:  # else the folder's code may do anything
                check_growth(folder)
            tokenizer = try_tokenizer(str(folder), trust_remote_code=trust_remote_code)
    except CheckpointError as error:
        if not trust_remote_code and wants_trust(error):
            raise needs_trust(str(source), "tokenizer") from error
        raise CheckpointError(
            f"{error}; mend its files, or give a tokenizer with tokenizer="
        ) from error
    return tokenizer


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


def check_tokenizer(tokenizer: object) -> None:
    """Raise `ConfigError` unless `tokenizer` is a tokenizer or None."""
    verbs = ("encode", "decode", "convert_ids_to_tokens")
    if tokenizer is not None and not all(callable(getattr(tokenizer, v, None)) for v in verbs):
        raise ConfigError(
            f"tokenizer must be a transformers tokenizer or None, got {shown(tokenizer)}"
        )
