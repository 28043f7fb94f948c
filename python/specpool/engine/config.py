"""`EngineConfig`: the options of an engine. `SamplingParams` has the options of a request."""

import os
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Annotated, Literal

from specpool._core import Shape
from specpool.capacity.group_sizes import DEFAULT_BATCH, Layout, Placement, Policy
from specpool.checks import check_fields, check_int, shown
from specpool.engine.shape_names import parse_shape
from specpool.errors import ConfigError
from specpool.fields import Option, Within, check_values
from specpool.num_bytes import parse_bytes

if TYPE_CHECKING:
    from specpool.engine.shapes import AdaptiveConfig

WorkerName = Literal["auto", "v1", "v2"]
OnFinding = Literal["raise", "quarantine"]
Offload = Literal["cost", "always", "never"]

#: The default of `EngineConfig.headroom`, in tokens.
HEADROOM = 16
#: The default of `EngineConfig.max_sessions`.
MAX_SESSIONS = 16


#: The most requests that run at once on a CUDA device where no option says how many.
MOST_BATCH = 64
#: The default of `max_batch` for a server on a CPU.
SERVED_BATCH = 32


def check_graph_sizes(sizes: object, max_batch: int) -> None:
    """Raise `ConfigError` unless `sizes` is a tuple of different batch sizes that can run."""
    if not isinstance(sizes, tuple | list):
        raise ConfigError(f"graph_sizes must be a tuple of batch sizes or None, got {shown(sizes)}")
    for size in sizes:
        check_int("a size in graph_sizes", size, 1, max_batch)
    if len({*sizes}) < len(sizes):
        raise ConfigError(f"graph_sizes must be different batch sizes, got {shown(sizes)}")


