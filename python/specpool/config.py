"""What the user may choose: `EngineConfig` for an engine, `SamplingParams` for a request."""

from __future__ import annotations

import copyreg
import os
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Literal, get_args

from specpool._core import Shape
from specpool.checks import check_choice, check_fields, check_int
from specpool.errors import ConfigError

if TYPE_CHECKING:
    from specpool.adaptive import AdaptiveConfig

Placement = Literal["split", "shared"]
Policy = Literal["exact", "double_buffer"]
Layout = Literal["auto", "dense", "holey"]
Ancestry = Literal["exact", "branch"]
WorkerName = Literal["auto", "v1", "v2"]
OnFinding = Literal["raise", "quarantine"]
Offload = Literal["cost", "always", "never"]

#: Tokens that a row is to have room for beyond its next round before another request is admitted.
HEADROOM = 16


def _parts(shape: Shape) -> tuple[type[Shape], tuple[int, int, int]]:
    return Shape, (shape.num_steps, shape.topk, shape.num_draft_tokens)


# A Rust class: so that a configuration can be pickled and copied.
copyreg.pickle(Shape, _parts)


def check_graph_sizes(sizes: object, max_batch: int) -> None:
    """Raise `ConfigError` unless `sizes` is a tuple of different batch sizes that can run."""
    if not isinstance(sizes, tuple | list):
        raise ConfigError(f"graph_sizes must be a tuple of batch sizes or None, got {sizes!r:.80}")
    for size in sizes:
        check_int("a size in graph_sizes", size, 1, max_batch)
    if len({*sizes}) < len(sizes):
        raise ConfigError(f"graph_sizes must be different batch sizes, got {sizes!r:.80}")


