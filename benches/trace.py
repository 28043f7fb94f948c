"""`python -m benches reserve --trace`: one trace of requests, upstream's way and ours.

The scheduler and the ledger are real; the device is simulated and has no memory. Upstream's way is
placement shared, policy double_buffer, and layout holey if P > 1 and K > 1. Its requests are
admitted and retracted as ours are. All ways get the same requests, bytes (page 0 included), context
limit, prefill chunk, and limit on running rows, which is so high that it never binds.
"""

from __future__ import annotations

import random
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from lab.policies.devices import DEVICES
from lab.sim import Arrival, Settings, SimDevice, Text
from specpool._core import Ledger, Shape
from specpool.capacity.group_sizes import GroupSizes, Layout, Placement, Policy, size_groups
from specpool.capacity.layer_kv import LayerKV
from specpool.checks import check_int
from specpool.cli.results import Result, check_plot, machine, print_json
from specpool.engine.config import HEADROOM, EngineConfig
from specpool.engine.scheduler.config import SchedulerConfig
from specpool.engine.scheduler.scheduler import Scheduler
from specpool.engine.scheduler.step import Step
from specpool.engine.shape_names import parse_shape
from specpool.engine.shapes import AdaptiveConfig, BudgetController, Controller, RangeConfig
from specpool.errors import ConfigError
from specpool.num_bytes import parse_bytes, show_bytes

# Of an 8B model in 16 bits.
LAYER = LayerKV(num_kv_heads=8, k_head_dim=128, v_head_dim=128)
ITEMSIZE = 2
# Upstream runs about two dozen requests of the default trace on so many bytes.
KV_BYTES = 8 << 30

MAX_BATCH = 1024
PREFILL_TOKENS = 8192
ARRIVALS_PER_TURN = 4  # on average: more than any way can serve, so that memory decides
TREE, CHAIN = Shape.eagle(5, 8, 64), Shape.eagle(3, 1, 4)
MEAN_PROMPT_LEN, MEAN_OUTPUT_LEN, NUM_REQUESTS = 384, 256, 512
LIVE_LENS = (2048, 8192)  # mean tokens of a running request; these are measured too

HELD = ("tokens", "rest of pages", "reserve", "free")
WIDER = 1.15  # the target of a budget over the tree for every row, on that trace
MORE = 3.0  # the project's target: times the requests at once, on the default trace


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests to come, a function of a seed; lengths are uniform in 0.5 to 1.5 of their mean."""

    name: str
    shape: Shape
    mean_prompt_len: int
    mean_output_len: int
    num_requests: int
    accept_rate: float
    seed: int

    @property
    def max_context_len(self) -> int:
        """The most tokens that a request may have."""
        return sum(_longest(mean) for mean in (self.mean_prompt_len, self.mean_output_len))

    def arrivals(self) -> list[Arrival]:
        """The requests, in the order of their coming."""
        rng = random.Random(self.seed)
        turn, arrivals = 0.0, []
        for request_id in range(1, self.num_requests + 1):
            prompt_len, output_len = (
                rng.randint((mean + 1) // 2, _longest(mean))
                for mean in (self.mean_prompt_len, self.mean_output_len)
            )
            arrivals.append(
                Arrival(
                    request_id=request_id,
                    turn=int(turn),
                    prompt_len=prompt_len,
                    max_len=prompt_len + output_len,
                    shape=1,
                    accept_rate=self.accept_rate,
                )
            )
            turn += rng.expovariate(ARRIVALS_PER_TURN)
        return arrivals


def _longest(mean: int) -> int:
    return mean + mean // 2


@dataclass(frozen=True, slots=True)
class Way:
    """How memory is laid out and reserved."""

    who: str
    placement: Placement
    policy: Policy
    layout: Layout
    narrow: tuple[Shape, ...] = ()  # with a budget, the candidates beside the traffic's shape

    @property
    def name(self) -> str:
        """The name in the table and the JSON."""
        budget = ", budget" if self.narrow else ""
        return f"{self.who}: {self.policy}, {self.placement}, {self.layout}{budget}"


def ways(page_size: int, shape: Shape) -> list[Way]:
    """Upstream's, then ours."""
    layouts: list[Layout] = ["dense", "holey"] if page_size > 1 and shape.topk > 1 else ["dense"]
    ours = [Way("specpool", "split", "exact", layout) for layout in layouts]
    if shape.topk > 1:
        ours.append(replace(ours[0], narrow=(Shape.none(), CHAIN)))
    return [Way("SGLang", "shared", "double_buffer", layouts[-1]), *ours]


