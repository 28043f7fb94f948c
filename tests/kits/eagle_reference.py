"""EAGLE heads, slow and obvious: a token at a time, a loop per head, straight from the tensors."""

from __future__ import annotations

from typing import Any

import torch

from eagle_checkpoints import HEAD_DIM, HEADS, KV_HEADS, VOCAB, State, Target
from specpool.engine.models.eagle.head import EagleHead


class DenseCache:
    """An `attend` callback over one sequence: causal, keys in the order they come."""

    def __init__(self, num_layers: int) -> None:
        self.keys: list[list[torch.Tensor]] = [[] for _ in range(num_layers)]
        self.values: list[list[torch.Tensor]] = [[] for _ in range(num_layers)]

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        out = torch.empty_like(q)
        for t in range(len(q)):
            self.keys[layer].append(k[t])
            self.values[layer].append(v[t])
            keys, values = torch.stack(self.keys[layer]), torch.stack(self.values[layer])
            for head in range(q.shape[1]):
                kv_head = head * k.shape[1] // q.shape[1]
                scores = keys[:, kv_head] @ q[t, head] * q.shape[-1] ** -0.5
                out[t, head] = scores.softmax(0) @ values[:, kv_head]
        return out


class Reference:
    """The forward of notes 1.1 and 1.2, one token at a time, straight from the tensors."""

    def __init__(self, kind: str, state: State, target: Target, **options: Any) -> None:
        self.kind, self.state, self.target = kind, state, target
        self.option = {
            "norm_before_residual": False,
            "norm_output": False,
            "act": torch.nn.functional.silu,
            "num_layers": 1,
            "rope_scale": 1.0,
            **options,
        }
        self.cache: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        y = self.state[name + ".weight"] @ x
        return y + self.state[name + ".bias"] if name + ".bias" in self.state else y

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x / (x.pow(2).mean() + 1e-5).sqrt() * self.state[name + ".weight"]

    def rotate(self, x: torch.Tensor, position: int) -> torch.Tensor:
        half = HEAD_DIM // 2
        out = x.clone()
        for i in range(half):
            angle = torch.tensor(
                position / self.option["rope_scale"] * 100.0 ** (-2 * i / HEAD_DIM)
            )
            cos, sin = angle.cos(), angle.sin()
            out[:, i] = x[:, i] * cos - x[:, i + half] * sin
            out[:, i + half] = x[:, i + half] * cos + x[:, i] * sin
        return out

    def combine(self, feature: torch.Tensor) -> torch.Tensor:
        if self.kind == "eagle" or len(feature) == len(self.state["norm.weight"]):
            return feature
        if "input_norm.weight" in self.state:
            feature = self.norm("input_norm", feature)
        if "fc_norm.0.weight" in self.state:
            parts = feature.split(self.target.hidden_size)
            feature = torch.cat([self.norm(f"fc_norm.{i}", p) for i, p in enumerate(parts)])
        return self.linear("fc", feature)

    def attention(self, layer: int, x: torch.Tensor, position: int) -> torch.Tensor:
        prefix = f"layers.{layer}.self_attn."
        q = self.linear(prefix + "q_proj", x).view(HEADS, HEAD_DIM)
        k = self.linear(prefix + "k_proj", x).view(KV_HEADS, HEAD_DIM)
        v = self.linear(prefix + "v_proj", x).view(KV_HEADS, HEAD_DIM)
        if prefix + "q_norm.weight" in self.state:
            q = torch.stack([self.norm(prefix + "q_norm", head) for head in q])
            k = torch.stack([self.norm(prefix + "k_norm", head) for head in k])
        past = self.cache.setdefault(layer, [])
        past.append((self.rotate(k, position), v))
        q = self.rotate(q, position)
        heads = []
        for head in range(HEADS):
            kv_head = head // (HEADS // KV_HEADS)
            scores = torch.stack([q[head] @ k[kv_head] for k, _ in past]) / HEAD_DIM**0.5
            values = torch.stack([v[kv_head] for _, v in past])
            heads.append(scores.softmax(0) @ values)
        return self.linear(prefix + "o_proj", torch.cat(heads))

    def step(self, token: int, hidden: torch.Tensor, position: int) -> torch.Tensor:
        has_own_embedding = len(self.state.get("norm.weight", hidden)) != self.target.hidden_size
        e = (
            self.state["embed_tokens.weight"]
            if has_own_embedding
            else self.target.embedding.double()
        )[token]
        if self.kind == "eagle":
            hidden = self.linear("fc", torch.cat([e, hidden]))
        for i in range(self.option["num_layers"]):
            prefix = f"layers.{i}."
            if self.kind == "eagle3" and i == 0:
                g = self.norm(prefix + "hidden_norm", hidden)
                x = torch.cat([self.norm(prefix + "input_layernorm", e), g])
                hidden = g if self.option["norm_before_residual"] else hidden
            elif i == 0:
                x = hidden
            else:
                x = self.norm(prefix + "input_layernorm", hidden)
            hidden = hidden + self.attention(i, x, position)
            x = self.norm(prefix + "post_attention_layernorm", hidden)
            gated = self.option["act"](self.linear(prefix + "mlp.gate_proj", x))
            x = gated * self.linear(prefix + "mlp.up_proj", x)
            hidden = hidden + self.linear(prefix + "mlp.down_proj", x)
        return self.norm("norm", hidden) if self.option["norm_output"] else hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.kind == "eagle3" and not self.option["norm_output"]:
            hidden = self.norm("norm", hidden)
        return self.state.get("lm_head.weight", self.target.lm_head.double()) @ hidden


def to_double(state: State) -> State:
    return {n: t.double() if t.is_floating_point() else t for n, t in state.items()}


def run_head(head: EagleHead, target: Target) -> tuple[torch.Tensor, torch.Tensor]:
    """Prefill 5 tokens, then 3 recurrent steps; hidden [8, h] and logits [8, Vd]."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, VOCAB, (8,), generator=generator)
    num_features = max(1, len(head.feature_layers))
    features = torch.randn(5, num_features * target.hidden_size, generator=generator).to(head.dtype)
    attend = DenseCache(head.num_layers)
    hidden = head.forward(tokens[:5], head.combine(features), torch.arange(5), attend)
    steps = [hidden]
    for i in range(5, 8):
        steps.append(head.forward(tokens[i : i + 1], steps[-1][-1:], torch.tensor([i]), attend))
    hidden = torch.cat(steps)
    return hidden, head.logits(hidden)


def run_reference(ref: Reference, num_features: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, VOCAB, (8,), generator=generator).tolist()
    features = torch.randn(5, num_features * ref.target.hidden_size, generator=generator).double()
    steps: list[torch.Tensor] = []
    for i, token in enumerate(tokens):
        steps.append(ref.step(token, ref.combine(features[i]) if i < 5 else steps[-1], i))
    return torch.stack(steps), torch.stack([ref.logits(hidden) for hidden in steps])
