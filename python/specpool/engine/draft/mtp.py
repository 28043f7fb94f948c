"""`MTPDrafter`: drafts with the MTP layer of the target's own checkpoint.

Draft KV cell p of a row is made of the target's last hidden state at p and the token at p + 1, as
that of an EAGLE head is (see `eagle.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from os import PathLike

from torch import Tensor

from specpool._core import Shape
from specpool.engine.attention import AttentionBatch, View
from specpool.engine.attention.lanes import Lanes, causal_view
from specpool.engine.draft.head_drafter import HeadDrafter
from specpool.engine.memory.kv_cache import KVCache
from specpool.engine.models import TargetModel
from specpool.engine.models.mtp.layer import MtpLayer
from specpool.errors import ConfigError


class MTPDrafter(HeadDrafter):
    """A drafter with the MTP layer that ships inside the target's checkpoint."""

    head: MtpLayer
    feature_layers: tuple[int, ...] = ()

    def __init__(self, head: MtpLayer, *, ancestry: str = "exact") -> None:
        """Draft with `head`; `ancestry` is as in `from_pretrained`.

        Raises:
            ConfigError: the layer has chunked attention.
        """
        if any(layer.is_chunked for layer in head.model.layer_kv):
            raise ConfigError("the MTP layer has chunked attention: it cannot draft")
        self.head = head
        # The group keeps what the engine says; a window of the layer itself is in its masks.
        self.layers = tuple(replace(layer, window=None) for layer in head.model.layer_kv)
        self._exact = ancestry == "exact"

    @classmethod
    def from_pretrained(
        cls, source: str | PathLike[str], target: TargetModel, *, ancestry: str = "exact"
    ) -> MTPDrafter:
        """Load the MTP layer of a target's checkpoint.

        Args:
            source: the folder or the hub name that `target` was loaded from.
            target: the model that verifies; it shares its embedding and output matrix.
            ancestry: `exact` = a draft token attends to its true ancestors; `branch` = to its
                branch's own slots, whatever they hold (SGLang's reading, for comparison).

        Raises:
            ConfigError: the checkpoint has no MTP layer, its layout is not known, or such a target
                cannot use it.
            CheckpointError: its tensors do not fit, or are quantized.
        """
        return cls(MtpLayer.from_pretrained(source, target), ancestry=ancestry)

    def close(self) -> None:
        """Restore the attention of the layer's model."""
        self.head.model.close()

    def attach(
        self, cache: KVCache, first_layer: int, group: int, layout: str, shapes: Sequence[Shape]
    ) -> None:
        """Take the cache; see `HeadDrafter.attach`."""
        super().attach(cache, first_layer, group, layout, shapes)
        pairs = zip(self.head.model.kv_layers, self._layer_ids, strict=True)
        self._kv = [(layer, cache.keys[i], cache.values[i]) for layer, i in pairs]

    def extend(self, lanes: Lanes, tokens: Tensor, features: Tensor) -> None:
        """Write draft KV; see `Drafter.extend`."""
        view = causal_view(self._cache, self._group, lanes)
        hidden = self._draft(tokens, features, lanes.positions, view)
        self._hidden.index_copy_(0, lanes.index, hidden.index_select(0, lanes.last_indices))

    def _draft(self, tokens: Tensor, hidden: Tensor, positions: Tensor, view: View) -> Tensor:
        at = positions.clamp(max=self._last_position).long()
        kv = {layer: (keys, values, view) for layer, keys, values in self._kv}
        return self.head.forward(tokens, hidden, at, AttentionBatch([view], kv, self._window))
