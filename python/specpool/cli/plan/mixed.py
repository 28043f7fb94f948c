"""`Mixed`: rows of mixed shapes that fit at once, where a budget chooses each row's shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from specpool._core import Shape
from specpool.capacity.capacity import Capacity, Fit, Mix
from specpool.engine.shape_names import name_of, width_order
from specpool.engine.shapes.config import config_of
from specpool.errors import ConfigError

ACCEPTANCE = 0.7  # where none is given

MEANING = (
    "rows: requests that are admitted together if each counts with its narrowest shape; shapes: "
    "what the pages that are left give them, by the tokens of a round alone (the seconds of a "
    "round are measured when an engine starts); beside both, the widest shape for every row"
)


@dataclass(frozen=True, slots=True)
class Mixed:
    """One question about requests, and its answer."""

    question: str
    mix: Mix
    widest: Fit  # of the widest shape for every row
    widest_tokens: float  # expected of a round of these


def candidates_of(adaptive: str, shapes: Sequence[str] | None) -> tuple[Shape, ...]:
    """Return the candidates of a policy 'budget', the narrowest first.

    Raises:
        ConfigError: the policy is another one, or shapes are named beside it.
    """
    if shapes:
        raise ConfigError(
            f"--adaptive has candidates of its own: leave out --shape {' '.join(shapes)}, or name "
            "the candidates in a file for --adaptive"
        )
    config = config_of(adaptive)
    if config.policy != "budget":
        raise ConfigError(
            f"a plan is for the policy 'budget', got --adaptive {adaptive}, of policy "
            f"{config.policy!r}: with that, all rows reserve their widest shape, so give --shape"
        )
    return tuple(sorted(config.candidates, key=width_order))


def check_acceptance(rate: float | None) -> None:
    """Raise `ConfigError` unless it is None or a probability."""
    if rate is not None and not 0 <= rate <= 1:
        raise ConfigError(f"--acceptance must be a number in [0, 1], got {rate:g}")


def mixed(
    capacity: Capacity,
    questions: Sequence[tuple[str, int]],
    candidates: Sequence[Shape],
    rate: float,
) -> list[Mixed]:
    """Answer questions about requests of given lengths.

    Args:
        capacity: the room.
        questions: a text, and the tokens of a request.
        candidates: the narrowest first.
        rate: the probability that a draft is right if those before it are.
    """
    answers = []
    indices = [capacity.sizes.shapes.index(shape) for shape in candidates]
    for text, num_tokens in questions:
        widest = capacity.at_once(num_tokens, indices[-1])
        tokens = widest.num_requests * capacity.round_tokens(indices[-1], rate)
        answers.append(Mixed(text, capacity.mixed(num_tokens, indices, rate), widest, tokens))
    return answers


def mixed_object(shapes: Sequence[Shape], lines: Sequence[Mixed]) -> list[dict[str, Any]]:
    """Return the answers for the JSON."""
    return [
        {
            "question": line.question,
            "num_requests": line.mix.fit.num_requests,
            "limit": line.mix.fit.limit,
            "shapes": {name_of(shapes[index]): rows for index, rows in line.mix.rows.items()},
            "tokens_per_round": line.mix.tokens,
            "widest_num_requests": line.widest.num_requests,
            "widest_tokens_per_round": line.widest_tokens,
        }
        for line in lines
    ]


def mixed_table(shapes: Sequence[Shape], lines: Sequence[Mixed], rate: float) -> Table:
    """Return the answers as a table."""
    table = Table(
        title=f"rows of mixed shapes, adaptive budget, acceptance {rate:g}", caption=MEANING
    )
    table.add_column("requests of")
    for column in ("rows", "all widest"):
        table.add_column(column, justify="right")
    table.add_column("shapes")
    for column in ("tokens/round", "all widest"):
        table.add_column(column, justify="right")
    table.add_column("limit")
    for line in lines:
        parts = (f"{rows:,} {name_of(shapes[index])}" for index, rows in line.mix.rows.items())
        table.add_row(
            line.question,
            f"{line.mix.fit.num_requests:,}",
            f"{line.widest.num_requests:,}",
            ", ".join(parts),
            f"{line.mix.tokens:,.1f}",
            f"{line.widest_tokens:,.1f}",
            line.mix.fit.limit,
        )
    return table
