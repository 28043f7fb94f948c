"""`make gpu`, and the Makefile: parts find what they run, and say what they leave out."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from types import ModuleType

import pytest

from paths import ROOT


@pytest.fixture
def gpu(monkeypatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu", ROOT / "tests/gpu.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu", module)
    spec.loader.exec_module(module)
    return module


def test_a_part_without_tests_is_found(gpu, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(
        gpu.PARTS, "moved", gpu.Part(1, ["-k", "cuda", "tests/device/test_gone.py"])
    )
    monkeypatch.setitem(gpu.PARTS, "renamed", gpu.Part(1, module=["benches.gone"]))
    word = ["-k", "no_such_test", "tests/device/test_device_tree.py"]
    monkeypatch.setitem(gpu.PARTS, "no such word", gpu.Part(1, word))
    names = ["memory", "moved", "renamed", "no such word", "probe"]
    assert gpu.nothing_to_run(names) == ["moved", "renamed", "no such word"]


def parts(gpu, tmp_path, monkeypatch, capfd, seconds: str, **made) -> tuple[int, str, str]:
    """Run such parts, and return the exit code, what was printed and the log."""
    (tmp_path / "talk.py").write_text("import sys, time\nprint(sys.argv[1])\ntime.sleep(0.1)\n")
    (tmp_path / "fail.py").write_text("raise SystemExit(3)")
    (tmp_path / "wait.py").write_text("import time\nprint('begun', flush=True)\ntime.sleep(60)")
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    monkeypatch.setattr(gpu, "PARTS", made)
    out = tmp_path / "out"
    arguments = ["--parts", ",".join(made), "--seconds", seconds, "--out", str(out)]
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


def test_a_machine_without_plugins_runs_all_it_can(gpu, tmp_path, monkeypatch, capfd):
    """No pytest-timeout: its key of pyproject.toml is an error. No pytest-xdist: no `-n`."""
    part = gpu.Part(9, ["-k", "cuda"], 8)
    assert part.command(tmp_path)[-2:] == ["-n", "8"]
    lacking = {"xdist", "pytest_timeout", "hypothesis"}
    found = gpu.has
    monkeypatch.setattr(gpu, "has", lambda name: name not in lacking and found(name))
    command = part.command(tmp_path)
    assert "-n" not in command and command[-2:] == ["-k", "cuda"]
    assert "--timeout" not in gpu.Part(9, tool="racecheck").command(tmp_path)
    assert gpu.missing(gpu.PARTS["flashinfer"])[-1] == "hypothesis"
    blocked = ["-p", "no:timeout", "-p", "no:xdist", "--collect-only", "tests/core/test_ledger.py"]
    seen = subprocess.run(
        [*gpu.pytest_command(), *blocked], cwd=ROOT, capture_output=True, text=True, check=False
    )
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
