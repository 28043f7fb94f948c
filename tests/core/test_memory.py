"""A shortage of memory is an error, never an abort; sizes of nothing are refused; the state stands.

`rust/specpool-core/tests/memory.rs` refuses every block of every call in turn; here are the calls
as Python makes them, each in a forked child, under a limit on its address space where it has one.
"""

import subprocess
import sys
import threading
from collections.abc import Callable

import numpy as np
import pytest

from specpool import Group, Ledger, _core
from specpool.errors import CorruptState, OutOfMemory, ShapeError, SpecpoolError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the limit on memory is Linux's")

SCRIPT = """
import ctypes, json, os, resource, sys
import numpy as np
from specpool import _core
from specpool._core import *
from specpool.errors import SpecpoolError

MB = 1 << 20
i32, i64 = np.int32, np.int64

def limit(num_bytes):
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + num_bytes, resource.RLIM_INFINITY))

def zeros(*shape, dtype=i32):
    return np.zeros(shape, dtype)

def full(number, *shape):
    return np.full(shape, number, i32)

def ledger(num_rows=2, length=4, digest=True):
    group = Group("kv", page_size=1, num_pages=1 << 25)
    return Ledger([group], [], num_rows=num_rows, max_context_len=length, digest=digest)

def busy(tokens):
    made = ledger(length=1 << 24)
    row = made.admit()
    made.launch(made.prepare_extend([row], [tokens]).step)
    return made

def refused(made, verb, *args):
    # The refusal must leave no trace.
    seen = lambda: (made.state_hash(), made.digest, made.steps(), made.prefixes, made.num_free_rows)
    before = seen()
    try:
        getattr(made, verb)(*args)
    except SpecpoolError:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert seen() == before, "it left a trace"
        made.check()
        raise

def limited(num_bytes, made, verb, *args):
    limit(num_bytes)
    refused(made, verb, *args)

def fork_many():
    made = busy(1 << 21)
    made.complete(1)
    limit(40 * MB)
    refused(made, "fork", 1)

def attend(heads, num_bytes, num_threads=1):
    # Keys of one number: the working memory is 32 times the queries.
    keys, values = zeros(8, heads, 1, dtype=np.float32), zeros(8, heads, 1, dtype=np.float32)
    new, q, out = (np.ones((n, heads, 1), np.float32) for n in (1, 8, 8))
    limit(num_bytes)
    try:
        attend_pages(keys, values, new, new, zeros(1, dtype=i64), q, out, zeros(1, 8), full(8, 1),
                     full(8, 1), page_size=1, scaling=1.0, num_threads=num_threads)
    except SpecpoolError:
        assert not keys.any() and not values.any() and (out == 1).all(), "it left a trace"
        raise

CASES = {
"build_tree": lambda: build_tree(zeros(2**40, 0, dtype=i64), zeros(2**40, 0, dtype=i64), topk=1),
"build_tree of no lane": lambda: build_tree(
    zeros(0, 2**40, dtype=i64), zeros(0, 2**40, dtype=i64), topk=1),
"tree_from_parents": lambda: (limit(256 * MB), tree_from_parents(
    np.arange(-1, (1 << 15) - 1, dtype=i32)[None])),
"verify_tree": lambda: (limit(1024 * MB), verify_tree(
    zeros(1000, 1, dtype=i64), full(-1, 1000, 1), full(-1, 1000, 1), zeros(1000, 1, dtype=i64),
    num_steps=1 << 20)),
"slot_ranges": lambda: (limit(2048 * MB), slot_ranges(
    full(1, 2, 1), 1 << 29, full(1, 1), zeros(1), full(1 << 29, 1))),
"attention_bias": lambda: (limit(1024 * MB), attention_bias(full(1, 1), full(1, 1), 1 << 29)),
"attention_mask": lambda: (limit(256 * MB), attention_mask(full(1, 1), full(1, 1), 1 << 29)),
"attention_mask of no lane": lambda: attention_mask(
    zeros(0), zeros(0), 4, own_mask=zeros(0, 2**60, 0, dtype=bool)),
"page_csr": lambda: (limit(512 * MB), page_csr(
    full(1, 2, 1 << 24), 1, full(1, 64), full(1 << 24, 64))),
"prefix_tail_moves": lambda: (limit(1024 * MB), prefix_tail_moves(
    np.arange(16, dtype=i32).reshape(2, 8), 1 << 27, full(1, 1), full((1 << 27) - 1, 1),
    num_steps=1, topk=8)),
"draft_write_positions": lambda: (limit(1024 * MB), draft_write_positions(
    zeros(1000), num_steps=1 << 10, topk=1 << 10, page_size=1, layout="dense")),
"attend_pages": lambda: attend(1 << 20, 512 * MB),
"attend_pages by threads": lambda: attend(1 << 20, 512 * MB, 8),
"moves of many slots": lambda: move_slots(
    [(zeros(0, 2**40, 4, dtype=np.uint8), [4])], zeros(1, dtype=i64), zeros(1, dtype=i64)),
"widths without end": lambda: move_slots(
    [(zeros(1, 1, 1, dtype=np.uint8), range(2**40))], zeros(0, dtype=i64), zeros(0, dtype=i64)),
"shapes without end": lambda: Ledger([Group("kv", page_size=1, num_pages=9)], range(2**40),
    num_rows=1, max_context_len=4),
"groups without end": lambda: Ledger(range(2**40), [], num_rows=1, max_context_len=4),
"lanes without end": lambda: refused(ledger(), "resolve", 1, range(2**40)),
"lanes of one number": lambda: refused(
    ledger(), "resolve", 1, np.broadcast_to(i32(1), 2**40)),
"lanes of one long number": lambda: refused(
    ledger(), "resolve", 1, np.broadcast_to(i64(1), 2**40)),
"audit of rows": lambda: limited(10 * MB, ledger(1 << 20), "audit"),
"audit of pages": lambda: limited(20 * MB, busy(1 << 22), "audit"),
"check": lambda: limited(20 * MB, busy(1 << 22), "check"),
"snapshot of rows": lambda: limited(60 * MB, ledger(1 << 20), "snapshot"),
"ownership_map": lambda: limited(60 * MB, ledger(), "ownership_map", 0),
"full_table": lambda: limited(20 * MB, ledger(1 << 10, 1 << 15), "full_table", 0),
"take_delta": lambda: limited(30 * MB, busy(1 << 22), "take_delta", 1),
"admit": lambda: limited(60 * MB, ledger(), "admit", "t" * (100 * MB)),
"fork": fork_many,
"prepare_extend": lambda: (made := ledger(length=1 << 24), made.admit(),
    limited(60 * MB, made, "prepare_extend", [1], [1 << 23])),
"Ledger": lambda: (limit(256 * MB), ledger(1 << 24, 64)),
}

answers = {}
for name, case in CASES.items():
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            case()
            answer = ["nothing", ""]
        except BaseException as error:
            names = [kind.__name__ for kind in type(error).__mro__]
            answer = [names, str(error)[:400]]
        os.write(writer, json.dumps(answer).encode())
        os._exit(0)
    os.close(writer)
    text = os.fdopen(reader).read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    answers[name] = json.loads(text) if text else ["died", str(status)]
print(json.dumps(answers))
"""

