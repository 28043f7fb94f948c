"""A block drafter (DFlash, arXiv 2602.06036) and its loss, for `train_head.py --kind block`.

A block is a known token, the anchor, and masks behind it. Its tokens see the target's features of
all positions before the anchor, and each other, both ways. The mask at a position predicts the
token there. The engine runs blocks as long as its shape, so training draws their lengths.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from corpus import PAD
from torch import nn
from transformers import LlamaForCausalLM, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)

BLOCK_SIZE = 8  # tokens, the anchor included
NUM_ANCHORS = 16  # blocks of each text
STEP_WEIGHT = 0.8  # the mask at distance j counts 0.8^(j - 1)
INTERMEDIATE_SIZE = 192
NUM_LAYERS = 2


class Attention(nn.Module):
    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        h, self.head_dim = config.hidden_size, config.head_dim
        q_size, kv_size = (
            n * self.head_dim for n in (config.num_attention_heads, config.num_key_value_heads)
        )
        self.groups = q_size // kv_size
        self.q_proj = nn.Linear(h, q_size, bias=False)
        self.k_proj = nn.Linear(h, kv_size, bias=False)
        self.v_proj = nn.Linear(h, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, h, bias=False)
        self.q_norm = Qwen3RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(
        self,
        x: torch.Tensor,
        context: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        sees: torch.Tensor,
    ) -> torch.Tensor:
        """Attention of block tokens x [B, m, h] to `context` [B, n, h] and to themselves."""
        both = torch.cat((context, x), 1)
        q = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
        k = self.k_norm(self.k_proj(both).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
        v = self.v_proj(both).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        cos, sin = rope
        n = context.shape[1]
        q, _ = apply_rotary_pos_emb(q, q, cos[:, n:], sin[:, n:])
        k, _ = apply_rotary_pos_emb(k, k, cos, sin)
        k, v = (part.repeat_interleave(self.groups, 1) for part in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=sees[:, None])
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        h, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn, self.mlp = Attention(config), Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(h, eps)
        self.post_attention_layernorm = Qwen3RMSNorm(h, eps)

    def forward(self, x: torch.Tensor, *context: Any) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), *context)
        return x + self.mlp(self.post_attention_layernorm(x))


class BlockHead(nn.Module):
    """A block drafter whose `state_dict` is the published checkpoint."""

    def __init__(self, config: dict[str, Any], target: LlamaForCausalLM) -> None:
        super().__init__()
        qwen = Qwen3Config(**{k: v for k, v in config.items() if k != "dflash_config"})
        h, eps = qwen.hidden_size, qwen.rms_norm_eps
        self.mask = config["dflash_config"]["mask_token_id"]
        num_features = len(config["dflash_config"]["target_layer_ids"])
        self.tables = {
            "embedding": target.model.embed_tokens.weight.detach(),
            "lm_head": target.lm_head.weight.detach(),
        }
        self.fc = nn.Linear(num_features * h, h, bias=False)
        self.hidden_norm, self.norm = Qwen3RMSNorm(h, eps), Qwen3RMSNorm(h, eps)
        self.layers = nn.ModuleList([Layer(qwen) for _ in range(qwen.num_hidden_layers)])
        self.rope = [Qwen3RotaryEmbedding(qwen)]  # not a module: it is no part of the checkpoint

    def forward(
        self, anchors: torch.Tensor, places: torch.Tensor, width: int, features: torch.Tensor
    ) -> torch.Tensor:
        """Logits [B, A, width, V] of blocks.

        `anchors` [B, A] are their first tokens, `places` [A] these tokens' positions, and
        `features` [B, n, f] the target's at all positions.
        """
        batch, n = features.shape[:2]
        tokens = F.pad(anchors.unsqueeze(-1), (0, width - 1), value=self.mask).flatten(1)
        block = torch.arange(len(places)).repeat_interleave(width)
        sees = torch.cat((torch.arange(n) < places[block, None], block[:, None] == block), 1)
        positions = torch.cat((torch.arange(n), (places[:, None] + torch.arange(width)).flatten()))
        x = F.embedding(tokens, self.tables["embedding"])
        rope = self.rope[0](x, positions[None])
        context = self.hidden_norm(self.fc(features))
        for layer in self.layers:
            x = layer(x, context, rope, sees.expand(batch, -1, -1))
        return F.linear(self.norm(x), self.tables["lm_head"]).unflatten(1, (-1, width))


def base_config(target: LlamaForCausalLM) -> dict[str, Any]:
    """What the config.json of every head has in common."""
    c = target.config
    return {
        "hidden_size": c.hidden_size,
        "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_key_value_heads,
        "head_dim": c.hidden_size // c.num_attention_heads,
        "hidden_act": "silu",
        "rms_norm_eps": c.rms_norm_eps,
        "rope_theta": getattr(c, "rope_theta", None) or c.rope_parameters["rope_theta"],
        "max_position_embeddings": c.max_position_embeddings,
        "vocab_size": c.vocab_size,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
    }


def block_config(target: LlamaForCausalLM) -> dict[str, Any]:
    """The drafter's config.json."""
    num_layers = target.config.num_hidden_layers
    return {
        **base_config(target),
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "intermediate_size": INTERMEDIATE_SIZE,
        "num_hidden_layers": NUM_LAYERS,
        "num_target_layers": num_layers,
        "attention_bias": False,
        "block_size": BLOCK_SIZE,
        "dflash_config": {
            "mask_token_id": PAD,  # no text has it
            "target_layer_ids": [*range(num_layers - 1)][-3:],
        },
    }


def block_loss(
    head: BlockHead, tokens: torch.Tensor, features: torch.Tensor, target_logits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss of blocks at random places, and how often each mask agrees with the target's argmax.

    The mask at position p learns what the target says after the true text up to p - 1. Outside
    training all blocks have BLOCK_SIZE tokens.
    """
    n = tokens.shape[1]
    width = int(torch.randint(2, BLOCK_SIZE + 1, ())) if head.training else BLOCK_SIZE
    places = torch.randperm(n - width - 1)[:NUM_ANCHORS] + 1
    logits = head(tokens[:, places], places, width, features)[:, :, 1:]
    wanted = target_logits[:, places[:, None] + torch.arange(width - 1)]
    weight = STEP_WEIGHT ** torch.arange(width - 1)
    cross_entropy = -(wanted.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    loss = (cross_entropy * weight).mean((0, 1)).sum() / weight.sum()
    return loss, (logits.argmax(-1) == wanted.argmax(-1)).float().mean((0, 1)).detach()