@dataclass(slots=True)
class Run:
    """What happened to a trace in one way."""

    sizes: GroupSizes
    running: list[int] = field(default_factory=list)  # requests with a row, by round
    tokens: int = 0  # generated
    retractions: int = 0
    unfinished: int = 0  # requests that did not get their tokens
    #: Of all slots while requests wait: tokens, the rest of their last pages, reserve, free.
    held: list[tuple[float, float, float, float]] = field(default_factory=list)

    @property
    def rounds(self) -> int:
        """Turns of the loop that launched a step."""
        return len(self.running)

    @property
    def mean_running(self) -> float:
        """Requests running at once, over all rounds."""
        return statistics.fmean(self.running)

    @property
    def shares(self) -> tuple[float, ...]:
        """Means of `held`; nothing if no request ever waited."""
        return tuple(statistics.fmean(column) for column in zip(*self.held, strict=True))

    @property
    def tokens_per_round(self) -> float:
        """Of all requests together."""
        return self.tokens / self.rounds


@dataclass(frozen=True, slots=True)
class Machinery:
    """The model and its memory, the same for all."""

    page_size: int
    overlap_depth: int
    target_layers: int
    draft_layers: int
    kv_bytes: int
    headroom: int  # of the scheduler's admission, in tokens

    def sizes(self, way: Way, traffic: Traffic) -> GroupSizes:
        """The pools as an engine would size them, but without a limit on rows that binds.

        Raises:
            ConfigError: the bytes do not hold one full row.
        """
        config = EngineConfig(
            page_size=self.page_size,
            placement=way.placement,
            policy=way.policy,
            layout=way.layout,
            overlap_depth=self.overlap_depth,
            max_batch=MAX_BATCH,
            prefix_cache=False,
            prefill_tokens=PREFILL_TOKENS,
        )
        token_bytes = LAYER.bytes_per_token(ITEMSIZE)
        return size_groups(
            config,
            {None: self.target_layers * token_bytes},
            self.draft_layers * token_bytes,
            shapes=[traffic.shape, *(shape for shape in way.narrow if shape.num_steps)],
            max_context_len=traffic.max_context_len,
            kv_bytes=self.kv_bytes,
        )


def run_trace(machinery: Machinery, way: Way, traffic: Traffic) -> Run:
    """Serve the traffic to its end.

    Raises:
        ConfigError: the bytes do not hold one full row.
    """
    sizes = machinery.sizes(way, traffic)
    shape = traffic.shape
    settings = Settings(
        page_sizes=tuple(group.page_size for group in sizes.groups),
        num_pages=tuple(group.num_pages for group in sizes.groups),
        placement=way.placement,
        layout=sizes.groups[-1].layout,
        policy=way.policy,
        shapes=tuple((s.num_steps, s.topk, s.num_draft_tokens) for s in sizes.shapes[1:]),
        overlap_depth=machinery.overlap_depth,
        max_batch=sizes.num_rows,
        prefill_tokens=PREFILL_TOKENS,
        max_context_len=traffic.max_context_len,
    )
    ledger = sizes.ledger()
    device = SimDevice(ledger, settings, random.Random(traffic.seed), has_memory=False)
    scheduler = Scheduler(
        ledger,
        SchedulerConfig(
            max_batch=sizes.num_rows,
            prefill_tokens=PREFILL_TOKENS,
            keeps_draft_kv=True,
            headroom=machinery.headroom,
        ),
        controller=_budget((shape, *way.narrow)) if way.narrow else None,
    )
    to_come = deque(traffic.arrivals())
    texts = {arrival.request_id: Text(arrival) for arrival in to_come}
    requests = []
    flying: deque[list[Step]] = deque()
    run, turn = Run(sizes), 0
    while to_come or flying or scheduler.requests():
        while to_come and to_come[0].turn <= turn:
            requests.append(request := to_come.popleft().request())
            if way.narrow:
                allowed = scheduler.round_shapes.allowed(shape, None)
                _, request.shape_index, request.choices = allowed
            scheduler.submit(request)
        turn += 1
        steps = scheduler.schedule()
        if steps:
            run.running.append(scheduler.num_running)
            if scheduler.num_waiting:
                run.held.append(_held(ledger, [request.row for request in scheduler.running]))
        for step in steps:
            number = step.plan.step
            scheduler.launch(step)
            delta = ledger.take_delta(number)
            ledger.ack_delta(number)
            device.launch(step, [texts[r.request_id] for r in step.requests], delta)
        flying.append(steps)
        while len(flying) > machinery.overlap_depth or (flying and not steps):
            for step in flying.popleft():
                scheduler.take_over(step, device.result(step.plan))
    run.tokens = sum(request.num_output_tokens for request in requests)
    run.retractions = scheduler.num_retracted
    run.unfinished = sum(len(request.tokens) < request.max_len for request in requests)
    return run


