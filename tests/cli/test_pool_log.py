"""`specpool replay` and `inspect` of a block pool's log."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli_kit import call
from specpool import BlockPool


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "pool.log"
    pool = BlockPool(100, 4, fencing=True, record=path)
    held = pool.take(43, tag="first\n\x1b[31m")
    pool.put(range(8), held[:2])
    pool.drop(held[:2])  # cached from now on
    pool.take(1, hold=held[5:6], tag="second")
    pool.drop(held[3:4], after=7)
    pool.close()
    return path


def test_replay_says_how_the_log_ended(capsys: pytest.CaptureFixture[str], log: Path) -> None:
    code, out, err = call(capsys, "replay", str(log))
    digest = BlockPool.replay(log)[0].digest
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        f"{log}: 5 calls, closed",
        f"final digest {digest:016x}, as recorded",
    ]


def test_inspect_lists_the_blocks_in_use(capsys: pytest.CaptureFixture[str], log: Path) -> None:
    code, out, err = call(capsys, "inspect", str(log))
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[2] == "BlockPool of 100 blocks of 4 tokens: 56 free, 2 cached, 1 fenced"
    assert lines[3] == "42 of 100 blocks are held or fenced"
    assert lines[4].split(maxsplit=1) == ["2", r"held 1 times, last verb take  # first\n\x1b[31m"]
    assert lines[5].split()[:5] == ["3", "fenced", "behind", "step", "7,"]
    assert lines[7].split()[:4] == ["5", "held", "2", "times,"]
    assert lines[-1].strip() == "and 2 more"
    assert len(lines) == 4 + 40 + 1


@pytest.mark.parametrize(
    "words",
    [
        ("replay", "LOG", "--at", "3"),
        ("replay", "LOG", "--against", "LOG"),
        ("inspect", "LOG", "--row", "1"),
        ("inspect", "LOG", "--at", "1"),
        ("inspect", "LOG", "--html", "page.html"),
    ],
)
def test_what_needs_rows_and_steps_is_refused(
    capsys: pytest.CaptureFixture[str], log: Path, words: tuple[str, ...]
) -> None:
    code, out, err = call(capsys, *(str(log) if word == "LOG" else word for word in words))
    assert (code, out) == (2, "")
    assert f"{words[2]}: {log} is the log of a BlockPool" in err


@pytest.mark.parametrize("command", ["replay", "inspect"])
def test_a_damaged_log_is_an_error(
    capsys: pytest.CaptureFixture[str], log: Path, command: str
) -> None:
    content = bytearray(log.read_bytes())
    content[len(content) // 2] ^= 1
    log.write_bytes(content)
    code, _, err = call(capsys, command, str(log))
    assert code == 2
    assert str(log) in err
