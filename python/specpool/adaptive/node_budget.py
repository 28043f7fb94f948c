"""`NodeBudget`: how many of a round's drafted nodes the target reads, and which; docs/budget.md.

The device chooses the likeliest nodes. What a drafter says of a node is corrected by what came of
such nodes before: by drafter and depth, then by row.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specpool._core import Shape
from specpool.arrays import Int32, Int64

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

SHARES = 8  # numbers of nodes that a round tells the use of: roots and so many parts of the drafts
_DECAY, _ROW_DECAY = 0.98, 0.95  # of the counts of a drafter and of a row, each round
_FIRM, _ROW_FIRM = 4.0, 2.0  # drafts as good as was said that count beside those seen
_PARTS = np.arange(1, SHARES + 1)
_CURVE_WEIGHT = 0.2  # of a round's curve
_LEAST_GAIN = 0.02  # of a round's tokens, which a choice must gain
_TURN = 32  # drafting rounds in which some read all nodes, so that the others can be compared
_WHOLE = 4  # of these, the rounds that read all
_TRIAL = 4  # rounds that try a choice anew, whether it pays
_TRIAL_TURNS, _MOST_TURNS = 4, 32  # turns from one trial to the next; more if it does not pay
_TRIAL_TRUST = 0.5  # the least in a trial
_SEEN, _LEAST_SEEN = 12, 3  # rounds of each way that are compared, at most and at least
_MOST = 4.0  # the most by which a row is better, or worse, than was said


@dataclass(frozen=True, slots=True)
class NodeChoice:
    """The nodes that the target reads in a round, of T that were drafted.

    Attributes:
        num_nodes: V, at least the round's lanes; T means all.
        factors: float32 [B, D + 1], by which each lane's `DraftTree.p` counts at each depth.
        grid: int64 [G], numbers of nodes from 1 to T, ascending.
        spared: seconds, without load, that the round should take less than if the target read all.
    """

    num_nodes: int
    factors: Float32
    grid: Int64
    spared: float = 0.0


@dataclass(frozen=True, slots=True)
class NodeResults:
    """What came of a round whose nodes were chosen.

    Attributes:
        guess: float32 [B, D + 1], the sum of `DraftTree.p` over the nodes read, by depth.
        goes_on: bool [B], whether the walk ended before a right draft that was not read.
        curve: float32 [G], the tokens to expect of the likeliest nodes, for each of the grid; NaN
            if drafting has ended early.
        num_lanes: lanes of the round.
        undrafted: int32 [B], levels of each lane's shape that were not drafted, because drafting
            has ended early.
    """

    guess: Float32
    goes_on: npt.NDArray[np.bool_]
    curve: Float32
    num_lanes: int
    undrafted: Int32

    @classmethod
    def of(cls, told: Float32, num_lanes: int) -> NodeResults:
        """Unpack float32 [B * (D + 3) + G]: each lane's fields in this order, and the curve."""
        table = told[:-SHARES].reshape(num_lanes, -1)
        undrafted = table[:, -1].astype(np.int32)
        return cls(table[:, :-2], table[:, -2] > 0, told[-SHARES:], num_lanes, undrafted)

    def lanes(self, lives: npt.NDArray[np.bool_]) -> NodeResults:
        """Return the results of the lanes that are set in `lives`, bool [B]."""
        lanes = self.guess[lives], self.goes_on[lives]
        return NodeResults(*lanes, self.curve, self.num_lanes, self.undrafted[lives])


def nodes_of(share: float, num_lanes: int, total: int) -> int:
    """Return the nodes of a round that reads its roots and a share of its drafts."""
    return num_lanes + math.ceil(share * (total - num_lanes))