NO_MEMORY = {
    "tree_from_parents": "a tree's mask: 1073741824 entries of 1 bytes",
    "verify_tree": "accept_index: 1048577000 entries of 4 bytes",
    "slot_ranges": "slots: 536870912 entries of 8 bytes",
    "attention_bias": "an attention mask: 536870912 entries of 4 bytes",
    "attention_mask": "an attention mask: 536870912 entries of 1 bytes",
    "attend_pages": "attention: 268435456 entries of 4 bytes",
    "attend_pages by threads": "attention: ",
    "page_csr": "kv_indices: 1073741824 entries of 4 bytes",
    "prefix_tail_moves": "moves: ",
    "draft_write_positions": "draft positions: 1048576000 entries of 4 bytes",
    "audit of rows": "an audit of ",
    "audit of pages": "an audit of pages: 4194305 entries of 12 bytes",
    "check": "an audit of pages: 4194305 entries of 12 bytes",
    "snapshot of rows": " entries of ",
    "ownership_map": "an ownership map: 33554433 entries of ",
    "full_table": "a page table: ",
    "take_delta": "a table delta: 4194304 entries of 4 bytes",
    "admit": "a tag: 104857728 entries of 1 bytes",
    "fork": " entries of ",
    "prepare_extend": "the ownership map: 8388609 entries of 48 bytes",
    "Ledger": " entries of ",
}
TOO_LARGE = {
    "build_tree": "is too large: at most 2^31 - 1 fit",
    "build_tree of no lane": "is too large",
    "attention_mask of no lane": "is too large: at most 2^31 - 1 fit",
    "moves of many slots": "is too large: at most 2^31 - 1 fit",
    "lanes without end": "accept_lens has 1099511627776 entries, at most 16777216 are",
    "lanes of one number": "accept_lens has 1099511627776 entries, at most 16777216 are",
    "shapes without end": "a list has 1099511627776 entries, at most 16777216 are taken",
    "groups without end": "a list has 1099511627776 entries, at most 16777216 are taken",
    "widths without end": "a list has 1099511627776 entries, at most 16777216 are taken",
    "lanes of one long number": "accept_lens has 1099511627776 entries, at most 16777216",
}