def _read_graph_sizes(name: str, text: str) -> tuple[int, ...]:
    """Return the sizes of `1,2,4`; () of `none`."""
    if text == "none":
        return ()
    parts = text.split(",")
    if not all(part.strip().isascii() and part.strip().isdigit() for part in parts):
        raise ConfigError(
            f"{name} must be batch sizes with commas between, or none, got {shown(text)}"
        )
    return tuple(int(part) for part in parts)


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

    The first sentence of a field's description is also the help of its option.

    Attributes:
        shape: what a round drafts. None = a chain of 3 with a drafter, else no drafting.
        shapes: further shapes that requests may ask for; memory is laid out for all of them.
        forced_steps: the most tokens that a round drafts where the form of a request's text
            (`SamplingParams.structured`) forces them; memory is laid out for a chain of so many. 0
            = as many as the request's own shape has steps. A block drafter drafts at most its block
            without the root.
        adaptive: a shape for each round: 'ema' (SGLang's rule), 'cost' (the most expected tokens
            per second), 'budget' (likewise, for each row), or a file, such as `specpool tune`
            writes. Or an `AdaptiveConfig` (docs/adaptive.md). It is for the requests that name no
            shape; None = they draft `shape`.
        page_size: slots per page. All groups have the same.
        placement: target and draft layers in page groups of their own, or in one, as SGLang does.
            With `shared` the draft's branches lie in the target's rows.
        policy: how much a round reserves; double_buffer is what SGLang reserves.
        layout: where drafts lie in a row; holey differs where topk is above 1. `auto` = dense (the
            torch back end reads single tokens).
        draft_window: last tokens of a row that keep draft KV; drafts see no others. A number from
            2; None = all tokens. With a window, a row's draft pages do not grow with its text. It
            needs placement `split`, and a drafter that keeps KV.
        draft_sink: first tokens of a row that keep draft KV too, beside `draft_window`. They
            are attention sinks, at most as many as the window; a draft token sees them too.
        max_batch: requests that run at once. None = 8, but on a CUDA device as many as have room
            for 2,048 tokens each (fewer if the context is shorter), from 8 to 64; and at least the
            greatest of `graph_sizes`.
        overlap_depth: 1 = prepare a round before the last round's results are read. 0 = after. None
            = 0, but 1 on a CUDA device unless a drafter reads the text on the host (`ngram`,
            `suffix`), the worker is v1, or the model has recurrent layers.
        worker: the worker: v2, v1 (gives back what a round reserved, after each) or auto (v2). The
            text is the same. `v1` needs overlap_depth 0.
        mixed_chunks: chunks share the round's forward of the target.
        prefix_cache: requests that begin like an earlier one take over its KV, target and draft,
            for as long as no running request needs the pages.
        cached_states: recurrent states that the prefix cache keeps. They are beside those of rows
            and sessions. None = one for each of `max_batch`. With `kv_bytes`, sessions and the
            prefix cache get fewer if theirs would take more than a quarter of what the rows' states
            leave.
        prefill_tokens: most tokens of one prefill step; longer prompts come in chunks. Running
            requests go on between the chunks.
        headroom: tokens that a row must have room for beyond its next round. Another request is
            admitted only if every row has it. With less, rows wait for each other's pages; with
            more, fewer run.
        attention: back end that reads the pages: torch, flashinfer on CUDA, or auto. `auto` =
            flashinfer on a CUDA device if it is installed and can serve the model, else torch.
        max_context_len: most tokens of a sequence. None = what the model's positions allow.
        num_pages: pages per group. None = what `kv_bytes` holds, at most `max_batch` full rows. A
            window group has the pages of `max_batch` windows and one prefill step, at most
            `num_pages`.
        kv_bytes: memory for KV and recurrent states. In bytes; None = half of the free memory, but
            on a CUDA device all of it apart from 12 % of the device, and from what CUDA graphs read
            KV into, if that is more.
        host_bytes: host memory for the KV of retracted requests. In bytes. Idle sessions and the
            prefix cache's texts go there too. 0 = none, so their KV is computed again.
        offload: what goes to host memory: KV whose copies beat a prefill, all, or none. The copies
            are those there and back.
        max_sessions: most sessions that keep KV between their turns. If there are more, the session
            whose turn ended longest ago loses its KV; it keeps its tokens, and its next turn
            computes the KV again.
        session_pages: most pages of each group for idle sessions. None = all that no running
            request needs.
        graph_sizes: batch sizes to capture as CUDA graphs. They are of decode rounds; a smaller
            batch is padded to the next size. () = no graphs; None = 1, 2, 4, 8, then every 8 to
            64, every 16 beyond, and `max_batch`, on a CUDA device, if back end and models allow it.
        packed_weight_bytes: memory for a second copy of weights in oneDNN's order, on a CPU in
            float32. In bytes; 0 = none. It makes batches of 4 to 64 tokens quicker (on some
            processors any), with a model from a folder. Rounding differs by the last bits, as it
            does between batch sizes.
        busy_check: before each turn: 1 = sums, 2 = full audit. 0 = only the checks of every call.
            Sums are those of pools and rows; the audit is of every page and of the device's page
            tables. The default is the environment's SPECPOOL_BUSY_CHECK, else 0.
        on_finding: after a finding: end all requests, or only those with rows in it. The finding is
            one of the busy check. Requests whose rows are in it end with an error, and these rows
            and pages are out of use until the engine closes. `raise` also ends all other running
            requests and raises CorruptState; `quarantine` goes on. A finding that concerns no row
            raises in any case.
    """

    shape: Annotated[
        Shape | None,
        Option(
            "Drafts",
            kind=str,
            read=parse_shape,
            form=": SxKxN, num_steps x topk x num_draft_tokens (root included), or a chain's depth "
            "alone",
            default="3, that is 3x1x4",
        ),
    ] = None
    shapes: tuple[Shape, ...] = ()
    forced_steps: Annotated[int, Within(0, 63)] = 0
    adaptive: Annotated[
        "AdaptiveConfig | str | PathLike[str] | None", Option("Drafts", kind=str)
    ] = None
    page_size: Annotated[int, Within(1, 1 << 20), Option("Memory")] = 16
    placement: Annotated[Placement, Option("Advanced")] = "split"
    policy: Annotated[Policy, Option("Advanced")] = "exact"
    layout: Annotated[Layout, Option("Advanced")] = "auto"
    draft_window: Annotated[int | None, Within(2, 1 << 30), Option("Drafts", default="all")] = None
    draft_sink: Annotated[int, Within(0, 1 << 30), Option("Drafts")] = 0
    max_batch: Annotated[
        int | None,
        Within(1, 1 << 16),
        Option(
            "Scheduling",
            names=["--batch"],
            default=f"{DEFAULT_BATCH}; what memory gives with --device cuda, at most {MOST_BATCH}",
        ),
    ] = None
    overlap_depth: Annotated[
        int | None,
        Within(0, 1),
        Option("Scheduling", default="0; 1 with --device cuda, if the draft allows it"),
    ] = None
    worker: Annotated[WorkerName, Option("Advanced")] = "auto"
    mixed_chunks: Annotated[bool, Option("Scheduling")] = False
    prefix_cache: bool = True
    cached_states: Annotated[
        int | None, Within(0, 1 << 16), Option("Memory", default="one for each row")
    ] = None
    prefill_tokens: Annotated[int, Within(1, 1 << 30), Option("Scheduling")] = 1024
    headroom: Annotated[int, Within(0, 1 << 30), Option("Scheduling")] = HEADROOM
    attention: Annotated[str, Option("Advanced")] = "auto"
    max_context_len: Annotated[
        int | None, Within(2, 1 << 30), Option("Memory", default="the model's")
    ] = None
    num_pages: Annotated[
        int | None, Within(1, 1 << 31), Option("Memory", default="what --kv-bytes holds")
    ] = None
    kv_bytes: Annotated[
        int | None,
        Within(1, 1 << 50),
        Option(
            "Memory",
            kind=str,
            read=parse_bytes,
            form=", such as 8GiB",
            default="half of what is free; with --device cuda all but 12 % of the device",
        ),
    ] = None
    host_bytes: Annotated[
        int,
        Within(0, 1 << 50),
        Option(
            "Memory",
            kind=str,
            read=parse_bytes,
            form=", such as 4GiB",
            default="0: they are prefilled again",
        ),
    ] = 0
    offload: Annotated[Offload, Option("Memory")] = "cost"
    max_sessions: Annotated[int, Within(0, 1 << 16), Option("Memory")] = MAX_SESSIONS
    session_pages: Annotated[
        int | None, Within(0, 1 << 31), Option("Memory", default="all free")
    ] = None
    graph_sizes: Annotated[
        tuple[int, ...] | None,
        Option(
            "Advanced",
            kind=str,
            read=_read_graph_sizes,
            form=": '1,2,4', or none",
            default="with --device cuda 1, 2, 4, 8, every 8 to 64, every 16 beyond, and the whole "
            "batch",
        ),
    ] = None
    packed_weight_bytes: Annotated[
        int,
        Within(0, 1 << 50),
        Option(
            "Advanced",
            kind=str,
            read=parse_bytes,
            form=", such as 4GiB",
            default="1GiB",
        ),
    ] = 1 << 30
    busy_check: Annotated[
        int, Within(0, 2), Option("Advanced", default="SPECPOOL_BUSY_CHECK or 0")
    ] = field(default_factory=busy_check_of_environment)
    on_finding: Annotated[OnFinding, Option("Advanced")] = "raise"

    def __new__(cls, **fields: object) -> "EngineConfig":
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
        check_values(self)
        self._check_draft_window()
        if self.worker == "v1" and self.overlap_depth:
            raise ConfigError(
                f"worker 'v1' is synchronous: it needs overlap_depth 0, got {self.overlap_depth}"
            )
        if self.adaptive is not None:
            from specpool.engine.shapes import config_of

            object.__setattr__(self, "adaptive", config_of(self.adaptive))
        if self.graph_sizes is not None:
            greatest_size = 1 << 16 if self.max_batch is None else self.max_batch
            check_graph_sizes(self.graph_sizes, greatest_size)
            object.__setattr__(self, "graph_sizes", tuple(self.graph_sizes))
        if not isinstance(self.attention, str):
            raise ConfigError(
                f"attention must be the name of a back end, got {shown(self.attention)}"
            )

    def _check_draft_window(self) -> None:
        """Raise `ConfigError` if `draft_window` or `draft_sink` cannot work."""
        if self.draft_window is not None and self.placement == "shared":
            raise ConfigError(
                f"draft_window {self.draft_window} needs placement 'split': a shared group has "
                "the target's layers too, which see all tokens"
            )
        if self.draft_sink and self.draft_sink > (self.draft_window or 0):
            window = "no draft_window" if self.draft_window is None else self.draft_window
            raise ConfigError(
                f"draft_sink {self.draft_sink} needs a draft_window of at least as many tokens, "
                f"got {window}"
            )
