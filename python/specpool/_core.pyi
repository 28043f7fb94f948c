"""The Rust core: the ledger of pages, rows and steps, draft trees, slots and masks."""

# `rust/specpool-py/build.rs` makes the docstrings below those of the compiled module, so `help()`
# shows them. `python -m mypy.stubtest specpool._core` checks the types.

from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any, Literal, TypeAlias, TypeVar, final, overload

import numpy as np
from numpy.typing import NDArray

__version__: str
KERNEL_FILES: tuple[str, ...]  # Names for `kernel_source`, in the order in which to compile them.
OP_BYTES: int  # The most bytes that `decode_op` reads.
__all__ = [
    "KERNEL_FILES",
    "OP_BYTES",
    "BlockPool",
    "Event",
    "Finding",
    "Group",
    "Ledger",
    "Plan",
    "Replay",
    "Shape",
    "Snapshot",
    "StateGroup",
    "SuffixIndex",
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
    "checksum",
    "choose_shapes",
    "compact_moves",
    "count_acceptance",
    "decode_into",
    "decode_op",
    "draft_read_indices",
    "draft_visibility",
    "draft_write_positions",
    "draft_write_slots",
    "expected_tokens",
    "find_broken_trees",
    "gather_pages",
    "kernel_source",
    "launch_into",
    "move_slots",
    "organize",
    "page_csr",
    "prefix_tail_moves",
    "round_slots",
    "sample_margins",
    "sample_tokens",
    "scatter_pages",
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
_T = TypeVar("_T")
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
    """The shape of one round of one row: `(num_steps, topk, num_draft_tokens)`, S, K, N.

    `num_draft_tokens` counts the nodes to verify, the root included.

    Raises:
        ConfigError: unless `S >= 0`, `K >= 1`, `N >= 1`, each at most 2^20.
    """

    def __new__(cls, num_steps: int, topk: int, num_draft_tokens: int) -> Shape: ...
    @staticmethod
    def eagle(num_steps: int, topk: int, num_draft_tokens: int) -> Shape:
        """Return a shape that an EAGLE drafter can build.

        Raises:
            ConfigError: `S < 1`, `N < 2`, `N > 1 + K + (S-1)*K*K`, or a chain (`K == 1`) with
                `N != S + 1`.
        """
    @staticmethod
    def none() -> Shape:
        """Return shape 0, no drafting: S=0, K=1, N=1."""
    @property
    def num_steps(self) -> int:
        """S, draft depth."""
    @property
    def topk(self) -> int:
        """K, branches."""
    @property
    def num_draft_tokens(self) -> int:
        """N, nodes to verify, the root included."""
    @property
    def max_accept_len(self) -> int:
        """A = min(S + 1, N), the largest accept_len (bonus token included)."""
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

# --- Sizing (docs/contract.md): raw numbers in slots; ConfigError for any number out of range ---
# If P == 1 or K == 1, `layout="holey"` means the dense layout, which is SGLang's rule.

def sizing_alloc_len_per_decode(
    *,
    page_size: int,
    num_steps: int,
    topk: int,
    num_draft_tokens: int,
    hosts_drafts: bool = True,
    layout: _Layout = "holey",
) -> int:
    """Return the slots that one round needs behind its root (sgl `get_alloc_len_per_decode`)."""

def sizing_row_headroom(*, page_size: int, num_steps: int, topk: int, num_draft_tokens: int) -> int:
    """Return the slots beyond the context that SGLang gives a row (`extra_max_context_len`)."""

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
    """Return the end of the slots that a round from any root in `[lo, hi]` can write.

    This is what policy `exact` reserves, in closed form.
    """

def sizing_need_double_buffer(*, lo: int, alloc_len: int, overlap_depth: int) -> int:
    """Return `lo + (overlap_depth + 1) * alloc_len`, what SGLang reserves."""

def sizing_next_allocated(*, allocated: int, need: int, page_size: int) -> int:
    """Return `max(allocated, need)`, rounded up to a multiple of `page_size`."""

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
    """Return the row width: slots that no round of these shapes passes, a multiple of `page_size`.

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
    """Return the most pages of a full group that a row with all roots in `[lo, hi]` can hold.

    `shapes` are the ledger's, and `shape` is an index into them. See `Ledger.pages_needed`.
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
    sink: int = 0,
) -> int:
    """Return the most pages of a window group that a row of any length holds.

    A row keeps only its window, and the pages of its first `sink` tokens. The bound is what a row
    holds when a prepare begins, and what the prepare claims: an extend of `max_chunk` tokens, or a
    round of any of the shapes with `overlap_depth` others in flight.
    """

# --- Ledger (docs/contract.md, The ledger) ---

@final
class Group:
    """The description of a page pool with its page table.

    Args:
        name: the name in error messages; unique in a ledger.
        page_size: P, slots of a page, any integer from 1.
        num_pages: all pages; `(num_pages + 1) * page_size <= 2^31`.
        hosts_drafts: whether the draft model's branches are in its rows.
        layout: where the branches are in a row. "holey" is for readers of whole pages; if P == 1
            or K == 1 it equals "dense".
        window: w, for sliding-window layers: a query sees the last `w` positions, its own
            included. A prepare gives back the pages wholly below. None: a query sees all positions.
        sink: of a group with a window: a query sees the first `sink` positions too, and a row keeps
            their pages; `sink + window` is at most the ledger's `max_context_len`.

    Raises:
        ConfigError: a value is out of range; the message names the group, the value and the range.
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
        sink: int = 0,
    ) -> Group: ...
    @property
    def name(self) -> str:
        """The group's name in error messages."""
    @property
    def page_size(self) -> int:
        """P, slots of a page."""
    @property
    def num_pages(self) -> int:
        """All pages, page 0 excluded."""
    @property
    def hosts_drafts(self) -> bool:
        """Whether the draft model's branches are in the group's rows."""
    @property
    def layout(self) -> _Layout:
        """Where drafts lie in a row."""
    @property
    def window(self) -> int | None:
        """w, for sliding-window layers; None if a query sees all positions."""
    @property
    def sink(self) -> int:
        """First positions that a query sees beside its window; 0: none."""
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class StateGroup:
    """The description of the slots for recurrent state, of a model whose layers do not all have KV.

    A row has one state slot. It holds the state after exactly c tokens of the row. The records of
    later tokens are in a ring on the device. A step folds the tokens `[state_from, state_to)` of
    its plan into the state; see docs/contract.md, Recurrent state.

    A ledger with a state group refuses, with ConfigError: `pin_prefix`, `lend`, `rebind`,
    `admit_lent` and `watch_kv`.

    Args:
        name: the name in error messages; unique in a ledger.
        num_slots: all state slots; at least 1, and with `sessions` at least 2.
        flush: a round folds if at least this many resolved tokens are not in the slot. A greater
            number saves writes of states, and makes the ring longer.
        eager: whether a round of one node with nothing in flight folds its root too, because its
            position is certain.

    Raises:
        ConfigError: a value is out of range; the message names the group, the value and the range.
    """

    def __new__(
        cls, name: str, *, num_slots: int, flush: int = 1, eager: bool = False
    ) -> StateGroup: ...
    @property
    def name(self) -> str:
        """The group's name in error messages."""
    @property
    def num_slots(self) -> int:
        """All state slots, slot 0 excluded."""
    @property
    def flush(self) -> int:
        """A round folds if at least this many resolved tokens are not in the slot."""
    @property
    def eager(self) -> bool:
        """Whether a round of one node with nothing in flight folds its root too."""
    def ring_len(self, shapes: Sequence[Shape], *, overlap_depth: int = 0) -> int:
        """Return R, the records of a row's ring; see `Ledger.state_ring_len`.

        Args:
            shapes: all that may run.
            overlap_depth: rounds prepared ahead.

        Raises:
            ConfigError: `overlap_depth` is below 0 or above 2^31 - 1.
        """
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Plan:
    """One prepared forward: its rows, shapes, bounds and pages. A plan is immutable.

    `b` is the number of lanes, `len(plan)`. All arrays are read-only views into the plan, and keep
    it alive.
    """

    @property
    def step(self) -> int:
        """The step's number, from 1; never used twice."""
    @property
    def kind(self) -> Literal["extend", "decode"]:
        """Whether the step extends its rows ("extend") or runs one round of each ("decode")."""
    @property
    def writes_draft(self) -> bool:
        """Whether the step writes draft KV of the tokens that it keeps."""
    @property
    def rows(self) -> _I32:
        """[b]: each lane's row."""
    @property
    def shapes(self) -> _I32:
        """[b]: each lane's shape, an index into `Ledger.shapes` (0 in an extend)."""
    @property
    def epochs(self) -> NDArray[np.uint64]:
        """[b]: each row's epoch at prepare; a lane counts only while the row has this epoch."""
    @property
    def lo(self) -> _I32:
        """[b]: the least position of the root on the device (of an extend: its first position)."""
    @property
    def hi(self) -> _I32:
        """[b]: the greatest position of the root. The device clamps its length into [lo, hi]."""
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
        """[num_groups, b]: `allocated_len` after prepare."""
    @property
    def state_src(self) -> _I32:
        """[num_states, b]: the state slot that each lane reads; 0 is a state of zeros.

        num_states, the number of state groups, is 0 or 1.
        """
    @property
    def state_dst(self) -> _I32:
        """[num_states, b]: the state slot that each lane writes; 0 if it folds nothing."""
    @property
    def state_from(self) -> _I32:
        """[num_states, b]: c before the step, the tokens that `state_src` contains."""
    @property
    def state_to(self) -> _I32:
        """[num_states, b]: c after the step; the lane folds tokens `[state_from, state_to)`."""
    @property
    def page_copies(self) -> _I32:
        """[n, 4], a copy: (group, src page, dst page, tokens).

        Copy the first `tokens` slots of page src to page dst in every layer of the group. Do it in
        this order, before the step's forward.
        """
    def __len__(self) -> int: ...

