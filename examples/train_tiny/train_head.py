"""Train a head, a block drafter or an MTP layer for the toy target; save the published layout.

    python train_head.py TARGET OUT --kind eagle3 --minutes 2

TARGET is what `train_target.py` has made; any other is refused. `specpool train` trains EAGLE-3
heads for other targets, from your own text.

An MTP layer is part of its target's checkpoint, so OUT becomes a copy of TARGET that has one.

A head drafts several tokens in a row, each time from its own last output, so it is trained that
way (the "training-time test" of EAGLE-3, arXiv 2503.01840; HASS, arXiv 2408.15766): UNROLL steps,
in which step j reads what step j - 1 put out. A block drafter drafts in one forward; see
`block_head.py`.
"""

from __future__ import annotations

import itertools
import json
import shutil
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
import typer
from block_head import BlockHead, base_config, block_config, block_loss
from corpus import BOS, EOS, PAD, VOCAB_SIZE, batches, train_tokens, validation_tokens
from safetensors.torch import load_file, save_file
from torch import nn
from train_target import BATCH_SIZE, training
from transformers import LlamaForCausalLM

from specpool.engine.draft import BlockDrafter, MTPDrafter
from specpool.engine.models import TargetModel
from specpool.engine.models.eagle.head import EagleHead

UNROLL = 4  # steps
STEP_WEIGHT = 0.8  # step j counts 0.8^j
LENGTH = 256
LR = 2e-3
DRAFT_VOCAB_SIZE = 128  # EAGLE-3 drafts from the most frequent tokens only


class Kind(str, Enum):
    """Which head to train."""

    eagle = "eagle"
    eagle3 = "eagle3"
    mtp = "mtp"
    block = "block"


