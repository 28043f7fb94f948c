"""`python -m benches reserve --chains`: requests on a card that drafts chains, two ways.

Most KV of a chain's request is the target's, and a chain reserves little. What is left to save is
the KV of the draft model: a peer keeps it for every token, we only for a window and a sink.
Nothing runs: `Capacity` counts, as `specpool plan` does, with the rows that fit. Both ways have the
same bytes, context limit, prefill chunk and headroom. The ceiling is a draft model without any KV.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benches.trace import ITEMSIZE, Way, ways
from specpool._core import Shape
from specpool.capacity.capacity import Capacity
from specpool.capacity.group_sizes import GroupSizes, size_groups
from specpool.capacity.layer_kv import LayerKV
from specpool.checks import check_int
from specpool.cli.results import Result, check_plot, draw, machine, print_json
from specpool.engine.config import HEADROOM, EngineConfig
from specpool.errors import ConfigError
from specpool.num_bytes import parse_bytes, show_bytes

LIVE_LENS = (2048, 8192, 32768)
MAX_CONTEXT_LEN = 1 << 16
MEMORY = "80GiB"
WINDOW, SINK = 512, 4  # tokens
MAX_ROWS = 1 << 14  # more than fit on any card
GOALS = {8192: 0.9, 32768: 0.9}  # of the ceiling's gain


@dataclass(frozen=True, slots=True)
class Layers:
    """Layers of one shape, and the bytes of the model's weights in 16 bits."""

    name: str
    num_layers: int
    layer: LayerKV
    weight_bytes: int

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's KV in all layers."""
        return self.num_layers * self.layer.bytes_per_token(ITEMSIZE)


@dataclass(frozen=True, slots=True)
class Pair:
    """A target, what drafts for it, and the chain."""

    target: Layers
    draft: Layers
    shape: Shape

    @property
    def name(self) -> str:
        """The name in the table and the JSON."""
        shape = self.shape
        chain = f"{shape.num_steps}x{shape.topk}x{shape.num_draft_tokens}"
        return f"{self.target.name}, {self.draft.name}, {chain}"


_HEADS_OF_128 = LayerKV(num_kv_heads=8, k_head_dim=128, v_head_dim=128)
_HEADS_OF_64 = LayerKV(num_kv_heads=8, k_head_dim=64, v_head_dim=64)
#: The shapes as they are published, written by hand, of meta-llama/Llama-3.1-8B-Instruct,
#: Qwen/Qwen3-8B, yuhuili/EAGLE3-LLaMA3.1-Instruct-8B, meta-llama/Llama-3.2-1B-Instruct and
#: z-lab/Qwen3-8B-DFlash-b16. The weights are rounded.
LLAMA = Layers("Llama 8B", 32, _HEADS_OF_128, 16_060_000_000)
QWEN = Layers("Qwen3 8B", 36, _HEADS_OF_128, 16_380_000_000)
HEAD = Layers("EAGLE-3 head", 1, _HEADS_OF_128, 850_000_000)
SMALL = Layers("model of 1B", 16, _HEADS_OF_64, 2_470_000_000)
BLOCK = Layers("block of 5 layers", 5, _HEADS_OF_128, 2_100_000_000)
CHAIN, BLOCK_OF_16 = Shape.eagle(3, 1, 4), Shape.eagle(15, 1, 16)
PAIRS = (
    Pair(LLAMA, HEAD, CHAIN),
    Pair(LLAMA, SMALL, CHAIN),
    Pair(LLAMA, BLOCK, BLOCK_OF_16),
    Pair(QWEN, BLOCK, BLOCK_OF_16),
)


@dataclass(frozen=True, slots=True)
class Card:
    """What both ways share."""

    memory: int
    page_size: int
    overlap_depth: int

    def kv_bytes(self, pair: Pair) -> int:
        """Bytes for KV: nine tenths of the memory, without the weights.

        Raises:
            ConfigError: nothing is left.
        """
        weights = pair.target.weight_bytes + pair.draft.weight_bytes
        kv_bytes = self.memory * 9 // 10 - weights
        if kv_bytes <= 0:
            raise ConfigError(
                f"memory {show_bytes(self.memory)} holds no KV beside {show_bytes(weights)} of "
                "weights and a tenth for the workspace"
            )
        return kv_bytes


@dataclass(frozen=True, slots=True)
class Count:
    """Requests of one length in one way.

    Attributes:
        num_requests: admitted together to an empty pool.
        request_bytes: of the pages that one of them needs, with its next round and the headroom.
    """

    num_requests: int
    request_bytes: int


@dataclass(frozen=True, slots=True)
class Line:
    """One pair at one length: the peer's way, ours, and the ceiling."""

    pair: Pair
    live: int
    peer: Count
    ours: Count
    ceiling: Count

    @property
    def gain(self) -> float:
        """Bytes of a peer's request over those of ours."""
        return self.peer.request_bytes / self.ours.request_bytes

    @property
    def ceiling_gain(self) -> float:
        """The same without any draft KV."""
        return self.peer.request_bytes / self.ceiling.request_bytes

    @property
    def share(self) -> float:
        """Share of the ceiling's gain in bytes."""
        return (self.gain - 1) / (self.ceiling_gain - 1)


