"""Laws of recording: a log can be run again, and a full disk loses nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import log_reference
from cli_kit import call
from ledger_kit import refuses
from log_kit import CHAIN, build, serve
from paths import TESTS
from specpool import (
    ConfigError,
    Engine,
    Group,
    Ledger,
    OrderError,
    OutOfPages,
    RecordError,
    SamplingParams,
    Shape,
    SpecpoolError,
)
from specpool._core import Replay
from verb_table import ENTRIES


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "day.log"
    ledger = build(path)
    serve(ledger)
    ledger.close()
    return path


# Verbs that give a number and nothing else.
NUMBERED = {entry.name for entry in ENTRIES if entry.gives in ("Prefix", "Length")}


def replayed(path: Path) -> tuple[Ledger, list]:
    replay = Replay(path)
    events = []
    while (event := replay.advance()) is not None:
        events.append(event)
    return replay.ledger, events


def test_a_replay_gives_the_same_ledger(tmp_path):
    path = tmp_path / "day.log"
    ledger = build(path)
    serve(ledger)
    ledger.close()
    again, events = replayed(path)
    assert again.state_hash() == ledger.state_hash()
    assert again.digest == ledger.digest == events[-1].digest
    assert [again.tag(row) for row in range(5)] == [ledger.tag(row) for row in range(5)]
    for group in range(2):
        assert (again.full_table(group) == ledger.full_table(group)).all()
    assert (again.resolved_len == ledger.resolved_len).all()
    assert [event.index for event in events] == list(range(1, len(events) + 1))
    again.check()


def test_recording_changes_nothing_but_the_digest(tmp_path):
    recorded, plain = build(tmp_path / "day.log"), build(None)
    digesting = build(None, digest=True)
    for ledger in (recorded, plain, digesting):
        serve(ledger)
    assert recorded.state_hash() == plain.state_hash() == digesting.state_hash()
    assert recorded.digest == digesting.digest is not None
    assert plain.digest is None


def test_an_event_says_what_was_called_and_given(log):
    replay = Replay(log)
    assert replay.end is None
    event = replay.advance()
    assert (event.verb, event.index, event.tag, event.rows) == ("admit", 1, "first", [1])
    assert event.step is None and event.plan is None and event.text == "admit() -> row 1"
    replay.advance()
    event = replay.advance()
    assert event.text == "prepare_extend([1, 2], [9, 14]) -> step 1"
    assert event.step == event.plan.step == 1 and event.rows == [1, 2]
    assert event.plan.new_len.tolist() == [9, 14]
    event = replay.advance()
    assert (event.text, event.step, event.plan) == ("launch(1)", 1, None)
    while replay.advance() is not None:
        pass
    assert replay.end == "closed" and replay.advance() is None


def test_the_configuration_is_recorded_whole(tmp_path):
    path = tmp_path / "log"
    options = {
        "num_rows": 3,
        "max_context_len": 40,
        "max_batch": 2,
        "overlap_depth": 2,
        "policy": "double_buffer",
        "row_width": [120, 99],
        "draft_kv": False,
        "max_chunk": 30,
        "sessions": True,
        "page_fencing": False,
    }
    groups = [
        Group("draft", page_size=4, num_pages=60, hosts_drafts=True, layout="holey"),
        Group("window", page_size=3, num_pages=60, window=7),
    ]
    Ledger(groups, [CHAIN], record=path, **options).close()
    replay = Replay(path)
    assert replay.config == {"groups": groups, "shapes": [Shape.none(), CHAIN], **options}
    again = Ledger(**replay.config)
    assert again.state_hash() == replay.ledger.state_hash()


def test_the_page_on_the_format_suffices_to_read_a_log(log):
    """The reader in log_reference.py knows docs/event_log.md only."""
    theirs = log_reference.read(log.read_bytes())
    replay = Replay(log)
    assert theirs.made_by == replay.made_by
    config = replay.config
    for ours, group in zip(config.pop("groups"), theirs.config.pop("groups"), strict=True):
        assert ours == Group(**group)
    shapes = [(s.num_steps, s.topk, s.num_draft_tokens) for s in config.pop("shapes")]
    assert shapes == theirs.config.pop("shapes") and config == theirs.config
    assert theirs.records.pop().verb == "closed"
    digest = log_reference.START
    for record in theirs.records:
        event = replay.advance()
        assert (event.offset, event.verb, event.tag) == (record.offset, record.verb, record.tag)
        assert event.digest == record.digest
        assert record.arguments.get("step", event.step) == event.step
        if event.plan is not None:
            assert event.plan.rows.tolist() == record.arguments["rows"]
        if record.verb != "snapshot":
            digest = log_reference.over_bytes(digest, record.event)
        digest = _gave(digest, event, replay.ledger)
        assert digest == event.digest, event.text
    assert replay.advance() is None


def _gave(digest: int, event, ledger: Ledger) -> int:
    """The ids that a call gave, as docs/event_log.md lists them."""
    word, over_list = log_reference.word, log_reference.over_list
    groups = range(len(ledger.groups))
    sizes = [group.page_size for group in ledger.groups]
    if event.verb == "restore":
        return word(digest, ledger.state_hash())
    if event.verb in NUMBERED:
        return word(digest, int(event.text.split()[-1]))
    if event.verb in ("admit", "fork"):
        (row,) = event.rows[-1:]
        digest = word(digest, row)
        if event.verb == "fork" or "prefix" in event.text:
            for g in groups:
                held = ledger.allocated_len(g)[row] // sizes[g]
                digest = over_list(digest, ledger.full_table(g)[row, :held].tolist())
    if event.plan is not None:
        plan = event.plan
        digest = word(digest, plan.step)
        for g in groups:
            before, after = (
                plan.allocated_before[g] // sizes[g],
                plan.allocated_after[g] // sizes[g],
            )
            for row, start, stop in zip(plan.rows, before, after, strict=True):
                if stop > start:
                    digest = over_list(digest, ledger.full_table(g)[row, start:stop].tolist())
    return digest


def test_a_log_cut_anywhere_is_refused_with_the_offset_or_just_ends(log, tmp_path):
    whole = log.read_bytes()
    edges = [record.offset for record in log_reference.read(whole).records]
    cut_log = tmp_path / "cut.log"
    for cut in range(len(whole)):
        cut_log.write_bytes(whole[:cut])
        begun = max((edge for edge in [0, *edges] if edge < cut), default=0)
        if cut in edges:
            _, events = replayed(cut_log)
            assert len(events) == edges.index(cut)
            continue
        with pytest.raises(RecordError, match=rf"at byte {begun}: it is truncated: \d+ more bytes"):
            replayed(cut_log)


def test_a_damaged_log_is_refused_with_the_offset(log, tmp_path):
    whole = log.read_bytes()
    edges = [0, *(record.offset for record in log_reference.read(whole).records)]
    broken = tmp_path / "broken.log"
    for at in range(len(whole)):
        broken.write_bytes(whole[:at] + bytes([whole[at] ^ 0x24]) + whole[at + 1 :])
        begun = max(edge for edge in edges if edge <= at)
        with pytest.raises(RecordError, match=f"at byte {begun}: "):
            replayed(broken)
    broken.write_bytes(whole + b"\0")
    with pytest.raises(RecordError, match="bytes follow its end"):
        replayed(broken)


@pytest.mark.parametrize(
    ("path", "why"),
    [("", "No such file"), ("no-folder/day.log", "No such file"), (".", "Is a directory")],
)
def test_a_path_that_cannot_be_written_is_refused(tmp_path, monkeypatch, path, why):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecordError, match=why):
        build(path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_a_disk_that_is_full_from_the_start_is_refused():
    with pytest.raises(RecordError, match=r"/dev/full: No space left .* 0 bytes are written"):
        build("/dev/full")


@pytest.mark.parametrize("limit", [-1, 0, 50, 2**80, "much"])
def test_a_limit_that_cannot_hold_the_head_is_refused(tmp_path, limit):
    with pytest.raises((ConfigError, RecordError), match=r"record_limit|64 bits"):
        build(tmp_path / "log", record_limit=limit)


def test_at_its_limit_the_log_ends_and_the_ledger_goes_on(tmp_path):
    path = tmp_path / "log"
    ledger, free = build(path, record_limit=600), build(None, digest=True)
    for one in (ledger, free):
        serve(one, rounds=12)
        one.close()
    assert ledger.state_hash() == free.state_hash() and ledger.digest == free.digest
    assert path.stat().st_size <= 600
    replay = Replay(path)
    while replay.advance() is not None:
        pass
    assert replay.end == "limit"


@pytest.mark.skipif(sys.platform == "win32", reason="needs resource limits")
@pytest.mark.parametrize("mode", ["room", "close"])
def test_a_disk_that_fills_refuses_verbs_and_loses_nothing(tmp_path, mode):
    script = (TESTS / "kits" / "full_disk.py").read_text()
    done = run(script, str(tmp_path / "log"), mode)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 500


def run(script: str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script, *args]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=550, env={**os.environ, **env}
    )


LEDGERS = """
import os
from specpool import Group, Ledger
ledgers = [Ledger([Group("kv", page_size=4, num_pages=9)], [], num_rows=n, max_context_len=16)
           for n in (1, 2)]
