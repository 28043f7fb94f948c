"""Fake models for SGLang's scheduler: what they read and write is checked by `sglang_device`.

The slots of a round are those of SGLang's own `prepare_for_draft`, `eagle_prepare_for_verify` and
`move_accept_tokens_to_target_kvcache`. Drafts are accepted by a number that depends on the seed,
the request and its length alone, so every run of a setup accepts the same.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.speculative.eagle_info import EagleDraftInput
from sglang.srt.speculative.eagle_utils import eagle_prepare_for_verify
from sglang.srt.speculative.eagle_worker_common import prepare_for_draft
from sglang.srt.speculative.spec_utils import move_accept_tokens_to_target_kvcache
from sglang_device import Device, Text, digest


class Worker:
    """A model that decodes one token at a time.

    `texts` has the text of each request, by its id; `hook`, if set, is called with the name of a
    phase and the batch, before the phase reads.
    """

    def __init__(self, device: Device, seed: int) -> None:
        self.device, self.seed = device, seed
        self.texts: dict[str, Text] = {}
        self.hook: Callable[[str, Any], None] | None = None
        self.model_runner = SimpleNamespace(
            attn_backend=SimpleNamespace(needs_cpu_seq_lens=True),
            prefill_aware_swa=False,
            decode_cuda_graph_runner=None,
            spec_algorithm=SimpleNamespace(is_standalone=lambda: False),
            token_to_kv_pool=device.draft,
            last_shared_read_runner=None,
            model_config=SimpleNamespace(model_is_mrope=False),
        )

    def on_verify_complete_cpu(self, *_: Any, **__: Any) -> None:
        """Nothing adapts."""

    def forward_batch_generation(self, batch: Any, **options: Any) -> GenerationBatchResult:
        """Run one batch, as SGLang's worker would."""
        if self.hook is not None:
            self.hook("extend" if batch.forward_mode.is_extend() else "decode", batch)
        if batch.forward_mode.is_extend():
            return self._extend(batch, options.get("on_publish"))
        return self._decode(batch, options.get("on_publish"))

    def _rows(self, batch: Any) -> list[tuple[str, Text, int, np.ndarray]]:
        """Each lane's id, text, length on the device, and its row of slots."""
        table = batch.req_to_token_pool.req_to_token[batch.req_pool_indices].numpy()
        lens = batch.seq_lens.tolist()
        return [
            (req.rid, self.texts[req.rid], length, row.astype(np.int64))
            for req, length, row in zip(batch.reqs, lens, table, strict=True)
        ]

    def _tokens(self, batch: Any, rid: str, tokens: list[int], at: int) -> None:
        """The tokens that the model is fed must be the text's."""
        text = self.texts[rid]
        text.token(at + len(tokens))
        if tokens != text.tokens[at : at + len(tokens)]:
            self.device.faults.append(f"{rid} is fed {tokens} at {at}, its text has others")

    def _extend(self, batch: Any, publish: Any) -> GenerationBatchResult:
        taken, said = 0, []
        tokens, slots = batch.input_ids.tolist(), batch.out_cache_loc.numpy()
        for lane, (rid, text, length, row) in enumerate(self._rows(batch)):
            begin, count = batch.prefix_lens[lane], batch.extend_lens[lane]
            new = slots[taken : taken + count]
            self._tokens(batch, rid, tokens[taken : taken + count], begin)
            if length != begin + count or (row[begin:length] != new).any():
                self.device.faults.append(f"{rid}: the row has not the slots of its extend")
            self.device.write(self.device.target, new, text.keys(begin, length), f"{rid} extend")
            self.device.read(self.device.target, row[:length], text.keys(0, length), rid)
            self._draft_extend(rid, text, row, begin, length)
            said.append(text.token(length))
            taken += count
        return self._extended(batch, torch.tensor(said), publish)

    def _draft_extend(self, rid: str, text: Text, row: np.ndarray, begin: int, end: int) -> None:
        """Nothing: no draft model."""

    def _extended(self, batch: Any, said: torch.Tensor, publish: Any) -> GenerationBatchResult:
        return GenerationBatchResult(
            logits_output=LogitsProcessorOutput(next_token_logits=None), next_token_ids=said
        )

    def _decode(self, batch: Any, publish: Any) -> GenerationBatchResult:
        said = []
        tokens, slots = batch.input_ids.tolist(), batch.out_cache_loc.numpy()
        for lane, (rid, text, length, row) in enumerate(self._rows(batch)):
            at = length - 1
            self._tokens(batch, rid, tokens[lane : lane + 1], at)
            if row[at] != slots[lane]:
                self.device.faults.append(f"{rid}: the row has not the slot of its decode")
            new = slots[lane : lane + 1]
            self.device.write(self.device.target, new, text.keys(at, length), f"{rid} decode")
            self.device.read(self.device.target, row[:length], text.keys(0, length), rid)
            said.append(text.token(length))
        return GenerationBatchResult(
            logits_output=LogitsProcessorOutput(next_token_logits=None),
            next_token_ids=torch.tensor(said),
        )


