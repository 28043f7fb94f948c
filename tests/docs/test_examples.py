"""The examples run, and print what they promise."""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import warm_kit
from cargo_kit import build
from paths import ROOT, VECTORS


def run(name: str, *args: str) -> str:
    """The output of an example, run as a reader would."""
    command = [sys.executable, str(ROOT / "examples" / name), *args]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_the_scheduler_serves_everybody_and_leaks_nothing():
    numbers = [int(number) for number in re.findall(r"\d+", run("scheduler.py"))]
    requests, rounds, retractions, free, pages, fenced, free_rows, rows = numbers
    assert (free, fenced, free_rows) == (pages, 0, rows)
    assert rounds > requests and retractions > 0


def test_the_overlapped_scheduler_serves_everybody_and_leaks_nothing():
    numbers = [int(number) for number in re.findall(r"\d+", run("overlapped_scheduler.py"))]
    requests, turns, retractions, reused, free, pages = numbers
    assert (requests, free) == (12, pages)
    assert turns > requests and retractions and reused


def test_the_scheduler_on_blocks_serves_everybody_and_leaks_nothing():
    numbers = [int(number) for number in re.findall(r"\d+", run("block_scheduler.py"))]
    requests, _, computed, tokens, preemptions, left = numbers
    assert (requests, left) == (60, 0)
    assert computed < tokens and preemptions


@pytest.mark.skipif(shutil.which("cargo") is None, reason="needs cargo")
def test_the_schedulers_in_rust_and_python_are_twins():
    command = [build("--examples") / "examples" / "scheduler"]
    rust = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert run("scheduler.py") == rust


def test_examples_use_public_names_alone():
    """What a reader copies stands in the documentation: no `_core`, no `._field`."""
    found = {
        path.name: names
        for path in (ROOT / "examples").glob("*.py")
        if (names := re.findall(r"(?:import |[,.] *)(_[a-z]\w*)", path.read_text("utf-8")))
    }
    assert found == {}


def test_the_scheduler_needs_numpy_alone():
    code = (
        "import sys, runpy; runpy.run_path(sys.argv[1], run_name='__main__'); "
        "print([name for name in ('torch', 'transformers', 'rich') if name in sys.modules])"
    )
    command = [sys.executable, "-c", code, str(ROOT / "examples" / "scheduler.py")]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "[]"


CHECKPOINT = str(ROOT / "examples" / "checkpoint.py")


def _killed(path: Path, line: str) -> str:
    """What the checkpoint's example answers to a line; it is killed right after."""
    command = [sys.executable, CHECKPOINT, str(path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with warm_kit.Popen(command, **pipes) as process:
        process.stdin.write(line + "\n")
        process.stdin.flush()
        answer = process.stdout.readline().rstrip("\n")
        process.kill()
    return answer


def test_a_conversation_goes_on_after_its_process_was_killed(tmp_path, monkeypatch, capsys):
    lines = ["The moon ", " and the sun ", " and all the stars "]
    monkeypatch.setattr(sys, "argv", [CHECKPOINT, str(tmp_path / "whole")])
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    runpy.run_path(CHECKPOINT, run_name="__main__")
    whole = capsys.readouterr().out.splitlines()
    parts = [_killed(tmp_path / "parts", line) for line in lines]
    assert parts == whole
    reused = [int(re.search(r"(\d+) tokens were there", line)[1]) for line in parts]
    assert reused[0] == 0 and 0 < reused[1] < reused[2]


@pytest.mark.full
def test_prompt_lookup_is_accepted():
    tokens, rounds, accept_len = re.findall(r"[\d.]+", run("prompt_lookup.py").splitlines()[-1])
    assert int(tokens) == 96 and int(rounds) < 48
    assert float(accept_len) > 2


def test_the_adapter_gives_sglangs_figures():
    cases = json.loads((VECTORS / "sizing.json").read_text())["cases"]
    out = run("sglang_adapter.py", str(VECTORS / "sizing.json"))
    num_cases, num_run, num_recorded = (int(number) for number in re.findall(r"\d+", out))
    assert (num_cases, num_recorded) == (len(cases), sum(len(case["committed"]) for case in cases))
    if "SPECPOOL_VECTORS" not in os.environ:
        assert num_run > num_recorded / 3


@pytest.mark.parametrize(
    "field", ["alloc_len_per_decode", "reserve_per_decode", "next_allocated", "tokens_required"]
)
def test_the_adapters_comparison_can_fail(monkeypatch, tmp_path, field):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    adapter = importlib.import_module("sglang_adapter")
    case = {
        "page_size": 4,
        "topk": 2,
        "num_steps": 2,
        "num_draft_tokens": 4,
        "alloc_len_per_decode": 16,
        "reserve_per_decode": 32,
        "committed": [9, 12],
        "allocated": [12, 40],
        "next_allocated": [44, 44],
        "tokens_required": 36,
    }
    path = tmp_path / "sizing.json"
    path.write_text(json.dumps({"cases": [case]}))
    assert adapter.compare(path) == (1, 2, 2)
    worse = [44, 48] if field == "next_allocated" else case[field] + 4
    path.write_text(json.dumps({"cases": [case | {field: worse}]}))
    with pytest.raises(AssertionError):
        adapter.compare(path)
