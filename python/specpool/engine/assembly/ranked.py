"""What ranks that share a model must have in common, checked before and after the weights load."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import specpool
from specpool._core import Ledger
from specpool.engine.config import EngineConfig
from specpool.errors import ConfigError

if TYPE_CHECKING:
    from specpool.engine.ranks.group import Ranks

#: Bytes of the head of each file that are compared, beside its name and size.
_HEAD_BYTES = 1 << 16


def for_ranks(config: EngineConfig, ranks: Ranks | None) -> EngineConfig:
    """Return the configuration that ranks run with; without ranks it is the given one.

    Raises:
        ConfigError: an option would let a rank decide something by its own clock.
    """
    if ranks is None:
        return config
    if config.host_bytes and config.offload == "cost":
        raise ConfigError(
            f"offload 'cost' chooses by each rank's own clock, {ranks.world} ranks would differ: "
            "give offload 'always'"
        )
    if config.graph_sizes:
        raise ConfigError(
            f"graph_sizes {[*config.graph_sizes]}: rounds of {ranks.world} ranks are not captured"
        )
    return replace(config, graph_sizes=())


def agree_before(
    ranks: Ranks,
    config: EngineConfig,
    *,
    target: Path,
    drafts: Sequence[Path | str],
    dtype: str | torch.dtype | None,
) -> None:
    """Check that all ranks load the same models, with the same versions and options.

    Raises:
        ConfigError: they do not; the message has what differs, and both values.
    """
    import transformers

    options = {
        f"option {field.name}": repr(getattr(config, field.name))
        for field in fields(config)
        if field.name != "kv_bytes"  # the least counts
    }
    ranks.agree(
        {
            "version of specpool": specpool.__version__,
            "version of torch": str(torch.__version__),
            "version of transformers": transformers.__version__,
            "kind of device": ranks.device.partition(":")[0],
            "target": _digest(target),
            "drafts": ", ".join(
                _digest(source) if isinstance(source, Path) else source for source in drafts
            ),
            "dtype": str(dtype),
            **options,
        }
    )


def agree_after(ranks: Ranks, ledger: Ledger) -> None:
    """Check that all ranks have the same pages. Each must see the same of the model and memory.

    Raises:
        ConfigError: they do not.
    """
    pages = ", ".join(f"{group.name}: {group.num_pages}" for group in ledger.groups)
    ranks.agree({"pages": pages, "digest of the ledger": f"{ledger.digest or 0:016x}"})


def log_path(ranks: Ranks) -> Path | None:
    """Return where this rank's event log goes; None if SPECPOOL_RECORD names it."""
    path = None
    if not os.environ.get("SPECPOOL_RECORD"):
        path = Path(tempfile.gettempdir()) / f"specpool-rank{ranks.rank}-{os.getpid()}.log"
    ranks.keep_log(path)
    return path


def _digest(folder: Path) -> str:
    """Return a digest of the files of a model: names, sizes and heads."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir(), key=lambda path: path.name):
        if path.is_file() and path.suffix in (".json", ".safetensors", ".bin", ".model", ".txt"):
            digest.update(f"{path.name} {path.stat().st_size}\n".encode())
            with path.open("rb") as file:
                digest.update(file.read(_HEAD_BYTES))
    return f"{folder.name} {digest.hexdigest()[:16]}"
