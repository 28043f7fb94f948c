"""`model_key`: says whether two engines compute the same KV."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator

import torch

from specpool.draft import Drafter
from specpool.models import TargetModel

# Of each weight, this many numbers are looked at.
_SAMPLES = 16
# What a configuration says of its file, not of the model.
_OF_THE_FILE = {"_name_or_path", "transformers_version", "torch_dtype", "dtype"}


def model_key(target: TargetModel, drafter: Drafter | None) -> str:
    """Return a hash of the models' configuration, dtype and a sample of each weight.

    It finds another checkpoint, not a single changed weight. It reads a few numbers of each weight.
    """
    digest = hashlib.blake2b(digest_size=16)
    config = target.config.to_dict()
    known = {name: value for name, value in config.items() if name not in _OF_THE_FILE}
    layers = [] if drafter is None else [repr(layer) for layer in drafter.layers]
    parts = [known, str(target.dtype), type(drafter).__name__, layers]
    digest.update(json.dumps(parts, sort_keys=True, default=str).encode())
    weights: list[tuple[str, torch.Tensor]] = list(target.model.named_parameters())
    head = getattr(drafter, "head", None)
    weights += sorted(_tensors(head)) if layers and head is not None else []
    for name, weight in weights:
        flat = weight.detach().reshape(-1)
        sample = flat[:: max(len(flat) // _SAMPLES, 1)][:_SAMPLES].double().cpu().numpy()
        digest.update(f"{name} {list(weight.shape)}".encode() + sample.tobytes())
    return digest.hexdigest()


def _tensors(head: object) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in vars(head).items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            yield name, value
