"""Sizes of models and rows of the table that `python -m benches plain` prints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specpool.cli.results import Result

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {},  # the shipped target
    "25m": {
        "vocab_size": 8192,
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 7,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
    },
    "125m": {
        "vocab_size": 32000,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
}


@dataclass(frozen=True, slots=True)
class Row(Result):
    """A result with its spread.

    Attributes:
        least_ratio: of all turns.
        most_ratio: likewise.
        cpu_ratio: median, by the process's CPU time.
    """

    least_ratio: float
    most_ratio: float
    cpu_ratio: float
