"""Ten planted bugs: the check build finds each in every order; the correct kernels are clean."""

import numpy as np
import pytest
import torch

import cuda_host
from cuda_host import (
    CHECK,
    FAST,
    DivergenceError,
    MisalignedError,
    OutOfBoundsError,
    RaceError,
    UninitialisedError,
    pointer_table,
    register,
)
from planted_kernels import PLANTED, line_of, move_rows, prefix_sum

pytestmark = pytest.mark.skipif(bool(cuda_host.unavailable()), reason=cuda_host.unavailable())

runs = pytest.mark.parametrize(("kind", "order"), FAST + CHECK)
kinds = pytest.mark.parametrize("kind", ["fast", "check"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.uint8])
@kinds
def test_move_rows_of_any_dtype_through_a_table(kind, dtype):
    rng = np.random.default_rng(1)
    layers = [torch.arange(24 * 64).reshape(24, 64).to(dtype) + k for k in range(3)]
    row_bytes = layers[0][0].nbytes
    slots = rng.permutation(24).astype(np.int32)
    src, dst = slots[:5], slots[5:10]
    expected = [layer.clone() for layer in layers]
    for layer in expected:
        layer[torch.from_numpy(dst).long()] = layer[torch.from_numpy(src).long()]
    for order in ("forward", "reverse", 3):
        kernel = move_rows(kind, order)
        moved = [layer.clone() for layer in layers]
        args = (src, dst, np.int32(5), np.int64(row_bytes), np.int64(row_bytes))
        with register(*moved, name="kv"):
            kernel((2, 3), (32,), (pointer_table(moved), *args))
        assert all(torch.equal(a, b) for a, b in zip(moved, expected, strict=True))


@runs
@pytest.mark.parametrize(("n", "block"), [(1, 32), (31, 64), (1000, 256), (5000, 1024)])
def test_prefix_sum(kind, order, n, block):
    lens, offsets, total = prefix_sum(kind, order, n=n, block=block)
    assert np.array_equal(offsets, np.cumsum(lens) - lens)
    assert total[0] == lens.sum()


# --- ten planted bugs ---------------------------------------------------------------------------


def planted_move(flag, order):
    """Three rows of 64 bytes; the kernel gets only their six slots."""
    pool = np.arange(16 * 64, dtype=np.int32).astype(np.uint8).reshape(16, 64)
    src, dst = np.array([2, 5, 8], np.int32), np.array([11, 0, 15], np.int32)
    kernel = move_rows("check", order, flag)
    args = (src, dst, np.int32(3), np.int64(64), np.int64(64))
    with (
        register(*(pool[s] for s in src), name="source", read_only=True),
        register(*(pool[s] for s in dst), name="target"),
    ):
        kernel((3,), (32,), (pointer_table([pool]), *args))


MOVES = {
    "TOO_FAR": OutOfBoundsError,
    "WRONG_SOURCE": OutOfBoundsError,
    "MISALIGNED": MisalignedError,
}
# In some orders the warp that scans comes before one that has written nothing yet.
SUMS = {
    "NO_BARRIER_BEFORE_SCAN": ((RaceError, UninitialisedError), "lane < num_warps ? warp_sum"),
    "NO_BARRIER_AFTER_TILE": (RaceError, ""),
    "READ_AFTER_BARRIER": (RaceError, "tile_base[0] += warp_sum"),
    "SHARED_INDEX": (OutOfBoundsError, "warp_sum[lane + 1] = sum"),
    "UNINITIALISED": (UninitialisedError, "int sum = warp_sum[lane];"),
    "DIVERGENT_BARRIER": (DivergenceError, "if (threadIdx.x < 32) __syncthreads();"),
    "DIVERGENT_SHUFFLE": (DivergenceError, "if (lane >= d) v += __shfl_up_sync"),
}


def test_there_are_ten_planted_bugs():
    assert len(MOVES) + len(SUMS) == 10


@pytest.mark.parametrize("order", ["forward", "reverse", 7])
@pytest.mark.parametrize("bug", MOVES)
def test_planted_bug_in_a_move(bug, order):
    with pytest.raises(MOVES[bug]) as caught:
        planted_move(f"-DBUG_{bug}", order)
    line = line_of(PLANTED / "move_rows.cu", "from[v", f"BUG_{bug})")
    assert caught.value.places[0] == ("move_rows.cu", line)


@pytest.mark.parametrize("order", ["forward", "reverse", 7])
@pytest.mark.parametrize("bug", SUMS)
def test_planted_bug_in_a_prefix_sum(bug, order):
    error, text = SUMS[bug]
    with pytest.raises(error) as caught:
        prefix_sum("check", order, f"-DBUG_{bug}")
    file = PLANTED / "prefix_sum.cu"
    if text:
        assert line_of(file, text) in caught.value.lines
    else:  # the next tile's writes against this one's reads: of the base or of a warp's sum
        pairs = [("tile_base[0] + (warp", "tile_base[0] += tile_total")]
        pairs += [("tile_total = warp_sum", "warp_sum[warp] = inclusive")]
        pairs += [("(warp ? warp_sum[warp - 1]", "warp_sum[warp] = inclusive")]
        assert caught.value.lines in [{line_of(file, a), line_of(file, b)} for a, b in pairs]


def test_the_fast_build_shows_some_of_them_in_the_result():
    lens, offsets, _ = prefix_sum("fast", "forward", "-DBUG_NO_BARRIER_BEFORE_SCAN")
    assert not np.array_equal(offsets, np.cumsum(lens) - lens)
    with pytest.raises(DivergenceError):
        prefix_sum("fast", "forward", "-DBUG_DIVERGENT_SHUFFLE")
