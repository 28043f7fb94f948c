"""Laws of the flashinfer back end: over every view its result equals torch's.

On a CPU an emulation stands for its kernels; with a CUDA device and the wheel they run themselves.
"""

from __future__ import annotations

import dataclasses
import gc
import sys
from importlib import metadata
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flashinfer_emulation
from families import make_config, make_model
from flashinfer_kit import Pages, Rig, compare, on_a_card, verify_view
from specpool import ConfigError, Engine, SamplingParams, Shape, ShapeError
from specpool.cli import info
from specpool.engine.assets import corpus
from specpool.engine.attention import (
    BACK_ENDS,
    attend,
    torch_backend,
)
from specpool.engine.attention.flashinfer import backend as flashinfer_backend
from specpool.engine.attention.flashinfer import page_indices
from specpool.engine.attention.flashinfer.backend import FlashInfer
from specpool.engine.attention.lanes import Lanes, causal_view, chain_views, last_view
from specpool.engine.draft.branches import DenseBranches, HoleyBranches
from specpool.engine.memory.kv_cache import LayerKV
from specpool.engine.models import TargetModel

EMULATED = Rig(flashinfer_emulation, torch.device("cpu"), torch.float32, 8, 1e-5)
PAGE_SIZES = (1, 3, 4, 16)
QUICK = settings(max_examples=40, deadline=None)


def plans_of(view) -> list:
    """What flashinfer planned for a view; torch's reads of it are kept there too."""
    return [plan for plan in view.plans.values() if hasattr(plan, "wrapper")]


@pytest.fixture(params=["emulated", "cuda"])
def rig(request) -> Rig:
    return EMULATED if request.param == "emulated" else on_a_card()


@pytest.mark.parametrize("window", [None, 1, 5, 1000])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_verify_of_trees(rig: Rig, page_size: int, window: int | None) -> None:
    """The mask goes by node position, also if a node's index is far from its depth."""
    pages = Pages(rig, page_size, 3)
    for widths in (7, [4, 9, 1]):
        for slack in (0, 2):
            view = verify_view(pages, [17, 0, 32], widths, slack=slack)
            compare(rig, pages, view, window=window)


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_prefill_and_extend(rig: Rig, page_size: int, window: int | None) -> None:
    for of_group in (None, window):
        pages = Pages(rig, page_size, 3, window=of_group)
        for starts, widths in (([0, 0, 0], [5, 9, 1]), ([3, 16, 40], [1, 7, 2]), ([4, 9, 2], 3)):
            for slack in (0, 2):
                lanes = pages.lanes(starts, widths, slack=slack)
                compare(rig, pages, causal_view(pages, 0, lanes), window=window)
                compare(rig, pages, last_view(pages, 0, lanes), window=window)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_an_extend_padded_to_one_width(rig: Rig, page_size: int) -> None:
    """On a device only the device knows the number of accepted tokens."""
    pages = Pages(rig, page_size, 3)
    lanes = pages.lanes([5, 16, 31], 4, lens=[1, 4, 2])
    counts = ~lanes.padding
    compare(rig, pages, causal_view(pages, 0, lanes), counts=counts)
    compare(rig, pages, last_view(pages, 0, lanes))


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_decode_and_chains(rig: Rig, page_size: int, window: int | None) -> None:
    for of_group in (None, window):
        pages = Pages(rig, page_size, 3, window=of_group)
        for starts in ([9, 9, 9], [0, 15, 47]):
            for slack in (0, 2):
                lanes = pages.lanes(starts, 1, slack=slack)
                compare(rig, pages, causal_view(pages, 0, lanes), window=window)
                ahead = Lanes(lanes.rows, lanes.seq_lens, 3)
                for view in chain_views(pages, 0, ahead):
                    compare(rig, pages, view, window=window)


