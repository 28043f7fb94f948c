"""`python -m lab budget`: a shape for each row, beside one shape for the batch.

Three parts: what a decision takes; policies on a simulated device with rows of mixed difficulty and
with targets (`devices`); and engines with the embedded pair.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console

from benches.clients import Clients, lengths
from benches.lines import Line, table_of
from lab.policies import devices as model
from lab.policies.bound import most_goodput
from lab.policies.random_devices import ratios
from specpool import _core
from specpool._core import Shape
from specpool.checks import check_int
from specpool.cli.options import checks
from specpool.cli.results import Result, check_plot, draw, interleaved, machine, print_json
from specpool.engine.assembly.calibration import TOLD
from specpool.engine.assets import corpus
from specpool.engine.sampling_params import SamplingParams
from specpool.engine.shape_names import name_of, parse_shape
from specpool.engine.shapes import AdaptiveConfig, BudgetController, Controller, controller_of
from specpool.errors import CorruptState

if TYPE_CHECKING:
    from specpool.engine.engine import Engine

PLAIN = Shape.none()
#: Microseconds of a decision, by rows.
MOST_US = {64: 30.0, 1024: 150.0}
BEST_SHARE, MORE_THAN_BATCH, PLAIN_SHARE, MORE_GOODPUT = 1.0, 1.1, 0.97, 1.3
DECISIONS = 300
BATCH_SIZES = (1, 4, 16, 64)
MIXES = (
    model.Mix("easy and hard", (0.9, 0.1)),
    model.Mix("all alike", (0.7,)),
    model.Mix("all hard", (0.05,)),
)
#: Requests that hold 1,024 and 32,768 tokens, by turns.
LENGTHS = model.Mix("easy and hard, short and long", (0.9, 0.3), contexts=(1024, 32768))
NUM_SEEDS = 2
START_ERROR = 0.15  # by which a start's seconds of a shape are wrong, where that is tried
PER_CLIENT = 4  # requests of an engine's client, one after the other
NUM_RANDOM = 150
GOODPUT_SEEDS = 4  # whether a request is in time hangs on a few tokens, so more are needed
URGENT_BATCH_SIZES = (64, 128, 256)
REAL_CANDIDATES = tuple(parse_shape("shape", n) for n in ("none", "chain:1", "chain:3"))


def policy(name: str, candidates: Sequence[Shape]) -> AdaptiveConfig:
    """A policy on these candidates."""
    names = [name_of(shape) for shape in candidates]
    return AdaptiveConfig.from_dict({"policy": name, "1": {"candidates": names}})


def _controller(name: str) -> Controller:
    controller = controller_of(policy(name, model.CANDIDATES))
    assert controller is not None
    return controller


# --- a decision ----------------------------------------------------------------------------------


def decisions() -> list[Line]:
    """What the core's estimate and choice take, and all that the policy does for a choice.

    A choice serves up to four rounds, so a round takes less.
    """
    lines = []
    for rows in MOST_US:
        for title, run in _decision_cases(rows).items():
            us = _median_us(run)
            is_core = title.startswith("core")
            limit_us = MOST_US[rows] if is_core else None
            result = Result(f"{rows} rows, {title}", us, "us", "target, at most", MOST_US[rows])
            lines.append(Line(result, max_value=limit_us))
    return lines


def _decision_cases(num_rows: int) -> dict[str, Callable[[], object]]:
    rng = np.random.default_rng(0)
    shapes = [*model.CANDIDATES]
    budget = _controller("budget")
    assert isinstance(budget, BudgetController)
    budget.attach(shapes, num_rows)
    device = model.DEVICES[0]
    for size in (1, num_rows // 8, num_rows):
        for shape in shapes:
            for _ in range(TOLD):
                budget.on_round_seconds(shape, size, device.round([shape], [size]))
    rows = np.arange(num_rows, dtype=np.int32)
    candidates = np.tile(np.arange(len(shapes), dtype=np.int32), (num_rows, 1))
    rates = rng.uniform(0.05, 0.95, num_rows)
    for _ in range(30):
        chosen = budget.choose(rows, candidates)
        budget.count_round()
        steps = np.array([shapes[index].num_steps for index in chosen])
        right = rng.random((num_rows, 8)) < rates[:, None]
        accept_len = 1 + np.minimum(np.cumprod(right, axis=1).sum(axis=1), steps)
        budget.learn(rows, chosen, accept_len.astype(np.int32))
    acceptance, costs = budget._acceptance, budget._cost.costs(num_rows)
    targets = np.zeros((num_rows, 2))
    targets[::4, 1] = 2.0 / costs.base  # two tokens in a plain round's time: some make it
    pages = np.tile(np.arange(len(shapes), dtype=np.int32)[None, :, None], (num_rows, 1, 2))

    def core(due: np.ndarray | None = None, free: np.ndarray | None = None) -> Callable[[], object]:
        def call() -> object:
            return _core.choose_shapes(
                candidates,
                acceptance.tokens(rows),
                worth=budget._worth[rows],
                gives=np.ones(num_rows),
                due=np.zeros((num_rows, 2)) if due is None else due,
                base=costs.base,
                mixed=costs.mixed,
                charge=costs.charge,
                lane=costs.lane,
                pages=None if free is None else pages,
                free=free,
            )

        return call

    def fresh() -> None:
        budget._standing_choice = None
        budget.choose(rows, candidates)
        budget.count_round()

    short = np.full(2, num_rows // 4, np.int64)  # far below what the rows would take
    return {
        "core: estimate and choice": core(),
        "core, pages short": core(free=short),
        "core, a quarter with a target": core(due=targets),
        "the policy's choice in all": fresh,
    }


def _median_us(run: Callable[[], object]) -> float:
    durations = []
    for _ in range(DECISIONS):
        start = time.perf_counter_ns()
        run()
        durations.append((time.perf_counter_ns() - start) / 1e3)
    return statistics.median(durations)


# --- the simulated device ------------------------------------------------------------------------


def simulated(batch_sizes: Sequence[int], rounds: int) -> list[Line]:
    """Throughput and goodput on each device."""
    lines = _random_devices(rounds)
    for device in model.DEVICES:
        for size in batch_sizes:
            for mix in MIXES:
                lines += _throughput(device, mix, size, rounds)
            lines += _throughput(device, LENGTHS, size, rounds)
            lines += [_wrong_start(device, mix, size, rounds) for mix in MIXES]
        for size in batch_sizes:
            if size > 1:
                lines += _goodput(device, _some_targets(device, size), size, rounds)
        for size in URGENT_BATCH_SIZES:
            lines += _goodput(device, _urgent(device), size, rounds)
    return lines


def _runs(
    device: model.Device, mix: model.Mix, size: int, rounds: int, num_seeds: int
) -> tuple[dict[str, list[model.Run]], dict[str, list[model.Run]]]:
    """Runs of every static shape, and of the policies, of each seed."""
    seeds = range(num_seeds)
    how = device, mix, size, rounds
    static = {
        name_of(shape): [model.run(*how, shape=shape, seed=seed) for seed in seeds]
        for shape in model.CANDIDATES
    }
    policies = {
        name: [model.run(*how, controller=_controller(name), seed=seed) for seed in seeds]
        for name in ("cost", "budget")
    }
    return static, policies


def _throughput(device: model.Device, mix: model.Mix, size: int, rounds: int) -> list[Line]:
    static, policies = _runs(device, mix, size, rounds, NUM_SEEDS)
    rate = {
        name: statistics.fmean(run.rate for run in runs)
        for name, runs in {**static, **policies}.items()
    }
    best = max(static, key=rate.__getitem__)
    name = f"{device.name}, {size} rows, {mix.name}"
    is_mixed = len(mix.rates) > 1 and size > 1
    references = (
        (f"best shape, {best}", best, BEST_SHARE),
        ("policy 'cost'", "cost", MORE_THAN_BATCH if is_mixed else None),
        ("plain decoding", "none", PLAIN_SHARE),
    )
    return [
        Line(Result(name, rate["budget"], "tokens/s", reference, rate[key]), bound)
        for reference, key, bound in references
    ]


def _wrong_start(device: model.Device, mix: model.Mix, size: int, rounds: int) -> Line:
    """The slowest of some runs whose start was wrong, beside plain decoding."""
    how = device, mix, size, rounds
    plain = model.run(*how).rate
    slowest = min(
        model.run(*how, controller=_controller("budget"), seed=seed, error=START_ERROR).rate
        for seed in range(GOODPUT_SEEDS)
    )
    name = f"{device.name}, {size} rows, {mix.name}, start wrong by {START_ERROR:.0%}, slowest"
    return Line(Result(name, slowest, "tokens/s", "plain decoding", plain), PLAIN_SHARE)


def _random_devices(rounds: int) -> list[Line]:
    """The least and the mean on devices and mixes that are drawn."""
    device_ratios = np.array(
        [ratios(seed, _controller("budget"), rounds) for seed in range(NUM_RANDOM)]
    )
    of_best, of_plain = device_ratios.T.tolist()
    name = f"{NUM_RANDOM} random devices and mixes"
    figures = [
        (f"{name}, mean", statistics.fmean(of_best), "best shape of each", None),
        (f"{name}, least", min(of_best), "best shape of each", None),
        (f"{name}, least", min(of_plain), "plain decoding", PLAIN_SHARE),
    ]
    return [
        Line(Result(label, value, "share", reference, 1.0), bound)
        for label, value, reference, bound in figures
    ]


def _some_targets(device: model.Device, size: int) -> model.Mix:
    """A third of the requests must be faster than 0.6 of plain decoding's round."""
    tpot_ms = 0.6e3 * device.round([PLAIN], [size])
    name = f"{tpot_ms:.1f} ms a token for a third"
    return model.Mix(name, (0.8, 0.5), target_share=0.34, tpot_ms=tpot_ms)


