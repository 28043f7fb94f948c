"""The edits of `guards.py` fit the source, and the scenarios of stages 2 and 4 have their tests."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from guards import CORE, GUARDS, THROUGH_THE_SCHEDULER, Guard, ledger_scenarios
from paths import ROOT, TESTS

SCENARIOS = TESTS / "scenarios"
STAGE_2 = {*range(1, 12), *range(23, 27), 28, 30, 31, 33, 40, 41, 48, *range(51, 86)}
OF_THE_INDEX = {20, 39, 42, 87}
OF_A_CONNECTOR = {49}
STAGE_4 = {*range(23, 29), 30, 31, 51, 52, 59, 61, *range(63, 67), 69}  # and 50, of `plan`
STAGE_5 = {29, *range(32, 38), 43, 44, 45, 47, *range(54, 57)}
BY_THEIR_SUBJECT = ("session", "window", "host")


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: f"{guard.number}: {guard.name}")
def test_every_edit_still_fits_the_source(guard: Guard, tmp_path):
    for path in dict.fromkeys(edit.path for edit in guard.edits):
        (tmp_path / CORE / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / CORE / path, tmp_path / CORE / path)
    for edit in guard.edits:
        before = (tmp_path / CORE / edit.path).read_text(encoding="utf-8")
        edit.apply(tmp_path)
        assert (tmp_path / CORE / edit.path).read_text(encoding="utf-8") != before


def test_an_edit_that_does_not_fit_is_refused(tmp_path):
    (tmp_path / CORE).mkdir(parents=True)
    edit = GUARDS[0].edits[0]
    (tmp_path / CORE / edit.path).parent.mkdir(exist_ok=True)
    name = edit.place.split("::")[1]
    for body in ("", edit.old * 2):
        text = f"fn {name}() {{\n{body}\n}}\nfn other() {{\n{edit.old}\n}}\n"
        (tmp_path / CORE / edit.path).write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match="times in"):
            edit.apply(tmp_path)


def numbers_in(path: Path) -> set[int]:
    return set(map(int, re.findall(r"def test_scenario_(\d+)_", path.read_text("utf-8"))))


def test_every_scenario_has_a_test_and_a_guard():
    tests = set().union(*map(numbers_in, ledger_scenarios(SCENARIOS)))
    assert tests == STAGE_2 | OF_THE_INDEX | OF_A_CONNECTOR
    assert {guard.number for guard in GUARDS} == tests
    assert numbers_in(SCENARIOS / THROUGH_THE_SCHEDULER) == STAGE_4
    files = [SCENARIOS / f"test_{subject}_scenarios.py" for subject in BY_THEIR_SUBJECT]
    assert set().union(*map(numbers_in, files)) >= STAGE_5


@pytest.mark.parametrize(("only", "unknown"), [(["99"], "99"), (["33", "0", "99"], "0, 99")])
def test_a_run_of_guards_that_do_not_exist_fails(only, unknown):
    """Before anything is built."""
    command = [sys.executable, SCENARIOS / "run_guards.py", "--only", *only]
    done = subprocess.run(command, capture_output=True, text=True, timeout=550)
    assert done.returncode == 2
    assert f"no guard is numbered {unknown}" in done.stderr and done.stdout == ""
