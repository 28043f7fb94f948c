"""Types and documentation of the Rust binding (`python -m mypy.stubtest specpool._core`)."""

from collections.abc import Sequence
from typing import Literal, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

__version__: str
__all__ = [
    "Group",
    "Ledger",
    "Plan",
    "Shape",
    "__version__",
    "sizing_alloc_len_per_decode",
    "sizing_extend_pages",
    "sizing_need_double_buffer",
    "sizing_need_exact",
    "sizing_next_allocated",
    "sizing_row_headroom",
    "sizing_row_width",
    "sizing_v1_tokens_required",
]

_Int32Array: TypeAlias = NDArray[np.int32]
# int32 or int64, 1-D; a sequence of ints is converted.
_IntArray: TypeAlias = NDArray[np.int32] | NDArray[np.int64] | Sequence[int]
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

# --- Sizing (spec 3): raw numbers in slots; ConfigError for any number out of range ---
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

def sizing_extend_pages(*, new_len: int, allocated: int, page_size: int) -> int:
    """Pages that an extend to `new_len` takes; `allocated` is a multiple of `page_size`."""

def sizing_v1_tokens_required(
    *, num_rows: int, page_size: int, num_steps: int, topk: int, num_draft_tokens: int
) -> int:
    """Tokens that SGLang's synchronous worker (v1) reckons for `num_rows` rows (sgl#22406)."""

