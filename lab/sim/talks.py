"""`Talks`: the sessions of a simulation, and the text that each client has of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from lab.sim.arrivals import STOP, Arrival
from lab.sim.broken_law import BrokenLaw
from lab.sim.indexed import Indexed
from lab.sim.settings import Settings
from lab.sim.watch import Tally, Watch
from specpool._core import Ledger
from specpool.engine.scheduler.conversations import Conversations
from specpool.engine.scheduler.request import Conversation

Origins = tuple[tuple[int, int], ...]


@dataclass(eq=False, slots=True)
class Talk:
    """A session: its turns to come, and the text that its client has.

    Attributes:
        to_come: the turns that have not started.
        due: the turn of the loop after which the session's next turn comes.
        conversation: the scheduler's conversation; None if not open.
        tokens: the tokens of the turns that have ended.
        origins: the requests that these tokens are from, as in `Arrival`.
        watch: the watch of the turn that waits or runs; None if no turn does.
        start: tokens with KV that the latest turn found; 0 if not known, as after a fault.
        drop_ct: the conversation's `drop_ct` when the turn found them.
    """

    to_come: deque[Arrival]
    due: int
    conversation: Conversation | None = None
    tokens: list[int] = field(default_factory=list)
    origins: Origins = ()
    watch: Watch | None = None
    start: int = 0
    drop_ct: int = 0


class Talks:
    """All sessions of a scenario."""

    def __init__(
        self,
        arrivals: Iterable[Arrival],
        ledger: Ledger,
        conversations: Conversations,
        settings: Settings,
        indexed: Indexed,
    ) -> None:
        self._ledger, self._conversations, self._settings = ledger, conversations, settings
        self._indexed = indexed
        self._talks: dict[int, Talk] = {}  # by session number
        for arrival in arrivals:
            talk = self._talks.setdefault(arrival.session, Talk(deque(), arrival.turn))
            talk.to_come.append(arrival)
        self._before: dict[int, tuple[int, int]] = {}  # by session: drops so far, tokens with KV

    @property
    def is_over(self) -> bool:
        """Whether every session has ended its last turn."""
        return all(not talk.to_come and talk.watch is None for talk in self._talks.values())

    @property
    def next_due(self) -> int:
        """The smallest `due` of the sessions with turns to come."""
        return min(talk.due for talk in self._talks.values() if talk.to_come)

    def come(
        self, turn: int, tally: Tally, drain: Callable[[], None]
    ) -> Iterator[tuple[Talk, Arrival]]:
        """Yield each session whose turn comes now, with that turn on top of the session's text.

        Open, fork or rewind the session first. A fork calls `drain`: no step may be in flight.
        """
        for talk in self._talks.values():
            if talk.watch is not None or not talk.to_come or talk.due >= turn:
                continue
            other = self._talks.get(talk.to_come[0].fork_of or 0)
            if talk.conversation is None and other is not None and other.watch is not None:
                continue  # the session to fork is in the middle of a turn
            arrival = talk.to_come.popleft()
            if talk.conversation is None:
                self._open(talk, arrival, tally, drain)
            if arrival.rewind is not None and talk.tokens:
                tally.rewinds += 1
                self._rewind(talk, int(arrival.rewind * len(talk.tokens)))
            yield talk, self._on_top(talk, arrival)

    def ends(self, watch: Watch, turn: int, tally: Tally) -> None:
        """Record that a request has ended; check its session, and close it after its last turn."""
        talk = next((talk for talk in self._talks.values() if talk.watch is watch), None)
        if talk is None:
            return
        request, conversation = watch.request, talk.conversation
        assert conversation is not None
        talk.watch, talk.due = None, turn + watch.arrival.pause
        if request.finish_reason in ("stop", "length"):
            tally.turns += 1
            talk.tokens = list(request.tokens)
            talk.origins = (*watch.arrival.origins, (request.request_id, len(talk.tokens)))
        self._check(talk, request.finish_reason or "")
        if watch.arrival.closes or not talk.to_come:
            self._conversations.close(conversation)
            self._conversations.close(conversation)  # a second call does nothing
            talk.conversation, talk.tokens, talk.origins = None, [], ()

    def look(self) -> None:
        """Note how many tokens with KV each turn would find; call it before `schedule`."""
        self._before = {}
        for number, talk in self._talks.items():
            conversation, watch = talk.conversation, talk.watch
            if conversation is None or watch is None:
                continue
            if row := conversation.row:
                kept_len = self._kept_len(conversation)
            elif row := watch.request.row:  # a retraction cuts it to its checkpoint
                kept_len = self._ledger.checkpoint_len(row) or 0
            else:
                continue
            num_found = min(kept_len, len(watch.request.tokens) - 1)
            if self._settings.keeps_draft_kv and watch.request.shape_index:
                num_found = min(num_found, int(self._ledger.drafted_len[row]))
            self._before[number] = conversation.drop_ct, self._cut_to(row, num_found)

    def start(self, watch: Watch, known_len: int) -> Sequence[int] | None:
        """Return the numbers of tokens with KV that a turn may find on its row.

        None if unknown, or the prefix index has more: `known_len` tokens.
        """
        for number, talk in self._talks.items():
            if talk.watch is watch and number in self._before:
                drop_ct, num_found = self._before[number]
                assert talk.conversation is not None
                if talk.conversation.drop_ct == drop_ct and known_len <= num_found:
                    if self._settings.may_go_back:  # the row may keep less than `num_found`
                        return range(num_found + 1)
                    talk.start, talk.drop_ct = num_found, drop_ct
                    return (num_found,)
        return None

    def lose(self) -> None:
        """Forget what running turns have found, because a fault may have cost them KV."""
        for talk in self._talks.values():
            talk.start = 0

    def common_len(self, watch: Watch) -> int:
        """Return the length of a turn's session so far; for any other request, its own length."""
        talk = next((talk for talk in self._talks.values() if talk.watch is watch), None)
        return len(watch.request.tokens if talk is None else talk.tokens)

    @property
    def idle_rows(self) -> list[int]:
        """The rows of all sessions between turns."""
        return [row for row, _ in self._conversations.rows()]

    def check(self) -> None:
        """Check that each idle row belongs to an open session and is as its last turn left it."""
        for row, conversation in self._conversations.rows():
            name = f"row {row} of session {conversation.number}"
            if conversation.number not in self._conversations.open:
                raise BrokenLaw(f"{name} is kept, and the session is closed")
            if not self._ledger.is_live(row) or self._ledger.epoch[row] != conversation.epoch:
                raise BrokenLaw(f"{name} is not what it was when the session's turn ended")

    def _cut_to(self, row: int, length: int) -> int:
        """Return the row's length after a cut to `length`; a cut in a shared page drops it."""
        if length == self._ledger.resolved_len[row]:
            return length
        shorter = length
        for g, P in enumerate(self._settings.page_sizes):
            if shorter % P and shorter < self._ledger.protected_len(g)[row]:
                page = self._ledger.page_table(g)[row, shorter // P]
                is_indexed = page in self._indexed.pages(g)
                if not is_indexed or self._ledger.ownership_map(g)[2][page] != 2:
                    shorter -= shorter % P
        return length if shorter == length else self._cut_to(row, shorter)

    def _kept_len(self, conversation: Conversation) -> int:
        return int(self._ledger.resolved_len[conversation.row])

    def _open(self, talk: Talk, arrival: Arrival, tally: Tally, drain: Callable[[], None]) -> None:
        other = self._talks.get(arrival.fork_of or 0)
        if other is None or other.conversation is None:
            talk.conversation = self._conversations.new([])
            return
        drain()  # a round of the other session may be in flight
        talk.conversation = self._conversations.fork(other.conversation)
        talk.tokens, talk.origins = list(other.tokens), other.origins
        tally.session_forks += bool(talk.conversation.row)
        self._check(talk, "fork")

    def _rewind(self, talk: Talk, offset: int) -> None:
        assert talk.conversation is not None
        talk.tokens = talk.tokens[:offset]
        talk.origins = tuple(
            (n, min(end, offset))
            for i, (n, end) in enumerate(talk.origins)
            if i == 0 or talk.origins[i - 1][1] < offset
        )
        row, expected = talk.conversation.row, 0
        if row:
            expected = self._cut_to(row, min(self._kept_len(talk.conversation), offset))
        kept_len = self._conversations.cut(talk.conversation, offset)
        # Pages of a window, or the state, may be gone there.
        if kept_len > expected or (kept_len < expected and not self._settings.may_go_back):
            raise BrokenLaw(f"a rewind to {offset} leaves KV of {kept_len} tokens, not {expected}")
        self._check(talk, "rewind")

    def _on_top(self, talk: Talk, arrival: Arrival) -> Arrival:
        """Return the turn after its session's text; if both do not fit, clear the session."""
        longest = self._settings.max_context_len
        if len(talk.tokens) + arrival.prompt_len >= longest:
            assert talk.conversation is not None
            self._conversations.cut(talk.conversation, 0)
            talk.tokens, talk.origins = [], ()
        history = len(talk.tokens)
        return replace(
            arrival,
            prompt_len=history + arrival.prompt_len,
            max_len=min(history + arrival.max_len, longest),
            stop_at=None if arrival.stop_at is None else history + arrival.stop_at,
            origins=talk.origins,
            stops=tuple(i for i, token in enumerate(talk.tokens) if token == STOP),
        )

    def _check(self, talk: Talk, why: str) -> None:
        """Check that the session has exactly its client's tokens, and keeps enough of their KV."""
        conversation = talk.conversation
        assert conversation is not None
        if conversation.tokens != talk.tokens:
            raise BrokenLaw(
                f"after {why} session {conversation.number} has {len(conversation.tokens)} tokens, "
                f"its client {len(talk.tokens)}, or others"
            )
        if not conversation.row:
            is_lost = conversation.handle is None and conversation.drop_ct == talk.drop_ct
            if why == "abort" and talk.start and is_lost:
                raise BrokenLaw(
                    f"session {conversation.number} found KV of {talk.start} tokens for a turn "
                    "that was aborted, and has none now"
                )
            return
        kept_len, num_tokens = self._kept_len(conversation), len(talk.tokens)
        least = num_tokens - 1 if why in ("stop", "length") else min(talk.start, num_tokens)
        if why in ("fork", "rewind"):
            least = 0
        if not least <= kept_len <= num_tokens:
            raise BrokenLaw(
                f"after {why} session {conversation.number} keeps KV of {kept_len} tokens, its "
                f"client has {num_tokens}; {least} at least were to be kept"
            )
