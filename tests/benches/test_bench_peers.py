"""`python -m benches peers`: which pairs count, what it prints, and what it refuses."""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import warm_kit

pytest.importorskip("transformers")

from benches import peers
from benches.__main__ import main
from benches.engines import ENGINES
from benches.peers import MAX_QUIETNESS, TRIES, Pair, Peer, Trace, Turn
from specpool.errors import ConfigError

LLAMA_CPP = ENGINES / "llama-cpp-cpu" / "bin" / "python"


def bench(monkeypatch, capsys, options: str) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["benches", "peers", *options.split()])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code, *capsys.readouterr()


def pair_of(quietness: float, ours: float = 1.0, theirs: float = 2.0) -> Pair:
    texts = [[1, 2], [3, 4]]
    return Pair(Turn(ours, 2 * ours, texts), Turn(theirs, 3 * theirs, texts), quietness)


def test_only_pairs_on_a_quiet_machine_count_and_the_first_turn_alternates() -> None:
    rng = random.Random(0)
    for _ in range(50):
        count = rng.randint(1, 5)
        taken: list[Pair] = []
        is_first: list[bool] = []

        def take(first: bool, taken: list[Pair] = taken, is_first: list[bool] = is_first) -> Pair:
            is_first.append(first)
            taken.append(pair_of(rng.choice((1.0, MAX_QUIETNESS, 1.0301, 2.0))))
            return taken[-1]

        def quiet(taken: list[Pair] = taken) -> list[Pair]:
            return [pair for pair in taken if pair.quietness <= MAX_QUIETNESS]

        try:
            pairs = peers.quiet_pairs(take, count)
        except ConfigError as error:
            assert len(taken) == TRIES * count and len(quiet()) < count
            loudest = max(pair.quietness for pair in taken)
            assert f"only {len(quiet())} of {TRIES * count} pairs" in str(error)
            assert f"up to {loudest:.2f}, allowed are 1.03" in str(error)
        else:
            assert pairs == quiet() and len(pairs) == count and taken[-1] is pairs[-1]
        assert is_first == [number % 2 == 0 for number in range(len(taken))]


def test_a_speed_is_tokens_over_the_median_of_the_pairs() -> None:
    pairs = [pair_of(1.0, ours, theirs) for ours, theirs in ((1, 2), (4, 16), (9, 1))]
    cpu, wall = peers.results_of("cell", "vLLM", pairs)
    assert cpu.reference == wall.reference == "vLLM"
    assert (cpu.unit, wall.unit) == ("tokens/CPU s", "tokens/s")
    assert cpu.value == 4 / statistics.median([1, 4, 9])
    assert cpu.reference_value == 4 / statistics.median([2, 16, 1])
    assert (wall.value, wall.reference_value) == (4 / 8, 4 / 6)


def test_texts_that_differ_are_refused_with_their_place() -> None:
    ours, theirs = Turn(1, 1, [[1, 2], [3, 4, 5]]), Turn(1, 1, [[1, 2], [3, 4, 6]])
    peers.check_texts("cell", Pair(ours, ours, 1.0))
    with pytest.raises(ConfigError, match="cell: the texts of request 1 differ from token 2 on"):
        peers.check_texts("cell", Pair(ours, theirs, 1.0))


@pytest.mark.parametrize("kind", peers.TRACES)
@pytest.mark.parametrize("max_prompt", [256, 2048])
def test_a_trace_is_the_same_each_time_and_fits_the_model(kind, max_prompt) -> None:
    trace = Trace.of(kind, 259, max_prompt)
    assert trace == Trace.of(kind, 259, max_prompt)
    lens = [len(prompt) for prompt in trace.prompts]
    assert max(lens) <= max_prompt and min(lens) >= 32
    assert all(10 <= token < 259 for prompt in trace.prompts for token in prompt)
    nums = {"one": 1, "ragged-8": 8, "long": 8}
    assert len(trace.prompts) == nums.get(kind, 24)
    first, second = trace.prompts[0], trace.prompts[-1]
    beginnings = {"shared": min(600, max_prompt - 40)}
    if kind in beginnings:
        assert first[: beginnings[kind]] == second[: beginnings[kind]]
    assert (first[24:48] == first[:24]) == (kind in ("one", "repeating"))


@pytest.mark.parametrize(
    ("options", "ending"), [("--drafts 0", ""), ("--drafts 3 --adaptive cost", ", cost")]
)
def test_each_cell_stands_beside_the_peer(monkeypatch, capsys, options, ending) -> None:
    def trace_of(kind, vocab_size, max_prompt):
        return replace(trace, prompts=trace.prompts[:2], num_new=8)

    trace = Trace.of("repeating", 259, 256)
    started: list[tuple[int, str | None]] = []

    def start(*args, adaptive=None, **options):
        started.append((options["drafts"], adaptive))
        return Peer(*args, adaptive=adaptive, **options)

    monkeypatch.setattr(peers, "Peer", start)
    warm = SimpleNamespace(Popen=warm_kit.Popen, PIPE=subprocess.PIPE)
    monkeypatch.setattr(peers, "subprocess", warm)
    monkeypatch.setattr(peers, "quietness", lambda threads: 1.0)
    monkeypatch.setattr(peers.Trace, "of", staticmethod(trace_of))
    options += " --peer plain --size tiny --trace repeating --threads 1 --repeats 1 --json"
    code, out, _ = bench(monkeypatch, capsys, options)
    assert code == 0
    drafts = int(options.split()[1])
    assert started == [(drafts, "cost" if ending else None), (0, None)]
    results = json.loads(out)["results"]
    assert [row["unit"] for row in results] == ["tokens/CPU s", "tokens/s"]
    name = f"tiny: repeating, drafts {drafts}, threads 1{ending}"
    assert {row["name"] for row in results} == {name}
    assert {row["reference"] for row in results} == {"our plain rounds"}
    assert all(row["value"] > 0 and row["reference_value"] > 0 for row in results)


@pytest.mark.skipif(not LLAMA_CPP.is_file(), reason="needs `make llama-cpp-cpu`")
def test_llama_cpp_writes_the_texts_of_this_engine(tmp_path) -> None:
    trace = Trace([prompt[:40] for prompt in Trace.of("ragged-8", 200, 256).prompts], 12)
    with ExitStack() as stack:
        model = peers.model_folder("25m", stack)
        ours, theirs = (
            stack.enter_context(Peer(python, module, model, threads=1, drafts=0)).turn(trace)
            for python, module in (
                (Path(sys.executable), "benches.peer_specpool"),
                (LLAMA_CPP, "benches.peer_llama_cpp"),
            )
        )
    peers.check_texts("25m", Pair(ours, theirs, 1.0))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ("--size big", "size must be"),
        ("--peer sglang", "peer must be"),
        ("--trace batch", "trace must be"),
        ("--drafts -1", "drafts must be"),
        ("--drafts 16", "drafts must be"),
        ("--peer llama-cpp --drafts 0 --drafts 3", "llama.cpp runs here without drafts"),
        ("--drafts 3 --adaptive ema", "adaptive must be"),
        ("--drafts 0 --adaptive cost", "drafts must be >= 1"),
        ("--threads 0", "threads must be"),
        ("--repeats 0", "repeats must be"),
        ("--python /nowhere/python", "make vllm-cpu"),
        ("--peer llama-cpp --python /nowhere/python", "make llama-cpp-cpu"),
    ],
)
def test_bad_options_are_refused(monkeypatch, capsys, options, error) -> None:
    code, out, err = bench(monkeypatch, capsys, options)
    assert (code, out) == (2, "") and error in err
