"""What a target takes of a transformers model: its decoder, and configs of its own."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from specpool.errors import ConfigError
from specpool.models.recurrent import ATTENDING

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class _Standing:
    """A cache that keeps nothing: it tells layers that count by it where each token stands."""

    def __init__(self, positions: Tensor) -> None:
        """Of tokens [1, T]."""
        self._ahead = positions[0] - torch.arange(positions.shape[1], device=positions.device)

    def get_seq_length(self, *_: Any) -> Tensor:
        """int64 [T]: position i of a token, less its place in the forward."""
        return self._ahead

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any) -> tuple[Tensor, Tensor]:
        """Give back what was given, which pages keep; note the layer that will attend."""
        ATTENDING.set(layer)
        return key, value


def _no_model(source: object) -> ConfigError:
    """Return the refusal of what is neither a name nor a transformers model, with the way out."""
    kind = type(source)
    told = f"the target is a folder, a hub name or a transformers model, got {source!r:.80}"
    if kind.__module__.partition(".")[0] == "peft":
        told = (
            f"the target is a PEFT model ({kind.__name__}): give its .merge_and_unload(), or the "
            "model that it wraps, .base_model.model, whose adapters run unmerged"
        )
    elif hasattr(source, "_orig_mod"):
        told = (
            f"the target is a compiled module ({kind.__name__}), whose graph does not know pages: "
            "give the model of before, ._orig_mod"
        )
    return ConfigError(told)


def _isolate_configs(model: PreTrainedModel) -> list[tuple[Any, Any]]:
    """Gives every module of the model its own copy of the config that it shares; old ones back.

    The name of the attention function is kept in the config, and a config object may be shared
    with another model, which must not change with this one.
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
    """The module that turns token ids into the hidden states that the head reads."""
    find = getattr(model, "get_decoder", None)
    decoder = find() if find is not None else None
    if decoder is None or decoder is model or isinstance(decoder, nn.Linear):  # a head, once
        decoder = model.base_model
    if decoder is model:  # Llama 4's text model is not where its class says
        decoder = getattr(model, "model", model)
    return decoder
