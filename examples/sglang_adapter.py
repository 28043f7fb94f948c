"""SGLang's bookkeeping calls for a speculative decode batch, served by a specpool ledger.

This is for an engineer who knows that scheduler. Its calls (EAGLE, overlap mode) keep their names
and their meaning, but the ledger keeps the books:

    SGLang                                     here
    req.kv_committed_len, kv_allocated_len     read-only views of the ledger; nobody sets them
    token_to_kv_pool_allocator, its free list  the ledger's page pool
    req_to_token[req_pool_idx]                 `req_to_token(req)`, from the page table
    new_tokens_required_next_decode            `Ledger.tokens_required`, exact by construction
    prepare_for_decode                         `Ledger.prepare_decode`, `launch`: a step
    _resolve_spec_overlap_token_ids            `Ledger.resolve`, `complete` of the oldest step
    alloc_extend, alloc_for_extend             `Ledger.prepare_extend`, `launch`
    release_kv_cache                           `Ledger.finish`: also with a round in flight

The setting is SGLang's own: target and draft share one group, and a round reserves
`2 * get_alloc_len_per_decode()` slots (`policy="double_buffer"`, `overlap_depth=1`). With
`policy="exact"` and a group for each model the same calls reserve far less: see
`python -m benches reserve`.

    python examples/sglang_adapter.py    # compares with figures recorded from SGLang
"""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from specpool import Group, Ledger, Plan, Shape

Ints = NDArray[np.int32]


@dataclass(frozen=True, kw_only=True)
class ServerArgs:
    """The settings that decide how much KV a round needs."""

    page_size: int
    speculative_num_steps: int
    speculative_eagle_topk: int
    speculative_num_draft_tokens: int
    context_length: int
    max_running_requests: int
    max_total_tokens: int


