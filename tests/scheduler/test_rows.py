"""`Rows`: rows are given back in one place, and what the ledger refuses is out of use."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import specpool
from scheduler_loop import Loop, arrival, put_ledger
from sim_plants import Lying
from specpool import SpecpoolError
from specpool.engine.scheduler.request import TokenLogprob
from specpool.engine.scheduler.rows import Rows
from specpool.engine.scheduler.step import StepResult

FOLDER = Path(specpool.__file__).parent
VERBS = {"finish", "abort", "retract", "end_turn", "export"}
#: They have ledgers of their own, beside an engine's.
OTHERS = {"plugins", "testing"}


def calls(path: Path) -> set[str]:
    """The verbs that give a row back, as far as a file calls them on a ledger."""
    return {
        node.func.attr
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in VERBS
        and ast.unparse(node.func.value).endswith("ledger")
    }


def test_a_row_is_given_back_in_one_place():
    """Law: of an engine, only `Rows` gives rows back, also those that go to the host or away.

    `reload` is for a loop of one's own.
    """
    paths = [path.relative_to(FOLDER) for path in FOLDER.rglob("*.py")]
    files = [path for path in paths if path.parts[0] not in OTHERS]
    callers = {str(path): verbs for path in files if (verbs := calls(FOLDER / path))}
    assert callers.pop("engine/memory/host/reload.py") == {"abort"}
    assert callers == {"engine/scheduler/rows.py": VERBS}


class Refusing(Lying):
    """A ledger that takes no row back."""

    def abort(self, row):
        raise SpecpoolError(f"row {row} is damaged")


def running() -> tuple[Loop, Rows]:
    loop = Loop(arrival(1), arrival(2), num_pages=(20,))
    loop.turn()
    loop.take()
    return loop, loop.scheduler.rows


def test_what_nobody_owns_is_given_back_or_is_out_of_use():
    loop, rows = running()
    first, second = (request.row for request in loop.requests)
    free = loop.ledger.free_pages(0)
    rows.abort_all(is_owned=lambda row: row == second)
    assert not loop.ledger.is_live(first) and loop.ledger.is_live(second)
    assert loop.ledger.free_pages(0) > free and not rows.is_quarantined(first)
    put_ledger(loop.scheduler, Refusing(loop.ledger))
    rows.abort_all(is_owned=lambda row: False)
    assert loop.ledger.is_live(second) and rows.is_quarantined(second)


def test_a_row_out_of_use_takes_no_results():
    """It stays so until the ledger has given the row to another request."""
    loop, rows = running()
    loop.turn()
    plan = loop.flying[0].plan
    assert rows.alive(plan).all()
    rows.quarantine(int(plan.rows[1]))
    assert rows.alive(plan).tolist() == [True, False]
    loop.ledger.abort(int(plan.rows[1]))
    assert not rows.is_quarantined(int(plan.rows[1]))
    assert rows.alive(plan).tolist() == [True, False]


@pytest.mark.parametrize("lives", [[True, False, True], [False, False, False]])
def test_the_results_of_some_lanes(lives):
    tokens, not_finite = [[1], [2, 3], [4, 5, 6]], [False, True, True]
    logprobs = [None, [], [TokenLogprob(6, -1.0, {})]]
    result = StepResult(
        tokens=tokens,
        accept_len=np.array([1, 2, 3], np.int32),
        not_finite=np.array(not_finite),
        logprobs=logprobs,
    )
    chosen, wanted = result.select(np.array(lives)), np.flatnonzero(lives).tolist()
    assert chosen.tokens == [tokens[lane] for lane in wanted]
    assert chosen.accept_len.tolist() == [lane + 1 for lane in wanted]
    assert chosen.not_finite.tolist() == [not_finite[lane] for lane in wanted]
    assert chosen.logprobs == [logprobs[lane] for lane in wanted]
    assert replace(result, logprobs=None).select(np.array(lives)).logprobs is None


def test_a_result_of_lanes_counts_their_tokens():
    result = StepResult.of_lanes([[1], [2, 3, -1], []])
    assert result.accept_len.tolist() == [1, 3, 0]
    assert result.not_finite.tolist() == [False, True, False]
