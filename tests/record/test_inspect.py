"""Laws of the pictures: terminal and page show what the ledger has."""

from __future__ import annotations

import json
import os
import re
import subprocess
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from browser_kit import CHROMIUM, NO_CHROMIUM
from cli_kit import call
from ledger_kit import end, extend, make, prefill, start
from log_kit import CHAIN, build, serve
from specpool import Group, Ledger, Shape, _core
from specpool.record.film import FENCED, FREE, OWNED, SHARED, Film, row_name, slots


def film_of(path: Path, step: int | None = None) -> Film:
    film = Film(path)
    if step is None:
        for _ in film.events():
            pass
    else:
        film.to_step(step)
    return film


def readme(path: Path) -> Ledger:
    """The README's row: P = 4, a prefix of 7 tokens, 5 steps, 8 branches, holey; step 2 drafts."""
    ledger = make(Shape.eagle(5, 8, 20), layout="holey", record=path)
    row = prefill(ledger, 7, "the README's")
    start(ledger, row)
    ledger.close()
    return ledger


def drawn(path: Path, step: int | None = None) -> list[str]:
    """The labels of the only row's slots in its first group."""
    film = film_of(path, step)
    (row,) = film.picture().rows
    marks = {"draft": lambda s: f"d{s.step}", "hole": lambda s: f"p{s.source}"}
    marks |= {"committed": lambda s: f"p{s.position}", "root": lambda s: "o"}
    cells = slots(row, 0, film.ledger.groups[0], film.ledger.shapes)
    return [marks.get(slot.kind, lambda s: s.kind)(slot) for slot in cells]


# --- pictures


def test_cached_pages_and_entries_are_drawn(capsys, tmp_path):
    path = tmp_path / "log"
    ledger = build(path)
    row = ledger.admit("first")
    plan = ledger.prepare_extend([row], [10])
    ledger.launch(plan.step)
    ledger.complete(plan.step)
    ledger.index(row, list(range(10, 20)), b"tenant")
    ledger.finish(row)
    ledger.admit_cached([*range(10, 20), 5], b"tenant")
    ledger.close()
    code, out, err = call(capsys, "inspect", str(path))
    assert (code, err) == (0, "")
    size = ledger.groups[0].page_size
    assert f"prefix index: {-(-10 // size)} entries of 10 tokens" in out
    assert f"[{', '.join(map(str, range(10, 10 + min(size, 8))))}" in out
    assert "from position 0, salt b'tenant'" in out and "more holders)" in out
    code, out, err = call(capsys, "inspect", str(path), "--html", str(tmp_path / "page.html"))
    assert code == 0
    film = Film(path)
    for _ in film.events():
        pass
    cached = [group.cached for group in film.picture().groups]
    assert cached == [ledger.cached_pages(at) for at in range(len(cached))]
    assert '"cached"' in (tmp_path / "page.html").read_text()


def test_the_holey_row_of_the_readme(tmp_path):
    readme(tmp_path / "log")
    own = "p0 p1 p2 p3 p4 p5 p6 d0 d1 d2 d3 d4"
    expected = f"{own} " + "p4 p5 p6 d0 d1 d2 d3 d4 " * 7
    assert drawn(tmp_path / "log") == expected.split()


def test_a_picture_says_what_the_ledger_says(tmp_path):
    path = tmp_path / "log"
    ledger = build(path)
    serve(ledger)
    ledger.close()
    film, kinds = Film(path), set()
    for _ in film.events():
        picture, ledger = film.picture(), film.ledger
        assert [row.row for row in picture.rows] == [r for r in range(1, 5) if ledger.is_live(r)]
        for at, group in enumerate(picture.groups):
            never_taken = ledger.groups[at].num_pages + 1 - len(group.states)
            free = np.sum(group.states[1:] == FREE) + never_taken
            assert group.free == ledger.free_pages(at) == free
            assert group.fenced == ledger.fenced_pages(at) == np.sum(group.states == FENCED)
            held = {page for row in picture.rows for page in row.pages[at] if page}
            pinned = len(ledger.prefixes)
            in_use = set(np.flatnonzero((group.states == OWNED) | (group.states == SHARED)))
            assert held <= in_use and (pinned or held == in_use)
        for row in picture.rows:
            assert row.committed == ledger.kv_committed_len[row.row]
            assert len(row.rounds) == row.in_flight
            for number, one in enumerate(row.rounds):
                assert row.resolved + number == one.lo <= one.hi
            kinds |= _check_slots(row, film)
    every = {"shared", "committed", "root", "draft", "hole", "verify", "reserved", "evicted"}
    assert kinds == every


