"""`draw`: prints a picture of a ledger as text: pools, rows, and one row slot by slot."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
from rich.console import Console
from rich.text import Text

from specpool._core import Group, Ledger
from specpool.record.film import (
    CACHED,
    FENCED,
    FREE,
    OWNED,
    SHARED,
    Picture,
    RowPicture,
    Slot,
    row_name,
    slots,
)

# The colours of owners, in turn. Letters tell the owners apart without colour.
PALETTE = (
    "#4e9ade", "#e2844b", "#57b894", "#c678c0", "#b9a83c", "#e06c75", "#7d8be0", "#8bbf56",
)  # fmt: skip
MARKS = {
    "evicted": "x",
    "shared": "s",
    "committed": "#",
    "root": "o",
    "draft": "d",
    "hole": "h",
    "verify": "v",
    "reserved": "-",
}
STYLES = {
    "evicted": "dim",
    "shared": "bold underline",
    "committed": "bold",
    "root": "bold red",
    "draft": "bold bright_blue",
    "hole": "bold yellow",
    "verify": "magenta",
    "reserved": "dim",
}
LEGEND = (
    "pools: A owned by row A, a fenced (freed by A, still in use on the device), 2 shared by two "
    "holders (* ten or more), + cached (held by the prefix cache alone), . free",
    "slots: # or p3 committed (position 3), s committed on a shared page, o root claimed, d or d0 "
    "draft (of step 0), h or h3 hole: a copy of the prefix's tail, v or ~ verify window, "
    "- reserved, x given back below the window",
    "rows: one mark a page, the most telling one of its slots",
)
MAX_POOL_LINES = 24
MAX_ROWS = 40
MAX_ENTRIES, MAX_TOKENS = 20, 8  # of the prefix index, and of an entry
# The most slots of a row that is drawn: a few bytes of a log can make a row of any length.
MAX_DRAWN = 1 << 18
# The most slots of a row whose slots have labels; a longer row has one mark per slot.
MAX_LABELLED = 96


def draw(console: Console, ledger: Ledger, picture: Picture, *, row: int | None) -> None:
    """Print the whole picture, with the slots of `row` or of a row with a round in flight."""
    event = picture.event
    if event is None:
        console.print(Text("before the first event", "bold"))
    else:
        step = f", step {event.step}" if event.step else ""
        console.print(Text(f"event {event.index}{step}: {event.text}", "bold"), soft_wrap=True)
        console.print(Text(f"digest {event.digest:016x}, byte {event.offset} of the log", "dim"))
    for index in range(len(ledger.groups)):
        _pool(console, ledger, picture, index)
    _rows(console, ledger, picture)
    _entries(console, ledger)
    chosen = (
        [row_picture for row_picture in picture.rows if row_picture.row == row]
        if row
        else _most_telling(picture)
    )
    if chosen:
        _slots(console, ledger, chosen[0])
    console.print()
    for text in LEGEND:
        console.print(Text(text, "dim"))


def printable(text: str) -> str:
    """Escape a text's control characters, so that it cannot control a terminal."""
    return "".join(
        char.encode("unicode_escape").decode()
        if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp")
        else char
        for char in text
    )


def _most_telling(picture: Picture) -> Sequence[RowPicture]:
    """Return the rows, those with a round in flight first."""
    return sorted(picture.rows, key=lambda row: not row.rounds)


def colour(row: int) -> str:
    """Return the row's colour."""
    return PALETTE[(row - 1) % len(PALETTE)]


