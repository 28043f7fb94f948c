"""A block drafter in plain torch: the whole text at once, without pages, from the files alone."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from safetensors.torch import load_file
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb


class PlainBlock:
    """The drafter in `folder` for `model`, a transformers model."""

    def __init__(self, folder: Path, model: torch.nn.Module) -> None:
        raw = json.loads((Path(folder) / "config.json").read_text())
        self.raw, self.extra, self.model = raw, {**raw, **raw.get("dflash_config", {})}, model
        self.config = Qwen3Config(**{k: v for k, v in raw.items() if k != "dflash_config"})
        self.state = {
            n: t.float() for n, t in load_file(Path(folder) / "model.safetensors").items()
        }
        self.rope = Qwen3RotaryEmbedding(self.config)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).rsqrt()
        return x * scale * self.state[name + ".weight"]

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, self.state[name + ".weight"], self.state.get(name + ".bias"))

    @torch.inference_mode()
    def logits(self, text: list[int], num_steps: int, window: int | None = None) -> torch.Tensor:
        """Logits [S, V] of the masks behind `text`, whose last token is the root.

        `window` bounds what a token sees in every layer, beside the layers' own windows.
        """
        output = self.model(torch.tensor([text]), use_cache=False, output_hidden_states=True)
        root = len(text) - 1
        ids = self.extra["target_layer_ids"]
        features = torch.cat([output.hidden_states[i + 1][0, :root] for i in ids], -1)
        context = self._norm(self._linear(features, "fc"), "hidden_norm")
        masks = [self.extra["mask_token_id"]] * num_steps
        x = self.model.get_input_embeddings()(torch.tensor([text[-1], *masks]))
        positions = torch.arange(root + 1 + num_steps)
        cos, sin = self.rope(x, positions[None])
        for layer in range(self.config.num_hidden_layers):
            name = f"layers.{layer}."
            normed = self._norm(x, name + "input_layernorm")
            both = torch.cat((context, normed))
            q, k, v = (
                self._linear(part, f"{name}self_attn.{projection}_proj").unflatten(
                    -1, (-1, self.config.head_dim)
                )
                for projection, part in (("q", normed), ("k", both), ("v", both))
            )
            q = self._norm(q, name + "self_attn.q_norm").transpose(0, 1)[None]
            k = self._norm(k, name + "self_attn.k_norm").transpose(0, 1)[None]
            q, _ = apply_rotary_pos_emb(q, q, cos[:, root:], sin[:, root:])
            k, _ = apply_rotary_pos_emb(k, k, cos, sin)
            groups = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(groups, 1), v.transpose(0, 1).repeat_interleave(groups, 0)
            sees = self._sees(layer, positions, root, window)
            out = F.scaled_dot_product_attention(q, k, v[None], attn_mask=sees)
            x = x + self._linear(out[0].transpose(0, 1).flatten(1), name + "self_attn.o_proj")
            normed = self._norm(x, name + "post_attention_layernorm")
            gate = F.silu(self._linear(normed, name + "mlp.gate_proj"))
            up = self._linear(normed, name + "mlp.up_proj")
            x = x + self._linear(gate * up, name + "mlp.down_proj")
        return self.model.get_output_embeddings()(self._norm(x, "norm"))[1:]

    def _sees(
        self, layer: int, positions: torch.Tensor, root: int, window: int | None
    ) -> torch.Tensor:
        """Bool [S + 1, n]: which positions each token of the block sees."""
        slides = (self.raw.get("layer_types") or [None] * (layer + 1))[layer] == "sliding_attention"
        causal = self.raw.get("is_causal")
        sees = torch.ones(len(positions) - root, len(positions), dtype=torch.bool)
        ahead = positions[None] - positions[root:, None]
        if slides if causal is None else causal:
            sees &= ahead <= 0
        widths = [w for w in (window, self.raw["sliding_window"] if slides else None) if w]
        return sees & (ahead > -min(widths)) if widths else sees
