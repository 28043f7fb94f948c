"""The Rust core: the ledger of pages, rows and steps, draft trees, slots and masks."""

# `rust/specpool-py/build.rs` makes the docstrings below those of the compiled module, so `help()`
# shows them. `python -m mypy.stubtest specpool._core` checks the types.

from collections.abc import Sequence
from os import PathLike
from typing import Any, Literal, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

__version__: str
KERNEL_FILES: tuple[str, ...]  # Names for `kernel_source`, in the order a compiler takes them.
OP_BYTES: int  # Bytes that `decode_op` may read.
__all__ = [
    "KERNEL_FILES",
    "OP_BYTES",
    "Event",
    "Finding",
    "Group",
    "Ledger",
    "Plan",
    "Replay",
    "Shape",
    "Snapshot",
    "__version__",
    "advance_ancestors",
    "apply_table_delta",
    "attend_pages",
    "attention_bias",
    "attention_mask",
    "branch_copy_moves",
    "branch_pages",
    "build_tree",
    "check_moves",
    "check_slots",
    "compact_moves",
    "decode_op",
    "draft_read_indices",
    "draft_visibility",
    "draft_write_positions",
    "draft_write_slots",
    "kernel_source",
    "move_slots",
    "organize",
    "page_csr",
    "prefix_tail_moves",
    "sample_margins",
    "sample_tokens",
    "scatter_slots",
    "select_topk",
    "sizing_alloc_len_per_decode",
    "sizing_most_window_pages",
    "sizing_need_double_buffer",
    "sizing_need_exact",
    "sizing_next_allocated",
    "sizing_pages_needed",
    "sizing_row_headroom",
    "sizing_row_width",
    "slot_ranges",
    "slots_at",
    "tree_from_parents",
    "uniform",
    "verify_tree",
]

# int32 or int64, 1-D; a sequence of ints is converted.
_IntArray: TypeAlias = NDArray[np.int32] | NDArray[np.int64] | Sequence[int]
_I32: TypeAlias = NDArray[np.int32]
_I64: TypeAlias = NDArray[np.int64]
_F32: TypeAlias = NDArray[np.float32]
_F64: TypeAlias = NDArray[np.float64]
_Bool: TypeAlias = NDArray[np.bool_]
_U8: TypeAlias = NDArray[np.uint8]
_Layout: TypeAlias = Literal["dense", "holey"]
_Policy: TypeAlias = Literal["exact", "double_buffer"]

# --- Shape ---

@final
class Shape:
    """What one round of one row may do: `(num_steps, topk, num_draft_tokens)`, S, K, N.

    `num_draft_tokens` counts the nodes that are verified, the root among them.

    Raises:
        ConfigError: unless `S >= 0`, `K >= 1`, `N >= 1`, each at most 2^20.
    """

    def __new__(cls, num_steps: int, topk: int, num_draft_tokens: int) -> Shape: ...
    @staticmethod
    def eagle(num_steps: int, topk: int, num_draft_tokens: int) -> Shape:
        """A shape that an EAGLE drafter can build.

        Raises:
            ConfigError: when `S < 1`, `N < 2`, `N > 1 + K + (S-1)*K*K`, or a chain (`K == 1`) has
                `N != S + 1`.
        """
    @staticmethod
    def none() -> Shape:
        """Shape 0, no drafting: S=0, K=1, N=1."""
    @property
    def num_steps(self) -> int:
        """S, draft depth."""
    @property
    def topk(self) -> int:
        """K, branches."""
    @property
    def num_draft_tokens(self) -> int:
        """N, nodes verified, the root among them."""
    @property
    def max_accept_len(self) -> int:
        """A = min(S + 1, N), the largest accept_len (bonus token included)."""
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

# --- Sizing (docs/contract.md): raw numbers in slots; ConfigError for any number out of range ---
# `layout="holey"` is the dense one where P == 1 or K == 1, which is upstream's rule.

def sizing_alloc_len_per_decode(
    *,
    page_size: int,
    num_steps: int,
    topk: int,
    num_draft_tokens: int,
    hosts_drafts: bool = True,
    layout: _Layout = "holey",
) -> int:
    """W, the window of one round (sgl `get_alloc_len_per_decode`)."""

def sizing_row_headroom(*, page_size: int, num_steps: int, topk: int, num_draft_tokens: int) -> int:
    """Slots beyond the context that upstream gives a row (sgl `extra_max_context_len`)."""

def sizing_need_exact(
    *,
    lo: int,
    hi: int,
    page_size: int,
    num_steps: int,
    topk: int,
    num_draft_tokens: int,
    hosts_drafts: bool = True,
    layout: _Layout = "holey",
) -> int:
    """Slots that a round can write from any root in `[lo, hi]` (policy `exact`, closed form)."""

def sizing_need_double_buffer(*, lo: int, alloc_len: int, overlap_depth: int) -> int:
    """`lo + (overlap_depth + 1) * alloc_len`, what SGLang reserves."""

def sizing_next_allocated(*, allocated: int, need: int, page_size: int) -> int:
    """`ceil_align(max(allocated, need), page_size)`."""

def sizing_row_width(
    shapes: Sequence[Shape],
    *,
    page_size: int,
    max_context_len: int,
    overlap_depth: int = 0,
    policy: _Policy = "exact",
    hosts_drafts: bool = True,
    layout: _Layout = "holey",
) -> int:
    """Slots of a row that no round of these shapes can pass, a multiple of `page_size`.

    A full group needs at least `row_width / page_size` pages.
    """

def sizing_pages_needed(
    shapes: Sequence[Shape],
    shape: int,
    *,
    lo: int,
    hi: int,
    page_size: int,
    overlap_depth: int = 0,
    policy: _Policy = "exact",
    hosts_drafts: bool = True,
    layout: _Layout = "holey",
) -> int:
    """Pages that a row can ever hold whose roots all lie in `[lo, hi]`; see `Ledger.pages_needed`.

    `shape` is an index into `shapes`, those of the ledger. For full groups.
    """