class EagleWorker(Worker):
    """A target model and an EAGLE head of one shape (S, K, N)."""

    def __init__(self, device: Device, seed: int, shape: tuple[int, int, int]) -> None:
        super().__init__(device, seed)
        self.num_steps, self.topk, self.num_draft_tokens = shape
        self.target_worker = self
        self.spec_v2_attn_backends = (self.model_runner.attn_backend,)

    def _draft_extend(self, rid: str, text: Text, row: np.ndarray, begin: int, end: int) -> None:
        device, keys = self.device, text.draft_keys(begin, end)
        device.write(device.draft, row[begin:end], keys, f"{rid} draft extend")
        device.read(device.draft, row[:end], text.draft_keys(0, end), f"{rid} draft extend")

    def _next(self, tokens: torch.Tensor) -> EagleDraftInput:
        lanes = len(tokens)
        return EagleDraftInput(
            topk_p=torch.ones(lanes, self.topk),
            topk_index=torch.zeros(lanes, self.topk, dtype=torch.int64),
            hidden_states=torch.zeros(lanes, 1),
            bonus_tokens=tokens,
        )

    def _extended(self, batch: Any, said: torch.Tensor, publish: Any) -> GenerationBatchResult:
        if publish is not None:
            publish(batch.seq_lens)
        result = super()._extended(batch, said, publish)
        result.next_draft_input, result.new_seq_lens = self._next(said), batch.seq_lens
        return result

    def _accept(self, rid: str, length: int) -> tuple[int, list[int]]:
        """How many tokens the target accepts, and the nodes of the tree that they are."""
        most = min(self.num_steps + 1, self.num_draft_tokens)
        accepted = 1 + digest(self.seed, int(rid), length) % most
        if self.topk == 1:
            return accepted, list(range(accepted))
        rng = np.random.default_rng(digest(self.seed, int(rid), length, 1))
        drafts = rng.choice(np.arange(1, self.num_draft_tokens), accepted - 1, replace=False)
        return accepted, [0, *sorted(drafts.tolist())]

    def _decode(self, batch: Any, publish: Any) -> GenerationBatchResult:
        lanes = self._rows(batch)
        self._draft(batch, lanes)
        verify = SimpleNamespace(
            draft_token=torch.zeros(len(lanes) * self.num_draft_tokens, dtype=torch.int64),
            draft_token_num=self.num_draft_tokens,
            prepared_out_cache_loc=None,
            prepared_mrope_positions=None,
            kv_loc_plan=None,
        )
        eagle_prepare_for_verify(verify, batch.req_to_token_pool, batch, self)
        window = batch.out_cache_loc.numpy().reshape(len(lanes), self.num_draft_tokens)
        most, device = min(self.num_steps + 1, self.num_draft_tokens), self.device
        index = torch.full((len(lanes), most), -1, dtype=torch.int64)
        tokens = torch.zeros(len(lanes), self.num_draft_tokens, dtype=torch.int64)
        for lane, (rid, text, length, row) in enumerate(lanes):
            if (row[length : length + self.num_draft_tokens] != window[lane]).any():
                device.faults.append(f"{rid}: the row has not the slots of its verify")
            device.read(device.target, row[:length], text.keys(0, length), f"{rid} verify")
            accepted, nodes = self._accept(rid, length)
            keys = np.full(self.num_draft_tokens, digest(int(rid), length, 5), np.int64)
            keys[nodes] = text.keys(length, length + accepted)
            device.write(device.target, window[lane], keys, f"{rid} verify")
            index[lane, :accepted] = torch.tensor(nodes) + lane * self.num_draft_tokens
            said = [text.token(length + 1 + at) for at in range(accepted)]
            tokens[lane, :accepted] = torch.tensor(said)
        accept_lens = (index >= 0).sum(1)
        before = batch.seq_lens
        if publish is not None:
            publish(before + accept_lens)
        if self.topk > 1:
            allocator = batch.token_to_kv_pool_allocator
            move_accept_tokens_to_target_kvcache(batch, index, accept_lens - 1, allocator)
        self._follow(lanes, accept_lens.tolist())
        bonus = tokens.gather(1, (accept_lens - 1)[:, None]).reshape(-1)
        return GenerationBatchResult(
            logits_output=LogitsProcessorOutput(next_token_logits=None),
            next_token_ids=tokens.reshape(-1),
            accept_lens=accept_lens,
            speculative_num_draft_tokens=self.num_draft_tokens,
            new_seq_lens=before + accept_lens,
            next_draft_input=self._next(bonus),
        )

    def _draft(self, batch: Any, lanes: list[tuple[str, Text, int, np.ndarray]]) -> None:
        """Every slot that a draft may use is written; a branch on pages has the prefix's tail."""
        bonus = batch.spec_info.bonus_tokens.tolist()
        prepare_for_draft(
            batch.spec_info,
            batch.req_to_token_pool,
            batch,
            None,
            self.model_runner,
            self.topk,
            self.num_steps,
        )
        device, page_size = self.device, self.device.page_size
        slots = batch.out_cache_loc.numpy().reshape(len(lanes), -1)
        for lane, (rid, text, length, row) in enumerate(lanes):
            self._tokens(batch, rid, bonus[lane : lane + 1], length)
            device.read(device.draft, row[:length], text.draft_keys(0, length), f"{rid} draft")
            if page_size > 1 and self.topk > 1:
                tail = length % page_size
                base, pages = length - tail, -(-(tail + self.num_steps) // page_size)
                for branch in range(1, self.topk):
                    first = base + branch * pages * page_size
                    copied = np.concatenate((row[:base], row[first : first + tail]))
                    keys = text.draft_keys(0, length)
                    device.read(device.draft, copied, keys, f"{rid} branch {branch}")
            garbage = digest(int(rid), length, 3)
            device.write(device.draft, slots[lane].astype(np.int64), garbage, f"{rid} draft")

    def _follow(
        self, lanes: list[tuple[str, Text, int, np.ndarray]], accept_lens: list[int]
    ) -> None:
        """Draft-extend of every node; those of the accepted ones are right."""
        device = self.device
        for (rid, text, length, row), accepted in zip(lanes, accept_lens, strict=True):
            keys = np.full(self.num_draft_tokens, digest(int(rid), length, 9), np.int64)
            keys[:accepted] = text.draft_keys(length, length + accepted)
            window = row[length : length + self.num_draft_tokens]
            device.write(device.draft, window, keys, f"{rid} draft extend")
            end = length + accepted
            device.read(device.target, row[:end], text.keys(0, end), f"{rid} compacted")
