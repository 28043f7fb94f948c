"""Laws of states on a simulated device; each is seen to fail if broken."""

from __future__ import annotations

import pytest

from cli_kit import call
from lab.sim import broken_law, scenario
from lab.sim.states import SimStates
from specpool import Ledger


@pytest.mark.parametrize("rounds", ["2e3", pytest.param("2e5", marks=pytest.mark.full)])
def test_rounds_with_states_break_no_law(capsys, rounds):
    args = ("--states", "--rounds", rounds, "--check", "2", "--seed", "4")
    assert call(capsys, "lab", "sim", *args)[0] == 0


def test_states_run_one_process(capsys):
    code, _, err = call(capsys, "lab", "sim", "--states", "--ranks", "3")
    assert code == 2 and "--states runs one process: leave --ranks out" in err


# --- the guards ---------------------------------------------------------------------------------


def short_ring(monkeypatch):
    """The ring has a record less."""
    ring_len = Ledger.state_ring_len
    monkeypatch.setattr(
        "lab.sim.states.ring_len_of", lambda ledger: ring_len(ledger, 0) - 1, raising=True
    )


def forgotten_write(monkeypatch):
    """A slot keeps what it held."""
    run = SimStates.run

    def careless(states, plan, lane, text, **options):
        slots = states._slots.copy()
        run(states, plan, lane, text, **options)
        if plan.step % 50 == 49:
            states._slots[:] = slots

    monkeypatch.setattr(SimStates, "run", careless)


@pytest.mark.parametrize("plant", [short_ring, forgotten_write])
def test_what_breaks_a_state_is_found(monkeypatch, plant):
    plant(monkeypatch)
    found = (broken_law(scenario(seed, has_states=True)) for seed in range(40))
    message = next(law for law in found if law)
    assert "in its ring" in message or "reads slot" in message