def sizing_most_window_pages(
    shapes: Sequence[Shape],
    *,
    window: int,
    max_chunk: int,
    page_size: int,
    overlap_depth: int = 0,
    policy: _Policy = "exact",
    hosts_drafts: bool = True,
    layout: _Layout = "holey",
) -> int:
    """Pages of a window group that a row of any length holds at most.

    Behind the window a row keeps nothing: what one prepare finds held and what it claims, an extend
    of `max_chunk` tokens or a round of any of the shapes behind `overlap_depth` others.
    """

# --- Ledger (docs/contract.md, The ledger) ---

@final
class Group:
    """What a page pool with its page table is to be.

    Args:
        name: how errors call it; unique in a ledger.
        page_size: P, slots of a page, any integer from 1.
        num_pages: pages in all; `(num_pages + 1) * page_size <= 2^31`.
        hosts_drafts: whether the draft model's branches live in its rows.
        layout: where they lie; "holey" (for readers of whole pages) is "dense" where P == 1 or
            K == 1.
        window: w, of sliding-window layers: a query sees the last `w` positions, its own among
            them, and pages wholly below are given back at prepare. None: all positions.

    Raises:
        ConfigError: naming the group, the value and what is allowed.
    """

    def __new__(
        cls,
        name: str,
        *,
        page_size: int,
        num_pages: int,
        hosts_drafts: bool = False,
        layout: _Layout = "dense",
        window: int | None = None,
    ) -> Group: ...
    @property
    def name(self) -> str:
        """How errors call the group."""
    @property
    def page_size(self) -> int:
        """P, slots of a page."""
    @property
    def num_pages(self) -> int:
        """Pages in all."""
    @property
    def hosts_drafts(self) -> bool:
        """Whether the draft model's branches live in the group's rows."""
    @property
    def layout(self) -> _Layout:
        """Where drafts lie in a row."""
    @property
    def window(self) -> int | None:
        """w, of sliding-window layers; None where a query sees all positions."""
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Plan:
    """One prepared forward and what it was prepared with. Immutable; `b` is its number of lanes.

    `len(plan)` is b. All arrays are read-only views into the plan, which they keep alive.
    """

    @property
    def step(self) -> int:
        """The step's number, from 1; never used twice."""
    @property
    def kind(self) -> Literal["extend", "decode"]:
        """Whether the step extends its rows or decodes one round of each."""
    @property
    def writes_draft(self) -> bool:
        """Whether it writes draft KV of the tokens that it keeps."""
    @property
    def rows(self) -> _I32:
        """[b]: each lane's row."""
    @property
    def shapes(self) -> _I32:
        """[b]: each lane's shape, an index into `Ledger.shapes` (0 in an extend)."""
    @property
    def epochs(self) -> NDArray[np.uint64]:
        """[b]: each row's epoch at prepare; a lane counts only while its row is still at it."""
    @property
    def lo(self) -> _I32:
        """[b]: least position where the device's true root can be (an extend's first position)."""
    @property
    def hi(self) -> _I32:
        """[b]: greatest such position, inclusive. The device clamps its length into [lo, hi]."""
    @property
    def start(self) -> _I32:
        """[b]: `resolved_len` before the step."""
    @property
    def new_len(self) -> _I32:
        """[b]: `resolved_len` right after prepare; equal to `start` in a decode."""
    @property
    def allocated_before(self) -> _I32:
        """[num_groups, b]: `allocated_len` before the step."""
    @property
    def allocated_after(self) -> _I32:
        """[num_groups, b]: `allocated_len` that the step needs and has."""
    @property
    def page_copies(self) -> _I32:
        """[n, 4], a copy: (group, src page, dst page, tokens).

        The first `tokens` slots of page src go to page dst, in every layer of the group: in this
        order, before the step's forward and everything that is launched after it.
        """
    def __len__(self) -> int: ...

@final
class Finding:
    """One broken rule that an audit found, and what it is about as far as that is known."""

    @property
    def group(self) -> int | None:
        """Index of the group."""
    @property
    def page(self) -> int | None:
        """The page, of that group; 0 where a row holds the sink."""
    @property
    def row(self) -> int | None:
        """The row; live or not, and row 0 too."""
    @property
    def text(self) -> str:
        """The rule, with the numbers."""

@final
class Snapshot:
    """The state of a ledger at a moment when nothing was in flight, for `Ledger.restore`."""

    @property
    def number(self) -> int:
        """Counts the snapshots of its ledger, from 1."""

