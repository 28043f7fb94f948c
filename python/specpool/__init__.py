"""specpool: the KV-cache memory manager for speculative decoding."""

from specpool._core import Shape, __version__
from specpool.errors import SpecpoolError

__all__ = ["Shape", "SpecpoolError", "__version__"]
