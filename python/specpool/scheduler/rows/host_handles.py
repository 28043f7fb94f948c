"""`HostHandles`: what requests and conversations keep on the host."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from specpool.errors import NotReady
from specpool.memory.host.tier import Handle, HostTier
from specpool.scheduler.requests.conversation import Conversation
from specpool.scheduler.requests.request import Request


class HostHandles:
    """The handles of requests and conversations. Each handle has one owner.

    Attributes:
        token_seconds: time that the prefill of a token takes; the loop that times it writes it.
    """

    def __init__(self, host: HostTier | None, *, keeps_draft_kv: bool) -> None:
        """Nothing is on the host; without a `host`, nothing will be."""
        self._host, self._keeps_draft_kv = host, keeps_draft_kv
        self.token_seconds = 0.0

    def offload(self, row: int) -> Handle | None:
        """Move the row's KV to the host if that pays; return None if nothing was moved."""
        if self._host is not None and self._host.pays(row, self.token_seconds):
            with contextlib.suppress(NotReady):  # a step of it is under way
                return self._host.offload(row)
        return None

    def take(self, request: Request) -> None:
        """Cut what the request, or its conversation, has on the host to what the request can use.

        The request owns it from here on.
        """
        conversation, handle = request.conversation, request.handle
        if conversation is not None and handle is None:
            handle, conversation.handle = conversation.handle, None
        if handle is not None and self._host is not None:
            drafted_len = handle.drafted_len if self._keeps_draft_kv else handle.length
            request.handle = self._host.trim(handle, request.useful_len(handle.length, drafted_len))

    def return_handle(self, request: Request) -> None:
        """Give what the request has on the host back to its conversation, or drop it."""
        handle, conversation = request.handle, request.conversation
        if conversation is None:
            self.drop(request)
        elif handle is not None and self._host is not None and self._host.holds(handle):
            conversation.handle, request.handle = handle, None

    def drop(self, owner: Conversation | Request) -> None:
        """Keep nothing for it on the host."""
        handle, owner.handle = owner.handle, None
        if handle is not None and self._host is not None and self._host.holds(handle):
            self._host.drop(handle)

    def cut(self, conversation: Conversation, num_tokens: int) -> None:
        """Keep KV of that many tokens of the conversation at most."""
        handle = conversation.handle
        if handle is not None and self._host is not None:
            conversation.handle = self._host.trim(handle, min(num_tokens, handle.length))

    def reloads(
        self, requests: Iterable[Request], max_batch: int
    ) -> tuple[list[Request], list[int], bool]:
        """Return whose KV can come back in one step, at most `max_batch`, and how far.

        Returns:
            The requests, the end of each one's chunk, and whether the step writes draft KV: that is
            so for all of its chunks or for none.
        """
        chosen: list[Request] = []
        ends: list[int] = []
        writes_draft = False
        for request in requests if self._host is not None else ():
            handle = request.handle
            if handle is None or request.prefilled_len >= handle.length:
                continue
            assert self._host is not None
            end, writes = self._host.next_extend(handle, request.prefilled_len)
            if not chosen:
                writes_draft = writes
            if writes == writes_draft and len(chosen) < max_batch:
                chosen.append(request)
                ends.append(end)
        return chosen, ends, writes_draft

    def forget_failed(self, owners: Iterable[Conversation | Request]) -> None:
        """Forget handles whose copies failed: what they were to bring back is prefilled."""
        if self._host is not None:
            for owner in owners:
                if owner.handle is not None and not self._host.holds(owner.handle):
                    owner.handle = None

    def recover(self, owners: list[Conversation | Request]) -> None:
        """Keep what these own alone: Ctrl-C came between any two calls."""
        if self._host is not None:
            self._host.recover([each.handle for each in owners if each.handle is not None])
            self.forget_failed(owners)
