"""`specpool train`: a figure for each thing that it measured, and a checkpoint on Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
from pathlib import Path

import pytest

from cli_kit import call
from train_kit import text_file


def words_of(folder: Path, *more: str) -> tuple[str, ...]:
    text = text_file(folder, 3000)
    sizes = ("--length", "32", "--batch", "4", "--threads", "1")
    return (
        *("train", "--target", "specpool/tiny", "--data", str(text)),
        *("--out", str(folder / "head"), *sizes, *more),
    )


def test_the_figures_and_a_command_that_works(capsys, tmp_path: Path) -> None:
    words = words_of(tmp_path, "--epochs", "0.3")
    code, out, err = call(capsys, *words)
    assert code == 0, err
    assert re.search(r"0\.3M parameters, 7 steps, 0\.30 passes over 89 texts", out), out
    assert re.search(r"on 5 held-out texts:\n  target: loss \d\.\d{3} nats a token\n", out)
    assert re.search(r"likeliest token in draft 1, 2, ...:( \d+\.\d%){4}\n", out)
    assert re.search(r"bonus included: head \d\.\d\d, prompt lookup \d\.\d\d\n", out)
    assert "training\nmeasuring the held-out loss\n" in err
    command = shlex.split(out.splitlines()[-1].removeprefix("use it: "))
    code, generated, err = call(capsys, *command[1:], "-n", "4", "--json")
    assert code == 0 and json.loads(generated)["shape"] == [3, 1, 4], err
    # The folder is taken now; a finished training is measured again.
    code, _, err = call(capsys, *words)
    assert code == 2 and err.startswith("error: --out: ") and "give --resume to go on" in err
    code, again, err = call(capsys, *words, "--resume", "--json")
    report = json.loads(again)
    assert code == 0 and report["finished"] and report["steps"] == 7, err
    assert set(report["accept_lens"]) == {"head", "prompt lookup"}
    assert report["held_out"]["target_loss"] > 0 and report["cpu_seconds"] > 0


def test_ctrl_c_writes_a_checkpoint_to_go_on_from(
    capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from specpool.cli import train as command

    advance = command._ProgressDisplay.advance

    def advance_then_interrupt(self: command._ProgressDisplay, num_done: float, note: str) -> None:
        advance(self, num_done, note)
        if note.startswith("step 3,"):
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(command._ProgressDisplay, "advance", advance_then_interrupt)
    words = words_of(tmp_path, "--epochs", "0.3")
    code, out, err = call(capsys, *words)
    assert code == 130, err
    assert "3 steps" in out and "the same command with --resume goes on" in out
    monkeypatch.undo()
    code, out, err = call(capsys, *words, "--resume")
    assert code == 0 and "7 steps" in out, err


def test_a_quantized_target_is_refused_by_its_file(capsys, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text(json.dumps({"quantization_config": {"bits": 4}}))
    words = [*words_of(tmp_path)]
    words[words.index("specpool/tiny")] = str(target)
    code, out, err = call(capsys, *words)
    assert (code, out) == (2, "") and "is quantized (quantization_config)" in err
    assert not (tmp_path / "head").exists()
