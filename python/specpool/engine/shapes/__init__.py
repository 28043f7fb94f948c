"""Adaptive drafting: controllers that choose each round's shape from earlier rounds."""

from specpool.engine.shapes.base import Controller
from specpool.engine.shapes.budget import BudgetController
from specpool.engine.shapes.config import AdaptiveConfig, RangeConfig, config_of
from specpool.engine.shapes.controller import AdaptiveController
from specpool.engine.shapes.cost import CostController
from specpool.engine.shapes.ema import StepRange
from specpool.engine.shapes.policy import controller_of
from specpool.engine.shapes.router import StepRouter

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
