"""`specpool plan --adaptive budget` says what scheduler and budget make of so much memory."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from plan_kit import Case, Server
from specpool._core import Shape, choose_shapes
from specpool.cli import main
from specpool.engine.shape_names import width_order
from specpool.engine.shapes import AdaptiveConfig, BudgetController, RangeConfig

NUMBERS = "--layers 32 --kv-heads 8 --head-dim 128 --memory 24GiB --weights 16GB"
REQUESTS = "--max-context-len 960 --page-size 64 --depth 1"


def budget_of(shapes: list[Shape]) -> BudgetController:
    ranges = {1: RangeConfig(candidates=tuple(shapes))}
    return BudgetController(AdaptiveConfig(ranges=ranges, policy="budget"))


def cases(num: int):
    for seed in range(num):
        case = Case.of(seed)
        shapes = sorted(case.sizes.shapes, key=width_order)
        if len(shapes) > 1 and not case.reads_tokens:
            yield seed, case, shapes


def test_a_budget_admits_as_many_as_planned_and_finds_the_planned_room():
    """Law: the plan's rows are those that the scheduler admits, with what its room gives."""
    kinds = set()
    for seed, case, shapes in cases(400):
        indices = [case.sizes.shapes.index(shape) for shape in shapes]
        mix = case.plan.mixed(case.num_tokens, indices, 0.7)
        server = Server(case, controller=budget_of(shapes))
        scheduler = server.scheduler
        asks = replace(case, prompt_len=case.num_tokens, max_len=case.sizes.max_context_len)
        for number in range(mix.fit.num_requests + 3):
            request = asks.arrival(number + 1, 0.5).request()
            allowed = scheduler.round_shapes.allowed(shapes[-1], None)
            _, request.shape_index, request.choices = allowed
            scheduler.submit(request)
        scheduler.schedule()
        assert scheduler.num_running == mix.fit.num_requests, (seed, mix)
        rows = np.array([request.row for request in scheduler.running])
        width = np.tile(np.array(indices, np.int32), (len(rows), 1))
        room = scheduler._admission.spare(rows, width)
        pages, free = (None, None) if room is None else room
        tokens = [case.plan.round_tokens(index, 0.7) for index in indices]
        nothing = np.zeros(len(indices))
        picks, *_ = choose_shapes(
            np.tile(np.arange(len(indices), dtype=np.int32), (len(rows), 1)),
            np.tile(tokens, (len(rows), 1)),
            worth=np.ones(len(rows)),
            gives=np.ones(len(rows)),
            due=np.zeros((len(rows), 2)),
            base=1.0,
            charge=nothing,
            lane=nothing,
            pages=pages,
            free=free,
        )
        counts = np.bincount(picks, minlength=len(indices)).tolist()
        assert mix.rows == {i: n for i, n in zip(indices, counts, strict=True) if n}, (seed, mix)
        assert sum(mix.rows.values()) == mix.fit.num_requests
        assert mix.tokens == pytest.approx(np.dot(counts, tokens))
        kinds.add((room is None, len(mix.rows) > 1))
    assert {(True, False), (False, True), (False, False)} <= kinds


def planned(capsys, monkeypatch, *args: str) -> dict:
    monkeypatch.setattr("sys.argv", ["specpool", "plan", "--workspace", "0", *args, "--json"])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    return json.loads(capsys.readouterr().out)


def test_the_plan_shows_rows_of_mixed_shapes(monkeypatch, capsys, tmp_path):
    """More rows than with the widest shape for all; the plain rows are those without pages."""
    policy = tmp_path / "budget.json"
    names = ["none", "chain:3", "tree:5x8x64"]
    policy.write_text(json.dumps({"policy": "budget", "1": {"candidates": names}}))
    args = [*NUMBERS.split(), *REQUESTS.split(), "--adaptive", str(policy), "--prompt", "384"]
    found = planned(capsys, monkeypatch, *args, "--output", "256", "--acceptance", "0.5")
    assert found["acceptance"] == 0.5
    assert [line["question"] for line in found["mixed"]] == ["prompts of 384", "half-way: live 512"]
    narrow = {fit["question"]: fit["num_requests"] for fit in reversed(found["fits"])}
    for line in found["mixed"]:
        assert line["num_requests"] == narrow[f"at once, {line['question']}"]
        assert line["num_requests"] > line["widest_num_requests"]
        assert sum(line["shapes"].values()) == line["num_requests"]
        assert set(line["shapes"]) <= {*names}
        assert line["widest_tokens_per_round"] == pytest.approx(
            line["widest_num_requests"] * sum(0.5**depth for depth in range(6))
        )
        assert line["tokens_per_round"] > line["widest_tokens_per_round"]


def test_without_a_budget_the_plan_has_no_mixed_rows(monkeypatch, capsys):
    found = planned(capsys, monkeypatch, *NUMBERS.split(), *REQUESTS.split(), "--prompt", "384")
    assert found["mixed"] == []


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--acceptance 0.5", "--acceptance needs --adaptive"),
        ("--adaptive budget --acceptance 1.5", "must be a number in [0, 1], got 1.5"),
        ("--adaptive budget --acceptance nan", "must be a number in [0, 1], got nan"),
        ("--adaptive budget --shape 3", "leave out --shape 3"),
        ("--adaptive cost", "a plan is for the policy 'budget', got --adaptive cost"),
        ("--adaptive budgt", "budgt"),
        ("--adaptive budget --draft-layers 0", "there is no draft model"),
    ],
)
def test_a_wrong_question_about_a_budget_is_one_line(monkeypatch, capsys, args, message):
    argv = [
        "specpool",
        "plan",
        "--workspace",
        "0",
        *NUMBERS.split(),
        *REQUESTS.split(),
        *args.split(),
    ]
    monkeypatch.setattr("sys.argv", argv)
    with pytest.raises(SystemExit) as end:
        main()
    err = capsys.readouterr().err
    assert end.value.code == 2 and message in " ".join(err.split())
