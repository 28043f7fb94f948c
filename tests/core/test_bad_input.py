"""Bad input at every verb: a Python exception that names it, the state hash unchanged, no panic."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ledger_kit import CHAIN, assert_all_back, end, extend, make, prefill, refuses, start
from specpool import (
    ConfigError,
    Group,
    Ledger,
    NotReady,
    OrderError,
    ShapeError,
    Snapshot,
    SpecpoolError,
)
from verb_table import METHODS

HUGE = [2**31, -(2**31) - 1, 2**32 + 1, 2**63, -(2**63) - 1, 2**64, 2**64 + 1, 2**80, -(2**80)]
NO_INTS = [1.0, float("nan"), None, "1", b"1", [1], (1,), {}, object(), np.array([1, 2]), 1j]


class Busy:
    """A ledger in which every verb could succeed: rows 1 to 4, steps, a prefix, a snapshot."""

    def __init__(self) -> None:
        groups = [
            Group("full", page_size=4, num_pages=60, hosts_drafts=True),
            Group("window", page_size=2, num_pages=120, window=8),
        ]
        options = {"overlap_depth": 2, "sessions": True}
        self.ledger = Ledger(groups, [CHAIN], num_rows=6, max_context_len=64, **options)
        ledger = self.ledger
        self.quiet = ledger.snapshot()
        self.ready, self.idle, self.flying = (prefill(ledger, length) for length in (9, 13, 17))
        ledger.end_turn(self.idle, 12)
        self.prefix = ledger.pin_prefix(self.ready, 8)
        self.lender = prefill(ledger, 5)
        ledger.lend(self.lender, 0, 4)
        self.lent = [int(page) for at in (0, 1) for page in ledger.lent_pages(at)]
        self.launched = start(ledger, self.flying)
        ledger.take_delta(self.launched)
        self.prepared = ledger.prepare_decode([self.flying], [1]).step


# Each verb with good arguments, and what each argument is.
VERBS: dict[str, tuple[Callable[[Busy], tuple], tuple[str, ...]]] = {
    "fork": (lambda b: (b.ready,), ("row",)),
    "pin_prefix": (lambda b: (b.ready, 4), ("row", "length")),
    "release_prefix": (lambda b: (b.prefix,), ("prefix",)),
    "export": (lambda b: (b.ready,), ("row",)),
    "import_row": (lambda b: (9, 4), ("length", "length")),
    "prefix_pages": (lambda b: (b.prefix, 0), ("prefix", "group")),
    "prefix_drafted_len": (lambda b: (b.prefix,), ("prefix",)),
    "lend": (lambda b: (b.ready, 0, 8), ("row", "length", "length")),
    "rebind": (lambda b: (b.ready, 0, 4, b.lent), ("row", "length", "length", "lent")),
    "admit_lent": (lambda b: (b.lent, 4), ("lent", "length")),
    "release_lent": (lambda b: (0, b.lent[:1]), ("group", "pages")),
    "lent_pages": (lambda b: (0,), ("group",)),
    "index": (lambda b: (b.ready, [1, 2, 3], b""), ("row", "tokens", "salt")),
    "match_prefix": (lambda b: ([1, 2, 3], b""), ("any tokens", "salt")),
    "admit_cached": (lambda b: ([1, 2, 3], b""), ("any tokens", "salt")),
    "forget": (lambda b: (b"",), ("salt",)),
    "cached_pages": (lambda b: (0,), ("group",)),
    "shared_pages": (lambda b: (0,), ("group",)),
    "held_cells": (lambda b: (0,), ("group",)),
    "prefix_len": (lambda b: (b.prefix,), ("prefix",)),
    "prepare_extend": (lambda b: ([b.ready], [12]), ("rows", "lengths")),
    "prepare_decode": (lambda b: ([b.ready], [1]), ("rows", "shapes")),
    "tokens_required": (lambda b: ([b.ready], [1]), ("rows", "shapes")),
    "pages_needed": (lambda b: (3, 9, 1), ("length", "length", "shape")),
    "pages_ahead": (lambda b: ([3], [1], 4), ("row lengths", "shapes", "length")),
    "held_pages": (lambda b: ([b.ready],), ("some rows",)),
    "tail_pages": (lambda b: (9,), ("length",)),
    "launch": (lambda b: (b.prepared,), ("step",)),
    "resolve": (lambda b: (b.launched, [1]), ("step", "accept_lens")),
    "complete": (lambda b: (b.launched,), ("step",)),
    "cancel": (lambda b: (b.prepared,), ("step",)),
    "abandon": (lambda b: (b.launched,), ("step",)),
    "take_delta": (lambda b: (b.launched,), ("step",)),
    "ack_delta": (lambda b: (b.launched,), ("step",)),
    "trim": (lambda b: (b.ready, 8), ("row", "length")),
    "end_turn": (lambda b: (b.ready, 8), ("row", "length")),
    "retract": (lambda b: (b.ready,), ("row",)),
    "finish": (lambda b: (b.ready,), ("row",)),
    "abort": (lambda b: (b.ready,), ("row",)),
    "page_record": (lambda b: (0, 1), ("group", "page")),
    "ownership_map": (lambda b: (0,), ("group",)),
    "page_table": (lambda b: (0,), ("group",)),
    "full_table": (lambda b: (0,), ("group",)),
    "allocated_len": (lambda b: (0,), ("group",)),
    "protected_len": (lambda b: (0,), ("group",)),
    "evicted_len": (lambda b: (0,), ("group",)),
    "free_pages": (lambda b: (0,), ("group",)),
    "fenced_pages": (lambda b: (0,), ("group",)),
    "reclaimable_pages": (lambda b: (0,), ("group",)),
    "row_width": (lambda b: (0,), ("group",)),
    "pages_per_row": (lambda b: (0,), ("group",)),
    "tag": (lambda b: (b.ready,), ("any row",)),
    "is_live": (lambda b: (b.ready,), ("any row",)),
    "checkpoint_len": (lambda b: (b.ready,), ("any row",)),
    "check_quiet": (lambda b: (b.ready,), ("row",)),
}
# Values that are of the right type and wrong all the same.
WRONG = {
    "row": [0, -1, 6, 7, 2**31 - 1, -(2**31)],
    "length": [-1, -(2**31)],
    "prefix": [0, 2, 2**63 - 1],
    "shape": [-1, 2, 2**31 - 1],
    "step": [0, -1, 99, 2**63 - 1],
    "group": [-1, 2, 2**31 - 1],
    "page": [0, -1, 61, 2**31 - 1],
    "any row": [],
    "rows": [[0], [-1], [6], [7], [2**31 - 1], [1, 1], [1, 2, 1], []],
    "some rows": [[0], [-1], [6], [7], [2**31 - 1], [1, 1], [1, 2, 1]],
    "row lengths": [[], [12, 13], [-1], [-(2**31)], [64], [2**31 - 1]],
    "lengths": [[], [12, 13], [9], [0], [-1], [-(2**31)], [65], [2**31 - 1]],
    "shapes": [[], [1, 1], [-1], [2], [2**31 - 1]],
    "accept_lens": [[], [1, 1], [0], [5], [-1], [2**31 - 1]],
    "tokens": [[], [1] * 10, [2**31], [-(2**31) - 1]],
    "any tokens": [[2**31], [-(2**31) - 1]],
    "lent": [[], [1], [1, 1, 1], [-1, 1, 2], [0, 1, 2], [61, 1, 2], [2**31, 1, 2]],
    "pages": [[0], [-1], [61], [59], [2**31 - 1], [2**31]],
    "salt": [b"x" * 257, b"x" * (1 << 20)],
}
ARRAYS = {"lent", "pages", "rows", "lengths", "shapes", "accept_lens", "tokens", "any tokens"}
ARRAYS |= {"some rows", "row lengths"}
NO_ARRAYS = [
    None,
    1,
    1.5,
    "1",
    {1: 2},
    {1},
    [1.5],
    ["1"],
    [None],
    [[1]],
    *([value] for value in HUGE),
    np.int32(1),
    np.array(1),
    np.array([[1]]),
    np.zeros((1, 0), np.int32),
    np.array([2**40]),
    np.array([-(2**63)]),
    *(np.array([1], kind) for kind in ("?", "i1", "i2", "u1", "u2", "u4", "u8", "f4", "f8", "c8")),
    np.array([1], ">i4"),
    np.array([1], ">i8"),
    np.array([1], object),
    np.array(["1"]),
    np.array([(1,)], [("row", np.int32)]),
    np.array([1], "m8[s]"),
    np.frombuffer(b"\0" + np.int32(1).tobytes(), np.uint8)[1:].view(np.int32),
]


def bad_arguments(kind: str) -> list:
    if kind in ARRAYS:
        return NO_ARRAYS + WRONG[kind]
    if kind == "salt":
        return [*HUGE, *(each for each in NO_INTS if not isinstance(each, bytes)), *WRONG[kind]]
    return HUGE + NO_INTS + WRONG[kind]


def numbers(value) -> list[str]:
    return re.findall(r"-?\d{2,}", str(value))


@pytest.mark.parametrize("verb", VERBS)
def test_a_bad_argument_is_refused_and_named(verb):
    arguments, kinds = VERBS[verb]
    for at, kind in enumerate(kinds):
        for bad in bad_arguments(kind):
            if verb == "forget" and bad is None:
                continue  # all salts
            if kind == "shapes" and type(bad) is int and bad == 1:
                continue  # one shape for all rows
            busy = Busy()
            good = list(arguments(busy))
            good[at] = bad
            expected = OrderError if kind == "step" else SpecpoolError
            error = refuses(busy.ledger, expected, getattr(busy.ledger, verb), *good)
            if isinstance(bad, int):
                assert str(bad) in str(error)
    busy = Busy()
    getattr(busy.ledger, verb)(*arguments(busy))
    busy.ledger.check()


@pytest.mark.parametrize("verb", VERBS)
def test_a_wrong_number_of_arguments_is_a_type_error(verb):
    busy = Busy()
    good = VERBS[verb][0](busy)
    if verb != "forget":  # without a salt it forgets all
        refuses(busy.ledger, TypeError, getattr(busy.ledger, verb))
    refuses(busy.ledger, TypeError, getattr(busy.ledger, verb), *good, 1, 2, 3)
    refuses(busy.ledger, TypeError, getattr(busy.ledger, verb), *good, no_such=1)


def test_admit_refuses_what_is_no_tag_no_prefix_and_no_length():
    busy = Busy()
    for tag in (1, b"a", ["a"], 1.5):
        refuses(busy.ledger, ShapeError, busy.ledger.admit, tag)
        refuses(busy.ledger, ShapeError, busy.ledger.fork, busy.ready, tag)
    for prefix in [*HUGE, 1.5, "1", [1], 0, -1, 2, object()]:
        error = refuses(busy.ledger, ShapeError, busy.ledger.admit, prefix=prefix)
        if isinstance(prefix, int):
            assert str(prefix) in str(error)
    for length in [*HUGE, 1.5, "1", [1], -1, 9, object()]:
        error = refuses(
            busy.ledger, ShapeError, busy.ledger.admit, prefix=busy.prefix, length=length
        )
        if isinstance(length, int):
            assert str(length) in str(error)
    refuses(busy.ledger, ShapeError, busy.ledger.admit, length=4, match="needs a prefix")
    error = refuses(busy.ledger, ShapeError, busy.ledger.admit, "\ud800")
    assert "text that UTF-8 can hold" in str(error)
    row = busy.ledger.admit("x" * 2**20, prefix=busy.prefix, length=0)
    assert busy.ledger.tag(row) == "x" * 2**20
    refuses(busy.ledger, ShapeError, busy.ledger.trim, row, -1, match="x" * 99)


@pytest.mark.parametrize("flag", [None, 1, "yes", [True]])
def test_flags_are_bools(flag):
    busy = Busy()
    for verb, last in (("prepare_extend", 12), ("prepare_decode", 1)):
        call = getattr(busy.ledger, verb)
        refuses(busy.ledger, TypeError, call, [busy.ready], [last], writes_draft=flag)


def test_arrays_may_be_strided_reversed_read_only_or_of_a_subclass():
    busy = Busy()
    for dtype in (np.int32, np.int64):
        rows = np.array([busy.ready, 0, busy.flying, 0], dtype)
        read_only = rows[::2].copy()
        read_only.setflags(write=False)
        expected = busy.ledger.tokens_required([busy.ready, busy.flying], [1, 0]).tolist()
        for given in (rows[::2], rows[2::-2][::-1], read_only, rows[::2].view(np.matrix).A1):
            assert busy.ledger.tokens_required(given, (1, 0)).tolist() == expected
        assert rows.tolist() == [busy.ready, 0, busy.flying, 0]
    plan = busy.ledger.prepare_decode(read_only, np.array([0, 1])[::-1])
    assert (plan.rows.tolist(), plan.shapes.tolist()) == ([busy.ready, busy.flying], [1, 0])


def test_a_plan_keeps_nothing_of_the_callers_arrays():
    ledger = make()
    rows = np.array([prefill(ledger, 5)])
    plan = ledger.prepare_decode(rows, [1])
    rows[0] = 99
    assert plan.rows.tolist() == [1]


@pytest.mark.parametrize(
    "batch", [[1] * 7, np.ones(10**6, np.int64), np.arange(1, 10**6, dtype=np.int32)]
)
def test_batches_beyond_max_batch_are_refused(batch):
    busy = Busy()
    match = rf"1..=6 rows, got {len(batch)}"
    refuses(busy.ledger, ShapeError, busy.ledger.prepare_decode, batch, batch, match=match)


def test_restore_takes_snapshots_of_a_ledger_built_alike_only():
    busy = Busy()
    for nothing in (None, 1, "snapshot", busy.ledger, object()):
        refuses(busy.ledger, TypeError, busy.ledger.restore, nothing)
    with pytest.raises(TypeError):
        Snapshot()  # type: ignore[call-arg]
    refuses(busy.ledger, NotReady, busy.ledger.restore, busy.quiet, match="is not over")
    refuses(busy.ledger, NotReady, busy.ledger.snapshot)
    ledger = make(overlap_depth=1)
    row = prefill(ledger, 9)
    for other in (
        make(overlap_depth=2),
        make(overlap_depth=1, num_rows=2),
        make(overlap_depth=1, page_size=2),
        make(overlap_depth=1, num_pages=40),
        make(overlap_depth=1, context=60),
        make(overlap_depth=1, policy="double_buffer"),
        make(overlap_depth=1, window=8),
        make(overlap_depth=1, draft_kv=False),
        make(overlap_depth=1, sessions=True),
        make(overlap_depth=1, max_chunk=9),
        make(overlap_depth=1, page_fencing=False),
    ):
        refuses(ledger, ConfigError, ledger.restore, other.snapshot(), match="built otherwise")
    twin = make(overlap_depth=1)
    ledger.restore(twin.snapshot())
    assert not ledger.is_live(row)
    assert_all_back(ledger)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("num_rows", [0, -1, 2**24 + 1, *HUGE]),
        ("max_context_len", [1, 0, -1, *HUGE]),
        ("max_batch", [0, -1, 4, *HUGE]),
        ("overlap_depth", [-1, *HUGE]),
        ("max_chunk", [0, -1, *HUGE]),
        ("row_width", [[0], [-4], [], [2**31], [2**63]]),
    ],
)
def test_impossible_numbers_of_a_ledger_are_config_errors(name, values):
    group = Group("kv", page_size=4, num_pages=100, hosts_drafts=True)
    build = {"num_rows": 3, "max_context_len": 64}
    for value in values:
        with pytest.raises(ConfigError) as caught:
            Ledger([group], [CHAIN], **{**build, name: value})
        assert not numbers(value) or set(numbers(value)) & set(numbers(caught.value))
    for value in (1.5, "3", object()):
        with pytest.raises((ConfigError, TypeError)):
            Ledger([group], [CHAIN], **{**build, name: value})


@pytest.mark.parametrize("name", ["draft_kv", "sessions", "page_fencing", "digest"])
def test_switches_of_a_ledger_are_bools(name):
    group = Group("kv", page_size=4, num_pages=100)
    for value in (None, 1, "yes"):
        with pytest.raises(TypeError):
            Ledger([group], [CHAIN], num_rows=1, max_context_len=9, **{name: value})


def test_impossible_windows_are_config_errors():
    for window in [0, -1, *HUGE]:
        with pytest.raises(ConfigError):
            Group("kv", page_size=4, num_pages=9, window=window)
    small = Group("kv", page_size=4, num_pages=6, window=16)
    build = {"num_rows": 1, "max_context_len": 64}
    with pytest.raises(ConfigError, match=r"num_pages must be at least 7, a window of 16 with 8"):
        Ledger([small], [CHAIN], max_chunk=8, **build)
    enough = Group("kv", page_size=4, num_pages=7, window=16)
    Ledger([enough], [CHAIN], max_chunk=8, **build)
    with pytest.raises(ConfigError, match=r"at least 12, .* and the 5 pages of a checkpoint"):
        Ledger([enough], [CHAIN], max_chunk=8, sessions=True, **build)


def test_extends_beyond_max_chunk_and_turns_without_sessions_are_refused():
    ledger = make(max_chunk=8, window=8)
    row = ledger.admit("request-7")
    refuses(ledger, ShapeError, ledger.prepare_extend, [row], [9], match="longer than max_chunk 8")
    extend(ledger, row, 8)
    refuses(ledger, ConfigError, ledger.end_turn, row, 8, match="window group kv")


# --- Closed ---


def test_a_closed_ledger_refuses_every_verb_and_stays_readable():
    busy = Busy()
    ledger = busy.ledger
    lengths, table = ledger.resolved_len, ledger.page_table(0)
    calls = {
        verb: (getattr(ledger, verb), arguments(busy)) for verb, (arguments, _) in VERBS.items()
    }
    calls |= {"admit": (ledger.admit, ()), "snapshot": (ledger.snapshot, ())}
    calls["restore"] = (ledger.restore, (busy.quiet,))
    before, resolved = ledger.state_hash(), lengths.tolist()
    ledger.close()
    ledger.close()
    assert ledger.closed
    refused = set()
    for verb, (call, arguments) in calls.items():
        try:
            call(*arguments)
        except OrderError as error:
            assert "closed" in str(error)
            refused.add(verb)
    assert refused == METHODS
    assert (ledger.state_hash(), lengths.tolist()) == (before, resolved)
    assert table[busy.ready, 0] != 0
    ledger.check()
    assert "Ledger(" in repr(ledger)


def test_a_ledger_closes_itself_behind_a_with_block():
    with make() as ledger:
        ledger.admit()
        assert not ledger.closed
    assert ledger.closed
    with pytest.raises(ZeroDivisionError), make() as other:
        raise ZeroDivisionError
    assert other.closed


def test_an_array_of_the_other_byte_order_is_named():
    refuses(make(), ShapeError, make().tokens_required, np.array([1], ">i4"), [0], match=">i4")


SHORT_OF_MEMORY = """
import resource
from specpool import Group, Ledger, OutOfMemory
group = Group("kv", page_size=1, num_pages=2**28)
ledger = Ledger([group], [], num_rows=256, max_context_len=2**20, max_batch=1)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 28), resource.RLIM_INFINITY))
before = ledger.state_hash()
try:
    ledger.snapshot()
