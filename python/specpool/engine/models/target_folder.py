"""`TargetFolder`: a target's folder, which is checked before transformers reads it.

transformers trusts a folder: it runs its code, opens the files that it names, and allocates the
sizes that it states. The checks here make sure that no code of a checkpoint runs unless the user
allows it, that all named files are inside the folder, and that sizes are not far beyond what the
weight files hold.
"""

from __future__ import annotations

import glob
import inspect
import logging
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from specpool.checks import shown
from specpool.engine.models.files.checkpoint import (
    SINGLES,
    check_counts,
    read_json,
    some_of,
    stored_dtypes,
    text_parts,
    weight_files,
)
from specpool.engine.models.files.hub import from_hub
from specpool.engine.models.gate import (
    check_class,
    check_config,
    context_limit,
    has_recurrent_layers,
    refusal,
    text_config,
)
from specpool.engine.models.sharding import sharded
from specpool.engine.models.text_part import has_other_parts, text_part
from specpool.errors import (
    CheckpointError,
    ConfigError,
    needs_trust,
    reading,
    wants_trust,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger("specpool")

# The files that transformers reads of a repository besides weights, none of them in a subfolder.
_CONFIGS = ("config.json", "*.index.json")
_TEXTS = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken")
# Keys that transformers or this package reads for every class: files, RoPE, MTP layers.
_ANY_CLASS = frozenset(
    """
    _attn_implementation_autoset attn_implementation auto_map is_decoder num_nextn_predict_layers
    partial_rotary_factor quantization_config rope_parameters rope_scaling rope_theta torch_dtype
    transformers_weights use_cache
    """.split()
)
_FLOATS = ("torch.float16", "torch.bfloat16", "torch.float32", "torch.float64")
# Where transformers maps a config to a class: the first that has it decides. The last is new in 5.
_AUTO_CLASSES = ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForMultimodalLM")
_MTP_FILES = ("*mtp*.safetensors",)
# The most numbers per byte of a weight file (4-bit weights have 2), and the numbers that a model
# may have beyond that (computed buffers).
_NUMBERS_PER_BYTE, _SPARE_NUMBERS = 4, 1 << 26


@dataclass(frozen=True, slots=True)
class TargetFolder:
    """The folder of a target.

    Attributes:
        name: the name that the user gave.
        path: the folder.
        trust_remote_code: the user allows the checkpoint's Python code to run.
    """

    name: str
    path: Path
    trust_remote_code: bool

    def load(self, loader: Any, **options: Any) -> Any:
        """Return the result of `loader.from_pretrained` for the folder; weights are not fetched.

        Raises:
            CheckpointError: transformers raised; the message is its error on one line.
        """
        try:
            with reading(f"cannot load a model from {self.name!r}"):
                return loader.from_pretrained(
                    str(self.path),
                    trust_remote_code=self.trust_remote_code,
                    # Trusted code may lie in another repository.
                    local_files_only=not self.trust_remote_code,
                    **options,
                )
        except CheckpointError as error:
            if not self.trust_remote_code and wants_trust(error):
                raise needs_trust(self.name, "model") from error
            raise


def find_target(
    source: str | os.PathLike[str],
    *,
    revision: str | None = None,
    local_files_only: bool = False,
    trust_remote_code: bool = False,
    config_only: bool = False,
    with_mtp: bool = False,
) -> TargetFolder:
    """Find a target's folder, or fetch it from the hub; its files are not read.

    Args:
        source: a folder, or a hub name.
        revision: branch, tag or commit on the hub.
        local_files_only: never ask the network.
        trust_remote_code: fetch Python code too.
        config_only: fetch no weights and no tokenizer.
        with_mtp: fetch files of an MTP layer too that the weights' index does not name.

    Raises:
        ConfigError: there is no such folder, it has no config.json, or the hub cannot give it.
    """
    if not isinstance(trust_remote_code, bool):
        raise ConfigError(
            f"trust_remote_code must be True or False, got {shown(trust_remote_code)}"
        )
    name = os.fspath(source)
    if not name:
        raise ConfigError("the target is '': give a folder, a hub name or a model")
    path = Path(os.path.expanduser(name))  # path.expanduser() raises for an unknown user
    if os.path.isdir(path):  # unlike path.is_dir(), no error for a name that is too long
        if os.path.isfile(path / "adapter_config.json"):
            raise ConfigError(
                f"{name!r} holds a PEFT adapter (adapter_config.json): merge it into its model "
                "with merge_and_unload(), and give the model or the folder it is saved to"
            )
        if not os.path.isfile(path / "config.json"):
            raise ConfigError(f"no model at {name!r}: the folder has no config.json")
        return TargetFolder(name, path, trust_remote_code)
    is_path = not isinstance(source, str) or name.startswith((".", "~", os.sep))
    if is_path or os.path.exists(path):
        raise ConfigError(f"no model at {name!r}: there is no such folder")
    with from_hub(name, revision, local_files_only=local_files_only) as only_cached:
        hub_options = {"revision": revision, "local_files_only": only_cached}
        more_patterns = [
            *(["*.py"] if trust_remote_code else []),
            *(_MTP_FILES if with_mtp else []),
        ]
        path = _fetch(name, _CONFIGS if config_only else (*_TEXTS, *more_patterns), hub_options)
        if not config_only:
            _fetch_weights(name, path, hub_options)
    if not os.path.isfile(path / "config.json"):
        raise ConfigError(f"no model at {name!r}: the hub has no config.json of it")
    return TargetFolder(name, path, trust_remote_code)


def _fetch(name: str, patterns: Sequence[str], hub_options: dict[str, Any]) -> Path:
    """Fetch the files of these patterns that the hub has; return the folder of all files so far."""
    from huggingface_hub import snapshot_download

    folder = snapshot_download(
        name, allow_patterns=list(patterns), ignore_patterns=["*/*"], **hub_options
    )
    return Path(folder)


def _fetch_weights(name: str, folder: Path, hub_options: dict[str, Any]) -> None:
    """Fetch the weights that will be read: a repository often holds its weights several times."""
    for single in SINGLES:
        _fetch(name, [single], hub_options)
        if (folder / single).is_file():
            return
        index = folder / f"{single}.index.json"
        if index.is_file():
            weight_map = read_json(index).get("weight_map")
            files = weight_map.values() if isinstance(weight_map, dict) else ()
            names = {file for file in files if isinstance(file, str)}
            _fetch(name, [glob.escape(file) for file in sorted(names)], hub_options)  # no patterns
            return


def load_config(folder: TargetFolder) -> Any:
    """Read a folder's config, and check by it that the model can run over pages.

    Raises:
        ConfigError: transformers refuses the config, or the model cannot run; the message has the
            reason.
        CheckpointError: see `TargetFolder.load`.
    """
    raw = read_json(folder.path / "config.json")
    check_counts(folder.name, raw)
    _check_dtype(folder.name, raw)
    _check_plain_names(folder.path / "config.json", raw, "configuration_files")
    from transformers import AutoConfig

    config = folder.load(AutoConfig)
    with reading(f"{folder.name}: config.json has values that do not go together"):
        check_values(config)
        check_config(config)
        is_recurrent = has_recurrent_layers(config)
        if not runs_own_code(config):
            model_class = _model_class(config)
            if not has_other_parts(model_class, config):  # else the decoder's class decides
                check_class(model_class, config.model_type, is_recurrent=is_recurrent)
        context_limit(config)
        # A config may name kernels to fetch and run; name none.
        config._attn_implementation = "eager"
        if hasattr(config, "_experts_implementation"):
            config._experts_implementation = None
    return config


def _unread(config: Any, raw: dict[str, Any]) -> Iterator[str]:
    """Yield the keys of a config.json that transformers' class of it has no use for."""
    from transformers import GenerationConfig, PretrainedConfig

    text = text_config(config)
    nested = raw.get("text_config")
    pairs = [(config, raw, "")]
    if text is not config and isinstance(nested, dict):
        pairs.append((text, nested, "text_config."))
    for part, keys, start in pairs:
        kind = type(part)
        try:
            known = {*vars(kind()), *inspect.signature(kind).parameters, *dir(kind)}
        except Exception:  # a class of the checkpoint's own code, or one without defaults
            continue
        known |= {*getattr(kind, "attribute_map", ()), *PretrainedConfig().to_dict(), *_ANY_CLASS}
        known |= set(vars(GenerationConfig()))  # type: ignore[no-untyped-call]
        yield from (start + key for key in sorted(set(keys) - known) if keys[key] is not None)


def _check_dtype(name: str, raw: dict[str, Any]) -> None:
    for part in text_parts(raw):
        for key in ("dtype", "torch_dtype"):
            value = part.get(key)
            if value is None or isinstance(value, dict):  # the latter: one for each part
                continue
            if not isinstance(value, str) or not isinstance(getattr(torch, value, 0), torch.dtype):
                raise CheckpointError(
                    f"{name}: config.json: {key} is {shown(value)}, not the name of a torch dtype "
                    "such as float16"
                )


def check_values(config: Any) -> None:
    """Check the types and ranges of the config values that this package reads.

    Raises:
        ConfigError: a value is wrong; the message has its key and the value.
    """
    text = text_config(config)
    for key in ("num_hidden_layers", "max_position_embeddings", "sliding_window"):
        value = getattr(text, key, None)
        if value is not None and (type(value) is not int or not 0 <= value < 1 << 31):
            raise ConfigError(
                f"{key} of the config is {shown(value)}, not an integer in [0, {(1 << 31) - 1}]"
            )
    for key in ("architectures", "layer_types"):
        value = getattr(text if key == "layer_types" else config, key, None)
        if value is not None and not (
            isinstance(value, list | tuple) and all(isinstance(entry, str) for entry in value)
        ):
            raise ConfigError(f"{key} of the config is {shown(value)}, not a list of names")
    for key, value in vars(text).items():
        if re.search(r"norm_?(eps|epsilon)$", key) and value is not None:
            _check_number(key, value, "in (0, 1)", below=1)
    rope = getattr(text, "rope_parameters", None)
    parts = [rope, *rope.values()] if isinstance(rope, dict) else [vars(text)]  # before 5.0
    for part in parts:
        if isinstance(part, dict) and part.get("rope_theta") is not None:
            _check_number("rope_theta", part["rope_theta"], "> 0")


def _check_number(key: str, value: object, allowed: str, below: float = float("inf")) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < below:  # type: ignore[operator]
        raise ConfigError(f"{key} of the config is {shown(value)}, not a number {allowed}")


def eos_ids(value: object) -> frozenset[int]:
    """Return the tokens that end a text, from a config's `eos_token_id`.

    Raises:
        ConfigError: the value is neither an id, nor a list of ids, nor None.
    """
    ids = value if isinstance(value, list | tuple) else [] if value is None else [value]
    if any(type(token) is not int or not -1 << 31 <= token < 1 << 31 for token in ids):
        raise ConfigError(
            f"eos_token_id of the config is {shown(value)}, not a token id or several"
        )
    return frozenset(ids)


def load_model(
    folder: TargetFolder, config: Any, dtype: torch.dtype | None, world: int = 1
) -> PreTrainedModel:
    """Load a model on the CPU, after a check that its files fit the config.

    Args:
        folder: the model's folder.
        config: the result of `load_config`.
        dtype: None means as stored.
        world: the ranks that share the model, each of which loads its part on its own device.

    Raises:
        CheckpointError: a file, a tensor or a number does not fit; the message names it.
        ConfigError: `world` ranks cannot share the model.
    """
    from transformers import AutoModelForCausalLM, PretrainedConfig

    model_class = None if runs_own_code(config) else _model_class(config)
    loader: Any = AutoModelForCausalLM
    if model_class is not None and has_other_parts(model_class, config):
        loader = model_class = text_part(model_class)
    options = {} if world == 1 else sharded(config, model_class or _model_class(config), world)
    _check_size(folder, _check_files(folder), config)
    name = "dtype" if hasattr(PretrainedConfig(), "dtype") else "torch_dtype"  # before 4.56
    model, loaded = folder.load(
        loader,
        config=config,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        **{name: "auto" if dtype is None else dtype},
        **options,
    )
    check_loaded(folder.name, model, loaded)
    unread = [*_unread(config, read_json(folder.path / "config.json"))]
    if unread:
        _log.info("%s: transformers does not know %s of its config.json", folder.name, unread)
    loaded_model: PreTrainedModel = model
    return loaded_model


def _check_files(folder: TargetFolder) -> list[Path]:
    """Return the weight files.

    Refuse files outside the folder, weights that are not floats, files with fewer tensors than
    layers, and a generation_config.json that cannot be read.
    """
    config = read_json(folder.path / "config.json")
    ends = folder.path / "generation_config.json"
    if os.path.exists(ends):
        read_json(ends)  # transformers would leave out a damaged one, and with it where texts end
    files = _weight_files(folder)
    dtypes: dict[str, str] = {}
    for path in files:
        dtypes |= stored_dtypes(path)
    if not config.get("quantization_config"):
        for name, dtype in dtypes.items():
            if name.endswith(".weight") and dtype not in _FLOATS:
                raise CheckpointError(
                    f"{folder.name}: {name:.80} is {dtype} and no quantization_config says what "
                    f"that means; weights are {', '.join(_FLOATS)}"
                )
    nested = [value for value in config.values() if isinstance(value, dict)]
    for part in (config, *nested):
        depth = part.get("num_hidden_layers")
        if part is config and isinstance(depth, int) and depth < 1:
            raise CheckpointError(f"{folder.name}: config.json has {depth} layers")
        if isinstance(depth, int) and depth > len(dtypes):
            raise CheckpointError(
                f"{folder.name}: config.json has {depth} layers, its weight files hold "
                f"{len(dtypes)} tensors in all"
            )
    return files


def _check_plain_names(path: Path, content: dict[str, Any], key: str) -> None:
    names = content.get(key)
    for name in names if isinstance(names, list) else ():
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{path}: {key} names {shown(name)}, which is no file beside it")


def _weight_files(folder: TargetFolder) -> list[Path]:
    path = folder.path
    # transformers prefers such files, and torch.distributed unpickles other files of the folder.
    parts = sorted(file.name for file in path.iterdir() if re.match(r"shard-\d", file.name))
    if parts:
        raise CheckpointError(
            f"{path} is a distributed checkpoint ({parts[0]:.80}): load it where it was saved, and "
            "save it with save_pretrained"
        )
    return weight_files(path)


def _check_size(folder: TargetFolder, files: Sequence[Path], config: Any) -> None:
    """Refuse a config whose model is far larger than the weight files.

    transformers would fill any number of missing weights with random numbers.
    """
    if runs_own_code(config):
        return
    try:
        model = empty_model(config)
    except Exception:  # loading will raise the same error
        return
    numbers = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    stored = sum(path.stat().st_size for path in files)
    if numbers > stored * _NUMBERS_PER_BYTE + _SPARE_NUMBERS:
        raise CheckpointError(
            f"{folder.name}: the model of config.json has {numbers:.3e} numbers, its weight files "
            f"hold {stored} bytes: they are not of one model"
        )


def empty_model(config: Any) -> Any:
    """Build the model that `load_model` would load, on the meta device: without weights."""
    from transformers import AutoModelForCausalLM

    model_class = _model_class(config)
    with torch.device("meta"):
        if has_other_parts(model_class, config):
            return text_part(model_class)(config)
        return AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]


