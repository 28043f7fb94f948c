"""Bugs for the simulation of replicas to find: each replaces one method."""

from __future__ import annotations

import contextlib
import dataclasses

from lab.fleet.engine import SimEngine
from lab.fleet.fleet import Fleet
from lab.fleet.proxy import SimProxy
from lab.fleet.replica import SimReplica
from specpool.serve.bridge.parcel import ParcelNumbers
from specpool.serve.replicas.mover import Mover
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
        used = {replica.tag for replica in self._listed.values()}
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


# --- sessions that move ---


def leave_without_the_sessions(patch):
    async def close(self, seconds=0.0):
        return 0

    patch.setattr(Mover, "close", close)


def pass_on_own_sessions_alone(patch):
    """What has come from others ends with the replica."""
    misplaced = Mover._misplaced

    def own(self):
        return [record for record in misplaced(self) if record.ident.startswith(self._tag)]

    patch.setattr(Mover, "_misplaced", own)


def answer_for_a_session_that_leaves(patch):
    find = Sessions.find

    def careless(self, ident):
        record = self._records.get(ident)
        if record is not None and record.is_leaving:
            record.is_busy = False
            return record
        return find(self, ident)

    patch.setattr(Sessions, "find", careless)


def go_on_here_if_no_answer_comes(patch):
    """The other replica may have the session, and answers for it too."""

    async def is_taken(self, parcel):
        return await self._peers.send(self._place_of(parcel.ident), parcel) == "taken"

    patch.setattr(Mover, "_is_taken", is_taken)


def forget_a_session_before_the_answer(patch):
    async def careless(self, parcel):
        await self._peers.send(self._place_of(parcel.ident), parcel)
        return True

    patch.setattr(Mover, "_is_taken", careless)


def take_a_parcel_in_again(patch):
    """It came before, and turns have been said since."""
    take_in = Sessions.take_in

    async def careless(self, parcel, **options):
        self._past = ParcelNumbers()
        record = self._records.pop(parcel.ident, None)
        if record is not None:
            await self._client.call("close", record.conversation.number)
        await take_in(self, parcel, **options)

    patch.setattr(Sessions, "take_in", careless)


def do_not_wait_for_a_session_on_its_way(patch):
    async def wait_for(self, ident):
        pass

    patch.setattr(Mover, "wait_for", wait_for)


def send_a_session_anywhere(patch):
    """Routers look for it on the ring."""
    place_of = Mover._place_of

    def anywhere(self, ident):
        home = place_of(self, ident)
        others = sorted(self._tags - {self._tag})
        return home if home in (None, self._tag) or not others else others[0]

    patch.setattr(Mover, "_place_of", anywhere)


def leave_the_last_turn_behind(patch):
    pack = Sessions.pack

    async def short(self, ident):
        record, parcel = await pack(self, ident)
        said = parcel.said[:-1]
        tokens = parcel.tokens[: said[-1].end if said else 0]
        return record, dataclasses.replace(parcel, tokens=tokens, said=said, image=None)

    patch.setattr(Sessions, "pack", short)


def keep_the_row_of_a_session_that_left(patch):
    async def leave(self, record):
        if self._records.get(record.ident) is record:
            self._forget(record)
            self._past.note(record.ident, record.parcel)

    patch.setattr(Sessions, "leave", leave)


def _nothing():
    pass
