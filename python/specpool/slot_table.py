"""A table on the host with each token's slot, and a step of the ledger in one call.

For an engine whose steps run one after the other, and whose kernels read slots instead of pages.
"""

from __future__ import annotations

from specpool._core import decode_into, launch_into, round_slots, slot_ranges

__all__ = ["decode_into", "launch_into", "round_slots", "slot_ranges"]
