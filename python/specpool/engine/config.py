"""`EngineConfig`: the options of an engine. `SamplingParams` has the options of a request."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Literal, get_args

from specpool._core import Shape
from specpool.capacity.group_sizes import Layout, Placement, Policy
from specpool.checks import check_bool, check_choice, check_fields, check_int, shown
from specpool.errors import ConfigError

if TYPE_CHECKING:
    from specpool.engine.shapes import AdaptiveConfig

WorkerName = Literal["auto", "v1", "v2"]
OnFinding = Literal["raise", "quarantine"]
Offload = Literal["cost", "always", "never"]

#: The default of `EngineConfig.headroom`, in tokens.
HEADROOM = 16


def check_graph_sizes(sizes: object, max_batch: int) -> None:
    """Raise `ConfigError` unless `sizes` is a tuple of different batch sizes that can run."""
    if not isinstance(sizes, tuple | list):
        raise ConfigError(f"graph_sizes must be a tuple of batch sizes or None, got {shown(sizes)}")
    for size in sizes:
        check_int("a size in graph_sizes", size, 1, max_batch)
    if len({*sizes}) < len(sizes):
        raise ConfigError(f"graph_sizes must be different batch sizes, got {shown(sizes)}")


def busy_check_of_environment() -> int:
    """Return the level in `SPECPOOL_BUSY_CHECK`; 0 if the variable is not set.

    Raises:
        ConfigError: the variable is not 0, 1 or 2.
    """
    text = os.environ.get("SPECPOOL_BUSY_CHECK", "")
    if text not in ("", "0", "1", "2"):
        raise ConfigError(f"SPECPOOL_BUSY_CHECK must be 0, 1 or 2, got {shown(text)}")
    return int(text or "0")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The options of an engine: its memory, its drafting and its scheduling.

    Attributes:
        shape: the shape of a drafting round; None = a chain of 3 with a drafter, else no drafting.
        shapes: further shapes that requests may ask for; memory is laid out for all of them.
        forced_steps: the most tokens that a round drafts where the form of a request's text
            (`SamplingParams.structured`) forces them; memory is laid out for a chain of so many. 0
            = as many as the request's own shape has steps. A block drafter drafts at most its block
            without the root.
        page_size: slots per page, in every group.
        placement: `split` = target layers and draft layers in groups of their own; `shared` = one
            group, the draft's branches in the target's rows (what SGLang does).
        policy: how much a round reserves; `double_buffer` is SGLang's, for comparison.
        layout: where drafts lie in a row; `auto` = dense (the torch back end reads single tokens).
        draft_window: the last tokens of a row that keep draft KV, a number from 2. A draft token
            sees no others, so a row's draft pages do not grow with its text. None = all tokens.
            Needs placement `split`, and a drafter that keeps KV.
        draft_sink: the first tokens of a row that keep draft KV beside its `draft_window`
            (attention sinks), at most as many as the window; a draft token sees them too.
        max_batch: the most requests that run at once.
        max_sessions: the most sessions that keep KV between their turns. If there are more, the
            session whose turn ended longest ago loses its KV; it keeps its tokens, and its next
            turn computes the KV again.
        session_pages: the most pages of each group that idle sessions keep; None = all that no
            running request needs.
        overlap_depth: 0 = a round's results are read before the next round is prepared; 1 = after.
        worker: `v2` keeps the pages that a round has reserved for later rounds; `v1`, which needs
            overlap_depth 0, gives them back after each round. The text is the same. `auto` = v2,
            but v1 for a model with recurrent state.
        prefix_cache: requests that begin like an earlier one take over its KV, target and draft,
            for as long as no running request needs the pages. Models with recurrent state compute
            all tokens anyway.
        prefill_tokens: the most tokens of one prefill step. Longer prompts are prefilled in chunks,
            and running requests go on between the chunks.
        headroom: tokens that every row must have room for beyond its next round before another
            request is admitted. With less, rows wait for each other's pages; with more, fewer run.
        mixed_chunks: a turn's prefill chunk and its round share one forward of the target.
        attention: the back end that reads the pages: `torch`, `flashinfer` on CUDA, or `auto`:
            flashinfer on a CUDA device if it is installed and can serve the model, else torch.
        max_context_len: the most tokens of a sequence; None = what the model's positions allow.
        num_pages: pages of each full group; None = what `kv_bytes` holds, at most `max_batch` full
            rows. A window group has the pages of `max_batch` windows and one prefill step, at most
            `num_pages`.
        kv_bytes: bytes for the KV buffers; None = half of the free memory.
        host_bytes: bytes of host memory for the KV of retracted requests, idle sessions and the
            prefix cache's texts; 0 = none, so their KV is computed again.
        offload: which of them go to the host: `cost` = if the copies there and back take less time
            than a prefill, `always` = all that fit, `never` = none.
        adaptive: chooses a shape for each round of the requests that name none: `ema` = SGLang's
            rule and table, `cost` = the shape with the most expected tokens per second, `budget` =
            likewise a shape for each row, a JSON file, or an `AdaptiveConfig` (docs/adaptive.md);
            None = `shape` is used.
        graph_sizes: batch sizes whose decode rounds are captured as CUDA graphs; a smaller batch is
            padded to the next size. () = no graphs; None = powers of two and `max_batch` on a CUDA
            device, if back end and models allow it.
        busy_check: what to check before each turn, beyond the checks of every call: 0 = nothing,
            1 = sums and rows, 2 = every page, and the device's page tables. The default is the
            environment's SPECPOOL_BUSY_CHECK, else 0.
        on_finding: what follows a finding of the busy check. Requests whose rows are in a finding
            end with an error, and these rows and pages are out of use until the engine closes.
            `raise` also ends all other running requests and raises CorruptState; `quarantine` goes
            on. A finding that concerns no row raises in any case.
    """

    shape: Shape | None = None
    shapes: tuple[Shape, ...] = ()
    forced_steps: int = 0
    page_size: int = 16
    placement: Placement = "split"
    policy: Policy = "exact"
    layout: Layout = "auto"
    draft_window: int | None = None
    draft_sink: int = 0
    max_batch: int = 8
    max_sessions: int = 16
    session_pages: int | None = None
    overlap_depth: int = 0
    worker: WorkerName = "auto"
    prefix_cache: bool = True
    prefill_tokens: int = 1024
    headroom: int = HEADROOM
    mixed_chunks: bool = False
    attention: str = "auto"
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
        """Raise `ConfigError` for unknown field names; `__init__` would raise a TypeError."""
        check_fields(cls, fields)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        if self.shape is not None and not isinstance(self.shape, Shape):
            raise ConfigError(f"shape must be a specpool.Shape or None, got {shown(self.shape)}")
        if not isinstance(self.shapes, tuple | list) or not all(
            isinstance(shape, Shape) for shape in self.shapes
        ):
            raise ConfigError(f"shapes must be a tuple of specpool.Shape, got {shown(self.shapes)}")
        check_int("forced_steps", self.forced_steps, 0, 63)
        check_int("page_size", self.page_size, 1, 1 << 20)
        check_choice("placement", self.placement, get_args(Placement))
        check_choice("policy", self.policy, get_args(Policy))
        check_choice("layout", self.layout, get_args(Layout))
        self._check_draft_window()
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
        check_bool("prefix_cache", self.prefix_cache)
        check_int("prefill_tokens", self.prefill_tokens, 1, 1 << 30)
        check_int("headroom", self.headroom, 0, 1 << 30)
        check_bool("mixed_chunks", self.mixed_chunks)
        if self.max_context_len is not None:
            check_int("max_context_len", self.max_context_len, 2, 1 << 30)
        if self.num_pages is not None:
            check_int("num_pages", self.num_pages, 1, 1 << 31)
        if self.kv_bytes is not None:
            check_int("kv_bytes", self.kv_bytes, 1, 1 << 50)
        check_int("host_bytes", self.host_bytes, 0, 1 << 50)
        check_choice("offload", self.offload, get_args(Offload))
        if self.adaptive is not None:
            from specpool.engine.shapes import config_of

            object.__setattr__(self, "adaptive", config_of(self.adaptive))
        if self.graph_sizes is not None:
            check_graph_sizes(self.graph_sizes, self.max_batch)
            object.__setattr__(self, "graph_sizes", tuple(self.graph_sizes))
        check_int("busy_check", self.busy_check, 0, 2)
        check_choice("on_finding", self.on_finding, get_args(OnFinding))
        if not isinstance(self.attention, str):
            raise ConfigError(
                f"attention must be the name of a back end, got {shown(self.attention)}"
            )

    def _check_draft_window(self) -> None:
        """Raise `ConfigError` if `draft_window` or `draft_sink` cannot work."""
        if self.draft_window is not None:
            check_int("draft_window", self.draft_window, 2, 1 << 30)
            if self.placement == "shared":
                raise ConfigError(
                    f"draft_window {self.draft_window} needs placement 'split': a shared group has "
                    "the target's layers too, which see all tokens"
                )
        check_int("draft_sink", self.draft_sink, 0, 1 << 30)
        if self.draft_sink and self.draft_sink > (self.draft_window or 0):
            window = "no draft_window" if self.draft_window is None else self.draft_window
            raise ConfigError(
                f"draft_sink {self.draft_sink} needs a draft_window of at least as many tokens, "
                f"got {window}"
            )