# --- Ledger (spec 4) ---

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
    ) -> Group: ...
    @property
    def name(self) -> str: ...
    @property
    def page_size(self) -> int: ...
    @property
    def num_pages(self) -> int: ...
    @property
    def hosts_drafts(self) -> bool: ...
    @property
    def layout(self) -> _Layout: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Plan:
    """One prepared forward and what it was prepared with. Immutable; `b` is its number of lanes.

    All arrays are read-only views into the plan, which they keep alive.
    """

    @property
    def step(self) -> int:
        """The step's number, from 1; never used twice."""
    @property
    def kind(self) -> Literal["extend", "decode"]: ...
    @property
    def writes_draft(self) -> bool:
        """Whether it writes draft KV of the tokens that it keeps."""
    @property
    def rows(self) -> _Int32Array:
        """[b]: each lane's row."""
    @property
    def shapes(self) -> _Int32Array:
        """[b]: each lane's shape, an index into `Ledger.shapes` (0 in an extend)."""
    @property
    def epochs(self) -> NDArray[np.uint64]:
        """[b]: each row's epoch at prepare; a lane counts only while its row is still at it."""
    @property
    def lo(self) -> _Int32Array:
        """[b]: least position where the device's true root can be (an extend's first position)."""
    @property
    def hi(self) -> _Int32Array:
        """[b]: greatest such position, inclusive. The device clamps its length into [lo, hi]."""
    @property
    def start(self) -> _Int32Array:
        """[b]: `resolved_len` before the step."""
    @property
    def new_len(self) -> _Int32Array:
        """[b]: `resolved_len` right after prepare; equal to `start` in a decode."""
    @property
    def allocated_before(self) -> _Int32Array:
        """[num_groups, b]: `allocated_len` before the step."""
    @property
    def allocated_after(self) -> _Int32Array:
        """[num_groups, b]: `allocated_len` that the step needs and has."""
    def __len__(self) -> int:
        """B, the number of lanes."""

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

    Args:
        groups: at least one.
        shapes: all shapes that may ever run. Shape 0 is put first when it is not.
        num_rows: rows, besides row 0.
        max_context_len: L, tokens of the longest sequence, at least 2.
        max_batch: most rows in one step; None means `num_rows`.
        overlap_depth: D, rounds that may be prepared before the previous one is resolved.
        policy: "exact" reserves what a round can write, "double_buffer" what SGLang reserves.
        row_width: slots of a row per group; None takes the least that suffices (spec 3.3).
        draft_kv: False for drafters without draft KV (n-gram): `DraftLag` is never raised.

    Raises:
        ConfigError: naming the setting, its value and what is allowed.
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
    ) -> Ledger: ...
    @property
    def groups(self) -> list[Group]: ...
    @property
    def shapes(self) -> list[Shape]:
        """All shapes, shape 0 first; rounds name a shape by its index here."""
    @property
    def num_rows(self) -> int: ...
    @property
    def num_free_rows(self) -> int:
        """Rows that can be admitted now."""
    @property
    def max_context_len(self) -> int: ...
    @property
    def max_batch(self) -> int: ...
    @property
    def overlap_depth(self) -> int: ...
    @property
    def policy(self) -> _Policy: ...
    @property
    def draft_kv(self) -> bool: ...
    def row_width(self, group: int) -> int:
        """Slots of a row in the group, a multiple of its page size."""
    def pages_per_row(self, group: int) -> int:
        """Columns of the group's page table."""
    def free_pages(self, group: int) -> int:
        """Pages that can be handed out now."""
    def fenced_pages(self, group: int) -> int:
        """Pages given back that a launched step may still touch; free once it is complete."""
    def page_record(self, group: int, page: int) -> tuple[str, int, int, str]:
        """Of a page: state (free, owned, fenced), (last) owner's row, birth step, last verb."""
    def page_table(self, group: int) -> _Int32Array:
        """[num_rows + 1, pages_per_row], view: pages; 0 from a row's `allocated_len / P` on."""
    def full_table(self, group: int) -> _Int32Array:
        """A copy of `page_table`, for a device that must start over."""
    def allocated_len(self, group: int) -> _Int32Array:
        """[num_rows + 1], view: slots that each row holds, a multiple of P."""
    @property
    def resolved_len(self) -> _Int32Array:
        """[num_rows + 1], view: r, tokens whose KV is final (an extend's from its prepare on)."""
    @property
    def in_flight(self) -> _Int32Array:
        """[num_rows + 1], view: k, rounds prepared and not resolved."""
    @property
    def drafted_len(self) -> _Int32Array:
        """[num_rows + 1], view: draft KV is valid below it."""
    @property
    def epoch(self) -> NDArray[np.uint64]:
        """[num_rows + 1], view: bumped by every trim, retract, finish and abort of the row."""
    @property
    def kv_committed_len(self) -> _Int32Array:
        """[num_rows + 1], a copy: r + k."""
    def admit(self, tag: str | None = None) -> int:
        """Takes a free, empty row; `tag` names the request in error messages.

        Raises:
            OutOfRows: no row is free.
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
        """[num_groups]: slots that `prepare_decode` of the same would take. No effect."""
    def pages_needed(self, lo: int, hi: int, shape: int) -> NDArray[np.int64]:
        """[num_groups]: pages that a row can ever hold whose roots all lie in `[lo, hi]`.

        For one round in flight at most; `shape` is an index into `shapes`.

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
            OrderError: it is not launched.
        """
    def cancel(self, step: int) -> None:
        """Undoes the newest unlaunched step, also a stale one; its pages are free at once.

        Raises:
            OrderError: it is launched or not the newest.
        """
    def trim(self, row: int, length: int) -> int:
        """Cuts the row to at most `length` and to what launched forwards have written.

        Rounds in flight no longer count (a root already written does). Returns the new
        `resolved_len`: feed the tokens from there; no round before an extend of it has launched.
        """
    def retract(self, row: int) -> None:
        """Takes everything from a row whose request will come back."""
    def finish(self, row: int) -> None:
        """Takes everything from a row whose request is done."""
    def abort(self, row: int) -> None:
        """Takes everything from a row whose request was given up."""
    def take_delta(self, step: int) -> list[tuple[_Int32Array, _Int32Array, _Int32Array]]:
        """Per group (rows [n], columns [n], pages [n]): the pending changes of the page table.

        One entry for each cell changed and not acknowledged, with its value now.

        Take it between the step's launch and its forward. Can be repeated until `ack_delta`.

        Raises:
            OrderError: the step is not in flight.
        """
    def ack_delta(self, step: int) -> None:
        """The delta taken for `step` is applied: drops what has not changed since that take.

        Raises:
            OrderError: no delta of the step is waiting.
        """
    def check(self) -> None:
        """Full audit, O(pages + table cells).

        Raises:
            CorruptState: the message is the report, one line for each broken invariant.
        """
