"""`NewHead`: the weights of an EAGLE-3 head in training, and the head that they make.

The forward in training is that of serving: `assemble` makes an `EagleHead` whose tensors are
computed from the weights, so gradients flow through the code that drafts. Two things differ between
the weights and the checkpoint. The features of a target are of very different size from channel to
channel, so they are divided by their size before `fc`; the checkpoint's `fc` has the division in
it. And the weights are float32, whatever the head computes in.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specpool.engine.models import EagleHead, TargetModel
from specpool.engine.models.eagle.config import ConfigReader, EagleConfig
from specpool.engine.models.gate import text_config
from specpool.errors import CheckpointError, ConfigError

#: The file of a head's weights.
WEIGHTS = "model.safetensors"
# The widest heads of attention that the engines' kernels read.
_MOST_HEAD_DIM = 256


def layers_of_features(num_layers: int) -> tuple[int, ...]:
    """Return the layers of a target whose inputs are the features of its head: low, middle, high.

    From 8 layers on they are those that all engines take if a head does not name its own.
    """
    if num_layers >= 8:
        return 2, num_layers // 2, num_layers - 3
    if num_layers >= 4:
        return num_layers // 4, num_layers // 2, num_layers - 1
    return tuple(range(num_layers + 1))[-3:]


def config_of(target: TargetModel, draft_vocab_size: int) -> dict[str, Any]:
    """Return the config.json of a head for `target`, in the words of SGLang and of vLLM.

    The head is a decoder layer of Llama's kind, whatever the kind of the target. It takes the sizes
    of the target's attention and MLP where the target states them.
    """
    text, layers = text_config(target.config), layers_of_features(target.num_layers)
    h, heads = target.hidden_size, _size(text, "num_attention_heads")
    head_dim = _size(text, "head_dim") or (h // heads if heads else 0)
    kv_heads = _size(text, "num_key_value_heads") or heads
    if not heads or heads % kv_heads or head_dim % 2 or not 0 < head_dim <= _MOST_HEAD_DIM:
        head_dim = math.gcd(h, 64)
        heads = kv_heads = h // head_dim
    dtype = str(target.dtype).removeprefix("torch.")
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": h,
        "target_hidden_size": h,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": _size(text, "intermediate_size") or 4 * h,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": _rope_theta(text),
        "max_position_embeddings": target.max_context_len,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": draft_vocab_size,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "torch_dtype": dtype,
        # NOTE: vLLM reads the first list, of layers whose inputs are meant; SGLang the second one,
        # of layers whose outputs are meant. Both say the same.
        "eagle_aux_hidden_state_layer_ids": [*layers],
        "num_aux_hidden_states": len(layers),
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in layers],
            "use_aux_hidden_state": True,
        },
    }


class NewHead:
    """A head in training.

    Attributes:
        config: its config.json.
        feature_layers: the target's layers whose inputs are the features.
        draft_ids: int64 [Vd], ascending: the target's ids of the draft vocabulary.
        scale: float32 [f], the size of each channel of the features.
        weights: what training changes: float32 leaves, under the normal names of the checkpoint.
    """

    def __init__(
        self,
        target: TargetModel,
        config: Mapping[str, Any],
        draft_ids: Tensor,
        scale: Tensor,
        weights: Mapping[str, Tensor],
    ) -> None:
        """Take the weights of a head for `target`; see `random` and the attributes."""
        self.config, self.draft_ids, self.scale = dict(config), draft_ids, scale
        self.feature_layers: tuple[int, ...] = tuple(config["eagle_aux_hidden_state_layer_ids"])
        self.weights = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
        self._target = target
        self._embedding = target.embedding_weight.detach()

    @classmethod
    def random(
        cls, target: TargetModel, draft_ids: Tensor, features: Tensor, hidden: Tensor, seed: int
    ) -> NewHead:
        """Return a head that knows nothing, except for the target's output matrix.

        Args:
            target: the target.
            draft_ids: int64 [Vd], the target's ids of the draft vocabulary.
            features: [n, f], features of some tokens; they give `scale`.
            hidden: [n, h], the same tokens' hidden states after the final norm.
            seed: of the random weights.
        """
        config = config_of(target, len(draft_ids))
        h, inner = config["hidden_size"], config["intermediate_size"]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        q_size, kv_size = heads * config["head_dim"], kv_heads * config["head_dim"]
        scale = features.float().square().mean(0).sqrt()
        scale = scale.clamp(min=1e-2 * float(scale.median()) or 1.0)
        generator = torch.Generator().manual_seed(seed)

        def matrix(rows: int, columns: int) -> Tensor:
            bound = columns**-0.5
            return torch.empty(rows, columns).uniform_(-bound, bound, generator=generator)

        layer = "layers.0."
        weights = {
            "fc.weight": matrix(h, len(scale)),
            layer + "self_attn.q_proj.weight": matrix(q_size, 2 * h),
            layer + "self_attn.k_proj.weight": matrix(kv_size, 2 * h),
            layer + "self_attn.v_proj.weight": matrix(kv_size, 2 * h),
            layer + "self_attn.o_proj.weight": matrix(h, q_size),
            layer + "mlp.gate_proj.weight": matrix(inner, h),
            layer + "mlp.up_proj.weight": matrix(inner, h),
            layer + "mlp.down_proj.weight": matrix(h, inner),
            layer + "input_layernorm.weight": torch.ones(h),
            layer + "hidden_norm.weight": torch.ones(h),
            layer + "post_attention_layernorm.weight": torch.ones(h),
        }
        # The output begins as the target's: its rows, for states as large as the target's are.
        # Factors of the target's logits become a part of the matrix.
        with torch.no_grad():
            table = target.lm_head_weight.detach()[draft_ids].float()
            plain = hidden.float() @ table.T
            factor = _rms(target.compute_logits(hidden)[:, draft_ids]) / _rms(plain)
        weights["norm.weight"] = torch.full((h,), _rms(hidden))
        weights["lm_head.weight"] = table * factor
        weights = {name: weight.to(target.device) for name, weight in weights.items()}
        return cls(target, config, draft_ids, scale, weights)

    def published(self) -> dict[str, Tensor]:
        """Return the tensors of the checkpoint under their normal names, float32."""
        tensors = {**self.weights, "fc.weight": self.weights["fc.weight"] / self.scale}
        if len(self.draft_ids) != self.config["vocab_size"]:
            tensors["d2t"] = self.draft_ids - torch.arange(
                len(self.draft_ids), device=self.draft_ids.device
            )
        return tensors

    def assemble(self, num_positions: int) -> EagleHead:
        """Return the head that the weights make now, differentiable by them.

        It computes in the target's dtype; for float16, whose range gradients leave, in float32.

        Args:
            num_positions: positions that it will see; positions beyond them have no RoPE rows.
        """
        tensors = self.published()
        raw = {**self.config, "max_position_embeddings": num_positions}
        dtype = self._target.dtype
        return EagleHead(
            EagleConfig.parse(raw, tensors),
            tensors,
            feature_layers=self.feature_layers,
            embedding=self._embedding,
            target_head=self._embedding,  # not read: the head has an output matrix of its own
            dtype=torch.float32 if dtype == torch.float16 else dtype,
            device=self._target.device,
        )

    def save(self, folder: Path) -> None:
        """Write config.json and the weights in the target's dtype, each whole or not at all."""
        from safetensors.torch import save

        tensors = {}
        for name, tensor in self.published().items():
            kind = self._target.dtype if tensor.is_floating_point() else tensor.dtype
            name = name.replace("layers.0.", "midlayer.")
            tensors[name] = tensor.detach().to("cpu", kind).contiguous()
        if "d2t" in tensors:
            is_draft_token = torch.zeros(self.config["vocab_size"], dtype=torch.bool)
            is_draft_token[self.draft_ids.cpu()] = True
            tensors["t2d"] = is_draft_token
        temporary = folder / f".{WEIGHTS}.{os.getpid()}"
        # Not `save_file`, which makes files that only their owner may read.
        temporary.write_bytes(save(tensors, metadata={"format": "pt"}))
        temporary.replace(folder / WEIGHTS)
        temporary.write_text(json.dumps(self.config, indent=1) + "\n", encoding="utf-8")
        temporary.replace(folder / "config.json")


