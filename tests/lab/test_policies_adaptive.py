"""`python -m lab adaptive` compares policies and names missed targets."""

from __future__ import annotations

import json

import pytest

from benches.lines import Line
from cli_kit import call
from lab.policies import adaptive
from lab.policies import adaptive_model as model
from lab.policies.adaptive import OURS, THEIRS
from specpool import Shape
from specpool.cli.results import Result, interleaved
from specpool.engine.engine import Engine
from specpool.engine.shape_names import chain
from specpool.engine.shapes import AdaptiveConfig, controller_of

SMALL = ("lab", "adaptive", "--batch", "1", "--batch", "4", "--tokens", "8", "--repeats", "1")
PLAIN = Shape.none()
COSTS = model.Costs({PLAIN: {1: 1.0, 4: 2.0}, chain(1): {1: 1.5, 4: 4.0}, chain(3): {1: 2, 4: 8}})


@pytest.mark.full
def test_the_json_has_both_parts(capsys, monkeypatch):
    monkeypatch.setattr(adaptive, "NUM_ROUNDS", 4)
    code, out, err = call(capsys, *SMALL, "--rounds", "30", "--json")
    assert code == 0, err
    results = json.loads(out)["results"]
    pairs = {(result["name"], result["reference"]): result for result in results}
    assert len(pairs) == len(results)
    for size in (1, 4):
        for policy in (OURS, THEIRS):
            best = pairs[f"simulated, batch {size}: {policy}", "best shape of each phase"]
            assert best["unit"] == "tokens/s" and best["reference_value"] > 0
            (found,) = [
                result
                for (name, reference), result in pairs.items()
                if name == f"batch {size}: {policy}" and reference.startswith("best static shape, ")
            ]
            best_real = found["reference"].removeprefix("best static shape, ")
            plain = pairs[f"batch {size}: {policy}", "plain decoding"]
            assert plain["value"] == found["value"]
            if best_real != "none":
                static = pairs[f"batch {size}: {best_real}", "plain decoding"]
                assert static["value"] == found["reference_value"]
        assert f"batch {size}: {OURS}, of plain decoding" in {name for name, _ in pairs}
        assert f"batch {size}: {THEIRS}, of plain decoding" not in {name for name, _ in pairs}
    assert any("1 to 4 rows by turns" in name for name, _ in pairs)
    assert pairs[f"{OURS}, a round's calls", "target, at most"]["reference_value"] == 20


@pytest.mark.full
def test_either_part_alone_and_a_picture(capsys, tmp_path):
    plot = tmp_path / "bars.svg"
    words = ("lab", "adaptive", "--batch", "1")
    code, out, err = call(capsys, *words, "--repeats", "0", "--rounds", "20", "--plot", str(plot))
    assert code == 0, err
    assert "simulated, batch 1" in out and " batch 1: chain:3" not in out and plot.exists()
    code, out, err = call(capsys, *words, "--tokens", "8", "--repeats", "1", "--rounds", "0")
    assert code == 0, err
    assert "batch 1: chain:3" in out and "│ simulated" not in out


@pytest.mark.parametrize(
    ("least", "most", "says"),
    [(0.9, None, ">= 0.9 [bold]missed"), (0.8, None, ">= 0.8 met"), (None, 7, "<= 7 [bold]missed"),
     (None, 8, "<= 8 met"), (None, None, "")],
)  # fmt: skip
def test_a_miss_is_said(least, most, says):
    line = Line(Result("ours", 8.0, "tokens/s", "theirs", 10.0), least, most)
    assert line.target.startswith(says)
    results = line.results()
    assert results[0] == line.result
    if least is not None:
        name = "ours, of theirs"
        assert results[1:] == [Result(name, 0.8, "times", "target, at least", least)]
        assert (results[1].ratio >= 1) == (line.target.endswith(" met"))


