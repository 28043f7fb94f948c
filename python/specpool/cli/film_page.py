"""`specpool inspect --html`: one page with its film and its drawing code, nothing from outside."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from specpool._core import Ledger
from specpool.errors import RecordError
from specpool.picture import GroupPicture, Picture, RowPicture


def write(
    path: Path,
    log: str,
    made_by: str,
    ledger: Ledger,
    pictures: Sequence[Picture],
    *,
    start: int,
    num_events: int,
) -> None:
    """Write the page.

    Args:
        path: the file.
        log: what the page calls the log.
        made_by: the version that wrote the log.
        ledger: its configuration is shown.
        pictures: the frames, one or more.
        start: the frame that is shown first.
        num_events: events of the whole log.

    Raises:
        RecordError: the file cannot be written.
    """
    film = {
        "log": log,
        "made_by": made_by,
        "groups": [
            {
                "name": group.name,
                "page_size": group.page_size,
                "num_pages": group.num_pages,
                "hosts_drafts": group.hosts_drafts,
                "layout": group.layout,
                "window": group.window,
                "shown": _pages_in_use(pictures, at),
            }
            for at, group in enumerate(ledger.groups)
        ],
        "shapes": [[s.num_steps, s.topk, s.num_draft_tokens] for s in ledger.shapes],
        "num_rows": ledger.num_rows,
        "max_context_len": ledger.max_context_len,
        "overlap_depth": ledger.overlap_depth,
        "policy": ledger.policy,
        "start": start,
        "num_events": num_events,
        "frames": _frames(pictures),
    }
    # No tag of the page may end inside the data.
    data = json.dumps(film, separators=(",", ":")).replace("<", "\\u003c")
    folder = resources.files("specpool.assets").joinpath("inspect")
    html, style, script = (
        folder.joinpath(f"page.{kind}").read_text(encoding="utf-8")
        for kind in ("html", "css", "js")
    )
    html = html.replace("STYLE", style, 1).replace("SCRIPT", script, 1)
    try:
        path.write_text(html.replace("FILM", data, 1), encoding="utf-8")
    except OSError as error:
        raise RecordError(f"cannot write the page {path}: {error}") from None


def _pages_in_use(pictures: Sequence[Picture], at: int) -> int:
    """The last page that anyone ever held, at least one."""
    last = 1
    for picture in pictures:
        touched = np.flatnonzero(picture.groups[at].states | picture.groups[at].owners)
        last = max(last, int(touched[-1]) if touched.size else 1)
    return last


def _frames(pictures: Sequence[Picture]) -> list[dict[str, Any]]:
    """Per picture: its event, and what is not as in the picture before."""
    frames, before = [], None
    rows: dict[int, dict[str, Any]] = {}
    for picture in pictures:
        event = picture.event
        frame: dict[str, Any] = {
            "index": event.index if event else 0,
            "offset": event.offset if event else 0,
            "step": event.step if event else 0,
            "verb": event.verb if event else "start",
            "text": event.text if event else "an empty ledger",
            "digest": f"{event.digest:016x}" if event else "",
            "groups": [
                {
                    "counts": [group.free, group.fenced, group.reclaimable],
                    "pages": _changes(before.groups[at] if before else None, group),
                }
                for at, group in enumerate(picture.groups)
            ],
            "rows": {},
        }
        values = {row.row: _row(row) for row in picture.rows}
        for row in rows.keys() | values.keys():
            old, new = rows.get(row, {}), values.get(row)
            if new is None:
                frame["rows"][row] = None
            elif changed := {key: value for key, value in new.items() if old.get(key) != value}:
                frame["rows"][row] = changed
        frames.append(frame)
        rows, before = values, picture
    return frames


def _changes(before: GroupPicture | None, now: GroupPicture) -> list[list[int]]:
    """`[page, state, owner, holders]` of each page that changed."""
    columns = (now.states, now.owners, now.holders)
    if before is None:
        changed = now.states.astype(bool) | now.owners.astype(bool)
    else:
        pairs = zip(columns, (before.states, before.owners, before.holders), strict=True)
        changed = np.logical_or.reduce([new != old for new, old in pairs])
    pages = np.flatnonzero(changed)
    return [[int(page), *(int(column[page]) for column in columns)] for page in pages]


def _row(row: RowPicture) -> dict[str, Any]:
    return {
        "tag": row.tag or "",
        "resolved": row.resolved,
        "in_flight": row.in_flight,
        "drafted": row.drafted,
        "epoch": row.epoch,
        "idle": row.idle,
        "rounds": [[r.step, r.shape, r.lo, r.hi, r.state] for r in row.rounds],
        "allocated": list(row.allocated),
        "protected": list(row.protected),
        "evicted": list(row.evicted),
        "pages": [list(pages) for pages in row.pages],
    }
