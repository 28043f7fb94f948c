"""`read_header`: reads names, shapes and dtypes from safetensors files, without torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specpool.errors import CheckpointError

_MOST_BYTES = 100 << 20  # the limit of the format's own reader
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}


@dataclass(frozen=True, slots=True)
class Tensor:
    """The description of a tensor in a header."""

    dtype: str  # torch's name if there is one, else the file's
    shape: tuple[int, ...]
    num_bytes: int

    def __len__(self) -> int:
        """Return the first dimension, 0 for a scalar."""
        return self.shape[0] if self.shape else 0


def read_header(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file by their names in it.

    Raises:
        CheckpointError: the file cannot be read, or is not a safetensors file.
    """
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > _MOST_BYTES:
                raise ValueError(f"its header has {size} bytes, at most {_MOST_BYTES} are read")
            header = json.loads(file.read(size))
        return {name: _tensor(entry) for name, entry in header.items() if name != "__metadata__"}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a sound safetensors file: {error}") from None


def _tensor(value: Any) -> Tensor:
    start, end = value["data_offsets"]
    return Tensor(
        _DTYPES.get(value["dtype"], str(value["dtype"])),
        tuple(value["shape"]),
        int(end) - int(start),
    )


def main_dtype(files: Sequence[Path]) -> str | None:
    """Return the dtype of most bytes of these files; None if some are not safetensors, or none.

    Raises:
        CheckpointError: see `read_header`.
    """
    num_bytes: dict[str, int] = {}
    for path in files:
        if path.suffix != ".safetensors":
            return None
        for tensor in read_header(path).values():
            num_bytes[tensor.dtype] = num_bytes.get(tensor.dtype, 0) + tensor.num_bytes
    return max(num_bytes, key=lambda dtype: num_bytes[dtype]) if num_bytes else None
