"""`TrainConfig`: the options of a training, checked before torch is imported."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from specpool.checks import check_int, shown
from specpool.errors import ConfigError

#: Passes over the texts if neither `epochs` nor `minutes` says how long to train.
EPOCHS = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """The options of a training.

    Attributes:
        target: a folder, a hub name, or `specpool/tiny`.
        data: files of plain text (UTF-8), or of JSON lines (`.jsonl`, `.ndjson`, `.json`).
        out: the folder to write the head to, with the state of the training in `training`.
        resume: go on with the training in `out`.
        length: the most tokens of a text in training.
        batch_size: texts of a step.
        unroll: draft steps that training takes in a row.
        draft_vocab_size: the most tokens that the head can propose: the most frequent ones.
        lr: the greatest learning rate; None means 0.512 / hidden size, at most 0.004.
        epochs: passes over the texts; None means no limit if `minutes` is set, else `EPOCHS`.
        minutes: wall time of the training, without loading and measuring; None means no limit.
        checkpoint_minutes: wall time between checkpoints.
        held_out: the share of the texts that training does not see, in (0, 0.5].
        new_tokens: the most tokens of the target's answer to a prompt without one.
        temperature: of these answers; 0 means greedy.
        seed: of the split, the order of texts, the answers and the weights.
        dtype: of the target; None means float32 on a CPU, else as stored.
        device: cpu, cuda or cuda:N.
        trust_remote_code: run Python code from the target's folder.
    """

    target: str
    data: tuple[Path, ...]
    out: Path
    resume: bool = False
    length: int = 512
    batch_size: int = 8
    unroll: int = 4
    draft_vocab_size: int = 32_000
    lr: float | None = None
    epochs: float | None = None
    minutes: float | None = None
    checkpoint_minutes: float = 5.0
    held_out: float = 0.05
    new_tokens: int = 256
    temperature: float = 0.0
    seed: int = 0
    dtype: str | None = None
    device: str = "cpu"
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if not self.data:
            raise ConfigError("data: no file is named")
        check_int("length", self.length, 16, 1 << 20)
        check_int("batch_size", self.batch_size, 1, 1 << 12)
        check_int("unroll", self.unroll, 1, 16)
        check_int("draft_vocab_size", self.draft_vocab_size, 16, 1 << 24)
        check_int("new_tokens", self.new_tokens, 2, 1 << 20)
        check_int("seed", self.seed, 0, (1 << 63) - 1)
        _check_number("lr", self.lr, maximum=1.0)
        _check_number("epochs", self.epochs)
        _check_number("minutes", self.minutes)
        _check_number("checkpoint_minutes", self.checkpoint_minutes)
        _check_number("held_out", self.held_out, maximum=0.5)
        if not 0 <= self.temperature <= 100:
            raise ConfigError(f"temperature must be in [0, 100], got {shown(self.temperature)}")

    @property
    def most_epochs(self) -> float:
        """The passes over the texts after which training ends; may be infinite."""
        if self.epochs is not None:
            return self.epochs
        return EPOCHS if self.minutes is None else math.inf

    def settings(self) -> dict[str, object]:
        """Return the options that a resumed training must share with its beginning."""
        names = "length batch_size unroll draft_vocab_size lr held_out new_tokens temperature"
        return {name: getattr(self, name) for name in [*names.split(), "seed", "dtype"]}


def _check_number(name: str, value: float | None, *, maximum: float = math.inf) -> None:
    if (value is not None and not 0 < value <= maximum) or value == math.inf:
        allowed = "above 0" if maximum == math.inf else f"in (0, {maximum:g}]"
        raise ConfigError(f"{name} must be a number {allowed}, got {shown(value)}")
