"""Small targets on disk, with the embedded tokenizer, and the text to train a head on."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from families import make_config, make_model
from specpool.engine.assets import resolve
from specpool.engine.assets.corpus import corpus
from specpool.train.config import TrainConfig
from specpool.train.texts import read_rows
from specpool.train.training import TrainReport, train


class Watching:
    """A watcher that keeps what it is told, and stops after `stop_after` steps."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.begun: list[str] = []
        self.notes: list[str] = []
        self._left = stop_after

    @property
    def stop(self) -> bool:
        return self._left == 0

    def begin(self, task: str, total: float) -> None:
        self.begun.append(task)

    def advance(self, num_done: float, note: str) -> None:
        self.notes.append(note)
        if note.startswith("step") and self._left:
            self._left -= 1


def save_target(folder: Path, family: str, **more: Any) -> Path:
    """Save a random model of a family whose tokens are bytes."""
    config = make_config(family)
    for name, value in {"pad_token_id": 258, "bos_token_id": 256, "eos_token_id": 257}.items():
        setattr(config, name, value)
    for name, value in more.items():
        setattr(config, name, value)
    make_model(config).save_pretrained(folder)
    for file in Path(resolve("specpool/tiny")).glob("tokenizer*.json"):
        shutil.copy(file, folder)
    return folder


def text_file(folder: Path, num_bytes: int = 6000) -> Path:
    """Write a text of the corpus."""
    path = folder / "text.txt"
    path.write_bytes(corpus(3, num_bytes))
    return path


def run(config: TrainConfig, watcher: Watching | None = None) -> TrainReport:
    """Train."""
    return train(config, read_rows(config.data), watcher or Watching())