except OutOfMemory as error:
    print(error)
try:
    ledger.full_table(0)
except MemoryError as error:
    print(error)
assert ledger.state_hash() == before
ledger.admit()
ledger.check()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit on memory is Linux's")
def test_a_shortage_of_memory_is_an_error_and_no_abort():
    done = subprocess.run(
        [sys.executable, "-c", SHORT_OF_MEMORY], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    snapshot, table = done.stdout.splitlines()
    assert snapshot == table == "no memory for a page table: 269484032 entries of 4 bytes"


# --- Objects that misbehave, re-entrance, threads ---


class Calls:
    """An int that runs some code when it is asked for its value."""

    def __init__(self, value: int, code: Callable[[], object]) -> None:
        self.value, self.code = value, code

    def __index__(self) -> int:
        self.code()
        return self.value


def as_arguments(kinds: tuple[str, ...], good: tuple, code: Callable[[], object]) -> list:
    """The good arguments, as objects that run `code`."""

    def wrapped(kind: str, value: Any) -> Any:
        if kind == "salt":  # bytes have no methods of ours
            return value
        return [Calls(each, code) for each in value] if kind in ARRAYS else Calls(value, code)

    return [wrapped(kind, value) for kind, value in zip(kinds, good, strict=True)]


@pytest.mark.parametrize("verb", sorted(VERBS.keys() - {"forget"}))
def test_a_call_from_inside_a_call_is_refused(verb):
    """`__index__` that changes the ledger: the inner call raises, the state stands."""
    arguments, kinds = VERBS[verb]
    busy = Busy()
    ledger, inner = busy.ledger, []

    def reenter() -> None:
        for call in (ledger.admit, ledger.close, lambda: ledger.finish(busy.ready)):
            with pytest.raises(RuntimeError, match=r"[Aa]lready") as caught:
                call()
            inner.append(caught.value)
        raise ZeroDivisionError

    call = getattr(ledger, verb)
    refuses(ledger, ZeroDivisionError, call, *as_arguments(kinds, arguments(busy), reenter))
    assert len(inner) == 3
    assert not ledger.closed


@pytest.mark.parametrize("verb", sorted(VERBS.keys() - {"forget"}))
def test_ctrl_c_inside_an_argument_stays_ctrl_c(verb):
    """An error that an argument's own method raises is not reported as a wrong argument."""
    arguments, kinds = VERBS[verb]
    busy = Busy()

    def interrupt() -> None:
        raise KeyboardInterrupt

    call = getattr(busy.ledger, verb)
    refuses(busy.ledger, KeyboardInterrupt, call, *as_arguments(kinds, arguments(busy), interrupt))


@pytest.mark.parametrize("verb", VERBS)
def test_an_object_whose_repr_raises_is_no_panic(verb):
    class Rude:
        def __repr__(self) -> str:
            raise ZeroDivisionError

    kinds = VERBS[verb][1]
    busy = Busy()
    refuses(busy.ledger, ZeroDivisionError, getattr(busy.ledger, verb), *[Rude() for _ in kinds])


def hammer(
    ledger: Ledger, seed: int, ready: threading.Barrier, collisions: list, strange: list
) -> None:
    """Any verb with any small numbers, whose values take their time."""
    rng = random.Random(seed)

    def slow(value: int) -> Calls:
        return Calls(value, lambda: time.sleep(0))

    ready.wait()
    for _ in range(300):
        verb = rng.choice([*VERBS, "admit"])
        kinds = VERBS[verb][1] if verb in VERBS else ()
        small = [rng.randint(0, 30) if kind == "length" else rng.randint(0, 6) for kind in kinds]
        given = [
            b"" if kind == "salt" else [slow(n)] if kind in ARRAYS else slow(n)
            for kind, n in zip(kinds, small, strict=True)
        ]
        try:
            getattr(ledger, verb)(*given)
        except SpecpoolError:
            pass
        except RuntimeError as error:
            (collisions if "lready" in str(error) else strange).append(error)
        except BaseException as error:
            strange.append(error)


def test_threads_that_hammer_one_ledger_corrupt_nothing():
    """A call while another runs is a RuntimeError, and nothing is half done."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        collisions, strange = [], []
        for seed in range(3):
            ledger = make(overlap_depth=1, num_rows=4, sessions=True)
            ready = threading.Barrier(4)
            threads = [
                threading.Thread(
                    target=hammer, args=(ledger, 10 * seed + at, ready, collisions, strange)
                )
                for at in range(4)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert strange == []
            ledger.check()
        assert collisions
    finally:
        sys.setswitchinterval(interval)


def test_a_call_in_another_thread_is_refused_while_one_runs():
    ledger = make()
    inside, done = threading.Event(), threading.Event()

    def wait() -> None:
        inside.set()
        assert done.wait(30)

    row = ledger.admit()
    running = threading.Thread(target=lambda: ledger.prepare_extend([Calls(row, wait)], [5]))
    running.start()
    assert inside.wait(30)
    errors = []
    for call in (ledger.admit, ledger.check, ledger.state_hash, lambda: ledger.resolved_len):
        with pytest.raises(RuntimeError, match="lready") as caught:
            call()
        errors.append(caught.value)
    done.set()
    running.join()
    assert len(errors) == 4
    assert ledger.resolved_len[row] == 5
    ledger.check()


def test_any_call_with_anything_leaves_a_clean_ledger():
    """5,000 calls with good and bad arguments mixed, an audit after each refusal."""
    rng = random.Random(11)
    busy = Busy()
    ledger, refused = busy.ledger, 0
    for _ in range(5000):
        verb = rng.choice([*VERBS, "admit"])
        kinds = VERBS[verb][1] if verb in VERBS else ()
        given = [rng.choice(bad_arguments(kind)) for kind in kinds]
        for at, kind in enumerate(kinds):
            if rng.random() < 0.9:
                few = [rng.randint(1, 6) for _ in range(rng.randint(1, 2))]
                newest = ledger.steps()[-1][0] if ledger.steps() else 1
                step = max(1, newest - rng.randint(0, 2))
                plain = {"length": rng.randint(0, 40), "step": step, "group": rng.randint(0, 1)}
                shapes = [rng.randint(0, 1) for _ in few]
                arrays = {"shapes": shapes, "lengths": [rng.randint(1, 40)], "rows": few[:1]}
                given[at] = plain.get(kind, arrays.get(kind, few if kind in ARRAYS else few[0]))
        before = ledger.state_hash()
        try:
            getattr(ledger, verb)(*given)
        except SpecpoolError:
            refused += 1
            assert ledger.state_hash() == before, (verb, given)
        ledger.check()
    assert 1000 < refused < 4900


def test_a_whole_run_leaves_nothing_behind():
    """The busy ledger itself is sound: all of it can be given back."""
    busy = Busy()
    ledger = busy.ledger
    ledger.cancel(busy.prepared)
    end(ledger, busy.launched, 1)
    ledger.release_prefix(busy.prefix)
    for row in (busy.ready, busy.idle, busy.flying, busy.lender):
        ledger.finish(row)
    for group in (0, 1):
        ledger.release_lent(group, ledger.lent_pages(group))
    assert_all_back(ledger)
