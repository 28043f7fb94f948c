"""`MtpLayer`: one decoder layer of the target's own kind, which predicts the token after the next.

    x = projection([token_norm(embed(token p + 1)); hidden_norm(hidden state of p)])
    out = final_norm(decoder_layer(x)); logits = the target's (out)

`out` is the hidden state of the next step. Embedding and output matrix are the target's, unless the
checkpoint has others in the layer (DeepSeek-V3, arXiv 2412.19437).
"""

from __future__ import annotations

import copy
import logging
import os
import re
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn

from specpool.engine.attention import AttentionBatch
from specpool.engine.models.eagle.likeliest import likeliest
from specpool.engine.models.eagle.tables import is_copy
from specpool.engine.models.files.checkpoint import (
    Weights,
    find_folder,
    is_of_mtp,
    log_unused,
    some_of,
)
from specpool.engine.models.gate import text_config
from specpool.engine.models.mtp.layout import MtpLayout, files_beside, find_layout
from specpool.engine.models.target import TargetModel
from specpool.engine.models.target_folder import check_loaded
from specpool.errors import CheckpointError, ConfigError, reading

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger("specpool")

#: Tokens of the small vocabulary with which the layer's model is built and probed.
_PROBE_VOCAB = 256


class MtpLayer:
    """The first MTP layer of a target's checkpoint.

    Attributes:
        model: a model of the target's class whose only layer is the MTP layer.
        hidden_size: h.
        draft_vocab_size: V, the target's vocabulary.
    """

    def __init__(
        self,
        model: TargetModel,
        target: TargetModel,
        *,
        projection: Tensor,
        token_norm: nn.Module,
        hidden_norm: nn.Module,
        hidden_first: bool,
        embedding: Tensor | None,
        head: Tensor | None,
    ) -> None:
        """Assemble a layer from checked parts; callers use `from_pretrained`.

        `embedding` and `head` are the layer's own [V, h]; None means the target's.
        """
        self.model = model
        self.hidden_size, self.draft_vocab_size = target.hidden_size, target.vocab_size
        self._embedding = target.embedding_weight.detach() if embedding is None else embedding
        self._logits = target.compute_logits
        if head is not None:
            self._logits = lambda hidden: F.linear(hidden, head)
        self._projection = projection
        self._token_norm, self._hidden_norm = token_norm, hidden_norm
        self._hidden_first = hidden_first

    @classmethod
    def from_pretrained(cls, source: str | os.PathLike[str], target: TargetModel) -> MtpLayer:
        """Load the MTP layer of a target's checkpoint, in the target's dtype and on its device.

        If the checkpoint has several MTP layers, the first one runs at all depths.

        Args:
            source: the target's folder or hub name.
            target: the loaded target.

        Raises:
            ConfigError: the checkpoint has no MTP layer, its layout is not known, or such a target
                cannot use it.
            CheckpointError: its tensors do not fit, or are quantized.
        """
        folder = find_folder(source)
        _check_target(target)
        try:
            weights, extra_files = Weights(folder), []
            if not any(is_of_mtp(name, target.num_layers) for name in weights):
                extra_files = files_beside(folder, target.num_layers)
                weights = Weights(folder, extra_files)
            layout = find_layout(weights, target.num_layers)
            model = _one_layer(target, weights, layout)
            tables = _own_tables(target, weights, layout)
        except (CheckpointError, ConfigError) as error:
            raise type(error)(f"{source}: {error}") from error
        if extra_files:
            names = ", ".join(path.name for path in extra_files)
            _log.info("MTP layer of %s: from %s, which its index does not name", source, names)
        log_unused(source, layout.unread(weights, target.num_layers))
        norm = _norm_of(model)
        parts = {}
        for name in (layout.token_norm, layout.hidden_norm):
            parts[name] = copy.deepcopy(norm)
            parts[name].weight.data.copy_(_part(target, weights, name, (target.hidden_size,)))
        with reading(f"{source}: the MTP layer cannot run", ConfigError):
            paged = TargetModel(model)
        h = target.hidden_size
        return cls(
            paged,
            target,
            projection=_part(target, weights, layout.projection, (h, 2 * h)),
            token_norm=parts[layout.token_norm],
            hidden_norm=parts[layout.hidden_norm],
            hidden_first=layout.hidden_first,
            embedding=tables.get(layout.embedding),
            head=tables.get(layout.head),
        )

    @torch.inference_mode()
    def forward(
        self, token_ids: Tensor, hidden: Tensor, positions: Tensor, batch: AttentionBatch
    ) -> Tensor:
        """Run one step over T tokens.

        Args:
            token_ids: int64 [T], token p + 1 of its sequence.
            hidden: [T, h], the target's last hidden state of p, or the result of an earlier step.
            positions: int64 [T], p.
            batch: the pages that the layer reads and writes.

        Returns:
            [T, h], the `hidden` of the next step and of `topk`.
        """
        tokens = self._token_norm(F.embedding(token_ids, self._embedding))
        normed = [tokens, self._hidden_norm(hidden)]
        x = F.linear(
            torch.cat(normed[::-1] if self._hidden_first else normed, -1), self._projection
        )
        return self.model.forward(x, positions, batch, token_ids[:0]).hidden

    def best(self, hidden: Tensor) -> Tensor:
        """Return the most probable token for `forward`'s result [n, h], int64 [n]."""
        return self._logits(hidden).argmax(-1)

    def topk(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the k most probable tokens for `forward`'s result [n, h]; see `likeliest`."""
        return likeliest(self._logits(hidden), k)


def _check_target(target: TargetModel) -> None:
    """Refuse targets whose MTP layer cannot run.

    Raises:
        ConfigError: the target is multimodal or quantized.
    """
    kind = target.config.model_type
    if text_config(target.config) is not target.config:
        raise ConfigError(f"the target of type {kind!r} is multimodal: its MTP layer cannot run")
    if getattr(target.config, "quantization_config", None):
        raise ConfigError(f"the target of type {kind!r} is quantized: its MTP layer cannot run")


def _own_tables(target: TargetModel, weights: Weights, layout: MtpLayout) -> dict[str, Tensor]:
    """Return the layer's own embedding and output matrix, if they are not copies of the target's.

    Raises:
        CheckpointError: one has another shape, or is quantized; or the config says that there is an
            embedding, and there is none.
    """
    says_own = getattr(target.config, "mtp_use_dedicated_embeddings", False)
    if says_own and layout.embedding not in weights:
        raise CheckpointError(
            f"the config says mtp_use_dedicated_embeddings, but {layout.embedding} is missing"
        )
    tables: dict[str, Tensor] = {}
    for name, targets in (
        (layout.embedding, target.embedding_weight),
        (layout.head, target.lm_head_weight),
    ):
        if name not in weights:
            continue
        table = _part(target, weights, name, (target.vocab_size, target.hidden_size))
        if not is_copy(weights[name], targets.detach()):
            label = weights.file_name(name)
            _log.warning("the MTP layer reads its own %s, which is not the target's", label)
            tables[name] = table
    return tables


def _one_layer(target: TargetModel, weights: Weights, layout: MtpLayout) -> PreTrainedModel:
    """Return a model of the target's class with the MTP layer as its only layer.

    Raises:
        CheckpointError: the tensors are not those of such a layer; the message names them.
        ConfigError: the MTP layer is recurrent.
    """
    start = _layers_name(target)
    _check_attention(target, weights, layout, start)
    rows = min(target.vocab_size, _PROBE_VOCAB)
    state: dict[str, Any] = {
        f"{start}.0.{name.removeprefix(layout.block)}": _part(target, weights, name)
        for name in layout.block_names(weights)
    }
    target_model: Any = target.model
    names = {id(module): name for name, module in target_model.named_modules()}
    norm, embeddings = names[id(_norm_of(target_model))], target_model.get_input_embeddings()
    head = target_model.get_output_embeddings()
    state[names[id(embeddings)] + ".weight"] = target.embedding_weight[:rows].detach().clone()
    state[names[id(head)] + ".weight"] = target.lm_head_weight[:rows].detach().clone()
    state[norm + ".weight"] = _part(target, weights, layout.final_norm, (target.hidden_size,))
    loader: Any = type(target.model)
    with reading("the MTP layer cannot be built"):
        model, loaded = loader.from_pretrained(
            None,
            config=_one_layer_config(target.config, rows),
            state_dict=state,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    loaded["missing_keys"] = {
        layout.block + name.removeprefix(f"{start}.0.") for name in loaded["missing_keys"]
    }
    check_loaded("the MTP layer", model, loaded)
    if unexpected := sorted(loaded["unexpected_keys"]):
        tensors = [layout.block + name.removeprefix(f"{start}.0.") for name in unexpected]
        raise CheckpointError(
            f"the MTP layer has unexpected {some_of([*map(weights.file_name, tensors)])}"
        )
    layer_model: PreTrainedModel = model.to(device=target.device, dtype=target.dtype)
    return layer_model


def _check_attention(
    target: TargetModel, weights: Weights, layout: MtpLayout, layers_name: str
) -> None:
    """Refuse an MTP layer with a recurrent mixer: its state would have to follow every draft.

    Raises:
        ConfigError: a tensor is of a mixer such as the target's; the message names it.
    """
    if target.mixers is None:
        return
    mixers = {id(module) for module in target.mixers.modules}
    model: Any = target.model
    layers = re.compile(re.escape(layers_name) + r"\.\d+\.")
    starts = tuple(
        {
            layout.block + layers.sub("", name) + "."
            for name, module in model.named_modules()
            if id(module) in mixers
        }
    )
    for name in layout.block_names(weights):
        if name.startswith(starts):
            raise ConfigError(
                f"the MTP layer is recurrent, as {weights.file_name(name)} says: only one with "
                "attention alone drafts"
            )


def _one_layer_config(config: Any, vocab_size: int) -> Any:
    """Return the target's config for one layer, which has experts if any layer has."""
    layer_config = copy.deepcopy(config)
    layer_config.num_hidden_layers, layer_config.vocab_size = 1, vocab_size
    layer_config.tie_word_embeddings, layer_config.pad_token_id = False, None
    for key, mtp_key, default in (
        ("layer_types", "mtp_layer_types", ["full_attention"]),
        ("mlp_layer_types", "mtp_mlp_layer_types", None),
    ):
        kinds = getattr(layer_config, key, None)
        if kinds is not None:
            setattr(
                layer_config,
                key,
                list(getattr(layer_config, mtp_key, None) or default or kinds[-1:])[:1],
            )
    for key, value in (
        ("first_k_dense_replace", 0),
        ("mlp_only_layers", []),
        ("num_nextn_predict_layers", 0),
    ):
        if getattr(layer_config, key, None):
            setattr(layer_config, key, value)
    layer_config._attn_implementation = "eager"
    if hasattr(layer_config, "_experts_implementation"):
        layer_config._experts_implementation = None
    return layer_config


def _part(
    target: TargetModel, weights: Weights, name: str, shape: tuple[int, ...] | None = None
) -> Tensor:
    """Read a tensor in the target's dtype; None means any shape.

    Raises:
        CheckpointError: its shape is another, or it is quantized.
    """
    tensor, label = weights[name], weights.file_name(name)
    if shape is not None and tuple(tensor.shape) != shape:
        raise CheckpointError(f"{label} is {list(tensor.shape)}, expected {list(shape)}")
    if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
        raise CheckpointError(f"{label} is {tensor.dtype}; quantized weights are not supported")
    return tensor.to(device=target.device, dtype=target.dtype)


def _layers_name(target: TargetModel) -> str:
    """Return the name of the list of layers in the target's model, such as `model.layers`."""
    model: Any = target.model
    return str(next(name for name, module in model.named_modules() if module is target._layers))


def _norm_of(model: Any) -> Any:
    """Return the final norm of a model's decoder.

    Raises:
        ConfigError: it is not called `norm`, as that of every target with a known layout is.
    """
    norm = getattr(model.get_decoder(), "norm", None)
    if norm is None:
        raise ConfigError(f"the decoder of {type(model).__name__} has no norm of that name")
    return norm