@final
class BlockPool:
    """Blocks without rows: for an engine that keeps its own rows and lengths.

    A block is a page of `block_size` tokens. It is free; held, once or more; cached: held by
    nobody, its content known; or fenced: dropped, but a step may still touch it. Cached blocks are
    given up when free ones do not suffice: first the one that was used least recently, and before
    it what continues it.

    A call that raises has changed nothing. Block ids are int32. Where blocks or tokens are taken,
    a NumPy array of int32 or int64, a CPU tensor, or a list will do; an int32 array is fastest.

    Examples:
        >>> from specpool import BlockPool
        >>> pool = BlockPool(8, 4)  # 8 blocks of 4 tokens
        >>> prompt = [5, 6, 7, 8, 9, 10, 11, 12, 13]
        >>> blocks = pool.take(3, tag="request-1")
        >>> pool.put(prompt, blocks)  # its KV is computed: two blocks are whole
        array([0, 1], dtype=int32)
        >>> pool.drop(blocks)
        >>> pool.num_free, pool.num_cached
        (6, 2)
        >>> hit = pool.match(prompt)  # another request with the same prompt
        >>> new = pool.take(1, hold=hit, tag="request-2")
        >>> hit.tolist(), new.tolist()
        ([0, 1], [2])
    """

    def __new__(
        cls,
        num_blocks: int,
        block_size: int,
        *,
        first_id: int = 0,
        caching: bool = True,
        fencing: bool = False,
        digest: bool = False,
        record: str | PathLike[str] | None = None,
        record_limit: int = 1 << 30,
    ) -> BlockPool:
        """Create a pool of free blocks.

        Args:
            num_blocks: blocks in all.
            block_size: tokens of a block.
            first_id: id of the first block: 0, or 1 if the engine keeps block 0 for padding.
            caching: whether `put` keeps what blocks hold. Without it `match` finds nothing.
            fencing: whether `drop` may name a step that still touches the blocks.
            digest: whether a digest of the calls is kept, for ranks to compare.
            record: a file for the event log; see `replay`. The digest is kept then. None takes the
                environment variable SPECPOOL_RECORD, as `Ledger` does.
            record_limit: most bytes of the log. At the limit it ends, and the pool goes on.

        Raises:
            ConfigError: a setting is out of its range.
            RecordError: the file cannot be written.
        """
    @staticmethod
    def replay(
        path: str | PathLike[str],
        *,
        most: int | None = None,
        show: Callable[[int, str, str | None], object] | None = None,
    ) -> tuple[BlockPool, int, str | None]:
        """Run an event log again.

        Args:
            path: the log.
            most: stop after this many calls; None = at the log's end.
            show: called after each call, with its number from 1, its text (`take(2) -> [0, 1]`)
                and its tag, if there is one. What it raises ends the replay.

        Returns:
            the pool in its last state; how many calls that took; and how the log ends: closed,
            limit or open (its writer still runs, or died), or None: the replay stopped before.

        Cost: that of the calls.

        Raises:
            RecordError: the file is no log of a pool, is damaged, or the replay does something
                else than the pool did. The message has the call, its place and both digests.
        """
    def close(self) -> None:
        """Write the log out, and refuse every verb from now on; queries stay.

        Raises:
            RecordError: the log cannot be written; another call tries again.
        """
    def sync(self) -> None:
        """Write the calls that wait in memory to the log, if there is one.

        The file can then be read up to the latest call, as the log of a writer that still runs.

        Raises:
            RecordError: the log cannot be written; another call tries again.
        """
    def __enter__(self) -> BlockPool: ...
    def __exit__(self, *_error: object) -> None: ...
    @property
    def digest(self) -> int | None:
        """Hash of all calls that changed the pool and of the blocks that they gave, if kept."""
    @property
    def num_blocks(self) -> int:
        """Blocks in all."""
    @property
    def block_size(self) -> int:
        """Tokens of a block."""
    @property
    def first_id(self) -> int:
        """Id of the first block: 0 or 1."""
    @property
    def caching(self) -> bool:
        """Whether `put` keeps what blocks hold."""
    @property
    def fencing(self) -> bool:
        """Whether `drop` may name a step that still touches the blocks."""
    @property
    def num_free(self) -> int:
        """Blocks that hold nothing and can be taken. O(1)."""
    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds and whose content is known; they can be taken too. O(1)."""
    def available(self) -> int:
        """Return how many blocks can be taken: `num_free + num_cached`. O(1)."""
    @property
    def num_fenced(self) -> int:
        """Blocks that were dropped and that a step may still touch. O(1)."""
    @property
    def index_size(self) -> tuple[int, int]:
        """Blocks whose content is known, and how many were given up to make room. O(1)."""
    def index_bytes(self) -> int:
        """Return how many bytes the index takes in memory. O(num_blocks)."""
    def fits(self, count: int, hold: _IntArray | None = None) -> bool:
        """Return whether `take(count, hold)` would find enough blocks.

        Cost: O(len(hold)).

        Raises:
            ShapeError, PageStateError: as `take`, for a wrong `hold`.
        """
    @overload
    def take(
        self,
        count: int,
        hold: _IntArray | None = None,
        tag: str | None = None,
        of: None = None,
        *,
        int64: Literal[True],
    ) -> _I64: ...
    @overload
    def take(
        self,
        count: int,
        hold: _IntArray | None,
        tag: str | None,
        of: list[_T],
        *,
        int64: Literal[False] = False,
    ) -> list[_T]: ...
    @overload
    def take(
        self,
        count: int,
        hold: _IntArray | None = None,
        tag: str | None = None,
        of: None = None,
        *,
        int64: Literal[False] = False,
    ) -> _I32:
        """Take `count` blocks and hold those of `hold` once more: all of it or nothing.

        `hold` are blocks that the request shares: a hit of `match`, or another request's blocks.
        If free blocks do not suffice, cached ones are given up.

        Args:
            count: how many new blocks.
            hold: ids of held or cached blocks.
            tag: the request's name, which errors and records give for the new blocks. Blocks of
                `hold` keep the name of the request that took them.
            of: the engine's own object of each block, by its id.
            int64: return int64, for an engine whose slots are.

        Returns:
            ids of the new blocks, int32 [count]; with `of` a list of their objects, which for a few
            blocks takes less time than an array.

        Cost: O(count + len(hold)).

        Raises:
            ShapeError: `count` is negative; the pool has no such block; `of` is too short.
            PageStateError: a block of `hold` is neither held nor cached.
            OutOfPages: `count` is more than free and cached blocks, those of `hold` not counted.
            OutOfMemory: the machine has no memory for it.
        """
    def hold(self, blocks: _IntArray | int) -> None:
        """Hold a block, or blocks, once more, all of them or none: `take(0, blocks)` in less time.

        Cost: O(len(blocks)).

        Raises:
            ShapeError, PageStateError: as `take`.
        """
    def preview(self, count: int | None = None) -> _I32:
        """Return the blocks that `take(count)` would give, in order, int32 [n]; change nothing.

        Fewer if fewer can be taken; without `count` all of them.

        Cost: O(num_blocks).

        Raises:
            ShapeError: `count` is negative.
        """
    def drop(self, blocks: _IntArray, after: int | None = None, *, tag: str | None = None) -> None:
        """Let go of each block once; a block may be named as often as it is held.

        A block that nobody holds any more is free, or cached if its content is known. The last
        block of a call is given up first, because it is the end of a text. A pool counts holds, and
        does not know whose they are: a request that drops a shared block twice takes another one's
        hold, and the error comes when that one drops. So empty your list when you drop it.

        Args:
            blocks: their ids, in the order of the text.
            after: number of the last step that may still touch them; `complete` ends the wait.
            tag: the name of the request that drops them, for this call's error and later ones.

        Cost: O(len(blocks)).

        Raises:
            ShapeError: the pool has no such block; `after` is given, but `fencing` is off.
            PageStateError: a block is held less often than it is named. The message has its id, the
                tags that took and dropped it last, and its last verb.
        """
    def match(self, tokens: _IntArray, salt: bytes = b"", *, limit: int | None = None) -> _I32:
        """Return the blocks of the longest known beginning of `tokens`, int32 [n].

        They are whole blocks, of at most `limit` tokens (by default all). An engine that needs the
        last token's forward passes `limit=len(tokens) - 1`. It changes nothing: pass the blocks to
        `take` as `hold`.

        Cost: O(len(tokens)).

        Raises:
            ShapeError: `limit` is not in 0..=len(tokens); the salt has over 256 bytes.
        """
    def put(self, tokens: _IntArray, blocks: _IntArray, start: int = 0, salt: bytes = b"") -> _I32:
        """Note what blocks hold, once their KV is computed; `match` finds it from now on.

        `blocks[i]` holds `tokens[i * block_size : (i + 1) * block_size]`. A last piece of fewer
        tokens is left out. The caller holds the blocks, and must not write them again.

        Args:
            tokens: the text from its beginning.
            blocks: blocks of the text from its beginning.
            start: how many of the blocks were noted before, or come from `match`.
            salt: texts of different salts never meet.

        Returns:
            for each whole block from `start` on the one that is known for these tokens, int32 [n]:
            the same, or another that was first.

        Cost: O(len(tokens)). If the block before `start` is known, the tokens before it are not
        read.

        Raises:
            ShapeError: there are fewer blocks than the tokens fill; `start` is behind them; the
                salt has over 256 bytes; the pool has no such block.
            PageStateError: a block is not held, is named twice, or is known to hold other tokens.
            OutOfMemory: the machine has no memory for it.
        """
    def keep(self, blocks: _IntArray | int) -> None:
        """Note that an index of your own knows what a block holds, or blocks.

        When nobody holds such a block any more it is cached, not free: `take` gives it up after
        the free ones, the least recently used first, and you forget it when `take` returns it.
        `match` does not find it. A block that is kept already stays as it is. Without caching this
        does nothing.

        Cost: O(len(blocks)).

        Raises:
            ShapeError: the pool has no such block.
            PageStateError: a block is not held, or `put` has noted it.
        """
    def unkeep(self, blocks: _IntArray) -> None:
        """Undo `keep`: a block that nobody holds is free. One that is not kept stays as it is.

        Cost: O(len(blocks)).

        Raises:
            ShapeError: the pool has no such block.
            PageStateError: `put` has noted a block; `forget` undoes that.
        """
    def forget(self, salt: bytes | None = None) -> None:
        """Forget what blocks hold, of one salt, or of all and of `keep`. Held ones stay held.

        Cost: O(blocks forgotten); without a salt O(num_blocks).

        Raises:
            ShapeError: the salt has over 256 bytes.
        """
    def complete(self, step: int) -> None:
        """Note that all steps up to `step` are complete: blocks dropped after them can be taken.

        Cost: O(num_fenced).

        Raises:
            ShapeError: `fencing` is off.
            OrderError: a later step is complete already.
        """
    def refs(self, block: int) -> int:
        """Return how often a block is held. O(1).

        Raises:
            ShapeError: the pool has no such block.
        """
    def record_of(self, block: int) -> tuple[str, int, str | None, int, str]:
        """Return a block's state, how often it is held, its last tag, its fence and its last verb.

        The state is free, owned (held once, content not known), shared, fenced or cached. The fence
        is the latest step that `drop` named since it was taken, or 0.

        Cost: O(1).

        Raises:
            ShapeError: the pool has no such block.
        """
    def taken(self) -> _I32:
        """Return the blocks that cannot be taken: held or fenced, ascending, int32 [n].

        At the end of a run its length is 0, or blocks have leaked
        (`specpool.testing.assert_no_page_leaked` names them).

        Cost: O(num_blocks).
        """
    def state_hash(self) -> int:
        """Return a hash of everything that decides what the pool will do. O(num_blocks)."""
    def audit(self) -> list[str]:
        """Return every broken rule of the pool itself, with the numbers. O(num_blocks)."""
    def check(self) -> None:
        """Check every rule of the pool itself. O(num_blocks).

        Raises:
            CorruptState: a rule is broken.
        """

@final
class Finding:
    """One broken rule that an audit found. Attributes that are not known are None."""

    @property
    def group(self) -> int | None:
        """Index of the group."""
    @property
    def page(self) -> int | None:
        """The page of that group; 0 if a row holds the sink."""
    @property
    def row(self) -> int | None:
        """The row; it may also be row 0, or a row that is not live."""
    @property
    def text(self) -> str:
        """The broken rule, with the numbers."""

@final
class Snapshot:
    """A saved state of a ledger with nothing in flight, for `Ledger.restore`."""

    @property
    def number(self) -> int:
        """The snapshot's number within its ledger, from 1."""

