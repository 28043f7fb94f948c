"""`python -m benches states`: recurrent state in slots and rings, beside a state for each draft.

Two comparisons with engines that keep a whole state for each draft token (`StateBytes.snapshots`):

- *bytes of a draft token*, for models of published shapes (`hybrids`). The slots and rings are
  allocated as an engine does, with a slot and a record more, and their bytes subtracted.
- *requests at once*, of a trace on the scheduler, the ledger and a simulated device. Both ways have
  the same bytes, pages and rows; only a row's states differ. As many rows run as `Capacity` says
  that fit of the mean length.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benches.trace import PREFILL_TOKENS, Machinery, Run, Traffic, Way, run_trace
from specpool._core import Shape
from specpool.capacity.capacity import Capacity
from specpool.capacity.group_sizes import GroupSizes, size_groups
from specpool.capacity.layer_kv import bytes_by_window
from specpool.capacity.state_sizes import StateBytes
from specpool.checks import check_int
from specpool.cli.results import Result, check_plot, draw, machine, print_json
from specpool.engine.config import HEADROOM, EngineConfig
from specpool.engine.models.recurrent import RecurrentState
from specpool.engine.models.state_outline import StateOutline
from specpool.errors import ConfigError
from specpool.num_bytes import parse_bytes, show_bytes

#: Config files of published shapes, with the names in the tables. Their parameters are those of the
#: names, which a test counts.
CONFIGS = Path(__file__).parent / "hybrids"
NAMES = {
    "qwen3-next-80b-a3b": "Qwen3-Next-80B-A3B",
    "qwen3.5-397b-a17b": "Qwen3.5-397B-A17B",
    "nemotron-h-8b": "Nemotron-H-8B",
    "nemotron-3-nano-30b-a3b": "Nemotron-3-Nano-30B-A3B",
    "falcon-mamba-7b": "Falcon-Mamba-7B",
    "lfm2-1.2b": "LFM2-1.2B",
}
ITEMSIZE = 2
CHAIN, TREE = Shape.eagle(3, 1, 4), Shape.eagle(5, 8, 32)
LEAST_RECORDS = 100  # of a state for which the project has a goal
GOALS = {"bytes": 10.0, "requests": 1.5}

KV_BYTES = 32 << 30
PROMPT_LEN, OUTPUT_LEN = 2048, 256
MOST_ROWS = 1 << 12


def outline(name: str) -> StateOutline:
    """Return what the layers of a model of `CONFIGS` keep, in 16 bits."""
    import torch

    from specpool.engine.models.state_outline import outline_states
    from specpool.engine.models.target_folder import TargetFolder, load_config

    folder = CONFIGS / name
    config = load_config(TargetFolder(NAMES[name], folder, False))
    return outline_states(config, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Marginal:
    """The bytes that are allocated more for a slot more, and for a record more in each ring."""

    slot: int
    record: int
    flush: int

    @classmethod
    def of(cls, outline: StateOutline) -> Marginal:
        """Allocate the slots and rings of one row, on the CPU."""
        import torch

        def allocated(num_slots: int, ring_len: int) -> int:
            return RecurrentState(
                outline.mixers,
                num_slots=num_slots,
                num_rows=1,
                ring_len=ring_len,
                device=torch.device("cpu"),
            ).num_bytes

        least = allocated(1, 1)
        record = (allocated(1, 2) - least) // 2  # row 0 has a ring too
        return cls(allocated(2, 1) - least, record, outline.states.flush)

    @property
    def times(self) -> float:
        """How many times as much a state takes as a record."""
        return self.slot / self.record

    def row_bytes(self, shape: Shape, *, snapshots: bool) -> int:
        """Return the bytes of a row that runs, without overlap."""
        states = StateBytes(self.slot, self.record, self.flush, snapshots)
        rows = {"num_slots": 1, "num_rows": 1, "num_sessions": 0, "overlap_depth": 0}
        return states.size([shape], **rows).row_bytes


@dataclass(frozen=True, slots=True)
class HybridMachinery(Machinery):
    """A model with recurrent layers, and one draft layer like its last one with attention."""

    outline: StateOutline
    states: StateBytes

    def sizes(self, way: Way, traffic: Traffic) -> GroupSizes:
        """The pools as an engine would size them, with as many rows as fit of the mean length.

        Raises:
            ConfigError: the bytes do not hold one full row.
        """
        num_tokens = traffic.mean_prompt_len + traffic.mean_output_len // 2
        sized = partial(self._sized, way, traffic)

        def has_room(num_rows: int) -> bool:
            try:
                capacity = Capacity(sized(num_rows), headroom=self.headroom)
            except ConfigError:
                return False
            return capacity.at_once(num_tokens).num_requests >= num_rows

        rows = range(1, MOST_ROWS + 1)
        return sized(max(1, bisect.bisect_left(rows, True, key=lambda n: not has_room(n))))

    def _sized(self, way: Way, traffic: Traffic, num_rows: int) -> GroupSizes:
        config = EngineConfig(
            page_size=self.page_size,
            placement=way.placement,
            policy=way.policy,
            layout=way.layout,
            overlap_depth=self.overlap_depth,
            max_batch=num_rows,
            max_sessions=0,
            prefix_cache=False,
            prefill_tokens=PREFILL_TOKENS,
        )
        layers = self.outline.layers
        return size_groups(
            config,
            bytes_by_window(layers, ITEMSIZE),
            layers[-1].bytes_per_token(ITEMSIZE),
            shapes=[traffic.shape],
            max_context_len=traffic.max_context_len,
            kv_bytes=self.kv_bytes,
            states=self.states,
        )


def requests_at_once(
    outline: StateOutline, *, kv_bytes: int, requests: int, overlap_depth: int, seed: int
) -> tuple[Run, Run]:
    """Serve a trace with snapshots, and with slots and rings."""
    traffic = Traffic("hybrid", CHAIN, PROMPT_LEN, OUTPUT_LEN, requests, 0.7, seed)
    way = Way("specpool", "split", "exact", "dense")
    num_layers = len(outline.layers)
    snapshots, rings = (
        HybridMachinery(16, overlap_depth, num_layers, 1, kv_bytes, HEADROOM, outline, states)
        for states in (replace(outline.states, snapshots=True), outline.states)
    )
    return run_trace(snapshots, way, traffic), run_trace(rings, way, traffic)


def states(
    *,
    memory: str | None,
    requests: int,
    overlap_depth: int,
    seed: int,
    json: bool,
    plot: Path | None,
) -> None:
    """Allocate and simulate, then print.

    Raises:
        ConfigError: an option cannot work.
    """
    kv_bytes = KV_BYTES if memory is None else parse_bytes("memory", memory)
    check_int("requests", requests, 1, 1 << 16)
    check_int("overlap_depth", overlap_depth, 0, 1)
    check_int("seed", seed, 0, (1 << 31) - 1)
    if plot is not None:
        check_plot(plot)
    outlines = {name: outline(name) for name in NAMES}
    marginals = {NAMES[name]: Marginal.of(layers) for name, layers in outlines.items()}
    runs = requests_at_once(
        outlines["qwen3-next-80b-a3b"],
        kv_bytes=kv_bytes,
        requests=requests,
        overlap_depth=overlap_depth,
        seed=seed,
    )
    figures = results(marginals, *runs)
    if json:
        print_json(machine(packages=("torch", "transformers")), figures)
    else:
        console = Console()
        console.print(_bytes_table(marginals))
        console.print(_requests_table(kv_bytes, overlap_depth, *runs))
    if plot is not None:
        draw("bytes of a draft token", [r for r in figures if r.unit == "B"], plot)


def results(marginals: dict[str, Marginal], snapshots: Run, rings: Run) -> Sequence[Result]:
    """Every figure, beside that of snapshots, and the goals."""
    lines = []
    goal = "target, at least"
    for name, marginal in marginals.items():
        reference = ("a state", marginal.slot)
        lines.append(Result(f"{name}: bytes of a draft token", marginal.record, "B", *reference))
        if marginal.times > LEAST_RECORDS:
            title = f"{name}: a state's bytes / a draft token's"
            lines.append(Result(title, marginal.times, "times", goal, GOALS["bytes"]))
        for what, shape in (("chain of 4", CHAIN), ("tree of 32", TREE)):
            ours, theirs = (marginal.row_bytes(shape, snapshots=way) for way in (False, True))
            lines.append(Result(f"{name}: a row, {what}", ours, "B a row", "snapshots", theirs))
    name = f"Qwen3-Next, 3x1x4, prompt {PROMPT_LEN}, output {OUTPUT_LEN}"
    for what, value, unit, of_theirs in (
        ("running, mean", rings.mean_running, "requests", snapshots.mean_running),
        ("running, peak", max(rings.running), "requests", max(snapshots.running)),
        ("rounds", rings.rounds, "rounds", snapshots.rounds),
        ("buffers", rings.sizes.num_bytes, "bytes", snapshots.sizes.num_bytes),
    ):
        lines.append(Result(f"{name}: {what}", value, unit, "snapshots", of_theirs))
    times = rings.mean_running / snapshots.mean_running
    title = f"{name}: requests at once, ours / snapshots'"
    return [*lines, Result(title, times, "times", goal, GOALS["requests"])]


def _bytes_table(marginals: dict[str, Marginal]) -> Table:
    table = Table(
        title="bench states: bytes of a draft token, as allocated, in bfloat16",
        caption="a record: the inputs that all recurrent layers got for one token; a state: the "
        "conv and recurrent states of all of them, as transformers keeps them",
    )
    table.add_column("model")
    for column in ("a record", "a state", "times"):
        table.add_column(column, justify="right")
    for name, marginal in marginals.items():
        sizes = show_bytes(marginal.record), show_bytes(marginal.slot)
        table.add_row(name, *sizes, f"{marginal.times:,.1f}")
    return table


def _requests_table(kv_bytes: int, overlap_depth: int, snapshots: Run, rings: Run) -> Table:
    table = Table(
        title=f"requests at once: Qwen3-Next, 3x1x4, {show_bytes(kv_bytes)}, D={overlap_depth}",
        caption=f"prompts of {PROMPT_LEN} and outputs of {OUTPUT_LEN} tokens, half to 1.5 of it",
    )
    table.add_column("a draft token keeps")
    for column in ("rows", "running, mean", "peak", "x", "rounds", "retracted"):
        table.add_column(column, justify="right")
    for name, run in (("a state", snapshots), ("a record", rings)):
        table.add_row(
            name,
            f"{run.sizes.num_rows:,}",
            f"{run.mean_running:,.1f}",
            f"{max(run.running):,}",
            f"{run.mean_running / snapshots.mean_running:.2f}",
            f"{run.rounds:,}",
            f"{run.retractions:,}",
        )
    return table
