"""Laws of the shapes that a controller chooses, on a simulated device."""

from __future__ import annotations

import pytest

from scheduler_loop import Loop, arrival
from scripted import Scripted
from specpool import ConfigError, Shape
from specpool.capacity.page_needs import PageNeeds
from specpool.engine.scheduler.round_shapes import RoundShapes

NONE, ONE, SEVEN = Shape.none(), Shape.eagle(1, 1, 2), Shape.eagle(7, 1, 8)
OPTIONS = {"placement": "shared", "shapes": ((1, 1, 2), (7, 1, 8))}


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (Shape.eagle(2, 1, 3), "Shape(num_steps=2, topk=1, num_draft_tokens=3)"),
        (ONE, "Shape(num_steps=1, topk=1, num_draft_tokens=2)"),  # the ledger knows it
        (None, "None"),
        ([7], "[7]"),
    ],
)
def test_an_answer_that_is_no_candidate_stops_nothing(monkeypatch, answer, says, depth):
    """Law: it is one error before anything is prepared, and the next turn asks again."""
    script = Scripted([SEVEN, NONE])
    arrivals = [arrival(i, prompt_len=6 * i, max_len=30, adapts=True) for i in (1, 2)]
    options = {**OPTIONS, "num_pages": (30,), "prefill_tokens": 6, "overlap_depth": depth}
    loop = Loop(*arrivals, controller=script, **options)
    loop.turn()
    loop.take()  # the first decodes from here on, the second has two chunks to come
    before = loop.ledger.state_hash()
    with monkeypatch.context() as patch:
        patch.setattr(script, "activate_step_by_batch", lambda batch_size: answer)
        with pytest.raises(ConfigError) as caught:
            loop.scheduler.schedule()
    assert says in str(caught.value)
    assert str(caught.value).endswith(f"none of its candidates {SEVEN}, {NONE}")
    assert loop.ledger.state_hash() == before and not loop.ledger.steps()
    assert not script.given
    steps = loop.turn()
    assert [step.plan.kind for step in steps] == ["extend", "decode"]
    assert script.given == [(SEVEN, 1)]
    loop.run()
    assert {request.finish_reason for request in loop.requests} == {"length"}


def test_a_candidate_that_the_ledger_does_not_know_is_refused_at_the_start():
    with pytest.raises(ConfigError, match=r"candidate Shape\(num_steps=7.*none of .*num_steps=1"):
        RoundShapes([NONE, ONE], 3, Scripted([ONE, SEVEN]))


WIDE = {"placement": "shared", "shapes": ((1, 1, 2), (3, 1, 4), (5, 8, 32)), "num_pages": (24,)}
ALL = [NONE, ONE, Shape.eagle(3, 1, 4), Shape.eagle(5, 8, 32)]


@pytest.mark.parametrize(("most_steps", "num_running"), [(None, 1), (5, 1), (4, 4), (1, 4)])
def test_admission_counts_the_shapes_that_a_request_may_run(most_steps, num_running):
    """Law: a request with a cap needs pages for the widest shape within its own cap."""
    cap = {"adapts": True, "most_steps": most_steps}
    arrivals = [arrival(i, prompt_len=9, **cap) for i in range(1, 5)]
    loop = Loop(*arrivals, controller=Scripted(ALL), **WIDE)
    loop.turn()
    assert loop.scheduler.num_running == num_running
    loop.take()
    loop.run()


def test_pages_are_counted_for_the_widest_shape_within_each_cap():
    ledger = Loop(**WIDE).ledger
    rounds = RoundShapes(ledger.shapes, ledger.num_rows + 1, Scripted(ALL))
    needs = PageNeeds(ledger, 3, rounds.all_choices)
    counts = []
    for cap in (0, 1, 2, 3, 4, 5, None):
        _, index, choices = rounds.allowed(NONE, cap)
        own = choices or (index,)
        assert max(ledger.shapes[i].num_steps for i in own) <= (9 if cap is None else cap)
        most = max(int(needs.pages(8, i)[0]) for i in own)
        assert needs.pages(8, index).tolist() == [most]
        assert needs.max_pages(8, 20, index) == max(ledger.pages_needed(8, 20, i) for i in own)
        counts.append(most)
    assert counts == sorted(counts) and counts[0] < counts[3] < counts[-1]