def test_another_text_is_an_error(capsys, monkeypatch):
    """Law: a policy that changes a text ends the run, with the text."""
    generate = Engine.generate

    def lying(self, *args, **options):
        outputs = generate(self, *args, **options)
        if self.config.adaptive is not None:
            outputs[0].token_ids[-1] ^= 1
        return outputs

    monkeypatch.setattr(Engine, "generate", lying)
    words = ("lab", "adaptive", "--batch", "1", "--tokens", "8", "--repeats", "1", "--rounds", "0")
    code, out, err = call(capsys, *words)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {OURS}, prompt 0 says [") and "plain decoding [" in err


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--repeats", "-1"], "--repeats must be an integer in [0, 65536], got -1"),
        (["--rounds", "-1"], "--rounds must be an integer in [0, 1048576], got -1"),
        (["--tokens", "0"], "--tokens must be an integer in [1, 1048576], got 0"),
        (["--batch", "0"], "--batch must be an integer in [1, 1024], got 0"),
        (
            ["--rounds", "0", "--repeats", "0"],
            "rounds and repeats are both 0: there is nothing to measure",
        ),
        (
            ["--tokens", "2000", "--batch", "1"],
            "prompts of 128 tokens and 2000 new ones do not fit the model's 2048 positions",
        ),
    ],
)
def test_a_bad_option_is_one_line(capsys, args, says):
    assert call(capsys, "lab", "adaptive", *args) == (2, "", f"error: {says}\n")


def test_the_model_counts_what_a_shape_is_worth():
    assert model.expected(chain(2), lambda depth, at: 0.5, 0.0) == 1.75
    assert model.expected(PLAIN, lambda depth, at: 0.5, 0.0) == 1.0
    tree = Shape.eagle(2, 4, 8)
    assert model.expected(tree, lambda depth, at: 0.5, 0.0) > 1.75
    assert COSTS.seconds_of(PLAIN, 2) == pytest.approx(4 / 3)
    cells = model.static(PLAIN, COSTS, [1, 4, 4], 6)
    for phase in model.PHASES:
        assert cells[phase, 1].num_rounds == 2 and cells[phase, 4].num_rounds == 4
        # The same work: 2 tokens of one lane, and 4 of each of four, in 2 and 8 seconds.
        assert model.tokens_per_second(cells, phase) == pytest.approx(18 / 10)
    assert model.tokens_per_second(cells) == pytest.approx(18 / 10)


def test_hindsight_takes_the_best_of_each_phase():
    found = [model.static(shape, COSTS, [1], 10) for shape in (PLAIN, chain(1), chain(3))]
    best = model.with_hindsight(found)
    assert best["0.9", 1] is found[2]["0.9", 1]
    assert best["jumps to 0", 1] is found[0]["jumps to 0", 1]


@pytest.mark.parametrize("policy", ["cost", "ema"])
def test_a_replay_is_the_policys_own_and_repeats_itself(policy):
    """Law: one seed, one run; a round counts for the phase and batch size it ran in."""
    names = ["none", "chain:1", "chain:3"]
    config = AdaptiveConfig.from_dict({"policy": policy, "1": {"candidates": names}})
    runs = [model.replay(controller_of(config), COSTS, [1, 4], 60, seed=seed) for seed in (0, 0, 1)]
    assert runs[0].cells == runs[1].cells and runs[0].cells != runs[2].cells
    assert all(cell.num_rounds == 30 for cell in runs[0].cells.values())
    assert len(runs[0].cells) == 2 * len(model.PHASES)
    assert 0 < runs[0].switch_ct == len(runs[0].switch_us) < len(runs[0].round_us)
    merged = model.merged(runs[:2])
    assert merged["0.9", 1].rate == pytest.approx(runs[0].cells["0.9", 1].rate)


def test_every_run_has_one_turn_a_round_and_the_rounds_differ():
    """Law: a run does not always come after the same other run."""
    ran: list[int] = []
    runs = [lambda i=i: float(ran.append(i) or i) for i in range(5)]
    assert interleaved(runs, 8) == [0, 1, 2, 3, 4]
    rounds = [tuple(ran[at : at + 5]) for at in range(0, 40, 5)]
    assert rounds[0] == (0, 1, 2, 3, 4)
    assert all(sorted(each) == [0, 1, 2, 3, 4] for each in rounds) and len({*rounds}) > 4
