"""`is_language_model` and `is_block_head`: tell the kind of a draft model from its files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specpool.engine.models.files.checkpoint import (
    find_folder,
    normal_name,
    read_config,
    weight_files,
)
from specpool.engine.models.files.headers import read_header
from specpool.engine.models.files.names import fetch_config
from specpool.errors import CheckpointError, ConfigError

# Config keys that only heads have, and the tensors that a head has and a language model lacks.
_HEAD_KEYS = ("draft_vocab_size", "eagle_config", "speculators_model_type", "norm_before_residual")
_HEAD_TENSORS = frozenset({"fc.weight", "d2t", "layers.0.hidden_norm.weight"})


def is_language_model(source: str | os.PathLike[str]) -> bool:
    """Return whether a folder or a hub name holds a language model, not a head.

    Of a hub name with several layers only the config is fetched. What cannot be read is taken for a
    head, whose loader says what is wrong.
    """
    folder = Path(source)
    try:
        raw = _config(source)
        if _is_config_of_head(raw) or is_block_config(raw):
            return False
        if not os.path.isdir(folder):
            if raw.get("num_hidden_layers") != 1:  # no published head has several
                return True
            folder = find_folder(source)
        return not _HEAD_TENSORS & _tensor_names(folder)
    except (ConfigError, CheckpointError):
        return False


def is_block_head(source: str | os.PathLike[str]) -> bool:
    """Return whether a folder or a hub name holds a block drafter; its config says it."""
    try:
        return is_block_config(_config(source))
    except (ConfigError, CheckpointError):
        return False


def is_block_config(raw: Mapping[str, Any]) -> bool:
    """Return whether a `config.json` is that of a block drafter (DFlash)."""
    names = raw.get("architectures")
    is_named = isinstance(names, list) and any("dflash" in str(name).lower() for name in names)
    kind = str(raw.get("speculators_model_type", ""))
    return is_named or raw.get("dflash_config") is not None or kind.startswith("dflash")


def _config(source: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the config of a folder or a hub name; of the latter only the config is fetched.

    Raises:
        ConfigError: the hub does not give it.
        CheckpointError: it is a file, or has no config that can be read.
    """
    if os.path.isdir(source):
        return read_config(Path(source))
    if os.path.exists(source):
        raise CheckpointError(f"{source} is a file")
    return read_config(fetch_config(os.fspath(source)).parent)


def _is_config_of_head(raw: Mapping[str, Any]) -> bool:
    names = raw.get("architectures")
    is_named = isinstance(names, list) and any("eagle" in str(name).lower() for name in names)
    return is_named or any(raw.get(key) is not None for key in _HEAD_KEYS)


def _tensor_names(folder: Path) -> frozenset[str]:
    """Return the normal names of a folder's tensors. A pickle needs torch."""
    files = weight_files(folder)
    if any(path.suffix != ".safetensors" for path in files):
        from specpool.engine.models.files.checkpoint import Weights

        return frozenset(Weights(folder))
    return frozenset(normal_name(name) for path in files for name in read_header(path))
