"""Recurrent states of today's SGLang: what a step goes on from, and which states it leaves.

A state is the key of exactly the tokens that it has consumed; a cleared one is 0. `StateSteps` does
what SGLang's worker and its backend for linear attention do with states, in the slots that SGLang
names.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
from sglang.srt.runtime_context import get_exec
from sglang.srt.speculative.spec_utils import _verify_commit_step_indices

from lab.engines.content import Keys, Text, digest
from lab.engines.known import LEFT


def state_rows(setup: Any, width: int) -> HybridReqToTokenPool:
    """Return SGLang's table of rows with a pool of states, whose temporal part is a key."""
    shape = SimpleNamespace(conv=[(2, 1)], temporal=(1, 1, 1), disable_conv_window_dedup=True)
    dtype = SimpleNamespace(conv=torch.int64, temporal=torch.int64)
    _, topk, count = setup.shape or (None, None, None)
    return HybridReqToTokenPool(
        size=setup.num_rows,
        mamba_size=setup.states,
        mamba_spec_state_size=setup.num_rows,
        max_context_len=width,
        device=setup.device,
        enable_memory_saver=False,
        cache_params=SimpleNamespace(shape=shape, dtype=dtype, layers=[0], is_kda=False),
        mamba_layer_ids=[0],
        enable_mamba_extra_buffer=get_exec().mamba.enable_mamba_extra_buffer,
        enable_mamba_extra_buffer_lazy=get_exec().mamba.enable_mamba_extra_buffer_lazy,
        speculative_num_draft_tokens=count,
        speculative_eagle_topk=topk,
        enable_overlap_schedule=setup.overlap,
    )


class StateText(Text):
    """A text whose drafts' KV does not see the token behind its position.

    With states, SGLang's tree has keys of tokens also for EAGLE, so the draft KV of a cached prefix
    may be that of another next token, at its last position. That costs drafts, and no answer.
    """

    def draft_keys(self, begin: int, end: int) -> Keys:
        """Return the draft model's keys there, int64."""
        return self.keys(begin, end) ^ 1


class StateSteps:
    """The states of a fake worker, whose steps it wraps; `begin` is called before each of them."""

    def __init__(self, worker: Any, rows: HybridReqToTokenPool, setup: Any) -> None:
        self.worker, self.rows, self.setup = worker, rows, setup
        self.keys = rows.mamba_pool.mamba_cache.temporal.reshape(-1)
        self.batch: Any = None
        #: States that a turn of a session left when it ended or was retracted.
        self.left: set[int] = set()
        self.forward, worker.forward_batch_generation = worker.forward_batch_generation, self.run
        if setup.shape is not None:
            self.follow, worker._follow = worker._follow, self.verified

    def run(self, batch: Any, **options: Any) -> Any:
        """Run a batch; the states of one without drafts have no more to wait for."""
        is_extend = batch.forward_mode.is_extend()
        result = self.forward(batch, **options)
        if is_extend or self.setup.shape is None:
            self.end(batch, is_extend)
        return result

    def begin(self, phase: str, batch: Any, begins: list[int]) -> None:
        """What SGLang does before a step, and what a step reads."""
        self.batch, pool = batch, self.rows
        if phase == "extend":
            if batch.mamba_clear_indices is not None:
                pool.mamba_pool.clear_slots(batch.mamba_clear_indices)
            if batch.mamba_cow_src_indices is not None:
                pool.copy_mamba_state(batch.mamba_cow_src_indices, batch.mamba_cow_dst_indices)
        for req, slot, begin in zip(batch.reqs, self.slots(batch), begins, strict=True):
            held, text = int(self.keys[slot]), self.worker.texts[req.rid]
            if held != text.state_key(begin):
                why = "has other tokens" if held else "is cleared"
                self.worker.device.faults.append(
                    f"{req.rid} goes on from the state behind {begin} tokens in slot {slot}, which "
                    f"{why}{self.note(slot)}"
                )

    def leave(self, slot: int) -> None:
        """A turn leaves its state to its session."""
        self.left.add(int(self.keys[slot]))

    def note(self, slot: int) -> str:
        """What is known of a state."""
        return LEFT if int(self.keys[slot]) in self.left else ""

    def slots(self, batch: Any) -> list[int]:
        """Return the slot of each request's own state."""
        slots: list[int] = self.rows.get_mamba_indices(batch.req_pool_indices).tolist()
        return slots

    def end(self, batch: Any, is_extend: bool) -> None:
        """Leave the states behind a step without drafts, in each request's slot and for the tree.

        A prefill leaves the state behind its end if that is what it is asked for, otherwise the one
        at the last whole grain.
        """
        lanes = zip(batch.reqs, self.slots(batch), batch.seq_lens.tolist(), strict=True)
        for at, (req, slot, length) in enumerate(lanes):
            text = self.worker.texts[req.rid]
            self.keys[slot] = text.state_key(length)
            if batch.mamba_track_mask is None or not batch.mamba_track_mask[at]:
                continue
            if is_extend:
                begin = batch.prefix_lens[at]
                asked = int(batch.mamba_track_seqlens[at]) - begin
                length = begin + asked // self.setup.grain * self.setup.grain
            self.track(int(batch.mamba_track_indices[at]), text.state_key(length))

    def track(self, slot: int, key: int) -> None:
        """Leave a state in a slot for the tree."""
        if slot >= 0:
            self.keys[slot] = key

    def verified(self, lanes: Any, accept_lens: list[int]) -> None:
        """Commit the states behind the accepted drafts, as SGLang's worker does."""
        worker, batch, count = self.worker, self.batch, self.setup.shape[2]
        depth = min(self.setup.shape[0] + 1, count)
        index = torch.full((len(lanes), depth), -1, dtype=torch.int64)
        steps = []
        for lane, (rid, _, length, _) in enumerate(lanes):
            accepted, nodes = worker._accept(rid, length)
            index[lane, :accepted] = torch.tensor(nodes) + lane * count
            steps.append(nodes)
        last, tracked = _verify_commit_step_indices(
            batch=batch,
            accept_index=index,
            accept_lens=torch.tensor(accept_lens),
            draft_token_num=count,
        )
        for lane, ((rid, text, length, _), slot) in enumerate(
            zip(lanes, self.slots(batch), strict=True)
        ):
            behind = {node: text.state_key(length + at + 1) for at, node in enumerate(steps[lane])}
            rejected = digest(int(rid), length, 17)
            self.keys[slot] = behind.get(int(last[lane]), rejected)
            if tracked is not None and tracked[lane] >= 0:
                key = behind.get(int(tracked[lane]), rejected)
                self.track(int(batch.mamba_track_indices[lane]), key)
        self.follow(lanes, accept_lens)