def _pool(console: Console, ledger: Ledger, picture: Picture, index: int) -> None:
    group, pool = ledger.groups[index], picture.groups[index]
    count = np.bincount(pool.states[1:], minlength=5)
    window = f", window of {group.window}" if group.window is not None else ""
    window += f", sink of {group.sink}" if group.sink else ""
    drafts = f", hosts drafts, {group.layout}" if group.hosts_drafts else ""
    title = Text(f"\n{printable(group.name)}", "bold")
    title.append(
        f": {group.num_pages} pages of {group.page_size} slots{window}{drafts}", "not bold"
    )
    console.print(title)
    console.print(
        f"  {count[OWNED]} owned, {count[SHARED]} shared, {pool.fenced} fenced"
        f", {pool.cached} cached, {pool.free} free, {pool.reclaimable} reclaimable"
    )
    touched = np.flatnonzero(pool.states | pool.owners)
    last = int(touched[-1]) if touched.size else 0
    width = len(row_name(1, ledger.num_rows)) + 1
    number = len(str(group.num_pages))
    per_line = max(8, (console.width - number - 4) // width // 8 * 8)
    drawn = min(last, MAX_POOL_LINES * per_line)
    for first in range(1, drawn + 1, per_line):
        line = Text(f"  {first:>{number}}  ", "dim")
        for page in range(first, min(first + per_line, drawn + 1)):
            line.append_text(
                _page(
                    pool.states[page], pool.owners[page], pool.holders[page], width, ledger.num_rows
                )
            )
        console.print(line)
    if drawn < last:
        console.print(
            Text(f"  pages {drawn + 1} to {last} are in use too: --html draws all", "dim")
        )
    if last < group.num_pages:
        console.print(Text(f"  pages {last + 1} to {group.num_pages} were never taken", "dim"))


def _page(state: int, owner: int, holders: int, width: int, num_rows: int) -> Text:
    name = row_name(int(owner), num_rows) if owner else "?"
    if state == FREE:
        return Text(f"{'.':<{width}}", "dim")
    if state == CACHED:
        return Text(f"{'+':<{width}}", "italic")
    if state == SHARED:
        return Text(f"{holders if holders < 10 else '*'!s:<{width}}", "bold underline")
    style = colour(int(owner)) if owner else ""
    if state == FENCED:
        return Text(f"{name.lower():<{width}}", f"{style} italic")
    return Text(f"{name:<{width}}", f"bold {style}")


def _rows(console: Console, ledger: Ledger, picture: Picture) -> None:
    console.print(Text("\nrows", "bold"))
    if not picture.rows:
        console.print("  none is admitted")
    names = [printable(group.name) for group in ledger.groups]
    width = max(map(len, names))
    for row in picture.rows[:MAX_ROWS]:
        name = row_name(row.row, ledger.num_rows)
        head = Text(f"  {name} = row {row.row}", f"bold {colour(row.row)}")
        about = f", {printable(row.tag)}" if row.tag else ""
        about += ", idle" if row.idle else ""
        about += f": resolved_len {row.resolved}"
        if row.rounds:
            newest = row.rounds[-1]
            root = f"at {newest.lo}" if newest.lo == newest.hi else f"in [{newest.lo}, {newest.hi}]"
            about += f", {row.in_flight} in flight, root {root}"
        about += f", drafted_len {row.drafted}, epoch {row.epoch}"
        console.print(head.append(about, "not bold default"), soft_wrap=True)
        for index, group in enumerate(ledger.groups):
            line = Text(f"    {names[index]:<{width}}  ", "dim")
            if row.allocated[index] <= MAX_DRAWN:
                cells = slots(row, index, group, ledger.shapes)
                line.append_text(_strip(cells, group.page_size, row.row))
            else:
                line.append(f"{row.allocated[index]} slots, too many to draw;", "dim")
            pages = sum(1 for page in row.pages[index] if page)
            line.append(f"  {pages} page{'' if pages == 1 else 's'}", "dim")
            console.print(line)
    if len(picture.rows) > MAX_ROWS:
        console.print(Text(f"  and {len(picture.rows) - MAX_ROWS} more rows: --row N", "dim"))


def _entries(console: Console, ledger: Ledger) -> None:
    """Print the entries of the prefix index: tokens, pages and holders."""
    num_entries, num_tokens, _ = ledger.index_size
    if not num_entries:
        return
    console.print(
        Text("\nprefix index", "bold").append(
            f": {num_entries} entries of {num_tokens} tokens", "not bold"
        )
    )
    maps = [ledger.ownership_map(index)[2] for index in range(len(ledger.groups))]
    for salt, start, tokens, drafted, pages in ledger.index_entries()[:MAX_ENTRIES]:
        shown = ", ".join(map(str, tokens[:MAX_TOKENS].tolist()))
        shown += f", .. {len(tokens)} tokens" if len(tokens) > MAX_TOKENS else ""
        about = f"  [{shown}] from position {start}"
        about += f", salt {salt!r}" if salt else ""
        about += f", {drafted} with draft KV" if drafted < len(tokens) else ""
        for group, entry_pages, holders in zip(ledger.groups, pages, maps, strict=True):
            held = ", ".join(
                f"{page} ({holders[page] - 1} more holders)" if holders[page] > 1 else str(page)
                for page in entry_pages.tolist()
                if page
            )
            about += f"; {printable(group.name)} {'pages ' + held if held else 'no page'}"
        console.print(Text(about), soft_wrap=True)
    if num_entries > MAX_ENTRIES:
        console.print(Text(f"  and {num_entries - MAX_ENTRIES} more entries", "dim"))


def _strip(cells: Sequence[Slot], page_size: int, row: int) -> Text:
    """Return one mark per page, that of its most telling slot; shorten long runs to counts."""
    order = ("draft", "hole", "root", "verify", "committed", "shared", "evicted", "reserved")
    marks = []
    for first in range(0, len(cells), page_size):
        kinds = {slot.kind for slot in cells[first : first + page_size]}
        marks.append(next(kind for kind in order if kind in kinds))
    text = Text()
    for kind, run in groupby(marks):
        count = len(list(run))
        style = colour(row) if kind in ("committed", "shared") else STYLES[kind]
        text.append(MARKS[kind] * count if count <= 8 else f" {MARKS[kind]}x{count} ", style)
    return text


def _slots(console: Console, ledger: Ledger, row: RowPicture) -> None:
    name = row_name(row.row, ledger.num_rows)
    head = Text(f"\nrow {name}, slot by slot", "bold")
    if row.rounds:
        newest = row.rounds[-1]
        shape = ledger.shapes[newest.shape]
        head.append(
            f": step {newest.step} is {newest.state}, S {shape.num_steps} / K {shape.topk} / "
            f"N {shape.num_draft_tokens}, root drawn at {newest.lo}",
            "not bold",
        )
    console.print(head)
    for index, group in enumerate(ledger.groups):
        console.print(Text(printable(group.name), "bold"))
        if row.allocated[index] > MAX_DRAWN:
            console.print(f"  {row.allocated[index]} slots: at most {MAX_DRAWN} are drawn")
            continue
        cells = slots(row, index, group, ledger.shapes)
        for line in _slot_lines(cells, group, console.width):
            console.print(line, no_wrap=True, crop=True)


def _slot_lines(cells: Sequence[Slot], group: Group, width: int) -> Iterator[Text]:
    """Yield the lines of a row's slots, with marks below the verify window.

    A line has whole pages, if a page fits.
    """
    labelled = len(cells) <= MAX_LABELLED
    cell = len(str(len(cells))) + 2 if labelled else 1
    page = group.page_size * cell + 2
    per_line = (
        max(1, (width - 12) // page) * group.page_size
        if page <= width - 12
        else max(1, (width - 12) // cell)
    )
    skipped = 0
    for first in range(0, len(cells), per_line):
        part = cells[first : first + per_line]
        if all(
            slot.kind in ("committed", "shared", "evicted") for slot in part
        ) and first + per_line < len(cells):
            next_cells = cells[first + per_line : first + 2 * per_line]
            if all(slot.kind in ("committed", "shared", "evicted") for slot in next_cells):
                skipped += len(part)
                continue
        if skipped:
            yield Text(f"  [0, {skipped}) {skipped} committed slots are left out", "dim")
            skipped = 0
        yield from _slot_line(part, group.page_size, cell, labelled)


def _slot_line(part: Sequence[Slot], page_size: int, cell: int, labelled: bool) -> Iterator[Text]:
    line, marks = Text(f"{part[0].position:>8}  ", "dim"), Text(" " * 10)
    for slot in part:
        if slot.position % page_size == 0:
            line.append("| ", "dim")
            marks.append("  ")
        label = _label(slot) if labelled else MARKS[slot.kind]
        line.append(f"{label:<{cell}}", STYLES[slot.kind])
        marks.append(("~" if slot.in_verify else " ") * cell, "magenta")
    yield line
    if any(slot.in_verify for slot in part):
        yield marks


def _label(slot: Slot) -> str:
    if slot.kind in ("committed", "shared"):
        return f"p{slot.position}"
    if slot.kind == "hole":
        return f"h{slot.source}"
    return f"d{slot.step}" if slot.kind == "draft" else MARKS[slot.kind]
