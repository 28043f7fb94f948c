"""`specpool tune` measures the candidates and writes what `EngineConfig.adaptive` takes."""

from __future__ import annotations

import json
import re

import pytest

from cli_kit import call
from specpool import Engine, Shape
from specpool.cli import tune
from specpool.cli.tune import REACH, Cell, configuration, parse_candidates
from specpool.engine.shape_names import chain, depth_order, name_of
from specpool.engine.shapes import AdaptiveConfig
from specpool.errors import ConfigError, CorruptState

TREE, WIDE = Shape.eagle(3, 4, 12), Shape.eagle(3, 2, 6)
SMALL = ("tune", "--tokens", "8", "--repeats", "1", "-p", "seq: 1, 2, 3,")


def test_the_file_holds_what_the_figures_imply(capsys, tmp_path):
    """Law: per batch size all that the JSON has within reach of the best, and plain decoding."""
    path, plot = tmp_path / "adaptive.json", tmp_path / "lines.svg"
    words = ("--candidates", "none,chain:3", "--candidates", "tree:3x4x12", "--plot", str(plot))
    code, out, err = call(
        capsys, *SMALL, *words, "--batch", "2", "--batch", "1", "--out", str(path), "--json"
    )
    assert (code, err) == (0, f"written: {path}\n")
    report = json.loads(out)
    values = {result["name"]: result for result in report["results"]}
    assert len(values) == 2 * 2 * 3
    config = AdaptiveConfig.from_file(path)
    assert config == AdaptiveConfig.from_dict(report["configuration"])
    assert config.policy == "cost" and [*config.ranges] == [1, 2]
    for size, batch_range in config.ranges.items():
        for shape in (Shape.none(), chain(3), TREE):
            ends = {size, 2}  # a range holds up to the next one's batch size
            ratios = [values[f"batch {at}, {name_of(shape)}"]["ratio"] for at in ends]
            assert (shape in batch_range.candidates) == (
                not shape.num_steps or max(ratios) >= REACH
            )
            assert max(ratios) <= 1
        accept_len = values[f"batch {size}, chain:3: accept length"]
        assert 2 < accept_len["value"] <= 4 and accept_len["reference_value"] == 1
        assert values[f"batch {size}, none: accept length"]["value"] == 1
    assert "tree:3x4x12" in plot.read_text()
    with Engine.from_pretrained(draft="specpool/tiny-eagle", adaptive=path, max_batch=1) as engine:
        engine.generate("seq: 1,")
        assert engine.stats().adaptive.round_cts


def test_the_table_marks_the_best(capsys):
    code, out, err = call(capsys, *SMALL, "--candidates", "0,3", "--batch", "1")
    assert code == 0, err
    lines = [line for line in out.splitlines() if re.search(r"none|chain:3", line)]
    assert len(lines) == 2 and sum("*" in line for line in lines) == 1
    (best,) = [line for line in lines if "*" in line]
    assert "1.00" in best


CELLS = {
    1: {
        Shape.none(): Cell(10.0, 1.0),
        chain(1): Cell(60.0, 1.8),
        chain(3): Cell(90.0, 3.0),
        TREE: Cell(100.0, 3.4),
        WIDE: Cell(79.0, 3.2),
    },
    8: {
        Shape.none(): Cell(40.0, 1.0),
        chain(1): Cell(100.0, 1.8),
        chain(3): Cell(80.0, 3.0),
        TREE: Cell(20.0, 3.4),
        WIDE: Cell(10.0, 3.2),
    },
}


@pytest.mark.parametrize(
    ("policy", "few", "many"),
    [
        (
            "cost",
            ["none", "chain:1", "chain:3", "tree:3x4x12"],
            ["none", "chain:1", "chain:3"],
        ),
        ("ema", ["none", "chain:1", "tree:3x4x12"], ["none", "chain:1", "chain:3"]),
    ],
)
def test_who_is_within_reach_at_either_end_of_a_range_is_a_candidate(policy, few, many):
    """Law: >= 0.8 of the best at the range's size or the next; of each depth the best for `ema`."""
    content = configuration(CELLS, policy)
    assert content == {"policy": policy, "1": {"candidates": few}, "8": {"candidates": many}}
    AdaptiveConfig.from_dict(content)


