"""Two ranks give the texts of one process, agree in every step, and notice when they do not."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ranks_kit import Ended, Group, script
from ranks_script import PROMPTS, SCENES, SETUPS, engine_of, play
from specpool import SamplingParams

SCRIPT = script("ranks_script.py")


#: Each kind of head, chains and trees, overlap depths 0 and 1, two drafters, a chain that retracts;
#: each scene at two set-ups at least. `make test-full` plays every scene at every set-up.
QUICK = {
    "eagle3 tree D0": ("drawn", "sessions", "forms", "compared"),
    "block tree D1": ("greedy", "sessions", "prefixes", "aborts"),
    "mtp chain D1": ("greedy", "drawn", "sessions"),
    "two drafters D1": ("greedy", "drafters", "many"),
    "few pages": tuple(SCENES),
}
REST = {
    setup: scenes
    for setup in SETUPS
    if (scenes := tuple(scene for scene in SCENES if scene not in QUICK.get(setup, ())))
}


def _marks(is_quick: bool) -> tuple[Any, ...]:
    return () if is_quick else (pytest.mark.full,)


@functools.cache
def _shared(is_quick: bool) -> Any:
    """What each of two ranks gave: scenes by set-up, and shapes by clocks if quick."""
    first, second = Group(
        [SCRIPT, "timed", json.dumps(QUICK)] if is_quick else [SCRIPT, "scenes", json.dumps(REST)]
    ).wait(560)
    assert first.code == 0, first.err
    assert second.code == 0, second.err
    return json.loads(first.out), json.loads(second.out)


@functools.cache
def _both(setup: str, is_quick: bool) -> tuple[Any, Any]:
    """What one process gave of a set-up's scenes, and what two ranks gave."""
    with engine_of(setup) as engine:
        alone = json.loads(json.dumps(play(engine, (QUICK if is_quick else REST)[setup])))
    return alone, _shared(is_quick)[0][setup]


@pytest.mark.sample(10)
@pytest.mark.parametrize(
    ("setup", "scene", "is_quick"),
    [
        pytest.param(setup, scene, is_quick, id=f"{setup}-{scene}", marks=_marks(is_quick))
        for is_quick, setups in ((True, QUICK), (False, REST))
        for setup, scenes in setups.items()
        for scene in scenes
    ],
)
def test_two_ranks_give_the_texts_of_one_process(setup: str, scene: str, is_quick: bool) -> None:
    alone, ranked = _both(setup, is_quick)
    assert ranked[scene] == alone[scene]


@pytest.mark.parametrize(
    ("setup", "is_quick"),
    [
        pytest.param(setup, is_quick, marks=_marks(is_quick))
        for is_quick, setups in ((True, QUICK), (False, REST))
        for setup in setups
    ],
)
def test_few_pages_retract_on_two_ranks_as_on_one(setup: str, is_quick: bool) -> None:
    alone, ranked = _both(setup, is_quick)
    assert ranked["counts"] == alone["counts"]
    retracted, findings = ranked["counts"]
    assert findings == 0
    assert bool(retracted) == (setup == "few pages")


def test_rows_of_ranks_do_not_move() -> None:
    assert (
        _shared(True)[0]["move"] == "rows of ranks cannot move: each rank holds a part of their KV"
    )


def _long(turns: int) -> Any:
    first, second = Group([SCRIPT, "long", str(turns)]).wait(560)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    return json.loads(first.out)


@pytest.mark.full
def test_hundreds_of_turns_with_a_digest_each() -> None:
    found = _long(400)
    assert found["records"] >= found["turns"] * 0.9
    assert found["retracted"] > 0
    assert found["done"] > 40


@pytest.mark.full
def test_ten_thousand_turns_with_a_digest_each() -> None:
    found = _long(10_000)
    assert found["records"] >= 9_000
    assert found["retracted"] > 100


def test_ranks_choose_shapes_by_the_clock_of_rank_0_alone() -> None:
    """Law: both clocks run at random, and controllers on both ranks are told the same times."""
    (texts, told), (_, other) = (rank["timed"] for rank in _shared(True))
    assert told == other
    assert len(told) > 60 and len({*told}) > 20
    params = SamplingParams(max_new_tokens=60, ignore_eos=True)
    with engine_of("eagle chain D0") as engine:
        expected = [output.token_ids for output in engine.generate(PROMPTS, params)]
    assert texts == {"cost": expected, "budget": expected}


def _plant(kind: str, record: int) -> tuple[Ended, Ended]:
    first, second = Group([SCRIPT, "plant", kind, str(record)]).wait(500)
    return first, second


