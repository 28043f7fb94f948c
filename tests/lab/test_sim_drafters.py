"""Laws of drafters that differ by request, on a simulated device; each is seen to fail."""

from __future__ import annotations

import re

import pytest

from cli_kit import call
from lab.sim import Simulation, broken_law, scenario
from sim_plants import draft_from_old_tokens
from specpool.engine.scheduler.queues import Running
from specpool.engine.scheduler.round_shapes import RoundShapes


def number(name: str, table: str) -> int:
    found = re.search(rf"{name}\s+│\s+([\d,]+)", table)
    assert found is not None, table
    return int(found[1].replace(",", ""))


@pytest.mark.parametrize("rounds", ["3e3", pytest.param("1e5", marks=pytest.mark.full)])
def test_rounds_of_mixed_drafters_break_no_law(capsys, rounds):
    args = ("--mixed-drafters", "--seed", "6", "--rounds", rounds, "--check", "1")
    code, table, _ = call(capsys, "lab", "sim", *args)
    assert code == 0
    assert number("rounds", table) == float(rounds) and number("mixed rounds", table) > 0
    assert number("retractions", table) > 0 and number("findings", table) == 0


def test_sessions_of_mixed_drafters_break_no_law(capsys):
    args = ("--mixed-drafters", "--seed", "6", "--turns", "100", "--check", "1")
    code, table, _ = call(capsys, "lab", "sim", *args)
    assert code == 0 and number("turns", table) >= 100
    assert number("mixed rounds", table) > 0 and number("retractions", table) > 0


def test_drafters_are_mixed_in_every_way():
    """Both kinds at D = 0 and 1, with draft KV and without; some skip rounds, some always."""
    seen = set()
    for seed in range(60):
        found = scenario(seed, mixes_drafters=True)
        kinds = {(arrival.reads_tokens, arrival.doubts) for arrival in found.arrivals}
        settings = found.settings
        seen |= {(settings.overlap_depth, settings.keeps_draft_kv, *kind) for kind in kinds}
    assert len(seen) == 2 * 2 * 2 * 3


def test_samples_of_a_prompt_have_one_drafter():
    checked = 0
    for seed in range(60):
        arrivals = {each.request_id: each for each in scenario(seed, mixes_drafters=True).arrivals}
        for each in arrivals.values():
            if each.sample_of is not None:
                first = arrivals[each.sample_of]
                assert (each.reads_tokens, each.doubts) == (first.reads_tokens, first.doubts)
                checked += 1
    assert checked > 10


def draft_whatever_the_drafter_says(patch):
    look_ahead = RoundShapes.look_ahead
    patch.setattr(
        RoundShapes, "look_ahead", lambda self, request, _: look_ahead(self, request, True)
    )


def take_every_drafter_for_one_without_tokens(patch):
    start = Running.start

    def blind(self, request, row, prefilled_len):
        start(self, request, row, prefilled_len)
        self._reads[row] = False

    patch.setattr(Running, "start", blind)


PLANTS = {
    draft_whatever_the_drafter_says: "runs with shape",
    draft_from_old_tokens: "drafts from .* tokens",
    take_every_drafter_for_one_without_tokens: "drafts from .* tokens",
}


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_each_law_of_a_drafter_is_seen_to_fail(monkeypatch, plant):
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=PLANTS[plant]):
        for seed in range(60):
            found = broken_law(scenario(seed, mixes_drafters=True))
            assert found is None, found


@pytest.mark.parametrize("seeds", [[5, 8], pytest.param([*range(5)], marks=pytest.mark.full)])
def test_the_check_level_changes_nothing_that_happens_to_mixed_drafters(seeds):
    for seed in seeds:
        found = scenario(seed, mixes_drafters=True)
        tallies = [Simulation(found, check).run() for check in (0, 1, 2)]
        assert tallies[0] == tallies[1] == tallies[2]


def test_a_retracted_request_may_be_admitted_again_at_once():
    """Its new row's epoch may be that of its old row; it may find the tokens that it has left."""
    assert broken_law(scenario(3865470566401294, mixes_drafters=True)) is None


def test_a_round_may_be_launched_after_results_that_it_was_prepared_without():
    """A step fails between, and the steps before it are taken over first."""
    assert broken_law(scenario(3865470566401341, mixes_drafters=True)) is None


def test_mixed_drafters_run_one_process(capsys):
    code, _, err = call(capsys, "lab", "sim", "--mixed-drafters", "--ranks", "3")
    assert code == 2 and "--mixed-drafters runs one process: leave --ranks out" in err
