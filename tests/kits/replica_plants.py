"""Bugs for the simulation of replicas to find: each replaces one method."""

from __future__ import annotations

import contextlib

from specpool.serve.replicas.fleet.engine import SimEngine
from specpool.serve.replicas.fleet.fleet import Fleet
from specpool.serve.replicas.fleet.proxy import SimProxy
from specpool.serve.replicas.fleet.replica import SimReplica
from specpool.serve.replicas.routing import Routing
from specpool.serve.sessions import Sessions


def hash_the_session_instead_of_its_owner(patch):
    """As a consistent-hash router does: right until the replicas change."""

    def to_owner(self, call, request, owner, since):
        tag = self._routing.hinted(request["session"], lambda _: 0)
        if tag is None:
            self._anywhere(call, request)
        else:
            self._pass(call, request, tag)

    patch.setattr(SimProxy, "_to_owner", to_owner)


def do_not_wait_for_a_late_list(patch):
    knows = Routing.knows
    table = {"unknown": "gone", "gone": "gone", "here": "here"}
    patch.setattr(Routing, "knows", lambda self, tag: table[knows(self, tag)])


def spill_when_the_owner_is_loaded(patch):
    to_owner = SimProxy._to_owner

    def spill(self, call, request, owner, since):
        if self._load_of(owner) > 3:
            self._anywhere(call, request)
        else:
            to_owner(self, call, request, owner, since)

    patch.setattr(SimProxy, "_to_owner", spill)


def give_a_dead_replicas_tag_to_the_next(patch):
    """Tags by place, and sessions by number: ids come again."""

    def new_replica(self):
        used = {each.tag for each in self._listed.values()}
        tag = next(f"r{i}" for i in range(999) if f"r{i}" not in used)
        return SimReplica(self.world, tag, self.settings)

    def keep(self, conversation, max_tokens):
        record = keep_record(self, conversation, max_tokens)
        del self._records[record.ident]
        record.ident = f"{self._tag}.{conversation.number}"
        self._records[record.ident] = record
        return record

    keep_record = Sessions._keep
    patch.setattr(Fleet, "new_replica", new_replica)
    patch.setattr(Sessions, "_keep", keep)


def append_a_turn_that_is_sent_again(patch):
    begin = Sessions.begin

    def careless(self, ident, offset):
        return begin(self, ident, self.find(ident).offset)

    patch.setattr(Sessions, "begin", careless)


def take_an_old_list(patch):
    def take(self, version, replicas):
        self.version, self.replicas = version, dict(replicas)
        self._routing.update(replicas)

    patch.setattr(SimProxy, "take", take)


def leave_without_draining(patch):
    def drain(self, replica, then):
        if replica.is_up:
            self.leave(replica)
        self._start_later()
        self.world.after(self.settings.start_seconds, then)

    patch.setattr(Fleet, "_drain", drain)


def expire_by_a_clock_that_jumps(patch):
    clock = SimReplica.clock

    def wall(self):
        jumps = 100 if self.world.now > 15 else 0
        return clock(self) + jumps

    patch.setattr(SimReplica, "clock", wall)


def keep_the_pages_of_who_has_left(patch):
    def abort(self, work):
        with contextlib.suppress(ValueError):
            self.waiting.remove(work)
        with contextlib.suppress(ValueError):
            self.running.remove(work)

    patch.setattr(SimEngine, "abort", abort)


def keep_a_session_busy_whose_client_has_left(patch):
    submit = SimReplica._submit
    patch.setattr(
        SimReplica, "_submit", lambda self, call, work, release: submit(self, call, work, _nothing)
    )


def ask_a_second_replica_too(patch):
    """Hedged requests: the faster answer wins, and the other one comes as well."""
    pass_on = SimProxy._pass

    def both(self, call, request, tag):
        pass_on(self, call, request, tag)
        if request["kind"] == "text" and self.world.random.random() < 0.1:
            pass_on(self, call, request, self._routing.spread()[0])

    patch.setattr(SimProxy, "_pass", both)


def forget_to_list_the_new_one(patch):
    def start_later(self):
        self.world.after(self.settings.start_seconds, self.new_replica)

    patch.setattr(Fleet, "_start_later", start_later)


def answer_with_the_newest_session(patch):
    """Sessions mix: a wrong look-up in the table."""

    def find(self, ident):
        record = find_record(self, ident)
        return [*self._records.values()][-1] if len(self._records) > 3 else record

    find_record = Sessions.find
    patch.setattr(Sessions, "find", find)


def _nothing():
    pass
