"""`specpool doctor`: what it says of processes that run, ended, were refused, or freed wrongly."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from engine_kit import run
from specpool import BlockPool
from specpool.cli.doctor import doctor
from specpool.errors import ConfigError
from specpool.plugins import status
from specpool.plugins.quarantine import Quarantine
from specpool.plugins.status import EngineStatus


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the files; no engine is installed, and no thread writes."""
    monkeypatch.setenv("SPECPOOL_STATUS", str(tmp_path / "status"))
    monkeypatch.setattr(status, "PERIOD", 1e6)
    return tmp_path / "status"


def said(capsys: pytest.CaptureFixture[str], engine: str = "vllm") -> tuple[bool, list[str]]:
    is_well = doctor(engine, level=None, json=False)
    return is_well, capsys.readouterr().out.splitlines()


def test_an_engine_that_is_neither_here_nor_runs_is_an_error() -> None:
    with pytest.raises(ConfigError, match="vLLM is not installed here, and no process of it has"):
        doctor("vllm", level=None, json=False)
    with pytest.raises(ConfigError, match="vLLM is not installed here: there is nothing to try"):
        doctor("vllm", level="blocks", json=False)
    done = run("-m", "specpool", "doctor", "--engine", "vlm")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: --engine must be one of vllm, sglang, got 'vlm': did you mean 'vllm'?\n"
    )


def test_a_process_at_work(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    engine = EngineStatus("vllm")
    engine.gains["blocks of hits that were kept"] = lambda: 7
    engine.decide("blocks", [])
    core = BlockPool(20, 1)
    quarantine = Quarantine(engine, core, None)
    engine.leave_alone("hits drop their last block")
    core.take(4, tag="request-1")
    engine.write()
    is_well, lines = said(capsys)
    assert is_well
    assert any(
        line.startswith(f"process {os.getpid()} (") and "on at level blocks since 2" in line
        for line in lines
    ), lines
    expected = [
        "  pool: 20 blocks, 16 free, 0 quarantined",
        "  blocks of hits that were kept: 7",
        "  wrong frees: 0",
        "  left to the engine: hits drop their last block",
    ]
    assert [line for line in lines if line in expected] == expected

    core.drop([2])
    quarantine.drop([2])
    is_well, lines = said(capsys)
    assert not is_well
    assert "  pool: 20 blocks, 16 free, 1 quarantined" in lines
    (line,) = [line for line in lines if "owner request-1, " in line]
    assert "drop of block 2: nobody holds it" in line
    assert "called from " in line and "test_doctor.py:" in line
    (report,) = folder.glob("*.log")
    assert line.endswith(f"; specpool inspect {report}")
    assert not doctor("vllm", level=None, json=True)
    (process,) = json.loads(capsys.readouterr().out)["processes"]
    assert (process["wrong_frees"], process["runs"]) == (1, True)


def test_a_refused_plugin_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    EngineStatus("sglang").decide("pages", ["free has the parameters (a), known are (b)"])
    is_well, lines = said(capsys, "sglang")
    assert not is_well
    assert any("the engine's own code serves since" in line for line in lines)
    assert "  refused: free has the parameters (a), known are (b)" in lines


def test_a_process_that_has_ended_and_a_broken_file(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    engine = EngineStatus("vllm")
    engine.decide("blocks", [])
    (path,) = folder.iterdir()
    known = json.loads(path.read_text("utf-8"))
    (folder / "vllm-1.json").write_text(json.dumps(known | {"ended": 1.0}), "utf-8")
    (folder / "vllm-2.json").write_text("{", "utf-8")
    (folder / "vllm-3.json").write_text('{"process": 3}', "utf-8")
    doctor("vllm", level=None, json=False)
    out, err = capsys.readouterr()
    assert (out.count("; runs, "), out.count("; has ended, ")) == (1, 1)
    assert err.count("cannot be read") == 2


def test_nothing_is_written_into_a_folder_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "others").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "others")
    monkeypatch.setenv("SPECPOOL_STATUS", str(tmp_path / "link"))
    engine = EngineStatus("vllm")
    engine.decide("blocks", [])
    engine.write()
    assert list((tmp_path / "others").iterdir()) == []
    assert len(caplog.messages) == 1 and "is not a folder of user" in caplog.text


def test_a_level_is_tried_in_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    assert not doctor("vllm", level="blocks", json=False)
    shown = capsys.readouterr().out
    assert "the engine's own code serves" in shown and "  refused: " in shown
    with pytest.raises(ConfigError, match="level must be one of blocks, speculative, got 'off'"):
        doctor("vllm", level="off", json=False)
