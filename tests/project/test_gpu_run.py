"""`make gpu`, and the Makefile: parts find what they run, and say what they leave out."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import warm_kit
from paths import ROOT


@pytest.fixture
def gpu(monkeypatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu", ROOT / "tests/gpu.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu", module)
    spec.loader.exec_module(module)
    return module


def collected(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Collect; pytest cannot rewrite the modules that are there from the start, and warns of it."""
    return warm_kit.run([*command, "--assert=plain"], **options)


@pytest.fixture
def warm_collection(gpu, monkeypatch) -> None:
    """Pytest collects in processes that have torch and transformers from their start."""

    def run(command: list[str], *, text: bool, **options: Any) -> subprocess.CompletedProcess[str]:
        assert text
        return collected(command, **options)

    monkeypatch.setattr(gpu, "subprocess", SimpleNamespace(run=run))


def test_a_bare_machine_has_time_to_import_and_one_card_is_not_crowded(gpu):
    """The first process imports torch, CuPy and transformers cold, and compiles the kernels."""
    first = gpu.STAGES["first"][0]
    assert first == "probe" and gpu.PARTS[first].seconds >= 150
    assert max(part.workers for part in gpu.PARTS.values()) <= 8


@pytest.mark.usefixtures("warm_collection")
def test_a_part_without_tests_is_found(gpu, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(
        gpu.PARTS, "moved", gpu.Part(1, ["-k", "cuda", "tests/device/test_gone.py"])
    )
    monkeypatch.setitem(gpu.PARTS, "renamed", gpu.Part(1, module=["benches.gone"]))
    word = ["-k", "no_such_test", "tests/device/test_device_tree.py"]
    monkeypatch.setitem(gpu.PARTS, "no such word", gpu.Part(1, word))
    monkeypatch.setitem(gpu.PARTS, "there", gpu.Part(1, ["-k", "test", word[-1]]))
    names = ["moved", "renamed", "no such word", "there", "probe"]
    assert gpu.nothing_to_run(names) == ["moved", "renamed", "no such word"]


# Looks in the log for what it has just printed.
PEEK = """
import pathlib, sys
print("as it comes", flush=True)
sys.exit("as it comes" not in (pathlib.Path(sys.argv[1]) / "all.log").read_text())
"""
# Starts a process that no interruption ends, and waits for it, or leaves it behind.
BEAR = """
import fcntl, os, signal, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
if os.fork() == 0:
    with open("child", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        os.rename("child", "locked")
        time.sleep(4)
        file.write("survived")
    os._exit(0)
while not os.path.exists("locked"):
    time.sleep(0.01)
time.sleep(60 if sys.argv[1] == "waits" else 0)
"""


def parts(gpu, tmp_path, monkeypatch, capfd, seconds: str, *more, **made) -> tuple[int, str, str]:
    """Run such parts, and return the exit code, what was printed and the log."""
    (tmp_path / "talk.py").write_text("import sys, time\nprint(sys.argv[1])\ntime.sleep(0.1)\n")
    (tmp_path / "fail.py").write_text("raise SystemExit(3)")
    (tmp_path / "wait.py").write_text("import time\nprint('begun', flush=True)\ntime.sleep(60)")
    (tmp_path / "peek.py").write_text(PEEK)
    (tmp_path / "bear.py").write_text(BEAR)
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    monkeypatch.setattr(gpu, "PARTS", made)
    out = tmp_path / "out"
    arguments = ["--parts", ",".join(made), "--seconds", seconds, "--out", str(out), *more]
    monkeypatch.setattr(sys, "argv", ["gpu.py", *arguments])
    code = gpu.main()
    return code, capfd.readouterr().out, (out / "all.log").read_text()


def test_what_fails_and_what_is_left_out_is_named(gpu, tmp_path, monkeypatch, capfd):
    made = {
        "good": gpu.Part(30, module=["talk", "OUT"]),
        "bad": gpu.Part(30, module=["fail"]),
        "lacking": gpu.Part(30, module=["talk", "x"], needs=("no-such-program",)),
        "last": gpu.Part(30, module=["talk", "still run"]),
    }
    code, printed, log = parts(gpu, tmp_path, monkeypatch, capfd, "60", **made)
    assert code == 1 and printed.endswith("failed: bad\n")
    assert "== lacking: left out, there is no no-such-program" in printed
    assert str(tmp_path / "out") in log and "still run" in log and "== bad: 3" in log


def test_the_budget_ends_every_part(gpu, tmp_path, monkeypatch, capfd):
    made = {
        "slow": gpu.Part(1, module=["wait"]),
        "late": gpu.Part(30, module=["talk", "never"]),
    }
    code, printed, log = parts(gpu, tmp_path, monkeypatch, capfd, "5.5", **made)
    assert code == 1 and "== slow: stopped after 1 s" in log and "begun" in log
    assert "== late: left out, the 6 s are over" in printed
    assert printed.endswith("failed: slow, late\n")


def late_after(monkeypatch, path: Path, seconds: int) -> None:
    """Let a limit of so many seconds be reached as soon as a file is there."""
    wait = subprocess.Popen.wait

    def reached(self: Any, timeout: float | None = None) -> int:
        if timeout != seconds:
            return wait(self, timeout)
        while not path.exists():
            time.sleep(0.01)
        raise subprocess.TimeoutExpired("part", seconds)

    monkeypatch.setattr(subprocess.Popen, "wait", reached)


@pytest.mark.parametrize("parent", ["waits", "ends"])
def test_no_process_of_a_part_outlives_it(gpu, tmp_path, monkeypatch, capfd, parent):
    """Law: the next part has the card for itself."""
    monkeypatch.setattr(gpu, "GRACE", 0.1)
    if parent == "waits":
        late_after(monkeypatch, tmp_path / "locked", 59)
    made = {"bears": gpu.Part(59, module=["bear", parent])}
    code, printed, _ = parts(gpu, tmp_path, monkeypatch, capfd, "500", **made)
    assert code == (parent == "waits") and ("stopped after 59 s" in printed) == code
    with (tmp_path / "locked").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # its process has ended
        assert file.read() == ""


def test_what_a_part_prints_is_in_the_log_as_it_comes(gpu, tmp_path, monkeypatch, capfd):
    """The machine may be taken away while a part runs."""
    made = {"peeks": gpu.Part(30, module=["peek", "OUT"])}
    code, printed, log = parts(gpu, tmp_path, monkeypatch, capfd, "60", **made)
    assert code == 0 and "as it comes" in printed
    assert re.fullmatch(r"== peeks begins\nas it comes\n== peeks: 0, \d+ s\n", log)


@pytest.fixture
def in_the_background():
    """As a shell starts a job in its background: interrupts are ignored."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("in_the_background")
def test_a_part_that_is_stopped_names_what_failed(gpu, tmp_path, monkeypatch, capfd):
    test = """
import pathlib, time
def test_one():
    assert 1 == 2
def test_two():
    pathlib.Path("begun").touch()
    time.sleep(60)
"""
    (tmp_path / "test_slow.py").write_text(test)
    late_after(monkeypatch, tmp_path / "begun", 59)
    monkeypatch.setattr(gpu, "GRACE", 60)
    made = {"slow": gpu.Part(59, ["-n0", "-o", "addopts=", "test_slow.py"])}
    code, _, log = parts(gpu, tmp_path, monkeypatch, capfd, "500", **made)
    assert code == 1 and "stopped after 59 s" in log and "assert 1 == 2" in log


def test_a_run_that_is_terminated_ends_its_part(tmp_path):
    """Law: a machine's own time limit leaves no process of the run behind."""
    (tmp_path / "bear.py").write_text(BEAR)
    code = f"""
import pathlib, runpy, sys
gpu = runpy.run_path({str(ROOT / "tests/gpu.py")!r})
sys.argv = ["gpu.py", "--parts", "bears", "--out", "out"]
gpu["PARTS"]["bears"] = gpu["Part"](60, module=["bear", "waits"])
gpu["run"].__globals__["ROOT"] = pathlib.Path.cwd()
gpu["end_with_part"]()
gpu["main"]()
"""
    with subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path) as process:
        while not (tmp_path / "locked").exists():
            time.sleep(0.05)
        process.terminate()
    with (tmp_path / "locked").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert file.read() == ""


