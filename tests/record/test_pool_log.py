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
    lines = out.splitlines()
    assert lines[-2:] == [f"{log}: 5 calls, closed", f"final digest {digest:016x}, as recorded"]
    assert call(capsys, "replay", str(log), "--quiet")[1].splitlines() == lines[-2:]


def test_replay_lists_the_calls_with_what_they_gave(
    capsys: pytest.CaptureFixture[str], log: Path
) -> None:
    lines = call(capsys, "replay", str(log))[1].splitlines()[:-2]
    first = ", ".join(map(str, range(16)))
    assert [line.split(maxsplit=1) for line in lines] == [
        ["1", rf"take(43) -> [{first}, .. 43 blocks]  # first\n\x1b[31m"],
        ["2", "put([0, 1, 2, 3, 4, 5, 6, 7], [0, 1], start=0) -> [0, 1]"],
        ["3", "drop([0, 1])"],
        ["4", "take(1, hold=[5]) -> [43]  # second"],
        ["5", "drop([3], after=7)"],
    ]


@pytest.mark.parametrize("command", ["replay", "inspect"])
def test_at_shows_the_state_right_after_a_call(
    capsys: pytest.CaptureFixture[str], log: Path, command: str
) -> None:
    code, out, err = call(capsys, command, str(log), "--at", "2")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    digest = BlockPool.replay(log, most=2)[0].digest
    assert lines[:2] == [f"{log}: after 2 calls", f"digest {digest:016x}, as recorded"]
    assert lines[2:4] == [
        "BlockPool of 100 blocks of 4 tokens: 57 free, 0 cached, 0 fenced",
        "43 of 100 blocks are held or fenced",
    ]
    assert call(capsys, command, str(log), "--at", "5")[1].splitlines()[3].startswith("42 of 100")
    for at, says in [("6", f"{log} has 5 calls, there is no call 6"), ("-1", "got -1")]:
        code, out, err = call(capsys, command, str(log), "--at", at)
        assert (code, out) == (2, "")
        assert says in err


def test_what_show_raises_ends_the_replay(log: Path) -> None:
    seen: list[int] = []

    def show(index: int, text: str, tag: str | None) -> None:
        seen.append(index)
        if index == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        BlockPool.replay(log, show=show)
    assert seen == [1, 2, 3]
    pool, calls, end = BlockPool.replay(log, most=0)
    assert (calls, end, pool.num_free) == (0, None, 100)


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
        ("replay", "LOG", "--against", "LOG"),
        ("inspect", "LOG", "--row", "1"),
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
