"""`python -m benches train`: heads for random models that were trained on synthetic text first.

A model of Qwen3's or of Gemma 3's kind, of 24 million parameters, learns the synthetic corpus for
some minutes of CPU time. Then `specpool.train` trains a head for it, on text that the model has not
seen, and the engine measures both the head and prompt lookup on held-out prompts.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Sequence
from json import dumps as dump
from json import loads as load
from pathlib import Path
from typing import Any

from specpool.checks import check_choice, check_int
from specpool.cli.options import checks
from specpool.cli.results import Result, check_plot, machine, report
from specpool.engine.assets import resolve
from specpool.engine.assets.corpus import corpus
from specpool.errors import ConfigError

KINDS = ("qwen3", "gemma3")
#: The least accept length of a head in a chain of 3, bonus included.
LEAST_ACCEPT_LEN = 2.0
_BATCH, _LENGTH, _LR, _WARM_UP = 8, 256, 1e-3, 30
_TARGET_SEED, _HEAD_SEED = 0, 1
_ABOUT = "trained.json"  # beside a target: its size, and what its training took


class _Silent:
    """A watcher of a training that shows nothing."""

    stop = False

    def begin(self, task: str, total: float) -> None:
        """Show nothing."""

    def advance(self, num_done: float, note: str) -> None:
        """Show nothing."""


def train(
    *,
    kinds: Sequence[str],
    hidden_size: int,
    layers: int,
    target_minutes: float,
    epochs: float,
    keep: Path | None,
    threads: int,
    json: bool,
    plot: Path | None,
) -> None:
    """Train, measure, and print the results.

    Raises:
        ConfigError: an option cannot work.
    """
    for kind in kinds:
        check_choice("kind", kind, KINDS)
    check_int("hidden_size", hidden_size, 64, 4096)
    check_int("layers", layers, 2, 64)
    check_int("threads", threads, 1, 1 << 10)
    if hidden_size % 64:
        raise ConfigError(f"hidden_size must be a multiple of 64, got {hidden_size}")
    if not target_minutes > 0:
        raise ConfigError(f"target_minutes must be above 0, got {target_minutes}")
    if plot is not None:
        check_plot(plot)
    checks.start_torch(threads)
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as folder:
        for kind in kinds:
            target = (keep or Path(folder)) / kind
            if not (target / _ABOUT).exists():
                train_target(target, kind, hidden_size, layers, target_minutes)
            results += _results(target, Path(folder) / f"{kind}-head", epochs)
    where = machine(threads=threads, packages=("torch", "transformers"))
    report("bench train", where, results, json_only=json, plot=plot)


def _results(target: Path, out: Path, epochs: float) -> list[Result]:
    from specpool.train.config import TrainConfig
    from specpool.train.texts import read_rows
    from specpool.train.training import train as train_head

    about = load((target / _ABOUT).read_text())
    text = out.with_suffix(".txt")
    text.write_bytes(corpus(_HEAD_SEED, 1_000_000))
    config = TrainConfig(
        target=str(target), data=(text,), out=out, length=128, batch_size=4, epochs=epochs
    )
    outcome = train_head(config, read_rows(config.data), _Silent())
    assert outcome.held_out is not None and outcome.accept_lens is not None
    lens, figures = outcome.accept_lens, outcome.held_out
    name = f"{target.name}, {about['millions']:.0f}M"
    accept = f"{name}: accept length of the head, chain of 3"
    trained = f"{name}: training of the head, {outcome.steps} steps"
    return [
        Result(accept, lens["head"], "tokens/round", "prompt lookup", lens["prompt lookup"]),
        Result(accept, lens["head"], "tokens/round", "target, at least", LEAST_ACCEPT_LEN),
        Result(
            f"{name}: held-out loss of the head against the target's distribution",
            figures.head_loss,
            "nats/token",
            "the target's loss of the text",
            figures.target_loss,
        ),
        *(
            Result(f"{name}: held-out agreement, draft {i + 1}", share, "share", "all", 1.0)
            for i, share in enumerate(figures.agreement)
        ),
        Result(trained, outcome.cpu_seconds, "CPU s", "15 minutes of 2 cores", 1800.0),
        Result(
            trained, outcome.cpu_seconds, "CPU s", "training of the target", about["cpu_seconds"]
        ),
        Result(
            trained, outcome.seconds, "s, on a shared machine", "its CPU s", outcome.cpu_seconds
        ),
    ]


def config_of(kind: str, hidden_size: int, layers: int) -> Any:
    """Return the config of a byte-level model of a kind, with the embedded tokenizer's tokens."""
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": 259,
        "hidden_size": hidden_size,
        "intermediate_size": hidden_size * 11 // 4,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden_size // 64,
        "num_key_value_heads": max(1, hidden_size // 128),
        "head_dim": 64,
        "max_position_embeddings": 2048,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "pad_token_id": 258,
    }
    if kind == "qwen3":
        return transformers.Qwen3Config(**sizes)
    # Windows of less than a text of the target's training.
    return transformers.Gemma3TextConfig(**sizes, sliding_window=160, query_pre_attn_scalar=64)


def train_target(out: Path, kind: str, hidden_size: int, layers: int, minutes: float) -> None:
    """Train a model on the corpus for `minutes` of CPU time and save it."""
    import torch
    import transformers
    from torch.nn.functional import cross_entropy

    torch.manual_seed(0)
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_config(config_of(kind, hidden_size, layers), attn_implementation="sdpa")
    text = torch.frombuffer(bytearray(corpus(_TARGET_SEED, 3_000_000)), dtype=torch.uint8).long()
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR, betas=(0.9, 0.95), weight_decay=0.1)
    generator = torch.Generator().manual_seed(0)
    began, step, done = time.process_time(), 0, 0.0
    while done < 1:
        starts = torch.randint(0, len(text) - _LENGTH - 1, (_BATCH,), generator=generator)
        tokens = torch.stack([text[at : at + _LENGTH + 1] for at in starts.tolist()])
        rate = min(1.0, (step + 1) / _WARM_UP) * min(1.0, (1 - done) / 0.6)
        optimizer.param_groups[0]["lr"] = _LR * rate
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        loss = cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        done = (time.process_time() - began) / (60 * minutes)
    model.save_pretrained(out)
    for file in Path(resolve("specpool/tiny")).glob("tokenizer*.json"):
        shutil.copy(file, out)
    about = {
        "millions": sum(parameter.numel() for parameter in model.parameters()) / 1e6,
        "cpu_seconds": time.process_time() - began,
    }
    (out / _ABOUT).write_text(dump(about))
