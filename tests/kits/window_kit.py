"""Tiny models with windows of 8, what they say, and what their rows hold: for the window tests."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from families import make_config, make_model
from lossless import Comparison, Reference
from specpool import ConfigError, Engine, Shape
from specpool.capacity.group_sizes import GroupSizes, size_groups
from specpool.engine.config import EngineConfig
from specpool.engine.models import TargetModel

FAMILIES = ("mistral", "gemma2", "gemma3", "gpt_oss")
ONLY_WINDOWS = {"mistral"}  # the others have full layers too
VOCAB = 259


def config_of(family: str, window: int, positions: int) -> Any:
    config = make_config(family)
    if config is None:
        pytest.skip(f"this transformers has no {family}")
    config.sliding_window, config.max_position_embeddings = window, positions
    return config


_references: dict[tuple[str, int, int], Reference] = {}


def reference_of(family: str, window: int = 8, positions: int = 512) -> Reference:
    key = family, window, positions
    if key not in _references:
        _references[key] = Reference(make_model(config_of(*key)))
    return _references[key]


@contextmanager
def open_targets() -> Iterator[dict[str, TargetModel]]:
    """Open a target of each family, with windows of 8."""
    with ExitStack() as stack:
        yield {
            family: stack.enter_context(TargetModel(make_model(config_of(family, 8, 512))))
            for family in FAMILIES
        }


def prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(3, VOCAB) for _ in range(length)]


def windows_of(engine: Engine) -> list[int]:
    """The window groups."""
    return [g for g, group in enumerate(engine.ledger.groups) if group.window is not None]


def assert_speaks(reference: Reference, texts: list[list[int]], outputs: list) -> None:
    comparison = Comparison()
    for output in outputs:
        assert output.error is None
        comparison.add(reference, texts[output.index], output.token_ids)
    comparison.finish()


def sizes_of(
    *, kv_bytes: int = 0, bytes_of: dict[int | None, int] | None = None, **options: Any
) -> GroupSizes:
    return size_groups(
        EngineConfig(**{"page_size": 16, "prefill_tokens": 128, "max_sessions": 0, **options}),
        {None: 4, 64: 20} if bytes_of is None else bytes_of,
        0,
        shapes=[Shape.eagle(3, 1, 4)],
        max_context_len=4096,
        kv_bytes=kv_bytes,
    )


def fits(**options: Any) -> bool:
    try:
        sizes_of(**options)
    except ConfigError as error:
        assert "one row of 4096 tokens needs" in str(error)
        return False
    return True


class Watch:
    """Watch how many slots rows hold of windows: the most at any launch."""

    def __init__(self, engine: Engine) -> None:
        self._ledger, self.most, self.steady = engine.ledger, 0, 0
        config, ledger = engine.config, engine.ledger
        depth, shape = ledger.overlap_depth, engine.shape
        reserve = shape.num_draft_tokens + depth * shape.max_accept_len
        self._groups = windows_of(engine)
        (window,) = {ledger.groups[g].window for g in self._groups}
        #: of a row that decodes
        self.steady_limit = window + reserve + 2 * config.page_size
        self.limit = window + max(reserve, ledger.max_chunk) + 2 * config.page_size
        launch = engine.core.scheduler.launch

        def watched(step):
            launch(step)
            for g in self._groups:
                held = (self._ledger.allocated_len(g) - self._ledger.evicted_len(g))[step.plan.rows]
                self.most = max(self.most, int(held.max()))
                if step.is_decode:
                    self.steady = max(self.steady, int(held.max()))

        engine.core.scheduler.launch = watched  # type: ignore[method-assign]
