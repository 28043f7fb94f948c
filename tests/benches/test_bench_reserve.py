"""`python -m benches reserve`: its figures are those agreed, a brute force's and a ledger's."""

from __future__ import annotations

import json
from statistics import fmean

import numpy as np
import pytest

from benches import reserve as bench_reserve
from benches.__main__ import main
from benches.reserve import Setting, choices, closed_form
from specpool import Group, Ledger, Shape

TREE = Shape.eagle(2, 3, 9)


def run(monkeypatch, capsys, *args: str) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["benches", "reserve", *args])
    code = 0
    try:
        main()
    except SystemExit as end:
        code = end.code or 0
    out = capsys.readouterr()
    return code, out.out, out.err


def test_the_figures_at_pages_of_64_and_a_tree_of_64(monkeypatch, capsys):
    code, out, err = run(monkeypatch, capsys, "--json")
    assert code == 0, err
    results = json.loads(out)["results"]
    value = {result["name"]: result["value"] for result in results}
    wanted = {
        "double_buffer, shared, holey: all layers": (2112, 2080.5),
        "exact, split, holey: target layers": (133, 101.5),
        "exact, split, dense: target layers": (133, 101.5),
        "exact, split, holey: draft layers": (970, 553.5),
        "exact, split, dense: draft layers": (133, 101.5),
    }
    for name, (worst, mean) in wanted.items():
        assert (value[f"{name}, worst"], value[f"{name}, mean"]) == (worst, mean), name
    assert value["double_buffer, shared, holey: worst"] == 69_696
    assert value["exact, split, holey: worst"] == 5_226
    assert value["exact, split, dense: worst"] == 4_389
    enumerated = [result for result in results if result["reference"] == "brute force"]
    assert len(enumerated) == 2 * (2 + 2 + 4 + 4)
    assert all(result["value"] == result["reference_value"] for result in enumerated)


def test_the_table_shows_both_ways(monkeypatch, capsys):
    code, out, err = run(monkeypatch, capsys)
    assert code == 0, err
    (line,) = [line for line in out.splitlines() if "1 draft" in line and "5,226" in line]
    assert line.count(" 970 ") == line.count(" 553.5 ") == 2


def two_groups(page_size: int, num_rows: int, **options) -> Ledger:
    pages = {"page_size": page_size, "num_pages": 1 << 12}
    groups = [Group("target", **pages), Group("draft", hosts_drafts=True, layout="holey", **pages)]
    return Ledger(groups, [TREE], num_rows=num_rows, max_context_len=1000, **options)


@pytest.mark.parametrize("page_size", [1, 3, 64])
@pytest.mark.parametrize("overlap_depth", [0, 1, 2])
@pytest.mark.parametrize("policy", ["exact", "double_buffer"])
def test_a_real_ledger_claims_what_the_command_says(page_size, overlap_depth, policy):
    """A row at each page offset; its D rounds ahead are claimed one by one."""
    ledger = two_groups(page_size, page_size, overlap_depth=overlap_depth, policy=policy)
    rows = [ledger.admit() for _ in range(page_size)]
    lens = np.arange(page_size, 2 * page_size)
    ledger.launch(ledger.prepare_extend(rows, lens).step)
    for _ in range(overlap_depth + 1):
        plan = ledger.prepare_decode(rows, [1] * page_size)
        ledger.launch(plan.step)
    # With fewer rounds in flight `exact` may have claimed more: holey claims are not monotone.
    depths = range(overlap_depth + 1) if policy == "exact" else [overlap_depth]
    for group, hosts_drafts in enumerate((False, True)):
        claims = [
            closed_form(Setting(page_size, TREE, depth, 2, 1), policy, hosts_drafts, "holey")
            for depth in depths
        ]
        assert (plan.allocated_after[group] - lens).tolist() == np.max(claims, axis=0).tolist()


@pytest.mark.parametrize("page_size", [1, 3, 64])
@pytest.mark.parametrize("policy", ["exact", "double_buffer"])
def test_a_row_of_a_real_ledger_holds_what_the_command_says(page_size, policy):
    """Decodes one token a round through two pages; the claims of the second are compared."""
    ledger = two_groups(page_size, 1, policy=policy)
    row = ledger.admit()
    ledger.launch(ledger.prepare_extend([row], [page_size]).step)
    held = []
    for length in range(page_size, 3 * page_size):
        plan = ledger.prepare_decode([row], [1])
        ledger.launch(plan.step)
        held.append(plan.allocated_after[:, 0] - length)
        ledger.resolve(plan.step, [1])
    found = [
        choice
        for choice in choices(Setting(page_size, TREE, 0, 2, 1))
        if (choice.policy, choice.placement) == (policy, "split")
    ]
    for at, group in enumerate(found[0].groups):
        assert [slots[at] for slots in held[page_size:]] == group.held


@pytest.mark.parametrize("page_size", [1, 2, 3, 16])
@pytest.mark.parametrize("overlap_depth", [0, 1, 2])
@pytest.mark.parametrize("tree", [(3, 1, 4), (1, 4, 5), (2, 2, 7), (5, 8, 64)])
def test_closed_form_and_enumeration_agree(page_size, overlap_depth, tree):
    """`choices` raises where they do not."""
    setting = Setting(page_size, Shape.eagle(*tree), overlap_depth, 3, 2)
    found = list(choices(setting))
    assert len(found) == (8 if page_size > 1 and tree[1] > 1 else 4)
    for choice in found:
        assert choice.layer_slots(fmean) <= choice.layer_slots(max) <= found[0].layer_slots(max)


def test_a_disagreement_is_an_error_exit(monkeypatch, capsys):
    truth = bench_reserve.enumerated
    monkeypatch.setattr(
        bench_reserve,
        "enumerated",
        lambda *how: [slots + how[2] for slots in truth(*how)],  # one too many where drafts lie
    )
    code, out, err = run(monkeypatch, capsys)
    assert code == 2
    assert out == ""
    assert "double_buffer, shared, holey, all layers" in err and "2112" in err and "2113" in err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--shape", "none"], "drafts nothing"),
        (["--shape", "2x1x9"], "got 9"),
        (["--page-size", "0"], "--page-size must be"),
        (["--depth", "-1"], "--depth must be"),
        (["--layers", "0"], "layers"),
        (["--plot", "/no/such/folder/x.png"], "/no/such/folder"),
    ],
)
def test_bad_options_are_one_message(monkeypatch, capsys, args, message):
    code, out, err = run(monkeypatch, capsys, *args)
    assert code == 2
    assert message in err
    assert out == ""


def test_the_picture_shows_layer_slots(monkeypatch, capsys, tmp_path):
    picture = tmp_path / "reserve.png"
    assert run(monkeypatch, capsys, "--json", "--plot", str(picture))[0] == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