@pytest.mark.parametrize("exact", [True, False], ids=["by ancestors", "by branch"])
@pytest.mark.parametrize("layout", ["dense", "holey"])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_the_steps_of_a_draft(rig: Rig, page_size: int, layout: str, exact: bool) -> None:
    shape, starts = Shape.eagle(4, 3, 9), [0, 7, 16]
    rng = np.random.default_rng(page_size)
    for slack in (0, 2):
        pages = Pages(rig, page_size, 3)
        lanes = pages.lanes(starts, 1, slack=slack)
        if layout == "dense":
            branches = DenseBranches(pages, 0, lanes, shape, exact)
        else:
            branches = HoleyBranches(pages, 0, lanes, shape, pages.fields, exact)
        parents = np.tile(np.arange(3, dtype=np.int32), (3, 1))
        for step in range(3):
            view = branches.view(step, torch.from_numpy(parents).to(rig.device))
            assert (view.read_tokens is not None) == (layout == "dense" and slack == 0)
            for window in (None, 4) if layout == "dense" else (None,):
                compare(rig, pages, view, window=window)
            parents = rng.integers(0, 3, (3, 3), dtype=np.int32)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("groups", [1, 3, 4, 5])
def test_heads_and_soft_caps(rig: Rig, groups: int, softcap: float | None) -> None:
    pages = Pages(rig, 4, 2)
    decode = causal_view(pages, 0, pages.lanes([5, 12], 1))
    prefill = causal_view(pages, 0, pages.lanes([5, 12], 3))
    for view in (decode, prefill, verify_view(pages, [5, 12], 4)):
        compare(rig, pages, view, groups=groups, softcap=softcap)


@QUICK
@given(data=st.data())
def test_any_view(data: st.DataObject) -> None:
    draw, seed = data.draw, data.draw(st.integers(0, 99))
    page_size = draw(st.sampled_from(PAGE_SIZES))
    starts = draw(st.lists(st.integers(0, 60), min_size=1, max_size=4))
    width = st.integers(1, 8)
    widths = draw(width | st.lists(width, min_size=len(starts), max_size=len(starts)))
    window = draw(st.none() | st.integers(1, 70))
    slack = draw(st.integers(0, 2))
    pages = Pages(EMULATED, page_size, len(starts), seed=seed)
    lanes = pages.lanes(starts, widths, slack=slack)
    views = [
        causal_view(pages, 0, lanes),
        last_view(pages, 0, lanes),
        verify_view(pages, starts, widths, slack=slack, seed=seed),
    ]
    for view in views:
        compare(EMULATED, pages, view, window=window, seed=seed)


def test_queries_may_have_another_dtype_than_the_pages() -> None:
    rig = dataclasses.replace(EMULATED, dtype=torch.bfloat16)
    pages, outputs = Pages(rig, 4, 2), []
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(8, 4, 8, generator=generator).bfloat16().float()
    k, v = torch.randn(2, 8, 2, 8, generator=generator)
    for run in (torch_backend.attend, rig.backend.attend):
        buffers = [buffer.clone() for buffer in pages.buffers]
        outputs.append(run(verify_view(pages, [5, 12], 4), *buffers, q, k, v, scaling=1.0))
    assert outputs[1].dtype == torch.float32
    torch.testing.assert_close(*outputs, atol=1e-2, rtol=1e-2)  # bfloat16's


def test_a_view_without_lengths_is_read_whole() -> None:
    """A view that other code built: columns that the mask hides do not count."""
    pages = Pages(EMULATED, 4, 2)
    view = verify_view(pages, [5, 12], 4)
    compare(EMULATED, pages, dataclasses.replace(view, kv_lens=None))


def test_layers_of_a_kind_share_a_plan() -> None:
    pages, backend = Pages(EMULATED, 4, 2), FlashInfer(flashinfer_emulation, EMULATED.device)
    view = verify_view(pages, [5, 12], 4)
    for window in (None, 3, None, 3, 3):
        compare(EMULATED, pages, view, window=window, backend=backend)
    plans = plans_of(view)
    assert [plan.wrapper.num_plans for plan in plans] == [1, 1]
    assert sorted(plan.wrapper.num_runs for plan in plans) == [2, 3]


