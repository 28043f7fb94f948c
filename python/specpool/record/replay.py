"""`specpool replay`: replays a log, compares two logs, or shows the state at a step."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

from specpool._core import Event
from specpool.record.film import Film
from specpool.record.terminal import draw, printable

# The printed text for each value of `Replay.end`.
ENDS = {
    "closed": "closed",
    "limit": "ended at its record_limit; the ledger went on unrecorded",
    "open": "not closed: its writer still runs, or died",
}


def run(log: Path, *, quiet: bool) -> None:
    """Replay a log; print every event (unless `quiet`) and a summary.

    Raises:
        RecordError: the log cannot be read, or the replay differs.
    """
    film = Film(log)
    events, steps, seconds = 0, 0, 0.0
    while True:
        start = time.perf_counter()
        event = film.advance()
        seconds += time.perf_counter() - start
        if event is None:
            break
        events, steps = event.index, steps + (event.plan is not None)
        if not quiet:
            print(line(event))
    digest = film.ledger.digest or 0
    print(f"{log}: {events} events, {steps} steps, {ENDS[film.replay.end or 'open']}")
    rate = events / seconds if events else 0.0
    print(f"{rate:,.0f} events/s, final digest {digest:016x}, as recorded")


def line(event: Event) -> str:
    """Return an event as one line."""
    tag = f"  # {printable(event.tag)}" if event.tag else ""
    return f"{event.index:>8}  {event.text}{tag}"


def at_step(log: Path, step: int, console: Console) -> None:
    """Draw the rows and pools right after the preparation of `step`.

    Raises:
        RecordError: the log has no such step, or cannot be replayed up to it.
    """
    film = Film(log)
    film.to_step(step)
    draw(console, film.ledger, film.picture(), row=None)


def against(log: Path, other: Path, console: Console) -> bool:
    """Print the first event that differs, from both logs; return whether the logs are the same.

    Tags and snapshots do not count, as in the digest.

    Raises:
        RecordError: one of the logs cannot be replayed up to the difference.
    """
    films = {path: Film(path) for path in (log, other)} if log != other else {log: Film(log)}
    config, other_config = (films[path].replay.config for path in (log, other))
    if differing := [name for name in config if config[name] != other_config[name]]:
        console.print(Text("the ledgers were built otherwise", "bold red"))
        for name in differing:
            console.print(
                Text(printable(f"  {name}: {config[name]}") + f" in {log}"), soft_wrap=True
            )
            console.print(
                Text(printable(f"  {name}: {other_config[name]}") + f" in {other}"), soft_wrap=True
            )
        return False
    events, step = 0, 0
    while True:
        next_events = {path: _next(film) for path, film in films.items()}
        present = [event for event in next_events.values() if event is not None]
        if not present:
            break
        if len({event.digest for event in present}) > 1 or len(present) < len(films):
            step = next((event.step for event in present if event.step), step)
            title = f"they differ from event {present[0].index} on, step {step}"
            console.print(Text(title, "bold red"))
            for path, event in next_events.items():
                _side(console, path, films[path], event)
            return False
        events, step = events + 1, max(step, present[0].step or 0)
    digest = films[log].ledger.digest or 0
    console.print(f"the same: {events} events, {step} steps, final digest {digest:016x}")
    return True


def _next(film: Film) -> Event | None:
    """Return the next event that counts in the digest; None at the end."""
    event = film.advance()
    while event is not None and event.verb == "snapshot":
        event = film.advance()
    return event


def _side(console: Console, path: Path, film: Film, event: Event | None) -> None:
    console.print(Text(str(path), "bold"), soft_wrap=True)
    if event is None:
        console.print(f"  ends here: {ENDS[film.replay.end or 'open']}")
    else:
        console.print(Text(line(event)), soft_wrap=True)
        console.print(Text(f"          digest {event.digest:016x}, byte {event.offset}", "dim"))