@final
class Ledger:
    """Pages, rows and lengths, and the rules between them.

    Rows are `1..=num_rows`, pages `1..=num_pages`; row 0 and page 0 are padding. A refused call
    changes nothing. The array properties are read-only views of the ledger's own memory, good for
    its whole life: they show every later change. A row that is not admitted reads 0 in all of them
    but `epoch`, which never goes back.

    `rows`, `new_lens`, `shapes`, `accept_lens` are int32 or int64 arrays [b] or sequences of ints.
    Wrong dtype, dimension or length, an unknown or repeated row, an unknown group or shape raise
    ShapeError.

    A verb that takes something raises OutOfMemory (a MemoryError) where there is no memory for it,
    and changes nothing. Those that give back (`launch`, `complete`, `cancel`, `abandon`, `trim`,
    `end_turn`, `retract`, `finish`, `abort`, `release_prefix`) ask for none. CorruptState says that
    a verb panicked: from then on the ledger can only be closed.

    Args:
        groups: at least one.
        shapes: all shapes that may ever run. Shape 0 is put first when it is not.
        num_rows: rows, besides row 0.
        max_context_len: L, tokens of the longest sequence, at least 2.
        max_batch: most rows in one step; None means `num_rows`.
        overlap_depth: D, rounds that may be prepared before the previous one is resolved.
        policy: "exact" reserves what a round can write, "double_buffer" what SGLang reserves.
        row_width: slots of a row per group; None takes the least that suffices.
        draft_kv: False for drafters without draft KV (n-gram): `DraftLag` is never raised.
        max_chunk: most tokens of one extend; None sets no limit. A window group needs pages for
            its window and a chunk.
        sessions: `end_turn` is used; a window group then needs pages for a checkpoint too.
        page_fencing: False for an engine whose forwards and copies all run on one stream: freed
            pages are free at once. Rows wait for their fences in any case.
        digest: keep the running digest.
        record: path of an event log (`specpool replay`, `specpool inspect`), created or emptied;
            the digest is kept then. None takes the environment variable SPECPOOL_RECORD, if that is
            set: `%p` in it is the process id, and ledgers after the first of a process get `.2`,
            `.3`, .. appended. A file that another ledger is writing is refused.
        record_limit: most bytes of the log. At the limit the log ends with a record that says so
            and the ledger goes on unrecorded.

    Records gather in memory and are written at the start of a later verb. A verb raises RecordError
    and changes nothing while they cannot be; it works again once there is room.

    Raises:
        ConfigError: naming the setting, its value and what is allowed.
        RecordError: the log cannot be written, or `record_limit` does not hold its head.
    """

    def __new__(
        cls,
        groups: Sequence[Group],
        shapes: Sequence[Shape],
        *,
        num_rows: int,
        max_context_len: int,
        max_batch: int | None = None,
        overlap_depth: int = 0,
        policy: _Policy = "exact",
        row_width: Sequence[int] | None = None,
        draft_kv: bool = True,
        max_chunk: int | None = None,
        sessions: bool = False,
        page_fencing: bool = True,
        digest: bool = False,
        record: str | PathLike[str] | None = None,
        record_limit: int = 1073741824,
    ) -> Ledger: ...
    @property
    def groups(self) -> list[Group]:
        """What each group was built from, in the order of the group indices.

        Cost: O(groups).
        """
    @property
    def shapes(self) -> list[Shape]:
        """All shapes, shape 0 first; rounds name a shape by its index here.

        Cost: O(shapes).
        """
    @property
    def num_rows(self) -> int:
        """Rows, besides row 0.

        Cost: O(1).
        """
    @property
    def num_free_rows(self) -> int:
        """Rows that can be admitted now.

        Cost: O(1).
        """
    @property
    def max_context_len(self) -> int:
        """L, tokens of the longest sequence.

        Cost: O(1).
        """
    @property
    def max_batch(self) -> int:
        """Most rows in one step.

        Cost: O(1).
        """
    @property
    def overlap_depth(self) -> int:
        """D, rounds that may be prepared before the previous one is resolved.

        Cost: O(1).
        """
    @property
    def policy(self) -> _Policy:
        """How much is reserved for a round.

        Cost: O(1).
        """
    @property
    def draft_kv(self) -> bool:
        """Whether drafting needs draft KV, so that `DraftLag` can be raised.

        Cost: O(1).
        """
    @property
    def max_chunk(self) -> int | None:
        """Most tokens of one extend; None where there is no limit.

        Cost: O(1).
        """
    @property
    def sessions(self) -> bool:
        """Whether the ledger was built for `end_turn`.

        Cost: O(1).
        """
    @property
    def page_fencing(self) -> bool:
        """Whether freed pages wait for the launched steps that may touch them.

        Cost: O(1).
        """
    @property
    def closed(self) -> bool:
        """Whether `close` was called.

        Cost: O(1).
        """
    @property
    def digest(self) -> int | None:
        """The running 64-bit hash over every successful state-changing call and the ids it gave.

        Equal on ranks that did the same; not over tags, deltas, queries and the accept_lens of
        dropped lanes. None unless it is kept.

        Cost: O(1).
        """
    @property
    def completed(self) -> int:
        """Every step up to this one has finished on the device.

        Cost: O(1).
        """
    @property
    def prefixes(self) -> list[int]:
        """The ids of the pinned prefixes, ascending.

        Cost: O(prefixes).
        """
    def state_hash(self) -> int:
        """A 64-bit hash of everything that decides what the ledger will do.

        Not of tags, deltas, the counters of steps, prefixes and snapshots, or the digest. A refused
        call leaves it as it was, and so does a cancelled prepare that evicted nothing.

        Cost: O(num_rows + pages that rows hold + pages ever handed out), per group.
        """
    def steps(
        self,
    ) -> list[
        tuple[
            int, Literal["extend", "decode"], Literal["prepared", "stale", "launched", "resolved"]
        ]
    ]:
        """(step, kind, state) of the steps in flight, oldest first.

        One that is over stays listed while an older one waits for its resolve.

        Cost: O(steps in flight).
        """
    def tag(self, row: int) -> str | None:
        """The name of the row's request, also after its release.

        Cost: O(1), plus the copy of the name.
        """
    def is_live(self, row: int) -> bool:
        """Whether the row is admitted.

        Cost: O(1).
        """
    def check_quiet(self, row: int) -> None:
        """Nothing moves in the row: what it holds below `resolved_len` is written and stays.

        Cost: O(steps in flight + page copies that ride on them or wait).

        Raises:
            NotReady: something of the row is in flight, its last launched step is not complete, or
                a page copy into it is not finished.
        """
    def checkpoint_len(self, row: int) -> int | None:
        """Tokens of the row's checkpoint, which `end_turn` set.

        Cost: O(1).
        """
    def prefix_len(self, prefix: int) -> int:
        """Tokens of a pinned prefix.

        Cost: O(log prefixes).

        Raises:
            ShapeError: there is no such prefix.
        """
    def row_width(self, group: int) -> int:
        """Slots of a row in the group, a multiple of its page size.

        Cost: O(1).
        """
    def pages_per_row(self, group: int) -> int:
        """Columns of the group's page table.

        Cost: O(1).
        """
    def free_pages(self, group: int) -> int:
        """Pages that can be handed out now.

        Cost: O(1).
        """
    def fenced_pages(self, group: int) -> int:
        """Pages given back that a launched step may still touch; free once it is complete.

        Cost: O(1).
        """
    def pinned_pages(self, group: int) -> int:
        """Pages that pinned prefixes hold, each counted once; rows may share them.

        Cost: O(n log n) of the n pages that prefixes hold, counted once for each prefix.
        """
    def reclaimable_pages(self, group: int) -> int:
        """Pages whose every holder is an idle row.

        Cost: O(1).
        """
    def page_record(self, group: int, page: int) -> tuple[str, int, int, str]:
        """Of a page: state (free, owned, shared, fenced), who took it, birth step, last verb.

        Cost: O(1).
        """
    def ownership_map(
        self, group: int, *, taken: bool = False
    ) -> tuple[NDArray[np.uint8], _I32, _I32]:
        """[num_pages + 1] each, copies: states, owners (rows that took them), numbers of holders.

        States are 0 free, 1 owned, 2 shared, 3 fenced; page 0 is the sink. With `taken` the arrays
        end behind the last page that was ever handed out: all behind it are free.

        Cost: O(num_pages); with `taken`, O(pages ever handed out).

        Raises:
            OutOfMemory: there is no memory for the arrays; so in every query that copies.
        """
    def live_rows(self) -> _I32:
        """[n]: the rows that are admitted, ascending.

        Cost: O(num_rows).
        """
    def page_table(self, group: int) -> _I32:
        """[num_rows + 1, pages_per_row], view: pages; 0 from a row's `allocated_len / P` on.

        Cost: O(1).
        """
    def full_table(self, group: int) -> _I32:
        """A copy of `page_table`, for a device that must start over.

        Cost: O(num_rows * pages_per_row).
        """
    def allocated_len(self, group: int) -> _I32:
        """[num_rows + 1], view: slots that each row holds, a multiple of P.

        Cost: O(1).
        """
    def protected_len(self, group: int) -> _I32:
        """[num_rows + 1], view: p, slots of shared, read-only pages; a multiple of P.

        Cost: O(1).
        """
    def evicted_len(self, group: int) -> _I32:
        """[num_rows + 1], view: e, slots below the window that were given back.

        Cost: O(1).
        """
    @property
    def idle(self) -> _Bool:
        """[num_rows + 1], view: between turns of a session, its pages reclaimable.

        Cost: O(1).
        """
    @property
    def resolved_len(self) -> _I32:
        """[num_rows + 1], view: r, tokens whose KV is final (an extend's from its prepare on).

        Cost: O(1).
        """
    @property
    def in_flight(self) -> _I32:
        """[num_rows + 1], view: k, rounds prepared and not resolved.

        Cost: O(1).
        """
    @property
    def drafted_len(self) -> _I32:
        """[num_rows + 1], view: draft KV is valid below it.

        Cost: O(1).
        """
    @property
    def epoch(self) -> NDArray[np.uint64]:
        """[num_rows + 1], view: bumped by every cut and release of the row.

        By trim, end_turn, abandon, retract, finish, abort and restore.

        Cost: O(1).
        """
    @property
    def kv_committed_len(self) -> _I32:
        """[num_rows + 1], a copy: r + k.

        Cost: O(num_rows).
        """
    def admit(
        self, tag: str | None = None, *, prefix: int | None = None, length: int | None = None
    ) -> int:
        """Takes a free row; `tag` names the request in error messages.

        On a prefix the row starts with its first `length` tokens (default: all): it shares their
        whole pages and takes a page for the copy of a partly filled tail, which rides on the next
        step prepared.

        Raises:
            ShapeError: no such prefix, or `length` is not in 0..= its length.
            NotReady: a window below `length` is not held by the prefix.
            OutOfRows: no row is free.
            OutOfPages: no page for a tail.
        """
    def fork(self, row: int, tag: str | None = None) -> int:
        """Takes a free row with the same tokens as `row`: shares its whole pages, copies its tail.

        Raises:
            NotReady: something of the row is in flight, its last launched step is not complete, or
                a page copy into it is not finished.
            OutOfRows: no row is free.
            OutOfPages: no page for a tail.
        """
    def pin_prefix(self, row: int, length: int) -> int:
        """Keeps the row's first tokens for later requests; returns the prefix's id.

        As many tokens as fill whole pages in every group, at most `length`. Their pages are shared,
        read-only, until `release_prefix`.

        Raises:
            ShapeError: `length` is not in 1..=resolved_len, or fills no whole page of every group.
            NotReady: a step that is not complete writes these pages, a page copy into the row is
                not finished, or the window below the prefix's end is not held.
        """
    def release_prefix(self, prefix: int) -> None:
        """Keeps the prefix's pages no longer; rows that share them go on.

        Raises:
            ShapeError: there is no such prefix.
        """
    def prepare_extend(
        self, rows: _IntArray, new_lens: _IntArray, *, writes_draft: bool = True
    ) -> Plan:
        """Prepares a prefill or a chunk: pages for `new_lens` tokens.

        `resolved_len` becomes `new_lens` at once. All or nothing over the batch. In flight until
        `complete`; has no resolve.

        Raises:
            ShapeError: also for `new_len <= resolved_len`, or not 1..=max_batch rows.
            NotReady: a stale step is not cancelled, or the row has rounds in flight or an
                unlaunched extend.
            ContextEnd: lists every row whose new length is past L.
            OutOfPages: states need, free and fenced pages of the group.
        """
    def tokens_required(self, rows: _IntArray, shapes: _IntArray) -> NDArray[np.int64]:
        """[num_groups]: slots that `prepare_decode` of the same would take. No effect.

        Cost: O(num_rows + groups * b).
        """
    def pages_needed(self, lo: int, hi: int, shape: int) -> NDArray[np.int64]:
        """[num_groups]: pages that a row can ever hold whose roots all lie in `[lo, hi]`.

        For one round in flight at most; `shape` is an index into `shapes`. Behind a window all that
        the row can ever hold: rounds of any shape, D in flight, and an extend of up to `lo` tokens.

        Cost: O(groups * shapes).

        Raises:
            ShapeError: unless `0 <= lo <= hi < max_context_len`, or an unknown shape.
        """
    def prepare_decode(
        self, rows: _IntArray, shapes: _IntArray, *, writes_draft: bool = True
    ) -> Plan:
        """Prepares one round of each row, each with its own shape. All or nothing over the batch.

        Raises:
            NotReady: a stale step is not cancelled, or no extend of the row has launched since its
                admit or trim.
            ContextEnd: lists every row with `resolved_len >= L`.
            OrderError: the row has D + 1 rounds in flight.
            DraftLag: a drafting shape after a round with `writes_draft=False`.
            RowOverflow: the claim would pass the row width.
            OutOfPages: states need, free and fenced pages of the group.
        """
    def launch(self, step: int) -> None:
        """The step's forward is about to be enqueued.

        Call it before the first copy, table delta or kernel of the step.

        Raises:
            OrderError: it is not the oldest unlaunched step.
            StalePlan: a row of it was released since prepare; cancel the step.
        """
    def resolve(self, step: int, accept_lens: _IntArray) -> None:
        """`accept_lens` [b], bonus token included, count for the rows. Oldest round first per row.

        Lanes whose row was released since prepare are dropped, their entries unread.

        Raises:
            OrderError: an extend, not launched, already resolved, or an older round is unresolved.
            ShapeError: an entry outside `1..=A` of its lane's shape.
        """
    def complete(self, step: int) -> None:
        """The step and every step before it have finished on the device: their fences fall.

        Raises:
            OrderError: it is not launched, or was cancelled.
        """
    def cancel(self, step: int) -> None:
        """Undoes the newest unlaunched step, also a stale one; its pages are free at once.

        Raises:
            OrderError: it is launched or not the newest.
        """
    def abandon(self, step: int) -> None:
        """The launched step's forward failed: retracts its rows and those its page copies went to.

        Rows that were given back since are left alone, rows that were cut since are not. For a
        decode this is its resolve. The pages stay fenced until `complete` reaches the step, after a
        synchronise or a reset of the device.

        Raises:
            OrderError: it is not launched, is complete, or is abandoned already.
        """
    def trim(self, row: int, length: int) -> int:
        """Cuts the row to at most `length` and to what launched forwards have written.

        Goes further back where a window below is no longer held, or to a page edge inside shared
        pages. Rounds in flight no longer count (a root already written does). Returns the new
        `resolved_len`: feed the tokens from there; no round before an extend of it has launched.
        Set the device's length to it in stream order before the row's next forward.

        A trim to `resolved_len` with nothing in flight takes only the reserve behind it: the root
        stands, and rounds go on.
        """
    def end_turn(self, row: int, length: int) -> int:
        """A `trim` for a session that stays: the row is idle until its next prepare.

        Costs O(pages of the row), and so does what ends the idle time, a prepare or a release.

        Its pages count as reclaimable; the windows below the new `resolved_len` are held as its
        checkpoint until the next `end_turn`, or a trim below it.

        Raises:
            ConfigError: there are window groups, and the ledger was built without `sessions`.
        """
    def retract(self, row: int) -> None:
        """Takes everything from a row whose request will come back."""
    def finish(self, row: int) -> None:
        """Takes everything from a row whose request is done."""
    def abort(self, row: int) -> None:
        """Takes everything from a row whose request was given up."""
    def take_delta(self, step: int) -> list[tuple[_I32, _I32, _I32]]:
        """Per group (rows [n], columns [n], pages [n]): the pending changes of the page table.

        One entry for each cell changed and not acknowledged, with its value now.

        Take it between the step's launch and its forward. Can be repeated until `ack_delta`.

        Raises:
            OrderError: the step is not in flight.
            OutOfMemory: there is no memory for the arrays.
        """
    def ack_delta(self, step: int) -> None:
        """The delta taken for `step` is applied: drops what has not changed since that take.

        Raises:
            OrderError: no delta of the step is waiting.
        """
    def snapshot(self) -> Snapshot:
        """Keeps the whole state.

        Raises:
            NotReady: a step is not over.
            OutOfMemory: there is no memory for a second state.
        """
    def restore(self, snapshot: Snapshot) -> None:
        """Goes back to a state of this ledger, or of one built alike.

        Epochs, step and prefix numbers never go back; table cells that differ become deltas. What
        lies in the pages on the device is the caller's to bring back.

        Raises:
            NotReady: a step is not over.
            ConfigError: the snapshot is of a ledger that was built otherwise; or this one is
                recorded, and the snapshot is not its own.
            OutOfMemory: there is no memory for the change.
        """
    def close(self) -> None:
        """Refuses every verb from now on (OrderError); queries and views stay. Twice is once.

        Raises:
            RecordError: the event log cannot be written. The ledger is closed; a further call
                tries again.
        """
    def __enter__(self) -> Ledger: ...
    def __exit__(self, *_error: object) -> None: ...
    def audit(self) -> list[Finding]:
        """Every broken invariant; empty where all is well.

        Cost: O(pages ever handed out + table cells).

        Raises:
            OutOfMemory: there is no memory to count with.
        """
    def check(self) -> None:
        """Full audit.

        Cost: O(pages ever handed out + table cells).

        Raises:
            CorruptState: the message is the report, one line for each broken invariant.
        """

