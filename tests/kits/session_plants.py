"""Bugs of sessions, and of what they keep on the host, planted for a simulation to find."""

from __future__ import annotations

import dataclasses

from lab.sim.device import SimHost
from specpool.engine.scheduler.conversations import Conversations
from specpool.engine.scheduler.reclaim import Reclaim
from specpool.engine.scheduler.request import Request
from specpool.engine.scheduler.rows import HostHandles
from specpool.engine.scheduler.scheduler import Scheduler


def keep_the_overshoot(patch):
    """sgl#22897: what was accepted behind the end stays in the session."""
    keep = Conversations.keep
    patch.setattr(Conversations, "keep", lambda self, c, row, n: keep(self, c, row, n + 4))


def forget_the_last_token(patch):
    """sgl#22651: a turn that finishes with a round in flight is one token short."""
    end = Reclaim.end

    def short(self, request, reason):
        end(self, request, reason)
        if reason == "length" and request.conversation is not None:
            del request.conversation.tokens[-1:]

    patch.setattr(Reclaim, "end", short)


def take_a_partial_turn_for_a_checkpoint(patch):
    """sgl#40252: after an abort or a retraction, the text of the turn is the session's."""

    def fall_back(self, request):
        if request.conversation is None:
            return False
        request.conversation.tokens = list(request.tokens)
        self.keep(request.conversation, request.row, len(request.tokens))
        return True

    patch.setattr(Conversations, "fall_back", fall_back)


def give_the_checkpoint_back_with_the_turn(patch):
    patch.setattr(Conversations, "fall_back", lambda self, request: False)


def find_nothing_of_a_session(patch):
    def take(self, request):
        if request.conversation is not None:
            self._give_back(request.conversation)

    patch.setattr(Conversations, "take", take)


def draft_on_old_draft_kv(patch):
    useful_len = Request.useful_len
    patch.setattr(Request, "useful_len", lambda self, kept, drafted: useful_len(self, kept, kept))


def keep_a_row_that_runs(patch):
    """sgl#22753: session and request both claim it."""
    take = Conversations.take

    def taken_twice(self, request):
        idle_row = take(self, request)
        if idle_row is not None:
            request.conversation.row = idle_row[0]
            self._idle[idle_row[0]] = request.conversation
        return idle_row

    patch.setattr(Conversations, "take", taken_twice)


def keep_more_sessions_than_fit(patch):
    init = Conversations.__init__

    def greedy(self, ledger, config, *parts):
        init(self, ledger, dataclasses.replace(config, max_idle=99), *parts)

    patch.setattr(Conversations, "__init__", greedy)


def retract_before_a_session_is_dropped(patch):
    patch.setattr(Conversations, "reclaim", lambda self, shortage: False)


def leave_a_closed_session_its_row(patch):
    patch.setattr(Conversations, "close", lambda self, c: self.open.pop(c.number, None))


def give_idle_rows_back_at_an_interrupt(patch):
    """Give an idle row to another request while its session still believes to have it."""
    recover = Scheduler.recover

    def forgetful(self, why):
        owned = [(row, c) for row, c in self.conversations.rows() if self.conversations.owns(row)]
        recover(self, why)
        for row, conversation in owned:
            if self.state.ledger.is_live(row):
                self.state.ledger.abort(row)
            conversation.row = row

    patch.setattr(Scheduler, "recover", forgetful)


def trust_a_row_that_was_abandoned(patch):
    patch.setattr(Conversations, "forget_lost", lambda self: None)


def resume_behind_what_was_rewound(patch):
    """sgl#22862: what lies past the kept prefix is not freed."""

    def cut(self, conversation, num_tokens):
        del conversation.tokens[num_tokens:]
        return self.kept_len(conversation) if conversation.row else 0

    patch.setattr(Conversations, "cut", cut)


def reload_too_little(patch):
    """The last page of what was on the host does not come back."""
    load = SimHost.load
    patch.setattr(
        SimHost, "load", lambda self, moves: load(self, [(a[:-1], b[:-1]) for a, b in moves])
    )


def go_on_before_a_reload_has_come(patch):
    come_back = Scheduler._finish_reload

    def hasty(self, request, length):
        request.handle and come_back(self, request, request.handle.length)

    patch.setattr(Scheduler, "_finish_reload", hasty)


def keep_the_host_pages_of_who_ended(patch):
    return_handle = HostHandles.return_handle

    def forget(self, request):
        if request.conversation is None:
            request.handle = None
        return_handle(self, request)

    patch.setattr(HostHandles, "return_handle", forget)


def trust_a_copy_that_failed(patch):
    patch.setattr(HostHandles, "forget_failed", lambda self, owners: None)


PLANTS = {
    keep_the_overshoot: "keeps KV of .* tokens, its client has|leaves KV of",
    forget_the_last_token: "has .* tokens, its client",
    take_a_partial_turn_for_a_checkpoint: "has .* tokens, its client",
    give_the_checkpoint_back_with_the_turn: "found KV of .* tokens .*, and has none now",
    find_nothing_of_a_session: "is prefilled from 0 on, it shares",
    draft_on_old_draft_kv: "DraftLag|is prefilled from",
    keep_a_row_that_runs: "are idle at once|requests run in rows|NotReady",
    keep_more_sessions_than_fit: "sessions keep KV, .* may",
    retract_before_a_session_is_dropped: "is retracted, and sessions keep|kv_exhausted",
    leave_a_closed_session_its_row: "is kept, and the session is closed",
    give_idle_rows_back_at_an_interrupt: "leak after an interrupt|is not what it was",
    trust_a_row_that_was_abandoned: "is not what it was when|keeps KV of 0",
    reload_too_little: "position .* (is not written|holds)",
    go_on_before_a_reload_has_come: "came back with|OrderError|is longer than max_chunk",
    keep_the_host_pages_of_who_ended: "at the end the host keeps|OrderError",
    trust_a_copy_that_failed: "OrderError|at the end the host keeps",
    resume_behind_what_was_rewound: "leaves KV of|is prefilled from",
}
