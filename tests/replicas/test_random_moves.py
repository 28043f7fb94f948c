"""Random fleets in which parcels come late, twice or never, and clients leave in mid-call."""

from __future__ import annotations

import pytest

import moving_fleet
from moving_fleet import run_fleet
from specpool.serve.bridge.parcel import ParcelNumbers
from specpool.serve.sessions import Sessions

KINDS = {
    "calm": {"late_share": 0.0, "leave_share": 0.0, "fault_share": 0.0, "flaps": False},
    "lists flap": {"late_share": 0.0, "leave_share": 0.0},
    "clients leave": {"leave_share": 0.4, "late_share": 0.0},
    "parcels are late": {"leave_share": 0.0, "late_share": 0.5},
    "replicas are full": {"late_share": 0.5, "fault_share": 0.3, "max_sessions": 4},
    "parcels are lost": {"loss": 0.2, "late_share": 0.2},
    "replicas are killed": {"kills": True, "loss": 0.1, "max_sessions": 8},
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", KINDS)
def test_no_fleet_breaks_a_law(kind):
    """Laws: one answers for a session, with its client's text; nothing leaks; losses have reasons.

    What was closed stays closed. The front and the engine have the same sessions and texts.
    """
    fleets = [run_fleet(seed, **KINDS[kind]) for seed in range(15)]
    assert sum(fleet.num_turns for fleet in fleets) > 1200
    assert sum(len(who) > 1 for fleet in fleets for who in fleet.holders.values()) > 60
    assert kind not in ("calm", "lists flap") or not sum(fleet.num_lost for fleet in fleets)
    assert kind != "clients leave" or sum(fleet.num_left for fleet in fleets) > 600


def let_a_refused_parcel_come_in_later(patch):
    note = ParcelNumbers.note
    patch.setattr(
        ParcelNumbers,
        "note",
        lambda self, ident, number: None if self.is_refused else note(self, ident, number),
    )
    make = Sessions.__init__

    def init(self, *args, **options):
        make(self, *args, **options)
        self._past.is_refused, self._refused.is_refused = False, True

    patch.setattr(Sessions, "__init__", init)


def stop_in_the_middle_of_a_call(patch):
    async def whole(work, undo=None):
        return await work

    patch.setattr(moving_fleet, "whole", whole)


def keep_what_nobody_heard_of(patch):
    whole = moving_fleet.whole
    patch.setattr(moving_fleet, "whole", lambda work, undo=None: whole(work))


def forget_what_has_moved_on(patch):
    patch.setattr(ParcelNumbers, "latest", lambda self, ident: 0)


PLANTS = [
    let_a_refused_parcel_come_in_later,
    stop_in_the_middle_of_a_call,
    keep_what_nobody_heard_of,
    forget_what_has_moved_on,
]


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_each_planted_bug_is_found(monkeypatch, plant):
    plant(monkeypatch)
    for seed in range(60):
        for kind in KINDS.values():
            try:
                run_fleet(seed, **kind)
            except Exception as error:  # a law, or what the sessions say themselves
                print(seed, type(error).__name__, error)
                return
    raise AssertionError("not found in 360 fleets")