@final
class Ledger:
    """The ledger of pages, rows, lengths and steps, and the rules between them.

    Rows are `1..=num_rows`, pages `1..=num_pages`; row 0 and page 0 are padding. A refused call
    changes nothing. The array properties are read-only views of the ledger's own memory. They show
    every later change, for the ledger's whole life. A row that is not admitted reads 0 in all of
    them but `epoch`, which never goes back.

    `rows`, `new_lens`, `shapes`, `accept_lens` are int32 or int64 arrays [b] or sequences of ints.
    A wrong dtype, dimension or length, an unknown or repeated row, and an unknown group or shape
    raise ShapeError.

    A verb that takes something raises OutOfMemory (a MemoryError) if the machine has too little
    memory, and changes nothing. Verbs that give back (`launch`, `complete`, `cancel`, `abandon`,
    `trim`, `end_turn`, `retract`, `finish`, `abort`, `release_prefix`) need no memory, and
    `release_lent` none unless calls are noted. CorruptState
    means that a verb panicked; afterwards the ledger can only be closed.

    Args:
        groups: at least one.
        shapes: all shapes that may ever run. Shape 0 is put first if it is not.
        num_rows: rows, without row 0.
        max_context_len: L, tokens of the longest sequence, at least 2.
        max_batch: the most rows in one step; None means `num_rows`.
        overlap_depth: D, rounds that may be prepared before the previous one is resolved.
        policy: "exact" reserves what a round can write, "double_buffer" what SGLang reserves.
        row_width: slots of a row per group; None takes the least that suffices.
        draft_kv: False for drafters without draft KV (n-gram): `DraftLag` is never raised.
        max_chunk: the most tokens of one extend; None sets no limit. A window group needs pages for
            its window and a chunk.
        sessions: whether `end_turn` may be used; a window group then needs pages for a checkpoint
            too.
        page_fencing: False for an engine whose forwards and copies all run on one stream: released
            pages are free at once. Rows wait for their fences in any case.
        digest: whether to keep the running digest.
        states: the slots for recurrent state, at most one group, which holds the states of all
            recurrent layers; empty if every layer has KV.
        record: path of an event log (`specpool replay`, `specpool inspect`), created or emptied. A
            recorded ledger keeps the digest. None takes the environment variable SPECPOOL_RECORD,
            if it is set: `%p` in it becomes the process id, and ledgers and pools after a process's
            first get `.2`, `.3`, .. appended. A file that another ledger is writing is refused.
        record_limit: the most bytes of the log. At the limit the log ends with a record that says
            so, and the ledger goes on unrecorded.

    Records are kept in memory and written at the start of a later verb. If they cannot be written,
    the verb raises RecordError and changes nothing; it works again once there is room.

    Raises:
        ConfigError: a setting is wrong; the message has its name, its value and the allowed range.
        RecordError: the log cannot be written, or `record_limit` is less than the log's head.
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
        states: Sequence[StateGroup] = (),
        record: str | PathLike[str] | None = None,
        record_limit: int = 1073741824,
    ) -> Ledger: ...
    @property
    def groups(self) -> list[Group]:
        """The description of each group, by group index.

        Cost: O(groups).
        """
    @property
    def shapes(self) -> list[Shape]:
        """All shapes, shape 0 first; `prepare_decode` takes indices into this list.

        Cost: O(shapes).
        """
    @property
    def num_rows(self) -> int:
        """All rows, without row 0.

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
        """The most rows in one step.

        Cost: O(1).
        """
    @property
    def overlap_depth(self) -> int:
        """D, rounds that may be prepared before the previous one is resolved.

        Cost: O(1).
        """
    @property
    def policy(self) -> _Policy:
        """The policy, "exact" or "double_buffer": how much is reserved for a round.

        Cost: O(1).
        """
    @property
    def draft_kv(self) -> bool:
        """Whether drafting needs draft KV, so that `DraftLag` can be raised.

        Cost: O(1).
        """
    @property
    def max_chunk(self) -> int | None:
        """The most tokens of one extend; None if there is no limit.

        Cost: O(1).
        """
    @property
    def sessions(self) -> bool:
        """Whether the ledger was built for `end_turn`.

        Cost: O(1).
        """
    @property
    def page_fencing(self) -> bool:
        """Whether released pages wait for the launched steps that may touch them.

        Cost: O(1).
        """
    @property
    def closed(self) -> bool:
        """Whether `close` was called.

        Cost: O(1).
        """
    @property
    def digest(self) -> int | None:
        """The running 64-bit hash of every successful state-changing call and its results.

        Ranks that made the same calls have equal digests. Tags, deltas, queries and the accept_lens
        of dropped lanes do not count. None unless the ledger was built to keep it.

        Cost: O(1).
        """
    @property
    def completed(self) -> int:
        """The newest step such that it and all steps before it have finished on the device.

        Cost: O(1).
        """
    @property
    def prefixes(self) -> list[int]:
        """The ids of the pinned prefixes, ascending.

        Cost: O(prefixes).
        """
    def state_hash(self) -> int:
        """Return a 64-bit hash of all state that decides what the ledger will do.

        Tags, deltas, the counters of steps, prefixes and snapshots, and the digest do not count. A
        refused call leaves the hash as it was; so does a cancelled prepare that evicted nothing.

        Cost: O(num_rows + pages that rows hold + pages ever handed out), per group.
        """
    def steps(
        self,
    ) -> list[
        tuple[
            int, Literal["extend", "decode"], Literal["prepared", "stale", "launched", "resolved"]
        ]
    ]:
        """Return (step, kind, state) of the steps in flight, oldest first.

        A step that is over stays listed while an older step waits for its resolve.

        Cost: O(steps in flight).
        """
    def tag(self, row: int) -> str | None:
        """Return the tag of the row's request; it stays after the row's release.

        Cost: O(1), plus the copy of the name.
        """
    def is_live(self, row: int) -> bool:
        """Return whether the row is admitted.

        Cost: O(1).
        """
    def check_quiet(self, row: int) -> None:
        """Refuse a row that anything in flight may still write.

        For a quiet row, all KV below `resolved_len` is written and stays.

        Cost: O(steps in flight + page copies that ride on them or wait).

        Raises:
            NotReady: a step of the row is in flight, its last launched step is not complete, or a
                page copy into it is not finished.
        """
    def checkpoint_len(self, row: int) -> int | None:
        """Return the tokens of the row's checkpoint, which `end_turn` set; None = there is none.

        Cost: O(1).
        """
    def prefix_len(self, prefix: int) -> int:
        """Return the tokens of a pinned prefix.

        Cost: O(log prefixes).

        Raises:
            ShapeError: there is no such prefix.
        """
    def row_width(self, group: int) -> int:
        """Return the slots of a row in the group, a multiple of its page size.

        Cost: O(1).
        """
    def pages_per_row(self, group: int) -> int:
        """Return the columns of the group's page table.

        Cost: O(1).
        """
    def free_pages(self, group: int) -> int:
        """Return the number of pages that can be handed out now.

        Cost: O(1).
        """
    def fenced_pages(self, group: int) -> int:
        """Return the number of released pages that a launched step may still touch.

        They become free once that step is complete.

        Cost: O(1).
        """
    def pinned_pages(self, group: int) -> int:
        """Return the number of pages that pinned prefixes hold, each counted once.

        Rows may share these pages.

        Cost: O(n log n) for n pages, counted once for each prefix that holds them.
        """
    def reclaimable_pages(self, group: int) -> int:
        """Return the number of pages that idle rows hold and no other row or pinned prefix.

        Cost: O(1).
        """
    def cached_pages(self, group: int) -> int:
        """Return the number of pages that the prefix index alone holds.

        They can be handed out, after the free ones.

        Cost: O(1).
        """
    def lent_pages(self, group: int) -> NDArray[np.int32]:
        """Return the pages that a prefix cache outside holds, ascending, int32 [n].

        Cost: O(pages).
        """
    def held_cells(self, group: int) -> int:
        """Return the number of cells of the page table that hold a page, over all rows.

        Cost: O(1).
        """
    def shared_pages(self, group: int) -> int:
        """Return the number of shared pages: read-only, held by rows or pinned prefixes.

        Cost: O(1).
        """
    @property
    def index_size(self) -> tuple[int, int, int]:
        """Entries of the prefix index, their tokens, and how often one was given up to make room.

        A page below a window that was given up counts too.

        Cost: O(1).
        """
    def index_bytes(self) -> int:
        """Return the bytes that the prefix index takes in memory, without the pages.

        Cost: O(entries).
        """
    def index_entries(self) -> list[tuple[bytes, int, _I32, int, list[_I32]]]:
        """Return the entries of the prefix index: salt, start, tokens, drafted, pages per group.

        `start` is the number of tokens before the entry, `drafted` how many of its tokens have
        draft KV. A page that was given up is 0.

        Cost: O(entries).
        """
    def page_record(self, group: int, page: int) -> tuple[str, int, int, str]:
        """Return a page's state, owner, birth step and last verb.

        The state is free, owned, shared, fenced or cached. The owner is the row that took the page,
        and the birth step is the step that it was taken for.

        Cost: O(1).
        """
    def ownership_map(
        self, group: int, *, taken: bool = False
    ) -> tuple[NDArray[np.uint8], _I32, _I32]:
        """Return copies of all pages' states, owners and numbers of holders, [num_pages + 1] each.

        States are 0 free, 1 owned, 2 shared, 3 fenced, 4 cached; page 0 is the sink. An owner is
        the row that took the page. The prefix index counts as a holder. With `taken` the arrays end
        after the last page that was ever handed out: all later pages are free.

        Cost: O(num_pages); with `taken`, O(pages ever handed out).

        Raises:
            OutOfMemory: there is no memory for the arrays; every query that copies may raise it.
        """
    def live_rows(self) -> _I32:
        """Return the admitted rows, ascending, [n].

        Cost: O(num_rows).
        """
    def page_table(self, group: int) -> _I32:
        """Return a view of the page table, [num_rows + 1, pages_per_row].

        Cells from a row's `allocated_len / P` on are 0.

        Cost: O(1).
        """
    def full_table(self, group: int) -> _I32:
        """Return a copy of `page_table`, for a new table on a device.

        Cost: O(num_rows * pages_per_row).
        """
    def allocated_len(self, group: int) -> _I32:
        """Return a view, [num_rows + 1]: slots that each row holds, a multiple of P.

        Cost: O(1).
        """
    def protected_len(self, group: int) -> _I32:
        """Return a view, [num_rows + 1]: p, tokens whose pages others may read.

        They are never written again. p is a multiple of P, unless the prefix index holds a partly
        filled page of the row.

        Cost: O(1).
        """
    def evicted_len(self, group: int) -> _I32:
        """Return a view, [num_rows + 1]: e, slots below the window that were given back.

        The sink's slots stay.

        Cost: O(1).
        """
    @property
    def idle(self) -> _Bool:
        """[num_rows + 1], view: whether the row is between two turns of a session.

        Cost: O(1).
        """
    @property
    def resolved_len(self) -> _I32:
        """[num_rows + 1], view: r, tokens whose KV is final (an extend's tokens count at prepare).

        Cost: O(1).
        """
    @property
    def in_flight(self) -> _I32:
        """[num_rows + 1], view: k, rounds prepared and not resolved.

        Cost: O(1).
        """
    @property
    def drafted_len(self) -> _I32:
        """[num_rows + 1], view: positions below it have valid draft KV.

        Cost: O(1).
        """
    @property
    def epoch(self) -> NDArray[np.uint64]:
        """[num_rows + 1], view: a counter of the row's cuts and releases.

        trim, end_turn, abandon, retract, finish, abort and restore raise it.

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
        """Take a free row and return it; `tag` names the request in error messages.

        With a prefix the row starts with the prefix's first `length` tokens (default: all). It
        shares their whole pages, and takes a page for the copy of a partly filled tail. The next
        prepared step carries that copy.

        Raises:
            ShapeError: there is no such prefix, or `length` is not in 0..= its length.
            NotReady: the prefix does not hold the window below `length`.
            OutOfRows: no row is free.
            OutOfPages: there is no page for the tail.
        """
    @property
    def states(self) -> list[StateGroup]:
        """The descriptions of the state groups; at most one.

        Cost: O(1).
        """
    def state_slot(self, group: int) -> _I32:
        """Return a view of the state slot of each row, [num_rows + 1]; 0 before its first fold.

        Cost: O(1).

        Raises:
            ShapeError: there is no such state group; so do all methods that take one.
        """
    def state_len(self, group: int) -> _I32:
        """Return a view of c, the tokens that each row's state contains, [num_rows + 1].

        A prepare moves it. Cost: O(1).
        """
    def kept_state(self, group: int, row: int) -> tuple[int, int] | None:
        """Return the (state slot, tokens) that `end_turn` keeps for the row; None if there is none.

        Cost: O(1).
        """
    def free_state_slots(self, group: int) -> int:
        """Return the number of state slots that can be taken now.

        Cost: O(1).
        """
    def fenced_state_slots(self, group: int) -> int:
        """Return the number of state slots given back that a launched step may still touch.

        Cost: O(1).
        """
    def reclaimable_state_slots(self, group: int) -> int:
        """Return the number of state slots whose every holder is an idle row.

        Cost: O(1).
        """
    def cached_state_slots(self, group: int) -> int:
        """Return the number of state slots that only soft marks and the prefix index hold.

        They can be taken too, after the free ones. Cost: O(1).
        """
    def soft_marks(self, group: int, row: int) -> list[tuple[int, int]]:
        """Return the (state slot, tokens) that soft marks keep for the row, the oldest mark first.

        Cost: O(soft marks of all rows).
        """
    def index_states(self, group: int) -> list[tuple[int, int, int]]:
        """Return the states of the prefix index: (entry, state slot, tokens) each.

        The entry is a place in `index_entries()`; it has the last of the state's tokens.

        Cost: O(entries).
        """
    def state_ring_len(self, group: int) -> int:
        """Return R, the records that the device's ring of a row must hold; p lies at `p % R`.

        It is enough also if a forward writes the records of its nodes before it reads older ones.

        Cost: O(shapes).
        """
    def fork(self, row: int, tag: str | None = None) -> int:
        """Take a free row with the same tokens as `row`, and return it.

        The new row shares the whole pages of `row` and gets a copy of its partly filled tail. With
        a state group it has the c tokens of the state of `row`, and shares that state.

        Raises:
            NotReady: a step of the row is in flight, its last launched step is not complete, or a
                page copy into it is not finished; or a window below its state is not held.
            OutOfRows: no row is free.
            OutOfPages: there is no page for the tail.
        """
    def pin_prefix(self, row: int, length: int) -> int:
        """Keep the row's first tokens for later requests; return the prefix's id.

        The prefix has as many tokens as fill whole pages in every group, at most `length`. Its
        pages are shared and read-only until `release_prefix`.

        Raises:
            ConfigError: the ledger has a state group.
            ShapeError: `length` is not in 1..=resolved_len, or fills no whole page of every group.
            NotReady: a step that is not complete writes these pages, a page copy into the row is
                not finished, or the window below the prefix's end is not held.
        """
    def release_prefix(self, prefix: int) -> None:
        """Stop keeping the prefix's pages; rows that share them go on.

        Raises:
            ShapeError: there is no such prefix.
        """
    def lend(self, row: int, start: int, end: int) -> None:
        """Make a prefix cache outside the ledger a holder of the row's pages of `[start, end)`.

        For an engine that keeps its own radix tree. The pages are read-only from now on, in every
        group, and outlive the row until `release_lent`. The cache reads them from the row of each
        `page_table`; where a window has passed, there is none. `start` and `end` are multiples of
        all page sizes, and `start` is at most `protected_len`.

        Cost: O(pages).

        Raises:
            ConfigError: the ledger has a state group.
            ShapeError: a bound is no page edge of every group or past resolved_len, the range is
                empty, or it leaves a gap behind protected_len.
            NotReady: a step that is not complete writes these pages, or a page copy into the row is
                not finished.
            PageStateError: a page is lent already.
        """
    def rebind(self, row: int, start: int, end: int, pages: _IntArray) -> None:
        """Put lent pages in place of the row's own pages of `[start, end)`, which hold the same.

        For a row that has computed what the cache outside had already: it becomes a holder of the
        lent pages and gives its own back. `pages` int32 [n] has one for each column, group after
        group, and 0 where the row's window has passed. The caller vouches for the contents. Write
        the new cells of the table (`take_delta`) before the row's next forward.

        Cost: O(pages of the row).

        Raises:
            ConfigError: the ledger has a state group.
            ShapeError: as `lend`; a wrong number of pages; one that is named twice, that the row
                holds at another position, or that was lent without draft KV which the row has.
            PageStateError: a page is not lent.
            NotReady: as `lend`.
        """
    def admit_lent(self, pages: _IntArray, length: int, tag: str | None = None) -> int:
        """Take a free row on `length` tokens whose KV is in lent pages, and return it.

        `pages` int32 [n] has one for each column, group after group, and 0 for those below a
        window, behind its sink. The row shares them. It has no root until an extend of it has
        launched. Draft KV is valid up to the first page that was lent without.

        Cost: O(pages).

        Raises:
            ConfigError: the ledger has a state group.
            ShapeError: `length` is no multiple of all page sizes in 1..=L, the number of pages is
                wrong, one is named twice, or there is none within a sink or a window.
            PageStateError: a page is not lent.
            OutOfRows: no row is free.
        """
    def release_lent(self, group: int, pages: _IntArray) -> None:
        """Note that the cache outside holds these pages no longer: all or none. Rows keep theirs.

        Cost: O(pages).

        Raises:
            ShapeError: there is no such group or page, or a page is named twice.
            PageStateError: a page is not lent.
        """
    def export(self, row: int) -> int:
        """Give the row back and keep its tokens as a prefix, for another ledger; return its id.

        The prefix has exactly the row's `resolved_len` tokens, and every page that a row needs to
        go on from there, also a partly filled one. The pages are read-only until `release_prefix`;
        `prefix_pages` names them. `admit(prefix=...)` makes a row of them again, if they do not
        arrive. With a state group the prefix has the c tokens of the row's state, and holds its
        slot too, which `prefix_state_slot` names.

        Cost: O(pages).

        Raises:
            ShapeError: the row is not admitted, or has no tokens.
            NotReady: a step of the row is not complete, a page copy into it is not finished, its
                state has no tokens, or a window below them is not held.
        """
    def import_row(self, length: int, drafted_len: int, tag: str | None = None) -> int:
        """Take a free row of `length` tokens whose KV comes from elsewhere; return it.

        The row has pages of its own in every group, and none below the windows. With a state group
        it has a slot too, for the state of all its tokens. The caller writes them before the next
        launch, and behind every launched forward. If the KV does not arrive,
        `abort` takes the row back. The row has no root until an extend of it has launched.

        Cost: O(pages).

        Args:
            length: tokens.
            drafted_len: draft KV comes for the tokens below it.
            tag: the embedder's name for the request.

        Raises:
            ShapeError: `length` is not in 1..=max_context_len, or `drafted_len` not in 0..=length.
            OutOfRows: no row is free.
            OutOfPages: a group has too few pages, or the state group has no slot.
        """
    def prefix_pages(self, prefix: int, group: int) -> tuple[int, NDArray[np.int32]]:
        """Return the column of a prefix's first page in the group, and its pages, int32 [n].

        In a group with a sink, the pages of the sink's columns that lie before that column come
        first: `min(ceil(sink / P), column)` of them.

        Cost: O(pages).

        Raises:
            ShapeError: there is no such prefix or group.
        """
    def prefix_state_slot(self, prefix: int) -> int:
        """Return the state slot that has an export's tokens; 0 without a state group.

        Cost: O(log prefixes).

        Raises:
            ShapeError: there is no such prefix.
        """
    def prefix_drafted_len(self, prefix: int) -> int:
        """Return the length below which a prefix has draft KV.

        Cost: O(log prefixes).

        Raises:
            ShapeError: there is no such prefix.
        """
    def index(self, row: int, tokens: _IntArray, salt: bytes = b"") -> int:
        """Let later requests find the row's KV of `tokens`; return how many the index knows now.

        `tokens` [n] are the row's own from its start on, and their KV is final. Rows with different
        salts never share anything. The first row that indexes tokens keeps its pages in the index;
        another row keeps its own. The row never writes its indexed tokens again. The result is
        less than n only where a page of the row is in the index as part of other tokens.

        With a state group the index also takes the states that the row's soft marks keep, and the
        row's own, if they contain no more than these tokens and no unlaunched step writes them.

        Cost: O(n).

        Raises:
            ShapeError: there are no tokens, more than `resolved_len`, or a salt of over 256 bytes.
            NotReady: a step that is not complete writes these tokens, or a page copy into the row
                is not finished.
        """
    def match_prefix(
        self,
        tokens: _IntArray,
        salt: bytes = b"",
        *,
        limit: int | None = None,
        needs_draft: bool = False,
    ) -> tuple[int, list[int], list[int]]:
        """Return what `admit_cached` with the same arguments would find; it changes nothing.

        The result is the row's length, the pages of each group that it would share, and the pages
        of each group that it would take from those that can be handed out: cached ones, and one for
        a tail.

        Cost: O(n).

        Raises:
            ShapeError: as `admit_cached`.
        """
    def known_prefix(
        self, tokens: _IntArray, salt: bytes = b"", *, limit: int | None = None
    ) -> int:
        """Return how many of `tokens` [n] have their KV in the prefix index, up to `limit`.

        With a state group `admit_cached` may return fewer: it needs a state. End an extend of the
        new row at `known_prefix() + 1` tokens and keep its lane, and the next text that branches
        off there finds the state.

        Cost: O(n).

        Raises:
            ShapeError: as `admit_cached`.
        """
    def match_state(
        self, tokens: _IntArray, salt: bytes = b"", *, limit: int | None = None
    ) -> tuple[int, int]:
        """Return the state slot that `admit_cached` would share, and the tokens that it contains.

        Both are 0 if there is none. With the result less one as the next `limit`, it walks through
        all states of a text.

        Cost: O(n).

        Raises:
            ShapeError: as `admit_cached`.
        """
    def admit_cached(
        self,
        tokens: _IntArray,
        salt: bytes = b"",
        tag: str | None = None,
        *,
        limit: int | None = None,
        needs_draft: bool = False,
    ) -> int:
        """Take a free row that starts with the longest indexed beginning of `tokens`; return it.

        It starts with up to `limit` tokens: by default all but the last, whose forward gives the
        root. The row shares whole pages and takes a page for the copy of a partly used one. The
        next prepared step carries that copy. The length goes back to one whose windows are held,
        and with `needs_draft` to where draft KV is valid. With a state group it goes back to the
        longest state in the index that no incomplete step writes, and the row shares its slot.
        Without a hit the row is empty.

        Cost: O(n).

        Raises:
            ShapeError: `limit` is not in 0..=n, or the salt has over 256 bytes.
            OutOfRows: no row is free.
            OutOfPages: there is no page for the tail.
        """
    def forget(self, salt: bytes | None = None) -> None:
        """Drop everything that is indexed under the salt; None drops all. Rows keep their pages.

        Cost: O(entries).

        Raises:
            ShapeError: the salt has over 256 bytes.
        """
    def prepare_extend(
        self,
        rows: _IntArray,
        new_lens: _IntArray,
        *,
        writes_draft: bool = True,
        keep: _IntArray = (),
    ) -> Plan:
        """Prepare a prefill or a chunk of it: claim pages for `new_lens` tokens of each row.

        All rows get their pages, or none does. `resolved_len` becomes `new_lens` at once. The step
        is in flight until `complete`; it has no resolve.

        `keep` has lanes, as ascending places in `rows`, and needs a state group. Such a lane leaves
        a soft mark on its state of `new_len - 1` tokens: `index` takes it although later steps fold
        on. The mark goes with a cancel, a cut below it and the row, and gives way if free and
        cached slots do not suffice.

        Raises:
            ConfigError: lanes are kept, and there is no state group.
            ShapeError: `new_len <= resolved_len`, or the rows are not 1..=max_batch many, or `keep`
                is not ascending or has a lane that is not there, or as described at the class.
            NotReady: a stale step is not cancelled, or the row has rounds in flight or an
                unlaunched extend.
            ContextEnd: lists every row whose new length is past L.
            OutOfPages: states need, free and fenced pages of the group, or those slots of the state
                group.
        """
    def tokens_required(self, rows: _IntArray, shapes: _IntArray | int) -> NDArray[np.int64]:
        """Return the slots of each group that `prepare_decode` would take, [num_groups].

        `shapes` is one index into `shapes` for all rows, or one for each.

        Cost: O(num_rows + groups * b).
        """
    def pages_needed(self, lo: int, hi: int, shape: int) -> NDArray[np.int64]:
        """Return the most pages of each group that a row with all roots in `[lo, hi]` can hold.

        `shape` is an index into `shapes`. For a full group, at most one round is in flight. For a
        window group the bound holds for all that the row can do: rounds of any shape, D in flight,
        and an extend of up to `lo` tokens.

        Cost: O(groups * shapes).

        Raises:
            ShapeError: not `0 <= lo <= hi < max_context_len`, or the shape is unknown.
        """
    def pages_ahead(
        self, lens: _IntArray, shapes: _IntArray | int, growth: int
    ) -> NDArray[np.int64]:
        """Return the pages of each group that rows need for their next round, [n, num_groups].

        Row i holds `lens[i]` tokens, grows by up to `growth` more, and then has a round of shape
        `shapes[i]`; one index stands for all rows. The lengths need not be those of rows of the
        ledger. Pages that a row shares count as its own. A full group gives `pages_needed` of the
        roots `[len, len + growth]`, cut to the context. A window group gives the most that the row
        holds without the chunk of an extend, because one extend at a time runs for all rows.

        Cost: O(n * groups).

        Raises:
            ShapeError: `growth` is below 0, a length is not in [0, max_context_len), a shape is
                unknown, or there are not as many shapes as lengths.
        """
    def held_pages(self, rows: _IntArray) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the pages of each group that rows hold, and how many of them are shared.

        Both are [n, num_groups]. Two rows may hold the same shared page; `shared_pages` counts it
        once. Pages that only a session's checkpoint keeps are not counted.

        Cost: O(num_rows + n * groups).

        Raises:
            ShapeError: a row is not admitted, or is named twice.
        """
    def tail_pages(self, length: int) -> NDArray[np.int64]:
        """Return the pages of each group that `length` tokens fill only in part, 0 or 1 each.

        A row that begins with as many tokens of another one's text copies these pages. The array
        is [num_groups].

        Cost: O(num_groups).

        Raises:
            ShapeError: `length` is below 0.
        """
    def prepare_decode(
        self, rows: _IntArray, shapes: _IntArray | int, *, writes_draft: bool = True
    ) -> Plan:
        """Prepare one round of each row, each with its own shape: claim pages for all, or for none.

        `shapes` is one index into `shapes` for all rows, or one for each.

        Raises:
            NotReady: a stale step is not cancelled, or no extend of the row has launched since its
                admit or trim.
            ContextEnd: lists every row with `resolved_len >= L`.
            OrderError: the row has D + 1 rounds in flight.
            DraftLag: a drafting shape after a round with `writes_draft=False`.
            RowOverflow: the claim would pass the row width.
            OutOfPages: states need, free and fenced pages of the group, or those slots of the state
                group.
        """
    def launch(self, step: int) -> None:
        """Mark the step as launched: from now on the device may touch its pages.

        Call it before the first copy, table delta or kernel of the step.

        Raises:
            OrderError: it is not the oldest unlaunched step.
            StalePlan: a row of it was released since prepare; cancel the step.
        """
    def resolve(self, step: int, accept_lens: _IntArray) -> None:
        """Count a round's accepted tokens: add `accept_lens` [b], bonus included, to the rows.

        A row's rounds are resolved oldest first. Lanes whose row was released since prepare are
        dropped, and their entries are not read.

        Raises:
            OrderError: the step is an extend, is not launched or is already resolved, or an older
                round is unresolved.
            ShapeError: an entry is outside `1..=A` of its lane's shape.
        """
    def complete(self, step: int) -> None:
        """Mark the step and every step before it as finished on the device.

        Pages that were fenced for these steps become free.

        Raises:
            OrderError: the step is not launched, or was cancelled.
        """
    def cancel(self, step: int) -> None:
        """Undo the newest unlaunched step, also a stale one; its pages are free at once.

        Raises:
            OrderError: the step is launched, or not the newest.
        """
    def abandon(self, step: int) -> None:
        """Give up a launched step whose forward failed.

        Retract the step's rows and the rows that its page copies went to. Rows that were released
        since prepare are left alone; rows that were cut since are retracted too. A decode needs no
        resolve afterwards. The pages stay fenced until `complete` reaches the step: call that after
        a synchronise or a reset of the device.

        Raises:
            OrderError: the step is not launched, is complete, or is abandoned already.
        """
    def trim(self, row: int, length: int) -> int:
        """Cut the row to at most `length` tokens, and return its new `resolved_len`.

        The new length is at most what launched forwards have written. It is less than `length` if
        the window below is no longer held, or at a page edge if `length` is inside shared pages.
        Below c, the tokens in the row's state, it is a length at which a state is held: that of the
        checkpoint, or 0.
        Rounds in flight no longer count, but a root that is already written does.

        Prefill from the new length before the next round, and set the device's length to it in
        stream order before the row's next forward. Exception: a trim to `resolved_len` with nothing
        in flight only frees the reserve; rounds may go on.
        """
    def end_turn(self, row: int, length: int) -> int:
        """Trim the row, and make it idle until its next prepare; return its new `resolved_len`.

        The row's pages count as reclaimable. The windows below the new `resolved_len` are held as
        its checkpoint until the next `end_turn`, or a trim below it. With a state group, the row's
        state is held too, and the checkpoint has the c tokens of that state if the windows below c
        are held.

        Cost: O(pages of the row). The prepare or release that ends the idle time costs as much.

        Raises:
            ConfigError: there are window groups or a state group, and the ledger was built without
                `sessions`.
        """
    def retract(self, row: int) -> None:
        """Release a row whose request will come back."""
    def finish(self, row: int) -> None:
        """Release a row whose request is done."""
    def abort(self, row: int) -> None:
        """Release a row whose request was aborted."""
    def take_delta(self, step: int) -> list[tuple[_I32, _I32, _I32]]:
        """Return the pending changes of each page table as (rows [n], columns [n], pages [n]).

        There is one entry for each changed cell that is not acknowledged, with its current value.
        Call it between the step's launch and its forward. It can be repeated until `ack_delta`.

        Raises:
            OrderError: the step is not in flight.
            OutOfMemory: there is no memory for the arrays.
        """
    def ack_delta(self, step: int) -> None:
        """Acknowledge the delta taken for `step`: drop all entries that have not changed since.

        Raises:
            OrderError: no delta of the step is waiting.
        """
    def watch_kv(self) -> None:
        """Start to note what `take_kv_events` tells: what the rows hold now, and every change.

        Called again, it starts anew. Cost: O(rows).

        Raises:
            ConfigError: the ledger has a state group.
            OutOfMemory: there is no memory for the notes.
        """
    def take_kv_events(self) -> list[tuple[Any, ...]]:
        """Return what a KV connector must know, since the last call: what is void, moved, verified.

        Each event is a tuple of its kind, its row and numbers, in this order of kinds:

        - `("rewind", row, len)`: what lies at position `len` or behind it is void in every group;
          0 if the row was given back.
        - `("evict", row, group, start, end)`: positions `start..end` have left a window group.
        - `("move", row, group, src, dst, tokens)`: a copy of verified KV from page `src` to page
          `dst` is done. A commit names the positions too.
        - `("commit", row, group, start, end)`: these positions hold verified KV, and every step
          that writes them is complete. They lie where the row's page table says.

        Call it before each launch: then no position that was told is overwritten before its rewind
        or evict. See docs/contract.md, KV events. Cost: O(rows + lanes in flight).

        Raises:
            OrderError: `watch_kv` was not called.
            OutOfMemory: there is no memory for the events; none is lost.
        """
    def snapshot(self) -> Snapshot:
        """Save the whole state.

        Raises:
            NotReady: a step is not over.
            OutOfMemory: there is no memory for a second state.
        """
    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a saved state of this ledger, or of a ledger with the same configuration.

        Epochs, step and prefix numbers never go back. Table cells that differ become deltas. The
        caller must restore the content of the pages and state slots on the device.

        Raises:
            NotReady: a step is not over.
            ConfigError: the snapshot is of a ledger with another configuration; or this ledger is
                recorded, and the snapshot is of another ledger.
            OutOfMemory: there is no memory for the change.
        """
    def close(self) -> None:
        """Close the ledger: every later verb raises OrderError; queries and views still work.

        A second call does nothing.

        Raises:
            RecordError: the event log cannot be written. The ledger is closed; a further call
                tries again.
        """
    def __enter__(self) -> Ledger: ...
    def __exit__(self, *_error: object) -> None: ...
    def audit(self) -> list[Finding]:
        """Check every page and row; return the broken rules, empty if all is well.

        Cost: O(pages ever handed out + table cells).

        Raises:
            OutOfMemory: there is no memory for the counts.
        """
    def check(self) -> None:
        """Raise CorruptState if `audit` finds anything.

        Cost: O(pages ever handed out + table cells).

        Raises:
            CorruptState: the message has one line for each broken rule.
        """

@final
class SuffixIndex:
    """What followed the end of a text before, with counts, in bounded memory.

    A suffix automaton of the texts, which grows token by token. Counts are exact for contexts of at
    most `max_context` tokens. A token costs at most `max_context` steps and about 300 bytes. Half
    of the tokens are forgotten at once when there are more than `max_tokens`.

    Args:
        max_tokens: the most tokens that are known, in `[2, 2^28]`.
        max_context: the longest context that is counted, in `[1, 256]`.

    Raises:
        ConfigError: a number is out of range.
    """

    def __new__(cls, max_tokens: int, *, max_context: int = 32) -> SuffixIndex: ...
    def begin(self) -> int:
        """Begin an empty text, and return its number. Texts may grow side by side."""

    def end(self, text: int) -> None:
        """Drop a text's place. What it said stays known until it is forgotten.

        Raises:
            ConfigError: there is no such text.
        """

    def extend(self, text: int, tokens: Sequence[int]) -> None:
        """Add tokens to the end of a text.

        Raises:
            ConfigError: there is no such text, or a token is below 0.
        """

    def best(self, text: int) -> tuple[int, float]:
        """Return how much of a text's end is known, and how likely its best continuation is.

        Returns:
            The tokens of the text's end that occurred before with something after them, and the
            share of the commonest token after them; 0 and 0.0 if nothing is known.

        Raises:
            ConfigError: there is no such text.
        """

    def propose(
        self, text: int, *, num_steps: int, topk: int, num_draft_tokens: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.float32], int]:
        """Propose the likeliest continuations of a text as a tree; the root is node 0.

        Args:
            text: the number of the text.
            num_steps: the most levels below the root.
            topk: the most children of a node.
            num_draft_tokens: the most nodes, the root included.

        Returns:
            For each node from 1 on, the likeliest first: its token, int64 [n], its parent, int32
            [n], and the probability of its path by the counts, float32 [n]; and the tokens of the
            text's end that occurred before.

        Raises:
            ConfigError: there is no such text.
            ShapeError: a number is out of range.
        """

    @property
    def num_tokens(self) -> int:
        """Tokens that are known."""
    @property
    def num_states(self) -> int:
        """States of the automata; at most `2 * num_tokens + 2`."""

@final
class Event:
    """One state-changing call of an event log that was replayed."""

    @property
    def index(self) -> int:
        """The event's number in the log, from 1."""
    @property
    def offset(self) -> int:
        """The byte at which the event begins in the file."""
    @property
    def verb(self) -> str:
        """The name of the ledger's method."""
    @property
    def step(self) -> int | None:
        """The step that the call prepared or named."""
    @property
    def rows(self) -> list[int]:
        """The rows that the call named, or the row that it returned."""
    @property
    def tag(self) -> str | None:
        """The name of the request (admit, fork)."""
    @property
    def text(self) -> str:
        """The call and its result, such as `prepare_decode([1, 2], [1, 1]) -> step 9`."""
    @property
    def digest(self) -> int:
        """The ledger's digest after the call."""
    @property
    def plan(self) -> Plan | None:
        """The plan that a prepare returned; None for other verbs."""