def _held(ledger: Ledger, rows: Sequence[int]) -> tuple[float, float, float, float]:
    """Return what rows hold of the first group's slots, as shares; see `Run.held`."""
    group = ledger.groups[0]
    size = group.page_size
    tokens = ledger.resolved_len[rows].astype(np.int64)
    whole = -(-tokens // size) * size
    beyond = int((ledger.allocated_len(0)[rows] - whole).sum())
    slots = group.num_pages * size
    parts = int(tokens.sum()), int((whole - tokens).sum()), beyond, ledger.free_pages(0) * size
    return parts[0] / slots, parts[1] / slots, parts[2] / slots, parts[3] / slots


def _budget(candidates: Sequence[Shape]) -> Controller:
    """The policy of rows, as if rounds of so many rows and nodes had been timed on an H100."""
    ranges = {1: RangeConfig(candidates=tuple(candidates))}
    controller = BudgetController(AdaptiveConfig(ranges=ranges, policy="budget"))
    for shape in candidates:
        for size in (1, 8, 32, 128):
            controller.on_round_seconds(shape, size, DEVICES[0].round([shape], [size]))
    return controller


@dataclass(frozen=True, slots=True)
class Comparison:
    """One traffic, in every way; upstream's first."""

    traffic: Traffic
    runs: list[tuple[Way, Run]]
    has_target: bool  # the trace for which the project has a target


def trace(
    *,
    page_size: int,
    shape: str,
    overlap_depth: int,
    target_layers: int,
    draft_layers: int,
    json: bool,
    plot: Path | None,
    memory: str | None = None,
    prompt: int = MEAN_PROMPT_LEN,
    output: int = MEAN_OUTPUT_LEN,
    requests: int = NUM_REQUESTS,
    accept_rate: float = 0.7,
    headroom: int = HEADROOM,
    seed: int = 0,
) -> None:
    """Simulate, then print.

    Raises:
        ConfigError: an option cannot work.
    """
    parsed = parse_shape("--shape", shape)
    if parsed == Shape.none():
        raise ConfigError(f"shape {shape} drafts nothing: there is nothing to compare")
    check_int("page_size", page_size, 1, 1 << 12)
    check_int("overlap_depth", overlap_depth, 0, 1)
    check_int("layers", target_layers, 1, 1 << 12)
    check_int("draft_layers", draft_layers, 1, 1 << 12)
    kv_bytes = KV_BYTES if memory is None else parse_bytes("memory", memory)
    check_int("prompt", prompt, 1, 1 << 14)
    check_int("output", output, 2, 1 << 14)
    check_int("requests", requests, 1, 1 << 16)
    check_int("headroom", headroom, 0, 1 << 16)
    check_int("seed", seed, 0, (1 << 31) - 1)
    if not 0 <= accept_rate < 1:
        raise ConfigError(f"accept_rate must be a number in [0, 1), got {accept_rate:g}")
    if plot is not None:
        check_plot(plot)
    machinery = Machinery(page_size, overlap_depth, target_layers, draft_layers, kv_bytes, headroom)
    lengths = f"prompt {prompt}, output {output}"
    first = Traffic(lengths, parsed, prompt, output, requests, accept_rate, seed)
    longer = [
        replace(first, name=f"live {live}", mean_prompt_len=live - output // 2)
        for live in LIVE_LENS
        if live > output // 2
    ]
    traffics = [first, *longer]
    if parsed != CHAIN:
        traffics.append(replace(first, name=f"{first.name}, chains", shape=CHAIN))
    plans = [(traffic, way) for traffic in traffics for way in ways(page_size, traffic.shape)]
    for traffic, way in plans:  # before any runs
        machinery.sizes(way, traffic)
    runs = []
    console = Console(stderr=True)
    with Progress(transient=True, console=console, disable=not console.is_terminal) as progress:
        for traffic, way in progress.track(plans, description="simulating"):
            runs.append((traffic, way, run_trace(machinery, way, traffic)))
    comparisons = [
        Comparison(
            traffic,
            [(way, run) for run_traffic, way, run in runs if run_traffic is traffic],
            has_target=is_asked_for(machinery, traffic),
        )
        for traffic in traffics
    ]
    if json:
        print_json(machine(), results(comparisons))
    else:
        console = Console()
        Console(width=max(console.width, 136)).print(_table(machinery, comparisons))
    if plot is not None:
        _draw(machinery, comparisons, plot)


def is_asked_for(machinery: Machinery, traffic: Traffic) -> bool:
    """Whether the project has a target for it; few requests do not fill the memory."""
    means = traffic.mean_prompt_len, traffic.mean_output_len
    layers = machinery.target_layers, machinery.draft_layers
    return (
        traffic.num_requests >= NUM_REQUESTS
        and (means, layers) == ((MEAN_PROMPT_LEN, MEAN_OUTPUT_LEN), (32, 1))
        and (machinery.page_size, traffic.shape, machinery.overlap_depth) == (64, TREE, 1)
    )


def results(comparisons: Sequence[Comparison]) -> list[Result]:
    """Every figure of every way, beside upstream's of the same trace."""
    lines = []
    for comparison in comparisons:
        traffic, (upstream, theirs) = comparison.traffic, comparison.runs[0]
        for way, run in comparison.runs:
            name = f"{_named(traffic)}; {way.name}"
            for what, value, unit, of_theirs in (
                ("running, mean", run.mean_running, "requests", theirs.mean_running),
                ("running, peak", max(run.running), "requests", max(theirs.running)),
                ("rounds", run.rounds, "rounds", theirs.rounds),
                ("tokens", run.tokens_per_round, "tokens/round", theirs.tokens_per_round),
                ("buffers", run.sizes.num_bytes, "bytes", theirs.sizes.num_bytes),
            ):
                lines.append(Result(f"{name}: {what}", value, unit, upstream.name, of_theirs))
            for what, share in zip(HELD, run.shares, strict=False):
                reference = ("all slots", 1.0)
                lines.append(Result(f"{name}: held, {what}", share, "share of slots", *reference))
            lines.append(
                Result(
                    f"{name}: retractions",
                    run.retractions,
                    "retractions",
                    "requests of the trace",
                    traffic.num_requests,
                )
            )
        if comparison.has_target:
            more = _more(comparison)
            lines.append(
                Result(
                    f"{_named(traffic)}: requests at once, ours / upstream's",
                    more,
                    "times",
                    "target, at least",
                    MORE,
                )
            )
        if (wider := _wider(comparison)) is not None:
            name = f"{_named(traffic)}: requests at once, a budget / the widest for every row"
            goal = ("target, at least", WIDER) if comparison.has_target else ("one for all", 1.0)
            lines.append(Result(name, wider, "times", *goal))
            if (widest := _widest(comparison)) is not None:
                name = f"{_named(traffic)}: the same, if rows held no more than their tokens' pages"
                lines.append(Result(name, widest, "times", *goal))
    return lines


def _wider(comparison: Comparison) -> float | None:
    """How many times the requests of our first way the budget runs at once; None without budget."""
    (_, ours), (way, budget) = comparison.runs[1], comparison.runs[-1]
    return budget.mean_running / ours.mean_running if way.narrow else None


def _widest(comparison: Comparison) -> float | None:
    """How many times our first way's requests fit if no slot were free or held in reserve.

    No reserve can give more: a row holds its tokens and the rest of their last page. None = no
    request ever waited.
    """
    shares = comparison.runs[1][1].shares
    return 1 / sum(shares[:2]) if shares else None


def _more(comparison: Comparison) -> float:
    """How many times the requests our first way runs at once, on average."""
    (_, theirs), (_, ours) = comparison.runs[:2]
    return ours.mean_running / theirs.mean_running


def _named(traffic: Traffic) -> str:
    shape = traffic.shape
    return f"{shape.num_steps}x{shape.topk}x{shape.num_draft_tokens}, {traffic.name}"


def _table(machinery: Machinery, comparisons: Sequence[Comparison]) -> Table:
    first = comparisons[0].traffic
    table = Table(
        title=f"bench reserve --trace: {first.num_requests} requests, seed {first.seed}, "
        f"P={machinery.page_size}, D={machinery.overlap_depth}, {machinery.target_layers}+"
        f"{machinery.draft_layers} layers, {show_bytes(machinery.kv_bytes)} of KV",
        caption=_caption(machinery, first),
    )
    table.add_column("mean lengths, and the way", no_wrap=True)
    for column in (
        "pages",
        "running",
        "peak",
        "x",
        "of ours",
        "target",
        "retracted",
        "rounds",
        "tokens/round",
        "held %",
    ):
        table.add_column(column, justify="right")
    for comparison in comparisons:
        table.add_row(f"[bold]{_named(comparison.traffic)}[/bold]")
        theirs = comparison.runs[0][1]
        for way, run in comparison.runs:
            target = ""
            if comparison.has_target and run is comparison.runs[1][1]:
                met = _more(comparison) >= MORE
                target = f">= {MORE:g} " + ("met" if met else "[bold]missed[/bold]")
            wider = _wider(comparison) if way.narrow else None
            if comparison.has_target and wider is not None:
                met = wider >= WIDER
                target = f">= {WIDER:g} of ours " + ("met" if met else "[bold]missed[/bold]")
                if (widest := _widest(comparison)) is not None:
                    target += f" (no reserve gives more than {widest:.3f})"
            table.add_row(
                f"  {way.name}",
                " + ".join(f"{group.num_pages:,}" for group in run.sizes.groups),
                f"{run.mean_running:,.1f}",
                f"{max(run.running):,}",
                f"{run.mean_running / theirs.mean_running:.2f}",
                "" if wider is None else f"{wider:.2f}",
                target,
                f"{run.retractions:,}",
                f"{run.rounds:,}",
                f"{run.tokens_per_round:,.1f}",
                " ".join(f"{100 * share:.1f}" for share in run.shares),
                end_section=run is comparison.runs[-1][1],
            )
    return table


def _caption(machinery: Machinery, first: Traffic) -> str:
    return (
        "a line: one trace on the same bytes (page 0 included), on the simulated device; running: "
        "requests with a row, mean over all rounds; x: that over SGLang's; of ours: a budget's "
        "over that of the widest shape for every row; held: tokens, rest of their last pages, "
        "reserve and free, of the target's slots while requests wait; live: mean tokens of a "
        "request half-way through its output; lengths: uniform, half to 1.5 of the mean; "
        f"KV: {LAYER.num_kv_heads} heads of {LAYER.k_head_dim}, {ITEMSIZE} bytes; a draft is "
        f"right where those before it are with probability {first.accept_rate:g}; "
        f"{ARRIVALS_PER_TURN} requests come a turn; prefill chunk {PREFILL_TOKENS}; at most "
        f"{MAX_BATCH} rows; admission's headroom {machinery.headroom} tokens"
    )


def _draw(machinery: Machinery, comparisons: Sequence[Comparison], path: Path) -> None:
    """Requests running over rounds, one field for each traffic.

    Raises:
        ConfigError: the file cannot be written.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    columns = min(2, len(comparisons))
    lines = -(-len(comparisons) // columns)
    figure, grid = pyplot.subplots(
        lines, columns, figsize=(6 * columns, 3.4 * lines), layout="constrained", squeeze=False
    )
    fields: list[Any] = list(grid.flat)
    for axes, comparison in zip(fields, comparisons, strict=False):
        for at, (way, run) in enumerate(comparison.runs):  # the last lies below the others
            label = f"{way.name}: {run.mean_running:.1f}"
            axes.plot(run.running, label=label, linewidth=1, zorder=-at)
        axes.set_title(_named(comparison.traffic))
        axes.set_xlabel("round")
        axes.set_ylabel("requests running")
        axes.set_ylim(bottom=0)
        axes.legend(fontsize="small")
    for axes in fields[len(comparisons) :]:
        axes.set_axis_off()
    num_requests = comparisons[0].traffic.num_requests
    figure.suptitle(
        f"{num_requests} requests on {show_bytes(machinery.kv_bytes)} of KV, "
        f"P={machinery.page_size}, D={machinery.overlap_depth}"
    )
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write the picture {path}: {error}") from None
    pyplot.close(figure)
