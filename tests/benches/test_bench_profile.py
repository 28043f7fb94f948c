"""`python -m benches profile`: every second of a run belongs to one part."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

pytest.importorskip("transformers")

from benches import cpu_profile
from benches.__main__ import main
from benches.cpu_profile import PARTS, PYTHON, parts_of
from benches.peers import Trace


def test_each_operator_counts_once_and_the_rest_is_python() -> None:
    seconds = {
        "aten::mm": 1.0,
        "mkldnn::_linear_pointwise": 2.0,
        "aten::_scaled_dot_product_flash_attention_for_cpu": 0.5,
        cpu_profile.ATTEND: 0.0625,
        "aten::index_copy_": 0.25,
        "aten::mul": 0.125,
        "ProfilerStep#0": 64.0,  # no operator
    }
    assert parts_of(seconds, 5.0) == {
        "linear layers": 3.0,
        "attention": 0.5625,
        "reads and writes of KV": 0.25,
        "small operators": 0.125,
        PYTHON: 1.0625,
    }


def test_the_parts_of_a_run_are_the_run(monkeypatch, capsys) -> None:
    short = replace(Trace.of("one", 259, 64), num_new=4)
    monkeypatch.setattr(cpu_profile.Trace, "of", staticmethod(lambda *_: short))
    argv = "benches profile --size tiny --trace one --json"
    monkeypatch.setattr("sys.argv", argv.split())
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert [row["name"] for row in results] == [f"tiny: one: {part}" for part in (*PARTS, PYTHON)]
    (total,) = {row["reference_value"] for row in results}
    assert sum(row["value"] for row in results) == pytest.approx(total)
    assert all(0 < row["value"] < total for row in results)


@pytest.mark.parametrize(("option", "error"), [("--size big", "size"), ("--trace x", "trace")])
def test_bad_options_are_refused(monkeypatch, capsys, option, error) -> None:
    monkeypatch.setattr(cpu_profile, "_profiles", None)  # nothing runs
    monkeypatch.setattr("sys.argv", ["benches", "profile", *option.split()])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2 and f"{error} must be" in capsys.readouterr().err
