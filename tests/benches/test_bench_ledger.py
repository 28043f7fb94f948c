"""`python -m benches ledger`: what it prints, and that both of its sides do their work."""

from __future__ import annotations

import functools
import json

import numpy as np
import pytest

from benches import ledger as bench_ledger
from benches.__main__ import main
from benches.ledger import Target
from benches.ledger_load import END, LedgerLoad, PlainLoad, Setting
from benches.plain_ledger import PlainLedger
from paths import VECTORS
from specpool import Shape

#: Two commands tell of the same measurements, of pools of a million pages.
POOLS_ONCE, RECORDING_ONCE = map(functools.cache, (bench_ledger._pools, bench_ledger._recording))
TREE = Shape.eagle(5, 8, 64)


def run(monkeypatch, capsys, *args: str) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["benches", "ledger", *args])
    monkeypatch.setattr(bench_ledger, "_pools", POOLS_ONCE)
    monkeypatch.setattr(bench_ledger, "_recording", RECORDING_ONCE)
    code = 0
    try:
        main()
    except SystemExit as end:
        code = end.code or 0
    out = capsys.readouterr()
    return code, out.out, out.err


def test_it_prints_the_agreed_object_and_a_picture(monkeypatch, capsys, tmp_path):
    picture = tmp_path / "ledger.png"
    args = ("--batch", "1", "--batch", "2", "--repeats", "1", "--plot", str(picture), "--json")
    code, out, err = run(monkeypatch, capsys, *args)
    assert code == 0, err
    report = json.loads(out)
    assert {"date", "cpu", "cores", "python", "numpy"} <= set(report["machine"])
    results = {(result["name"], result["reference"]): result for result in report["results"]}
    for name in ("tree 5/8/64, P=64", "chain S=4, P=16"):
        assert results[f"{name}, 2 rows", "plain Python"]["value"] > 0
        assert results[f"{name}, 1 rows", "target, at most"]["reference_value"] == 4
    recorded = results["tree 5/8/64, P=64, 256 rows, recorded", "not recorded"]
    assert recorded["unit"] == "us/step"
    # Bookkeeping is small beside what it manages: a page's record, table cell and delta mark.
    page = next(result for result in report["results"] if result["name"].startswith("a page"))
    assert 20 < page["value"] < 200
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_table_says_which_targets_are_met(monkeypatch, capsys):
    code, out, err = run(monkeypatch, capsys, "--batch", "1", "--repeats", "1")
    assert code == 0, err
    (line,) = [line for line in out.splitlines() if "<= 4 us/step" in line and "tree" in line]
    assert "yes" in line or "no" in line
    assert [Target("x", 2, "us", 2).met, Target("x", 3, "us", 2).met] == [True, False]
    assert [Target("x", 2, "x", 2, True).met, Target("x", 1, "x", 2, True).met] == [True, False]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--batch", "0"], "batch"),
        (["--repeats", "0"], "repeats"),
        (["--depth", "-1"], "--depth must be"),
        (["--layout", "loose"], "loose"),
        (["--plot", "/no/such/folder/x.png"], "/no/such/folder"),
    ],
)
def test_bad_options_are_one_message(monkeypatch, capsys, args, message):
    code, out, err = run(monkeypatch, capsys, *args)
    assert code == 2
    assert message in err
    assert out == ""


@pytest.mark.parametrize(
    "options", [{}, {"overlap_depth": 1}, {"placement": "split"}, {"layout": "holey"}]
)
def test_the_load_on_the_ledger_is_real(options):
    """Rows grow, end, are replaced, and nothing leaks."""
    setting = Setting("tree", 64, TREE, **options)
    ledger = setting.ledger(8)
    load = LedgerLoad(setting, 8, ledger)
    epochs = ledger.epoch.sum()
    for _ in range(1000):
        load.step()
        load.refill()
        assert (ledger.resolved_len[load.rows] < END).all()
    ledger.check()
    assert ledger.epoch.sum() >= epochs + 8  # every request was replaced, and some of the new ones
    load.drain()
    for group in range(len(ledger.groups)):
        assert ledger.free_pages(group) == ledger.groups[group].num_pages


def test_the_load_in_plain_python_is_real():
    setting = Setting("chain", 16, Shape.eagle(4, 1, 5))
    load = PlainLoad(setting, 8)
    first = set(load.reqs)
    for _ in range(1000):
        load.step()
        load.refill()
        assert all(req.kv_committed_len < END for req in load.reqs)
    assert not first & set(load.reqs)
    table = load.plain.page_table
    held = sum(req.kv_allocated_len for req in load.reqs) // 16
    assert len(set(table[table > 0].tolist())) == held == np.count_nonzero(table)
    assert not set(table[table > 0].tolist()) & set(load.plain.free_pages)


def test_the_plain_side_claims_what_sglang_claims():
    """Every recorded case: the estimate, and the lengths after prepare."""
    for case in json.loads((VECTORS / "sizing.json").read_text())["cases"]:
        page_size = case["page_size"]
        plain = PlainLedger(
            page_size=page_size,
            num_pages=sum(case["next_allocated"]) // page_size,
            num_rows=len(case["committed"]),
            pages_per_row=max(case["next_allocated"]) // page_size,
            reserve=case["reserve_per_decode"],
        )
        reqs = [plain.admit() for _ in case["committed"]]
        plain.prepare_for_extend(reqs, case["allocated"])
        for req, committed in zip(reqs, case["committed"], strict=True):
            req.kv_committed_len = committed
        assert plain.new_tokens_required_next_decode(reqs) == case["tokens_required"]
        free = len(plain.free_pages)
        claim = plain.prepare_for_decode(reqs)
        assert claim.nxt_kv_lens.tolist() == case["next_allocated"]
        assert (free - len(plain.free_pages)) * page_size == case["tokens_required"]
        assert plain.page_table[claim.rows, claim.columns].tolist() == claim.pages.tolist()
        plain.resolve(reqs, np.full(len(reqs), 3, np.int32))
        assert [req.kv_committed_len for req in reqs] == [n + 3 for n in case["committed"]]


def test_the_plain_side_refuses_what_it_cannot_give():
    plain = PlainLedger(page_size=4, num_pages=3, num_rows=1, pages_per_row=9, reserve=8)
    req = plain.admit()
    plain.prepare_for_extend([req], [5])
    with pytest.raises(MemoryError, match="need 2 pages, 1 free"):
        plain.prepare_for_decode([req])
    plain.release(req)
    assert sorted(plain.free_pages) == [1, 2, 3]
