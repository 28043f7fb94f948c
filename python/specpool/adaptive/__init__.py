"""Which shape each decode round drafts, from what the rounds before it gave."""

from __future__ import annotations

from collections.abc import Sequence

from specpool._core import Shape
from specpool.adaptive.base import Controller
from specpool.adaptive.config import AdaptiveConfig, SlotConfig
from specpool.adaptive.controller import AdaptiveController
from specpool.adaptive.cost import CostController
from specpool.adaptive.router import StepRouter
from specpool.adaptive.slot import StepSlot

__all__ = [
    "AdaptiveConfig",
    "AdaptiveController",
    "Controller",
    "CostController",
    "SlotConfig",
    "StepRouter",
    "StepSlot",
    "controller_of",
]


def controller_of(
    config: AdaptiveConfig,
    *,
    initial: Shape | int | None = None,
    graph_sizes: Sequence[int] | None = None,
) -> Controller:
    """The controller of the configuration's policy; the arguments are `AdaptiveController`'s.

    Raises:
        ConfigError: no slot has `initial`.
    """
    policy = CostController if config.policy == "cost" else AdaptiveController
    return policy(config, initial=initial, graph_sizes=graph_sizes)
