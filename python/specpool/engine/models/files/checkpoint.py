"""Published checkpoints on disk: find them, and read their tensors under normal names.

Reading never runs code of a file (safetensors, or `torch.load(weights_only=True)`). A tensor is
read only when it is asked for. A file that does not fit raises `CheckpointError`.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specpool.checks import shown
from specpool.engine.models.files.hub import from_hub
from specpool.errors import CheckpointError, one_line, reading

if TYPE_CHECKING:
    import torch

_log = logging.getLogger("specpool")

Shape = tuple[int, ...]
_MOST_LAYERS = 1 << 14
_LEAST = {"hidden_size": 1, "intermediate_size": 0, "vocab_size": 1, "head_dim": 1}
_LEAST |= {"num_attention_heads": 1, "num_key_value_heads": 1}

#: The files of whole weights, in the order in which transformers looks for them. Each comes before
#: its own index.
SINGLES = ("model.safetensors", "pytorch_model.bin")
_INDEX = ".index.json"

# safetensors' names of the dtypes that weights may have; other dtypes keep their names.
_STORED = {"F64": "torch.float64", "F32": "torch.float32", "F16": "torch.float16"}
_STORED |= {"BF16": "torch.bfloat16", "I8": "torch.int8", "BOOL": "torch.bool"}

# Older and speculators' names of the same tensors, applied in this order to the start of a name.
_PREFIXES = {
    "model.": "",
    "midlayer.": "layers.0.",
    "transformer.": "layers.0.",
    "fusion_fc.": "fc.",
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}


class Weights(Mapping[str, "torch.Tensor"]):
    """The tensors of a checkpoint folder under their normal names. Each access reads the tensor.

    Normal names: no `model.` prefix; `layers.0.` for `midlayer.` and speculators' `transformer.`;
    `fc.` for `fusion_fc.`; `fc_norm.{0,1,2}` for `aux_norm_{low,mid,high}`.
    """

    def __init__(self, folder: Path, beside: Sequence[Path] = ()) -> None:
        """Open the weight files of `folder`, and the files `beside` them.

        Raises:
            CheckpointError: there is no weight file, one is unreadable or unsafe, a shard is
                missing, or two tensors have the same normal name.
        """
        self._sources: dict[str, tuple[Callable[[str], Any], str]] = {}
        for path in [*weight_files(folder), *beside]:
            names, read = _open(path)
            for name in names:
                normal = normal_name(name)
                if normal in self._sources:
                    raise CheckpointError(
                        f"{folder}: {self._sources[normal][1]} and {name} are the same tensor"
                    )
                self._sources[normal] = (read, name)

    def __getitem__(self, name: str) -> torch.Tensor:
        import torch

        read, file_name = self._sources[name]
        with reading(f"{file_name} cannot be read"):
            tensor = read(file_name)
        if not isinstance(tensor, torch.Tensor):
            raise CheckpointError(f"{file_name} is a {type(tensor).__name__}, not a tensor")
        # A pickle may state a shape of any size over one stored number.
        if tensor.layout != torch.strided or tensor.nbytes > tensor.untyped_storage().nbytes():
            raise CheckpointError(
                f"{file_name} is {list(tensor.shape)} over fewer numbers than that: store it dense"
            )
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._sources  # the base class would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)

    def file_name(self, name: str) -> str:
        """Return the name of tensor `name` in its file; `name` itself if it is in no file."""
        return self._sources[name][1] if name in self._sources else name


def normal_name(name: str) -> str:
    """Return the normal name (see `Weights`) of a tensor's name in its file."""
    for prefix, normal in _PREFIXES.items():
        if name.startswith(prefix):
            name = normal + name[len(prefix) :]
    return name


def is_of_mtp(name: str, num_layers: int) -> bool:
    """Return whether a tensor belongs to no layer of the target, but seems to be of MTP layers.

    Args:
        name: the tensor's normal name (see `Weights`).
        num_layers: decoder layers of the target.
    """
    if re.search(r"(^|[._])(mtp|nextn)", name):
        return True
    layer = re.match(r"layers\.(\d+)\.", name)
    return layer is not None and int(layer[1]) >= num_layers


