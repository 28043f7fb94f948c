"""`python -m benches reserve --trace`: one trace on the same bytes, upstream's way and ours."""

from __future__ import annotations

import functools
import json
from dataclasses import replace

import pytest

from benches import trace
from benches.__main__ import main
from benches.trace import (
    CHAIN,
    KV_BYTES,
    TREE,
    Comparison,
    Machinery,
    Traffic,
    is_asked_for,
    results,
    run_trace,
    ways,
)
from specpool import ConfigError, Shape

#: Two commands tell of the same runs, which are functions of their arguments.
RUN_ONCE = functools.cache(run_trace)
SMALL = ("--requests", "24", "--prompt", "96", "--output", "48", "--memory", "2GiB")


def bench(monkeypatch, capsys, *args: str) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["benches", "reserve", *args])
    monkeypatch.setattr(trace, "run_trace", RUN_ONCE)
    code = 0
    try:
        main()
    except SystemExit as end:
        code = end.code or 0
    out = capsys.readouterr()
    return code, out.out, out.err


@pytest.fixture(scope="module")
def machinery() -> Machinery:
    return Machinery(64, 1, 32, 1, 2 << 30, 0)


@pytest.mark.parametrize("shape", [TREE, CHAIN])
def test_all_ways_finish_every_token_on_the_same_bytes(machinery, shape):
    traffic = Traffic("small", shape, 96, 48, 40, 0.7, 3)
    wanted = sum(a.max_len - a.prompt_len for a in traffic.arrivals())
    runs = [run_trace(machinery, way, traffic) for way in ways(64, shape)]
    assert [run.tokens for run in runs] == [wanted] * len(runs)
    assert all(run.unfinished == 0 for run in runs)
    page_bytes = 33 * 64 * 4096
    for run in runs:  # rounded down by less than a page of each group
        assert machinery.kv_bytes - page_bytes < run.sizes.num_bytes <= machinery.kv_bytes
    upstream, *ours = runs
    for run in ours:
        assert run.mean_running >= upstream.mean_running
        assert max(run.running) >= max(upstream.running)
        assert run.rounds <= upstream.rounds


def test_memory_pays():
    """The trace that the project asks for: three times the requests at once."""
    machinery = Machinery(64, 1, 32, 1, KV_BYTES, 0)
    traffic = Traffic("asked for", TREE, 384, 256, 512, 0.7, 0)
    assert is_asked_for(machinery, traffic)
    for other in ({"num_requests": 511}, {"mean_prompt_len": 383}, {"shape": CHAIN}):
        assert not is_asked_for(machinery, replace(traffic, **other))
    for other in ({"page_size": 16}, {"overlap_depth": 0}, {"draft_layers": 2}):
        assert not is_asked_for(replace(machinery, **other), traffic)
    runs = [(way, run_trace(machinery, way, traffic)) for way in ways(64, TREE)[:2]]
    target = results([Comparison(traffic, runs, has_target=True)])[-1]
    assert (target.unit, target.reference, target.reference_value) == (
        "times",
        "target, at least",
        3,
    )
    assert target.value == runs[1][1].mean_running / runs[0][1].mean_running >= 3


def test_memory_is_what_decides(machinery):
    """Four times the bytes: upstream runs more at once; the limit on rows is never met."""
    traffic = Traffic("small", TREE, 96, 48, 60, 0.7, 3)
    upstream = ways(64, TREE)[0]
    few = run_trace(machinery, upstream, traffic)
    many = run_trace(Machinery(64, 1, 32, 1, 8 << 30, 0), upstream, traffic)
    assert max(few.running) * 3 < max(many.running) < 60
    assert few.rounds > many.rounds


def test_the_account_of_slots_is_whole_and_a_budget_reserves_less():
    """Law: tokens, rests of pages, reserve and free slots are all slots but page 0 and a few."""
    machinery, traffic = Machinery(64, 1, 32, 1, 1 << 30, 0), Traffic("x", TREE, 96, 48, 60, 0.7, 3)
    _, tree, *_, budget = (run_trace(machinery, way, traffic) for way in ways(64, TREE))
    for run in (tree, budget):
        assert len(run.held) > 10
        assert 0.9 < sum(run.shares) <= 1.0
        tokens, rest, reserve, free = run.shares
        assert tokens > 0.3 and 0 < rest < tokens and 0 < reserve and free < 0.3
    assert budget.shares[2] < 0.7 * tree.shares[2]
    assert budget.shares[0] > tree.shares[0]