@final
class Event:
    """One state-changing call of an event log, run again."""

    @property
    def index(self) -> int:
        """Its number in the log, from 1."""
    @property
    def offset(self) -> int:
        """Where it begins in the file, in bytes."""
    @property
    def verb(self) -> str:
        """The ledger's method."""
    @property
    def step(self) -> int | None:
        """The step that it prepared or named."""
    @property
    def rows(self) -> list[int]:
        """The rows that it named, or the one that it gave."""
    @property
    def tag(self) -> str | None:
        """The name of the request (admit, fork)."""
    @property
    def text(self) -> str:
        """The call and what it gave, as in `prepare_decode([1, 2], [1, 1]) -> step 9`."""
    @property
    def digest(self) -> int:
        """The ledger's digest after it."""
    @property
    def plan(self) -> Plan | None:
        """What a prepare gave."""

@final
class Replay:
    """An event log, run again call by call on a ledger of its own.

    Args:
        path: the log.

    Raises:
        RecordError: the file cannot be read, is no event log, is of another version, truncated or
            damaged: with the offset.
        ConfigError: this version refuses the recorded configuration.
    """

    def __new__(cls, path: str | PathLike[str]) -> Replay: ...
    @property
    def ledger(self) -> Ledger:
        """The ledger as it is now; to be looked at, not to be changed."""
    @property
    def config(self) -> dict[str, Any]:
        """The recorded arguments of `Ledger`, defaults made explicit."""
    @property
    def made_by(self) -> str:
        """The version of specpool that wrote the log."""
    @property
    def end(self) -> Literal["closed", "limit", "open"] | None:
        """How the log ends, once all is run: "open" where it just stops (no close, or a crash)."""
    def advance(self) -> Event | None:
        """Runs the next event; None at the end.

        Raises:
            RecordError: the log is truncated or damaged here, or the ledger refuses the call or
                does something else than it did: with the event and its offset. It stays so.
        """