class Attention(nn.Module):
    def __init__(self, config: dict[str, Any], width: int) -> None:
        super().__init__()
        self.heads, self.head_dim = config["num_attention_heads"], config["head_dim"]
        self.kv_heads, self.theta = config["num_key_value_heads"], config["rope_theta"]
        self.q_proj = nn.Linear(width, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(width, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(width, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, config["hidden_size"], bias=False)

    def qkv(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v [B, n, H, D] of x [B, n, width]; q, k rotated, k, v repeated for every head."""
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim))
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        repeat = self.heads // self.kv_heads
        k, v = self.rotate(k).repeat_interleave(repeat, 2), v.repeat_interleave(repeat, 2)
        return self.rotate(q), k, v

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        half = self.head_dim // 2
        frequencies = self.theta ** (-torch.arange(half) / half)
        angles = torch.arange(x.shape[1])[:, None, None] * frequencies  # [n, 1, D/2]
        cos, sin = angles.cos(), angles.sin()
        x1, x2 = x[..., :half], x[..., half:]
        return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1)


class MLP(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: dict[str, Any], kind: Kind) -> None:
        super().__init__()
        h, eps = config["hidden_size"], config["rms_norm_eps"]
        self.self_attn = Attention(config, 2 * h if kind is Kind.eagle3 else h)
        self.mlp = MLP(h, config["intermediate_size"])
        self.post_attention_layernorm = nn.RMSNorm(h, eps)
        if kind is Kind.eagle3:
            self.hidden_norm, self.input_layernorm = nn.RMSNorm(h, eps), nn.RMSNorm(h, eps)
        if kind is Kind.mtp:
            self.input_layernorm = nn.RMSNorm(h, eps)


class Head(nn.Module):
    """A head whose `state_dict` is the published checkpoint.

    See `specpool.engine.models.eagle.head`. That of an MTP layer lacks the names' start: see
    `save_mtp`, and `specpool.engine.models.mtp.layer`.
    """

    def __init__(self, config: dict[str, Any], kind: Kind, target: LlamaForCausalLM) -> None:
        super().__init__()
        h = config["hidden_size"]
        self.kind = kind
        # The target's own tables, frozen: kept out of the state dict.
        self.tables = {
            "embedding": target.model.embed_tokens.weight.detach(),
            "lm_head": target.lm_head.weight.detach(),
        }
        if kind is Kind.eagle:
            self.fc = nn.Linear(2 * h, h, bias=config["bias"])
            self.layers = nn.ModuleList([Layer(config, kind)])
            return
        if kind is Kind.mtp:
            self.eh_proj = nn.Linear(2 * h, h, bias=False)
            self.enorm, self.hnorm = (nn.RMSNorm(h, config["rms_norm_eps"]) for _ in range(2))
            self.layers = nn.ModuleList([Layer(config, kind)])
            norm = nn.RMSNorm(h, config["rms_norm_eps"])
            norm.weight.data.copy_(target.model.norm.weight)
            self.shared_head = nn.ModuleDict({"norm": norm})
            return
        self.fc = nn.Linear(3 * h, h, bias=False)
        self.midlayer = Layer(config, kind)
        self.norm = nn.RMSNorm(h, config["rms_norm_eps"])
        self.norm.weight.data.copy_(target.model.norm.weight)
        draft_ids = frequent_tokens(DRAFT_VOCAB_SIZE, config["vocab_size"])
        self.lm_head = nn.Linear(h, DRAFT_VOCAB_SIZE, bias=False)
        self.lm_head.weight.data.copy_(target.lm_head.weight[draft_ids])
        in_vocab = torch.zeros(config["vocab_size"], dtype=torch.bool)
        in_vocab[draft_ids] = True
        self.register_buffer("d2t", draft_ids - torch.arange(DRAFT_VOCAB_SIZE))
        self.register_buffer("t2d", in_vocab)

    @property
    def layer(self) -> Layer:
        return self.midlayer if self.kind is Kind.eagle3 else self.layers[0]

    def combine(self, features: torch.Tensor) -> torch.Tensor:
        return self.fc(features) if self.kind is Kind.eagle3 else features

    def attention_input(
        self, tokens: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What attention reads, and the residual beside it."""
        embedded = F.embedding(tokens, self.tables["embedding"])
        if self.kind is Kind.eagle:
            x = self.fc(torch.cat((embedded, hidden), -1))
            return x, x
        if self.kind is Kind.mtp:
            x = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), -1))
            return self.layer.input_layernorm(x), x
        normed = self.layer.input_layernorm(embedded), self.layer.hidden_norm(hidden)
        return torch.cat(normed, -1), hidden

    def finish(self, context: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        x = residual + self.layer.self_attn.o_proj(context)
        x = x + self.layer.mlp(self.layer.post_attention_layernorm(x))
        return self.shared_head["norm"](x) if self.kind is Kind.mtp else x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.kind is not Kind.eagle3:
            return F.linear(hidden, self.tables["lm_head"])
        return self.lm_head(self.norm(hidden))


def frequent_tokens(count: int, vocab_size: int) -> torch.Tensor:
    """The `count` most frequent tokens of the training text, ascending."""
    counts = train_tokens().bincount(minlength=vocab_size)
    return counts.argsort(descending=True, stable=True)[:count].sort().values


@torch.no_grad()
def run_target(
    target: LlamaForCausalLM, tokens: torch.Tensor, feature_layers: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Features [B, n, f] and logits [B, n, V] of the target."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = target(input_ids=tokens, use_cache=False, output_hidden_states=True)
    # hidden_states[i] is the input of layer i; the last one is after the final norm.
    features = [output.hidden_states[i] for i in feature_layers or (-1,)]
    return torch.cat(features, -1).float(), output.logits.float()


def unroll(
    head: Head, tokens: torch.Tensor, features: torch.Tensor, target_logits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss of UNROLL draft steps, and how often each agrees with the target's argmax [UNROLL].

    Entry i holds (feature of i, token i + 1) and predicts token i + 2, as the target does at i + 1.
    In step j its feature is the output of step j - 1 at entry i - 1, and it attends to the entries
    that drafting would show it: step 0 up to i - j, then one entry of each step between.
    """
    n = tokens.shape[1] - 1
    entries = torch.arange(n)
    inputs, wanted = tokens[:, 1:], target_logits[:, 1:]
    best = wanted.argmax(-1)
    if head.kind is Kind.eagle3:
        can_draft, wanted = head.t2d[best], wanted[..., head.t2d]
    else:
        can_draft = torch.ones_like(best, dtype=torch.bool)
    probabilities = wanted.softmax(-1)

    hidden = head.combine(features[:, :n])
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    loss, agreement = torch.zeros(()), []
    for step in range(UNROLL):
        x, residual = head.attention_input(inputs, hidden)
        q, k, v = head.layer.self_attn.qkv(x)
        keys.append(k)
        values.append(v)
        context = _draft_attention(q, keys, values)
        out = head.finish(context.flatten(2), residual)
        logits = head.logits(out)

        drafted = entries >= step  # the first entries have no such long draft behind them
        weight = (can_draft & drafted).float()
        cross_entropy = -(probabilities * logits.log_softmax(-1)).sum(-1)
        loss = loss + STEP_WEIGHT**step * (cross_entropy * weight).sum() / weight.sum()

        guess = logits.argmax(-1)
        guess = guess + head.d2t[guess] if head.kind is Kind.eagle3 else guess
        agreement.append((guess == best)[:, drafted].float().mean().detach())
        hidden = F.pad(out, (0, 0, 1, 0))[:, :n]  # entry i reads what i - 1 put out
    return loss, torch.stack(agreement)


def _draft_attention(
    q: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]
) -> torch.Tensor:
    """Attention [B, n, H, D] of the newest step, see `unroll`; keys and values are step by step."""
    n, step, scale = q.shape[1], len(keys) - 1, q.shape[-1] ** -0.5
    entries = torch.arange(n)
    prefix = torch.einsum("bihd,bjhd->bhij", q, keys[0]) * scale
    prefix = prefix.masked_fill(entries > (entries - step)[:, None], -1e9)
    # The draft chain behind entry i: step s at entry i - (step - s), this step's own included.
    chain_k = [_shift(keys[s], step - s) for s in range(1, step + 1)]
    chain_v = [_shift(values[s], step - s) for s in range(1, step + 1)]
    chain = [((q * k).sum(-1) * scale).transpose(1, 2)[..., None] for k in chain_k]  # [B, H, n, 1]
    p = torch.cat([prefix, *chain], -1).softmax(-1)
    context = torch.einsum("bhij,bjhd->bihd", p[..., :n], values[0])
    for s, v in enumerate(chain_v):
        context = context + p[..., n + s].transpose(1, 2)[..., None] * v
    return context


def _shift(x: torch.Tensor, by: int) -> torch.Tensor:
    """Entry i becomes the former entry i - by."""
    return F.pad(x, (0, 0, 0, 0, by, 0))[:, : x.shape[1]]


def head_config(
    target: LlamaForCausalLM, kind: Kind, feature_layers: tuple[int, ...]
) -> dict[str, Any]:
    """The head's config.json."""
    config = {
        **base_config(target),
        "architectures": ["LlamaForCausalLMEagle" + ("3" if kind is Kind.eagle3 else "")],
        "model_type": "llama",
        "intermediate_size": target.config.intermediate_size,
        "num_hidden_layers": 1,
        "bias": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }
    if kind is Kind.eagle3:
        config["draft_vocab_size"] = DRAFT_VOCAB_SIZE
        # NOTE: in this place the ids mean layer outputs; the features are the next ones' inputs.
        config["eagle_config"] = {
            "eagle_aux_hidden_state_layer_ids": [i - 1 for i in feature_layers],
            "use_aux_hidden_state": True,
        }
    return config


def save(head: Head | BlockHead, config: dict[str, Any], out: Path) -> None:
    """Write `out` in fp16; the target's tables are not part of a head."""
    out.mkdir(parents=True, exist_ok=True)
    state = head.state_dict()
    tensors = {n: (t.half() if t.is_floating_point() else t) for n, t in state.items()}
    save_file({n: t.contiguous() for n, t in tensors.items()}, out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def save_mtp(head: Head, target: Path, num_layers: int, out: Path) -> None:
    """Write a copy of the target's folder that has the MTP layer, in DeepSeek-V3's layout."""
    shutil.copytree(target, out, dirs_exist_ok=True)
    names = {
        n: f"model.layers.{num_layers}.{n.removeprefix('layers.0.')}" for n in head.state_dict()
    }
    layer = {names[n]: t.half().contiguous() for n, t in head.state_dict().items()}
    path = out / "model.safetensors"
    save_file({**load_file(path), **layer}, path, metadata={"format": "pt"})


def check_target(target: Path) -> None:
    """Refuse what `train_target.py` has not made: the heads here are of its kind and its tokens."""
    try:
        config = json.loads((target / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {target} is not a target: {error}") from None
    made = {"model_type": "llama", "vocab_size": VOCAB_SIZE, "bos_token_id": BOS}
    for key, value in {**made, "eos_token_id": EOS, "pad_token_id": PAD}.items():
        if config.get(key) != value:
            raise SystemExit(
                f"error: {target} has {key} {config.get(key)!r}, a target of train_target.py has "
                f"{value!r}: `specpool train` trains a head for any decoder, from your own text"
            )


def main(
    target: Annotated[Path, typer.Argument(help="Folder of the target model.")],
    out: Annotated[Path, typer.Argument(help="Folder to write to.")],
    kind: Annotated[
        Kind,
        typer.Option(help="eagle = EAGLE-1 and 2; mtp = an MTP layer; block = a block drafter."),
    ] = Kind.eagle3,
    minutes: Annotated[float, typer.Option(min=0.01, help="Training time.")] = 2.0,
) -> None:
    """Train a draft head for TARGET on the synthetic corpus."""
    check_target(target)
    torch.manual_seed(0)
    model = LlamaForCausalLM.from_pretrained(target).float()
    model.eval().requires_grad_(False)
    depth = model.config.num_hidden_layers
    head: Head | BlockHead
    if kind is Kind.block:
        config, step_loss = block_config(model), block_loss
        # The outputs of layers are the inputs of the next ones.
        feature_layers = tuple(i + 1 for i in config["dflash_config"]["target_layer_ids"])
        head = BlockHead(config, model)
    else:
        step_loss = unroll
        feature_layers = (depth // 4, depth // 2, depth - 1) if kind is Kind.eagle3 else ()
        config = head_config(model, kind, feature_layers)
        head = Head(config, kind, model)
    print(f"{sum(p.numel() for p in head.parameters()) / 1e6:.2f} M parameters")

    optimizer = torch.optim.AdamW(head.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.01)
    data = batches(train_tokens(), BATCH_SIZE, LENGTH, seed=3)
    for step, rate in training(minutes, warmup=40):
        optimizer.param_groups[0]["lr"] = LR * rate
        tokens = next(data)
        loss, agreement = step_loss(head, tokens, *run_target(model, tokens, feature_layers))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0:
            print(
                f"step {step}: loss {loss.item():.3f}, agreement {_percents(agreement)}", flush=True
            )

    head.eval()
    held_out = itertools.islice(batches(validation_tokens(), BATCH_SIZE, LENGTH, seed=9), 10)
    with torch.no_grad():
        agreements = [
            step_loss(head, tokens, *run_target(model, tokens, feature_layers))[1]
            for tokens in held_out
        ]
    print(f"held-out agreement per step: {_percents(torch.stack(agreements).mean(0))}")
    write(head, config, model, target, out)
    print(f"wrote {out}, and specpool loads it")


def write(
    head: Head | BlockHead,
    config: dict[str, Any],
    model: LlamaForCausalLM,
    target: Path,
    out: Path,
) -> None:
    """Write the head, and load it as an engine does."""
    depth = model.config.num_hidden_layers
    if isinstance(head, BlockHead):
        save(head, config, out)
        with TargetModel.from_pretrained(target, dtype="float32") as loaded:
            BlockDrafter.from_pretrained(out, loaded)
        return
    if head.kind is Kind.mtp:
        save_mtp(head, target, depth, out)
        with TargetModel.from_pretrained(out, dtype="float32") as loaded:
            MTPDrafter.from_pretrained(out, loaded).close()
        return
    save(head, config, out)
    EagleHead.from_pretrained(
        out,
        num_layers=depth,
        hidden_size=model.config.hidden_size,
        vocab_size=model.config.vocab_size,
        embedding_weight=model.model.embed_tokens.weight,
        lm_head_weight=model.lm_head.weight,
    )


def _percents(fractions: torch.Tensor) -> str:
    return " ".join(f"{100 * x:.1f}%" for x in fractions.tolist())


if __name__ == "__main__":
    typer.run(main)
