"""Laws of the torch attention back end: over pages it equals a slow dense oracle."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from families import PagedLanes  # noqa: E402
from fused_kit import reading  # noqa: E402
from specpool.engine.attention import AttentionView, attend  # noqa: E402
from specpool.engine.memory.kv_cache import LayerKV  # noqa: E402
from specpool.errors import ShapeError  # noqa: E402


def oracle(
    lanes: PagedLanes,
    visible: Any,
    q_lens: list[int],
    q: Any,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: Any = None,
) -> Any:
    """Attend for one query and one head at a time, in float64; `visible` is [B, Q, columns]."""
    keys, values = (buffer.double() for buffer in lanes.buffers[0])
    group = q.shape[1] // keys.shape[1]
    rows = []
    for lane, q_len in enumerate(q_lens):
        for i in range(q_len):
            slots = [lanes.slot(lane, j) for j in torch.where(visible[lane, i])[0].tolist()]
            heads = []
            for head in range(q.shape[1]):
                query = q[len(rows), head].double()
                scores = keys[slots, head // group] @ query * scaling
                if softcap is not None:
                    scores = torch.tanh(scores / softcap) * softcap
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head : head + 1].double()])
                weights = torch.softmax(scores, 0)[: len(slots)]
                heads.append(weights @ values[slots, head // group])
            rows.append(torch.stack(heads))
    return torch.stack(rows)


def make_lanes(page_size: int, num_lanes: int, *, kv_heads: int = 2, **options: Any) -> PagedLanes:
    return PagedLanes([LayerKV(kv_heads, 8, 12, None)], page_size, num_lanes, **options)


def random_qkv(num_tokens: int, heads: int, kv_heads: int, seed: int = 0) -> tuple[Any, Any, Any]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((heads, 8), (kv_heads, 8), (kv_heads, 12))
    return tuple(torch.randn(num_tokens, *shape, generator=generator) for shape in shapes)


CASES = {  # starts, q_lens
    "decode": ([5, 21, 0], [1, 1, 1]),
    "one_lane": ([9], [4]),
    "equal": ([3, 17], [4, 4]),
    "ragged": ([0, 11, 30], [7, 1, 3]),
    "an_empty_lane": ([4, 6, 2], [2, 0, 1]),
    "long": ([0, 2], [40, 35]),  # past the limit up to which heads are folded
}


@pytest.mark.sample(54)
@pytest.mark.parametrize("extras", [{}, {"softcap": 2.0}, {"sinks": True}], ids=str)
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("case", CASES)
def test_attend_equals_the_dense_oracle(
    case: str, page_size: int, group: int, extras: dict[str, Any]
) -> None:
    starts, q_lens = CASES[case]
    lanes = make_lanes(page_size, len(starts))
    q, k, v = random_qkv(sum(q_lens), 2 * group, 2)
    extras = dict(extras)
    if "sinks" in extras:
        extras["sinks"] = torch.linspace(-2, 2, 2 * group)
    for window in (None, 5):
        batch, _ = lanes.batch(starts, q_lens)
        view = batch.views[0]
        out = attend(view, *lanes.buffers[0], q, k, v, scaling=0.7, window=window, **extras)
        visible = view.mask_for(window)
        expected = oracle(lanes, visible, q_lens, q, scaling=0.7, **extras)
        assert out.shape == (sum(q_lens), 2 * group, 12) and out.dtype == torch.float32
        torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=0)


def test_any_mask_is_followed() -> None:
    """Trees: what a query sees is the mask's business alone; a NumPy mask will do."""
    lanes = make_lanes(3, 2)
    q, k, v = random_qkv(8, 4, 2)
    batch, _ = lanes.batch([5, 9], [4, 4])
    view = batch.views[0]
    choose = torch.Generator().manual_seed(1)
    visible = torch.rand(2, 4, view.read_pages.shape[1] * 3, generator=choose) < 0.5
    visible[:, :, 0] = True
    view.mask_for = lambda window: visible.numpy()
    out = attend(view, *lanes.buffers[0], q, k, v, scaling=0.7)
    expected = oracle(lanes, visible, [4, 4], q, scaling=0.7)
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_only_the_write_slots_are_written(page_size: int) -> None:
    lanes = make_lanes(page_size, 3)
    before = [buffer.clone() for buffer in lanes.buffers[0]]
    q, k, v = random_qkv(11, 4, 2)
    batch, _ = lanes.batch([0, 11, 30], [7, 1, 3])
    attend(batch.views[0], *lanes.buffers[0], q, k, v, scaling=1.0)
    for old, buffer, new in zip(before, lanes.buffers[0], (k, v), strict=True):
        old[batch.views[0].write_slots] = new
        assert torch.equal(buffer, old)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("shuffle", [True, False], ids=["shuffled", "run"])
