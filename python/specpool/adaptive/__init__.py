"""Adaptive drafting: controllers that choose each round's shape from earlier rounds."""

from specpool.adaptive.base import Controller
from specpool.adaptive.budget import BudgetController
from specpool.adaptive.config import AdaptiveConfig, RangeConfig, config_of
from specpool.adaptive.controller import AdaptiveController
from specpool.adaptive.cost import CostController
from specpool.adaptive.ema import StepRange
from specpool.adaptive.policy import controller_of
from specpool.adaptive.router import StepRouter

__all__ = [
    "AdaptiveConfig",
    "AdaptiveController",
    "BudgetController",
    "Controller",
    "CostController",
    "RangeConfig",
    "StepRange",
    "StepRouter",
    "config_of",
    "controller_of",
]