def decode_op(ledger: Ledger, code: bytes) -> tuple[str, dict[str, Any]]:
    """One operation on the ledger as it is now: a verb's name and its keyword arguments.

    The same state and code give the same operation. Most can succeed; one in 16 has arbitrary
    arguments. Of `code` the first `OP_BYTES` bytes count, missing ones are 0.
    """

# --- Kernels ---

def kernel_source(name: str) -> str:
    """The text of a file of `cuda/`, as this build was made with it.

    Raises:
        KeyError: no such file.
    """

# --- Trees, slots, masks ---

# Draft tree, verify, sampling. S = num_steps, K = topk, N = num_draft_tokens, M = K +
# (S-1)*K*K. Every array must be C-contiguous and of the dtype shown; anything else is a ShapeError
# and nothing is written.

def select_topk(
    step: int,
    topk_p: _F32,
    topk_index: _I64,
    scores: _F32 | None,
    candidate_scores: _F32,
    candidate_tokens: _I64,
    candidate_parents: _I64,
) -> tuple[_I64, _I32, _F32]:
    """Records a draft step's candidates in place and keeps the K best of each lane (EAGLE-2).

    Ties go to the lower index.

    A probability outside [0, 1] is clamped and a NaN counts as 0, so that no child outranks its
    parent.

    Args:
        step: in [0, S).
        topk_p: [n, K] at step 0, [n*K, K] after: the draft model's K greatest probabilities.
        topk_index: as topk_p: their tokens.
        scores: [n, K], the result of the step before; None at step 0.
        candidate_scores: [n, M], written.
        candidate_tokens: [n, M], written.
        candidate_parents: [n, 1 + K*S], written.

    Returns:
        input_ids [n*K], the kept tokens; branch_parents [n, K], which branch of the step before
        each kept branch continues (0..K at step 0); scores [n, K], their cumulative probabilities.
    """