@final
class Replay:
    """A replay of an event log, call by call, on a new ledger.

    Args:
        path: the log.

    Raises:
        RecordError: the file cannot be read, is not an event log, is of another version, truncated
            or damaged; the message has the offset.
        ConfigError: this version refuses the recorded configuration.
    """

    def __new__(cls, path: str | PathLike[str]) -> Replay: ...
    @property
    def ledger(self) -> Ledger:
        """The replayed ledger. Read it, but do not call its verbs."""
    @property
    def config(self) -> dict[str, Any]:
        """The recorded arguments of `Ledger`, with the defaults."""
    @property
    def made_by(self) -> str:
        """The version of specpool that wrote the log."""
    @property
    def end(self) -> Literal["closed", "limit", "open"] | None:
        """How the log ends, once all events are replayed; else None.

        "closed": by `close`. "limit": by `record_limit`. "open": without an end record, because its
        ledger is still open or the process died.
        """
    def advance(self) -> Event | None:
        """Replay the next event and return it; None at the end.

        Raises:
            RecordError: the log is truncated or damaged here, the ledger refuses the call, or its
                result differs; the message has the event and its offset. Every later call raises
                too.
        """

def decode_op(
    ledger: Ledger,
    code: bytes,
    *,
    has_index: bool = False,
    has_loans: bool = False,
    has_moves: bool = False,
) -> tuple[str, dict[str, Any]]:
    """Turn bytes into an operation on the ledger: a verb's name and its keyword arguments.

    It is for random tests. The same state and code give the same operation. Most operations can
    succeed; one in 16 has arbitrary arguments. Only the first `OP_BYTES` bytes of `code` count, and
    missing ones are 0. With `has_index`, the verbs of the prefix index are among the operations,
    with `has_loans` those for a prefix cache outside the ledger, with `has_moves` `export` and
    `import_row`.
    """