for ledger in ledgers:
    ledger.admit("of the environment")
print(os.getpid())
"""


def test_the_environment_records_every_ledger_to_a_file_of_its_own(tmp_path):
    """Without a close: the events in memory are written when the ledger is collected."""
    done = run(LEDGERS, SPECPOOL_RECORD=str(tmp_path / "run-%p.log"))
    assert done.returncode == 0, done.stderr
    first = tmp_path / f"run-{done.stdout.strip()}.log"
    second = first.with_name(first.name + ".2")
    assert sorted(tmp_path.iterdir()) == [first, second]
    for num_rows, path in ((1, first), (2, second)):
        ledger, events = replayed(path)
        assert ledger.num_rows == num_rows and [e.tag for e in events] == ["of the environment"]
    refused = "import specpool as s\ntry: s.Ledger([], [], num_rows=1, max_context_len=9)\n"
    refused += "except s.ConfigError: pass\n"
    done = run(refused + LEDGERS, SPECPOOL_RECORD=str(tmp_path / "counted"))
    names = sorted(path.name for path in tmp_path.glob("counted*"))
    assert names == ["counted", "counted.2"], "a ledger that was refused takes no number"
    done = run(LEDGERS, SPECPOOL_RECORD=str(tmp_path / "no-folder" / "log"))
    assert done.returncode == 1 and "RecordError" in done.stderr
    assert run(LEDGERS, SPECPOOL_RECORD="").returncode == 0


def test_a_log_has_one_writer(tmp_path):
    path = tmp_path / "ranks.log"
    first = build(path)
    with pytest.raises(RecordError, match="another ledger is writing it"):
        build(path)
    done = run(LEDGERS, SPECPOOL_RECORD=str(path))
    assert done.returncode == 1 and "another ledger is writing it" in done.stderr
    first.admit()
    first.close()
    _, events = replayed(path)
    assert [event.verb for event in events] == ["admit"]


FORKS = """
import os, sys
from specpool import Group, Ledger
ledger = Ledger([Group("kv", page_size=4, num_pages=9)], [], num_rows=1, max_context_len=16,
                record=sys.argv[1])
