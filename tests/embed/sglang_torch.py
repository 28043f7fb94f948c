"""What SGLang's Triton kernels for tables and slots do, in torch: they need a GPU, we run without.

Each function takes the place of SGLang's launcher of the same name.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import torch
from sglang.kernels.ops.speculative import cache_locs
from sglang.srt.managers import overlap_utils
from sglang.srt.mem_cache import allocation
from sglang.srt.model_executor import forward_batch_info
from sglang.srt.speculative import eagle_worker_common, spec_utils

from specpool.plugins.sglang import pages_proof


def assign_req_to_token_pool_func(
    rows: torch.Tensor,
    table: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    slots: torch.Tensor,
    *_: Any,
) -> None:
    taken = 0
    for row, low, high in zip(rows.tolist(), start.tolist(), end.tolist(), strict=True):
        table[row, low:high] = slots[taken : taken + high - low].int()
        taken += high - low


def assign_draft_cache_locs_contiguous_func(
    rows: torch.Tensor,
    table: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    topk: int,
    columns: int,
    **_: Any,
) -> None:
    at = seq_lens[:, None] + torch.arange(topk * columns)
    out.copy_(table[rows.long()].gather(1, at).reshape(-1))


def assign_extend_cache_locs(
    rows: torch.Tensor,
    table: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    out: torch.Tensor,
    *_: Any,
) -> None:
    taken = 0
    for row, low, high in zip(rows.tolist(), start.tolist(), end.tolist(), strict=True):
        out[taken : taken + high - low] = table[row, low:high]
        taken += high - low


class Kernel:
    """A function by its kernel, which is called with a grid, as before SGLang 0.5.23."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __getitem__(self, grid: Any) -> Any:
        return self.function


def _draft_kernel(rows: Any, table: Any, seq_lens: Any, out: Any, *sizes: Any, **_: Any) -> None:
    assign_draft_cache_locs_contiguous_func(rows, table, seq_lens, out, *sizes[-2:])


def assign_extend_cache_locs_uniform_func(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
    device: Any,
) -> torch.Tensor:
    at = start_offset[:, None] + torch.arange(draft_token_num)
    return req_to_token[req_pool_indices.long()].gather(1, at).reshape(-1).long()


def fill_front_out_cache_loc_func(
    num_front: torch.Tensor, slots: torch.Tensor, front: torch.Tensor
) -> None:
    window = slots.view(len(num_front), -1)
    packed = [lane[:count] for lane, count in zip(window, num_front.tolist(), strict=True)]
    kept = torch.cat(packed)
    front[: len(kept)] = kept


def fill_accept_out_cache_loc_func(
    accept_index: torch.Tensor, slots: torch.Tensor, out: torch.Tensor, *_: Any
) -> None:
    kept = accept_index[accept_index >= 0]
    out[: len(kept)] = slots[kept.long()]


def gather_spec_extras(
    rows: torch.Tensor,
    topk_p: torch.Tensor,
    topk_index: torch.Tensor,
    tokens: torch.Tensor,
    hidden: torch.Tensor | None,
) -> tuple[Any, ...]:
    found = (None if hidden is None else hidden[rows],)
    return topk_p[rows], topk_index[rows], tokens[rows], *found


def new_forward(batch: Any, *_: Any, **__: Any) -> Any:
    """Stands for a `ForwardBatch`: the fake model reads the schedule batch itself."""
    return SimpleNamespace(out_cache_loc=batch.out_cache_loc)


#: Holds the loops of the allocators in place.
LOOPS = contextlib.ExitStack()


def install() -> None:
    """Put them in the place of SGLang's."""
    allocation.assign_req_to_token_pool_func = assign_req_to_token_pool_func
    eagle_worker_common.assign_draft_cache_locs_contiguous = Kernel(_draft_kernel)
    spec_utils.assign_extend_cache_locs = Kernel(assign_extend_cache_locs)
    LOOPS.enter_context(pages_proof.loops_for_kernels())
    torch.Tensor.record_stream = lambda *_: None  # SGLang asks it of the host's, too, before 0.5.22
    eagle_worker_common.assign_draft_cache_locs_contiguous_func = (
        assign_draft_cache_locs_contiguous_func
    )
    spec_utils.fill_front_out_cache_loc_func = fill_front_out_cache_loc_func
    spec_utils.fill_accept_out_cache_loc_func = fill_accept_out_cache_loc_func
    overlap_utils.gather_spec_extras = gather_spec_extras
    cache_locs.assign_extend_cache_locs_uniform_func = assign_extend_cache_locs_uniform_func
    forward_batch_info.ForwardBatch.init_new = new_forward