def count(
    card: Card, pair: Pair, way: Way, live: int, window: int | None, draft_bytes: int
) -> Count:
    """Count requests of `live` tokens, with as many rows as fit.

    Raises:
        ConfigError: the memory does not hold one request of the whole context.
    """
    config = EngineConfig(
        page_size=card.page_size,
        placement=way.placement,
        policy=way.policy,
        layout=way.layout,
        overlap_depth=card.overlap_depth,
        draft_window=window,
        draft_sink=0 if window is None else SINK,
    )

    def fit(num_rows: int) -> tuple[GroupSizes, int, tuple[int, ...]]:
        sizes = size_groups(
            replace(config, max_batch=num_rows),
            {None: pair.target.token_bytes},
            draft_bytes,
            shapes=[pair.shape],
            max_context_len=MAX_CONTEXT_LEN,
            kv_bytes=card.kv_bytes(pair),
        )
        at_once = Capacity(sizes, headroom=HEADROOM).at_once(live)
        return sizes, at_once.num_requests, at_once.pages

    all_rows = range(1, MAX_ROWS)
    num_rows = bisect.bisect_left(all_rows, True, key=lambda rows: fit(rows)[1] < rows)
    sizes, num_requests, pages = fit(max(num_rows, 1))
    groups = zip(sizes.groups, pages, strict=True)
    return Count(num_requests, sum(group.page_bytes * n for group, n in groups))


def lines(card: Card, pairs: Sequence[Pair] = PAIRS) -> list[Line]:
    """Count all pairs at all lengths."""
    all_lines = []
    for pair in pairs:
        theirs, ours = ways(card.page_size, pair.shape)
        for live in LIVE_LENS:
            counted = partial(count, card, pair, live=live)
            draft_bytes = pair.draft.token_bytes
            all_lines.append(
                Line(
                    pair,
                    live,
                    peer=counted(way=theirs, window=None, draft_bytes=draft_bytes),
                    ours=counted(way=ours, window=WINDOW, draft_bytes=draft_bytes),
                    ceiling=counted(way=ours, window=None, draft_bytes=0),
                )
            )
    return all_lines


def chains(
    *, page_size: int, overlap_depth: int, memory: str | None, json: bool, plot: Path | None
) -> None:
    """Count, then print.

    Raises:
        ConfigError: an option cannot work.
    """
    check_int("page_size", page_size, 1, 1 << 12)
    check_int("overlap_depth", overlap_depth, 0, 1)
    if plot is not None:
        check_plot(plot)
    card = Card(parse_bytes("memory", memory or MEMORY), page_size, overlap_depth)
    all_lines = lines(card)
    if json:
        print_json(machine(), results(all_lines))
    else:
        console = Console()
        Console(width=max(console.width, 148)).print(_table(card, all_lines))
    if plot is not None:
        bars = [result for result in results(all_lines) if result.unit == "times"]
        draw("bench reserve --chains", bars, plot)


def results(all_lines: Sequence[Line]) -> list[Result]:
    """Every figure, beside the peer's or the goal."""
    figures = []
    for line in all_lines:
        name = f"{line.pair.name}, {line.live:,} tokens"
        for what, counted in (
            (f"draft window {WINDOW} + {SINK}", line.ours),
            ("no draft KV, the ceiling", line.ceiling),
        ):
            for unit, value, of_peer in (
                ("bytes a request", counted.request_bytes, line.peer.request_bytes),
                ("requests at once", counted.num_requests, line.peer.num_requests),
            ):
                peer = "SGLang's way, all draft KV"
                figures.append(Result(f"{name}; {what}: {unit}", value, unit, peer, of_peer))
        gain = f"{name}: a peer's bytes of a request / ours"
        figures.append(Result(gain, line.gain, "times", "the ceiling", line.ceiling_gain))
        if line.live in GOALS:
            name = f"{name}: share of the ceiling's gain in bytes"
            goal = GOALS[line.live]
            figures.append(Result(name, line.share, "share", "target, at least", goal))
    return figures


def _table(card: Card, all_lines: Sequence[Line]) -> Table:
    table = Table(
        title=f"bench reserve --chains: {show_bytes(card.memory)}, P={card.page_size}, "
        f"D={card.overlap_depth}, draft window {WINDOW} + sink {SINK}",
        caption="peer: SGLang's way (double_buffer, shared), which keeps draft KV of every token; "
        "ceiling: no draft KV at all; MiB: bytes of the pages "
        "of one request with its next round; x: the peer's over ours; share: (x - 1) of ours over "
        "that of the ceiling; at once: requests that an empty pool admits, whole ones; KV: "
        f"{ITEMSIZE} bytes a number, nine tenths of the memory less the weights; context limit "
        f"{MAX_CONTEXT_LEN:,}; admission's headroom {HEADROOM} tokens",
    )
    table.add_column("pair and live tokens", no_wrap=True)
    of_bytes = ("MiB\npeer", "\nours", "\nceiling", "\nx", "\nceiling", "\nshare", "\ntarget")
    for column in (*of_bytes, "at once\npeer", "\nours", "\nceiling", "\nx"):
        table.add_column(column, justify="right", no_wrap=True)
    for line in all_lines:
        if line.live == LIVE_LENS[0]:
            table.add_row(f"[bold]{line.pair.name}[/bold]")
        counts = line.peer, line.ours, line.ceiling
        goal = GOALS.get(line.live)
        target = ""
        if goal is not None:
            target = f">= {goal:g} " + ("met" if line.share >= goal else "[bold]missed[/bold]")
        table.add_row(
            f"  {line.live:,}",
            *(f"{counted.request_bytes / 2**20:,.1f}" for counted in counts),
            f"{line.gain:.3f}",
            f"{line.ceiling_gain:.3f}",
            f"{line.share:.3f}",
            target,
            *(f"{counted.num_requests:,}" for counted in counts),
            f"{line.ours.num_requests / line.peer.num_requests:.3f}",
            end_section=line.live == LIVE_LENS[-1],
        )
    return table