def find_folder(source: str | os.PathLike[str]) -> Path:
    """Return a checkpoint's folder: `source`, or where the hub's `owner/name` was downloaded to.

    Raises:
        CheckpointError: `source` is not a folder, and the hub cannot give a model of this name.
    """
    path = Path(source)
    if os.path.isdir(path):  # unlike path.is_dir(), no error for a name that is too long
        return path
    if os.path.exists(path):
        raise CheckpointError(f"{path} is a file; give the folder that holds it and config.json")
    if not isinstance(source, str) or not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", source):
        raise CheckpointError(f"{path}: no such folder, nor a hub name of the form owner/name")
    return _download(source)


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download

    with from_hub(name) as only_cached:
        fetch = partial(snapshot_download, name, local_files_only=only_cached)
        # Fetch pickles only without safetensors, because many repositories hold both.
        folder = Path(fetch(allow_patterns=["config.json", "*.safetensors*"]))
        if not any(folder.glob("*.safetensors*")):
            folder = Path(fetch(allow_patterns=["config.json", "*.bin*"]))
    return folder


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of a checkpoint folder's `config.json`.

    Raises:
        CheckpointError: the file is missing, or not a JSON object.
    """
    return read_json(folder / "config.json")


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        CheckpointError: there is no such regular file, or it does not hold a JSON object.
    """
    if not os.path.isfile(path):  # unlike path.is_file(), no error for a name that is too long
        raise CheckpointError(f"{path.parent}: no {path.name}")
    with reading(f"{path} cannot be read"):  # RecursionError too: arrays may nest deeply
        value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, not an object")
    return value


