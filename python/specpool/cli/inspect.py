"""`specpool inspect`: the pools and rows of a log's ledger, in the terminal or as one page."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from specpool.cli import film_page
from specpool.cli.drawing import draw
from specpool.errors import RecordError
from specpool.picture import Film


def show(log: Path, console: Console, *, step: int | None, row: int | None) -> None:
    """Draw the ledger right after the preparation of `step`, or at the log's end.

    Raises:
        RecordError: the log cannot be run up to there, or has no such step.
    """
    film = Film(log)
    if step is None:
        for _ in film.events():
            pass
    else:
        film.to_step(step)
    picture = film.picture()
    if row is not None and row not in [one.row for one in picture.rows]:
        live = ", ".join(str(one.row) for one in picture.rows) or "none"
        raise RecordError(f"row {row} is not admitted there; these are: {live}")
    draw(console, film.ledger, picture, row=row)


def write_page(log: Path, page: Path, *, step: int | None, max_frames: int) -> tuple[int, int]:
    """Write a page of at most `max_frames` events around `step`, or of the log's first ones.

    Returns:
        The first and the last event that it shows (0 is the empty ledger before the first).

    Raises:
        RecordError: the log cannot be read, has no such step, or the page cannot be written.
    """
    middle, num_events = _place(log, step)
    first = (
        0 if step is None else max(0, min(middle - max_frames // 2, num_events + 1 - max_frames))
    )
    film = Film(log)
    pictures = [film.picture()] if first == 0 else []
    for event in film.events():
        if event.index >= first:
            pictures.append(film.picture())
        if len(pictures) == max_frames:
            break
    last = first + len(pictures) - 1
    film_page.write(
        page,
        log.name,
        film.replay.made_by,
        film.ledger,
        pictures,
        start=middle - first if middle <= last else 0,
        num_events=num_events,
    )
    return first, last


def _place(log: Path, step: int | None) -> tuple[int, int]:
    """The event that prepares `step` (None: the first decode), and the number of events."""
    film = Film(log)
    middle, num_events = 0, 0
    for event in film.events():
        num_events = event.index
        plan = event.plan
        if middle == 0 and plan is not None:
            is_it = plan.kind == "decode" if step is None else plan.step == step
            middle = event.index if is_it else 0
    if step is not None and middle == 0:
        raise RecordError(f"step {step} is not in the log {log}")
    return middle, num_events