def organize(
    candidate_scores: _F32,
    candidate_tokens: _I64,
    candidate_parents: _I64,
    *,
    topk: int,
    num_draft_tokens: int,
) -> tuple[_I64, _I64, _I64]:
    """Chooses the N-1 best candidates of each lane, in ascending order of their index.

    Ties go to the lower index, so that a parent comes before its children.

    Args:
        candidate_scores: [n, M], as `select_topk` left it (writable, as are the two others).
        candidate_tokens: [n, M].
        candidate_parents: [n, 1 + K*S].
        topk: K.
        num_draft_tokens: N, in [1, 1 + M].

    Returns:
        parent_list [n, 1 + K*(S-1)] (no columns when S == 1), top_scores_index [n, N-1],
        draft_tokens [n, N-1] (without the root).
    """

def build_tree(
    parent_list: _I64, top_scores_index: _I64, *, topk: int
) -> tuple[_I32, _Bool, _I32, _I32, _I32]:
    """Builds the trees that `organize` chose.

    Node 0 is the root, node i candidate top_scores_index[i-1].

    Returns:
        depths [n, N] (a node's position is its root's plus this); mask [n, N, N], true where node j
        is node i or an ancestor of it; first_child, next_sibling [n, N], -1 = none; parents [n, N],
        -1 for the root.
    """

def tree_from_parents(parents: _I32) -> tuple[_I32, _Bool, _I32, _I32, _I32]:
    """Builds trees of any form: parents [n, N] has parents[:, 0] == -1 and 0 <= parents[:, i] < i.

    Siblings may bear the same token. Returns what `build_tree` returns.
    """

def verify_tree(
    tokens: _I64, first_child: _I32, next_sibling: _I32, target_tokens: _I64, *, num_steps: int
) -> tuple[_I32, _I32, _I64]:
    """Walks each tree from its root to the child with the target's token, while there is one.

    Args:
        tokens: [n, N], the root's first.
        first_child: [n, N].
        next_sibling: [n, N].
        target_tokens: [n, N]: the target's token after each node: argmax or draw. -1
            (`sample_tokens` gives it for logits that are not numbers) ends the walk there and
            stands as the bonus, to fail that request alone.
        num_steps: S, the most drafts accepted.

    Returns:
        accept_index [n, S+1], flat node ids lane*N + node of the walk, padded with -1; accept_len
        [n], the bonus included; predict [n*N], the target's token at the nodes of the walk (the
        last is the bonus), else 0.
    """

