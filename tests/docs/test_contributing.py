"""The walk of CONTRIBUTING.md is true: its scenario passes, its guard fits, its names exist."""

from __future__ import annotations

import ast
import re
import shutil

import guards
from paths import ROOT

PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
STEPS = ROOT / "tests" / "scenarios" / "test_scenarios_steps.py"


def block(language: str, having: str) -> str:
    blocks = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (found,) = [text for text in blocks if having in text]
    return found


def scenario() -> tuple[str, dict[str, object]]:
    """The name of the page's scenario, and what its code defines."""
    names: dict[str, object] = {}
    code = block("python", "def test_scenario")
    exec(compile(code, "CONTRIBUTING.md", "exec"), names)
    (name,) = re.findall(r"^def (\w+)", code, re.MULTILINE)
    return name, names


def test_the_scenario_passes_and_is_new():
    name, names = scenario()
    names[name]()  # type: ignore[operator]
    assert f"def {name}(" not in STEPS.read_text(encoding="utf-8"), "the walk has been walked"
    assert name in PAGE[PAGE.index("docs/failures.md` is written by hand") :]


def test_the_scenario_to_copy_is_there():
    (name,) = re.findall(r"Copy `(\w+)`", PAGE)
    text = STEPS.read_text(encoding="utf-8")
    assert f"def {name}(" in text and "def test_scenario_26" in text


def test_the_guard_fits_the_source(tmp_path):
    call = ast.parse(block("text", "guard(").strip().rstrip(","), mode="eval")
    found = eval(compile(call, "CONTRIBUTING.md", "eval"), {"guard": guards.guard})
    assert found.number == 26 and found not in guards.GUARDS
    for edit in found.edits:
        copy = tmp_path / guards.CORE / edit.path
        copy.parent.mkdir(parents=True)
        shutil.copy(ROOT / guards.CORE / edit.path, copy)
        edit.apply(tmp_path)
