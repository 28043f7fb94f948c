"""`Case`: one run as data, so that it can be replayed and made smaller: settings, a seed, verbs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class Verb:
    """What happens to the engine at the begin of a turn.

    Attributes:
        turn: when; verbs of one turn happen in their order.
        name: a method of the engine's loop.
        given: its arguments.
    """

    turn: int
    name: str
    given: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.given.items())
        return f"turn {self.turn}: {self.name}({arguments})"


@dataclasses.dataclass(frozen=True)
class Case:
    """One run of one engine; `settings` are JSON, by the names that the engine's loop reads."""

    engine: str
    family: str
    seed: int
    settings: dict[str, Any]
    verbs: tuple[Verb, ...]

    def write(self, path: Path) -> None:
        """Write a file that `read` takes."""
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Case:
        """Read a written case."""
        return cls.of(json.loads(path.read_text(encoding="utf-8")))

    @classmethod
    def of(cls, data: dict[str, Any]) -> Case:
        """Return the case of parsed JSON."""
        return cls(**data | {"verbs": tuple(Verb(**verb) for verb in data["verbs"])})