@pytest.mark.parametrize("num_lanes", [1, 3])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_decode_len_gives_what_the_mask_gives(
    page_size: int, num_lanes: int, shuffle: bool, softcap: float | None
) -> None:
    q, k, v = random_qkv(num_lanes, 4, 2)
    for length in (1, 15, 16, 17, 33):
        for window in (None, 1, 5, 16):
            results = []
            for decode_len, reader in (
                (None, None),
                (length, None),
                (length, reading([], page_size)),
            ):
                lanes = make_lanes(page_size, num_lanes, shuffle=shuffle, seed=length)
                torch.manual_seed(0)
                for buffer in lanes.buffers[0]:
                    buffer.normal_()
                starts, ones = [length - 1] * num_lanes, [1] * num_lanes
                batch, _ = lanes.batch(starts, ones, decode_len=decode_len)
                view = batch.views[0]
                view.reader, view.read_pages = reader, view.read_pages.int()
                results.append(
                    attend(
                        view,
                        *lanes.buffers[0],
                        q,
                        k,
                        v,
                        scaling=0.7,
                        window=window,
                        softcap=softcap,
                    )
                )
            for result in results[1:]:
                torch.testing.assert_close(results[0], result, atol=2e-6, rtol=0)


def test_what_lies_past_decode_len_cannot_poison() -> None:
    lanes = make_lanes(4, 1)
    q, k, v = random_qkv(1, 4, 2)
    batch, _ = lanes.batch([5], [1], decode_len=6)
    for buffer in lanes.buffers[0]:
        buffer[lanes.slot(0, 6)] = math.nan
        buffer[lanes.slot(0, 1)] = math.nan
    assert attend(batch.views[0], *lanes.buffers[0], q, k, v, scaling=1.0).isnan().all()
    out = attend(batch.views[0], *lanes.buffers[0], q, k, v, scaling=1.0, window=4)
    assert out.isfinite().all()


def test_pages_in_a_run_are_read_in_place() -> None:
    for shuffle, in_place in ((False, True), (True, False)):
        lanes = make_lanes(4, 1, shuffle=shuffle)
        batch, _ = lanes.batch([17], [2])
        reads = batch.views[0].reads(None, torch.float32)
        keys, _ = reads.gather(*lanes.buffers[0], 1, 4)
        assert keys.shape == (1, 2, 20, 8)
        base = lanes.buffers[0][0].untyped_storage().data_ptr()
        assert (keys.untyped_storage().data_ptr() == base) is in_place


def test_a_buffer_may_be_part_of_a_larger_one() -> None:
    """K and V of all layers may lie in one allocation."""
    results = []
    for whole in (torch.zeros(3, 200, 2, 8), torch.zeros(1, 200, 2, 8)):
        generator = torch.Generator().manual_seed(3)
        buffer = whole[-1].normal_(generator=generator)
        values = torch.randn(200, 2, 12, generator=generator)
        lanes = make_lanes(4, 1, shuffle=False)
        q, k, v = random_qkv(3, 4, 2)
        batch, _ = lanes.batch([6], [3])
        results.append(attend(batch.views[0], buffer, values, q, k, v, scaling=0.7))
    assert torch.equal(*results)


def test_a_mask_is_built_once_per_distinct_window() -> None:
    lanes = make_lanes(4, 2)
    q, k, v = random_qkv(6, 4, 2)
    batch, _ = lanes.batch([5, 9], [3, 3])
    view, calls = batch.views[0], []
    build = view.mask_for
    view.mask_for = lambda window: (calls.append(window), build(window))[1]
    for window in (None, 5, None, 5, 5):
        attend(view, *lanes.buffers[0], q, k, v, scaling=1.0, window=window)
    assert calls == [None, 5]
    attend(view, *lanes.buffers[0], q, k, v, scaling=1.0, window=10_000)  # hides nothing here
    assert calls == [None, 5]


def test_a_lane_does_not_depend_on_other_lanes() -> None:
    q, k, v = random_qkv(9, 4, 2)
    outs = []
    for other in (0.0, 50.0):
        lanes = make_lanes(3, 2, seed=4)
        torch.manual_seed(0)
        for buffer in lanes.buffers[0]:
            buffer.normal_()
        k2, v2 = k.clone(), v.clone()
        k2[:5] += other
        v2[:5] += other
        batch, _ = lanes.batch([2, 7], [5, 4])
        outs.append(attend(batch.views[0], *lanes.buffers[0], q, k2, v2, scaling=0.7))
    assert torch.equal(outs[0][5:], outs[1][5:])
    assert not torch.equal(outs[0][:5], outs[1][:5])


def test_buffers_may_have_another_dtype_than_the_queries() -> None:
    lanes = make_lanes(3, 2)
    half = [buffer.bfloat16() for buffer in lanes.buffers[0]]
    for buffer, rounded in zip(lanes.buffers[0], half, strict=True):
        buffer.copy_(rounded)
    q, k, v = random_qkv(6, 4, 2)
    k, v = k.bfloat16().float(), v.bfloat16().float()
    batch, _ = lanes.batch([5, 9], [3, 3])
    out = attend(batch.views[0], *half, q, k, v, scaling=0.7)
    expected = attend(batch.views[0], *lanes.buffers[0], q, k, v, scaling=0.7)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("seed", range(20))
