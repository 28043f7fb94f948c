"""`RanksSimulation`: several ranks' schedulers and ledgers, and records that go astray.

Rank 0 has the requests. The other ranks get its records late, and in some scenarios one is lost,
repeated, changed, or overtaken by the next one, or a rank starts anew. Each rank has a clock of its
own, which runs wrong. The laws: a rank that goes on is always where rank 0 was at the same record;
a rank that does not get the next record as it was sent stops before it has applied anything of it;
and without faults no rank stops.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from lab.sim.broken_law import BrokenLaw
from lab.sim.settings import Settings
from specpool._core import Plan, Shape
from specpool.engine.ranks.following import Follower
from specpool.engine.ranks.journal import RankJournal
from specpool.engine.sampling_params import SamplingParams
from specpool.engine.scheduler.config import SchedulerConfig
from specpool.engine.scheduler.request import Conversation, Request
from specpool.engine.scheduler.scheduler import Scheduler
from specpool.engine.scheduler.step import Step, StepResult
from specpool.engine.shapes import AdaptiveConfig, BudgetController, RangeConfig
from specpool.errors import CorruptState, RankError

RankFault = Literal["lost", "repeated", "overtaken", "changed", "restarted"]
FAULTS: tuple[RankFault, ...] = ("lost", "repeated", "overtaken", "changed", "restarted")

_VOCAB = 1 << 15
_SHAPES = [(1, 1, 2), (3, 1, 4), (2, 2, 4), (4, 4, 16)]
# Chances of a turn: a request comes, one is aborted, a session is opened, forked, cut or closed.
_COME, _ABORT, _TALK = 0.4, 0.04, 0.1
_ADAPTS = 0.5  # the chance of a request without a shape of its own


@dataclass(slots=True)
class RanksTally:
    """What a simulation of ranks has counted."""

    scenarios: int = 0
    rank_rounds: int = 0  # turns that a rank has run
    records: int = 0
    requests: int = 0
    turns_of_sessions: int = 0
    aborts: int = 0
    retractions: int = 0
    faults: int = 0
    stops: int = 0  # ranks that stopped with an error

    def add(self, other: RanksTally) -> None:
        """Add another tally's counts."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


class SimRank:
    """One rank: a ledger, a scheduler, a loop without a model, and a clock that runs wrong.

    Attributes:
        key: seals the records; see `Peers`.
        states: what the rank was like after each record.
        stopped: the error that it stopped with; None if it goes on.
        seconds: its own clock, which nothing may depend on.
        now: rank 0's clock at the latest record; see `Peers`.
    """

    key = b"a simulation's"

    def __init__(self, settings: Settings, rank: int, send: Callable[[bytes], None]) -> None:
        self.rank, self._settings, self._send = rank, settings, send
        self.seconds, self.now = 0.0, 0.0
        self.ledger = replace(settings, keeps_digest=True).ledger()
        controller = _controller(settings, lambda: self.now)
        self.journal = RankJournal(self.ledger, self, lambda: self.seconds)
        self.scheduler = Scheduler(
            self.ledger, _config(settings), controller=controller, journal=self.journal
        )
        self.requests: dict[int, Request] = {}
        self.follower = Follower(
            self.journal,
            self.scheduler,
            lambda request: None,
            {"turn": self.turn, "drain": self.drain},
        )
        self._flying: deque[tuple[int, Step]] = deque()
        self._turns = 0
        self.states: list[Any] = [self.state()]
        self.stopped: Exception | None = None

    @property
    def leads(self) -> bool:
        """See `Peers`."""
        return self.rank == 0

    def send(self, frame: bytes) -> None:
        """See `Peers`."""
        self._send(frame)

    def fail(self, error: BaseException) -> None:
        """See `Peers`."""

    def explain(self, error: RuntimeError) -> Exception:
        """See `Peers`."""
        return error

    def hear(self, frame: bytes) -> bool:
        """Apply a record, or stop; return whether it was applied."""
        try:
            self.follower.apply(frame)
        except (RankError, CorruptState) as error:
            self.stopped = error
            return False
        self.states.append(self.state())
        return True

    def turn(self) -> None:
        """Run a turn as `Loop` does."""
        with self.journal.turn():
            self._run()
        if self.leads:
            self.states.append(self.state())

    def drain(self) -> None:
        """Take over all that is on its way, between two turns."""
        if self._flying:
            self.journal.note_end("drain")
        while self._flying:
            self._take_over(self._flying.popleft()[1])

    def state(self) -> Any:
        """Return all that must be the same on all ranks after a record."""
        scheduler = self.scheduler
        waiting = sorted(request.request_id for request in scheduler.requests() if not request.row)
        return (
            self.ledger.digest,
            [
                (request.request_id, request.row, len(request.tokens), request.tokens[-1])
                for request in scheduler.running
            ],
            waiting,
            [
                (conversation.number, len(conversation.tokens), conversation.tokens[-1:])
                for conversation in scheduler.conversations.open.values()
            ],
        )

    def _run(self) -> None:
        steps = self.scheduler.schedule()
        self._turns += 1
        for step in steps:
            self.scheduler.launch(step)
            self.ledger.take_delta(step.plan.step)
            self.ledger.ack_delta(step.plan.step)
            self._flying.append((self._turns, step))
        if len(steps) == 1 and (choice := steps[0].choice) is not None:
            observe, shapes = self.scheduler.round_shapes.observe, steps[0].plan.shapes
            seconds = 0.01 + self.seconds % 1
            self.journal.measured(lambda taken: observe(choice, shapes, taken), seconds)
        last = self._turns - (self._settings.overlap_depth if steps else 1)
        while self._flying and self._flying[0][0] <= last:
            self._take_over(self._flying.popleft()[1])

    def _take_over(self, step: Step) -> None:
        result = _result(step, self.ledger.shapes)
        self.journal.result(step.plan.step, result)
        self.scheduler.take_over(step, result)


