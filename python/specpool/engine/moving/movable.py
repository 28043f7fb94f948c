"""`Movable`: an engine whose sessions and requests can leave for another, and come from one."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping

from specpool._core import Ledger
from specpool.checks import shown
from specpool.engine.core import EngineCore
from specpool.engine.draft import Drafter
from specpool.engine.memory.kv_cache import KVCache
from specpool.engine.memory.page_bytes import PageBytes
from specpool.engine.models import TargetModel
from specpool.engine.models.recurrent import RecurrentState
from specpool.engine.moving.identity import model_key
from specpool.engine.moving.moves import Export, Moves
from specpool.engine.output import Chunk, RequestOutput
from specpool.engine.session import Session
from specpool.engine.transfer.image import Bytes, Image, Wait
from specpool.engine.transfer.layout import Layout
from specpool.engine.transfer.parcel import TakeIn
from specpool.errors import ConfigError


class Movable:
    """The part of `Engine` that moves rows (docs/transfer.md)."""

    core: EngineCore
    target: TargetModel
    drafters: Mapping[str, Drafter]
    ledger: Ledger
    cache: KVCache
    state: RecurrentState | None

    def export(self, what: Session | int) -> Export:
        """Take a session, or a submitted request by its number, out of this engine.

        A turn of the session that waits or runs goes along, and ends here as "moved".

        Other requests go on, also further samples of the same prompt, which move one by one. End
        the export by `Export.arrived` or `Export.give_back`. If the target has recurrent layers,
        the KV of the tokens in the row's state goes along with that state, and the receiver
        computes those behind.

        Raises:
            ConfigError: the session is closed, or on its way already; or the request has ended, or
                is a turn of a session: export the session.
        """
        self.core.prompts.check_open()
        with self.core.lock:
            if isinstance(what, Session):
                if not what.is_of(self.core):
                    raise ConfigError(f"session must be one of this engine's, got {shown(what)}")
                return self._moves.export_session(what)
            return self._moves.export_request(self.core.submitted(what))

    def import_row(
        self,
        image: Bytes | bytes | bytearray | memoryview,
        *,
        decode: bool = True,
        on_item: Callable[[int, Chunk | RequestOutput], None] | None = None,
    ) -> Session | int:
        """Take in what `Export.write` of an engine with the same models has written.

        Other requests go on between two runs of pages. The session goes on with its next turn, the
        request with the next `turn`. Its text is the text that it would have had there. If there is
        no room for the KV, it is computed again.

        Args:
            image: uint8 [n], or bytes such as those of a file; read during the call only.
            decode: as in `submit`, for a request.
            on_item: as in `submit`, also for the turn of a session; the first chunk has the output
                so far.

        Returns:
            The session, or the request's number.

        Raises:
            TransferError: the image is damaged, or of other models. Nothing has changed.
            ConfigError: this engine cannot run the request.
        """
        return self._import(image, None, decode, on_item, lambda arrived: None)

    def take_in(
        self,
        on_arrival: Callable[[Session | int], None],
        *,
        decode: bool = True,
        on_item: Callable[[int, Chunk | RequestOutput], None] | None = None,
    ) -> TakeIn:
        """Return what a receiver of `specpool.engine.transfer` calls with each image.

        Args:
            on_arrival: called with the session or the request's number, while the engine is locked.
            decode: as in `import_row`.
            on_item: as in `import_row`.
        """

        def take(image: Bytes, wait: Wait | None = None) -> Callable[[], None]:
            arrived = self._import(image, wait, decode, on_item, on_arrival)
            return functools.partial(self._undo, arrived)

        return take

    def _import(
        self,
        image: Bytes | bytes | bytearray | memoryview,
        wait: Wait | None,
        decode: bool,
        on_item: Callable[[int, Chunk | RequestOutput], None] | None,
        on_arrival: Callable[[Session | int], None],
    ) -> Session | int:
        self.core.prompts.check_open()
        checked = Image(image, self._moves.layout, wait)
        return self._moves.take_in(checked, on_item, decode, on_arrival)

    def _undo(self, arrived: Session | int) -> None:
        """End an import that its sender got no answer for: the sender goes on with the row."""
        if isinstance(arrived, Session):
            arrived.close()
        else:
            with contextlib.suppress(ConfigError):  # it has ended meanwhile
                self.core.abort(arrived)

    @property
    def layout(self) -> Layout:
        """What rows are made of here: they move between engines with the same `Layout.key`."""
        return self._moves.layout

    @functools.cached_property
    def _moves(self) -> Moves:
        if self.core.journal is not None:
            raise ConfigError("rows of ranks cannot move: each rank holds a part of their KV")
        slots = [] if self.state is None else self.state.slot_buffers
        pages = PageBytes(self.ledger, self.cache, slots)
        key = model_key(self.target, [*self.drafters.values()])
        layout = Layout.from_ledger(self.ledger, pages.page_bytes, key)
        return Moves(self.core, self.ledger, pages, layout)