# --- Engines with a table of slots ---

def launch_into(ledger: Ledger, step: int, slot_table: _I32) -> None:
    """Launch a prepared step, write the slots of its new cells into a table, and complete it.

    It is `launch`, `take_delta`, `ack_delta` and `complete` in one call. Do first what the plan
    says: its page copies and its states.

    Args:
        ledger: where the step was prepared; of one group.
        step: its number.
        slot_table: int32 [num_rows + 1 or more, pages_per_row * P or more], C-contiguous, on the
            host; cell (row, position) gets `page * P + position % P`.

    Raises:
        ShapeError: the table is of another type or smaller, or the ledger has several groups.
        OrderError: as `launch`.
        StalePlan: as `launch`.

    Cost: O(rows of the step + slots of new pages).
    """

def decode_into(
    ledger: Ledger, rows: _IntArray, shapes: _IntArray | int, slot_table: _I32
) -> tuple[int, list[int]]:
    """Claim a round of each row and `launch_into` the table, in one call.

    An error changes nothing.

    Args:
        ledger: of one group, and without a state group.
        rows: int [b].
        shapes: an index of a shape for each row, int [b], or one for all.
        slot_table: as in `launch_into`.

    Returns:
        the step's number, for `resolve`; and each row's allocated_len then, [b].

    Raises:
        ShapeError: as `launch_into` and `prepare_decode`; or the ledger has a state group.
        OrderError: as `prepare_decode`; or another step is not launched; or page copies wait for
            the next step: call `prepare_decode`, copy, then `launch_into`.
        OutOfPages: as `prepare_decode`; and what else it raises.

    Cost: O(num_rows + rows + slots of new pages).
    """

