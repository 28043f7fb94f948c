"""A slice of the fuzzers (fuzz/README.md): the corpus, the regressions, and fresh inputs.

Each target runs in a process of its own, since what a fuzzer looks for is the end of the process.
"""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec

import pytest

import warm_kit
from paths import ROOT

FUZZ = ROOT / "fuzz"


def run(script: str, *options: str, expected: int = 0) -> str:
    command = [sys.executable, str(FUZZ / script), *options]
    done = warm_kit.run(command, capture_output=True)
    assert done.returncode == expected, done.stdout + done.stderr
    return done.stdout + done.stderr


def regressions() -> list[str]:
    return re.findall(
        r'^    "(.*)": ', (FUZZ / "regressions.py").read_text(encoding="utf-8"), re.MULTILINE
    )


#: Runs of each target; `make test-full` makes sixteen times as many.
RUNS = {"border": 300, "ledger": 50, "block_pool": 50, "event_log": 120, "image": 70}


@pytest.mark.parametrize(
    ("target", "runs"),
    [
        *RUNS.items(),
        *(pytest.param(name, 16 * runs, marks=pytest.mark.full) for name, runs in RUNS.items()),
    ],
)
def test_no_input_breaks_a_law(target, runs):
    numbers = [
        int(number) for number in re.findall(r"\d+", run("run.py", target, "--runs", str(runs)))
    ]
    assert numbers[0] == runs + len(list((FUZZ / "corpus" / target).iterdir()))
    assert numbers[1] > runs / 20  # most inputs may be refused, not nearly all
    if target == "border":
        assert numbers[2] > 30  # functions that have accepted a call


@pytest.mark.parametrize("case", regressions())
def test_a_hostile_call_ends_in_an_answer_or_one_error(case):
    assert re.match(r"done|refused: ", run("regressions.py", case))


def test_the_border_fuzzer_knows_every_function_of_the_extension():
    sys.path.insert(0, str(FUZZ))
    try:
        import border

        from specpool import _core

        functions = {name for name in _core.__all__ if name.islower() and not name.startswith("_")}
        assert set(border.NAMES) == functions - border.OTHERS
    finally:
        sys.path.remove(str(FUZZ))


@pytest.mark.parametrize("target", ["border", "ledger", "event_log", "image"])
def test_a_broken_law_is_found_and_its_input_kept(target, tmp_path):
    """The same driver on a target whose law no input keeps."""
    for path in ("run.py", "source.py"):
        (tmp_path / path).write_text((FUZZ / path).read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / f"{target}.py").write_text(
        "def one_input(data):\n    assert len(data) < 9\n    return 1\n"
    )
    (tmp_path / "corpus" / target).mkdir(parents=True)
    (tmp_path / "corpus" / target / "short").write_bytes(b"1234")
    done = subprocess.run(
        [sys.executable, str(tmp_path / "run.py"), target, "--runs", "300"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and "finding: " in done.stderr
    (found,) = (tmp_path / "findings").iterdir()
    assert len(found.read_bytes()) >= 9


@pytest.mark.skipif(find_spec("atheris") is None, reason="needs atheris: pip install '.[fuzz]'")
@pytest.mark.parametrize("target", ["border", "ledger", "block_pool", "event_log", "image"])
def test_atheris_runs_the_targets(target):
    assert "Done 300 runs" in run("run.py", target, "--atheris", "--runs", "300")


def test_the_engine_is_loaded_before_the_time_of_an_input_begins():
    """On a busy machine the models took longer than an input may: that was no finding."""
    code = "import image; assert image.engine.cache_info().currsize == 2"
    assert warm_kit.run([sys.executable, "-c", code], cwd=FUZZ).returncode == 0