ledger.finish(ledger.admit("parent"))
child = os.fork()
if child == 0:
    for _ in range(5000):
        ledger.finish(ledger.admit("child"))
    ledger.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
ledger.finish(ledger.admit("parent"))
ledger.close()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_does_not_write_to_its_parents_log(tmp_path):
    done = run(FORKS, str(tmp_path / "log"))
    assert done.returncode == 0, done.stderr
    _, events = replayed(tmp_path / "log")
    assert [event.tag for event in events if event.verb == "admit"] == ["parent", "parent"]


CHILD_CLOSES = """
import os, sys
from specpool import Group, Ledger, RecordError
def build():
    group = Group("kv", page_size=4, num_pages=9)
    return Ledger([group], [], num_rows=1, max_context_len=16, record=sys.argv[1])
ledger = build()
ledger.admit()
child = os.fork()
if child == 0:
    ledger.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
try:
    build()
except RecordError as error:
    print(error)
ledger.close()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_that_closes_does_not_open_its_parents_log_to_others(tmp_path):
    done = run(CHILD_CLOSES, str(tmp_path / "log"))
    assert done.returncode == 0, done.stderr
    assert "another ledger is writing it" in done.stdout
    _, events = replayed(tmp_path / "log")
    assert [event.verb for event in events] == ["admit"]


def test_a_refused_call_is_not_recorded(tmp_path):
    path = tmp_path / "log"
    ledger = build(path)
    row = ledger.admit()
    refuses(ledger, SpecpoolError, ledger.prepare_decode, [row], [1])
    refuses(ledger, SpecpoolError, ledger.finish, 3)
    ledger.prepare_extend([row], [48])
    small = Ledger(
        [Group("kv", page_size=4, num_pages=5)], [], num_rows=2, max_context_len=16, digest=True
    )
    rows = [small.admit(), small.admit()]
    digest = small.digest
    refuses(small, OutOfPages, small.prepare_extend, rows, [16, 16])
    assert small.digest == digest
    ledger.close()
    ledger.close()
    refuses(ledger, OrderError, ledger.admit)
    _, events = replayed(path)
    assert [event.verb for event in events] == ["admit", "prepare_extend"]


# --- the command line


def test_replay_prints_every_event_and_the_summary(capsys, log):
    code, out, err = call(capsys, "replay", str(log))
    assert code == 0 and err == ""
    ledger, events = replayed(log)
    lines = out.splitlines()
    assert len(lines) == len(events) + 2
    assert lines[0].split(maxsplit=1) == ["1", "admit() -> row 1  # first"]
    steps = sum(event.plan is not None for event in events)
    assert f"{len(events)} events, {steps} steps, closed" in lines[-2]
    assert "events/s" in lines[-1] and f"{ledger.digest:016x}" in lines[-1]
    code, out, _ = call(capsys, "replay", "--quiet", str(log))
    assert code == 0 and len(out.splitlines()) == 2


def test_against_finds_the_first_step_that_differs(capsys, tmp_path):
    paths = [tmp_path / name for name in ("one.log", "two.log", "tags.log", "short.log", "big.log")]
    for number, path in enumerate(paths):
        ledger = build(path, **({"num_rows": 9} if number == 4 else {}))
        row = ledger.admit("one tag" if number != 2 else "another tag")
        for length in (5, 6 if number != 1 else 7, 9):
            step = ledger.prepare_extend([row], [length]).step
            ledger.launch(step)
        if number == 2:
            ledger.complete(step)
            ledger.snapshot()
        elif number != 3:
            ledger.complete(step)
        ledger.close()
    one, two, tags, short, big = map(str, paths)
    code, out, _ = call(capsys, "replay", one, "--against", one)
    assert code == 0 and out.startswith("the same: 8 events, 3 steps")
    code, out, _ = call(capsys, "replay", one, "--against", tags)
    assert code == 0, out
    code, out, err = call(capsys, "replay", one, "--against", two)
    assert code == 1 and err == ""
    assert "they differ from event 4 on, step 2" in out
    assert "prepare_extend([1], [6]) -> step 2" in out
    assert "prepare_extend([1], [7]) -> step 2" in out
    code, out, _ = call(capsys, "replay", short, "--against", one)
    assert code == 1 and "event 8 on, step 3" in out and "ends here: closed" in out
    code, out, _ = call(capsys, "replay", one, "--against", big)
    assert code == 1 and "num_rows: 4 in" in out and "num_rows: 9 in" in out


def test_replay_at_a_step_shows_rows_and_pools(capsys, log):
    code, out, err = call(capsys, "replay", str(log), "--at", "3")
    assert code == 0 and err == ""
    replay = Replay(log)
    while (event := replay.advance()).plan is None or event.step != 3:
        pass
    assert event.text in out
    for group in range(2):
        assert f"{replay.ledger.free_pages(group)} free" in out
    for row in event.rows:
        assert f"row {row}" in out
        assert f"resolved_len {replay.ledger.resolved_len[row]}" in out


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda data: data[:-20], "truncated"),
        (lambda data: data[:200] + b"?" + data[201:], "damaged"),
        (lambda data: b"", "truncated"),
        (lambda data: b"{}" * 50, "no event log"),
        (lambda data: data[:8] + b"\x63" + data[9:], "format version 99"),
        (None, "No such file"),
    ],
)
@pytest.mark.parametrize("command", [["replay"], ["replay", "--at", "999"], ["inspect"]])
def test_a_log_that_cannot_be_read_is_one_line_and_exit_code_2(
    capsys, log, tmp_path, command, damage, why
):
    path = tmp_path / "bad.log"
    if damage is not None:
        path.write_bytes(damage(log.read_bytes()))
    code, _, err = call(capsys, command[0], str(path), *command[1:])
    assert code == 2
    assert err.startswith("error: ") and why in err and len(err.splitlines()) == 1
    assert "bad.log" in err


def test_what_cannot_be_asked_is_exit_code_2(capsys, log):
    for options in (["--at", "999"], ["--at", "1", "--against", str(log)]):
        code, _, err = call(capsys, "replay", str(log), *options)
        assert code == 2 and len(err.splitlines()) == 1, err


def test_a_recorded_run_of_the_engine_replays(tmp_path, monkeypatch):
    """The README's way: what an engine did, run again without the model."""
    monkeypatch.setenv("SPECPOOL_RECORD", str(tmp_path / "run.log"))
    with Engine.from_pretrained("specpool/tiny", draft="specpool/tiny-eagle") as engine:
        engine.generate(["seq: 1, 2, 3,", "[min]"], SamplingParams(max_new_tokens=24))
    expected = engine.ledger.state_hash()
    (path,) = tmp_path.iterdir()
    ledger, events = replayed(path)
    assert log_reference.read(path.read_bytes()).records[-1].verb == "closed"
    verbs = {event.verb for event in events}
    assert {
        "admit",
        "index",
        "forget",
        "prepare_extend",
        "prepare_decode",
        "resolve",
        "finish",
    } <= verbs
    assert ledger.state_hash() == expected


