"""Shared fixtures: the shipped pair, its reference texts, and the proof that no page leaked."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import weakref
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from specpool import Shape
from specpool.engine.assets import resolve
from specpool.engine.config import EngineConfig
from specpool.engine.draft import EagleDrafter, NgramDrafter
from specpool.engine.engine import Engine
from specpool.engine.models import EagleHead, TargetModel
from specpool.serve.garbage import settle

if TYPE_CHECKING:
    from kernel_kit import Kit
    from lossless import Reference
    from serve_kit import Server

pytest_plugins = ["pytester"]

# Hub names must fail at once, not after a time-out.
os.environ["HF_HUB_OFFLINE"] = "1"

# `make test-gpu` runs the losslessness tests on a CUDA device.
DEVICE = os.environ.get("SPECPOOL_TEST_DEVICE", "cpu")

_ENGINES: weakref.WeakSet[Engine] = weakref.WeakSet()


def assert_no_page_leaked(engine: Engine) -> None:
    """Every page and state slot is free or cached, every row is back, and the audit agrees."""
    engine.ledger.check()
    for pool in engine.pool_stats():
        assert pool.free_pages + pool.cached_pages == pool.num_pages, f"leaked: {pool}"
    for index, states in enumerate(engine.ledger.states):
        free = engine.ledger.free_state_slots(index) + engine.ledger.cached_state_slots(index)
        assert free == states.num_slots, f"leaked: {states.num_slots - free} state slots"
    assert engine.ledger.num_free_rows == engine.ledger.num_rows


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Search for no garbage: a million objects are made, and the searches would find none."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the cases beyond a `sample` to `make test-full`: the same ones in every run."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sample") and not item.get_closest_marker("full"):
            cases.setdefault(item.nodeid.split("[")[0], []).append(item)
    for name, found in cases.items():
        (size,) = next(found[0].iter_markers("sample")).args
        for item in random.Random(name).sample(found, max(len(found) - size, 0)):
            item.add_marker(pytest.mark.full)


def pytest_collection_finish() -> None:
    """Leave all that collection made out of later searches for garbage: engines start many."""
    settle()


@pytest.fixture(autouse=True, scope="session")
def _record_engines() -> Iterator[None]:
    original = Engine.__init__

    def recording(self: Engine, *args: object, **kwargs: object) -> None:
        original(self, *args, **kwargs)  # type: ignore[arg-type]
        _ENGINES.add(self)

    Engine.__init__ = recording  # type: ignore[method-assign]
    yield
    Engine.__init__ = original  # type: ignore[method-assign]


@pytest.fixture(autouse=True)
def _no_page_leaks(_record_engines: None) -> Iterator[None]:
    """After every test, every pool is back to `free == num_pages`."""
    yield
    for engine in list(_ENGINES):
        assert_no_page_leaked(engine)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)
    with contextlib.suppress(ImportError):  # on a GPU machine the kernels are tested without it
        from transformers.utils import logging

        logging.disable_progress_bar()


@pytest.fixture
def short_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    """An adaptive engine that is built times two passes of one row, and no larger batch."""
    monkeypatch.setattr("specpool.engine.assembly.calibration._MOST_SECONDS", 0.0)


@pytest.fixture(scope="session")
def reference() -> Reference:
    """The shipped target's own texts."""
    from transformers import AutoModelForCausalLM

    from lossless import Reference

    return Reference(AutoModelForCausalLM.from_pretrained(resolve("specpool/tiny")).float())


@pytest.fixture(scope="module")
def target() -> Iterator[TargetModel]:
    """The shipped target."""
    with TargetModel.from_pretrained(resolve("specpool/tiny"), dtype="float32") as model:
        yield model


@pytest.fixture(scope="module")
def heads(target: TargetModel) -> dict[str, EagleHead]:
    """The shipped heads, by name."""
    names = ("specpool/tiny-eagle", "specpool/tiny-eagle3")
    return {name: EagleDrafter.from_pretrained(resolve(name), target).head for name in names}


@pytest.fixture
def build(target: TargetModel, heads: dict[str, EagleHead]) -> Callable[..., Engine]:
    """Builds engines of the shipped models, at check level 2."""

    def build(draft: str | None = None, shape: Shape | None = None, **options: Any) -> Engine:
        drafter = NgramDrafter() if draft == "ngram" else draft and EagleDrafter(heads[draft])
        options = {"page_size": 4, "max_context_len": 256, "busy_check": 2, **options}
        return Engine(target, drafter or None, config=EngineConfig(shape=shape, **options))

    return build


def _kits() -> list[object]:
    from cuda_host import CHECK, FAST

    runs = [pytest.param((kind, order), id=f"{kind}-{order}") for kind, order in FAST + CHECK]
    return [*runs, pytest.param(("cuda", None), id="cuda")]


@pytest.fixture(params=_kits())
def kit(request: pytest.FixtureRequest) -> Iterator[Kit]:
    """Where a kernel's cases run; `make test-gpu` selects `cuda`."""
    import torch

    import cuda_host
    from kernel_kit import Kit

    kind, order = request.param
    if kind == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if kind != "cuda" and cuda_host.unavailable():
        pytest.skip(cuda_host.unavailable())
    with Kit(kind, order).running() as kit:
        yield kit


@pytest.fixture(scope="session")
def shared() -> Iterator[Server]:
    """A server that the tests of `tests/serve` share."""
    from serve_kit import SMALL, Server

    with Server(
        *SMALL, "--max-queue", "64", "--max-body", "256KiB", "--read-timeout", "3"
    ) as server:
        yield server


@pytest.fixture
def server(shared: Server) -> Iterator[Server]:
    """The shared server; after the test it still works, and has leaked no page."""
    yield shared
    assert shared.ask("GET", "/health")[0] == 200
    for session in shared.ask("GET", "/v1/sessions")[1]["data"]:
        shared.ask("DELETE", f"/v1/sessions/{session['id']}")
    shared.check_no_leak()
