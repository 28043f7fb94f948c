"""Laws of attention on a CPU: the kernel that reads pages in place, and prompts lane by lane."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from specpool import _core  # noqa: E402
from specpool.engine.attention import AttentionView, attend  # noqa: E402
from specpool.engine.memory.scratch import Scratch  # noqa: E402
from specpool.errors import ShapeError  # noqa: E402


def oracle(case: dict[str, Any]) -> Any:
    """Attend for one query and one head at a time, in float64."""
    keys, values, q = (case[name].astype(np.float64) for name in ("keys", "values", "q"))
    heads, group, size = q.shape[1], q.shape[1] // keys.shape[1], case["page_size"]
    out, first = [], 0
    for lane, (kv_len, q_len) in enumerate(zip(case["kv_lens"], case["q_lens"], strict=True)):
        columns = np.arange(kv_len)
        slots = case["pages"][lane, columns // size].astype(np.int64) * size + columns % size
        for i in range(q_len):
            end = kv_len - q_len + i
            bias = np.where(columns <= end, 0.0, -np.inf)
            if case["window"] is not None:
                bias[columns <= end - case["window"]] = -np.inf
            if case["bias"] is not None:
                bias = case["bias"][lane, i, :kv_len].astype(np.float64)
            for head in range(heads):
                scores = keys[slots, head // group] @ q[first + i, head] * case["scaling"]
                if case["softcap"] is not None:
                    scores = np.tanh(scores / case["softcap"]) * case["softcap"]
                scores = scores + bias
                if case["sinks"] is not None:
                    scores = np.append(scores, case["sinks"][head])
                weights = np.exp(scores - scores.max())
                weights = (weights / weights.sum())[:kv_len]
                out.append(weights @ values[slots, head // group])
        first += q_len
    return np.array(out).reshape(first, heads, -1)


def random_case(seed: int) -> dict[str, Any]:
    """Lanes of unlike lengths on scattered pages; every second case has a bias."""
    rng, numbers = random.Random(seed), np.random.default_rng(seed)
    kv_heads, group = rng.choice([(1, 1), (2, 1), (2, 3), (3, 2)])
    k_dim, v_dim = rng.choice([(8, 8), (16, 12), (64, 64), (5, 70), (128, 33)])
    size, num_lanes = rng.choice([1, 3, 16]), rng.randint(1, 4)
    q_lens = np.array([rng.choice([0, 1, 1, 4, 9]) for _ in range(num_lanes)], np.int32)
    q_lens[0] = max(q_lens[0], 1)
    kv_lens = q_lens + np.array([rng.randint(0, 150) for _ in range(num_lanes)], np.int32)
    columns = -(-int(kv_lens.max()) // size)
    pages = numbers.permutation(num_lanes * columns).astype(np.int32).reshape(num_lanes, -1) + 1

    def normal(*shape: int) -> Any:
        return numbers.standard_normal(shape).astype(np.float32)

    num_slots = (num_lanes * columns + 1) * size
    bias = None
    if seed % 2:
        hidden = numbers.random((num_lanes, int(q_lens.max()), columns * size)) < 0.4
        hidden[:, :, 0] = False
        bias = np.where(hidden, -np.inf, normal(*hidden.shape)).astype(np.float32)
    num_written = rng.randint(0, 5)
    return {
        "keys": normal(num_slots, kv_heads, k_dim),
        "values": normal(num_slots, kv_heads, v_dim),
        "new_keys": normal(num_written, kv_heads, k_dim),
        "new_values": normal(num_written, kv_heads, v_dim),
        "write_slots": numbers.permutation(num_slots)[:num_written].astype(np.int64),
        "q": normal(int(q_lens.sum()), kv_heads * group, k_dim),
        "out": normal(int(q_lens.sum()), kv_heads * group, v_dim),
        "pages": pages,
        "kv_lens": kv_lens,
        "q_lens": q_lens,
        "page_size": size,
        "scaling": rng.choice([0.1, 1.0]),
        "bias": bias,
        "window": rng.choice([None, 1, 40]),
        "softcap": rng.choice([None, 2.0]),
        "sinks": rng.choice([None, normal(kv_heads * group)]),
    }


def run(case: dict[str, Any], **options: Any) -> Any:
    """Returns the result; the buffers of `case` are written."""
    names = ("keys", "values", "new_keys", "new_values", "write_slots", "q", "out", "pages")
    arrays = [case[name] for name in (*names, "kv_lens", "q_lens")]
    names = ("page_size", "scaling", "bias", "window", "softcap", "sinks")
    _core.attend_pages(*arrays, **{name: case[name] for name in names}, **options)
    return case["out"]


@pytest.mark.parametrize("seed", range(60))
def test_the_kernel_equals_the_oracle(seed: int) -> None:
    case = random_case(seed)
    keys, values = case["keys"].copy(), case["values"].copy()
    out = run(case)
    keys[case["write_slots"]], values[case["write_slots"]] = case["new_keys"], case["new_values"]
    np.testing.assert_array_equal(case["keys"], keys)
    np.testing.assert_array_equal(case["values"], values)
    np.testing.assert_allclose(out, oracle(case), atol=5e-6, rtol=0)


@pytest.mark.parametrize("num_lanes", [1, 5])
def test_threads_change_nothing(num_lanes: int) -> None:
    """Large enough that each has work: over 2 MiB are read for each of them."""
    case, numbers = random_case(0), np.random.default_rng(0)
    heads, dim, columns = 4, 64, 8192 // num_lanes
    case |= {
        "keys": numbers.standard_normal((columns + 1, heads, dim)).astype(np.float32),
        "values": numbers.standard_normal((columns + 1, heads, dim)).astype(np.float32),
        "new_keys": np.zeros((0, heads, dim), np.float32),
        "new_values": np.zeros((0, heads, dim), np.float32),
        "write_slots": np.zeros(0, np.int64),
        "q": numbers.standard_normal((num_lanes * 3, 2 * heads, dim)).astype(np.float32),
        "out": np.zeros((num_lanes * 3, 2 * heads, dim), np.float32),
        "pages": numbers.integers(1, columns, (num_lanes, columns), np.int32),
        "kv_lens": np.full(num_lanes, columns, np.int32),
        "q_lens": np.full(num_lanes, 3, np.int32),
        "page_size": 1,
        "window": None,
        "sinks": None,
    }
    alone = run(case).copy()
    for num_threads in (2, 3, 64):
        case["out"][:] = 0
        np.testing.assert_array_equal(run(case, num_threads=num_threads), alone)


def test_what_is_not_seen_is_not_read() -> None:
    """Columns beyond a lane's length may hold anything; what is no number and is seen shows."""
    case = random_case(2)
    case |= {"bias": None, "window": None, "new_keys": case["new_keys"][:0]}
    case |= {"new_values": case["new_values"][:0], "write_slots": case["write_slots"][:0]}
    expected = oracle(case)
    size = case["page_size"]
    seen = np.zeros(len(case["keys"]), bool)
    for lane, kv_len in enumerate(case["kv_lens"]):
        columns = np.arange(kv_len if case["q_lens"][lane] else 0)
        seen[case["pages"][lane, columns // size] * size + columns % size] = True
    for name in ("keys", "values"):
        case[name][~seen] = np.nan
    np.testing.assert_allclose(run(case), expected, atol=5e-6, rtol=0)
    slot = case["pages"][0, 0] * size
    for name in ("keys", "values"):
        spoiled = {**case, name: case[name].copy(), "out": case["out"].copy()}
        spoiled[name][slot] = np.nan
        assert np.isnan(run(spoiled)[: case["q_lens"][0]]).all(), name


WRONG = {
    "kv_lens": (lambda a: a + 1000, "kv_lens"),
    "pages": (lambda a: a + 10_000, "pages"),
    "q_lens": (lambda a: a + 1, "q_lens"),
    "write_slots": (lambda a: a - 10**6, "write_slots"),
    "q": (lambda a: a[..., :-1].copy(), "q must have shape"),
    "out": (lambda a: a[:, :-1].copy(), "out must have shape"),
    "values": (lambda a: a[:-1].copy(), "values must have shape"),
    "sinks": (lambda a: np.zeros(1, np.float32), "sinks"),
    "bias": (lambda a: np.zeros((9, 9, 9), np.float32), "bias"),
    "page_size": (lambda a: 0, "page_size"),
    "window": (lambda a: 0, "window"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused_and_nothing_is_written(name: str) -> None:
    change, message = WRONG[name]
    case = random_case(8)
    assert len(case["write_slots"]) and case["bias"] is None
    case[name] = change(case[name])
    before = {key: case[key].copy() for key in ("keys", "values", "out")}
    with pytest.raises(ShapeError, match=message):
        run(case)
    for key, array in before.items():
        np.testing.assert_array_equal(case[key], array)


WRITTEN = ("keys", "values", "out")
READ = ("new_keys", "new_values", "write_slots", "q", "pages", "kv_lens", "q_lens", "sinks")


@pytest.mark.parametrize("written", WRITTEN)
@pytest.mark.parametrize("other", [*WRITTEN, *READ, "bias"])
def test_arrays_that_share_memory_are_refused(written: str, other: str) -> None:
    """Views of one buffer that no array owns: numpy does not know that they overlap."""
    if written == other:
        return
    case = random_case(9 if other == "bias" else 8)
    case["sinks"] = np.zeros(case["q"].shape[1], np.float32)
    assert all(np.size(case[name]) for name in (written, other))
    first, second = case[written], case[other]
    memory = bytearray(first.nbytes + second.nbytes)
    for name, array, offset in ((written, first, 0), (other, second, first.nbytes - 8)):
        offset -= offset % 8
        case[name] = np.frombuffer(memory, array.dtype, array.size, offset).reshape(array.shape)
    case[written][:] = first
    case[other][:] = second
    before = bytes(memory)
    with pytest.raises(ShapeError, match="shares memory with another argument"):
        run(case)
    assert bytes(memory) == before


def test_arrays_that_cannot_be_written_or_do_not_lie_in_order_are_refused() -> None:
    for name in WRITTEN:
        case = random_case(8)
        case[name].flags.writeable = False
        with pytest.raises(ShapeError, match=f"{name} is written in place and must be writable"):
            run(case)
        case = random_case(8)
        case[name] = np.asfortranarray(case[name])
        with pytest.raises(ShapeError, match=f"{name} must be a C-contiguous 3-dim.*not contig"):
            run(case)
    for name in (*WRITTEN, *READ):
        case = random_case(8)
        case["sinks"] = np.zeros(case["q"].shape[1], np.float32)
        case[name] = np.repeat(case[name], 2, axis=0)[::2]
        if len(case[name]) > 1:  # else it is in order
            with pytest.raises(ShapeError, match=f"{name} must be a C-contiguous"):
                run(case)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_size": 0}, "page_size must be 1 or more, got 0"),
        ({"page_size": 2**70}, "a whole number of 64 bits"),
        ({"page_size": 2**62}, r"pages\[0, 0\] must be in \[0, 0\)"),
        ({"window": -1}, "window must be 1 or more, got -1"),
        ({"softcap": 0.0}, "softcap must be above 0, got 0"),
        ({"softcap": -2.0}, "softcap must be above 0, got -2"),
        ({"softcap": math.nan}, "softcap must be above 0, got NaN"),
    ],
    ids=str,
)
def test_numbers_that_make_no_sense_are_refused(change: dict[str, Any], message: str) -> None:
    case = random_case(8) | change
    before = {name: case[name].copy() for name in WRITTEN}
    with pytest.raises(ShapeError, match=message):
        run(case)
    for name, array in before.items():
        np.testing.assert_array_equal(case[name], array)


def test_sizes_of_nothing_are_refused_or_give_nothing() -> None:
    """An empty dimension ends neither in a division by zero nor in an endless loop."""
    for name in ("page_size", "kv_heads", "k_dim", "v_dim", "heads"):
        sizes = {"kv_heads": 1, "k_dim": 4, "v_dim": 4, "heads": 1, "page_size": 1} | {name: 0}
        with pytest.raises(ShapeError, match=f"{name} must be 1 or more, got 0"):
            run(tiny_case(**sizes))
    for sizes in ({"num_lanes": 0}, {"q_len": 0}, {"kv_len": 0, "q_len": 0, "num_slots": 0}):
        assert run(tiny_case(**sizes)).size == 0
    with pytest.raises(ShapeError, match=r"pages\[0, 0\] must be in \[0, 0\), got 0"):
        run(tiny_case(num_slots=0))
    with pytest.raises(ShapeError, match=r"kv_lens\[0\] must be in \[1, 0\], got 3"):
        run(tiny_case() | {"pages": np.zeros((1, 0), np.int32)})


def tiny_case(
    *,
    num_slots: int = 8,
    kv_heads: int = 1,
    heads: int = 1,
    k_dim: int = 4,
    v_dim: int = 4,
    num_lanes: int = 1,
    q_len: int = 1,
    kv_len: int = 3,
    page_size: int = 1,
) -> dict[str, Any]:
    """Ones everywhere, nothing to write; any size may be 0."""

    def ones(*shape: int) -> Any:
        return np.ones(shape, np.float32)

    return {
        "keys": ones(num_slots, kv_heads, k_dim),
        "values": ones(num_slots, kv_heads, v_dim),
        "new_keys": ones(0, kv_heads, k_dim),
        "new_values": ones(0, kv_heads, v_dim),
        "write_slots": np.zeros(0, np.int64),
        "q": ones(num_lanes * q_len, heads, k_dim),
        "out": ones(num_lanes * q_len, heads, v_dim),
        "pages": np.zeros((num_lanes, 4), np.int32),
        "kv_lens": np.full(num_lanes, kv_len, np.int32),
        "q_lens": np.full(num_lanes, q_len, np.int32),
        "page_size": page_size,
        "scaling": 1.0,
        "bias": None,
        "window": None,
        "softcap": None,
        "sinks": None,
    }


def test_numbers_without_bound_are_taken_as_they_are() -> None:
    case = tiny_case()
    for options in ({"window": 2**62}, {"scaling": math.inf}, {"scaling": math.nan}):
        out = run(case | options, num_threads=2**62)
        assert np.isnan(out).all() == ("scaling" in options)


NO_START = """
import os, resource, sys
sys.path.insert(0, {tests!r})
import numpy as np
from test_attend_pages import run, tiny_case

case = tiny_case(kv_heads=8, heads=8, k_dim=64, v_dim=64, num_slots=1 << 13)
case["pages"] = np.arange(1 << 13, dtype=np.int32)[None]
case["kv_lens"][:] = 1 << 13
expected, eaten = run(case, num_threads=1).copy(), [None] * (1 << 20)
stacks, rests = [n * (2 << 20) for n in (1, 2, 3)], range(128 << 10, 256 << 10, 8 << 10)
for room in [stack + rest for stack in stacks for rest in rests]:
    child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1] == 0, f"{{room}} bytes more"
        continue
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    limits = [(most, resource.RLIM_INFINITY) for most in (used, used + room)]
    resource.setrlimit(resource.RLIMIT_AS, limits[0])
    try:
        for i in range(len(eaten)):
            eaten[i] = bytes(1000)
    except MemoryError:
        resource.setrlimit(resource.RLIMIT_AS, limits[1])
    run(case, num_threads=8)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    os._exit(int((case["out"] != expected).any()))
"""

# In the process in which `NO_START` ran, whose own threads were none.
NO_THREADS = """
lanes, heads, columns = 64, 4, 1 << 14
case = tiny_case(num_lanes=lanes, kv_heads=heads, heads=heads, k_dim=16, v_dim=16)
case["pages"] = np.zeros((lanes, columns), np.int32)
case["kv_lens"][:] = columns
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (8 << 20), resource.RLIM_INFINITY))
out = run(case, num_threads=256)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert (out == 1).all()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit on memory is Linux's")
def test_threads_that_cannot_start_leave_their_work_to_the_others() -> None:
    """There is only room for the stacks of a few threads, or for the stacks and nothing else.

    A thread that the C library has no memory for at its start would end the process.
    """
    from pathlib import Path

    script = (NO_START + NO_THREADS).format(tests=str(Path(__file__).parent))
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=550
    )
    assert done.returncode == 0, done.stderr[-2000:]


def prompt_view(starts: list[int], q_lens: list[int], pages: Any, **options: Any) -> AttentionView:
    """Causal lanes whose lengths the host knows; a mask is not to be had."""
    size = 16
    slots = [
        int(pages[lane, p // size]) * size + p % size
        for lane, (start, q_len) in enumerate(zip(starts, q_lens, strict=True))
        for p in range(start, start + q_len)
    ]

    def no_mask(window: int | None) -> Any:
        raise AssertionError("a mask was built")

    return AttentionView(
        page_size=size,
        write_slots=torch.tensor(slots),
        read_pages=pages,
        q_lens=q_lens,
        mask_for=no_mask,
        kv_lens=np.array(starts, np.int32) + np.array(q_lens, np.int32),
        is_causal=True,
        **options,
    )


@pytest.mark.parametrize("shuffle", [True, False], ids=["scattered", "run"])
@pytest.mark.parametrize("dims", [(16, 16), (16, 8)], ids=["equal", "unlike"])
@pytest.mark.parametrize(
    ("starts", "q_lens"), [([0], [70]), ([37], [50]), ([0, 100, 16], [40, 3, 33])], ids=str
)
def test_prompts_need_no_mask(
    starts: list[int], q_lens: list[int], dims: tuple[int, int], shuffle: bool
) -> None:
    if any(starts) and dims[0] != dims[1]:
        pytest.skip("keys and values of unlike width are joined to a prefix with a mask")
    torch.manual_seed(0)
    num_lanes, columns = len(starts), 12
    order = torch.randperm(num_lanes * columns) if shuffle else torch.arange(num_lanes * columns)
    pages = (order + 1).view(num_lanes, columns)
    slots = (num_lanes * columns + 1) * 16
    keys, values = (torch.randn(slots, 2, dim) for dim in dims)
    q, k, v = (
        torch.randn(sum(q_lens), heads, dim)
        for heads, dim in ((6, dims[0]), (2, dims[0]), (2, dims[1]))
    )
    view = prompt_view(starts, q_lens, pages, scratch=Scratch())
    out = attend(view, keys, values, q, k, v, scaling=0.3)
    case = {
        "keys": keys.numpy(),
        "values": values.numpy(),
        "q": q.numpy(),
        "pages": pages.int().numpy(),
        "kv_lens": view.kv_lens,
        "q_lens": q_lens,
        "page_size": 16,
        "scaling": 0.3,
        "bias": None,
        "window": None,
        "softcap": None,
        "sinks": None,
    }
    np.testing.assert_allclose(out, oracle(case), atol=5e-6, rtol=0)


def test_few_queries_need_no_mask_and_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain decoding of lanes of unlike lengths on scattered pages."""
    pages = (torch.randperm(36) + 1).view(3, 12)
    view = prompt_view([5, 100, 17], [1, 1, 1], pages)
    view.write_slots = view.write_slots.repeat_interleave(2)[::2]  # as the steps of a chain have
    keys, values = (torch.randn(37 * 16, 2, 16) for _ in range(2))
    monkeypatch.setattr(AttentionView, "_build_reads", None)  # what gathers are made of
    q, k, v = (torch.randn(3, heads, 16) for heads in (4, 2, 2))
    out = attend(view, keys, values, q, k, v, scaling=0.3)
    assert torch.equal(keys[view.write_slots], k) and torch.equal(values[view.write_slots], v)
    assert out.shape == (3, 4, 16) and math.isfinite(out.sum())


def test_gathers_use_memory_that_is_kept() -> None:
    """In 16 bits pages are still gathered: into the same memory for every layer."""
    scratch = Scratch()
    pages = (torch.randperm(24) + 1).view(2, 12)
    found = set()
    for _ in range(3):
        keys, values = (torch.randn(25 * 16, 2, 16).bfloat16() for _ in range(2))
        reads = AttentionView(
            page_size=16,
            write_slots=torch.tensor([16, 32]),
            read_pages=pages,
            q_lens=1,
            mask_for=lambda window: torch.ones(2, 1, 12 * 16, dtype=torch.bool),
            scratch=scratch,
        ).reads(None, torch.bfloat16)
        gathered = reads.gather(keys, values, 2, 16)
        for buffer, rows in zip((keys, values), gathered, strict=True):
            expected = buffer.view(25, 16, 2, 16)[pages].flatten(1, 2).transpose(1, 2)
            assert torch.equal(rows, expected)
        found.add(tuple(rows.data_ptr() for rows in gathered))
    assert len(found) == 1