def test_random_batches_equal_the_oracle(seed: int) -> None:
    choose = random.Random(seed)
    num_lanes, page_size = choose.randint(1, 4), choose.choice([1, 2, 3, 4, 16])
    starts = [choose.randint(0, 40) for _ in range(num_lanes)]
    q_lens = [choose.randint(1, 9) for _ in range(num_lanes)]
    window = choose.choice([None, 1, 7])
    lanes = make_lanes(page_size, num_lanes, seed=seed)
    q, k, v = random_qkv(sum(q_lens), 6, 2, seed)
    masks = [torch.eye(n).bool() | (torch.rand(n, n) < 0.4).tril() for n in q_lens]
    depths = [
        [start + int(mask[i].sum()) - 1 for i in range(len(mask))]
        for start, mask in zip(starts, masks, strict=True)
    ]
    batch, _ = lanes.batch(starts, q_lens, masks, depths)
    out = attend(batch.views[0], *lanes.buffers[0], q, k, v, scaling=0.7, window=window)
    visible = batch.views[0].mask_for(window)
    expected = oracle(lanes, visible, q_lens, q, scaling=0.7)
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_size": 0}, "page_size 0"),
        ({"read_pages": torch.ones(3, dtype=torch.long)}, r"read_pages is \[B, C\], got \[3\]"),
        ({"q_lens": [2, 1, 1]}, "3 q_lens for 2 lanes"),
        ({"q_lens": [3, 2]}, "add up to 5, write_slots has 4"),
        ({"q_lens": [5, -1]}, "q_lens -1"),
        ({"q_lens": 3}, "add up to 6, write_slots has 4"),
        ({"decode_len": 4}, "decode_len 4 needs one query per lane"),
        ({"q_lens": 1, "write_slots": torch.tensor([5, 6]), "decode_len": 9}, r"1\.\.=8 columns"),
        ({"q_lens": 1, "write_slots": torch.tensor([5, 6]), "decode_len": 0}, r"1\.\.=8 columns"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    sizes: dict[str, Any] = {
        "page_size": 4,
        "write_slots": torch.tensor([4, 5, 8, 9]),
        "read_pages": torch.tensor([[1, 0], [2, 0]]),
        "q_lens": 2,
        "mask_for": lambda window: None,
    }
    AttentionView(**sizes)
    with pytest.raises(ShapeError, match=message):
        AttentionView(**{**sizes, **changes})


def test_a_mask_of_another_shape_is_refused() -> None:
    lanes = make_lanes(4, 2)
    q, k, v = random_qkv(6, 4, 2)
    batch, _ = lanes.batch([5, 9], [3, 3])
    before = lanes.buffers[0][0].clone()
    for wrong in (torch.ones(2, 3, 5, dtype=torch.bool), torch.zeros(2, 3, 12).double()):
        batch.views[0].mask_for = lambda window, wrong=wrong: wrong
        with pytest.raises(ShapeError, match=r"expected bool or float32 \[2, 3, 12\]"):
            attend(batch.views[0], *lanes.buffers[0], q, k, v, scaling=1.0)
    assert torch.equal(lanes.buffers[0][0], before)


def test_a_bias_is_as_good_as_a_mask() -> None:
    """0 and -inf in float32 say the same as true and false."""
    lanes = make_lanes(4, 2)
    q, k, v = random_qkv(6, 4, 2)
    outputs = []
    for as_bias in (False, True):
        batch, _ = lanes.batch([5, 9], [3, 3])
        view = batch.views[0]
        if as_bias:
            visible = torch.as_tensor(view.mask_for(None))
            bias = torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)
            view.mask_for = lambda window, bias=bias: bias
        outputs.append(attend(view, *lanes.buffers[0], q, k, v, scaling=0.5))
    assert torch.equal(*outputs)


def test_tokens_that_are_only_written_ask_nothing() -> None:
    """A draft-extend follows each lane's last token alone, but all its tokens leave their KV."""
    lanes = make_lanes(4, 2)
    q, k, v = random_qkv(6, 4, 2)
    last = torch.tensor([2, 5])
    batch, _ = lanes.batch([5, 9], [3, 3])
    whole = batch.views[0]
    visible = torch.as_tensor(whole.mask_for(None))[:, 2:]
    view = AttentionView(
        page_size=4,
        write_slots=whole.write_slots,
        read_pages=whole.read_pages,
        q_lens=1,
        mask_for=lambda window: visible,
    )
    buffers = [tuple(buffer.clone() for buffer in lanes.buffers[0]) for _ in range(2)]
    expected = attend(whole, *buffers[0], q, k, v, scaling=0.5)[last]
    out = attend(view, *buffers[1], q[last], k, v, scaling=0.5)
    torch.testing.assert_close(out, expected)
    assert all(torch.equal(a, b) for a, b in zip(*buffers, strict=True))
