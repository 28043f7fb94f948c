"""`python -m lab adaptive`: policies that choose a shape for each round.

It runs them once on a model of text that changes (`adaptive_model`), with the times of rounds
measured first, and once in engines. All runs use the embedded pair.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress

from benches.lines import Line, table_of
from lab.policies import adaptive_model as model
from specpool._core import Shape
from specpool.checks import check_int
from specpool.cli.options import checks
from specpool.cli.results import Result, check_plot, draw, interleaved, machine, print_json
from specpool.cli.tune import CANDIDATES
from specpool.engine.assets import corpus
from specpool.engine.sampling_params import SamplingParams
from specpool.engine.shape_names import name_of
from specpool.engine.shapes import AdaptiveConfig, controller_of
from specpool.errors import ConfigError, CorruptState

if TYPE_CHECKING:
    from specpool.engine.engine import Engine

PLAIN = Shape.none()
POLICIES = {
    "policy 'cost'": AdaptiveConfig.from_dict(
        {"policy": "cost", "1": {"candidates": [name_of(shape) for shape in CANDIDATES]}}
    ),
    "SGLang's rule": dataclasses.replace(AdaptiveConfig.default(), threshold_rounds=0),
}
OURS, THEIRS = POLICIES
#: A policy that drafts as little as plain decoding, but may draft again: its rows keep draft KV.
READY = AdaptiveConfig.from_dict({"1": {"candidates": [0, 1], "warmup_batches": 1 << 30}})
#: Two plain rounds and two that draft, in turn: from 0 the rule goes up, and here always down.
BY_TURNS = AdaptiveConfig.from_dict(
    {"1": {"candidates": [0, 1], "warmup_batches": 0, "update_interval": 2, "down_hysteresis": 99}}
)
#: Back and forth over the thresholds of a table, then up to 32 rows and down.
MIXED = [*[4, 5] * 40, *[7, 9] * 40, *range(1, 33), *range(32, 0, -1)]
NUM_SEEDS = 3
NUM_PASSES = 7  # passes over the rounds that are measured for the model
NUM_ROUNDS = 15  # rounds of each shape and batch size in a pass
PROMPT_LEN = 128

BEST_SHARE, REAL_BEST_SHARE, PLAIN_SHARE, MOST_US = 0.95, 0.93, 0.95, 20.0


class Engines:
    """The embedded pair: an engine for each policy and each shape, all on one target."""

    def __init__(self, stack: ExitStack, device: str, max_batch: int) -> None:
        """Load the pair, with room for `num_rows` rows in each engine."""
        from specpool.engine.engine import Engine

        self._stack = stack
        self._first = stack.enter_context(
            Engine.from_pretrained(
                draft="specpool/tiny-eagle",
                device=device,
                dtype="float32",
                shape=PLAIN,
                max_batch=max_batch,
                prefix_cache=False,
            )
        )
        # One engine for each shape, as a user who knows the shape would build it, without other
        # shapes.
        self.static = {
            shape: self._another(shape=shape) if shape.num_steps else self._first
            for shape in CANDIDATES
        }
        self.ready = self._another(shape=PLAIN, adaptive=READY)
        self.by_turns = self._another(shape=None, adaptive=BY_TURNS)

    @property
    def max_context_len(self) -> int:
        """Positions of each."""
        return self._first.max_context_len

    def adaptive(self, config: AdaptiveConfig) -> tuple[Engine, float]:
        """An engine with a policy of its own, and the seconds it took to build."""
        start = time.perf_counter()
        engine = self._another(shape=None, adaptive=config)
        return engine, time.perf_counter() - start

    def _another(self, **options: object) -> Engine:
        from specpool.engine.draft import EagleDrafter
        from specpool.engine.engine import Engine

        drafter = self._first.drafter
        assert isinstance(drafter, EagleDrafter)
        config = dataclasses.replace(self._first.config, **options)  # type: ignore[arg-type]
        engine = Engine(self._first.target, EagleDrafter(drafter.head), config=config)
        self._stack.callback(engine.close)
        return engine


def round_seconds(
    engine: Engine, batch_size: int, num_rounds: int
) -> list[tuple[Shape | None, float]]:
    """So many rounds in which all lanes go on, after two that warm up.

    Returns:
        What the engine's policy chose for each, and its seconds.
    """
    begun: set[int] = set()
    params = SamplingParams(max_new_tokens=1 << 20, ignore_eos=True)
    prompts = corpus.prompts(batch_size, PROMPT_LEN)
    numbers = [
        engine.submit(prompt, params, on_item=lambda number, item: begun.add(number))
        for prompt in prompts
    ]
    while len(begun) < batch_size:
        engine.turn()
    rounds = []
    for _ in range(num_rounds + 2):
        start = time.perf_counter()
        engine.turn()
        seconds, stats = time.perf_counter() - start, engine.stats().adaptive
        rounds.append((None if stats is None else stats.shape, seconds))
    for number in numbers:
        engine.abort(number)
    while engine.turn():
        pass
    return rounds[2:]


def measured_costs(
    engines: Engines, max_batch: int, num_passes: int, advance: Callable[[], None]
) -> tuple[model.Costs, dict[int, float]]:
    """What rounds of rows that may change their shape take; and of rows that never draft.

    The least time counts, because other work on the machine can only add to it.
    """
    sizes = sorted({1 << i for i in range(max_batch.bit_length())} | {max_batch})
    seconds: dict[tuple[Shape | None, int], float] = {}
    by_turns: dict[tuple[bool, int], float] = {}  # rounds that draft: after a plain one or not
    for _ in range(num_passes):
        for size in reversed(sizes):  # or a few rows would have a fresh engine's one run of pages
            for shape in (*CANDIDATES, None):  # None means plain rounds that may draft again
                engine = engines.ready if shape is None else engines.static[shape]
                least = min(seconds for _, seconds in round_seconds(engine, size, NUM_ROUNDS))
                seconds[shape, size] = min(least, seconds.get((shape, size), least))
            rounds = round_seconds(engines.by_turns, size, 2 * NUM_ROUNDS)
            for (previous, _), (shape, took) in pairwise(rounds):
                if shape != PLAIN:
                    key = (previous == PLAIN, size)
                    by_turns[key] = min(took, by_turns.get(key, took))
        advance()
    catch_up = {size: max(by_turns[True, size] - by_turns[False, size], 0.0) for size in sizes}
    of_shapes = {
        shape: {size: seconds[shape if shape.num_steps else None, size] for size in sizes}
        for shape in CANDIDATES
    }
    return model.Costs(of_shapes, catch_up), {size: seconds[PLAIN, size] for size in sizes}


def simulated(
    costs: model.Costs, plain: dict[int, float], batch_sizes: Sequence[int], rounds: int
) -> list[Line]:
    """Policies and static shapes on one seeded workload."""
    lines: list[Line] = []
    runs: list[model.Run] = []
    for size in batch_sizes:
        case = _Case(f"simulated, batch {size}", costs, plain, [size], rounds)
        lines += case.lines(runs)
    mixed = [size for size in MIXED if size <= max(batch_sizes)]
    if len({*mixed}) > 1:
        title = f"simulated, {min(mixed)} to {max(mixed)} rows by turns"
        lines += _Case(title, costs, plain, mixed, rounds).lines(runs)
    us = statistics.median(us for run in runs for us in run.round_us)
    result = Result(f"{OURS}, a round's calls", us, "us", "target, at most", MOST_US)
    lines.append(Line(result, max_value=MOST_US))
    if switch_us := [us for run in runs for us in run.switch_us]:
        whole = statistics.median(switch_us)
        result = Result(f"{OURS}, calls of a round that switches", whole, "us", "any round", us)
        lines.append(Line(result))
        result = Result(f"{OURS}, what a switch adds", whole - us, "us", "target, at most", MOST_US)
        lines.append(Line(result, max_value=MOST_US))
    for size, seconds in plain.items():
        name, again = (
            f"plain round of {size} rows that may draft again",
            costs.seconds_of(PLAIN, size),
        )
        result = Result(name, 1e3 * again, "ms", "of rows that never draft", 1e3 * seconds)
        lines.append(Line(result))
        name = f"first round of {size} rows that drafts after a plain one: more by"
        lines.append(Line(Result(name, 1e3 * costs.catch_up[size], "ms", "plain", 1e3 * seconds)))
    return lines


class _Case:
    """One workload: the static shapes, then each policy."""

    def __init__(
        self,
        title: str,
        costs: model.Costs,
        plain: dict[int, float],
        batch_sizes: Sequence[int],
        rounds: int,
    ) -> None:
        self._title, self._costs = title, costs
        self._sizes, self._rounds = batch_sizes, rounds
        self._ready = {
            name_of(shape): model.static(shape, costs, batch_sizes, rounds) for shape in CANDIDATES
        }
        never = model.Costs({PLAIN: plain})
        self._plain = model.static(PLAIN, never, batch_sizes, rounds)
        # Engines of one shape can do this: the plain one never has to draft.
        self._static = {**self._ready, name_of(PLAIN): self._plain}

    def lines(self, ours: list[model.Run]) -> list[Line]:
        """The figures; `ours` gets the runs of our policy."""
        all_lines = []
        for name, config in POLICIES.items():
            runs = []
            for seed in range(NUM_SEEDS):
                controller = controller_of(config)
                assert controller is not None
                how = (controller, self._costs, self._sizes, self._rounds)
                runs.append(model.replay(*how, seed=seed))
            cells = model.merged(runs)
            lines = [*self._beside_static(cells), *self._beside_plain(cells)]
            switches = statistics.median(run.switch_ct for run in runs)
            num_rounds = self._rounds * len(model.PHASES)
            lines.append(Line(Result("", switches, "switches", "rounds", num_rounds)))
            if name == OURS:
                ours += runs
            for line in lines:
                result = dataclasses.replace(line.result, name=f"{self._title}: {name}")
                all_lines.append(Line(result, line.min_ratio if name == OURS else None))
        return all_lines

    def _beside_static(self, cells: model.Cells) -> Iterator[Line]:
        is_mixed = len({*self._sizes}) > 1
        for static, of_rows in ((self._static, ""), (self._ready, ", rows may draft again")):
            rates = {
                name: model.tokens_per_second(shape_cells) for name, shape_cells in static.items()
            }
            best = max(rates, key=rates.__getitem__)
            if is_mixed:
                yield _line(cells, f"best single shape, {best}{of_rows}", rates[best], 1.0)
            else:
                rate = model.tokens_per_second(model.with_hindsight([*static.values()]))
                yield _line(cells, f"best shape of each phase{of_rows}", rate, BEST_SHARE)

    def _beside_plain(self, cells: model.Cells) -> Iterator[Line]:
        rate = model.tokens_per_second
        yield _line(cells, "plain decoding", rate(self._plain), PLAIN_SHARE)
        worst = min(model.PHASES, key=lambda name: rate(cells, name) / rate(self._plain, name))
        result = Result(
            "",
            rate(cells, worst),
            "tokens/s",
            f"plain decoding, worst phase ({worst})",
            rate(self._plain, worst),
        )
        yield Line(result, PLAIN_SHARE)


def _line(cells: model.Cells, reference: str, value: float, least: float | None) -> Line:
    result = Result("", model.tokens_per_second(cells), "tokens/s", reference, value)
    return Line(result, least)


def real(
    engines: Engines,
    batch_sizes: Sequence[int],
    num_tokens: int,
    repeats: int,
    advance: Callable[[], None],
) -> list[Line]:
    """Policies, static shapes and plain decoding by turns, on the same prompts.

    Raises:
        CorruptState: a text is not plain decoding's.
    """
    contenders = {name_of(shape): engine for shape, engine in engines.static.items()}
    starts = {}
    for name, config in POLICIES.items():
        contenders[name], starts[name] = engines.adaptive(config)
    lines = [Line(Result(f"{OURS}, an engine's start", starts[OURS], "s", THEIRS, starts[THEIRS]))]
    # Rows of a fresh engine lie in one run of pages, which is read faster. No engine here is fresh.
    texts = _Texts(max(batch_sizes), num_tokens)
    for name, engine in contenders.items():
        texts.tokens_per_second(name, engine)
    for size in batch_sizes:
        texts = _Texts(size, num_tokens)
        for engine in contenders.values():
            engine.generate(texts.prompts[:size], SamplingParams(max_new_tokens=4))
        before = {name: _switch_ct(engine) for name, engine in contenders.items()}

        def taking_turn(name: str, engine: Engine, texts: _Texts = texts) -> float:
            value = texts.tokens_per_second(name, engine)
            advance()
            return value

        runs = [partial(taking_turn, name, engine) for name, engine in contenders.items()]
        rates = dict(zip(contenders, interleaved(runs, repeats), strict=True))
        for line in _real_lines(rates):
            name = line.result.name
            result = dataclasses.replace(line.result, name=f"batch {size}: {name}")
            lines.append(Line(result, line.min_ratio if name == OURS else None))
        for name in POLICIES:
            switches = _switch_ct(contenders[name]) - before[name]
            result = Result(f"batch {size}: {name}", switches, "switches", "runs", repeats)
            lines.append(Line(result))
    return lines


def _real_lines(rates: dict[str, float]) -> Iterator[Line]:
    """Compare tokens per second with plain decoding, and a policy's with the best shape's."""
    best = max((name for name in rates if name not in POLICIES), key=rates.__getitem__)
    plain = name_of(PLAIN)
    for name, rate in rates.items():
        if name in POLICIES:
            reference = f"best static shape, {best}"
            result = Result(name, rate, "tokens/s", reference, rates[best])
            yield Line(result, REAL_BEST_SHARE)
        if name != plain:
            result = Result(name, rate, "tokens/s", "plain decoding", rates[plain])
            yield Line(result, PLAIN_SHARE)


class _Texts:
    """Prompts in groups, and the texts of plain decoding for them."""

    def __init__(self, batch_size: int, num_tokens: int) -> None:
        num_groups = max(1, min(4, 16 // batch_size))  # few rows are done sooner
        self.prompts = corpus.prompts(num_groups * batch_size, PROMPT_LEN)
        self._batch_size = batch_size
        self._params = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
        self._plain: list[list[int]] | None = None

    def tokens_per_second(self, name: str, engine: Engine) -> float:
        """Run the engines; the first is plain decoding."""
        texts: list[list[int]] = []
        start = time.perf_counter()
        for first in range(0, len(self.prompts), self._batch_size):
            group = self.prompts[first : first + self._batch_size]
            outputs = engine.generate(group, self._params, progress=False)
            texts += [output.token_ids for output in outputs]
        seconds = time.perf_counter() - start
        if self._plain is None:
            assert engine.shape == PLAIN
            self._plain = texts
        for i, (tokens, plain) in enumerate(zip(texts, self._plain, strict=True)):
            if tokens != plain:
                raise CorruptState(f"{name}, prompt {i} says {tokens}, plain decoding {plain}")
        return sum(map(len, texts)) / seconds


def _switch_ct(engine: Engine) -> int:
    stats = engine.stats().adaptive
    return 0 if stats is None else stats.switch_ct


def adaptive(
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
    checks.check_place(device=device, threads=threads)
    check_int("tokens", num_tokens, 1, 1 << 20)
    for batch in batch_sizes:
        check_int("batch", batch, 1, 1 << 10)
    if not rounds and not repeats:
        raise ConfigError("rounds and repeats are both 0: there is nothing to measure")
    if plot is not None:
        check_plot(plot)
    checks.start_torch(threads)
    console = Console(stderr=True)
    lines: list[Line] = []
    with (
        ExitStack() as stack,
        Progress(transient=True, console=console, disable=not console.is_terminal) as progress,
    ):
        engines = Engines(stack, device, max(batch_sizes))
        room = engines.max_context_len
        if PROMPT_LEN + num_tokens > room:
            raise ConfigError(
                f"prompts of {PROMPT_LEN} tokens and {num_tokens} new ones do not fit the model's "
                f"{room} positions"
            )
        num_passes = (min(repeats, NUM_PASSES) or NUM_PASSES) if rounds else 0
        num_contenders = len(CANDIDATES) + len(POLICIES)
        task = progress.add_task(
            "measuring", total=num_passes + len(batch_sizes) * num_contenders * repeats
        )
        advance = partial(progress.advance, task)
        if rounds:
            costs, plain = measured_costs(engines, max(batch_sizes), num_passes, advance)
            lines += simulated(costs, plain, batch_sizes, rounds)
        if repeats:
            lines += real(engines, batch_sizes, num_tokens, repeats, advance)
    results = [result for line in lines for result in line.results()]
    if json:
        print_json(machine(device, threads, ("torch", "transformers")), results)
    else:
        # Wide enough for every column, also if the output is not a terminal.
        console = Console()
        Console(width=max(console.width, 164)).print(table_of("lab adaptive", _CAPTION, lines))
    if plot is not None:
        draw("lab adaptive", [result for result in results if result.unit == "tokens/s"], plot)


_CAPTION = (
    f"simulated: the policies' own code; rounds take what they took here on the shipped pair; "
    f"drafts are right by a draw, means of {NUM_SEEDS} seeds, {len(model.PHASES)} phases "
    f"({'; '.join(model.PHASES)}); a tree's depth is right as if {model.TREE_TRIES:g} chains "
    "tried; plain decoding never drafts and keeps no draft KV, rows that may draft again keep it, "
    "and their first draft after a plain round takes the head one token more. "
    "The others: the shipped pair itself, medians of interleaved runs, texts equal to plain's"
)