def check_target(target: TargetModel) -> None:
    """Refuse a target that has no head of this kind.

    Raises:
        ConfigError: the target has recurrent layers, or its embeddings are of another width than
            its hidden states.
    """
    if target.keeps_state:
        raise refuse_states(target.config.model_type)
    width = target.embedding_weight.shape[1]
    if width != target.hidden_size:
        raise ConfigError(
            f"cannot train a head: the target's embeddings are {width} wide, its hidden states "
            f"{target.hidden_size}; a head needs both of one width"
        )


def refuse_states(model_type: str) -> ConfigError:
    """Return the error that refuses a target with recurrent layers."""
    return ConfigError(
        f"cannot train a head for a model of type {model_type!r}: it has recurrent layers, and "
        "training reads whole texts over pages, without their states"
    )


def _rms(x: Tensor) -> float:
    return float(x.float().square().mean().sqrt().clamp(min=1e-6))


def _size(text: Any, key: str) -> int:
    """Return a size that a config states; 0 if it does not state one number."""
    value = getattr(text, key, None)
    return value if type(value) is int and value > 0 else 0


def _rope_theta(text: Any) -> float:
    """Return the target's RoPE base, of its full layers; 10000 if it has none."""
    try:
        return ConfigReader(text.to_dict()).rope()[0]
    except CheckpointError:
        return 10000.0
