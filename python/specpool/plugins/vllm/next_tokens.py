"""The token behind each cached block of a pool, as far as it is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class OpenNote(NamedTuple):
    """A block that was cached before the token behind it was sampled."""

    request: Any  # vLLM's; it holds the block
    block_id: int
    position: int  # of the token that is not sampled yet

    def token(self) -> int | None:
        """Return the token, if it is sampled by now."""
        if self.request.num_tokens <= self.position:
            return None
        token: int = self.request.all_token_ids[self.position]
        return token


class NextTokens:
    """Notes of one pool. A note is open no longer than its request holds the block.

    So it keeps no text alive, and what a preempted request samples again proves nothing of a block
    that it gave back.
    """

    def __init__(self) -> None:
        #: The text whose hit is looked up, if a last block can be proved.
        self.reading: Sequence[int] | None = None
        self._notes: dict[int, int | OpenNote] = {}  # by block
        self._open: dict[str, OpenNote] = {}  # the last one of each request
        self._num_external: dict[str, int] = {}  # tokens, by request

    def __len__(self) -> int:
        return len(self._notes)

    def of(self, block_id: int) -> int | None:
        """Return the token that the draft KV at a block's last position was computed with."""
        note = self._notes.get(block_id)
        return note.token() if isinstance(note, OpenNote) else note

    def note(
        self, request: Any, blocks: Sequence[Any], first: int, end: int, block_size: int
    ) -> None:
        """Note what follows a request's blocks `first` to `end`, which it has just cached."""
        self._close(request.request_id)
        tokens = request.all_token_ids
        num_external = self._num_external.get(request.request_id, 0)
        for index in range(first, end):
            position, block = (index + 1) * block_size, blocks[index]
            if block.block_hash is None or position <= num_external:
                continue  # it was not cached, or not computed here
            if position < len(tokens):
                self._notes[block.block_id] = tokens[position]
            elif position == len(tokens):
                note = OpenNote(request, block.block_id, position)
                self._open[request.request_id] = self._notes[block.block_id] = note

    def note_external(self, request_id: str, num_tokens: int) -> None:
        """Note that another engine computed a request's first tokens, up to `num_tokens`."""
        self._num_external[request_id] = num_tokens

    def let_go(self, request_id: str) -> None:
        """Close what is open of a request that gives its blocks back."""
        self._close(request_id)
        self._num_external.pop(request_id, None)

    def _close(self, request_id: str) -> None:
        note = self._open.pop(request_id, None)
        # The block may hold something else by now, with a note of its own.
        if note is None or self._notes.get(note.block_id) is not note:
            return
        token = note.token()
        if token is None:
            del self._notes[note.block_id]
        else:
            self._notes[note.block_id] = token

    def forget(self, block_id: int) -> None:
        """Forget what follows a block that holds something else from now on."""
        self._notes.pop(block_id, None)

    def clear(self) -> None:
        """Forget what follows all blocks, of which none is held."""
        self._notes.clear()