def busy_check_of_environment() -> int:
    """The level in `SPECPOOL_BUSY_CHECK`; 0 where that is not set.

    Raises:
        ConfigError: it holds something else.
    """
    text = os.environ.get("SPECPOOL_BUSY_CHECK", "")
    if text not in ("", "0", "1", "2"):
        raise ConfigError(f"SPECPOOL_BUSY_CHECK must be 0, 1 or 2, got {text!r:.80}")
    return int(text or "0")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How an engine lays out its memory and drafts.

    Attributes:
        shape: what a drafting round does; None = a chain of 3 with a drafter, else no drafting.
        shapes: further shapes that requests may ask for; memory is laid out for all of them.
        page_size: slots per page, in every group.
        placement: `split` = target layers and draft layers in groups of their own; `shared` = one
            group, the draft's branches in the target's rows (what SGLang does).
        policy: how much a round reserves; `double_buffer` is SGLang's, for comparison.
        layout: where drafts lie in a row; `auto` = dense (the torch back end reads single tokens).
        ancestry: `exact` = a draft token attends to its true ancestors; `branch` = to its branch's
            own slots, whatever they hold (SGLang's reading, for comparison).
        max_batch: requests that run at once.
        max_sessions: sessions that keep KV between their turns, at most; the one whose turn ended
            longest ago gives way. Others keep their tokens, and are prefilled anew.
        session_pages: pages of each group that they may keep for themselves between turns; None =
            all that nobody else needs.
        overlap_depth: 0 = a round's results are read before the next one is prepared; 1 = after.
        worker: `v2` keeps what a round has reserved for the rounds that follow; `v1`, which needs
            overlap_depth 0, gives it back after each. The text is the same. `auto` = v2, but v1
            for a model with recurrent state.
        prefill_tokens: tokens of one prefill step at most; longer prompts come in chunks, between
            which the running requests go on.
        headroom: tokens that every row must have room for beyond its next round before another
            request is admitted: with less, rows wait for each other's pages; with more, fewer run.
        mixed_chunks: a turn's prefill chunk and its round share one forward of the target.
        attention: back end that reads the pages: `torch`, or `flashinfer` on CUDA.
        max_context_len: tokens of a sequence at most; None = what the model's positions allow.
        num_pages: pages of each full group; None = what `kv_bytes` holds, at most `max_batch` full
            rows. A window group has the pages of `max_batch` windows and one prefill step, at most
            `num_pages`.
        kv_bytes: bytes for the KV buffers; None = half of the memory that is free.
        host_bytes: bytes of host memory for the KV of requests that had to give way; 0 = they are
            prefilled again.
        offload: who goes there: `cost` = whose copies there and back take less time than a prefill,
            `always` = whoever fits, `never` = nobody.
        adaptive: chooses a shape for each round of the requests that name none: `ema` = SGLang's
            rule and table, `cost` = what has the most expected tokens per second, a JSON file (see
            docs/adaptive.md), or an `AdaptiveConfig`; None = they have `shape`.
        graph_sizes: batch sizes whose decode rounds are captured as CUDA graphs; a smaller batch is
            padded to the next of them. () = no graphs; None = powers of two and `max_batch` on a
            CUDA device, where back end and models allow it.
        busy_check: what is looked at before each turn: 0 = nothing beyond what every call checks,
            1 = sums and rows, 2 = every page, and the device's page tables. The default is the
            environment's SPECPOOL_BUSY_CHECK, else 0.
        on_finding: of a busy check. Requests whose rows are in a finding end with an error, and the
            rows with their pages are out of use until the engine closes; `raise` also ends all
            others that run, and raises CorruptState; `quarantine` goes on. A finding that concerns
            no row raises in any case.
    """

    shape: Shape | None = None
    shapes: tuple[Shape, ...] = ()
    page_size: int = 16
    placement: Placement = "split"
    policy: Policy = "exact"
    layout: Layout = "auto"
    ancestry: Ancestry = "exact"
    max_batch: int = 8
    max_sessions: int = 16
    session_pages: int | None = None
    overlap_depth: int = 0
    worker: WorkerName = "auto"
    prefill_tokens: int = 1024
    headroom: int = HEADROOM
    mixed_chunks: bool = False
    attention: str = "torch"
    max_context_len: int | None = None
    num_pages: int | None = None
    kv_bytes: int | None = None
    host_bytes: int = 0
    offload: Offload = "cost"
    adaptive: AdaptiveConfig | str | PathLike[str] | None = None
    graph_sizes: tuple[int, ...] | None = None
    busy_check: int = field(default_factory=busy_check_of_environment)
    on_finding: OnFinding = "raise"

    def __new__(cls, **fields: object) -> EngineConfig:
        """Refuse names that are no fields, before `__init__` would with a TypeError."""
        check_fields(cls, fields)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        if self.shape is not None and not isinstance(self.shape, Shape):
            raise ConfigError(f"shape must be a specpool.Shape or None, got {self.shape!r}")
        if not isinstance(self.shapes, tuple | list) or not all(
            isinstance(shape, Shape) for shape in self.shapes
        ):
            raise ConfigError(f"shapes must be a tuple of specpool.Shape, got {self.shapes!r:.80}")
        check_int("page_size", self.page_size, 1, 1 << 20)
        check_choice("placement", self.placement, get_args(Placement))
        check_choice("policy", self.policy, get_args(Policy))
        check_choice("layout", self.layout, get_args(Layout))
        check_choice("ancestry", self.ancestry, get_args(Ancestry))
        check_int("max_batch", self.max_batch, 1, 1 << 16)
        check_int("max_sessions", self.max_sessions, 0, 1 << 16)
        if self.session_pages is not None:
            check_int("session_pages", self.session_pages, 0, 1 << 31)
        check_int("overlap_depth", self.overlap_depth, 0, 1)
        check_choice("worker", self.worker, get_args(WorkerName))
        if self.worker == "v1" and self.overlap_depth:
            raise ConfigError(
                f"worker 'v1' is synchronous: it needs overlap_depth 0, got {self.overlap_depth}"
            )
        check_int("prefill_tokens", self.prefill_tokens, 1, 1 << 30)
        check_int("headroom", self.headroom, 0, 1 << 30)
        if not isinstance(self.mixed_chunks, bool):
            raise ConfigError(f"mixed_chunks must be True or False, got {self.mixed_chunks!r}")
        if self.max_context_len is not None:
            check_int("max_context_len", self.max_context_len, 2, 1 << 30)
        if self.num_pages is not None:
            check_int("num_pages", self.num_pages, 1, 1 << 31)
        if self.kv_bytes is not None:
            check_int("kv_bytes", self.kv_bytes, 1, 1 << 50)
        check_int("host_bytes", self.host_bytes, 0, 1 << 50)
        check_choice("offload", self.offload, get_args(Offload))
        if self.adaptive is not None:
            from specpool.adaptive import config_of

            object.__setattr__(self, "adaptive", config_of(self.adaptive))
        if self.graph_sizes is not None:
            check_graph_sizes(self.graph_sizes, self.max_batch)
            object.__setattr__(self, "graph_sizes", tuple(self.graph_sizes))
        check_int("busy_check", self.busy_check, 0, 2)
        check_choice("on_finding", self.on_finding, get_args(OnFinding))
