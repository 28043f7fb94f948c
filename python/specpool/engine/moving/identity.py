"""`model_key`: says whether two engines compute the same KV."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from specpool.engine.draft import Drafter
from specpool.engine.models import TargetModel

# The numbers that are read of each weight.
_SAMPLES = 16
# Keys of a configuration that describe its file, not the model.
_OF_THE_FILE = {"_name_or_path", "transformers_version", "torch_dtype", "dtype"}


def model_key(target: TargetModel, drafters: Sequence[Drafter]) -> str:
    """Return a hash of the models' configuration, dtype and a sample of each weight.

    It reads a few numbers of each weight, so it detects another checkpoint, but not a single
    changed weight.
    """
    digest = hashlib.blake2b(digest_size=16)
    _add(digest, [_config_of(target), str(target.dtype)], target.model.named_parameters())
    for drafter in drafters:
        layers = [repr(layer) for layer in drafter.layers]
        model = getattr(drafter, "model", None)  # of a language model
        if isinstance(model, TargetModel):
            _add(digest, [_config_of(model), layers], model.model.named_parameters())
        else:
            head = getattr(drafter, "head", None) if layers else None
            _add(digest, [type(drafter).__name__, layers], sorted(_tensors(head)))
    return digest.hexdigest()


def config_key(target: TargetModel) -> str:
    """Return a hash of the target's configuration; it reads no weights."""
    config = json.dumps(_config_of(target), sort_keys=True, default=str)
    return hashlib.blake2b(config.encode(), digest_size=16).hexdigest()


def _add(
    digest: hashlib.blake2b, parts: list[Any], weights: Iterable[tuple[str, torch.Tensor]]
) -> None:
    digest.update(json.dumps(parts, sort_keys=True, default=str).encode())
    for name, weight in weights:
        flat = weight.detach().reshape(-1)
        sample = flat[:: max(len(flat) // _SAMPLES, 1)][:_SAMPLES].double().cpu().numpy()
        digest.update(f"{name} {list(weight.shape)}".encode() + sample.tobytes())


def _config_of(model: TargetModel) -> dict[str, Any]:
    config = model.config.to_dict()
    return {name: value for name, value in config.items() if name not in _OF_THE_FILE}


def _tensors(head: object | None) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in () if head is None else vars(head).items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            yield name, value
