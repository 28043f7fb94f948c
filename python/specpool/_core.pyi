"""Types of the Rust binding; checked against it with `python -m mypy.stubtest specpool._core`."""

from typing import Literal, final

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Shape",
    "__version__",
    "advance_ancestors",
    "apply_table_delta",
    "attention_mask",
    "branch_copy_moves",
    "branch_pages",
    "build_tree",
    "check_moves",
    "check_slots",
    "compact_moves",
    "draft_read_indices",
    "draft_visibility",
    "draft_write_positions",
    "draft_write_slots",
    "organize",
    "page_csr",
    "prefix_tail_moves",
    "sample_margins",
    "sample_tokens",
    "select_topk",
    "slot_ranges",
    "slots_at",
    "tree_from_parents",
    "uniform",
    "verify_tree",
]

__version__: str

_I32 = NDArray[np.int32]
_I64 = NDArray[np.int64]
_F32 = NDArray[np.float32]
_F64 = NDArray[np.float64]
_Bool = NDArray[np.bool_]
_Layout = Literal["dense", "holey"]

@final
class Shape:
    """What one round of one row may do: (num_steps, topk, num_draft_tokens), spec 1."""

    def __new__(cls, num_steps: int, topk: int, num_draft_tokens: int) -> Shape: ...
    @staticmethod
    def eagle(num_steps: int, topk: int, num_draft_tokens: int) -> Shape: ...
    @staticmethod
    def none() -> Shape: ...
    @property
    def num_steps(self) -> int: ...
    @property
    def topk(self) -> int: ...
    @property
    def num_draft_tokens(self) -> int: ...
    @property
    def max_accept_len(self) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

# Draft tree, verify, sampling (spec 5). S = num_steps, K = topk, N = num_draft_tokens, M = K +
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
    whose cumulative weight exceeds u times the total. Weights are f32, sums f64 in a fixed order
    (rust/specpool-core/src/sample.rs).

    Args:
        logits: [n, V]; -inf marks a token that is ruled out.
        temperature: [n], in [0, inf); 0 = argmax (lowest id on ties).
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

# Slots (spec 2, 6). page_table: [num_rows + 1, pages_per_row]; rows [n]: row 0 is padding. roots
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