def test_the_parts_find_what_was_brought_along(gpu, tmp_path, monkeypatch):
    """Law: a package that this process finds is found by the parts, beside the wheel of dist/."""
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist/specpool-1.whl").touch()
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(gpu.subprocess, "run", lambda command, check: command)
    monkeypatch.setenv("PYTHONPATH", f"site{os.pathsep}more")
    assert gpu.installed("wheel")["PYTHONPATH"] == os.pathsep.join(["wheel", "site", "more"])
    monkeypatch.delenv("PYTHONPATH")
    assert gpu.installed("wheel")["PYTHONPATH"] == "wheel"


def test_the_limits_of_a_stage_fit_into_one_run(gpu):
    """Law: no part of a stage takes another's time, and every part belongs to one stage."""
    staged = [name for stage in gpu.STAGES.values() for name in stage]
    assert staged == [*gpu.PARTS]
    for stage in gpu.STAGES.values():
        assert sum(gpu.PARTS[name].seconds for name in stage) <= gpu.BUDGET


def test_a_stage_is_named_like_a_part(gpu, tmp_path, monkeypatch, capfd):
    made = {name: gpu.Part(300, module=["talk", name]) for name in ("probe", "kernels")}
    monkeypatch.setattr(gpu, "STAGES", {"first": ("probe", "kernels")})
    arguments = ["--parts", "kernels,first"]
    code, printed, log = parts(gpu, tmp_path, monkeypatch, capfd, "550", *arguments, **made)
    assert code == 0 and re.findall(r"== (\w+) begins", log) == ["kernels", "probe"]
    assert "the limits of these parts add up to 600 s, the budget is 550 s" in printed


