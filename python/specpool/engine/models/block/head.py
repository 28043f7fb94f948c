"""`BlockHead`: a block drafter in the layout of DFlash (arXiv 2602.06036).

    c = norm(fc(features of a position)): every layer's keys and values of that position
    x = embed([root, mask, ..., mask]); each layer attends to the context and to the block itself;
    logits of the mask at position p = target_head(norm(x)) are those of the token at p

Embedding and output matrix are the target's. The decoder layers are those of `EagleHead`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping

import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from specpool.engine.models.block.config import BlockConfig
from specpool.engine.models.eagle.head import Attend, EagleHead
from specpool.engine.models.eagle.likeliest import likeliest
from specpool.engine.models.eagle.weights import check_vocabulary, layer_shapes
from specpool.engine.models.files.checkpoint import (
    Shape,
    Weights,
    check_tensors,
    find_folder,
    log_unused,
    read_config,
)
from specpool.engine.models.target import TargetModel
from specpool.errors import CheckpointError

_log = logging.getLogger("specpool")


class BlockHead:
    """A drafter whose one forward proposes up to `block_size - 1` tokens.

    Attributes:
        config: the content of its config.json.
        block_size: the most tokens of a block, the root included.
        feature_layers: target layers whose *inputs* are the features, concatenated in this order.
        layer_kv: per layer (num_kv_heads, head_dim).
        draft_vocab_size: V of the target.
    """

    def __init__(
        self,
        config: BlockConfig,
        weights: Mapping[str, Tensor],
        target: TargetModel,
    ) -> None:
        """Assemble a head from checked tensors; callers use `from_pretrained`."""
        self.config, self.block_size = config, config.block_size
        self.feature_layers = config.feature_layers(target.num_layers)
        self.layer_kv, self.draft_vocab_size = config.layer_kv, target.vocab_size
        self._fc, self._hidden_norm = (
            weights[name].to(device=target.device, dtype=target.dtype)
            for name in ("fc.weight", "hidden_norm.weight")
        )
        self._stack = EagleHead(
            config.layers,
            {name: weights[name] for name in weights if not name.startswith("fc.")},
            feature_layers=(),
            embedding=target.embedding_weight.detach(),
            target_head=target.compute_logits,
            dtype=target.dtype,
            device=target.device,
        )

    @classmethod
    def from_pretrained(cls, source: str | os.PathLike[str], target: TargetModel) -> BlockHead:
        """Load a block drafter, in the target's dtype and on its device.

        Args:
            source: a folder with `config.json` and weights, or a hub name.
            target: the model that verifies; it shares its embedding and output matrix.

        Raises:
            CheckpointError: the checkpoint cannot be read, is for another target, is of a variant
                that is not supported, or has tensors that do not fit.
        """
        folder = find_folder(source)
        raw, weights = read_config(folder), Weights(folder)
        try:
            config = BlockConfig.parse(raw)
            added = _check_target(config, target)
            config.feature_layers(target.num_layers)
            _check_tensors(config, weights)
            head = cls(config, weights, target)
        except CheckpointError as error:
            raise CheckpointError(f"{source}: {error}") from error
        if added is not None:
            _log.warning("block drafter %s: %s", source, added)
        log_unused(source, (), config.unread)
        return head

    def reserve_positions(self, num_positions: int) -> None:
        """Make RoPE rows for positions `[0, num_positions)`."""
        self._stack.reserve_positions(num_positions)

    def context(self, features: Tensor, positions: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each layer's keys and values, [T, Hk, D] each, of the target's tokens.

        Args:
            features: [T, f], the target's features.
            positions: int64 [T].
        """
        eps = self.config.layers.rms_norm_eps
        x = F.linear(features, self._fc)
        x = F.rms_norm(x, self._hidden_norm.shape, self._hidden_norm, eps)
        return self._stack.keys_values(x, positions)

    def block(self, root_tokens: Tensor, num_steps: int) -> Tensor:
        """Return a block of each root, int64 [B], and S masks: int64 [B * (S + 1)]."""
        mask = self.config.mask_token_id
        return F.pad(root_tokens.unsqueeze(1), (0, num_steps), value=mask).view(-1)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Run blocks of T tokens in all.

        Args:
            tokens: int64 [T], of `block`.
            positions: int64 [T], in `[0, num_positions)` of `reserve_positions`.
            attend: as in `EagleHead.forward`.

        Returns:
            [T, h]; what `best` and `topk` read. The row of a mask predicts the token at the mask's
            own position.
        """
        return self._stack.run_layers(self._stack.embed(tokens), None, positions, attend)

    def best(self, hidden: Tensor) -> Tensor:
        """Return the most probable token of each row of `forward`'s result [n, h], int64 [n]."""
        return self._stack.best(hidden)

    def topk(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the k most probable tokens of each row; see `likeliest`."""
        return likeliest(self._stack.logits(hidden), k)


def _check_target(config: BlockConfig, target: TargetModel) -> str | None:
    """Refuse a drafter of a target of other sizes; see `check_vocabulary` for the result."""
    layers = config.layers
    if layers.hidden_size != target.hidden_size:
        raise CheckpointError(
            f"a block drafter for another target: made for hidden size {layers.hidden_size}, "
            f"the target's is {target.hidden_size}"
        )
    return check_vocabulary("a block drafter", layers.vocab_size, target.vocab_size)


def _check_tensors(config: BlockConfig, weights: Weights) -> None:
    """Raise unless the checkpoint holds exactly the tensors of its config."""
    layers, num_features = config.layers, len(config.target_layer_ids)
    h, head_dim = layers.hidden_size, layers.head_dim
    required: dict[str, Shape] = {
        "fc.weight": (h, num_features * h),
        "hidden_norm.weight": (h,),
        "norm.weight": (h,),
    }
    optional: dict[str, Shape] = {}
    for i in range(layers.num_layers):
        layer_required, layer_optional = layer_shapes(layers, i)
        required |= layer_required
        required[f"layers.{i}.input_layernorm.weight"] = (h,)
        for name in ("q_norm", "k_norm"):
            required[f"layers.{i}.self_attn.{name}.weight"] = (head_dim,)
        optional |= layer_optional
    check_tensors(weights, required, optional, (r".*rotary_emb\..*",))
