"""Models that run over pages: any Hugging Face decoder as the target."""

from specpool.models.support import LayerKV
from specpool.models.target import TargetModel, TargetOutput

__all__ = ["LayerKV", "TargetModel", "TargetOutput"]
