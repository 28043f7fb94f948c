"""Prompts on a GPU: torch's fused kernels get every lane's lengths, and nothing builds a mask.

The kernels run on a GPU alone (`tests/device/test_device_attention.py`). Here are doubles of them,
written from their documentation, and torch's own fake tensors, which check what they are given.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from flashinfer_kit import Pages, Rig
from graph_kit import graphs_run
from specpool import Engine, SamplingParams, Shape
from specpool.attention import AttentionView, attend, fused_prompts, torch_backend
from specpool.attention import view as view_module
from specpool.attention.cudnn import without_cudnn
from specpool.attention.lanes import causal_view
from specpool.worker import worker
from specpool.worker.forward import Forward
from specpool.worker.graphs.round_graph import RoundGraph

CPU = Rig(None, torch.device("cpu"), torch.float32, 8, 1e-5)
#: starts and widths of the lanes
CASES = {
    "one prompt": ([0], [7]),
    "equal": ([3, 17], [4, 4]),
    "ragged": ([0, 11, 30], [7, 1, 3]),
    "long": ([0, 2], [40, 35]),
    "an even page": ([16, 0], [16, 32]),
}


def varlen(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    q_starts: Tensor,
    k_starts: Tensor,
    used: Tensor,
    scaling: float,
    window: int | None,
) -> Tensor:
    """Attend lane by lane; the last query sees the last of the `used` cells."""
    out = torch.full_like(q, torch.nan)
    groups = q.shape[1] // keys.shape[1]
    for lane, kv_len in enumerate(used.tolist()):
        first, end = q_starts[lane : lane + 2].tolist()
        at = int(k_starts[lane])
        assert at + kv_len <= int(k_starts[lane + 1]) <= len(keys)
        k, v = (x[at : at + kv_len].repeat_interleave(groups, 1).double() for x in (keys, values))
        for i in range(first, end):
            last = kv_len - (end - i)
            lo = 0 if window is None else max(0, last - window + 1)
            scores = torch.einsum("hd,lhd->hl", q[i].double(), k[lo : last + 1]) * scaling
            out[i] = torch.einsum("hl,lhd->hd", scores.softmax(1), v[lo : last + 1]).to(q.dtype)
    return out


def flash(q, k, v, q_starts, k_starts, max_q, max_k, dropout, causal, debug, **options) -> Any:
    assert q.dtype in (torch.float16, torch.bfloat16) and (dropout, causal, debug) == (0, 1, 0)
    used = options["seqused_k"]
    assert max_q == q_starts.diff().max() and max_k == used.max()
    left, right = options["window_size_left"], options["window_size_right"]
    assert right == (-1 if left == -1 else 0)  # -1: unlimited
    window = None if left == -1 else left + 1
    return (varlen(q, k, v, q_starts, k_starts, used, options["scale"], window),)


def efficient(q, k, v, bias, q_starts, k_starts, max_q, max_k, dropout, kind, **options) -> Any:
    assert len(q) == 1 and q.shape[2] == k.shape[2], "it groups no heads"
    assert bias is None and dropout == 0 and kind == 2  # causal, aligned to the last key
    used = options["seqlen_k"]
    assert max_q == q_starts.diff().max() and max_k == used.max()
    out = varlen(
        q[0], k[0], v[0], q_starts, k_starts, used, options["scale"], options["window_size"]
    )
    return (out[None],)


@pytest.fixture
def doubles(monkeypatch) -> list[str]:
    """Run the doubles on CPU tensors; say which ran."""
    ran: list[str] = []

    def noting(run: Any) -> Any:
        return lambda *args, **options: (ran.append(run.__name__), run(*args, **options))[1]

    monkeypatch.setattr(torch_backend.in_place, "serves_in_place", lambda *args: False)
    monkeypatch.setattr(fused_prompts, "_DEVICE", "cpu")
    monkeypatch.setattr(fused_prompts, "_flash", noting(flash))
    monkeypatch.setattr(fused_prompts, "_efficient", noting(efficient))
    return ran


def view_of(pages: Pages, case: str) -> AttentionView:
    starts, widths = CASES[case]
    return causal_view(pages, 0, pages.lanes(starts, widths))  # type: ignore[arg-type]


def inputs(view: AttentionView, heads: int, dtype: torch.dtype, dim: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(view.num_tokens, n, dim, generator=generator).to(dtype) for n in (heads, 2, 2)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 1, 6])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("case", CASES)
def test_a_prompt_reads_what_its_mask_would_show(doubles, case, page_size, window, dtype):
    rig = Rig(None, torch.device("cpu"), dtype, 8, 1e-5)
    results = []
    for fused in (True, False):
        pages = Pages(rig, page_size, len(CASES[case][0]))
        view = view_of(pages, case)
        assert view.is_causal
        view.is_causal = fused  # False: by a mask
        q, k, v = inputs(view, 6, dtype, 8)
        out = attend(view, *pages.buffers, q, k, v, scaling=0.3, window=window)
        results.append((out.float(), *pages.buffers))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(results[0][0], results[1][0], atol=tolerance, rtol=tolerance)
    assert all(torch.equal(a, b) for a, b in zip(results[0][1:], results[1][1:], strict=True))
    assert doubles == ["efficient" if dtype == torch.float32 else "flash"]


@pytest.mark.parametrize(
    ("why", "options", "dim"),
    [
        ("a soft cap", {"softcap": 2.0}, 8),
        ("sinks", {"sinks": torch.zeros(4)}, 8),
        ("heads of 12 bytes", {}, 3),
    ],
)
def test_what_the_kernels_lack_has_a_mask(doubles, why, options, dim):
    pages = Pages(Rig(None, torch.device("cpu"), torch.float32, dim, 1e-5), 4, 3)
    view = view_of(pages, "ragged")
    q, k, v = inputs(view, 4, torch.float32, dim)
    out = attend(view, *pages.buffers, q, k, v, scaling=0.3, **options)
    assert doubles == [] and out.isfinite().all(), why


class Ops(TorchDispatchMode):
    """The names of all operations within the block."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("dtype", "kernel"),
    [
        (torch.bfloat16, "_flash_attention_forward"),
        (torch.float16, "_flash_attention_forward"),
        (torch.float32, "_efficient_attention_forward"),
    ],
)
def test_torch_takes_the_call_and_no_mask_is_made(dtype, kernel, monkeypatch):
    """Torch's fake tensors say that they are on a GPU, and check the arguments of its kernels."""

    def no_mask(window: int | None) -> Tensor:
        raise AssertionError("a mask is built")

    def upload(device: torch.device, *arrays: Any) -> list[Tensor]:
        return [torch.empty_like(torch.from_numpy(array), device=device) for array in arrays]

    for module in (fused_prompts, view_module):
        monkeypatch.setattr(module, "upload", upload)
    lens = np.array([7, 12, 19], np.int32)
    with FakeTensorMode(allow_non_fake_inputs=True), Ops() as ops:
        gpu = {"device": "cuda", "dtype": dtype}
        k_buffer, v_buffer = (torch.empty(640, 2, 64, **gpu) for _ in range(2))
        slots = torch.zeros(11, dtype=torch.int64, device="cuda")
        pages = torch.zeros(3, 5, dtype=torch.int32, device="cuda")
        view = AttentionView(4, slots, pages, [7, 1, 3], no_mask, kv_lens=lens, is_causal=True)
        q, k, v = (torch.empty(11, heads, 64, **gpu) for heads in (8, 2, 2))
        out = attend(view, k_buffer, v_buffer, q, k, v, scaling=0.3, window=6)
    assert out.shape == (11, 8, 64) and out.device.type == "cuda" and out.dtype == dtype
    assert ops.names.count(kernel) == 1
    assert not [name for name in ops.names if "scaled_dot_product" in name or "cudnn" in name]


