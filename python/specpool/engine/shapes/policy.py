"""`controller_of`: builds the controller of a configuration by its policy."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from os import PathLike

from specpool._core import Shape
from specpool.engine.shapes.base import Controller
from specpool.engine.shapes.budget import BudgetController
from specpool.engine.shapes.config import AdaptiveConfig, config_of
from specpool.engine.shapes.controller import AdaptiveController
from specpool.engine.shapes.cost import CostController


def controller_of(
    config: AdaptiveConfig | str | PathLike[str] | None,
    *,
    initial: Shape | int | None = None,
    graph_sizes: Sequence[int] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Controller | None:
    """Build the controller of a configuration; None without a configuration.

    `BudgetController` documents `clock`, `AdaptiveController` the other arguments.

    Raises:
        ConfigError: no range has the shape `initial`.
    """
    if config is None:
        return None
    config = config_of(config)
    if config.policy == "budget":  # it has no shape to begin with
        config.initial_shape(initial)
        return BudgetController(config, clock=clock)
    policy = CostController if config.policy == "cost" else AdaptiveController
    return policy(config, initial=initial, graph_sizes=graph_sizes)