def _urgent(device: model.Device) -> model.Mix:
    """Urgent and relaxed requests, as AdaServe (arXiv:2501.12162) serves; the numbers are ours.

    Code completion may take 1.2 times as long as plain decoding without other requests, chats 50 ms
    a token. Six of ten requests are urgent.
    """
    tpot_ms = 1.2e3 * device.round([PLAIN], [1])
    name = f"{tpot_ms:.1f} ms a token for 6 of 10, 50 ms for the others"
    return model.Mix(name, (0.8, 0.5), target_share=0.6, tpot_ms=tpot_ms, relaxed_ms=50.0)


def _goodput(device: model.Device, mix: model.Mix, size: int, rounds: int) -> list[Line]:
    """Tokens per second in time, and how many there could be."""
    static, policies = _runs(device, mix, size, rounds, GOODPUT_SEEDS)
    good = {
        name: statistics.fmean(run.goodput for run in runs)
        for name, runs in {**static, **policies}.items()
    }
    best = max((*static, "cost"), key=good.__getitem__)
    name, unit = f"{device.name}, {size} rows, {mix.name}", "tokens/s in time"
    alike, apart = most_goodput(device, mix, size)
    if not alike or not good[best]:  # no shape for all meets any target: there is no ratio
        return []
    return [
        Line(
            Result(name, good["budget"], unit, f"best for the batch, {best}", good[best]),
            MORE_GOODPUT,
        ),
        Line(Result(f"{name}, told", apart, unit, "one shape for all, told", alike)),
    ]


