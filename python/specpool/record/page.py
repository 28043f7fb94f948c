"""`write`: writes the page of `specpool inspect --html`, with its data and code in one file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specpool.errors import RecordError
from specpool.record.film import Film, GroupPicture, Picture, RowPicture


def write(
    path: Path,
    log: str,
    film: Film,
    pictures: Iterable[Picture],
    *,
    start: int,
    picked: int | None,
    num_events: int,
    damage: RecordError | None,
) -> None:
    """Write the page.

    Args:
        path: the file.
        log: the name of the log on the page.
        film: gives the configuration of the ledger.
        pictures: the frames, one or more; read one at a time.
        start: the index of the frame that is shown first.
        picked: the row that is shown first; None lets the page choose.
        num_events: the number of events of the whole log.
        damage: why the log ends early; None if it does not.

    Raises:
        RecordError: the file cannot be written, or `pictures` raises it.
    """
    ledger = film.ledger
    frames, shown = _frames(pictures, [1] * len(ledger.groups))
    content = {
        "log": log,
        "made_by": film.replay.made_by,
        "groups": [
            {
                "name": group.name,
                "page_size": group.page_size,
                "num_pages": group.num_pages,
                "hosts_drafts": group.hosts_drafts,
                "layout": group.layout,
                "window": group.window,
                "sink": group.sink,
                "shown": shown[index],  # the last page that was ever held
            }
            for index, group in enumerate(ledger.groups)
        ],
        "shapes": [[s.num_steps, s.topk, s.num_draft_tokens] for s in ledger.shapes],
        "max_accept_lens": [shape.max_accept_len for shape in ledger.shapes],
        "num_rows": ledger.num_rows,
        "max_context_len": ledger.max_context_len,
        "overlap_depth": ledger.overlap_depth,
        "policy": ledger.policy,
        "start": start,
        "picked": picked or 0,
        "num_events": num_events,
        "damage": str(damage) if damage else "",
        "frames": frames,
    }
    # Escape "<", so that the data cannot close the page's script element.
    data = json.dumps(content, separators=(",", ":")).replace("<", "\\u003c")
    folder = resources.files("specpool.record")
    html, style, script = (
        folder.joinpath(f"page.{kind}").read_text(encoding="utf-8")
        for kind in ("html", "css", "js")
    )
    html = html.replace("STYLE", style, 1).replace("SCRIPT", script, 1)
    try:
        path.write_text(html.replace("FILM", data, 1), encoding="utf-8")
    except OSError as error:
        raise RecordError(f"cannot write the page {path}: {error}") from None


def _frames(
    pictures: Iterable[Picture], shown: list[int]
) -> tuple[list[dict[str, Any]], list[int]]:
    """Return a frame per picture: its event, and the changes since the picture before.

    `shown` is raised to the last page of each group that any frame changes; return it too.
    """
    frames: list[dict[str, Any]] = []
    previous: Picture | None = None
    for picture in pictures:
        event, groups = picture.event, enumerate(picture.groups)
        pools = [
            _pool_changes(previous.groups[index] if previous else None, now)
            for index, now in groups
        ]
        frame: dict[str, Any] = {
            "index": event.index if event else 0,
            "offset": event.offset if event else 0,
            "step": event.step if event else 0,
            "verb": event.verb if event else "start",
            "text": event.text if event else "an empty ledger",
            "digest": f"{event.digest:016x}" if event else "",
            "groups": [
                {
                    "counts": [group.free, group.fenced, group.cached, group.reclaimable],
                    "pages": pages,
                }
                for group, pages in zip(picture.groups, pools, strict=True)
            ],
            "rows": _row_changes(previous.rows if previous else (), picture.rows),
        }
        frames.append(frame)
        for index, pages in enumerate(pools):
            shown[index] = max(shown[index], pages[-1][0] + pages[-1][1] - 1 if pages else 1)
        previous = picture
    return frames, shown


def _pool_changes(previous: GroupPicture | None, now: GroupPicture) -> list[list[int]]:
    """Return `[first, count, state, owner, holders]` of each run of changed pages, ascending."""
    num_pages = max(len(now.states), len(previous.states) if previous else 0)
    columns, old = _columns(now, num_pages), _columns(previous, num_pages)
    differ = [new != was for new, was in zip(columns, old, strict=True)]
    pages = np.flatnonzero(differ[0] | differ[1] | differ[2])
    records = zip(*(column[pages].tolist() for column in columns), strict=True)
    return [[*run[:2], *run[2]] for run in _runs(zip(pages.tolist(), records, strict=True))]


def _columns(pool: GroupPicture | None, num_pages: int) -> list[NDArray[Any]]:
    """Return states, owners and holders of `num_pages` pages; pages never taken have 0."""
    if pool is None:
        return [np.zeros(num_pages, dtype=np.int32)] * 3
    columns = (pool.states, pool.owners, pool.holders)
    return [np.pad(column, (0, num_pages - len(column))) for column in columns]


# The initial values of a row, by their names in the page's data.
_NEW_ROW: dict[str, Any] = {
    "tag": "",
    "resolved": 0,
    "in_flight": 0,
    "drafted": 0,
    "epoch": None,  # no row has this value, so every new row has a change
    "idle": False,
    "rounds": [],
    "allocated": [],
    "protected": [],
    "evicted": [],
}


def _row_changes(previous: Sequence[RowPicture], now: Sequence[RowPicture]) -> dict[str, Any]:
    """Return the changes of rows: for each name, `[first row, count, value]` of each run of rows.

    "gone" has the released rows. "pages" has, per group, `[row, first column, count, first page]`
    of each run of consecutive pages; a first page of 0 means that all cells of the run are 0.
    """
    old = {row.row: row for row in previous}
    changes: dict[str, Any] = {}
    if released := sorted(old.keys() - {row.row for row in now}):
        changes["gone"] = released
    pairs = [(old.get(row.row), row) for row in now]
    pairs = [(was, row) for was, row in pairs if was != row]
    values = [(row.row, _values(was), _values(row)) for was, row in pairs]
    for name in _NEW_ROW:
        changed = [(row, new[name]) for row, was, new in values if was[name] != new[name]]
        if changed:
            changes[name] = _runs(changed)
    for was, row in pairs:
        for index, pages in enumerate(row.pages):
            if runs := _page_runs(row.row, was.pages[index] if was else (), pages):
                tables = changes.setdefault("pages", [[] for _ in row.pages])
                tables[index] += runs
    return changes


def _values(row: RowPicture | None) -> dict[str, Any]:
    if row is None:
        return _NEW_ROW
    return {
        "tag": row.tag or "",
        "resolved": row.resolved,
        "in_flight": row.in_flight,
        "drafted": row.drafted,
        "epoch": row.epoch,
        "idle": row.idle,
        # The page's script computes the bounds of the root from these.
        "rounds": [[round_.step, round_.shape, round_.state] for round_ in row.rounds],
        "allocated": list(row.allocated),
        "protected": list(row.protected),
        "evicted": list(row.evicted),
    }


def _runs(changed: Iterable[tuple[int, Any]]) -> list[list[Any]]:
    """Join neighbours with the same value to `[first, count, value]`."""
    runs: list[list[Any]] = []
    for number, value in changed:
        if runs and runs[-1][0] + runs[-1][1] == number and runs[-1][2] == value:
            runs[-1][1] += 1
        else:
            runs.append([number, 1, value])
    return runs


def _page_runs(row: int, old: Sequence[int], new: Sequence[int]) -> list[list[int]]:
    """Return `[row, first column, count, first page]` of each run of changed columns.

    The pages of a run are consecutive, or all 0. Columns that a shorter row lost are not listed,
    because the page cuts rows by their length.
    """
    if old == new:
        return []
    runs: list[list[int]] = []
    for column, page in enumerate(new):
        if page == (old[column] if column < len(old) else 0):
            continue
        if runs:
            _, first, count, begin = runs[-1]
            if first + count == column and page == (begin and begin + count):
                runs[-1][2] += 1
                continue
        runs.append([row, column, 1, page])
    return runs
