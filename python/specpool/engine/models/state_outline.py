"""`outline_states`: what the layers of a model with recurrent layers keep, by its config alone.

The model is built on the meta device, where tensors have shapes but no numbers. One forward runs
through it as at loading, so its mixers show their states, and its attention layers their KV.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from specpool.capacity.layer_kv import LayerKV
from specpool.capacity.state_sizes import StateBytes
from specpool.engine.models.gate import text_config
from specpool.engine.models.recurrent import MixerSpec, check_transformers
from specpool.engine.models.state_probe import first_forward
from specpool.engine.models.target import TargetModel
from specpool.engine.models.target_folder import empty_model

# Types whose mixers start their scan anew in each forward of several tokens. A loaded model is
# asked (`Mixers.continues`), but a model without numbers cannot answer.
_RESTARTING = ("falcon_mamba", "jamba", "mamba", "zamba")


@dataclass(frozen=True, slots=True)
class StateOutline:
    """What the layers of a model keep, and its size.

    Attributes:
        layers: the KV of each layer with attention.
        mixers: the states and records of each recurrent mixer.
        states: the bytes of these.
        num_parameters: of the decoder and its head.
    """

    layers: tuple[LayerKV, ...]
    mixers: tuple[MixerSpec, ...]
    states: StateBytes
    num_parameters: int


class _EmptyTarget(TargetModel):
    """A target whose tensors have no numbers, so that nothing can be computed and compared."""

    def _place(self, model: Any) -> tuple[torch.dtype, torch.device]:
        return model.dtype, torch.device("meta")

    def _probe(self) -> None:
        check_transformers(self.config)
        self.kv_layers, self.layer_kv, self.mixers = first_forward(self)
        self.mixers.continues = text_config(self.config).model_type not in _RESTARTING


def outline_states(config: Any, dtype: torch.dtype) -> StateOutline:
    """Return the outline of a config with recurrent layers. It takes seconds for a large model.

    Args:
        config: a transformers config that `check_config` has passed.
        dtype: what the weights are loaded in.

    Raises:
        ConfigError: the model cannot run; the message has the reason.
    """
    from transformers.utils import logging

    model = empty_model(config).to(dtype)
    model.set_experts_implementation("batched_mm")  # the others ask which experts have tokens
    level = logging.get_verbosity()
    # It names slow kernels, and none runs.
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        with torch.device("meta"), torch.inference_mode(), _EmptyTarget(model) as target:
            assert target.mixers is not None
            return StateOutline(
                layers=target.layer_kv,
                mixers=tuple(target.mixers.specs),
                states=target.mixers.state_bytes,
                num_parameters=sum(parameter.numel() for parameter in model.parameters()),
            )
    finally:
        logging.set_verbosity(level)