def round_slots(ledger: Ledger, rows: _IntArray, shapes: _IntArray | int) -> int:
    """Return the slots that `decode_into` of these rows will take: `tokens_required`, as one int.

    Args:
        ledger: of any groups.
        rows: int [b].
        shapes: as in `decode_into`.

    Raises:
        ShapeError: as `Ledger.tokens_required`.

    Cost: O(num_rows + rows).
    """

# --- Kernels ---

def kernel_source(name: str) -> str:
    """Return the text of a file of `cuda/` from which this version was built.

    Raises:
        KeyError: there is no such file.
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
    """Record a draft step's candidates in place and keep the K best of each lane (EAGLE-2).

    Ties go to the lower index. A probability outside [0, 1] is clamped and a NaN counts as 0, so
    that no child outranks its parent.

    Args:
        step: in [0, S).
        topk_p: [n, K] at step 0, [n*K, K] after: the draft model's K greatest probabilities.
        topk_index: of the same shape as topk_p: their tokens.
        scores: [n, K], the result of the step before; None at step 0.
        candidate_scores: [n, M], written.
        candidate_tokens: [n, M], written.
        candidate_parents: [n, 1 + K*S], written.

    Returns:
        input_ids [n*K], the kept tokens; branch_parents [n, K], the branch of the step before that
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
    """Choose the N-1 best candidates of each lane, in ascending order of their index.

    Ties go to the lower index, so that a parent comes before its children.

    Args:
        candidate_scores: [n, M], written by `select_topk` (all three arrays must be writable).
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
    """Build the trees that `organize` chose.

    Node 0 is the root, and node i is candidate top_scores_index[i-1].

    Returns:
        depths [n, N] (a node's position is its root's plus this); mask [n, N, N], true where node j
        is node i or an ancestor of it; first_child, next_sibling [n, N], -1 = none; parents [n, N],
        -1 for the root.
    """

def tree_from_parents(parents: _I32) -> tuple[_I32, _Bool, _I32, _I32, _I32]:
    """Build trees of any form; return what `build_tree` returns.

    parents [n, N] has parents[:, 0] == -1 and 0 <= parents[:, i] < i. Siblings may have the same
    token.
    """

def verify_tree(
    tokens: _I64, first_child: _I32, next_sibling: _I32, target_tokens: _I64, *, num_steps: int
) -> tuple[_I32, _I32, _I64]:
    """Walk each tree from its root to the child with the target's token, as long as there is one.

    Args:
        tokens: [n, N], the root's first.
        first_child: [n, N].
        next_sibling: [n, N].
        target_tokens: [n, N]: the target's token after each node, the argmax or a draw. -1, which
            `sample_tokens` returns for logits that are not numbers, ends the walk there and becomes
            the bonus token, so that only this request fails.
        num_steps: S, the most drafts accepted.

    Returns:
        accept_index [n, S+1], flat node ids lane*N + node of the walk, padded with -1; accept_len
        [n], the bonus included; predict [n*N], the target's token at the nodes of the walk (the
        last is the bonus), 0 at other nodes.
    """

def find_broken_trees(
    tokens: _I64,
    depths: _I32,
    mask: _Bool,
    first_child: _I32,
    next_sibling: _I32,
    root_tokens: _I64,
    *,
    vocab_size: int,
) -> list[tuple[int, str]]:
    """Find the lanes whose arrays are not a valid tree for verify, and say what is wrong.

    In a valid tree node 0 is the root token. A child sees what its parent sees, and itself.
    Siblings see the same nodes apart from themselves. A node's depth is the number of its
    ancestors. Links lead to later nodes. Tokens are below `vocab_size`. Nodes that no link leads to
    are never walked; for these only the depth and the number of visible nodes are compared.

    Args:
        tokens: [n, N].
        depths: [n, N].
        mask: [n, N, N], a node's ancestors and itself.
        first_child: [n, N], -1 = none.
        next_sibling: [n, N], -1 = none.
        root_tokens: [n].
        vocab_size: the target's.

    Returns:
        The broken lanes in order, each with the first thing that is wrong. O(n * N^2).

    Raises:
        ShapeError: an argument has another shape, or a tree has no root.
    """

def count_acceptance(
    hits: _F32,
    tries: _F32,
    family: _I32,
    num_steps: _I32,
    rows: _I32,
    shapes: _I32,
    accept_len: _I32,
    *,
    prior: _F64 | None = None,
) -> _F64:
    """Count a round's results in place, by row, family and depth; older results fade.

    A family is a set of shapes whose depths are alike, such as a drafter's chains. A lane that did
    not draft fades too, so that its row goes back to the prior.

    Args:
        hits: float32 [R, F, D], drafts that were right, of all rows.
        tries: float32 [R, F, D], drafts whose predecessors were right.
        family: [S], the family of each shape; -1 = it drafts nothing.
        num_steps: [S], the depth of each shape, at most D.
        rows: [B], the row of each lane.
        shapes: [B], the index of each lane's shape.
        accept_len: [B], of each lane, the bonus included.
        prior: float64 [F, D], the rates of all rows, in [0, 1].

    Returns:
        float64 [F*D, 2], hits and tries of this round, of all lanes together. With a prior, the
        hits are less those that the rows owe to their own odds beside it.

    Raises:
        ShapeError: an argument has another shape, or a row, shape or accept length cannot be;
            nothing is counted then.
    """

def expected_tokens(
    hits: _F32,
    tries: _F32,
    prior: _F64,
    family: _I32,
    num_steps: _I32,
    rows: _I32,
    *,
    deviations: float = 0.0,
) -> _F64:
    """Return the tokens that a round of each row gives with each shape; O(B * F * D).

    Args:
        hits: as in `count_acceptance`.
        tries: likewise.
        prior: float64 [F, D], how likely a draft of any row is right where those before it are.
        family: as in `count_acceptance`.
        num_steps: likewise.
        rows: [B].
        deviations: by how many standard deviations the logarithm of each row's own odds is above
            what is estimated; in [0, 8].

    Returns:
        float64 [B, S], the bonus token included.

    Raises:
        ShapeError: an argument has another shape, or a number is out of range.
    """

def choose_shapes(
    shapes: _I32,
    tokens: _F64,
    *,
    worth: _F64,
    gives: _F64,
    due: _F64,
    base: float,
    charge: _F64,
    lane: _F64,
    mixed: float = 0.0,
    hoped: _F64 | None = None,
    pages: _I32 | None = None,
    free: _I64 | None = None,
) -> tuple[_I32, float, float, int]:
    """Choose a candidate for each row: the one with the least expected seconds a token.

    A round takes `base`, the greatest `charge` of the shapes in use, `mixed` if there are several,
    and the `lane` of each row's shape, in seconds. `docs/adaptive.md` has the rule. Equal arguments
    give equal choices. O(B * C * C), and more if rows miss their targets.

    Args:
        shapes: [B, C], the index of the shape of each row's candidates, the narrowest first.
        tokens: float64 [B, S], expected tokens of each row with each shape, 1 or more.
        worth: float64 [B], what a token of the row is worth.
        gives: float64 [B], tokens of the row's rounds so far, above 0. The fewer, the longer a row
            is in the batch, so it stands for as many of the batch's tokens.
        due: float64 [B, 2], the tokens that the row's round has to give: a constant, and per second
            of the round; 0, 0 = the row has no target.
        base: seconds, above 0.
        charge: float64 [S], seconds.
        lane: float64 [S], seconds.
        mixed: seconds.
        hoped: float64 [B, S], the tokens by which a row is judged to be in time; None = `tokens`.
        pages: int32 [B, C, G], pages that a candidate needs beyond the row's first.
        free: int64 [G], pages that may be used so. None for both = memory does not bind.

    Returns:
        The candidate of each row, int32 [B]; the tokens per second in the long run; the expected
        seconds of the round; the rows that are expected to miss their target.

    Raises:
        ShapeError: an argument has another shape, or a number is negative or not finite.
    """

def uniform(seeds: NDArray[np.uint64], positions: _I64) -> _F64:
    """Draw a number in [0, 1) for each (seed, position); [n], [n] -> [n].

    A number is the 53 upper bits of the words (1, 0) of Philox4x32-10 with key = seed and counter =
    (position, 0), as a fraction. Positions are 0 or more.
    """

def sample_tokens(
    logits: _F32,
    temperature: _F32,
    top_k: _I32,
    top_p: _F32,
    u: _F64,
    *,
    min_p: _F32 | None = None,
) -> _I64:
    """Draw one token per row by inverse CDF over token ids.

    The logits are divided by the temperature. Then the top_k most likely tokens are kept, and of
    these the smallest set of the most likely with a share >= top_p; ties go to the lower id. Of
    these, tokens less likely than min_p times the likeliest are dropped. The token is the least id
    whose cumulative weight exceeds u times the total. Weights are whole
    numbers, so that sums are exact in any order (rust/specpool-core/src/tree/sample.rs).

    Args:
        logits: [n, V], V at most 2^19; -inf marks a token that is ruled out.
        temperature: [n], in [0, inf); below 2^-100 = argmax (lowest id on ties).
        top_k: [n]; 0 = all.
        top_p: [n], in (0, 1]; 1 = all.
        u: [n], in [0, 1).
        min_p: [n], in [0, 1]; None = 0, which drops nothing.

    Returns:
        [n] tokens; -1 if a row holds a NaN, +inf, or nothing but -inf.
    """

def sample_margins(
    logits: _F32,
    temperature: _F32,
    top_k: _I32,
    top_p: _F32,
    u: _F64,
    *,
    min_p: _F32 | None = None,
) -> _F64:
    """Return how near each draw of `sample_tokens` is to another outcome, [n].

    A margin is the least of four: the distance of u to the edges of the token's CDF interval; the
    distance of the kept mass to top_p; the gap in logit / temperature at the cut of top_k or top_p;
    and that between the limit of min_p and the nearest token. At temperature 0 it is the gap
    between the two greatest logits. It is inf if no other outcome is possible, and NaN if there is
    no token.
    """

# Slots. page_table: [num_rows + 1, pages_per_row]; rows [n]: row 0 is padding. roots
# [n]: the position of each lane's root, which is the length of its prefix.

def slots_at(page_table: _I32, page_size: int, rows: _I32, positions: _I32) -> _I64:
    """Return the slot of each (row, position), [n].

    A slot is page_table[row, position // P] * P + position % P.
    """

def slot_ranges(page_table: _I32, page_size: int, rows: _I32, starts: _I32, lens: _I32) -> _I64:
    """Return the slots of [starts[i], starts[i] + lens[i]) of each row, in order, [sum(lens)].

    Args:
        page_table: int32 [num_rows + 1, pages_per_row], as `Ledger.page_table` returns it.
        page_size: tokens of a page.
        rows: [b], as `starts` and `lens`.
        starts: the first position of each row.
        lens: how many positions of each row.

    Raises:
        ShapeError: a position is below 0 or beyond the table.

    Cost: O(sum(lens)).
    """

def page_csr(page_table: _I32, page_size: int, rows: _I32, lens: _I32) -> tuple[_I32, _I32, _I32]:
    """List the pages of positions [0, lens[i]) of each row as CSR, for prefill and verify.

    Returns:
        kv_indptr [n+1]; kv_indices; kv_last_page_len [n], in 1..P, 0 where lens is 0.
    """

def apply_table_delta(page_table: _I32, rows: _I32, columns: _I32, pages: _I32) -> None:
    """Write pages[i] into page_table[rows[i], columns[i]], all or none; row 0 is refused."""

def draft_write_positions(
    roots: _I32, *, num_steps: int, topk: int, page_size: int, layout: _Layout
) -> _I32:
    """Return the cell of its row that branch b writes step j to, [n, K, S].

    A cell is a place in the row's layout, not the token's position in the sequence. dense:
    root + b*S + j. holey (sgl#26972): root + b*n*P + j with n = ceil((root % P + S) / P) pages per
    branch.
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
    """Return the slots of `draft_write_positions`, [n, K, S]; refuse a position without a page."""

def advance_ancestors(ancestors: _I32, branch_parents: _I32, step: int) -> None:
    """Update ancestors [n, K, width > step] to `step` in place, after the selection of that step.

    ancestors[b, k, j] is the branch whose cell of step j holds the j-th draft on branch k's path.
    branch_parents [n, K] is from `select_topk`. Call it for each step from 0 on; no reset is needed
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
    """List the slots that each branch reads at a draft step as CSR: prefix, then step + 1 drafts.

    Args:
        page_table: [num_rows + 1, pages_per_row].
        page_size: P.
        rows: [n].
        roots: [n].
        num_steps: S.
        topk: K.
        step: in [0, S).
        layout: "dense" or "holey".
        ancestors: [n, K, width > step] (`advance_ancestors`): a branch reads its true ancestors.
            None: it reads its own cells, as in SGLang.
        out: buffer for kv_indices, written in place; must hold K * (sum(roots) + n*S) (sgl#27338).

    Returns:
        kv_indptr [n*K + 1], kv_indices (`out` itself if given, valid below kv_indptr[-1]).
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
    """Return own_mask [n, K, W] and own_positions [n, W] of a draft step, for `attention_mask`.

    The mask describes the same reads as `draft_read_indices`. The `starts` of `attention_mask` are
    the roots, its queries are the K branches at position root + step, and own cell c is the cell at
    root + c. W reaches the last cell written at `step`.
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
    """List the pages that each branch reads at a draft step (holey), padded with 0, [n*K, width].

    A branch reads root + step + 1 slots: the prefix's full pages, then its own pages. The own pages
    of branch 0 begin with the prefix's tail itself, those of other branches with a copy.
    """

def prefix_tail_moves(
    page_table: _I32, page_size: int, rows: _I32, roots: _I32, *, num_steps: int, topk: int
) -> tuple[_I64, _I64]:
    """Return src and dst slots that copy each prefix's tail for branches 1..K (sgl#7725)."""

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
    """Return src and dst slots that copy the drafts of each branch's parent over its own.

    Call it after the selection of `step`, for the drafts 0..step. branch_parents is [n, K].
    Branches may swap, so the move must read all slots before it writes.
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
    """Return src and dst slots that move the accepted nodes from root + node to root, root + 1, ...

    accept_index is [n, S+1], from `verify_tree`. Nodes already in place and padding lanes (row 0)
    have no move.
    """

def check_moves(src: _I64, dst: _I64, num_slots: int) -> None:
    """Raise ShapeError unless all slots are in [0, num_slots) and each is written once."""

def check_slots(name: str, slots: _I64, num_slots: int) -> None:
    """Raise ShapeError, with `name` in the message, unless all slots are in [0, num_slots)."""

def move_slots(buffers: Sequence[tuple[_U8, Sequence[int]]], src: _I64, dst: _I64) -> None:
    """Move slots in every buffer: slot dst[i] gets the content of slot src[i] before the call.

    Args:
        buffers: pairs of bytes [lead, num_pages, P * sum(widths)], written, and widths: bytes of
            one slot in each field. A page holds one field after the other. A plain buffer has one
            field, and pages of one slot.
        src: [n] slots read.
        dst: [n] slots written, each once.
    """

def scatter_slots(
    buffers: Sequence[tuple[_U8, Sequence[int]]], slots: _I64, values: Sequence[_U8]
) -> None:
    """Write values into slots of every buffer.

    Args:
        buffers: see `move_slots`; each with one field.
        slots: [n], each once.
        values: one per buffer: bytes [lead, n, width].
    """

def checksum(data: _U8) -> int:
    """Return a 64-bit checksum of bytes [n], the same on every machine.

    It finds damage, at the speed of memory; it does not resist attackers.
    """

def gather_pages(buffers: Sequence[_U8], pages: _I32, out: _U8) -> int:
    """Copy pages of every buffer to bytes in a row, and return their `checksum`.

    Memory is read and written once. `out` has the pages of the first buffer, then those of the
    second, and so on.

    Args:
        buffers: bytes [num_pages, page_bytes] each.
        pages: [n], each in [0, num_pages) of every buffer.
        out: bytes [n * all page_bytes], written.

    Raises:
        ShapeError: a page lies outside, or `out` has another length. Nothing is written.
    """

def scatter_pages(buffers: Sequence[_U8], pages: _I32, values: _U8) -> int:
    """Copy what `gather_pages` has written to pages of every buffer; return its `checksum`.

    Memory is read and written once.

    Args:
        buffers: bytes [num_pages, page_bytes] each, written.
        pages: [n], each in [0, num_pages) of every buffer. Of a page named twice, the last counts.
        values: bytes [n * all page_bytes].

    Raises:
        ShapeError: as `gather_pages`. Nothing is written.
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
    sink: int = 0,
) -> _Bool:
    """Return the mask of one forward: the columns that each query sees, [n, Q, num_columns].

    Column c is the cell c of the row.

    Args:
        starts: [n]: every query of the lane sees the columns below; the lane's own cells begin
            here.
        q_lens: [n]: queries beyond are padding. They see column 0, because softmax over nothing
            would give NaN.
        num_columns: columns; every visible own cell must be below.
        own_mask: [n, Q, W]: whether query i sees the cell at starts + j; None = causal (j <= i).
        q_positions: [n, Q]: the queries' positions in the sequence; None = starts + i. Only the
            window reads them.
        own_positions: [n, W]: the own cells' positions in the sequence; None = starts + j.
        num_queries: Q, if neither own_mask nor q_positions gives it; None = the greatest of q_lens.
        window: a query sees only cells whose position is greater than its own minus this.
        sink: beside its window, a query sees the cells whose position is less than this.
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
    """Write new keys and values, then attend over the pages of each lane in place.

    The call releases the interpreter's lock unless the reads are brief. It reads each lane's
    columns once, whatever the number of its queries.

    Args:
        keys: [num_slots, Hkv, Dk], written.
        values: [num_slots, Hkv, Dv], written.
        new_keys: [T, Hkv, Dk].
        new_values: [T, Hkv, Dv].
        write_slots: [T], the slot of each new token.
        q: [n, H, Dk] queries, lane after lane; H is a multiple of Hkv.
        out: [n, H, Dv], written.
        pages: [B, C], the page of each `page_size` columns of a lane.
        kv_lens: [B]; no query of a lane sees this column or a later one.
        q_lens: [B], queries of each lane; they add up to n.
        page_size: slots of a page.
        scaling: factor of the scores.
        bias: [B, max(q_lens), columns], added to the scores. None = query i of a lane sees all
            columns up to `kv_len - q_len + i`.
        window: without a bias, a query sees only this many columns, its own included.
        softcap: above 0; scores become `softcap * tanh(score / softcap)`.
        sinks: [H], further scores that take part in the softmax only.
        num_threads: the most threads to use, at most 256; small reads use one.

    Raises:
        ShapeError: an argument is wrong; the message names it, and nothing is written.
        OutOfMemory: there is no memory for scores and results; nothing is written.
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
    sink: int = 0,
) -> _F32:
    """Return `attention_mask` as a bias: 0 if the query sees the column, else -inf."""