def test_wrappers_outlive_their_views_and_serve_no_two_at_once() -> None:
    pages, backend, made = (
        Pages(EMULATED, 4, 2),
        FlashInfer(flashinfer_emulation, EMULATED.device),
        set(),
    )
    for _ in range(3):
        views = chain_views(pages, 0, pages.lanes([5, 12], 2))
        for view in (*views, *views):
            compare(EMULATED, pages, view, backend=backend)
        wrappers = {id(plan.wrapper) for view in views for plan in plans_of(view)}
        assert len(wrappers) == 2
        made |= wrappers
        del view, views
        gc.collect()
    assert len(made) == 2


def test_a_plan_that_is_being_copied_is_not_written_over() -> None:
    """The copy reads pinned memory of the wrapper's, maybe long after the view is gone."""
    pages, backend = Pages(EMULATED, 4, 1), FlashInfer(flashinfer_emulation, EMULATED.device)
    view = causal_view(pages, 0, pages.lanes([5], 1))
    busy, done = (SimpleNamespace(query=lambda is_done=x: is_done) for x in (False, True))
    compare(EMULATED, pages, view, backend=backend)
    first = plans_of(view)[0].wrapper
    view.plans.clear()
    (idle,) = backend._idle.values()
    for event, is_reused in ((busy, False), (done, True)):
        idle.clear()
        idle.append((first, event))
        compare(EMULATED, pages, view, backend=backend)
        assert (plans_of(view)[0].wrapper is first) == is_reused
        view.plans.clear()


def test_a_mask_too_long_for_its_offsets_is_refused(monkeypatch) -> None:
    """Offsets into masks are int32; nothing is written."""
    pages, backend = Pages(EMULATED, 4, 2), EMULATED.backend
    need = 4 * (9 + 16)
    buffers = [buffer.clone() for buffer in pages.buffers]
    monkeypatch.setattr(page_indices, "MAX_MASK", need)
    compare(EMULATED, pages, verify_view(pages, [5, 12], 4), backend=backend)
    monkeypatch.setattr(page_indices, "MAX_MASK", need - 1)
    message = f"8 queries over up to 16 cells has {need} entries, at most {need - 1}"
    q, k = torch.zeros(8, 4, 8), torch.zeros(8, 2, 8)
    with pytest.raises(ShapeError, match=message):
        backend.attend(verify_view(pages, [5, 12], 4), *pages.buffers, q, k, k, scaling=1.0)
    assert all(torch.equal(*pair) for pair in zip(buffers, pages.buffers, strict=True))


CASES = {
    "plain": (None, None, {}),
    "chain": ("specpool/tiny-eagle", (3, 1, 4), {"overlap_depth": 1}),
    "tree": ("specpool/tiny-eagle3", (3, 3, 8), {"page_size": 4}),
    "holey": ("specpool/tiny-eagle", (3, 2, 6), {"page_size": 4, "layout": "holey"}),
    "shared": ("specpool/tiny-eagle3", (2, 2, 4), {"placement": "shared", "page_size": 1}),
    "mixed": ("specpool/tiny-eagle", (3, 2, 6), {"mixed_chunks": True, "prefill_tokens": 8}),
    "ngram": ("ngram", (3, 1, 4), {}),
}


