"""Helpers that find a transformers model's decoder and give it private copies of its configs."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from specpool.checks import shown
from specpool.engine.models.recurrent import ATTENDING
from specpool.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class _Standing:
    """A cache that keeps nothing, for layers that take a token's position from their cache."""

    def __init__(self, positions: Tensor) -> None:
        """Take the tokens' positions, int64 [1, T]."""
        self._ahead = positions[0] - torch.arange(positions.shape[1], device=positions.device)

    def get_seq_length(self, *_: Any) -> Tensor:
        """Return int64 [T]: each token's position minus its index in the forward."""
        return self._ahead

    def update(
        self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the arguments, since pages keep KV, and note the layer that will attend."""
        ATTENDING.set(layer)
        return key, value


def _no_model(source: object) -> ConfigError:
    """Return the error for a source that is neither a name nor a transformers model."""
    kind = type(source)
    problem = f"the target is a folder, a hub name or a transformers model, got {shown(source)}"
    if kind.__module__.partition(".")[0] == "peft":
        problem = (
            f"the target is a PEFT model ({kind.__name__}): give its .merge_and_unload(), or the "
            "model that it wraps, .base_model.model, whose adapters run unmerged"
        )
    elif hasattr(source, "_orig_mod"):
        problem = (
            f"the target is a compiled module ({kind.__name__}), whose graph does not know pages: "
            "give the model of before, ._orig_mod"
        )
    return ConfigError(problem)


def _isolate_configs(model: PreTrainedModel) -> list[tuple[Any, Any]]:
    """Give the model's modules a copy of their configs; return (module, old config) pairs.

    The config holds the name of the attention function. Another model may share the config object
    and must not change with this one.
    """
    from transformers import PretrainedConfig

    copies: dict[int, Any] = {}  # deepcopy's memo: parts that are shared stay shared
    old = []
    for module in model.modules():
        config = module.__dict__.get("config")
        if isinstance(config, PretrainedConfig):
            old.append((module, config))
            module.config = copy.deepcopy(config, copies)  # type: ignore[assignment]
    return old


def _find_decoder(model: PreTrainedModel) -> Any:
    """Return the module that turns token ids into the hidden states before the output matrix."""
    find = getattr(model, "get_decoder", None)
    decoder = find() if find is not None else None
    # Some versions of transformers return the model itself, or its head.
    if decoder is None or decoder is model or isinstance(decoder, nn.Linear):
        decoder = model.base_model
    if decoder is model:  # Llama 4's text model is not where its class says
        decoder = getattr(model, "model", model)
    return decoder