def uniform(seeds: NDArray[np.uint64], positions: _I64) -> _F64:
    """The draw of each (seed, position), in [0, 1); [n], [n] -> [n].

    The 53 upper bits of the words (1, 0) of Philox4x32-10 with key = seed and counter =
    (position, 0), as a fraction. Positions are 0 or more.
    """

def sample_tokens(logits: _F32, temperature: _F32, top_k: _I32, top_p: _F32, u: _F64) -> _I64:
    """Draws one token per row by inverse CDF over token ids.

    Order: temperature, then the top_k most likely tokens, then the smallest set of the most likely
    whose share of what is left is >= top_p; ties towards the lower id. The token is the least id
    whose cumulative weight exceeds u times the total. Weights are whole numbers, so that the sums
    are exact in any order (rust/specpool-core/src/tree/sample.rs).

    Args:
        logits: [n, V], V at most 2^19; -inf marks a token that is ruled out.
        temperature: [n], in [0, inf); 0, or less than 2^-100, = argmax (lowest id on ties).
        top_k: [n]; 0 = all.
        top_p: [n], in (0, 1]; 1 = all.
        u: [n], in [0, 1).

    Returns:
        [n] tokens; -1 where a row holds a NaN, +inf, or nothing but -inf.
    """

def sample_margins(logits: _F32, temperature: _F32, top_k: _I32, top_p: _F32, u: _F64) -> _F64:
    """How near each draw of `sample_tokens` is to another outcome [n].

    The least of: the distance of u to the edges of the token's CDF interval; that of the kept mass
    to top_p; the gap in logit / temperature where top_k or top_p cuts. At temperature 0 the gap
    between the two greatest logits. inf where nothing else is possible, NaN where there is no
    token.
    """

# Slots. page_table: [num_rows + 1, pages_per_row]; rows [n]: row 0 is padding. roots
# [n]: the position of each lane's root, which is the length of its prefix.

def slots_at(page_table: _I32, page_size: int, rows: _I32, positions: _I32) -> _I64:
    """[n]: page_table[row, position // P] * P + position % P of each (row, position)."""

def slot_ranges(page_table: _I32, page_size: int, rows: _I32, starts: _I32, lens: _I32) -> _I64:
    """[sum(lens)]: the slots of [starts[i], starts[i] + lens[i]) of each row, lane after lane."""

def page_csr(page_table: _I32, page_size: int, rows: _I32, lens: _I32) -> tuple[_I32, _I32, _I32]:
    """Pages of [0, lens[i]) of each row, as CSR, for prefill and verify.

    Returns:
        kv_indptr [n+1]; kv_indices; kv_last_page_len [n], in 1..P, 0 where lens is 0.
    """

def apply_table_delta(page_table: _I32, rows: _I32, columns: _I32, pages: _I32) -> None:
    """Writes pages[i] into page_table[rows[i], columns[i]], all or none; row 0 is refused."""

def draft_write_positions(
    roots: _I32, *, num_steps: int, topk: int, page_size: int, layout: _Layout
) -> _I32:
    """[n, K, S]: the position in its row that branch b writes step j to.

    A place, not the token's position in the sequence.

    dense: root + b*S + j. holey (sgl#26972): root + b*n*P + j with n = ceil((root % P + S) / P)
    pages per branch.
    """

def draft_write_slots(
    page_table: _I32,
    page_size: int,
    rows: _I32,
    roots: _I32,
    *,
    num_steps: int,
    topk: int,
    layout: _Layout,
) -> _I64:
    """[n, K, S]: the slots of `draft_write_positions`; a position without a page is refused."""

def advance_ancestors(ancestors: _I32, branch_parents: _I32, step: int) -> None:
    """Brings ancestors [n, K, width > step] to `step` in place, after the selection of that step.

    ancestors[b, k, j] is the branch whose cell of step j holds the j-th draft on branch k's path;
    branch_parents [n, K] is `select_topk`'s. Call it for each step from 0 on; no reset is needed
    between rounds.
    """

def draft_read_indices(
    page_table: _I32,
    page_size: int,
    rows: _I32,
    roots: _I32,
    *,
    num_steps: int,
    topk: int,
    step: int,
    layout: _Layout,
    ancestors: _I32 | None = None,
    out: _I32 | None = None,
) -> tuple[_I32, _I32]:
    """CSR of the slots that each branch reads at a draft step: its prefix, then step + 1 drafts.

    Args:
        page_table: [num_rows + 1, pages_per_row].
        page_size: P.
        rows: [n].
        roots: [n].
        num_steps: S.
        topk: K.
        step: in [0, S).
        layout: where the drafts lie.
        ancestors: [n, K, width > step] (`advance_ancestors`): read the true ancestors. None: read
            the branch's own cells, as upstream.
        out: buffer for kv_indices, written in place; must hold K * (sum(roots) + n*S) (sgl#27338).

    Returns:
        kv_indptr [n*K + 1], kv_indices (`out` itself where given, valid below kv_indptr[-1]).
    """

def draft_visibility(
    roots: _I32,
    *,
    num_steps: int,
    topk: int,
    step: int,
    page_size: int,
    layout: _Layout,
    ancestors: _I32 | None = None,
) -> tuple[_Bool, _I32]:
    """own_mask [n, K, W], own_positions [n, W] of a draft step, for `attention_mask`.

    Its starts are the roots. The same reads as `draft_read_indices`, as a mask: the K branches are
    the queries, column c is the cell at root + c. W reaches the last cell written at `step`. Every
    query stands at position root + step.
    """

