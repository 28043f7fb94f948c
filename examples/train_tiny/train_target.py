"""Train the tiny target: a byte-level Llama on synthetic text, some minutes on two CPU cores.

    python train_target.py OUT --minutes 3

Matrices learn with Muon (orthogonalized momentum, https://kellerjordan.github.io/posts/muon), the
rest with AdamW. The budget is time, not steps, so training ends at the time that you set.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
import typer
from byte_tokenizer import save_tokenizer
from corpus import BOS, EOS, PAD, VOCAB_SIZE, batches, train_tokens, validation_tokens
from transformers import LlamaConfig, LlamaForCausalLM

LENGTH, BATCH_SIZE = 384, 8
MUON_LR, ADAM_LR = 0.02, 3e-3


class Muon(torch.optim.Optimizer):
    """Momentum whose update of each matrix is replaced by the nearest orthogonal one."""

    def __init__(
        self, params: Iterable[torch.Tensor], lr: float, momentum: float, weight_decay: float
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            lr, momentum = group["lr"], group["momentum"]
            for param in group["params"]:
                state = self.state[param]
                average = state.setdefault("average", torch.zeros_like(param))
                average.lerp_(param.grad, 1 - momentum)
                update = orthogonalize(param.grad.lerp(average, momentum))
                param.mul_(1 - lr * group["weight_decay"])
                # Tall matrices take larger steps, so that outputs move alike.
                param.add_(update, alpha=-lr * max(1, len(param) / param.shape[1]) ** 0.5)


def orthogonalize(matrix: torch.Tensor) -> torch.Tensor:
    """Push all singular values towards 1 by five Newton-Schulz steps."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = len(matrix) > matrix.shape[1]
    x = (matrix.T if tall else matrix).bfloat16()
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.T if tall else x).float()


def training(minutes: float, *, warmup: int) -> Iterator[tuple[int, float]]:
    """Steps until the time is over: (step, factor of the learning rate).

    The rate rises over `warmup` steps, holds for 40 % of the time and then falls to 2 %. The clock
    starts after the first step, which may have to compile.
    """
    yield 0, 1 / warmup
    start = time.monotonic()
    for step in itertools.count(1):
        used = (time.monotonic() - start) / (60 * minutes)
        if used >= 1:
            return
        decay = 1.0 if used < 0.4 else max(0.02, (1 - used) / 0.6)
        yield step, min(1.0, (step + 1) / warmup) * decay


def next_token_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats of `tokens` [B, n + 1] under `logits` [B, n, V]."""
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def main(
    out: Annotated[Path, typer.Argument(help="Folder to write the model to.")],
    minutes: Annotated[float, typer.Option(min=0.01, help="Training time.")] = 3.0,
    hidden_size: Annotated[int, typer.Option(min=32, help="A multiple of 32.")] = 128,
    num_layers: Annotated[int, typer.Option(min=1)] = 4,
    compile: Annotated[bool, typer.Option(help="Use torch.compile: slow start, then 2x.")] = False,
) -> None:
    """Train a byte-level Llama on the synthetic corpus."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 8 // 3 // 32 * 32,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 32,
        num_key_value_heads=math.gcd(hidden_size // 32, 2),
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    model = LlamaForCausalLM(config)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters")

    # Muon is for matrices inside the model; the embedding and the output are tables.
    named = list(model.named_parameters())
    matrices = {n for n, p in named if p.ndim == 2 and "embed" not in n and "lm_head" not in n}
    optimizers: list[torch.optim.Optimizer] = [
        Muon([p for n, p in named if n in matrices], MUON_LR, momentum=0.95, weight_decay=0.1),
        torch.optim.AdamW(
            [p for n, p in named if n not in matrices],
            lr=ADAM_LR,
            betas=(0.9, 0.95),
            weight_decay=0.0,
        ),
    ]
    forward = torch.compile(model, dynamic=False) if compile else model
    data = batches(train_tokens(), BATCH_SIZE, LENGTH + 1, seed=1)
    losses = []
    for step, rate in training(minutes, warmup=30):
        for optimizer, lr in zip(optimizers, (MUON_LR, ADAM_LR), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = lr * rate
        tokens = next(data)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = forward(input_ids=tokens[:, :-1], use_cache=False).logits
        loss = next_token_loss(logits, tokens)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if step % 50 == 0:
            print(f"step {step}: loss {sum(losses[-50:]) / len(losses[-50:]):.4f}", flush=True)

    print(f"{len(losses) * BATCH_SIZE * LENGTH / 1e6:.2f} M tokens in {len(losses)} steps")
    print(f"held-out loss {validation_loss(model) / math.log(2):.3f} bits per byte")
    model.half().save_pretrained(out)
    save_tokenizer(out, model.config.max_position_embeddings)


@torch.inference_mode()
def validation_loss(model: LlamaForCausalLM) -> float:
    """Mean loss over held-out text, in nats per byte."""
    model.eval()
    data = batches(validation_tokens(), BATCH_SIZE, LENGTH + 1, seed=5)
    losses = [
        next_token_loss(model(input_ids=tokens[:, :-1], use_cache=False).logits, tokens).item()
        for tokens in itertools.islice(data, 20)
    ]
    return sum(losses) / len(losses)


if __name__ == "__main__":
    typer.run(main)
