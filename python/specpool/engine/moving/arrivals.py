"""`Arrival`: a row on its way in, whose pages are written run by run between the engine's turns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from specpool._core import Ledger, checksum
from specpool.arrays import Int32
from specpool.engine.core import EngineCore
from specpool.engine.memory.page_bytes import PageBytes
from specpool.engine.transfer.image import Bytes, Image, Run
from specpool.errors import OutOfMemory, OutOfPages, OutOfRows

if TYPE_CHECKING:
    from specpool.engine.scheduler.request import Conversation


class Arrival:
    """A row on its way in. Until `keep` or `index` it is nobody's, and any exception ends it.

    A conversation that no caller knows has the row as an idle one. So a request that needs its
    pages takes them, and Ctrl-C elsewhere does not lose it. If the row is lost, or there was no
    room, the image is read to its end all the same, and the text goes on without KV.

    Attributes:
        conversation: has the text's tokens, if it is a session's.
    """

    def __init__(
        self, core: EngineCore, ledger: Ledger, pages: PageBytes, image: Image, takes_kv: bool
    ) -> None:
        """Take a row for the KV of an image; hold the core's lock."""
        self._core, self._ledger, self._pages, self._image = core, ledger, pages, image
        self._row, self._pages_taken = 0, list[Int32]()
        self.conversation: Conversation = core.scheduler.conversations.new(image.tokens)
        try:
            if takes_kv and image.header.length:
                self._take_row()
        except BaseException:
            self.end()
            raise

    def read(self) -> None:
        """Read the image into the row's pages. Hold no lock: the engine runs between two runs.

        Raises:
            TransferError: a run is damaged, or its sender is gone.
        """
        self._image.read(self._write)

    def keep(self) -> Conversation:
        """Give the row to its conversation, which is an open session's from now on."""
        if self._holds_row():
            length = self._image.header.length
            self._core.scheduler.conversations.keep(self.conversation, self._row, length)
        else:
            self._core.scheduler.conversations.drop_kv(self.conversation)
        return self.conversation

    def index(self, salt: bytes) -> None:
        """Give the KV to the prefix cache, and end the arrival."""
        row, conversations = self._row, self._core.scheduler.conversations
        try:
            if self._holds_row():
                length = self._image.header.length
                tokens = np.array(self._image.tokens[:length], np.int32)
                self._ledger.index(row, tokens, salt)
                conversations.forget(row)
                self._core.scheduler.rows.finish(row)
        finally:
            self.end()

    def end(self) -> None:
        """Give everything back. A second call does nothing."""
        self._core.scheduler.conversations.close(self.conversation)

    def _take_row(self) -> None:
        header, conversations = self._image.header, self._core.scheduler.conversations
        tag = f"arrival {self.conversation.number}"
        while not self._row:
            try:
                self._row = self._ledger.import_row(header.length, header.drafted_len, tag)
            except OutOfPages as shortage:
                if not conversations.reclaim(shortage):
                    return
            except (OutOfRows, OutOfMemory):
                return
        conversations.hold(self.conversation, self._row, header.length)
        tables = [self._ledger.page_table(g)[self._row] for g in range(len(self._ledger.groups))]
        self._pages_taken = [table[table > 0].astype(np.int32) for table in tables]
        slots = [self._ledger.state_slot(g)[[self._row]] for g in range(len(self._ledger.states))]
        self._pages_taken += slots

    def _holds_row(self) -> bool:
        is_ours = self._row > 0 and self.conversation.row == self._row
        return is_ours and self._core.scheduler.conversations.owns(self._row)

    def _write(self, run: Run, data: Bytes) -> int:
        with self._core.lock:  # one forward or copy at a time; others run between the runs
            if self._holds_row():
                return self._pages.write(
                    run.group, self._pages_taken[run.group][run.page_slice], data
                )
        return checksum(data)