def use_both(monkeypatch, rig: Rig = EMULATED) -> list[str]:
    """Every attention of engines to come runs through both back ends; what was planned for."""
    seen: list[str] = []

    def start(device, dtype, layers, model_type):
        backend = FlashInfer(rig.library, device)

        def run(view, k_buffer, v_buffer, q, k, v, **options):
            spare = [k_buffer.clone(), v_buffer.clone()]
            out = backend.attend(view, *spare, q, k, v, **options)
            plain = dataclasses.replace(view, attend_with=None)
            expected = attend(plain, k_buffer, v_buffer, q, k, v, **options)
            torch.testing.assert_close(out, expected, atol=rig.tolerance, rtol=rig.tolerance)
            seen.extend(type(plan.wrapper).__name__ for plan in plans_of(view))
            return expected

        return SimpleNamespace(attend=run, recorder=backend.recorder)

    with_start = dataclasses.replace(BACK_ENDS["flashinfer"], start=start)
    monkeypatch.setitem(BACK_ENDS, "flashinfer", with_start)
    return seen


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", CASES)
def test_every_forward_of_an_engine(case: str, monkeypatch) -> None:
    """All views of prefill, draft, verify and draft-extend; the text is the torch back end's."""
    draft, shape, options = CASES[case]
    options = {"max_context_len": 96, "draft": draft, "max_batch": 3, **options}
    options["shape"] = shape and Shape.eagle(*shape)
    prompts, params = corpus.prompts(3, 14), SamplingParams(max_new_tokens=8, ignore_eos=True)
    with Engine.from_pretrained(**options) as engine:
        expected = engine.generate(prompts, params)
    seen = use_both(monkeypatch)
    with Engine.from_pretrained(attention="flashinfer", **options) as engine:
        outputs = engine.generate(prompts, params)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
    kinds = {"BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper"}
    assert set(seen) == kinds


@pytest.mark.parametrize("family", ["gemma2", "mistral", "gemma3"])
def test_every_forward_over_windows(family: str, monkeypatch) -> None:
    """Window groups begin where their windows do, which the host need not know."""
    seen = use_both(monkeypatch)
    model = make_model(make_config(family))
    params = SamplingParams(max_new_tokens=8, ignore_eos=True)
    options = {"page_size": 4, "max_context_len": 64, "draft": "ngram", "prefill_tokens": 9}
    with Engine.from_pretrained(
        model, attention="flashinfer", shape=Shape.eagle(2, 1, 3), **options
    ) as engine:
        engine.generate([[5, 6, 7, 8] * 4, [9, 3], [1] * 11], params)
    assert "BatchPrefillWithPagedKVCacheWrapper" in seen


@pytest.mark.parametrize("where", ["emulation", "cuda"])
@pytest.mark.parametrize("shape", [Shape.none(), Shape.eagle(3, 1, 4)], ids=["plain", "chain"])
def test_every_forward_of_a_random_model(shape: Shape, where: str, monkeypatch) -> None:
    rig = on_a_card() if where == "cuda" else EMULATED
    seen = use_both(monkeypatch, rig)
    config = make_config("llama")
    config.head_dim = rig.head_dim
    model = make_model(config).to(rig.device, rig.dtype)
    draft = "ngram" if shape.num_draft_tokens > 1 else None
    with Engine.from_pretrained(
        model, attention="flashinfer", draft=draft, shape=shape, overlap_depth=1, max_context_len=96
    ) as engine:
        engine.generate([[5, 6, 7, 8] * 4, [9, 3], [1] * 11], SamplingParams(max_new_tokens=16))
    assert seen


def test_what_is_missing_is_said_at_start(monkeypatch) -> None:
    with pytest.raises(
        ConfigError, match=r"attention 'flashinfer' cannot be used: .*'torch' works"
    ):
        Engine.from_pretrained(attention="flashinfer")
    monkeypatch.setattr(flashinfer_backend.importlib.util, "find_spec", lambda name: None)
    assert "pip install 'specpool[flashinfer]'" in (flashinfer_backend.missing() or "")
    monkeypatch.setattr(flashinfer_backend, "missing", lambda: None)
    with pytest.raises(ConfigError, match="needs a CUDA device, the model is on cpu"):
        Engine.from_pretrained(attention="flashinfer")


