"""The synthetic corpus as tensors of byte tokens, and random batches of it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from specpool.engine.assets.corpus import corpus

BOS, EOS, PAD = 256, 257, 258
VOCAB_SIZE = 259  # 256 bytes and the three above

TRAIN_SEED, VALIDATION_SEED = 0, 1  # the benchmark's prompts are of a third seed
TRAIN_BYTES, VALIDATION_BYTES = 3_000_000, 100_000


def train_tokens() -> torch.Tensor:
    """int64 [TRAIN_BYTES]."""
    return _tokens(TRAIN_SEED, TRAIN_BYTES)


def validation_tokens() -> torch.Tensor:
    """int64 [VALIDATION_BYTES], text that training never sees."""
    return _tokens(VALIDATION_SEED, VALIDATION_BYTES)


def batches(
    tokens: torch.Tensor, batch_size: int, length: int, *, seed: int
) -> Iterator[torch.Tensor]:
    """Random windows of `tokens` without end, each int64 [batch_size, length]."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(0, len(tokens) - length, (batch_size,), generator=generator)
        yield torch.stack([tokens[start : start + length] for start in starts.tolist()])


def _tokens(seed: int, num_bytes: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(corpus(seed, num_bytes)), dtype=torch.uint8).long()
