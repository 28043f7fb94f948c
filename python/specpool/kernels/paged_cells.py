"""`PagedCells`: the cells that few queries of each lane see, on pages."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specpool.errors import ShapeError
from specpool.kernels.checks import device_of, expect, number

MOST_OWN = 64
"""The most own cells of a tree: a query sees them by the bits of one number."""


@dataclass(frozen=True, slots=True)
class PagedCells:
    """The cells that each lane's queries see; all layers of a forward share them.

    Without own cells, queries are causal: the last query of a lane sees its first `lens` cells, and
    each query before sees one less. With own cells, every query sees the first `lens` cells, and
    those of the own cells behind them that its bits name.

    Attributes:
        pages: int32 [B, C], page ids: cell ``c * P + o`` lies at offset o of page c.
        page_size: P.
        lens: int32 [B].
        q_starts: int32 [B + 1], the first query of each lane, among all.
        num_queries: the most queries of a lane, Q.
        most_cells: an upper bound, on the host, of the cells of a lane.
        own_slots: int32 [B, W], the own cells' slots, W at most 64; None = causal.
        sees: int64 [B, Q]: bit j is set if the query sees own cell j; None = causal.

    Raises:
        ShapeError: an argument is wrong.
    """

    pages: Tensor
    page_size: int
    lens: Tensor
    q_starts: Tensor
    num_queries: int
    most_cells: int
    own_slots: Tensor | None = None
    sees: Tensor | None = None

    def __post_init__(self) -> None:
        device = device_of("pages", self.pages)
        lanes = expect("pages", self.pages, torch.int32, (None, None), device).shape[0]
        number("page_size", self.page_size, 1)
        expect("lens", self.lens, torch.int32, (lanes,), device)
        expect("q_starts", self.q_starts, torch.int32, (lanes + 1,), device)
        number("num_queries", self.num_queries, 0)
        number("most_cells", self.most_cells, 0)
        if (self.own_slots is None) != (self.sees is None):
            raise ShapeError("own_slots and sees go together, got one of them")
        if self.own_slots is not None:
            expect("own_slots", self.own_slots, torch.int32, (lanes, None), device)
            number("columns of own_slots", self.own_slots.shape[1], 1, MOST_OWN)
            expect("sees", self.sees, torch.int64, (lanes, self.num_queries), device)