class RanksSimulation:
    """A run of some ranks.

    Args:
        seed: decides everything.
        num_ranks: ranks, with rank 0.
        turns: turns of rank 0.
        plant: called with each rank that is made, to plant a bug for the laws to find.
    """

    def __init__(
        self,
        seed: int,
        num_ranks: int = 4,
        turns: int = 120,
        plant: Callable[[SimRank], None] = lambda rank: None,
    ) -> None:
        self.tally = RanksTally(scenarios=1)
        self._rng, self._turns, self._plant = random.Random(seed), turns, plant
        self._settings = _settings(self._rng)
        self._frames: list[bytes] = []
        self.ranks = [self._rank(number) for number in range(num_ranks)]
        # For each rank but 0, the frames on their way and the turns at which they arrive.
        self._ways: list[deque[tuple[int, bytes]]] = [deque() for _ in self.ranks]
        self._live: list[Request] = []
        self._numbers = iter(range(1, 1 << 30))
        self._overtaken: bytes | None = None  # a record that the next one overtakes
        self.fault: tuple[RankFault, int, int] | None = None  # the kind, the rank, the record
        if self._rng.random() < 0.6:
            kind, rank = self._rng.choice(FAULTS), self._rng.randint(1, num_ranks - 1)
            self.fault = kind, rank, self._rng.randint(2, max(turns // 2, 2))
            self.tally.faults += 1

    def run(self) -> RanksTally:
        """Run to the end.

        Raises:
            BrokenLaw: a law does not hold.
        """
        first = self.ranks[0]
        for turn in range(self._turns):
            self._come_and_go(first)
            first.turn()
            first.seconds += self._rng.random()
            self._carry(turn)
            for rank in self.ranks[1:]:
                self._hear(rank, turn)
        for rank in self.ranks[1:]:
            self._hear(rank, None)
        self._check_end()
        return self.tally

    # --- records ----------------------------------------------------------------------------------

    def _rank(self, number: int) -> SimRank:
        rank = SimRank(self._settings, number, self._frames.append)
        self._plant(rank)
        return rank

    def _carry(self, turn: int) -> None:
        """Put this turn's record on its way to each rank."""
        for frame in self._frames:
            self.tally.records += 1
            for rank, way in enumerate(self._ways):
                if rank:
                    late = self._rng.choice([0, 0, 1, 5])
                    self._put(rank, way, turn + late, frame)
        self._frames.clear()

    def _put(self, rank: int, way: deque[tuple[int, bytes]], arrival: int, frame: bytes) -> None:
        arrival = max(arrival, way[-1][0] if way else 0)  # a way keeps its order
        fault = self._fault_at(rank)
        if fault == "lost":
            return
        if fault == "changed":
            changed = bytearray(frame)
            changed[self._rng.randrange(len(frame))] ^= 0x41
            frame = bytes(changed)
        if fault == "restarted":
            self.ranks[rank] = self._rank(rank)
            way.clear()  # what was on its way went to the rank of before
        if fault == "overtaken":
            self._overtaken = frame
            return
        way.append((arrival, frame))
        if self._overtaken is not None and self.fault is not None and self.fault[1] == rank:
            way.append((arrival, self._overtaken))
            self._overtaken = None
        if fault == "repeated":
            way.append((arrival, frame))

    def _fault_at(self, rank: int) -> RankFault | None:
        """Return the fault of the record that is put on its way to a rank now."""
        if self.fault is None or self.fault[1:] != (rank, self.ranks[0].journal.num_records):
            return None
        return self.fault[0]

    def _hear(self, rank: SimRank, turn: int | None) -> None:
        """Let a rank apply what has arrived, and compare it with rank 0; turn None = all."""
        way, first = self._ways[rank.rank], self.ranks[0]
        while way and rank.stopped is None and (turn is None or way[0][0] <= turn):
            rank.seconds += self._rng.random() * 3
            if not rank.hear(way.popleft()[1]):
                self.tally.stops += 1
                if rank.state() != rank.states[-1]:
                    raise BrokenLaw(f"rank {rank.rank} has applied some of a record: it stopped")
                return
            self.tally.rank_rounds += 1
            number = len(rank.states) - 1
            # A difference is found with the next record; here one record later.
            if number > 1 and rank.states[number - 1] != first.states[number - 1]:
                raise BrokenLaw(
                    f"rank {rank.rank} has parted from rank 0 at record {number - 1}, and has "
                    f"applied record {number}"
                )

    # --- what rank 0 decides ----------------------------------------------------------------------

    def _come_and_go(self, first: SimRank) -> None:
        rng, scheduler = self._rng, first.scheduler
        self._live = [request for request in self._live if request.finish_reason is None]
        conversations = first.scheduler.conversations
        busy = {request.conversation.number for request in self._live if request.conversation}
        idle = [
            conversation
            for number, conversation in conversations.open.items()
            if number not in busy
        ]
        if rng.random() < _COME and len(self._live) < 12:
            conversation = rng.choice([None, *idle])
            request = self._request(first, conversation)
            if first.scheduler.fits(request):
                scheduler.submit(request)
                self._live.append(request)
                self.tally.requests += 1
                self.tally.turns_of_sessions += conversation is not None
                idle = [
                    open_conversation
                    for open_conversation in idle
                    if open_conversation is not conversation
                ]
        if self._live and rng.random() < _ABORT:
            scheduler.abort(rng.choice(self._live))
            self.tally.aborts += 1
        if rng.random() < _TALK:
            self._talk(first, idle)
        self.tally.retractions = first.scheduler.num_retracted

    def _talk(self, first: SimRank, idle: list[Conversation]) -> None:
        rng, scheduler = self._rng, first.scheduler
        if not idle or len(first.scheduler.conversations.open) < 2:
            scheduler.open()
            return
        conversation = rng.choice(idle)
        match rng.randrange(4):
            case 0:
                first.drain()
                scheduler.fork(conversation)
            case 1:
                scheduler.cut(conversation, rng.randint(0, len(conversation.tokens)))
            case 2:
                scheduler.close(conversation)
            case 3:
                scheduler.forget(rng.choice([None, b""]))

    def _request(self, first: SimRank, conversation: Conversation | None) -> Request:
        rng, longest = self._rng, self._settings.max_context_len
        history = [] if conversation is None else conversation.tokens
        room = longest - 1 - len(history)
        if room < 2:
            conversation, history, room = None, [], longest - 1
        text, start = rng.randint(0, 3), len(history)  # few texts, so that many begin alike
        num_new = rng.randint(1, max(room // 2, 1))
        tokens = [*history, *((text * 977 + start + i) % _VOCAB for i in range(num_new))]
        request = Request(
            request_id=next(self._numbers),
            index=0,
            prompt_len=len(tokens),
            tokens=tokens,
            params=SamplingParams(tpot_ms=rng.choice([None, 100.0, 1000.0])),
            shape=Shape.none(),  # not used; `shape_index` is
            shape_index=rng.randint(0, len(self._settings.shapes)),
            max_len=min(len(tokens) + rng.randint(1, longest), longest),
            stop_ids=frozenset({0, 1}),
            seed=rng.getrandbits(64),
            priority=rng.choice([0, 0, 0, 1]),
            conversation=conversation,
        )
        if rng.random() < _ADAPTS:
            of_round = first.scheduler.round_shapes
            _, request.shape_index, request.choices = of_round.allowed(Shape.none(), None)
        return request

    # --- laws -------------------------------------------------------------------------------------

    def _check_end(self) -> None:
        first = self.ranks[0]
        first.ledger.check()
        for rank in self.ranks[1:]:
            if rank.stopped is None:
                rank.ledger.check()
            is_faulty = self.fault is not None and self.fault[1] == rank.rank
            num_records = first.journal.num_records
            if not is_faulty:
                if rank.stopped is not None:
                    raise BrokenLaw(f"rank {rank.rank} stopped without a fault: {rank.stopped}")
                if rank.states != first.states:
                    raise BrokenLaw(f"rank {rank.rank} is not where rank 0 is at the end")
            elif self.fault is not None and self.fault[2] < num_records:
                self._check_stop(rank, *self.fault)

    def _check_stop(self, rank: SimRank, kind: RankFault, _: int, number: int) -> None:
        """Check that a rank whose record went astray stopped at that record, or the next."""
        if rank.stopped is None:
            raise BrokenLaw(f"rank {rank.rank} goes on, though record {number} was {kind}")
        last = {"repeated": number, "restarted": 0}.get(kind, number - 1)
        if len(rank.states) - 1 != last:
            raise BrokenLaw(
                f"record {number} was {kind}, rank {rank.rank} stopped after record "
                f"{len(rank.states) - 1}: {rank.stopped}"
            )


def _controller(settings: Settings, clock: Callable[[], float]) -> BudgetController:
    """Return a controller that chooses by the seconds of rounds, and by a clock."""
    shapes = Shape.none(), *(Shape(*shape) for shape in settings.shapes)
    ranges = {1: RangeConfig(candidates=shapes)}
    return BudgetController(AdaptiveConfig(ranges=ranges, policy="budget"), clock=clock)


def _result(step: Step, shapes: list[Shape]) -> StepResult:
    """Return what a model would give, which depends on the request and the position alone."""
    plan, tokens = step.plan, list[list[int]]()
    for lane, request in enumerate(step.requests):
        if step.is_decode:
            max_accept_len = shapes[int(plan.shapes[lane])].max_accept_len
            count = 1 + _dice(request.seed, len(request.tokens)) % max_accept_len
        else:
            count = int(_is_done(plan, lane, request))
        start = len(request.tokens)
        tokens.append([_dice(request.seed, start + i + 1) % _VOCAB for i in range(count)])
    return StepResult.of_lanes(tokens)


def _is_done(plan: Plan, lane: int, request: Request) -> bool:
    return int(plan.new_len[lane]) >= request.prefill_len


def _dice(seed: int, position: int) -> int:
    mixed = (seed ^ (position * 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9 % (1 << 64)
    return mixed >> 40


def _config(settings: Settings) -> SchedulerConfig:
    return SchedulerConfig(
        max_batch=settings.max_batch,
        prefix_cache=settings.prefix_cache,
        prefill_tokens=settings.prefill_tokens,
        keeps_draft_kv=settings.keeps_draft_kv,
        max_idle=settings.max_sessions,
    )


def _settings(rng: random.Random) -> Settings:
    settings = Settings(
        page_sizes=(rng.choice([1, 4, 16]),),
        num_pages=(),
        placement="shared",
        shapes=tuple(rng.sample(_SHAPES, 2)),
        overlap_depth=rng.randint(0, 1),
        max_batch=rng.choice([2, 4, 8]),
        max_sessions=4,
        prefix_cache=rng.random() < 0.6,
        prefill_tokens=rng.choice([8, 64]),
        max_context_len=rng.choice([40, 100]),
    )
    room = rng.choice([1.0, 1.5, 3.0])
    return replace(settings, num_pages=tuple(int(room * n) for n in settings.pages_per_row()))