@pytest.fixture(scope="module")
def answers() -> dict[str, list]:
    import json

    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False, timeout=550
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", NO_MEMORY)
def test_a_call_without_memory_is_a_memory_error_with_the_numbers(answers, case):
    kinds, text = answers[case]
    assert kinds[:2] == ["OutOfMemory", "SpecpoolError"] and "MemoryError" in kinds, (kinds, text)
    assert text.startswith("no memory for ") and NO_MEMORY[case] in text


@pytest.mark.parametrize("case", TOO_LARGE)
def test_sizes_that_no_array_can_have_are_refused_before_anything_is_sized(answers, case):
    kinds, text = answers[case]
    assert kinds[0] == "ShapeError" and TOO_LARGE[case] in text, (kinds, text)


def answers_at_once(call: Callable[[], object]) -> None:
    """Runs the call in a thread: one that never ends fails the test, and not the run."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()


def test_moves_in_buffers_without_a_byte_end_at_once():
    empty, none = np.zeros((2**40, 0, 4), np.uint8), np.zeros(0, np.int64)
    answers_at_once(lambda: _core.move_slots([(empty, [4])], none, none))
    answers_at_once(lambda: _core.scatter_slots([(empty, [4])], none, [empty.copy()]))
    answers_at_once(
        lambda: _core.move_slots([(np.zeros((0, 2**40, 4), np.uint8), [4])], none, none)
    )
    ancestors, parents = np.zeros((0, 2**38, 2**20), np.int32), np.zeros((0, 2**38), np.int32)
    answers_at_once(lambda: _core.advance_ancestors(ancestors, parents, 0))


def test_a_scatter_is_all_buffers_or_none():
    first, second = np.zeros((1, 4, 2), np.uint8), np.zeros((1, 4, 2), np.uint8)
    slots, values = np.array([1], np.int64), np.ones((1, 1, 2), np.uint8)
    with pytest.raises(ShapeError, match="values must have shape"):
        _core.scatter_slots(
            [(first, [2]), (second, [2])], slots, [values, np.ones((1, 2, 2), np.uint8)]
        )
    # Fits the array, but not the slots of the layout: only the core sees it.
    with pytest.raises(ShapeError):
        _core.scatter_slots([(first, [2]), (second, [3])], slots, [values, values])
    assert not first.any() and not second.any()


def views(*shapes: tuple[tuple[int, ...], type, int]) -> list[np.ndarray]:
    """Arrays on one buffer that no array owns, each from its own byte on."""
    memory = bytearray(1 << 12)
    return [
        np.frombuffer(memory, dtype, int(np.prod(shape)), offset).reshape(shape)
        for shape, dtype, offset in shapes
    ]


def test_arrays_that_share_memory_are_refused_whatever_they_are_views_of():
    """`apply_table_delta` read rows that it had just written, and panicked half way."""
    i32, i64, f32, u8 = np.int32, np.int64, np.float32, np.uint8
    ones = np.ones(4, i32)
    table, rows = views(((2, 8), i32, 0), ((4,), i32, 32))
    rows[:] = 1
    before = table.copy()
    shares = "shares memory with another argument"
    with pytest.raises(ShapeError, match=shares):
        _core.apply_table_delta(table, rows, np.arange(4, dtype=i32), ones)
    assert np.array_equal(table, before)
    ancestors, parents = views(((1, 2, 3), i32, 0), ((1, 2), i32, 20))
    with pytest.raises(ShapeError, match=shares):
        _core.advance_ancestors(ancestors, parents, 0)
    one, two = views(((1, 4, 2), u8, 0), ((1, 4, 2), u8, 7))
    slots = np.array([1], i64)
    with pytest.raises(ShapeError, match=shares):
        _core.move_slots([(one, [2]), (two, [2])], slots, slots)
    bytes_, src = views(((1, 8, 2), u8, 0), ((1,), i64, 8))
    with pytest.raises(ShapeError, match=shares):
        _core.move_slots([(bytes_, [2])], src, slots)
    with pytest.raises(ShapeError, match=shares):
        _core.scatter_slots([(one, [2])], slots, [two[:, :1]])
    scores, tokens, kept = views(((1, 4), f32, 0), ((1, 4), i64, 8), ((1, 5), i64, 64))
    p, index = np.full((1, 4), 0.5, f32), np.zeros((1, 4), i64)
    with pytest.raises(ShapeError, match=shares):
        _core.select_topk(0, p, index, None, scores, tokens, kept)
    page_table, out = views(((2, 8), i32, 0), ((64,), i32, 60))
    with pytest.raises(ShapeError, match=shares):
        _core.draft_read_indices(
            page_table, 4, ones[:1], ones[:1], num_steps=1, topk=1, step=0, layout="dense", out=out
        )
    # Neighbours are no overlap.
    table, rows = views(((2, 8), i32, 0), ((4,), i32, 64))
    rows[:] = 1
    _core.apply_table_delta(table, rows, np.arange(4, dtype=i32), ones)
    assert table[1, :4].tolist() == [1, 1, 1, 1]


def test_a_panic_is_one_error_and_the_ledger_is_never_used_again():
    """A stray write makes a verb panic half way: no later verb works on what it left."""
    import ctypes

    group = Group("kv", page_size=4, num_pages=64)
    ledger = Ledger([group], [], num_rows=4, max_context_len=64)
    row = ledger.admit()
    ledger.launch(ledger.prepare_extend([row], [5]).step)
    in_flight = ledger.in_flight
    ctypes.c_int32.from_address(in_flight.ctypes.data + 4 * row).value = -(1 << 20)
    with pytest.raises(CorruptState, match="panicked"):
        ledger.prepare_decode([row], [0])
    with pytest.raises(CorruptState, match="can only be closed"):
        ledger.admit()
    ledger.close()


def test_the_error_is_a_specpool_error_and_a_memory_error():
    error = OutOfMemory("no memory for a tag: 9 entries of 1 bytes", 9)
    assert isinstance(error, SpecpoolError) and isinstance(error, MemoryError)
    assert error.num_bytes == 9