def text_parts(raw: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the objects of a config.json that may describe the text decoder."""
    return [part for part in (raw, raw.get("text_config")) if isinstance(part, dict)]


def check_counts(name: str, raw: dict[str, Any]) -> None:
    """Refuse a config with more layers than any model has, or of no size, before it sizes anything.

    Raises:
        CheckpointError: a number of layers is above 2^14, or a size is below 1; the message has the
            key and the number.
    """
    for part in text_parts(raw):
        for key, least in _LEAST.items():
            value = part.get(key)
            if isinstance(value, int) and value < least:
                raise CheckpointError(
                    f"{name}: config.json: {key} is {shown(value)}, not an integer >= {least}"
                )
    nested = [value for value in raw.values() if isinstance(value, dict)]
    for part in (raw, *nested):
        for key, value in part.items():
            is_count = re.search(r"(?<!per_)layers?$", key) is not None
            if is_count and isinstance(value, int) and value > _MOST_LAYERS:
                raise CheckpointError(
                    f"{name}: config.json has {key:.40} {value!s:.24}, at most {_MOST_LAYERS} are "
                    "allowed"
                )


def weight_bytes(folder: Path) -> int:
    """Return the bytes of all tensors, by the index if it states them, else by the file sizes.

    Raises:
        CheckpointError: there are no weight files, or the index names none.
    """
    entry = weight_entry(folder)
    if entry.name.endswith(_INDEX):
        metadata = read_json(entry).get("metadata")
        total = metadata.get("total_size") if isinstance(metadata, dict) else None
        if isinstance(total, int | float) and 0 < total < 1 << 60:
            return int(total)
    return sum(path.stat().st_size for path in weight_files(folder))


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files of a checkpoint folder; every reader of weights asks here.

    Raises:
        CheckpointError: there are none, or an index is wrong (see `shards`).
    """
    entry = weight_entry(folder)
    return shards(entry) if entry.name.endswith(_INDEX) else [entry]


def weight_entry(folder: Path) -> Path:
    """Return the weight file, or the index of several, that transformers would read.

    The first that exists is read, and the others are stale or copies: the file that the config
    names in `transformers_weights`, model.safetensors, its index, pytorch_model.bin, its index.
    A folder with none of them may have one file of another name, which transformers does not read.

    Raises:
        CheckpointError: there is none, or the config names a file that is not beside it.
    """
    named = None
    if os.path.isfile(folder / "config.json"):
        named = read_config(folder).get("transformers_weights")
    if named is not None and (not isinstance(named, str) or Path(named).name != named):
        raise CheckpointError(
            f"{folder}: transformers_weights names {shown(named)}, which is no file beside it"
        )
    singles = [name for single in SINGLES for name in (single, single + _INDEX)]
    names = singles if named is None else [named]
    for name in names:
        if os.path.isfile(folder / name):
            return folder / name
    for single in SINGLES if named is None else ():
        lone = sorted(p for p in folder.glob(f"*{Path(single).suffix}") if os.path.isfile(p))
        if len(lone) == 1:
            return lone[0]
    files = ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"
    wanted = f"no {named}" if named else f"no {' or '.join(SINGLES)}, nor an index of one"
    raise CheckpointError(f"{folder}: {wanted}; found {files:.200}")


def shards(index: Path) -> list[Path]:
    """Return the files that an index of weights names; all must be in the index's folder.

    Raises:
        CheckpointError: the index names no file, or one that is missing or elsewhere.
    """
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: no weight_map")
    files = sorted({str(file) for file in weight_map.values()})
    for file in files:
        # An index must not name files outside its own folder.
        if Path(file).name != file or not os.path.isfile(index.parent / file):
            raise CheckpointError(f"{index} names {shown(file)}, which is no file beside it")
    return [index.parent / file for file in files]


def stored_dtypes(path: Path) -> dict[str, str]:
    """Return the dtype of each tensor in a weight file, as `torch.float16`; no tensor is read.

    Raises:
        CheckpointError: the file is unreadable or unsafe.
    """
    if path.suffix != ".safetensors":
        names, read = _open(path, device="meta")
        return {name: str(getattr(read(name), "dtype", "no tensor")) for name in names}
    from safetensors import safe_open

    with reading(f"{path} is not a sound safetensors file"), safe_open(path, "pt") as file:
        dtypes = {name: file.get_slice(name).get_dtype() for name in file.keys()}
    return {name: _STORED.get(dtype, dtype) for name, dtype in dtypes.items()}


def _open(path: Path, device: str = "cpu") -> tuple[list[str], Callable[[str], Any]]:
    """Return the tensor names in a weight file, and a function that reads one."""
    if path.suffix == ".safetensors":
        from safetensors import safe_open

        with reading(f"{path} is not a sound safetensors file"):
            file: Any = safe_open(path, framework="pt")
            return list(file.keys()), file.get_tensor
    state = _load_pickle(path, device)
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise CheckpointError(f"{path} holds a {type(state).__name__}, not a state dict")
    return list(state), state.__getitem__


def _load_pickle(path: Path, device: str) -> Any:
    import torch

    try:
        return torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # zip, pickle and I/O errors of many kinds
        raise CheckpointError(
            f"{path} is not a sound state dict of plain tensors, and anything else is not run: "
            f"{one_line(error)}"
        ) from error


def log_unused(
    source: str | os.PathLike[str], tensors: Sequence[str], keys: Sequence[str] = ()
) -> None:
    """Name, once, the tensors and the config keys of a checkpoint that nothing reads."""
    for kind, names in (("tensors", tensors), ("keys of its config.json", keys)):
        if names:
            _log.warning("%s: %s that are not read: %s", source, kind, some_of(sorted(names)))


def check_tensors(
    weights: Weights,
    required: Mapping[str, Shape],
    optional: Mapping[str, Shape],
    ignored: Sequence[str],
) -> None:
    """Check the names and shapes of all tensors, and that they are plain numbers.

    Args:
        weights: the checkpoint's tensors.
        required: shapes of the tensors that must be there.
        optional: shapes of the tensors that may be there.
        ignored: patterns of names that are skipped.

    Raises:
        CheckpointError: tensors are missing, unexpected or misshapen; one message names them.
    """
    import torch

    known = {**optional, **required}
    faults = [
        f"missing {name} {list(shape)}" for name, shape in required.items() if name not in weights
    ]
    for name in weights:
        if any(re.fullmatch(pattern, name) for pattern in ignored) and name not in required:
            continue
        tensor, label = weights[name], weights.file_name(name)
        if name not in known:
            faults.append(f"unexpected {label} {list(tensor.shape)}")
        elif tuple(tensor.shape) != known[name]:
            faults.append(f"{label} is {list(tensor.shape)}, expected {list(known[name])}")
        elif name == "d2t":
            if tensor.dtype not in (torch.int32, torch.int64):
                faults.append(f"d2t is {tensor.dtype}, expected int64")
        elif tensor.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            faults.append(f"{label} is {tensor.dtype}; quantized weights are not supported")
    if faults:
        raise CheckpointError(some_of(faults))


def some_of(faults: Sequence[str], max_faults: int = 12) -> str:
    """Join the first `max_faults` faults into one line, with the number of further ones."""
    suffix = f"; and {len(faults) - max_faults} more" if len(faults) > max_faults else ""
    return "; ".join(f"{fault:.160}" for fault in faults[:max_faults]) + suffix