@pytest.mark.parametrize("enabled", [True, False])
def test_cudnn_is_off_within_the_block_alone(enabled):
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(enabled)
    try:
        with pytest.raises(KeyError), without_cudnn(torch.device("cuda", 0)):
            assert not torch.backends.cuda.cudnn_sdp_enabled()
            raise KeyError
        assert torch.backends.cuda.cudnn_sdp_enabled() == enabled
        with without_cudnn(torch.device("cpu")):
            assert torch.backends.cuda.cudnn_sdp_enabled() == enabled
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def test_every_forward_of_an_engine_is_without_cudnn(monkeypatch):
    """Prompts, rounds and the capture of graphs alike."""
    devices, depth = [], []

    @contextlib.contextmanager
    def noting(device: torch.device) -> Iterator[None]:
        devices.append(device)
        depth.append(1)
        yield
        depth.pop()

    def replay(self: Any, *args: Any) -> Any:  # the double of a graph runs the work once more
        depth.append(1)
        try:
            return replayed(self, *args)
        finally:
            depth.pop()

    def output(self: Any, *args: Any) -> Any:
        assert depth
        return run(self, *args)

    replayed, run = RoundGraph.replay, Forward._output
    monkeypatch.setattr(worker, "without_cudnn", noting)
    monkeypatch.setattr(RoundGraph, "replay", replay)
    monkeypatch.setattr(Forward, "_output", output)
    shape = Shape.eagle(3, 1, 4)
    with (
        graphs_run() as capture,
        Engine.from_pretrained(
            draft="specpool/tiny-eagle", shape=shape, max_context_len=64, graph_sizes=(1,)
        ) as engine,
    ):
        (output,) = engine.generate(["a"], SamplingParams(max_new_tokens=8, ignore_eos=True))
        assert output.error is None and engine.stats().graphs.replay_ct and capture.recordings
    assert len(devices) > 1