# --- engines -------------------------------------------------------------------------------------


def real(batch_sizes: Sequence[int], num_tokens: int, repeats: int, device: str) -> list[Line]:
    """Policies and static shapes by turns in engines on the embedded pair.

    Raises:
        CorruptState: a text is not plain decoding's.
    """
    from specpool.engine.draft import EagleDrafter
    from specpool.engine.engine import Engine

    max_rows = max(batch_sizes)
    with Engine.from_pretrained(
        draft="specpool/tiny-eagle",
        device=device,
        dtype="float32",
        shape=PLAIN,
        max_batch=max_rows,
        prefix_cache=False,
    ) as plain:
        assert isinstance(plain.drafter, EagleDrafter)

        def another(**options: object) -> Engine:
            config = dataclasses.replace(plain.config, **options)  # type: ignore[arg-type]
            assert isinstance(plain.drafter, EagleDrafter)
            return Engine(plain.target, EagleDrafter(plain.drafter.head), config=config)

        engines = {"none": plain}
        engines |= {name_of(s): another(shape=s) for s in REAL_CANDIDATES if s.num_steps}
        for name in ("cost", "budget"):
            engines[name] = another(shape=None, adaptive=policy(name, REAL_CANDIDATES))
        try:
            return [
                line
                for size in batch_sizes
                for line in _real_lines(size, engines, num_tokens, repeats)
            ]
        finally:
            for name, engine in engines.items():
                if name != "none":
                    engine.close()