def test_a_call_of_one_rank_alone_is_found_at_the_next_record_and_named() -> None:
    first, second = _plant("admit", 7)
    said = "parted from rank 0 before record 8"
    assert said in second.err
    assert "rank 1 has ended: CorruptState" in first.err
    digests = re.search(r"rank 0's digest is (\w{16}); .*digest is (\w{16}) here", second.err)
    assert digests is not None and digests[1] != digests[2]
    replay = re.search(r"specpool replay (\S+) --against (\S+) names", second.err)
    assert replay is not None
    command = [sys.executable, "-m", "specpool", "replay", replay[1], "--against", replay[2]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 1, done.stderr
    assert "they differ from event" in done.stdout
    assert "planted" in done.stdout
    for path in replay.groups():
        Path(path).unlink()


@pytest.mark.full
def test_another_token_on_one_rank_is_found_at_the_next_record() -> None:
    first, second = _plant("token", 9)
    assert re.search(r"parted from rank 0 before record 10, after step \d+", second.err)
    assert re.search(r"lane 0 of step \d+ got the tokens \[.*\] here, \[.*\] there", second.err)
    assert "rank 1 has ended: CorruptState" in first.err


TAMPERED = {
    "garbage": "no record: its header says",
    "forged": "record 5: its seal does not fit its",
    "replayed": "record 4 came, 5 is the next one",
}


@pytest.mark.full
@pytest.mark.parametrize("kind", TAMPERED)
def test_a_record_that_is_not_the_next_one_of_rank_0_ends_the_ranks(kind: str) -> None:
    first, second = _plant(kind, 5)
    assert "RankError" in second.err
    assert TAMPERED[kind] in second.err
    assert "rank 1 has ended: RankError" in first.err


@pytest.mark.parametrize(
    ("rank", "error"),
    [
        (1, "RuntimeError"),
        pytest.param(1, "ValueError", marks=pytest.mark.full),
        pytest.param(0, "RuntimeError", marks=pytest.mark.full),
        pytest.param(0, "ValueError", marks=pytest.mark.full),
    ],
)
def test_a_forward_that_fails_on_one_rank_ends_all_and_is_named(rank: int, error: str) -> None:
    """Law: each rank's last line has the rank, the step and the cause."""
    ends = _plant(f"forward {rank} {error}", 6)
    cause = "planted" if error == "ValueError" else "RuntimeError: planted"
    own = rf"RankError: rank {rank}: the forward of step \d+ failed: {cause}$"
    other = rf"RankError: rank {rank} has ended: RankError: rank {rank}: the forward of step \d+ "
    assert abs(ends[0].seconds - ends[1].seconds) < 100  # nobody waits out the timeout of 200 s
    for each, ended in enumerate(ends):
        assert ended.code == 1
        last = ended.err.strip().splitlines()[-1]
        assert re.search(own if each == rank else other + f"failed: {cause}", last), last


@pytest.mark.full
@pytest.mark.parametrize("kind", ["die", "stop", "raise"])
def test_a_rank_that_is_gone_is_named_in_seconds(kind: str) -> None:
    group = Group([SCRIPT, "plant", kind, "6"])
    try:
        first = group.processes[0]
        _, err = first.communicate(timeout=150)
    finally:
        group.processes[1].kill()
        group.processes[1].communicate()
    assert first.returncode != 0
    why = {"die": "rank 1 is gone", "stop": "rank 1 has been silent for 1", "raise": "planted"}
    assert why[kind] in err


def _refused(*own: tuple[str, ...], world: int = 2, **environments: Any) -> list[Ended]:
    command = ["-m", "specpool", "generate", "-n", "4", "--json"]
    return Group(command, world, own=own, **environments).wait(500)


def test_ranks_that_differ_are_refused_with_both_values() -> None:
    for ended in _refused((), ("--num-pages", "100")):
        assert ended.code == 2
        assert (
            "error: the ranks differ in option --num-pages: rank 0 has None, rank 1 100"
            in ended.err
        )


@pytest.mark.full
def test_ranks_with_other_models_are_refused() -> None:
    for ended in _refused((), ("--draft", "specpool/tiny-eagle3")):
        assert ended.code == 2
        assert "error: the ranks differ in drafts: rank 0 has eagle1 " in ended.err


@pytest.mark.full
def test_a_rank_with_another_key_is_refused() -> None:
    keys = [{"SPECPOOL_RANKS_KEY": "right"}, {"SPECPOOL_RANKS_KEY": "wrong"}]
    for rank, ended in enumerate(_refused((), (), environments=keys)):
        assert ended.code == 2
        assert f"rank {1 - rank} has another SPECPOOL_RANKS_KEY than rank {rank}" in ended.err
        assert "right" not in ended.err and "wrong" not in ended.err


@pytest.mark.full
def test_heads_that_do_not_divide_are_refused_with_the_numbers() -> None:
    for ended in _refused((), (), (), world=3):
        assert ended.code == 2
        assert "error: 'llama' has 2 KV heads, which 3 ranks cannot share" in ended.err
        assert "Loading weights" not in ended.err
