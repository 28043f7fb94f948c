"""`Moves`: sessions and requests that leave for another engine, or come from one.

What leaves is an image: the text, its state, the pages of target and draft KV, and the slot of its
recurrent state. A transfer is a copy of these bytes by any means (docs/transfer.md). If it fails on
the way, the sender takes the row back. If a peer is lost, the text is prefilled. A partial transfer
leaves both engines unchanged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import msgspec
import numpy as np

from specpool._core import Ledger, Shape
from specpool.engine.core import EngineCore, OnItem
from specpool.engine.memory.page_bytes import PageBytes
from specpool.engine.moving.arrivals import Arrival
from specpool.engine.moving.states import (
    MovedRequest,
    MovedSession,
    MovedTurn,
    request_state,
    session_state,
    state_of,
)
from specpool.engine.scheduler.exports import RowExport
from specpool.engine.scheduler.request import Conversation, Request
from specpool.engine.scheduler.wire import ShapeSizes, sizes_of
from specpool.engine.session import Session
from specpool.engine.transfer.image import Bytes, Image, Run, Told, Writer
from specpool.engine.transfer.layout import Layout
from specpool.errors import ConfigError

#: Makes a session, or queues a request and returns its number, once its row is here.
Enter = Callable[[Arrival], "Session | int"]


class Export:
    """A session or request on its way out. End it by `arrived` or `give_back`.

    As a context manager it gives back what has not arrived. Until the end the session takes no
    turns, and the request does not run; other requests go on, also while `write` runs.
    """

    def __init__(
        self,
        core: EngineCore,
        pages: PageBytes,
        row: RowExport,
        writer: Writer,
        owner: Conversation | Request,
    ) -> None:
        """Hold the pages of `row`; most callers want `Engine.export`."""
        self._core, self._pages, self._row = core, pages, row
        self._writer, self._owner = writer, owner
        self._is_over = False

    @property
    def num_bytes(self) -> int:
        """Bytes of the image."""
        return self._writer.num_bytes

    @property
    def length(self) -> int:
        """Tokens whose KV goes along; the receiver prefills the others."""
        return self._row.length

    def write(self, image: Bytes, told: Told | None = None) -> None:
        """Write the image, uint8 [num_bytes]; `told` is called with each run: see `Writer.write`.

        Raises:
            ConfigError: the export is over, or `image` has another size.
        """
        if self._is_over:
            raise ConfigError("the export is over: its pages belong to others")
        if image.shape != (self.num_bytes,) or image.dtype != np.uint8:
            raise ConfigError(
                f"image must be uint8 [{self.num_bytes}], got {image.dtype} {list(image.shape)}"
            )
        self._writer.write(image, self._read, told)

    def image(self) -> Bytes:
        """Return the image in memory of its own."""
        image = np.empty(self.num_bytes, np.uint8)
        self.write(image)
        return image

    def arrived(self) -> None:
        """End the session or request here: another engine has it. A second call does nothing."""
        if self._is_over:
            return
        self._is_over, scheduler = True, self._core.scheduler
        with self._core.lock, self._core.loop.recovering():
            scheduler.exports.arrived(self._row)
            if isinstance(self._owner, Conversation):
                self._owner.leaves = False
                scheduler.conversations.close(self._owner)
            else:
                scheduler.abort(self._owner, "moved")
                if (conversation := self._owner.conversation) is not None:
                    conversation.leaves = False
                    scheduler.conversations.close(conversation)

    def give_back(self) -> None:
        """Let the session or request go on here. After the end it does nothing."""
        if self._is_over:
            return
        self._is_over, exports = True, self._core.scheduler.exports
        with self._core.lock, self._core.loop.recovering():
            if isinstance(self._owner, Conversation):
                exports.return_conversation(self._row, self._owner)
            else:
                if (conversation := self._owner.conversation) is not None:
                    conversation.leaves = False
                exports.return_request(self._row, self._owner)

    def _read(self, run: Run, out: Bytes) -> int:
        pages = self._row.pages[run.group][run.page_slice]
        with self._core.lock:  # one forward or copy at a time; others run between the runs
            return self._pages.read(run.group, pages, out)

    def __enter__(self) -> Export:
        """Return the export itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Give back what has not arrived."""
        self.give_back()


class Moves:
    """The exports and imports of an engine."""

    def __init__(self, core: EngineCore, ledger: Ledger, pages: PageBytes, layout: Layout) -> None:
        """Move rows of `ledger`, whose pages `pages` reads and writes.

        Args:
            core: runs the sessions and requests.
            ledger: has their rows.
            pages: reads and writes the pages.
            layout: of the rows.
        """
        self._core, self._ledger, self._pages, self.layout = core, ledger, pages, layout

    def export_session(self, session: Session) -> Export:
        """Take a session out, with its turn if one waits or runs; see `Engine.export`."""
        core = self._core
        core.loop.drain()  # a round of a turn may be under way, and may end it
        conversation, turn = session.leaving()
        if turn is not None:
            return self._export_turn(turn, conversation, session.max_tokens)
        state = session_state(conversation, session.max_tokens)
        with core.loop.recovering():
            try:
                row = core.scheduler.exports.of_conversation(conversation)
                return self._export(row, conversation.tokens, state, conversation)
            except BaseException:
                conversation.leaves = False
                raise

    def _export_turn(self, turn: Request, conversation: Conversation, max_tokens: int) -> Export:
        """Take a session out with the turn that waits or runs: its row, if it has one."""
        core = self._core
        _check_moves(turn)
        state = session_state(conversation, max_tokens, turn)
        with core.loop.recovering():
            conversation.leaves = True
            try:
                row = core.scheduler.exports.of_request(turn)
                return self._export(row, turn.tokens, state, turn)
            except BaseException:
                conversation.leaves = False
                raise

    def export_request(self, request: Request) -> Export:
        """Take a submitted request out; see `Engine.export`."""
        core = self._core
        core.loop.drain()
        if request.conversation is not None:
            raise ConfigError(
                f"request {request.request_id} is a turn of session "
                f"{request.conversation.number}: export the session"
            )
        _check_moves(request)
        with core.loop.recovering():
            # Samples that wait for their prompt's pages run by themselves, or move one by one.
            core.scheduler.exports.part(core.first_sample(request))
            row = core.scheduler.exports.of_request(request)
            return self._export(row, request.tokens, request_state(request), request)

    def _export(
        self,
        row: RowExport,
        tokens: list[int],
        state: MovedRequest | MovedSession,
        owner: Conversation | Request,
    ) -> Export:
        writer = Writer(
            self.layout,
            length=row.length,
            drafted_len=row.drafted_len,
            tokens=tokens,
            state=msgspec.to_builtins(state, str_keys=True),
        )
        return Export(self._core, self._pages, row, writer, owner)

    def take_in(
        self,
        image: Image,
        on_item: OnItem | None,
        decode: bool,
        on_arrival: Callable[[Session | int], None],
    ) -> Session | int:
        """Take a session or request in; see `Engine.import_row` and `Engine.take_in`.

        Hold no lock: the engine runs between two runs of pages.
        """
        core, state = self._core, state_of(image.state, len(image.tokens))
        if isinstance(state, MovedRequest):
            enter, is_idle = self._enter_request(state, image.tokens, on_item, decode), False
        elif state.turn is not None:
            enter = self._enter_turn(state, state.turn, image.tokens, on_item, decode)
            is_idle = False
        else:
            enter, is_idle = self._enter_session(state, image.tokens), True
        takes_kv = core.scheduler.prefix_cache.is_on or is_idle
        with core.lock, core.loop.recovering():
            arrival = Arrival(core, self._ledger, self._pages, image, takes_kv)
        try:
            arrival.read()
            with core.lock:
                with core.loop.recovering():
                    entered = enter(arrival)
                on_arrival(entered)
            return entered
        except BaseException:
            with core.lock, core.loop.recovering():
                arrival.end()
            raise

    def _enter_session(self, state: MovedSession, tokens: list[int]) -> Enter:
        """Check an idle session; return what makes it of its row."""
        core = self._core
        core.prompts.check_tokens("the session", tokens)

        def enter(arrival: Arrival) -> Session:
            conversation = arrival.keep()
            conversation.said = state.said
            return Session(core, conversation, self._max_tokens(state))

        return enter

    def _enter_request(
        self, state: MovedRequest, tokens: list[int], on_item: OnItem | None, decode: bool
    ) -> Enter:
        """Check a request; return what queues it after its row."""
        request = self._request_of(state, tokens)

        def enter(arrival: Arrival) -> int:
            # The KV waits in the prefix cache, where running requests may displace it.
            arrival.index(request.salt)
            return self._core.submit(request, on_item, decode)

        return enter

    def _enter_turn(
        self,
        state: MovedSession,
        turn: MovedTurn,
        tokens: list[int],
        on_item: OnItem | None,
        decode: bool,
    ) -> Enter:
        """Check a session with its turn; return what makes them of its row."""
        core, history = self._core, state.history or []
        core.prompts.check_tokens("the session", history)
        max_tokens = self._max_tokens(state)
        request = self._request_of(turn, tokens, max_tokens)
        request.said, request.messages = turn.said, turn.messages

        def enter(arrival: Arrival) -> Session:
            arrival.index(request.salt)
            conversation = core.scheduler.conversations.new(history)
            conversation.said, request.conversation = state.said, conversation
            try:
                core.submit(request, on_item, decode)
            except BaseException:
                core.scheduler.conversations.close(conversation)
                raise
            return Session(core, conversation, max_tokens)

        return enter

    def _max_tokens(self, state: MovedSession) -> int:
        return min(state.max_tokens, self.layout.max_context_len)

    def _request_of(
        self, state: MovedRequest, tokens: list[int], max_tokens: int | None = None
    ) -> Request:
        return self._core.prompts.moved(
            tokens,
            state.prompt_len,
            dataclasses.replace(state.params, seed=state.seed, n=1),
            _shape_of(state.shape, self._ledger),
            state.priority,
            state.accept_lens,
            state.prefill_token_indices,
            state.logprobs,
            max_tokens,
        )


def _check_moves(request: Request) -> None:
    """Raise `ConfigError` for a request that cannot move now."""
    number = request.request_id
    if request.finish_reason is not None:
        raise ConfigError(f"request {number} has ended: {request.finish_reason}")
    reasons = {
        "it pins its prompt": request.wants_pin,
        "its KV is on its way from the host": request.handle,
        "its KV may be wrong": request.tainted,
    }
    for why, holds in reasons.items():
        if holds:
            raise ConfigError(f"request {number} cannot be exported: {why}")


def _shape_of(sizes: ShapeSizes | None, ledger: Ledger) -> Shape | None:
    """Return the shape that the request named, if this engine has it; else None."""
    return next((shape for shape in ledger.shapes if sizes_of(shape) == sizes), None)
