"""`specpool inspect`: draws the pools and rows of a log's ledger, in the terminal or as a page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from specpool.errors import ConfigError, RecordError
from specpool.record import page as film_page
from specpool.record.film import Film, Picture
from specpool.record.terminal import draw


def show(log: Path, console: Console, *, step: int | None, row: int | None) -> None:
    """Draw the ledger right after the preparation of `step`, or at the log's end.

    Raises:
        RecordError: the log cannot be replayed up to there, or has no such step. A damaged log is
            first drawn up to the damage.
    """
    film = Film(log)
    if step is None:
        for _ in film.readable():
            pass
    else:
        film.to_step(step)
    picture = film.picture()
    _check_row(picture, row)
    draw(console, film.ledger, picture, row=row)
    if film.damage is not None:
        raise film.damage


@dataclass(frozen=True, slots=True)
class Written:
    """The events of a written page; event 0 is the empty ledger before the first event."""

    first: int
    last: int
    num_events: int  # of the whole log, as far as it can be read
    damage: RecordError | None  # why the log ends early


def write_page(
    log: Path, page: Path, *, step: int | None, row: int | None, max_frames: int
) -> Written:
    """Write an HTML page of at most `max_frames` events around `step`, or of the first events.

    The page first shows `row`, or a row with a round in flight.

    Raises:
        RecordError: the log cannot be replayed up to `step`, has no such step or row, or the page
            cannot be written.
        ConfigError: `page` is the log file itself.
    """
    if _is_same_file(page, log):
        raise ConfigError(f"--html {page} is the log itself: it would be written over")
    middle, num_events, damage = _find_step(log, step)
    first = (
        0 if step is None else max(0, min(middle - max_frames // 2, num_events + 1 - max_frames))
    )
    last = min(first + max_frames - 1, num_events)
    start = middle if middle <= last else first
    film = Film(log)
    film_page.write(
        page,
        log.name,
        film,
        _pictures(film, first, last, start, row),
        start=start - first,
        picked=row,
        num_events=num_events,
        damage=damage,
    )
    return Written(first, last, num_events, damage)


def _is_same_file(path: Path, other_path: Path) -> bool:
    try:
        return path.samefile(other_path)
    except OSError:
        return False  # a file does not exist, or its name is not possible


def _pictures(film: Film, first: int, last: int, start: int, row: int | None) -> Iterator[Picture]:
    """Yield the pictures after the events `first` to `last`; check `row` in that of `start`."""
    for index in range(last + 1):
        if index > 0:
            film.advance()
        if index >= first:
            picture = film.picture()
            if index == start:
                _check_row(picture, row)
            yield picture


def _check_row(picture: Picture, row: int | None) -> None:
    rows = [admitted.row for admitted in picture.rows]
    if row is not None and row not in rows:
        live = ", ".join(map(str, rows)) or "none"
        raise RecordError(f"row {row} is not admitted there; these are: {live}")


def _find_step(log: Path, step: int | None) -> tuple[int, int, RecordError | None]:
    """Return the event that prepares `step` (None: the first decode), their number, the damage."""
    film = Film(log)
    middle, num_events = 0, 0
    for event in film.readable():
        num_events = event.index
        plan = event.plan
        if middle == 0 and plan is not None:
            is_it = plan.kind == "decode" if step is None else plan.step == step
            middle = event.index if is_it else 0
    if step is not None and middle == 0:
        raise film.damage or RecordError(f"step {step} is not in the log {log}")
    return middle, num_events, film.damage