def branch_pages(
    page_table: _I32,
    page_size: int,
    rows: _I32,
    roots: _I32,
    *,
    num_steps: int,
    topk: int,
    step: int,
) -> _I32:
    """[n*K, width]: the pages that each branch reads at a draft step (holey), padded with 0.

    A branch reads root + step + 1 slots of them: the prefix's full pages, then its own pages (of
    which branch 0's begin with the prefix's tail itself, the others' with its copy).
    """

def prefix_tail_moves(
    page_table: _I32, page_size: int, rows: _I32, roots: _I32, *, num_steps: int, topk: int
) -> tuple[_I64, _I64]:
    """src, dst slots that copy each prefix's tail before the drafts of branches 1..K (sgl#7725)."""

def branch_copy_moves(
    page_table: _I32,
    page_size: int,
    rows: _I32,
    roots: _I32,
    branch_parents: _I32,
    *,
    num_steps: int,
    step: int,
    layout: _Layout = "holey",
) -> tuple[_I64, _I64]:
    """src, dst slots that copy the drafts of each branch's parent over its own.

    Called after the selection of `step`, for the drafts 0..step.

    branch_parents: [n, K]. Branches may swap: the move must gather before it scatters.
    """

def compact_moves(
    page_table: _I32,
    page_size: int,
    rows: _I32,
    roots: _I32,
    accept_index: _I32,
    *,
    num_draft_tokens: int,
) -> tuple[_I64, _I64]:
    """src, dst slots that bring the accepted nodes from root + node to root, root + 1, ...

    accept_index: [n, S+1] of `verify_tree`. Nodes already in place and padded lanes (row 0) have no
    move.
    """

def check_moves(src: _I64, dst: _I64, num_slots: int) -> None:
    """Raises ShapeError unless all slots are in [0, num_slots) and each is written once."""

def check_slots(name: str, slots: _I64, num_slots: int) -> None:
    """Raises ShapeError, calling the slots `name`, unless all are in [0, num_slots)."""

def move_slots(buffers: Sequence[tuple[_U8, Sequence[int]]], src: _I64, dst: _I64) -> None:
    """Moves slots in every buffer: slot dst[i] takes what slot src[i] held before the call.

    Args:
        buffers: bytes [lead, num_pages, P * sum(widths)], written, and the widths: bytes of one
            slot in each field. A page holds one field after the other; a plain buffer has one, and
            pages of one slot.
        src: [n] slots read.
        dst: [n] slots written, each once.
    """

def scatter_slots(
    buffers: Sequence[tuple[_U8, Sequence[int]]], slots: _I64, values: Sequence[_U8]
) -> None:
    """Writes values into slots of every buffer.

    Args:
        buffers: as `move_slots` has them.
        slots: [n], each once.
        values: one for each buffer: bytes [lead, n, width] of its one field.
    """

def attention_mask(
    starts: _I32,
    q_lens: _I32,
    num_columns: int,
    *,
    own_mask: _Bool | None = None,
    q_positions: _I32 | None = None,
    own_positions: _I32 | None = None,
    num_queries: int | None = None,
    window: int | None = None,
) -> _Bool:
    """[n, Q, num_columns]: what each query of one forward sees.

    Column c is the cell at in-row position c.

    Args:
        starts: [n]: every query of the lane sees the columns below; its own cells begin here.
        q_lens: [n]: queries beyond are padding and see column 0 only (never nothing: softmax would
            give NaN).
        num_columns: columns; every visible own cell must lie below.
        own_mask: [n, Q, W]: whether query i sees the cell at starts + j; None = causal (j <= i).
        q_positions: [n, Q]: positions in the sequence; None = starts + i. Only the window reads
            them.
        own_positions: [n, W]: likewise of the own cells; None = starts + j.
        num_queries: Q where neither own_mask nor q_positions says it; None = the greatest of
            q_lens.
        window: a query sees only cells whose position is greater than its own minus this.
    """

def attend_pages(
    keys: _F32,
    values: _F32,
    new_keys: _F32,
    new_values: _F32,
    write_slots: _I64,
    q: _F32,
    out: _F32,
    pages: _I32,
    kv_lens: _I32,
    q_lens: _I32,
    *,
    page_size: int,
    scaling: float,
    bias: _F32 | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: _F32 | None = None,
    num_threads: int = ...,
) -> None:
    """Write new keys and values, then attend over the pages of each lane, where they lie.

    Lets go of the interpreter's lock unless the reads are brief. Costs one read of each lane's
    columns, whatever the number of its queries.

    Args:
        keys: [num_slots, Hkv, Dk], written.
        values: [num_slots, Hkv, Dv], written.
        new_keys: [T, Hkv, Dk].
        new_values: [T, Hkv, Dv].
        write_slots: [T], the slot of each new token.
        q: [n, H, Dk] queries, lane after lane; H is a multiple of Hkv.
        out: [n, H, Dv], written.
        pages: [B, C], the page of each `page_size` columns of a lane.
        kv_lens: [B]; no query of a lane sees a column from there on.
        q_lens: [B], queries of each lane; they add up to n.
        page_size: slots of a page.
        scaling: factor of the scores.
        bias: [B, max(q_lens), columns], added to the scores. None = query i of a lane sees all
            columns up to `kv_len - q_len + i`.
        window: without a bias, a query sees only so many columns, its own included.
        softcap: above 0; scores become `softcap * tanh(score / softcap)`.
        sinks: [H], further scores that take part in the softmax only.
        num_threads: threads to use at most, 256 in any case; small reads use one.

    Raises:
        ShapeError: names the argument; nothing is written.
        OutOfMemory: for the scores and results; nothing is written.
    """

def attention_bias(
    starts: _I32,
    q_lens: _I32,
    num_columns: int,
    *,
    own_mask: _Bool | None = None,
    q_positions: _I32 | None = None,
    own_positions: _I32 | None = None,
    num_queries: int | None = None,
    window: int | None = None,
) -> _F32:
    """`attention_mask` as a bias of the scores: 0 where the query sees the column, else -inf."""