def get_alloc_len_per_decode(args: ServerArgs) -> int:
    """SGLang's window of a round, in slots; the ledger reserves two of them by itself."""
    per_branch = args.speculative_num_steps
    if args.page_size > 1 and args.speculative_eagle_topk > 1:  # branches have their own pages
        per_branch = -(-(args.page_size - 1 + per_branch) // args.page_size) * args.page_size
    return max(args.speculative_eagle_topk * per_branch, args.speculative_num_draft_tokens)


@dataclass(eq=False)
class Req:
    """A request holds its row; its lengths live in the ledger."""

    ledger: Ledger
    req_pool_idx: int

    @property
    def kv_committed_len(self) -> int:
        """Tokens resolved, and one root for each round in flight."""
        row = self.req_pool_idx
        return int(self.ledger.resolved_len[row] + self.ledger.in_flight[row])

    @property
    def kv_allocated_len(self) -> int:
        """Slots that the request holds, a multiple of the page size."""
        return int(self.ledger.allocated_len(0)[self.req_pool_idx])


class KVCache:
    """What a scheduler, its allocator and its request-to-token pool do with KV slots."""

    def __init__(self, args: ServerArgs) -> None:
        self.page_size = args.page_size
        shape = Shape(
            args.speculative_num_steps,
            args.speculative_eagle_topk,
            args.speculative_num_draft_tokens,
        )
        kv = Group(
            "kv",
            page_size=args.page_size,
            num_pages=args.max_total_tokens // args.page_size,
            hosts_drafts=True,
            layout="holey",
        )
        self.ledger = Ledger(
            [kv],
            [shape],
            num_rows=args.max_running_requests,
            max_context_len=args.context_length,
            overlap_depth=1,
            policy="double_buffer",
        )
        self.decodes: deque[Plan] = deque()  # launched, not resolved; oldest first

    def available_size(self) -> int:
        """Slots that can be handed out now."""
        return self.ledger.free_pages(0) * self.page_size

    def alloc_req_slot(self) -> Req:
        """Takes a row."""
        return Req(self.ledger, self.ledger.admit())

    def alloc_extend(self, reqs: Sequence[Req], seq_lens: Sequence[int]) -> Plan:
        """Slots for a prefill or a chunk; `seq_lens` are the lengths after it.

        The two allocators behind it differ in the error alone: `OutOfPages` says how many pages
        are missing and how many are on their way back, and nothing has been changed.
        """
        plan = self.ledger.prepare_extend(_rows(reqs), list(seq_lens))
        self.ledger.launch(plan.step)
        return plan

    def new_tokens_required_next_decode(self, reqs: Sequence[Req]) -> int:
        """Slots that `prepare_for_decode` of the same requests will take, exactly."""
        return int(self.ledger.tokens_required(_rows(reqs), np.ones(len(reqs), np.int32))[0])

    def prepare_for_decode(self, reqs: Sequence[Req]) -> Plan:
        """Slots for the next round of each request; `allocated_after` are its nxt_kv_lens."""
        plan = self.ledger.prepare_decode(_rows(reqs), np.ones(len(reqs), np.int32))
        self.ledger.launch(plan.step)
        self.decodes.append(plan)
        return plan

    def table_delta(self, plan: Plan) -> tuple[Ints, Ints, Ints]:
        """Rows, columns, pages to write into the device's page table before the forward."""
        (delta,) = self.ledger.take_delta(plan.step)
        self.ledger.ack_delta(plan.step)
        return delta

    def resolve_spec_overlap(self, accept_lens: Sequence[int]) -> None:
        """The oldest round's outcome, the bonus tokens included.

        Requests that were released or cut since its prepare are skipped; there is no list of them
        to keep.
        """
        plan = self.decodes.popleft()
        self.ledger.resolve(plan.step, list(accept_lens))
        self.ledger.complete(plan.step)

    def req_to_token(self, req: Req) -> Ints:
        """[kv_allocated_len]: the slot of each position."""
        pages = self.ledger.page_table(0)[
            req.req_pool_idx, : req.kv_allocated_len // self.page_size
        ]
        return (pages[:, None] * self.page_size + np.arange(self.page_size, dtype=np.int32)).ravel()

    def release_kv_cache(self, req: Req) -> None:
        """Ends the request; slots that a round in flight may write stay out of use."""
        self.ledger.finish(req.req_pool_idx)


def _rows(reqs: Sequence[Req]) -> Ints:
    return np.array([req.req_pool_idx for req in reqs], np.int32)


# --- The comparison ---


def past(committed: int, allocated: int, page_size: int, reserve: int) -> int | None:
    """A first prompt length from which these calls lead a request to the two lengths, or None.

    Equal to `committed`: a prefill alone. Else: a prefill of that length, a round that accepts one
    token, and the rest as a further chunk, which finds its slots allocated.
    """
    if allocated == -(-committed // page_size) * page_size:
        return committed
    start = min(allocated - reserve, committed - 1)
    reached = start >= 1 and -(-(start + reserve) // page_size) * page_size == allocated
    return start if reached else None


def compare(path: Path) -> tuple[int, int, int]:
    """Runs the recorded cases; returns (cases, rows that were run, rows recorded).

    The recording drew the two lengths at random; many pairs no sequence of calls can bring about.

    Raises:
        AssertionError: a figure differs.
    """
    cases = json.loads(path.read_text(encoding="utf-8"))["cases"]
    num_run = num_recorded = 0
    for case in cases:
        page_size, reserve = case["page_size"], case["reserve_per_decode"]
        lengths = list(
            zip(case["committed"], case["allocated"], case["next_allocated"], strict=True)
        )
        rows = [
            (start, *row)
            for row in lengths
            if (start := past(row[0], row[1], page_size, reserve)) is not None
        ]
        num_recorded += len(lengths)
        num_run += len(rows)
        args = ServerArgs(
            page_size=page_size,
            speculative_num_steps=case["num_steps"],
            speculative_eagle_topk=case["topk"],
            speculative_num_draft_tokens=case["num_draft_tokens"],
            context_length=max(case["committed"]) + 2,
            max_running_requests=len(lengths),
            max_total_tokens=len(lengths) * (max(case["committed"]) + reserve + 2 * page_size),
        )
        assert get_alloc_len_per_decode(args) == case["alloc_len_per_decode"], case
        assert 2 * get_alloc_len_per_decode(args) == reserve, case
        if rows:
            grown = [following - allocated for _, allocated, following in lengths]
            not_run = sum(grown) - sum(following - allocated for *_, allocated, following in rows)
            _compare_batch(KVCache(args), rows, case["tokens_required"] - not_run)
    return len(cases), num_run, num_recorded


def _compare_batch(kv: KVCache, rows: list[tuple[int, int, int, int]], required: int) -> None:
    reqs = [kv.alloc_req_slot() for _ in rows]
    kv.alloc_extend(reqs, [start for start, *_ in rows])
    old = [(req, row) for req, row in zip(reqs, rows, strict=True) if row[0] < row[1]]
    if old:
        kv.prepare_for_decode([req for req, _ in old])
        kv.resolve_spec_overlap([1] * len(old))
    chunked = [(req, row) for req, row in old if row[0] + 1 < row[1]]
    if chunked:
        kv.alloc_extend([req for req, _ in chunked], [row[1] for _, row in chunked])
    assert [req.kv_committed_len for req in reqs] == [committed for _, committed, _, _ in rows]
    assert [req.kv_allocated_len for req in reqs] == [allocated for _, _, allocated, _ in rows]

    assert kv.new_tokens_required_next_decode(reqs) == required
    available = kv.available_size()
    plan = kv.prepare_for_decode(reqs)
    assert plan.allocated_after[0].tolist() == [following for *_, following in rows]
    assert available - kv.available_size() == required

    kv.table_delta(plan)
    for req in reqs:
        assert len(set(kv.req_to_token(req).tolist())) == req.kv_allocated_len
        kv.release_kv_cache(req)  # while its round is in flight
    kv.resolve_spec_overlap([1] * len(reqs))
    assert kv.ledger.free_pages(0) == kv.ledger.groups[0].num_pages


def main() -> None:
    """Compare with the recording, and print how much was compared."""
    vectors = Path(__file__).parent.parent / "tests" / "vectors" / "sizing.json"
    num_cases, num_run, num_recorded = compare(Path(sys.argv[1]) if sys.argv[1:] else vectors)
    print(f"{num_cases} recorded cases: the window and the reserve of a round are SGLang's.")
    print(f"{num_run} of {num_recorded} recorded rows can arise from its calls and were run:")
    print("the estimate, the lengths after prepare and the slots taken are SGLang's.")


if __name__ == "__main__":
    main()
