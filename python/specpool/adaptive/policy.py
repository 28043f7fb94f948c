"""The controllers by their policies' names."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike

from specpool._core import Shape
from specpool.adaptive.base import Controller
from specpool.adaptive.config import AdaptiveConfig
from specpool.adaptive.controller import AdaptiveController
from specpool.adaptive.cost import CostController
from specpool.errors import ConfigError

# For every batch size; which of them is worth it shows.
_COST = {
    "policy": "cost",
    "1": {"candidates": ["none", "chain:1", "chain:2", "chain:3", "chain:5"]},
}


def config_of(value: AdaptiveConfig | str | PathLike[str]) -> AdaptiveConfig:
    """What `EngineConfig.adaptive` stands for: `ema`, `cost`, or a file's path.

    Raises:
        ConfigError: it is nothing of that, or the file's fault, named.
    """
    if isinstance(value, AdaptiveConfig):
        return value
    if value == "ema":
        return AdaptiveConfig.default()
    if value == "cost":
        return AdaptiveConfig.from_dict(_COST)
    if not isinstance(value, str | PathLike) or not value:
        raise ConfigError(
            "adaptive must be 'ema', 'cost', the path of a JSON file or an AdaptiveConfig, got "
            f"{value!r:.80}"
        )
    return AdaptiveConfig.from_file(value)


def controller_of(
    config: AdaptiveConfig | str | PathLike[str] | None,
    *,
    initial: Shape | int | None = None,
    graph_sizes: Sequence[int] | None = None,
) -> Controller | None:
    """The controller of a configuration; the other arguments are `AdaptiveController`'s.

    Raises:
        ConfigError: no slot has `initial`.
    """
    if config is None:
        return None
    config = config_of(config)
    policy = CostController if config.policy == "cost" else AdaptiveController
    return policy(config, initial=initial, graph_sizes=graph_sizes)
