"""`EagleHead`: EAGLE-1/2 and EAGLE-3 draft heads, as plain tensors and functions.

A head runs num_steps times per round on a few tokens, so the number of operations sets its cost.
That is why q, k and v are one matrix, gate and up another, RoPE is two table rows, and there are no
modules. The caller passes the attention function, because only it knows the pages.

    EAGLE-1  x = fc([embed(token); feature]); y = x + attn(x); out = y + mlp(norm(y));
             logits = target_head(out)
    EAGLE-3  g = fc(features); y = g + attn([norm(embed(token)); norm(g)]); out = y + mlp(norm(y));
             logits = lm_head(norm(out))

`out` is the next step's feature (EAGLE papers: arXiv 2401.15077, 2503.01840).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from specpool import kernels
from specpool.checks import shown
from specpool.engine.models.eagle.config import EagleConfig, Kind
from specpool.engine.models.eagle.likeliest import likeliest
from specpool.engine.models.eagle.tables import is_copy, with_rows
from specpool.engine.models.eagle.weights import (
    _add_linear,
    _check_target,
    _check_tensors,
    _HeadLayer,
    _load_layer,
    check_vocabulary,
)
from specpool.engine.models.files.checkpoint import Weights, find_folder, log_unused, read_config
from specpool.errors import CheckpointError, ShapeError
from specpool.kernels.launch import runs_kernels

_log = logging.getLogger("specpool")

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class EagleHead:
    """A draft head that proposes tokens from the target's hidden states.

    Attributes:
        kind: `eagle` (EAGLE-1 and 2) or `eagle3`.
        config: the content of its config.json.
        num_layers: decoder layers.
        feature_layers: target layers whose *inputs* are the feature, concatenated in this order (L
            is the input of the final norm); if empty, the last hidden state after the final norm.
        layer_kv: per layer (num_kv_heads, head_dim).
        hidden_size: h.
        draft_vocab_size: Vd, columns of the logits.
        dtype: dtype of weights, features and hidden states.
        max_positions: positions below it have RoPE rows; see `reserve_positions`.
    """

    def __init__(
        self,
        config: EagleConfig,
        weights: Mapping[str, torch.Tensor],
        *,
        feature_layers: tuple[int, ...],
        embedding: torch.Tensor,
        target_head: torch.Tensor | Callable[[torch.Tensor], torch.Tensor],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Assemble a head from checked tensors; callers use `from_pretrained`."""

        def get(name: str) -> torch.Tensor | None:
            return weights[name].to(device=device, dtype=dtype) if name in weights else None

        self.config, self.dtype, self.device = config, dtype, device
        self.kind: Kind = config.kind
        self.num_layers, self.hidden_size = config.num_layers, config.hidden_size
        self.feature_layers = feature_layers
        self.layer_kv = config.layer_kv
        self._embedding = embedding.to(device=device, dtype=dtype)
        self._fc, self._fc_bias = get("fc.weight"), get("fc.bias")
        self._input_norm = get("input_norm.weight")
        self._fc_norms = [
            norm
            for i in range(len(feature_layers))
            if (norm := get(f"fc_norm.{i}.weight")) is not None
        ]
        self._layers = [_load_layer(get, i) for i in range(config.num_layers)]
        self._norm = get("norm.weight")
        self._lm_head = get("lm_head.weight")  # [Vd, h]; the target's if the file has none
        self._target_logits: Callable[[torch.Tensor], torch.Tensor] | None = None
        if self._lm_head is None:
            if isinstance(target_head, torch.Tensor):
                self._lm_head = target_head.to(device=device, dtype=dtype)
            else:
                self._target_logits = target_head
        self.draft_vocab_size = config.draft_vocab_size
        # int64 [Vd], add it to a draft id to get the target id; None if the ids are equal
        self._d2t = (
            weights["d2t"].to(device=device, dtype=torch.int64) if "d2t" in weights else None
        )
        self._act = _activation(config.hidden_act)
        self._fuses_gate = self._act is F.silu and runs_kernels(device)
        self.max_positions = 0
        # Some configs state millions. `reserve_positions` adds more when they are needed.
        self.reserve_positions(min(config.max_position_embeddings, 4096))

    @classmethod
    def from_pretrained(
        cls,
        source: str | os.PathLike[str],
        *,
        num_layers: int,
        hidden_size: int,
        vocab_size: int,
        embedding_weight: torch.Tensor,
        lm_head_weight: torch.Tensor | None = None,
        compute_logits: Callable[[torch.Tensor], torch.Tensor] | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        feature_layers: Sequence[int] | None = None,
    ) -> EagleHead:
        """Load a head for a given target.

        Args:
            source: a folder with `config.json` and weights, or a hub name `owner/name`.
            num_layers: the target's decoder layers.
            hidden_size: the target's.
            vocab_size: the target's.
            embedding_weight: the target's input embedding [>= vocab_size, hidden_size].
            lm_head_weight: the target's output matrix of the same shape; None means tied.
            compute_logits: last hidden state after the final norm [n, h] -> logits [n, V], for
                targets that scale or cap them; takes the place of `lm_head_weight`.
            dtype: dtype of the head; None means that of `embedding_weight`.
            device: device of the head; None means that of `embedding_weight`.
            feature_layers: target layers whose inputs are the features; overrides the file.

        Raises:
            CheckpointError: the checkpoint cannot be read, is not an EAGLE head, is for another
                target, or has tensors that do not fit.
            ShapeError: the target's tensors do not have the stated sizes.
        """
        for name, tensor in (("embedding", embedding_weight), ("lm_head", lm_head_weight)):
            if tensor is not None and (
                tensor.dim() != 2 or len(tensor) < vocab_size or tensor.shape[1] != hidden_size
            ):
                raise ShapeError(
                    f"the target's {name} is {list(tensor.shape)}, "
                    f"expected [{vocab_size}, {hidden_size}]"
                )
        dtype = embedding_weight.dtype if dtype is None else dtype
        device = embedding_weight.device if device is None else device
        output = embedding_weight if lm_head_weight is None else lm_head_weight
        folder = find_folder(source)
        raw, weights = read_config(folder), Weights(folder)
        try:
            config = EagleConfig.parse(raw, weights, feature_layers)
            layers = _feature_layers(config, num_layers, is_given=feature_layers is not None)
            _check_target(config, weights, layers, hidden_size)
            unused = _check_tensors(config, weights, layers, hidden_size)
            embedding, is_own = _embedding(weights, embedding_weight.detach())
            added = check_vocabulary(
                "a head",
                config.vocab_size,
                vocab_size,
                is_copied=not is_own and "embed_tokens.weight" in weights,
            )
            target_head = compute_logits or output.detach()[:vocab_size]
            if is_own and config.kind == "eagle3" and config.ties_embedding:
                target_head = embedding
            head = cls(
                config,
                weights,
                feature_layers=layers,
                embedding=with_rows(embedding, vocab_size),
                target_head=target_head,
                dtype=dtype,
                device=torch.device(device),
            )
        except CheckpointError as error:
            raise CheckpointError(f"{source}: {error}") from error
        _log_embedding(source, embedding, hidden_size, is_own=is_own)
        if added is not None:
            _log.warning("draft head %s: %s", source, added)
        log_unused(source, unused, config.unread)
        return head

    def reserve_positions(self, num_positions: int) -> None:
        """Make RoPE rows for positions `[0, num_positions)`; existing rows stay.

        A target's context is often longer than the context that its head was trained on.
        """
        if num_positions > self.max_positions:
            self._rope = _rope_table(self.config, num_positions).to(self.device, self.dtype)
            self.max_positions = num_positions

    def combine(self, features: torch.Tensor) -> torch.Tensor:
        """Turn the target's features [T, f] into the head's input [T, h]; if f is h, return them.

        Raises:
            ShapeError: f is neither h nor the input width of `fc`.
        """
        if features.shape[-1] == self.hidden_size:
            return features
        if self.kind == "eagle" or self._fc is None or features.shape[-1] != self._fc.shape[1]:
            widths = {self.hidden_size}
            if self.kind == "eagle3" and self._fc is not None:
                widths.add(self._fc.shape[1])
            raise ShapeError(f"features are {features.shape[-1]} wide, expected {sorted(widths)}")
        if self._input_norm is not None:
            features = self._rms(features, self._input_norm)
        if self._fc_norms:
            parts = features.chunk(len(self._fc_norms), -1)
            normed = [self._rms(p, n) for p, n in zip(parts, self._fc_norms, strict=True)]
            features = torch.cat(normed, -1)
        return F.linear(features, self._fc, self._fc_bias)

    def forward(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        keep: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run one step over T tokens.

        Args:
            token_ids: int64 [T], token p + 1 of its sequence.
            hidden: [T, h], the feature of position p: a result of `combine` or of an earlier step.
            positions: int64 [T], p, in `[0, max_positions)`.
            attend: (layer, q [T, H, D], k [T, Hk, D], v [T, Hk, D]) -> [T, H, D]; q and k are
                rotated; all are views that must not be written.
            keep: int64 [n], the tokens whose result is wanted; None means all. The last layer
                computes all T keys and values, but queries of these tokens alone: its `attend` gets
                q [n, H, D]. With n = 0 the step ends after that call.

        Returns:
            The recurrent feature [T or n, h]: the `hidden` of the next step and of `logits`.
        """
        embeds = self.embed(token_ids)
        if self.kind == "eagle":
            assert self._fc is not None
            hidden = F.linear(torch.cat((embeds, hidden), -1), self._fc, self._fc_bias)
        hidden = self.run_layers(hidden, embeds, positions, attend, keep)
        if self.config.norm_output and self._norm is not None:
            return self._rms(hidden, self._norm)
        return hidden

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings [T, h] of tokens, int64 [T]."""
        return self._embedding.index_select(0, token_ids)

    def run_layers(
        self,
        hidden: torch.Tensor,
        embeds: torch.Tensor | None,
        positions: torch.Tensor,
        attend: Attend,
        keep: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the decoder layers on their input [T, h]; see `forward`.

        Args:
            hidden: [T, h].
            embeds: [T, h], the tokens' embeddings, which the first layer of EAGLE-3 reads; None if
                no layer reads them.
            positions: int64 [T].
            attend: as in `forward`.
            keep: as in `forward`.

        Returns:
            [T or n, h], before any norm of the output.
        """
        config = self.config
        rope = self._rope.index_select(0, positions).unbind(1)  # cos and sin, [T, 1, D] each
        for i, layer in enumerate(self._layers):
            if layer.pair_norm is not None:
                assert embeds is not None
                # Norm both halves in one call, because on a CPU calls cost more than arithmetic.
                pair = torch.stack((embeds, hidden), 1)
                pair = F.rms_norm(pair, pair.shape[-1:], eps=config.rms_norm_eps) * layer.pair_norm
                x = pair.view(len(pair), -1)
                if config.norm_before_residual:
                    hidden = pair[:, 1]
            else:
                x = hidden if layer.input_norm is None else self._rms(hidden, layer.input_norm)
            layer_keep = keep if i == self.num_layers - 1 else None
            is_end = layer_keep is not None and not len(layer_keep)
            q, k, v = self._qkv(layer, x, rope, skip_q=is_end)
            if is_end:
                attend(i, q, k, v)
                return hidden[:0]
            if layer_keep is not None:
                q, hidden = q.index_select(0, layer_keep), hidden.index_select(0, layer_keep)
            context = attend(i, q, k, v)
            hidden = _add_linear(hidden, context.reshape(len(q), -1), layer.o, layer.o_bias)
            x = self._rms(hidden, layer.post_norm)
            gate, up = F.linear(x, layer.gate_up, layer.gate_up_bias).chunk(2, -1)
            gated = kernels.gated_silu(gate, up) if self._fuses_gate else self._act(gate) * up
            hidden = _add_linear(hidden, gated, layer.down, layer.down_bias)
        return hidden

    def keys_values(
        self, x: torch.Tensor, positions: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each layer's rotated keys and values, [T, Hk, D] each, of one input of all layers.

        Args:
            x: [T, h], normed already: no layer's input norm is applied.
            positions: int64 [T].
        """
        rope = self._rope.index_select(0, positions).unbind(1)
        for layer in self._layers:
            _, k, v = self._qkv(layer, x, rope, skip_q=True)
            yield k, v

    def _qkv(
        self, layer: _HeadLayer, x: torch.Tensor, rope: Sequence[torch.Tensor], *, skip_q: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return rotated q [T, H, D] ([0, H, D] with `skip_q`), rotated k [T, Hk, D], and v."""
        config, weight, bias = self.config, layer.qkv, layer.qkv_bias
        num_kv_heads, head_dim = config.num_kv_heads, config.head_dim
        if skip_q:
            first = config.num_heads * head_dim
            weight, bias = weight[first:], None if bias is None else bias[first:]
        heads = F.linear(x, weight, bias).view(len(x), -1, head_dim)
        qk, v = heads[:, :-num_kv_heads], heads[:, -num_kv_heads:]
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = qk[:, :-num_kv_heads], qk[:, -num_kv_heads:]
            qk = torch.cat((self._rms(q, layer.q_norm), self._rms(k, layer.k_norm)), 1)
        cos, sin = rope
        qk = torch.addcmul(qk * cos, qk.roll(head_dim // 2, -1), sin)
        q, k = qk[:, :-num_kv_heads], qk[:, -num_kv_heads:]
        return (x.new_empty(0, config.num_heads, head_dim) if skip_q else q), k, v

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [n, Vd] over the draft vocabulary for `forward`'s result [n, h]."""
        if self._norm is not None and not self.config.norm_output:
            hidden = self._rms(hidden, self._norm)
        if self._lm_head is not None:
            return F.linear(hidden, self._lm_head)
        assert self._target_logits is not None
        return self._target_logits(hidden)

    def to_target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Return the target's ids, int64, for ids of the draft vocabulary."""
        if self._d2t is None:
            return draft_ids
        return draft_ids + self._d2t.index_select(0, draft_ids.reshape(-1)).view_as(draft_ids)

    def best(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the most probable token for `forward`'s result [n, h], as target ids, int64 [n].

        Among equally probable tokens the lowest draft id wins.
        """
        return self.to_target_ids(self.logits(hidden).argmax(-1))

    def topk(self, hidden: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the k most probable tokens for `forward`'s result [n, h], best first.

        Among equally probable tokens the lower draft id comes first, on every device.

        Returns:
            Probabilities float32 [n, k], under a softmax over the draft vocabulary, and target ids
            int64 [n, k].

        Raises:
            ShapeError: k is not in `[1, draft_vocab_size]`.
        """
        if not 1 <= k <= self.draft_vocab_size:
            raise ShapeError(f"k must be in [1, {self.draft_vocab_size}], got {k}")
        p, ids = likeliest(self.logits(hidden), k)
        return p, self.to_target_ids(ids)

    def _rms(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)


def _embedding(weights: Weights, targets: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """Return the embedding that a head reads, and whether it is the head's own.

    It is the file's if that is not a copy of the target's. So a head is run with what it was
    trained with, and a copy takes no memory.
    """
    if "embed_tokens.weight" not in weights:
        return targets, False
    table = weights["embed_tokens.weight"]
    if table.shape[1] == targets.shape[1] and is_copy(table, targets):
        return targets, False
    return table, True


def _log_embedding(
    source: str | os.PathLike[str], table: torch.Tensor, hidden_size: int, *, is_own: bool
) -> None:
    """Say which embedding a head reads; `hidden_size` is the target's."""
    if not is_own:
        _log.info("draft head %s reads the target's embedding", source)
    elif table.shape[1] != hidden_size:
        _log.info("draft head %s reads its own embedding %s", source, list(table.shape))
    else:
        _log.warning(
            "draft head %s reads its own embedding %s, which is not the target's. If few drafts are"
            " accepted, its export may have left random numbers in embed_tokens.weight: without"
            " this tensor the head reads the target's",
            source,
            list(table.shape),
        )


def _activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    if name == "silu":
        return F.silu
    from transformers.activations import ACT2FN

    if name not in ACT2FN:
        raise CheckpointError(f"config.json: hidden_act {name!r} is not known to transformers")
    activation: Callable[[torch.Tensor], torch.Tensor] = ACT2FN[name]
    return activation


def _rope_table(config: EagleConfig, num_positions: int) -> torch.Tensor:
    """Make RoPE rows, float32 [num_positions, 2, 1, D]: cos, and sin with its first half negated.

    With these rows, rotating x is `x * cos + roll(x, D/2) * sin`. transformers computes the
    frequencies, so all of its scalings are supported. A scaling that depends on the length uses
    `num_positions`.
    """
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    # transformers 5 turns the last two, an older spelling, into `rope_parameters`.
    options: dict[str, Any] = {
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling,
    }
    try:
        rotary = LlamaRotaryEmbedding(LlamaConfig(**options))
        cos, sin = rotary(torch.zeros(1), torch.arange(num_positions)[None])
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"config.json: transformers cannot build RoPE from {config.rope_scaling}: {error!r}"
        ) from error
    half = config.head_dim // 2
    if cos.shape[-1] != config.head_dim:
        raise CheckpointError(
            f"config.json: RoPE turns {cos.shape[-1]} of {config.head_dim} dimensions; "
            "heads that turn a part of them are not supported"
        )
    sin = torch.cat((-sin[..., :half], sin[..., half:]), -1)
    return torch.stack((cos[0], sin[0]), 1).unsqueeze(2)


def _feature_layers(config: EagleConfig, num_layers: int, *, is_given: bool) -> tuple[int, ...]:
    """Return the target layers whose inputs the head reads, checked against the target's depth.

    `is_given`: the caller names them, not the checkpoint.
    """
    layers = config.feature_layers
    if config.kind == "eagle" or not config.use_aux_hidden_state:
        if is_given:
            raise CheckpointError(
                f"this head reads the target's last hidden state, not the inputs of layers: leave "
                f"feature_layers {shown(layers)} out"
            )
        return ()
    source = "the default" if layers is None else "the checkpoint or the caller"
    if layers is None:
        layers = (2, num_layers // 2, num_layers - 3)
    if not layers:
        raise CheckpointError(f"features are the inputs of no layer ({source})")
    if any(not 0 <= i <= num_layers for i in layers):
        raise CheckpointError(
            f"features are the inputs of layers {shown([*layers])} ({source}), "
            f"but the target's are 0..{num_layers}; name others with feature_layers"
        )
    expected = config.num_aux_hidden_states
    if expected is not None and len(layers) != expected:
        raise CheckpointError(
            f"features are {len(layers)} layer inputs {shown([*layers])} ({source}), "
            f"but num_aux_hidden_states is {expected}"
        )
    return layers