class NodeSeconds:
    """What the choice of a round's nodes takes, and what a node takes, by rounds of the start."""

    def __init__(self) -> None:
        # (lanes, shape) -> the share of the drafts that was read by choice, None = all without
        # one -> seconds
        self._told: dict[tuple[int, Shape], dict[float | None, float]] = {}
        self._of: dict[int, tuple[float, float]] = {}  # by rows, what `of` returns

    def tell(self, shape: Shape, num_lanes: int, share: float | None, seconds: float) -> None:
        """Add a round of the start; of several equal ones the least counts.

        Args:
            shape: of all lanes.
            num_lanes: rows of the round.
            share: of the drafts, in (0, 1], that the target read by choice; None = all, without.
            seconds: what the round took.
        """
        of_size = self._told.setdefault((num_lanes, shape), {})
        of_size[share] = min(seconds, of_size.get(share, seconds))
        self._of.clear()

    def of(self, num_lanes: int) -> tuple[float, float]:
        """Return the seconds of a choice and of a node in a round of so many rows.

        Sizes between those that were told are interpolated. Without any, a node takes nothing.
        """
        if (known := self._of.get(num_lanes)) is None:
            sizes, choices, nodes = zip(*(self._found() or [(1, 0.0, 0.0)]), strict=True)
            choice, node = (float(np.interp(num_lanes, sizes, of)) for of in (choices, nodes))
            known = self._of[num_lanes] = choice, node
        return known

    def _found(self) -> list[tuple[int, float, float]]:
        """Return (rows, seconds of a choice, seconds of a node) of each size that was told."""
        found: list[tuple[int, float, float]] = []
        for (size, shape), seconds in self._told.items():
            least = min((share for share in seconds if share is not None), default=1.0)
            if None in seconds and 1.0 in seconds and least < 1.0:
                total = size * shape.num_draft_tokens
                left_out = total - nodes_of(least, size, total)
                node = (seconds[1.0] - seconds[least]) / max(left_out, 1)
                found.append((size, max(seconds[1.0] - seconds[None], 0.0), max(node, 0.0)))
        return sorted(found)


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a policy expects of its latest choice of shapes, for each lane of a round.

    Attributes:
        num_drafts: right drafts of a lane.
        rate: tokens per second of the round.
    """

    num_drafts: float
    rate: float


class NodeBudget:
    """The choice of each round's nodes.

    Attributes:
        outlook: what the policy expects of its latest choice of shapes; None = it has made none.
        share: of the drafts, those that each round reads whatever pays; None = as many as pay.
        trust: what choices spare over what they should by the rounds of the start, in [0, 1].
    """

    def __init__(
        self,
        most_steps: int,
        num_rows: int,
        *,
        fixed: int | None = None,
        seconds: NodeSeconds | None = None,
    ) -> None:
        """Start without results.

        Args:
            most_steps: the depth of the deepest shape.
            num_rows: rows are in `[0, num_rows)`.
            fixed: the most nodes of each round, but the root of each row is read in any case; None
                = as many as pay.
            seconds: the rounds of the start.
        """
        self._num_depths, self._fixed = most_steps + 1, fixed
        self._seconds = NodeSeconds() if seconds is None else seconds
        self._drafters: dict[int, Float64] = {}  # right drafts and guesses, [2, D + 1]
        self._rows = np.zeros((2, num_rows))  # right drafts, and those to expect
        self._curve: Float64 | None = None  # of all right drafts, the share in each part of them
        self._round = 0  # drafting rounds in which a choice might have paid
        self._trial, self._wait = -_TRIAL_TURNS, _TRIAL_TURNS  # turns: the last trial, to the next
        self._pays = True  # since the last trial a choice was made
        self._loads: deque[float] = deque(maxlen=_SEEN)  # rounds that read all, over what is known
        self._spared: deque[float] = deque(maxlen=_SEEN)  # by choices, over what was expected
        self.trust = 1.0
        self.outlook: Outlook | None = None
        self.share: float | None = None

    def admit(self, row: int) -> None:
        """Forget a row's counts: another request has it."""
        self._rows[:, row] = 0

    def choose(self, nodes: Int32, sources: Callable[[], tuple[Int32, Int32]]) -> NodeChoice | None:
        """Choose for a round.

        Args:
            nodes: int32 [B], the nodes that each lane drafts, the root included.
            sources: returns each lane's row and drafter, int32 [B] each.

        Returns:
            The choice; None = the target reads all.
        """
        num_lanes, total = len(nodes), int(nodes.sum())
        if self.share is None and self._fixed is None and not self._can_pay(num_lanes, total):
            return None
        grid = num_lanes + -(-_PARTS * (total - num_lanes) // SHARES)
        spared = 0.0
        if self.share is not None:
            num_nodes = nodes_of(self.share, num_lanes, total)
        elif self._fixed is not None:
            num_nodes = max(self._fixed, num_lanes)
            num_nodes = num_nodes if num_nodes < total else 0
        else:
            num_nodes, spared = self._best(num_lanes, grid)
        if not num_nodes:
            return None
        return NodeChoice(num_nodes, self.factors(*sources()), grid, spared)

    def seconds(self, num_lanes: int) -> tuple[float, float]:
        """Return what a choice and a node take in a round of so many rows, in seconds."""
        return self._seconds.of(num_lanes)

    def _can_pay(self, num_lanes: int, total: int) -> bool:
        """Return whether a choice of the fewest nodes would gain enough if it lost no token.

        If not, nothing is tried or measured, so a choice that cannot pay costs nothing.
        """
        if self.outlook is None:
            return False
        choice, node = self._seconds.of(num_lanes)
        left_out = total - nodes_of(1 / SHARES, num_lanes, total)
        gain = (node * left_out - choice) * self.outlook.rate
        return gain > _LEAST_GAIN * (1 + self.outlook.num_drafts) * num_lanes

    def _best(self, num_lanes: int, grid: Int64) -> tuple[int, float]:
        """Return how many nodes of the grid to choose, 0 = none, and the seconds that this spares.

        Nodes are worth their tokens, and cost their seconds at the rate of the batch. Some rounds
        read all nodes, with and without a choice, so that the choice is based on what is so.
        """
        choice, node = self._seconds.of(num_lanes)
        spared, outlook = node * (grid[-1] - grid) - choice, self.outlook
        assert outlook is not None
        turn, place = divmod(self._round, _TURN)
        self._round += 1
        if not place:
            self._begin_turn(turn)
        is_trial = turn == self._trial
        if place < _WHOLE:
            looks = place == _WHOLE - 1 and (is_trial or self._curve is None)
            return (int(grid[-1]), float(spared[-1])) if looks else (0, 0.0)
        if self._curve is None:
            return 0, 0.0
        tries = is_trial and place < _WHOLE + _TRIAL
        trust = max(self.trust, _TRIAL_TRUST) if tries else self.trust
        gain = trust * spared * outlook.rate
        gain -= (1 - self._curve) * outlook.num_drafts * num_lanes
        best = int(gain.argmax())
        if gain[best] <= _LEAST_GAIN * (1 + outlook.num_drafts) * num_lanes:
            return 0, 0.0
        self._pays |= not tries
        return int(grid[best]), float(spared[best])

    def _begin_turn(self, turn: int) -> None:
        """Forget the loads, which change, and every few turns the results: begin a trial."""
        self._loads.clear()
        if turn >= self._trial + self._wait:
            self._wait = _TRIAL_TURNS if self._pays else min(2 * self._wait, _MOST_TURNS)
            self._trial, self._pays = turn, False
            self._spared.clear()

    def observe(self, choice: NodeChoice | None, seconds: float, known: float) -> None:
        """Learn from a round with drafts.

        Load slows all rounds, so those with a choice are compared with those without.

        Args:
            choice: of the round's nodes; None = the target read all.
            seconds: what the round took.
            known: what such a round takes without load if the target reads all.
        """
        if choice is None:
            self._loads.append(seconds / known)
        elif choice.spared > 0 and self._loads:
            spared = known - seconds / statistics.median(self._loads)
            self._spared.append(spared / choice.spared)
            if len(self._spared) >= _LEAST_SEEN:
                self.trust = min(max(statistics.median(self._spared), 0.0), 1.0)

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
        gain = results.curve.astype(np.float64) - results.num_lanes
        if gain[-1] > 0:  # not if it is NaN
            share = gain / gain[-1]
            known = share if self._curve is None else self._curve
            self._curve = known + _CURVE_WEIGHT * (share - known)
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
