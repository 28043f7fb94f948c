"""`NodeBudget`: how many of a round's drafted nodes the target reads, and which; docs/budget.md.

The device chooses the likeliest nodes. What a drafter says of a node is corrected by what came of
such nodes before: by drafter and depth, then by row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specpool.arrays import Int32, Int64

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

SHARES = 8  # numbers of nodes that a round tells the use of: roots and so many parts of the drafts
_DECAY, _ROW_DECAY = 0.98, 0.95  # of the counts of a drafter and of a row, each round
_FIRM, _ROW_FIRM = 4.0, 2.0  # drafts as good as was said that count beside those seen
_MOST = 4.0  # the most by which a row is better, or worse, than was said


@dataclass(frozen=True, slots=True)
class NodeChoice:
    """The nodes that the target reads in a round, of T that were drafted.

    Attributes:
        num_nodes: V, at least the round's lanes; T means all.
        factors: float32 [B, D + 1], by which each lane's `DraftTree.p` counts at each depth.
        grid: int64 [G], numbers of nodes from 1 to T, ascending.
    """

    num_nodes: int
    factors: Float32
    grid: Int64


@dataclass(frozen=True, slots=True)
class NodeResults:
    """What came of a round whose nodes were chosen.

    Attributes:
        guess: float32 [B, D + 1], the sum of `DraftTree.p` over the nodes read, by depth.
        goes_on: bool [B], whether the walk ended before a right draft that was not read.
        curve: float32 [G], the tokens to expect of the likeliest nodes, for each of the grid.
    """

    guess: Float32
    goes_on: npt.NDArray[np.bool_]
    curve: Float32

    @classmethod
    def of(cls, told: Float32, num_lanes: int) -> NodeResults:
        """Unpack float32 [B * (D + 2) + G]: each lane's guess and whether it goes on; the curve."""
        table = told[:-SHARES].reshape(num_lanes, -1)
        return cls(table[:, :-1], table[:, -1] > 0, told[-SHARES:])

    def lanes(self, lives: npt.NDArray[np.bool_]) -> NodeResults:
        """Return the results of the lanes that are set in `lives`, bool [B]."""
        return NodeResults(self.guess[lives], self.goes_on[lives], self.curve)


class NodeBudget:
    """The choice of each round's nodes."""

    def __init__(self, most_steps: int, num_rows: int, *, fixed: int) -> None:
        """Read at most `fixed` nodes in a round, but the root of each row in any case.

        `most_steps` is the depth of the deepest shape; rows are in `[0, num_rows)`.
        """
        self._num_depths, self._fixed = most_steps + 1, fixed
        self._drafters: dict[int, Float64] = {}  # right drafts and guesses, [2, D + 1]
        self._rows = np.zeros((2, num_rows))  # right drafts, and those to expect

    def admit(self, row: int) -> None:
        """Forget a row's counts: another request has it."""
        self._rows[:, row] = 0

    def choose(self, nodes: Int32, rows: Int32, drafters: Int32) -> NodeChoice | None:
        """Choose for a round.

        Args:
            nodes: int32 [B], the nodes that each lane drafts, the root included.
            rows: int32 [B].
            drafters: int32 [B], the drafter of each lane.

        Returns:
            The choice; None = the target reads all.
        """
        num_lanes, total = len(nodes), int(nodes.sum())
        num_nodes = max(self._fixed, num_lanes)
        if num_nodes >= total:
            return None
        parts = np.arange(1, SHARES + 1)
        grid = num_lanes + -(-parts * (total - num_lanes) // SHARES)
        return NodeChoice(num_nodes, self.factors(rows, drafters), grid)

    def factors(self, rows: Int32, drafters: Int32) -> Float32:
        """Return by how much each lane's guess counts at each depth, float32 [B, D + 1]."""
        right, expected = self._rows[:, rows]
        of_row = np.clip((right + _ROW_FIRM) / (expected + _ROW_FIRM), 1 / _MOST, _MOST)
        of_drafter = np.stack([self._of_drafter(number) for number in drafters.tolist()])
        factors: Float32 = (of_drafter * of_row[:, None]).astype(np.float32)
        return factors

    def _of_drafter(self, drafter: int) -> Float64:
        counts = self._drafters.get(drafter)
        if counts is None:
            return np.ones(self._num_depths)
        right, guess = counts
        factor: Float64 = (right + _FIRM) / (guess + _FIRM)
        return factor

    def learn(self, rows: Int32, drafters: Int32, accept_len: Int32, results: NodeResults) -> None:
        """Learn from a round's lanes, int32 [B] each."""
        depths = np.arange(self._num_depths)
        right = (depths < accept_len[:, None]) & (depths > 0)
        for drafter in np.unique(drafters).tolist():
            mine = drafters == drafter
            expected = (results.guess[mine] * self._of_drafter(drafter))[:, 1:].sum(axis=1)
            told = np.stack([right[mine][:, 1:].sum(axis=1), expected])
            self._rows[:, rows[mine]] = _ROW_DECAY * self._rows[:, rows[mine]] + told
            counts = self._drafters.setdefault(drafter, np.zeros((2, self._num_depths)))
            counts *= _DECAY
            counts += right[mine].sum(axis=0), results.guess[mine].sum(axis=0)
            counts[:, 0] = 0  # roots
