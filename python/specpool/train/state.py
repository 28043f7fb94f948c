"""`Checkpoint`: the state of a training on disk, temporary the head that it makes.

    HEAD/config.json, HEAD/model.safetensors    the head, as engines load it
    HEAD/training/texts.safetensors             the texts in tokens, written once
    HEAD/training/state.safetensors             weights, optimizer, step and settings

Each file is written whole or not at all. The state is one file, so its parts are of one step.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from specpool.errors import CheckpointError, ConfigError, reading
from specpool.train.texts import Text, pack, unpack

if TYPE_CHECKING:
    import torch

_FOLDER, _STATE, _TEXTS = "training", "state.safetensors", "texts.safetensors"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a training needs to go on.

    Attributes:
        tensors: weights, `scale`, `kept`, and the optimizer's averages, by name.
        settings: see `TrainConfig.settings`, with digests of the data and of the target.
        step: steps done.
        seconds: wall time of training so far.
        cpu_seconds: CPU time of training so far, of all threads.
    """

    tensors: Mapping[str, torch.Tensor]
    settings: Mapping[str, Any]
    step: int
    seconds: float
    cpu_seconds: float

    def save(self, out: Path) -> None:
        """Write the state into the training's folder."""
        from safetensors.torch import save_file

        path = out / _FOLDER / _STATE
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        counts = {"step": self.step, "seconds": self.seconds, "cpu_seconds": self.cpu_seconds}
        metadata = json.dumps({**counts, "settings": dict(self.settings)})
        tensors = {
            name: tensor.detach().cpu().contiguous() for name, tensor in self.tensors.items()
        }
        save_file(tensors, temporary, metadata={"training": metadata})
        temporary.replace(path)

    @classmethod
    def load(cls, out: Path) -> Checkpoint:
        """Read the state of the training in `out`.

        Raises:
            CheckpointError: the file is not a state of a training.
        """
        from safetensors import safe_open

        path = out / _FOLDER / _STATE
        with reading(f"{path} is not a training's state"):
            with safe_open(path, "pt") as file:
                metadata = json.loads(file.metadata()["training"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}
            counts = metadata["step"], metadata["seconds"], metadata["cpu_seconds"]
            return cls(tensors, metadata["settings"], *counts)


def check_folder(out: Path, *, resume: bool) -> None:
    """Refuse a folder that training must not write to, or that has nothing to resume.

    Raises:
        ConfigError: the folder holds something else, or it holds a training and `resume` is False,
            or the other way round.
    """
    holds_state = (out / _FOLDER / _STATE).is_file()
    if resume and not holds_state:
        raise ConfigError(f"out: {out} holds no training to resume: leave --resume out")
    if holds_state and not resume:
        raise ConfigError(
            f"out: {out} holds a training: give --resume to go on with it, or another folder"
        )
    if holds_state:
        return
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        state = "is a file" if not out.is_dir() else "is not empty, and holds no training"
        raise ConfigError(f"out: {out} {state}: give a new folder")
    if not out.exists() and not out.absolute().parent.is_dir():
        raise ConfigError(f"out: there is no folder {out.absolute().parent}")


def check_settings(old: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to resume a training if its settings differ from the `old` ones.

    Raises:
        ConfigError: a setting differs; the message has both values.
    """
    for name, value in now.items():
        if old.get(name) != value:
            subject = {"data_digest": "the data's content", "target_digest": "the target"}.get(name)
            values = f"{name} was {old.get(name)}, and is {value} now"
            change = f"{subject} has changed" if subject else values
            raise ConfigError(
                f"cannot resume: {change}; give what the training began with, or another --out"
            )


def save_texts(out: Path, texts: list[Text], num_held_out: int) -> None:
    """Write the texts, the held-out ones first, into the training's folder, which is made."""
    from safetensors.numpy import save_file

    folder = out / _FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{_TEXTS}.{os.getpid()}"
    save_file({"num_held_out": np.array(num_held_out), **pack(texts)}, temporary)
    temporary.replace(folder / _TEXTS)


def load_texts(out: Path) -> tuple[list[Text], int]:
    """Read what `save_texts` wrote.

    Raises:
        CheckpointError: the file is missing or broken.
    """
    from safetensors.numpy import load_file

    path = out / _FOLDER / _TEXTS
    with reading(f"{path} cannot be read", CheckpointError):
        arrays = load_file(path)
        num_held_out = int(arrays.pop("num_held_out"))
        return unpack(arrays), num_held_out