def _real_lines(
    size: int, engines: Mapping[str, Engine], num_tokens: int, repeats: int
) -> list[Line]:
    """One batch size: half of the requests go on greedily, half draw at temperature 1.5."""
    num = PER_CLIENT * size
    prompts = corpus.prompts(num, 96)
    params = [
        SamplingParams(
            max_new_tokens=max_tokens,
            ignore_eos=True,
            seed=number,
            # All clients have as many of each kind.
            temperature=1.5 if (number + number // size) % 2 else 0.0,
        )
        for number, max_tokens in enumerate(lengths(num, num_tokens))
    ]
    clients = {name: Clients(engine, prompts, params, size) for name, engine in engines.items()}

    def turn(name: str) -> float:
        start = time.process_time()
        clients[name].begin()
        while clients[name].turns(1):
            pass
        return sum(map(len, clients[name].texts)) / (time.process_time() - start)

    for name in engines:  # no engine is fresh
        turn(name)
    rates = dict(
        zip(engines, interleaved([partial(turn, name) for name in engines], repeats), strict=True)
    )
    for name, pair_clients in clients.items():
        if pair_clients.texts != clients["none"].texts:
            raise CorruptState(f"batch {size}: the texts of {name} are not plain decoding's")
    static = [name for name, engine in engines.items() if engine.config.adaptive is None]
    best = max(static, key=rates.__getitem__)
    references = (
        (f"best shape, {best}", best, BEST_SHARE),
        ("policy 'cost'", "cost", MORE_THAN_BATCH if size > 1 else None),
        ("plain decoding", "none", PLAIN_SHARE),
    )
    unit = "tokens/s of processor time"
    pair = f"the shipped pair, {size} rows"
    return [
        Line(Result(pair, rates["budget"], unit, text, rates[key]), bound)
        for text, key, bound in references
    ]


# --- the command ---------------------------------------------------------------------------------


def budget(
    *,
    batch_sizes: Sequence[int],
    rounds: int,
    num_tokens: int,
    repeats: int,
    device: str,
    threads: int,
    json: bool,
    plot: Path | None,
) -> None:
    """Measure, and print the results.

    Raises:
        ConfigError: an option cannot work.
        CorruptState: a policy or a shape changes a text.
    """
    check_int("rounds", rounds, 0, 1 << 20)
    check_int("repeats", repeats, 0, 1 << 16)
    check_int("tokens", num_tokens, 1, 128)
    checks.check_place(device=device, threads=threads)
    for batch in batch_sizes:
        check_int("batch", batch, 1, 1 << 10)
    if plot is not None:
        check_plot(plot)
    checks.start_torch(threads)
    lines = decisions()
    if rounds:
        lines += simulated(batch_sizes, rounds)
    if repeats:
        lines += real(batch_sizes, num_tokens, repeats, device)
    results = [line.result for line in lines]
    if json:
        print_json(machine(device, threads, ("numpy", "torch")), results)
    else:
        console = Console()
        Console(width=max(console.width, 150)).print(table_of("lab budget", _CAPTION, lines))
    if plot is not None:
        draw("lab budget", [result for result in results if result.unit == "tokens/s"], plot)


_CAPTION = (
    "simulated: the policies' own code on a roofline of published peaks, 0.6 of the arithmetic and "
    "0.8 of the bandwidth, or on measured forwards; told: what the best shape for each kind of "
    "request gives if rounds are as the mean round; requests of 128 tokens at 1,024 tokens of "
    "context, whose acceptance is given; best shape: one shape for all rows, with hindsight. "
    "Engines: half of the rows draw at temperature 1.5, medians of interleaved runs, texts equal "
    "to plain's"
)
