"""Models that run over pages: any Hugging Face decoder as the target, EAGLE heads as drafts."""

from specpool.models.eagle import EagleHead
from specpool.models.target import TargetModel, TargetOutput

__all__ = ["EagleHead", "TargetModel", "TargetOutput"]