def test_info_says_what_is_missing(monkeypatch, capsys) -> None:
    """The extra's brackets are text, no markup."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(flashinfer_backend.importlib.util, "find_spec", lambda name: None)
    info.show(json=False)
    assert "no: the package is not installed: pip install 'specpool[flashinfer]'" in (
        capsys.readouterr().out
    )


@pytest.mark.parametrize("has_cupy", [False, True])
def test_info_knows_that_a_card_needs_cupy(has_cupy, monkeypatch) -> None:
    """A card alone builds no kernel, and no engine starts on it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(flashinfer_backend, "missing", lambda: None)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace() if has_cupy else None)
    found = info.collect()["back ends"]
    lack = "no: the CUDA kernels need CuPy: pip install 'specpool[cuda13]'"
    assert found["torch, cuda"] == ("works, a card" if has_cupy else lack)
    assert found["attention by default"] == ("flashinfer" if has_cupy else "torch")


@pytest.mark.parametrize(
    ("version", "is_old"),
    [
        ("0.7.1", True),
        ("0.6.12.post1", True),
        ("0.7.2", False),
        ("0.10.0rc1", False),
        (None, False),
    ],
)
def test_a_version_that_is_too_old_is_said_at_start(monkeypatch, version, is_old) -> None:
    def version_of(package: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(package)
        return version

    monkeypatch.setattr(flashinfer_backend.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(flashinfer_backend.metadata, "version", version_of)
    lack = flashinfer_backend.missing()
    message = f"version {version} is older than 0.7.2: pip install 'specpool[flashinfer]'"
    assert lack == (message if is_old else "torch finds no CUDA device")


def test_a_broken_installation_is_said_at_start(monkeypatch) -> None:
    def broken(name):
        raise OSError("libcudart.so.12: cannot open shared object file")

    monkeypatch.setattr(flashinfer_backend, "missing", lambda: None)
    monkeypatch.setattr(flashinfer_backend.importlib, "import_module", broken)
    layers = [LayerKV(2, 64, 64)]
    with pytest.raises(ConfigError, match=r"importing it failed: OSError.*libcudart"):
        flashinfer_backend.start(torch.device("cuda"), torch.float16, layers, "llama")


@pytest.mark.parametrize(
    ("dtype", "layer", "message"),
    [
        (torch.float32, LayerKV(2, 64, 64), "float16 or bfloat16, the model in float32"),
        (torch.float16, LayerKV(2, 64, 128), r"layer 1 of m has heads of 64 \(keys\) and 128"),
        (torch.bfloat16, LayerKV(2, 80, 80), "heads of 80 .* both of 64, 128, 256"),
        (torch.float16, LayerKV(2, 64, 64, has_sinks=True), "layer 1 of m has attention sinks"),
    ],
)
def test_layers_without_a_kernel_are_refused(dtype, layer: LayerKV, message: str) -> None:
    flashinfer_backend.check_layers(torch.float16, [LayerKV(8, 128, 128, 9)], "m")
    with pytest.raises(ConfigError, match=message):
        flashinfer_backend.check_layers(dtype, [LayerKV(8, 128, 128), layer], "m")


def test_a_model_with_sinks_is_known_by_its_forward() -> None:
    with TargetModel(make_model(make_config("gpt_oss"))) as target:
        assert all(layer.has_sinks for layer in target.layer_kv)
        layers = [dataclasses.replace(one, k_head_dim=64, v_head_dim=64) for one in target.layer_kv]
        with pytest.raises(ConfigError, match="layer 0 of gpt_oss has attention sinks"):
            flashinfer_backend.check_layers(torch.float16, layers, target.config.model_type)
    with TargetModel(make_model(make_config("llama"))) as target:
        assert not any(layer.has_sinks for layer in target.layer_kv)


def test_sinks_are_refused_wherever_they_come_from() -> None:
    pages = Pages(EMULATED, 4, 1)
    view = causal_view(pages, 0, pages.lanes([5], 1))
    q, k, sinks = torch.zeros(1, 4, 8), torch.zeros(1, 2, 8), torch.zeros(4)
    with pytest.raises(ConfigError, match="attention sinks"):
        EMULATED.backend.attend(view, *pages.buffers, q, k, k, scaling=1.0, sinks=sinks)