def test_names_of_a_log_cannot_command_the_terminal_of_an_error(capsys, tmp_path):
    """A head that no ledger can be built from, by a group whose name clears the screen."""
    path = tmp_path / "log"
    group = Group("k\x1b[2Jv", page_size=4, num_pages=9)
    Ledger([group], [], num_rows=1, max_context_len=16, record=path).close()
    whole = bytearray(path.read_bytes())
    body = slice(10, 10 + whole[9])
    pages = whole.index(bytes([4, 9]), body.start) + 1
    whole[pages] = 1
    state = log_reference.over_bytes(log_reference.word(log_reference.START, 1), whole[body])
    whole[body.stop : body.stop + 4] = (state & 0xFFFF_FFFF).to_bytes(4, "little")
    path.write_bytes(whole)
    code, _, err = call(capsys, "replay", str(path))
    assert code == 2 and "num_pages must be at least" in err
    assert "\x1b" not in err and r"k\x1b[2Jv" in err


INSPECT = """
import resource, sys
from specpool.cli.app import main
import specpool.cli.commands, specpool.record.inspect
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (5 << 29), resource.RLIM_INFINITY))
sys.argv = ["specpool", "inspect", *sys.argv[1:]]
main()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit on memory is Linux's")
@pytest.mark.sample(1)
@pytest.mark.parametrize("form", ["terminal", "html"])
def test_a_few_bytes_of_a_log_cannot_ask_for_any_memory(tmp_path, form):
    """2^31 pages in 46 bytes, 2^24 rows in 45, 2^20 tokens in 85: what was touched is drawn."""
    asks = {
        "pages": (2**31 - 2, 1, 2, 0),
        "rows": (16, 2**24, 2, 2),
        "tokens": (2**21, 1, 2**20, 2**20),
    }
    for name, (num_pages, num_rows, length, tokens) in asks.items():
        path = tmp_path / f"{name}.log"
        group = Group("kv", page_size=1, num_pages=num_pages)
        with Ledger(
            [group], [], num_rows=num_rows, max_context_len=length, max_batch=1, record=path
        ) as ledger:
            if tokens:
                ledger.prepare_extend([ledger.admit()], [tokens])
        assert path.stat().st_size < 200
        options = ["--html", str(tmp_path / f"{name}.html")] if form == "html" else []
        done = run(INSPECT, str(path), *options)
        assert done.returncode == 0, done.stderr
        if form == "terminal" and name == "tokens":
            assert "1048576 slots, too many to draw" in " ".join(done.stdout.split())
