"""Law: if an engine raises while a plug-in looks at it, its own code serves, and a line says so."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from engine_kit import run

PLUGINS = {
    "vllm": ("SPECPOOL_VLLM", ("blocks", "speculative"), "vLLM's own block pool serves: "),
    "sglang": ("SPECPOOL_SGLANG", ("pages", "reserve", "rows"), "SGLang's own allocator serves: "),
}
BREAKS = {
    "runtime": "raise RuntimeError('no driver\\nof this card')",
    "system": "raise OSError(2, 'no library')",
    "type": "raise TypeError('Plugin() takes no arguments')",
    "key": "raise KeyError('CUDA')",
    "own": "class Odd(Exception): pass\nraise Odd('odd')",
    "syntax": "def broken(:",
}
CALL = "import specpool.plugins.{name} as s; s.register(); s.register(); print('served')"


def broken(path: Path, name: str, code: str) -> str:
    """A path with an engine whose import does this, and a torch that is imported at once."""
    for package, text in ((name, code), ("torch", "")):
        (path / package).mkdir()
        (path / package / "__init__.py").write_text(text)
    return str(path)


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", BREAKS)
@pytest.mark.parametrize("name", PLUGINS)
def test_an_engine_that_cannot_be_imported_keeps_its_own_code(tmp_path, name, kind):
    variable, levels, message = PLUGINS[name]
    level = levels[len(kind) % len(levels)]
    path = broken(tmp_path, name, BREAKS[kind])
    done = run("-c", CALL.format(name=name), PYTHONPATH=path, **{variable: level})
    assert (done.returncode, done.stdout.strip()) == (0, "served"), done.stderr
    lines = done.stderr.strip().splitlines()
    assert set(lines) == {lines[0]} and lines[0].startswith(f"specpool: {message}"), done.stderr
    assert "torch" not in done.stderr  # it is the engine that breaks
    ends = run(
        "-c",
        CALL.format(name=name),
        PYTHONPATH=path,
        **{variable: level, f"{variable}_DRIFT": "exit"},
    )
    assert ends.returncode == 1 and " is not as known: " in ends.stderr
    assert "Traceback" not in ends.stderr


@pytest.mark.parametrize("error", ["KeyboardInterrupt", "SystemExit(7)"])
def test_what_ends_the_process_is_not_caught(tmp_path, error):
    path = broken(tmp_path, "vllm", f"raise {error}")
    done = run("-c", CALL.format(name="vllm"), PYTHONPATH=path, SPECPOOL_VLLM="blocks")
    assert done.returncode not in (0, 1) and "served" not in done.stdout


@pytest.fixture
def parts(monkeypatch) -> list[str]:
    """Two modules whose `install` notes its name; `second` may fail."""
    done: list[str] = []

    def module(name: str) -> None:
        made: Any = ModuleType(name)
        made.install = lambda: done.append(name)
        monkeypatch.setitem(sys.modules, name, made)

    module("first_part")
    module("second_part")
    return done


def switched(*names: str, on_drift: str = "own", found: Any = list) -> bool:
    from specpool.plugins.switch import switch_on

    log = logging.getLogger("specpool.plugins.test")
    return switch_on("Engine", "its own", names, found, on_drift, log)


def test_parts_are_all_imported_before_the_first_is_installed(parts, caplog):
    """Half a plug-in never serves."""
    assert not switched("first_part", "there_is_no_such_part")
    assert parts == []
    assert "specpool: its own serves: No module named" in caplog.text
    with pytest.raises(SystemExit, match="Engine is not as known: No module"):
        switched("first_part", "there_is_no_such_part", on_drift="exit")
    assert switched("first_part", "second_part")
    assert parts == ["first_part", "second_part"]


def test_a_part_that_cannot_be_installed_ends_the_process(parts):
    def fails() -> None:
        raise RuntimeError("no such hook")

    sys.modules["second_part"].install = fails  # type: ignore[attr-defined]
    with pytest.raises(SystemExit, match="second_part cannot be installed: RuntimeError: no such"):
        switched("first_part", "second_part")
    assert parts == ["first_part"]


def test_any_error_of_the_check_itself_is_a_difference(parts, caplog):
    def looks() -> list[str]:
        raise RuntimeError("two\nlines")

    assert not switched("first_part", found=looks)
    assert parts == [] and "its own serves: RuntimeError: two lines" in caplog.text
