"""`python -m benches held-states`: its arithmetic, and what each engine's own classes hold."""

from __future__ import annotations

import pytest

from benches.engines import ENGINES
from benches.held_states import (
    NUM_DRAFTS,
    PEERS,
    WAYS,
    LedgerStates,
    Recurrent,
    StateMemory,
    Visit,
    ask,
    draw_visits,
    own,
    replay,
    results,
)
from figure_tables import Record
from specpool.capacity.state_sizes import StateBytes

SHORT = [Visit(0, 40, [1, 2]), Visit(1, 40, [4, 4, 1])]


class TwoEach(StateMemory):
    """Two states for a request; one more for each that has decoded."""

    def __init__(self) -> None:
        self.states: dict[int, int] = {}

    def begin(self, number: int, prompt_len: int) -> None:
        self.states[number] = 2

    def decode(self, accept_lens):
        for number in accept_lens:
            self.states[number] = 3

    def end(self, number: int) -> None:
        del self.states[number]

    def num_held(self) -> int:
        return sum(self.states.values())


def test_states_are_counted_for_each_running_request_behind_each_step():
    assert replay(SHORT, TwoEach()) == 3


def test_a_state_that_is_still_held_at_the_end_is_an_error():
    class Leaky(TwoEach):
        def end(self, number: int) -> None:
            self.states[number] = 1

    with pytest.raises(AssertionError, match="2 states are held at the end"):
        replay(SHORT, Leaky())


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_the_ledger_holds_a_state_and_a_ring_for_a_request(prefix_cache):
    """Law: a state, and in its bytes the whole ring; with a prefix cache, briefly one more."""
    visits = draw_visits(6, 0.7, seed=1)
    size = StateBytes(slot=1000, record=10, flush=4)
    num_states, num_bytes = own(visits, size, prefix_cache=prefix_cache)
    assert num_states == 1 if not prefix_cache else 1 < num_states < 1.1
    memory = LedgerStates(visits, 4, prefix_cache=prefix_cache)
    ring_len = memory.ledger.state_ring_len(0)
    assert num_bytes == pytest.approx(1000 * num_states + 10 * ring_len)


@pytest.mark.parametrize(("accept_rate", "accept_lens"), [(0, {1}), (1, {1 + NUM_DRAFTS})])
def test_a_round_accepts_the_drafts_before_the_first_wrong_one(accept_rate, accept_lens):
    visits = draw_visits(3, accept_rate, seed=0)
    assert {length for visit in visits for length in visit.accept_lens} == accept_lens
    assert [visit.step for visit in visits] == [0, 4, 8]


def test_a_way_that_an_engine_does_not_serve_has_no_figure():
    answers = {"vllm": {"none": [4.0, 400.0], "align": [4.0, 440.0]}, "sglang": {"ring": [1, 50.0]}}
    figures = results("m", {False: [1.0, 100.0], True: [1.0, 110.0]}, answers)
    assert [(line.name, line.ratio) for line in figures if line.unit == "B"] == [
        ("m: B, vLLM", 0.25),
        ("m: B, SGLang with ReplaySSM", 2),
        ("m: B, vLLM, prefix cache", 0.25),
    ]


@pytest.mark.full
@pytest.mark.parametrize("peer", PEERS)
def test_an_engine_gives_the_states_of_the_record(peer):
    """Law: the classes of the engine that is here hold what the table says."""
    if not (ENGINES / peer / peer).is_dir():
        pytest.skip("make engines")
    models = {"Nemotron-H-8B": Recurrent(24, "nemotron_h", (10240, 4), (128, 64, 128), 8)}
    answer = ask(peer, draw_visits(32, 0.7, seed=0), models)
    record = Record("cpu-held-states")
    for way, (num_states, num_bytes) in answer["Nemotron-H-8B"].items():
        title, _ = WAYS[peer, way]
        assert record.reference(f"Nemotron-H-8B: states, {title}") == pytest.approx(num_states)
        assert record.reference(f"Nemotron-H-8B: B, {title}") == pytest.approx(num_bytes)
