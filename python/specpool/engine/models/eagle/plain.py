"""`PlainStack`: a small Llama-like language model on the layers of an EAGLE head.

A small model on a CPU spends most of its time between its operations: in modules, hooks and
configs. The layers of `EagleHead` have none of these.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from specpool.engine.models.eagle.config import ConfigReader, EagleConfig
from specpool.engine.models.eagle.head import Attend, EagleHead
from specpool.engine.models.files.checkpoint import normal_name
from specpool.errors import CheckpointError

if TYPE_CHECKING:
    from specpool.engine.models.target import TargetModel

#: Model types whose decoder layers are those of Llama, with or without norms of queries and keys.
_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
#: The most bytes of the decoder layers, which are held twice; larger models gain little.
MAX_BYTES = 256 << 20
#: Tokens that both ways compute before a stack is used, and how far their logits may be apart,
#: as a part of the largest.
_PROBE_LEN, _MOST_APART = 16, 1e-3


class PlainStack:
    """The decoder layers of a language model, as `EagleHead` runs them.

    Attributes:
        head: holds the weights.
    """

    def __init__(self, head: EagleHead) -> None:
        """Run the layers of `head`, whose features are not used."""
        self.head = head

    @classmethod
    def from_model(cls, model: TargetModel) -> PlainStack | None:
        """Return the stack of a model; None if the model runs by its own modules.

        A stack is for float32 on a CPU. It takes the place of a model of a known type without
        windows, of `MAX_BYTES` at most, that gives the same logits for a probe.
        """
        config: Any = model.config
        is_known = config.model_type in _TYPES and not any(kv.window for kv in model.layer_kv)
        if not is_known or model.device.type != "cpu" or model.dtype != torch.float32:
            return None
        weights = {normal_name(name): tensor for name, tensor in model.model.state_dict().items()}
        layers = [weight for name, weight in weights.items() if name.startswith("layers.")]
        if sum(weight.nbytes for weight in layers) > MAX_BYTES:
            return None
        try:
            stack = cls(_head(model, weights))
        except (CheckpointError, AssertionError, KeyError):
            return None
        return stack if stack._agrees(model) else None

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        keep: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run T tokens at their own positions; see `EagleHead.forward`, also for the errors.

        Returns:
            Hidden states [T or n, h] before the final norm.
        """
        return self.head.run_layers(self.head.embed(token_ids), None, positions, attend, keep)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [n, V] for results of `forward`."""
        return self.head.logits(hidden)

    @torch.inference_mode()
    def _agrees(self, model: TargetModel) -> bool:
        """Return whether a probe gets the model's own logits."""
        ids = [(7 * i + 1) % model.vocab_size for i in range(_PROBE_LEN)]
        wanted = model.plain_logits(ids)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            groups = q.shape[1] // k.shape[1]
            parts = (q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1))
            queries, keys, values = (part.transpose(0, 1)[None] for part in parts)
            out = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
            return out[0].transpose(0, 1)

        logits = self.logits(self.forward(torch.tensor(ids), torch.arange(len(ids)), attend))
        if logits.shape != wanted.shape:
            return False
        return bool((logits - wanted).abs().max() <= _MOST_APART * wanted.abs().max())


def _head(model: TargetModel, weights: dict[str, torch.Tensor]) -> EagleHead:
    """Return a head of the model's layers; its `fc` is not used."""
    config: Any = model.config
    spec = ConfigReader(config.to_dict())
    sizes = {"vocab_size": model.vocab_size, "max_position_embeddings": model.max_context_len}
    described = replace(EagleConfig.of_layers(spec), **sizes, draft_vocab_size=model.vocab_size)
    head_weights = {name: weight for name, weight in weights.items() if name != "lm_head.weight"}
    return EagleHead(
        described,
        head_weights,
        feature_layers=(),
        embedding=model.embedding_weight.detach(),
        target_head=model.lm_head_weight.detach(),
        dtype=model.dtype,
        device=model.device,
    )