@pytest.mark.usefixtures("warm_collection")
def test_a_machine_without_plugins_runs_all_it_can(gpu, tmp_path, monkeypatch, capfd):
    """No pytest-timeout: its key of pyproject.toml is an error. No pytest-xdist: no `-n`."""
    part = gpu.Part(9, ["-k", "cuda"], 8)
    assert part.command(tmp_path)[-2:] == ["-n", "8"]
    assert "no:benchmark" in part.command(tmp_path)  # some versions warn of xdist
    lacking = {"xdist", "pytest_timeout", "hypothesis"}
    found = gpu.has
    monkeypatch.setattr(gpu, "has", lambda name: name not in lacking and found(name))
    command = part.command(tmp_path)
    assert "-n" not in command and command[-2:] == ["-k", "cuda"]
    assert "--timeout" not in gpu.Part(9, tool="racecheck").command(tmp_path)
    assert gpu.missing(gpu.PARTS["flashinfer"])[-1] == "hypothesis"
    blocked = ["-p", "no:timeout", "-p", "no:xdist", "--collect-only", "tests/core/test_ledger.py"]
    seen = collected([*gpu.pytest_command(), *blocked], cwd=ROOT, capture_output=True)
    assert seen.returncode == 0 and "test_ledger.py::" in seen.stdout, seen.stdout + seen.stderr
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--dry", "--parts", "probe,flashinfer"])
    assert gpu.main() == 0
    printed = capfd.readouterr().out
    assert all(f"there is no {name}: {gpu.NEEDS[name]}\n" in printed for name in lacking)
    assert printed.endswith("gpu: 1 parts\n")


def test_what_a_part_needs_is_listed(gpu):
    """Law: the run says in its first lines what it will leave out."""
    assert {name for part in gpu.PARTS.values() for name in part.needs} <= gpu.NEEDS.keys()


def test_every_test_for_a_card_is_part_of_the_run(gpu):
    """Law: a test that only a CUDA device can run, or a case of it, is selected by some part."""
    selected = {
        word for part in gpu.PARTS.values() for word in part.selection if word.endswith(".py")
    }
    needed = set[str]()
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text()
        is_skipped = re.search(r'(reason=|skip\()"no CUDA device|\bCARDS\b', text)
        if is_skipped or re.search(r"def test_\w+\((.*\W)?kit\b[,)]", text):
            needed.add(str(path.relative_to(ROOT)))
    assert len(needed) > 8 and needed <= selected, needed - selected


def test_what_counts_calls_runs_without_a_card_too():
    """Law: a test that patches, and so may count what is never called, has a case for a CPU."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        tests = re.findall(r"^def (test_\w+)\(([^)]*)", path.read_text(), re.MULTILINE)
        for name, arguments in tests:
            is_alone = name.endswith("_cuda")
            assert not (is_alone and "monkeypatch" in arguments), f"{path}::{name}"


def test_what_the_makefile_runs_exists():
    """Files and modules of a recipe move, and a target for a GPU is not run for months."""
    text = (ROOT / "Makefile").read_text()
    recipes = "\n".join(line for line in text.splitlines() if line.startswith("\t"))
    files = set(
        re.findall(r"(?<![\w/.-])((?:tests|benches|fuzz|docs|examples)/[\w/.]+\.\w+)", recipes)
    )
    assert len(files) > 4 and not [file for file in files if not (ROOT / file).exists()]
    modules = set(re.findall(r"-m (benches\.\w+)", recipes))
    assert len(modules) > 1
    assert all((ROOT / f"{name.replace('.', '/')}.py").exists() for name in modules)
    commands = set(re.findall(r"-m benches (\w+)", recipes))
    main = (ROOT / "benches/__main__.py").read_text()
    assert len(commands) > 5 and all(f"def {name}(" in main for name in commands)