def _check_slots(row, film) -> set[str]:
    kinds = set()
    for at, group in enumerate(film.ledger.groups):
        cells = slots(row, at, group, film.ledger.shapes)
        assert [slot.position for slot in cells] == list(range(row.allocated[at]))
        final = [slot for slot in cells if slot.kind in ("committed", "shared", "evicted")]
        assert [slot.position for slot in final] == list(range(row.resolved))
        gone = [slot.position for slot in cells if slot.kind == "evicted"]
        first = -(-group.sink // group.page_size) * group.page_size
        assert gone == list(range(first, row.evicted[at]))
        if row.rounds:
            shape = film.ledger.shapes[row.rounds[-1].shape]
            window = [slot.position for slot in cells if slot.in_verify]
            root = row.rounds[-1].lo
            assert window == list(range(root, root + shape.num_draft_tokens))
            drafts = [slot for slot in cells if slot.kind == "draft"]
            assert len(drafts) == (shape.num_steps * shape.topk if group.hosts_drafts else 0)
        kinds |= {slot.kind for slot in cells}
    return kinds


@settings(max_examples=60, deadline=None)
@given(
    page_size=st.integers(1, 9),
    prefix=st.integers(1, 30),
    shape=st.builds(lambda s, k: Shape(s, k, s + 1), st.integers(1, 7), st.integers(1, 5)),
    layout=st.sampled_from(["dense", "holey"]),
)
def test_holes_are_the_copies_that_the_kernels_make(
    tmp_path_factory, page_size, prefix, shape, layout
):
    path = tmp_path_factory.mktemp("holes") / "log"
    ledger = make(shape, page_size=page_size, layout=layout, record=path)
    row = prefill(ledger, prefix)
    start(ledger, row)
    ledger.close()
    film = film_of(path)
    cells = slots(film.picture().rows[0], 0, film.ledger.groups[0], film.ledger.shapes)
    table = ledger.full_table(0)

    def slot_of(position: int) -> int:
        return int(table[row, position // page_size]) * page_size + position % page_size

    copies = {(slot_of(s.source), slot_of(s.position)) for s in cells if s.kind == "hole"}
    if layout == "holey" and shape.topk > 1 and page_size > 1:
        rows, roots = np.array([row], np.int32), np.array([prefix], np.int32)
        src, dst = _core.prefix_tail_moves(
            table, page_size, rows, roots, num_steps=shape.num_steps, topk=shape.topk
        )
        assert copies == set(zip(src.tolist(), dst.tolist(), strict=True))
    else:
        assert copies == set()


def test_rounds_show_the_bounds_that_the_resolved_ones_leave(tmp_path):
    path = tmp_path / "log"
    ledger = make(overlap_depth=1, record=path)
    row = prefill(ledger, 5)
    first, _ = start(ledger, row), start(ledger, row)
    film = film_after(ledger, path)
    assert [(r.lo, r.hi) for r in film.picture().rows[0].rounds] == [(5, 5), (6, 9)]
    ledger = make(overlap_depth=1, record=path)
    row = prefill(ledger, 5)
    first, _ = start(ledger, row), start(ledger, row)
    ledger.resolve(first, [3])
    film = film_after(ledger, path)
    assert [(r.lo, r.hi) for r in film.picture().rows[0].rounds] == [(8, 8)]


def film_after(ledger: Ledger, path: Path) -> Film:
    ledger.close()
    return film_of(path)


def test_row_names_are_short_and_different():
    assert [row_name(row, 26) for row in (1, 2, 26)] == ["A", "B", "Z"]
    assert [row_name(row, 27) for row in (1, 26, 27)] == ["AA", "AZ", "BA"]
    for num_rows in (26, 700):
        names = [row_name(row, num_rows) for row in range(1, num_rows + 1)]
        assert len(set(names)) == num_rows and all(a < b for a, b in pairwise(names))


# --- the terminal


def test_the_terminal_draws_the_readme(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "105")
    readme(tmp_path / "log")
    code, out, err = call(capsys, "inspect", str(tmp_path / "log"), "--at", "2")
    assert code == 0 and err == ""
    assert "step 2: prepare_decode([1], [1]) -> step 2" in out
    assert "row 1, the README's: resolved_len 7, 1 in flight, root at 7" in out
    line = re.search(r"^ +0  \| (.*)$", out, re.MULTILINE).group(1)
    expected = "p0 p1 p2 p3 | p4 p5 p6 d0 | d1 d2 d3 d4 | h4 h5 h6 d0 | d1 d2 d3 d4"
    assert line.split() == expected.split()
    assert "0 shared" in out and "free" in out


def test_the_terminal_shows_who_owns_which_page(capsys, tmp_path):
    """Owned, shared, fenced, free and given back: each by its mark alone."""
    path = tmp_path / "log"
    groups = [
        Group("kv", page_size=4, num_pages=40),
        Group("swa", page_size=4, num_pages=40, window=5),
    ]
    ledger = Ledger(groups, [], num_rows=4, max_context_len=60, record=path)
    rows = [prefill(ledger, 6, "one"), prefill(ledger, 13, "two"), prefill(ledger, 5, "three")]
    extend(ledger, rows[1], 14)
    ledger.fork(rows[0], "fork")
    plan = ledger.prepare_extend([rows[2]], [9])
    ledger.launch(plan.step)
    ledger.retract(rows[2])
    ledger.close()
    code, out, _ = call(capsys, "inspect", str(path))
    assert code == 0
    pool = re.search(r"^ +1  (.*)$", out, re.MULTILINE).group(1).split()
    film = film_of(path)
    states, owners, holders = film.ledger.ownership_map(0)
    for page, mark in enumerate(pool, start=1):
        name = row_name(int(owners[page]), 4)
        marks = {OWNED: name, SHARED: str(holders[page]), FENCED: name.lower(), FREE: "."}
        assert mark == marks[int(states[page])], f"page {page}"
    assert {"B", "2", "c"} <= set(pool)
    assert "xx" in re.search(r"^ +swa +(x.*) \d+ pages$", out, re.MULTILINE).group(1)


def test_a_sink_stays_in_the_picture(capsys, tmp_path):
    """The pages between sink and window are given back; those of the sink are not."""
    path = tmp_path / "log"
    group = Group("swa", page_size=4, num_pages=40, window=5, sink=3)
    ledger = Ledger([group], [], num_rows=4, max_context_len=60, record=path)
    row = prefill(ledger, 13, "one")
    extend(ledger, row, 22)
    ledger.close()
    for options in ([], ["--at", "2"], ["--row", "1"]):
        code, out, err = call(capsys, "inspect", str(path), *options)
        assert (code, err) == (0, "")
        assert "window of 5, sink of 3" in out
        assert re.search(r"^ +swa +(\S+) ", out, re.MULTILINE).group(1) == "#x####"
    assert "0  | p0  p1  p2  p3  | x   x   x   x   | p8" in out
    code, out, err = call(capsys, "replay", str(path))
    assert (code, err) == (0, "")


def test_colour_is_an_addition(capsys, tmp_path, monkeypatch):
    """Pipes and NO_COLOR get no escape codes; with colour the text is the same."""
    path = tmp_path / "log"
    readme(path)
    _, piped, _ = call(capsys, "inspect", str(path))
    assert "\x1b" not in piped
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    _, coloured, _ = call(capsys, "inspect", str(path))
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == piped
    monkeypatch.setenv("NO_COLOR", "1")
    _, plain, _ = call(capsys, "inspect", str(path))
    assert not re.search(r"\x1b\[[0-9;]*[34][0-9]", plain)


def test_a_long_row_and_a_large_pool_stay_on_the_screen(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    path = tmp_path / "log"
    group = Group("kv", page_size=64, num_pages=9000, hosts_drafts=True, layout="holey")
    ledger = Ledger(
        [group], [Shape.eagle(5, 8, 64)], num_rows=60, max_context_len=9000, record=path
    )
    rows = [ledger.admit() for _ in range(60)]
    plan = ledger.prepare_extend(rows, [8000 + row for row in rows])
    ledger.launch(plan.step)
    start(ledger, *rows)
    ledger.close()
    code, out, _ = call(capsys, "inspect", str(path), "--row", "60")
    assert code == 0
    lines = out.splitlines()
    assert all(len(line) <= 80 for line in lines[1:] if " = row " not in line)
    assert len(lines) < 200
    assert "are in use too: --html draws all" in out and "and 20 more rows: --row N" in out
    assert "7936 committed slots are left out" in out
    assert 8060 % 64 == 60 and out.count(f"| {'h' * 60}dddd\n") == 7


def test_what_cannot_be_drawn_is_exit_code_2(capsys, tmp_path):
    path = tmp_path / "log"
    readme(path)
    for options in (
        ["--at", "7"],
        ["--row", "3"],
        ["--html", str(tmp_path / "no-folder" / "page.html")],
        ["--html", str(tmp_path / "page.html"), "--at", "7"],
        ["--html", str(tmp_path / "page.html"), "--frames", "0"],
    ):
        code, _, err = call(capsys, "inspect", str(path), *options)
        assert code == 2 and len(err.splitlines()) == 1, (options, err)
    assert not (tmp_path / "page.html").exists()


def test_tags_and_names_do_not_command_the_terminal(capsys, tmp_path):
    """Escape codes and line ends of a log are shown, not sent."""
    path = tmp_path / "log"
    group = Group("k\x1b[2Jv", page_size=4, num_pages=9)
    ledger = Ledger([group], [], num_rows=1, max_context_len=16, record=path)
    prefill(ledger, 5, "one\ntwo\x1b[31mred\r\x07\u202e\x9b2J \u4e8c \u00e9")
    ledger.close()
    shown = r"one\ntwo\x1b[31mred\r\x07\u202e\x9b2J " + "\u4e8c \u00e9"
    for command in (["replay"], ["replay", "--at", "1"], ["inspect"]):
        code, out, err = call(capsys, command[0], str(path), *command[1:])
        assert code == 0 and err == ""
        assert shown in out
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", out)
        assert len([line for line in out.splitlines() if "31mred" in line]) == 1
        if command != ["replay"]:
            assert r"k\x1b[2Jv: 9 pages" in out
    other = tmp_path / "other"
    Ledger([group], [], num_rows=2, max_context_len=16, record=other).close()
    _, out, _ = call(capsys, "replay", str(path), "--against", str(other))
    assert "\x1b" not in out
    prefill(again := Ledger([group], [], num_rows=1, max_context_len=16, record=other), 6, "\x1b")
    again.close()
    _, out, _ = call(capsys, "replay", str(path), "--against", str(other))
    assert "they differ" in out and "\x1b" not in out


def damaged(log: Path, how: str) -> tuple[Path, int]:
    """A copy of the log that is cut or broken in an event; the number of the event before."""
    path, whole = log.with_name("damaged"), bytearray(log.read_bytes())
    event = list(Film(log).events())[-10]
    if how == "truncated":
        del whole[event.offset + 2 :]
    else:
        whole[event.offset + 2] ^= 0x24
    path.write_bytes(whole)
    return path, event.index - 1


@pytest.mark.parametrize("how", ["truncated", "damaged"])
def test_a_damaged_log_is_drawn_up_to_the_damage(capsys, tmp_path, how):
    log = tmp_path / "log"
    ledger = build(log)
    serve(ledger)
    ledger.close()
    path, last = damaged(log, how)
    code, out, err = call(capsys, "inspect", str(path))
    assert code == 2 and len(err.splitlines()) == 1
    assert err.startswith("error: ") and how in err and re.search(r"at byte \d+", err)
    assert out.startswith(f"event {last}") and "slot by slot" in out
    assert call(capsys, "replay", str(path))[0] == 2  # As there.
    page = tmp_path / "page.html"
    code, out, err_of_page = call(capsys, "inspect", str(path), "--html", str(page))
    assert (code, err_of_page) == (2, err)
    assert f"events 0 to {last}" in out
    film = json.loads(Page(page.read_text()).texts["film"])
    assert film["frames"][-1]["index"] == last == film["num_events"]
    assert film["damage"] in err
    for options in ([], ["--html", str(page)]):
        page.unlink(missing_ok=True)
        code, out, err_at = call(capsys, "inspect", str(path), "--at", "999", *options)
        assert (code, out, err_at) == (2, "", err) and not page.exists()
    code, out, err = call(capsys, "inspect", str(path), "--at", "3")
    assert code == 0 and err == ""


def test_a_log_without_one_whole_event_is_drawn_empty(capsys, tmp_path):
    log = tmp_path / "log"
    readme(log)
    first = next(Film(log).events())
    log.write_bytes(log.read_bytes()[: first.offset + 3])
    code, out, err = call(capsys, "inspect", str(log))
    assert code == 2 and "truncated" in err
    assert out.startswith("before the first event")


@pytest.mark.parametrize("way", ["itself", "another way", "symbolic link", "hard link"])
def test_the_page_is_not_written_over_its_log(capsys, tmp_path, monkeypatch, way):
    log = tmp_path / "log"
    readme(log)
    before, page = log.read_bytes(), tmp_path / "page"
    monkeypatch.chdir(tmp_path)
    if way == "symbolic link":
        page.symlink_to(log)
    elif way == "hard link":
        page.hardlink_to(log)
    else:
        page = log if way == "itself" else Path("..") / tmp_path.name / "log"
    code, out, err = call(capsys, "inspect", str(log), "--html", str(page))
    assert code == 2 and out == "" and len(err.splitlines()) == 1
    assert "is the log itself" in err
    assert log.read_bytes() == before


def test_the_page_begins_with_the_row_that_was_asked_for(capsys, tmp_path):
    path = tmp_path / "log"
    ledger = make(record=path)
    rows = [prefill(ledger, 5), prefill(ledger, 6)]
    start(ledger, rows[0])
    ledger.close()
    assert page_of(capsys, path)[1]["picked"] == 0
    _, film = page_of(capsys, path, "--row", str(rows[1]))
    assert film["picked"] == rows[1]
    if CHROMIUM is not None:
        assert re.search(r"row 2, slot by slot", browse(path.with_suffix(".html"), tmp_path))
    for row in ("3", "0", "-1"):
        code, _, err = call(
            capsys, "inspect", str(path), "--html", str(tmp_path / "none"), "--row", row
        )
        assert code == 2 and f"row {row} is not admitted" in err
    assert not (tmp_path / "none").exists()


# --- the page


class Page(HTMLParser):
    """Elements, ids, and the text of each script and style."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids, self.links, self.texts, self._open = set(), [], {}, None
        self.stack: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        if "id" in attributes:
            assert attributes["id"] not in self.ids
            self.ids.add(attributes["id"])
        self.links += [value for key, value in attrs if key in ("src", "href", "action")]
        if tag in ("script", "style"):
            self._open = attributes.get("id", tag)
        if tag not in ("meta", "input", "br", "link"):
            self.stack.append(tag)

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag
        self._open = None

    def handle_data(self, data):
        if self._open:
            self.texts[self._open] = self.texts.get(self._open, "") + data


def page_of(capsys, log: Path, *options: str) -> tuple[Page, dict]:
    path = log.with_suffix(".html")
    code, out, err = call(capsys, "inspect", str(log), "--html", str(path), *options)
    assert code == 0, err
    assert str(path) in out
    page = Page(path.read_text(encoding="utf-8"))
    return page, json.loads(page.texts["film"])


def test_the_page_is_whole_and_asks_for_nothing(capsys, tmp_path):
    """Well-formed, one film, nothing from the network, every id that the script asks for."""
    path = tmp_path / "a<b>&.log"
    readme(path)
    page, film = page_of(capsys, path)
    assert page.stack == [] and page.links == []
    code = page.texts["script"] + page.texts["style"]
    for word in ("http", "//cdn", "@import", "url(", "fetch(", "XMLHttpRequest", "import("):
        assert word not in code, word
    asked = set(re.findall(r'\$\("([a-z]+)"\)', page.texts["script"]))
    assert asked and asked <= page.ids
    assert film["log"] == "a<b>&.log"
    assert '<input id="slider" type="range"' in path.with_suffix(".html").read_text()


def test_the_frames_add_up_to_the_pictures(capsys, tmp_path):
    """A frame holds what changed: adding them up gives the ledger after every event."""
    path = tmp_path / "log"
    ledger = build(path)
    serve(ledger)
    ledger.close()
    _, page = page_of(capsys, path)
    film = Film(path)
    pools, rows = [{} for _ in page["groups"]], {}
    assert len(page["frames"]) == page["num_events"] + 1
    for number, frame in enumerate(page["frames"]):
        event = film.advance() if number else None
        assert frame["index"] == number and frame["text"] == (
            event.text if event else frame["text"]
        )
        picture = film.picture()
        for at, change in enumerate(frame["groups"]):
            group = picture.groups[at]
            assert change["counts"] == [group.free, group.fenced, group.cached, group.reclaimable]
            for first, count, *record in change["pages"]:
                pools[at].update(dict.fromkeys(range(first, first + count), record))
            for n in range(1, len(group.states)):
                record = [int(column[n]) for column in (group.states, group.owners, group.holders)]
                assert pools[at].get(n, [0, 0, 0]) == record
                assert record == [0, 0, 0] or n <= page["groups"][at]["shown"]
        add_rows(rows, frame["rows"], [group["page_size"] for group in page["groups"]])
        assert rows.keys() == {row.row for row in picture.rows}
        for row in picture.rows:
            shown = rows[row.row]
            for name in ("resolved", "in_flight", "drafted", "epoch", "idle"):
                assert shown[name] == getattr(row, name)
            assert shown["tag"] == (row.tag or "")
            for name in ("allocated", "protected", "evicted", "pages"):
                assert tuple(shown[name]) == getattr(row, name)
            assert shown["rounds"] == [[r.step, r.shape, r.state] for r in row.rounds]


def add_rows(rows: dict[int, dict], changes: dict, page_sizes: list[int]) -> None:
    """The rows after a frame: what the page's own script makes of it."""
    pages = changes.pop("pages", [])
    for row in changes.pop("gone", []):
        del rows[row]
    for name, runs in changes.items():
        for first, count, value in runs:
            for row in range(first, first + count):
                new = {"tag": "", "resolved": 0, "in_flight": 0, "drafted": 0, "idle": False}
                new |= {"rounds": [], "protected": [], "evicted": []}
                new["pages"] = [()] * len(page_sizes)
                rows.setdefault(row, new)[name] = value
    for row in rows.values():
        lens = [n // size for n, size in zip(row["allocated"], page_sizes, strict=True)]
        row["pages"] = [(*p, *[0] * n)[:n] for p, n in zip(row["pages"], lens, strict=True)]
    for at, runs in enumerate(pages):
        for row, first, count, page in runs:
            held = list(rows[row]["pages"][at])
            held[first : first + count] = [page + i if page else 0 for i in range(count)]
            rows[row]["pages"][at] = tuple(held)


@pytest.mark.parametrize(
    ("options", "first", "last", "at"),
    [
        ([], 0, 25, 5),
        (["--at", "3"], 0, 25, 9),
        (["--frames", "5"], 0, 4, None),
        (["--at", "5", "--frames", "6"], 14, 19, 17),
        (["--at", "7", "--frames", "6"], 20, 25, 25),
    ],
)
def test_a_page_shows_the_events_around_its_step(capsys, tmp_path, options, first, last, at):
    path = tmp_path / "log"
    ledger = make(record=path)
    row = prefill(ledger, 5)  # step 1, events 1 to 4
    for _ in range(5):
        end(ledger, start(ledger, row), 2)  # step s: events 4s - 3 to 4s
    ledger.prepare_decode([row], [1])  # step 7, event 25
    ledger.close()
    _, page = page_of(capsys, path, *options)
    assert [page["frames"][0]["index"], page["frames"][-1]["index"]] == [first, last]
    if at is not None:
        assert page["frames"][page["start"]]["index"] == at


@pytest.mark.parametrize(("frames", "is_said"), [("5", True), ("26", False)])
def test_a_page_of_a_part_of_the_log_says_so(capsys, tmp_path, frames, is_said):
    """The terminal and the page say so; the page's script compares the same two numbers."""
    path = tmp_path / "log"
    ledger = make(record=path)
    row = prefill(ledger, 5)
    for _ in range(5):
        end(ledger, start(ledger, row), 2)
    ledger.prepare_decode([row], [1])  # event 25
    ledger.close()
    how = ("--html", str(tmp_path / "page.html"), "--frames", frames)
    code, out, err = call(capsys, "inspect", str(path), *how)
    assert code == 0, err
    assert f"events 0 to {int(frames) - 1} of 25 in {path}" in out
    assert ("--frames 26 shows them all, --at N those around a step N" in out) == is_said
    page = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert "film.frames.length < film.num_events + 1" in page.texts["script"]


def test_a_page_of_many_rows_holds_what_changed(capsys, tmp_path):
    """A frame does not repeat every row: 512 rows that do the same are a few runs."""
    path = tmp_path / "log"
    group = Group("kv", page_size=16, num_pages=9000, hosts_drafts=True)
    ledger = Ledger([group], [CHAIN], num_rows=512, max_context_len=256, record=path)
    rows = [ledger.admit() for _ in range(512)]
    step = ledger.prepare_extend(rows, [200] * 512).step
    for accepted in range(1, 5):
        ledger.launch(step)
        if accepted > 1:
            ledger.resolve(step, [accepted] * 512)
        ledger.complete(step)
        step = ledger.prepare_decode(rows, [1] * 512).step
    ledger.close()
    _, page = page_of(capsys, path, "--at", "2", "--frames", "16")
    _, *later = page["frames"]
    assert sum(len(json.dumps(frame["rows"])) for frame in later) < 16_000
    prepare = next(f for f in later if f["step"] == 2 and f["verb"] == "prepare_decode")
    assert prepare["rows"]["rounds"] == [[1, 512, [[2, 1, "prepared"]]]]


def browse(page: Path, folder: Path) -> str:
    """The page's elements after its script has run."""
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += [f"--user-data-dir={folder / 'profile'}", page.as_uri()]
    env = {**os.environ, "HOME": str(folder)}
    return subprocess.run(command, capture_output=True, text=True, timeout=550, env=env).stdout


# Runs behind the page's own script: every key, then every row of every frame.
PRESSES = """<script>
const seen = [];
window.onerror = message => seen.push("error: " + message);
const event = () => Number($("where").textContent.split(" ")[1]);
function press(key, shiftKey = false) {
  document.body.dispatchEvent(new KeyboardEvent("keydown", {key, shiftKey, bubbles: true}));
  seen.push(event());
}
press("ArrowRight"); press("ArrowLeft"); press("ArrowLeft"); press("ArrowRight", true);
press("ArrowRight", true); press("ArrowLeft", true);
press("End"); press("Home"); press("ArrowLeft");
for (let i = 0; i < film.frames.length; i++) {
  seek(i);
  for (const row of now.rows.keys()) { picked = row; draw(); }
}
document.querySelectorAll("[data-tip]").forEach(node =>
  node.dispatchEvent(new MouseEvent("mousemove", {bubbles: true})));
press(" "); seen.push(timer !== null); press(" "); seen.push(timer !== null);
document.body.innerHTML = "<pre>" + JSON.stringify(seen) + "</pre>";
</script></body>"""


@pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)
def test_the_keys_move_and_every_frame_can_be_drawn(capsys, tmp_path):
    path = tmp_path / "log"
    ledger = build(path)
    serve(ledger)
    ledger.close()
    _, film = page_of(capsys, path, "--at", "4")
    page = path.with_suffix(".html")
    page.write_text(page.read_text().replace("</body>", PRESSES))
    seen = json.loads(re.search(r"<pre>(.*)</pre>", browse(page, tmp_path)).group(1))
    frames = film["frames"]
    at, last = film["start"], len(frames) - 1
    steps = [n for n, frame in enumerate(frames) if frame["verb"].startswith("prepare")]
    here = steps.index(at)
    moved = [at + 1, at, at - 1, at, steps[here + 1], at, last, 0, 0]
    assert seen == [*moved, 0, True, 0, False]  # playing from the end starts again at the beginning


# What the page's own script knows of the rows, frame by frame.
ROWS = """<script>
const all = film.frames.map((_, number) => {
  seek(number);
  const rows = [...now.rows].sort((a, b) => a[0] - b[0]);
  return JSON.parse(JSON.stringify(rows.map(([id, row]) =>
    [id, row.tag, row.resolved, row.in_flight, row.pages, row.roots])));
});
document.body.innerHTML = "<pre>" + JSON.stringify(all) + "</pre>";
</script></body>"""


@pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)
def test_a_browser_adds_the_frames_up_to_the_same_rows(capsys, tmp_path):
    path = tmp_path / "log"
    ledger = build(path)
    serve(ledger)
    ledger.close()
    page_of(capsys, path)
    page = path.with_suffix(".html")
    page.write_text(page.read_text().replace("</body>", ROWS))
    film, expected = Film(path), []
    for event in [None, *Film(path).events()]:
        assert event is None or film.advance() is not None
        expected.append(
            [
                [
                    r.row,
                    r.tag or "",
                    r.resolved,
                    r.in_flight,
                    [*map(list, r.pages)],
                    [[one.lo, one.hi] for one in r.rounds],
                ]
                for r in film.picture().rows
            ]
        )
    shown = json.loads(re.search(r"<pre>(.*)</pre>", browse(page, tmp_path)).group(1))
    assert shown == expected


@pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)
def test_a_browser_draws_the_slots_that_python_draws(capsys, tmp_path):
    """The page's own arithmetic, run by a browser, beside `slots`."""
    for name, layout, prefix in (
        ("holey", "holey", 7),
        ("dense", "dense", 7),
        ("edge", "holey", 8),
    ):
        path = tmp_path / f"{name}.log"
        ledger = make(Shape.eagle(5, 8, 20), layout=layout, record=path)
        row = prefill(ledger, prefix)
        start(ledger, row)
        ledger.close()
        page_of(capsys, path, "--at", "2")
        dom = browse(path.with_suffix(".html"), tmp_path)
        found = re.findall(r'data-kind="([a-z]+)" data-position="(\d+)"', dom)
        assert found
        film = film_of(path)
        cells = slots(film.picture().rows[0], 0, film.ledger.groups[0], film.ledger.shapes)
        same = {"verify": "reserved", "root": "claimed"}
        expected = {str(s.position): same.get(s.kind, s.kind) for s in cells}
        shown = {position: kind for kind, position in found}
        assert shown == {p: expected[p] for p in shown} and len(shown) >= len(expected) - 8
        assert dom.count('class="page owned"') == row_pages(film)
        words = "holes" if name == "holey" else "no holes" if name == "edge" else "dense"
        assert words in dom


def row_pages(film: Film) -> int:
    """Owned pages in the pool, and the one in the legend."""
    return int(np.sum(film.picture().groups[0].states == OWNED)) + 1