def test_headroom_buys_fewer_retractions(machinery):
    traffic = Traffic("small", TREE, 192, 128, 60, 0.7, 3)
    holey = ways(64, TREE)[-1]
    bare = run_trace(machinery, holey, traffic)
    roomy = run_trace(Machinery(64, 1, 32, 1, 2 << 30, 64), holey, traffic)
    assert roomy.retractions < bare.retractions / 10
    assert roomy.tokens == bare.tokens


def test_a_trace_is_its_seeds():
    def traffic(seed: int) -> Traffic:
        return Traffic("x", TREE, 96, 48, 200, 0.7, seed)

    assert traffic(1).arrivals() == traffic(1).arrivals() != traffic(2).arrivals()
    lens = [(a.prompt_len, a.max_len - a.prompt_len) for a in traffic(1).arrivals()]
    for at, mean in enumerate((96, 48)):
        found = [pair[at] for pair in lens]
        assert min(found) >= mean / 2 and max(found) <= mean * 1.5
        assert sum(found) / len(found) == pytest.approx(mean, rel=0.1)
    assert max(map(sum, lens)) <= traffic(1).max_context_len


def test_the_json_has_every_figure_of_every_way(monkeypatch, capsys):
    code, out, err = bench(monkeypatch, capsys, "--trace", *SMALL, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert set(found) == {"machine", "results"}
    results = found["results"]
    keys = {"name", "value", "unit", "reference", "reference_value", "ratio"}
    assert all(set(result) == keys for result in results)
    held = [result for result in results if ": held, " in result["name"]]  # where requests waited
    assert len(held) % 4 == 0
    wider = [result for result in results if "a budget / the widest" in result["name"]]
    assert len(wider) == 3
    most = [result for result in results if "if rows held no more than" in result["name"]]
    assert all(result["value"] >= 1 for result in most)
    # Ways of each traffic, figures of each way.
    assert len(results) - len(held) - len(wider) - len(most) == (4 + 4 + 4 + 2) * 6
    for result in results:
        assert result["ratio"] == pytest.approx(result["value"] / result["reference_value"])
    value = {result["name"]: result["value"] for result in results}
    traffic = "5x8x64, prompt 96, output 48"
    ours = value[f"{traffic}; specpool: exact, split, dense: running, mean"]
    assert ours > value[f"{traffic}; SGLang: double_buffer, shared, holey: running, mean"]
    assert "5x8x64, live 2048; specpool: exact, split, holey: retractions" in value


def test_the_table_and_the_picture(monkeypatch, capsys, tmp_path):
    picture = tmp_path / "trace.png"
    code, out, err = bench(monkeypatch, capsys, "--trace", *SMALL, "--plot", str(picture))
    assert code == 0, err
    assert "live 8192" in out and "3x1x4" in out and "24 requests" in out
    assert ">= 3" not in out  # a target of the default trace only
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_memory_for_less_than_a_row_is_refused_before_anything_runs(machinery):
    with pytest.raises(ConfigError, match=r"one row of 216 tokens needs .* 1 MiB are"):
        tiny = Machinery(64, 1, 32, 1, 1 << 20, 0)
        tiny.sizes(ways(64, TREE)[0], Traffic("x", TREE, 96, 48, 8, 0.7, 0))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--seed", "3"], "only --trace takes --seed"),
        (["--accept-rate", "0.5", "--memory", "1G"], "only --trace takes --memory, --accept-rate"),
        (["--trace", "--requests", "0"], "requests must be an integer in [1, 65536], got 0"),
        (["--trace", "--output", "1"], "output must be an integer in [2, 16384], got 1"),
        (["--trace", "--accept-rate", "1"], "--accept-rate must be a number in [0, 1), got 1"),
        (["--trace", "--accept-rate", "nan"], "--accept-rate must be a number in [0, 1), got nan"),
        (["--trace", "--memory", "much"], "memory must be bytes, such as 80GiB"),
        (["--trace", "--memory", "1MiB"], "one row of 960 tokens needs"),
        (["--trace", "--depth", "2"], "--depth must be an integer in [0, 1], got 2"),
        (["--trace", "--shape", "0"], "shape 0 drafts nothing"),
        (["--trace", "--plot", "/no/such/folder/x.png"], "/no/such/folder"),
    ],
)
def test_a_bad_option_is_one_line(monkeypatch, capsys, args, message):
    code, out, err = bench(monkeypatch, capsys, *args)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1 and message in err


def test_ways_are_upstreams_then_ours():
    assert [way.layout for way in ways(64, TREE)] == ["holey", "dense", "holey", "dense"]
    assert [way.layout for way in ways(64, CHAIN)] == ["dense", "dense"]
    assert [way.layout for way in ways(1, TREE)] == ["dense", "dense", "dense"]
    assert Shape.eagle(5, 8, 64) == TREE