def check_loaded(name: str, model: Any, loaded: dict[str, Any]) -> None:
    """Refuse a checkpoint in which transformers filled missing weights with random numbers."""
    faults = []
    for mismatch in sorted(loaded["mismatched_keys"]):
        # transformers 4 gives names only
        key, *shapes = (mismatch,) if isinstance(mismatch, str) else mismatch
        shape = list(shapes[0]) if shapes else "of another shape"
        faults.append(f"{key} is {shape}, expected {list(model.get_parameter(key).shape)}")
    faults += [f"missing {key}" for key in sorted(loaded["missing_keys"])]
    if faults:
        raise CheckpointError(f"{name}: {some_of(faults)}")


def _model_class(config: Any) -> Any:
    """Return the class of transformers for a config, without reading weights.

    Raises:
        ConfigError: transformers has none whose text part is a causal language model.
    """
    import transformers

    for name in _AUTO_CLASSES:
        mapping: Any = getattr(getattr(transformers, name, None), "_model_mapping", ())
        if type(config) in mapping:
            entry: Any = mapping[type(config)]
            classes: tuple[type, ...] = entry if isinstance(entry, tuple) else (entry,)
            named = [
                candidate
                for candidate in classes
                if candidate.__name__ in (config.architectures or ())
            ]
            return (named or classes)[0]
    raise refusal(config.model_type, "transformers has no causal language model for it")


def runs_own_code(config: Any) -> bool:
    """Return whether the model's class is the checkpoint's own code, which the user trusts."""
    from transformers import AutoModelForCausalLM

    return type(config) not in AutoModelForCausalLM._model_mapping and bool(
        getattr(config, "auto_map", None)
    )
