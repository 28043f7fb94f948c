"""`TrainConfig`: the options of a training, checked before torch is imported."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from specpool.checks import shown
from specpool.errors import ConfigError
from specpool.fields import Option, Within, check_values

#: Passes over the texts if neither `epochs` nor `minutes` says how long to train.
EPOCHS = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """The options of a training.

    The first sentence of a field's description is also the help of its option.

    Attributes:
        target: a folder, a hub name, or `specpool/tiny`.
        data: files of plain text, or of JSON lines (.jsonl): objects with 'text', 'prompt',
            'prompt' and 'completion', or 'messages'. All are UTF-8; .ndjson and .json are JSON
            lines too.
        out: a new folder for the head and its training. The state of the training is in `training`.
        resume: go on with the training in `out`.
        minutes: wall time of the training. Loading and measuring do not count; None = no limit.
        epochs: passes over the texts. None = no limit if `minutes` is given, else `EPOCHS`.
        length: most tokens of a text in training.
        batch_size: texts of a step.
        unroll: draft steps that training takes in a row, from its own output.
        draft_vocab_size: most tokens that the head can propose. They are the most frequent ones.
        lr: greatest learning rate. None = 0.512 / hidden size, at most 0.004.
        held_out: share of the texts that training does not see. In (0, 0.5].
        new_tokens: most tokens of the target's answer to a prompt without one.
        temperature: temperature of these answers; 0 = greedy.
        checkpoint_minutes: wall time between two checkpoints.
        seed: seed of the split, the order, the answers and the weights.
        dtype: of the target; None = float32 on a CPU, else as stored.
        device: cpu, cuda or cuda:N.
        trust_remote_code: run Python code from the target's folder.
    """

    target: str
    data: Annotated[tuple[Path, ...], Option()]
    out: Annotated[Path, Option()]
    resume: Annotated[bool, Option()] = False
    minutes: Annotated[float | None, Option(default="no limit")] = None
    epochs: Annotated[float | None, Option("Training", default="4, or no limit with --minutes")] = (
        None
    )
    length: Annotated[int, Within(16, 1 << 20), Option("Training")] = 512
    batch_size: Annotated[int, Within(1, 1 << 12), Option("Training", names=["--batch"])] = 8
    unroll: Annotated[int, Within(1, 16), Option("Training")] = 4
    draft_vocab_size: Annotated[
        int, Within(16, 1 << 24), Option("Training", names=["--draft-vocab"])
    ] = 32_000
    lr: Annotated[
        float | None, Option("Training", default="0.512 / hidden size, at most 0.004")
    ] = None
    held_out: Annotated[float, Option("Training")] = 0.05
    new_tokens: Annotated[int, Within(2, 1 << 20), Option("Training")] = 256
    temperature: Annotated[float, Option("Training")] = 0.0
    checkpoint_minutes: Annotated[float, Option("Training")] = 5.0
    seed: Annotated[int, Within(0, (1 << 63) - 1), Option("Training")] = 0
    dtype: str | None = None
    device: str = "cpu"
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if not self.data:
            raise ConfigError("data: no file is named")
        check_values(self)
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