def test_candidates_in_words():
    assert parse_candidates(["3, none", "tree:3x4x12"]) == (Shape.none(), chain(3), TREE)
    assert parse_candidates([]) == tuple(sorted(tune.CANDIDATES, key=depth_order))
    for texts, says in (
        (["3,x"], "a shape is .*, got 'x'"),
        (["3", "chain:3"], "hold chain:3 twice"),
    ):
        with pytest.raises(ConfigError, match=f"^--candidates:? {says}"):
            parse_candidates(texts)


def test_nothing_is_written_over_unless_asked(capsys, tmp_path):
    path = tmp_path / "adaptive.json"
    path.write_text("mine")
    words = (*SMALL, "--candidates", "none,1", "--batch", "1", "--out", str(path))
    says = f"error: {path} exists: give --force to write over it\n"
    assert call(capsys, *words) == (2, "", says)
    assert path.read_text() == "mine"
    code, out, err = call(capsys, *words, "--force")
    assert (code, err) == (0, "")
    assert f"written: {path}" in out and [*AdaptiveConfig.from_file(path).ranges] == [1]
    assert [*tmp_path.iterdir()] == [path]


def test_a_file_that_comes_meanwhile_stays(tmp_path):
    path = tmp_path / "adaptive.json"
    path.write_text("theirs")
    with pytest.raises(ConfigError, match="exists: give --force"):
        tune.write(configuration(CELLS, "cost"), path, force=False)
    assert path.read_text() == "theirs" and [*tmp_path.iterdir()] == [path]


def test_an_error_leaves_no_file(capsys, tmp_path, monkeypatch):
    path = tmp_path / "adaptive.json"
    content = configuration(CELLS, "cost")
    read = AdaptiveConfig.from_file
    monkeypatch.setattr(
        AdaptiveConfig, "from_file", lambda path: AdaptiveConfig.default() if read(path) else None
    )
    with pytest.raises(CorruptState, match="would read as"):
        tune.write(content, path, force=False)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--tokens", "0"], "tokens must be an integer in [1, 1048576], got 0"),
        (["--repeats", "0"], "repeats must be an integer in [1, 65536], got 0"),
        (["--batch", "0"], "batch must be an integer in [1, 65536], got 0"),
        (["--policy", "best"], "policy must be one of ema, cost, budget, got 'best'"),
        (["--candidates", "1,chain:1"], "candidates hold chain:1 twice"),
        (["--candidates", "tree:3x4"], "got 'tree:3x4'"),
        (["--candidates", "tree:3x1x9"], "--candidates: 'tree:3x1x9' cannot be built"),
        (["--draft", "none"], "tune needs a draft model: give --draft"),
        (["--target", "/no/such"], "--target: no model at '/no/such'"),
        (["--target", "no/such", "--draft", "ngram"], "no prompt: give --prompt, --prompt-ids or"),
        (["--prompt-file", "/no/such"], "cannot read the prompt file /no/such"),
        (["--out", "/no/such/file.json"], "there is no folder /no/such"),
        (["--out", "/"], "cannot write /: it is a folder"),
        (["--out", "/proc/adaptive.json"], "cannot write /proc/adaptive.json: "),
    ],
)
def test_a_bad_option_is_one_line(capsys, args, says):
    code, out, err = call(capsys, "tune", *args)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1 and says in err


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_adaptive_on_the_command_line(capsys, tmp_path, command):
    path = tmp_path / "adaptive.json"
    path.write_text('{"1": {"candidates": ["chain:x"]}}')
    code, out, err = call(capsys, command, "--adaptive", str(path))
    assert code == 2 and "'chain:x'" in err
    if command == "generate":
        path.write_text('{"1": {"candidates": ["chain:2", "none"]}}')
        words = ("--compare", "-n", "12", "-p", "seq: 1,", "--adaptive", str(path))
        code, out, err = call(capsys, command, *words, "--json")
        assert code == 0, err
        report = json.loads(out)
        assert report["identical_to_plain"] and {*report["chosen"]} <= {"chain:2", "none"}
        assert sum(report["chosen"].values()) == report["rounds"]
        assert "shapes, rounds of each" in call(capsys, command, *words)[1]
