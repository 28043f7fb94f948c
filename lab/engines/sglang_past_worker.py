"""Fake models of `PastLoop`: what they read and write is checked by the device."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers import scheduler
from sglang_device import KV

from lab.engines.content import Text, digest
from lab.engines.shim import Hollow

#: What a worker gives back; until 0.5.2 three values.
GenerationBatchResult: Any = getattr(scheduler, "GenerationBatchResult", None)
if "delay_sample_func" not in getattr(GenerationBatchResult, "__dataclass_fields__", ()):
    GenerationBatchResult = None


def _asked() -> tuple[str, ...]:
    """What the scheduler of this release asks its worker for at the start, by its names."""
    text = Path(str(scheduler.__file__)).read_text(encoding="utf-8")
    before = text.partition("self.tp_worker.get_worker_info()")[0]
    names = before.rpartition("(")[2].partition(")")[0].split(",")
    return tuple(name.strip().removeprefix("self.") for name in names if name.strip())


ASKED = _asked()


class PastWorker:
    """A model that decodes one token at a time; `given` is the loop, its rows and its slots."""

    given: Any = None
    stream: Any = None
    # What a scheduler asks for its report of the start, and for a host's cache.
    weight_load_time, preloaded_weights_bytes = 0.0, 0
    hicache_draft_plan = primary_draft_kv_pool = None
    graph_memory_usage = graph_time_usage = MappingProxyType[str, float]({})

    def __init__(self, *_: Any, **__: Any) -> None:
        self.loop, self.rows, self.slots = self.given
        self.device = self.loop.simulated
        self.texts: dict[str, Text] = {}
        self.batch: Any = None  # the schedule batch whose forward is asked for
        settings = self.loop.settings
        self.sliding_window_size: Any = settings.get("window") or None
        self.is_hybrid = self.is_hybrid_swa = self.sliding_window_size is not None
        self.has_states = "spare_states" in settings
        self.window = KV(settings["window_tokens"] + settings["page"]) if self.is_hybrid else None
        self.model_runner: Any = Runner()
        states = Hollow() if self.has_states else None
        self.model_runner.hybrid_gdn_config = states
        self.model_runner.model_config = SimpleNamespace(states=states, context_len=4096)
        self.model_config = SimpleNamespace(use_ngram_embedding=False, context_len=4096)
        self.target_worker = self

    def get_worker_info(self) -> tuple[Any, ...]:
        """Return what a scheduler asks at its start."""
        settings = self.loop.settings
        size = settings["num_tokens"] // settings["page"] * settings["page"]
        known = {
            "max_total_num_tokens": size,
            "max_prefill_tokens": 1 << 14,
            "max_running_requests": settings["rows"],
            "max_req_len": settings["num_tokens"] - 1,
            "max_req_input_len": settings["num_tokens"] - 6,
            "random_seed": 1,
            "device": "cpu",
            "forward_stream": self.stream,
            "worker_global_server_args_dict": {},
        }
        return tuple(known.get(name) for name in ASKED)

    def get_memory_pool(self) -> tuple[Any, Any]:
        """Return the rows and the allocator of slots."""
        return self.rows, self.slots

    def get_tokens_per_layer_info(self) -> tuple[int, int]:
        """Return the slots of both pools, of a model with a window."""
        return self.slots._size_full, self.slots._size_swa

    def get_pad_input_ids_func(self) -> None:
        """Nothing: no images."""

    def get_tp_group(self) -> Any:
        """Return the only rank."""
        return Hollow()

    get_attention_tp_group = get_attention_tp_cpu_group = get_tp_group

    def clear_cache_pool(self, *_: Any, **__: Any) -> None:
        """Nothing: what is flushed is written before it is read."""

    set_hicache_consumer = on_verify_complete_cpu = clear_cache_pool
    alloc_memory_pool = init_attention_backends = init_cuda_graphs = clear_cache_pool  # 0.5.14
    init_hicache_draft_plan = get_confidence_budget_prepare = clear_cache_pool  # 0.5.18
    prewarm_sampling = clear_cache_pool  # 0.5.20

    def forward_batch_generation(self, batch: Any, *_: Any, **options: Any) -> Any:
        """Run one batch, as SGLang's worker would."""
        publish = options.get("on_publish")
        mode = batch.forward_mode
        result = (self._extend if mode.is_extend() else self._decode)(batch, publish)
        if GenerationBatchResult is None:
            return result["logits_output"], result["next_token_ids"], False
        names = set(GenerationBatchResult.__dataclass_fields__)
        return GenerationBatchResult(
            **{name: value for name, value in result.items() if name in names}
        )

    def _lanes(self, batch: Any) -> list[tuple[str, Text, int, Any]]:
        """Each lane's id, text, length on the device, and its row of slots."""
        table = self.rows.req_to_token[batch.req_pool_indices].numpy()
        lens = batch.seq_lens.tolist()
        return [
            (req.rid, self.texts[req.rid], length, row.astype(np.int64))
            for req, length, row in zip(self.batch.reqs, lens, table, strict=True)
        ]

    def _tokens(self, rid: str, tokens: list[int], at: int) -> None:
        """The tokens that the model is fed must be the text's."""
        text = self.texts[rid]
        text.token(at + len(tokens))
        if tokens != text.tokens[at : at + len(tokens)]:
            self.device.faults.append(f"{rid} is fed {tokens} at {at}, its text has others")

    def _read(self, text: Text, row: Any, length: int, what: str) -> None:
        self.device.read(self.device.target, row[:length], text.keys(0, length), what)
        if self.window is not None:
            begin = max(0, length - self.sliding_window_size)
            slots = self._mapped(row[begin:length])
            self.device.read(self.window, slots, text.keys(begin, length), f"{what} window")

    def _mapped(self, slots: Any) -> Any:
        mapped: Any = self.slots.full_to_swa_index_mapping[torch.from_numpy(slots)].numpy()
        return mapped

    def _write(self, rid: str, slots: Any, keys: Any, what: str) -> None:
        self.device.write(self.device.target, slots, keys, f"{rid} {what}")
        if self.window is not None:
            self.device.write(self.window, self._mapped(slots), keys, f"{rid} window {what}")

    def _step(self, rid: str, text: Text, begin: int, end: int, lane: int) -> None:
        """Go on from the state of exactly the tokens before, to the one of all."""
        if not self.has_states:
            return
        keys, row = self.rows.keys(), int(self.batch.req_pool_indices[lane])
        at = int(self.rows.req_index_to_mamba_index_mapping[row])
        if begin and int(keys[at]) != text.state_key(begin):
            self.device.faults.append(
                f"{rid} goes on from state {at}, which is not that of its {begin} tokens"
            )
        keys[at] = text.state_key(end)

    def _extend(self, batch: Any, publish: Any) -> dict[str, Any]:
        taken = 0
        said: list[int] = []
        copied = getattr(batch, "mamba_cow_src_indices", None)
        if copied is not None:  # cached states that requests go on from; since 0.5.14
            keys = self.rows.keys()
            keys[batch.mamba_cow_dst_indices] = keys[copied]
        tokens, slots = batch.input_ids.tolist(), batch.out_cache_loc.numpy()
        lens = zip(self.batch.prefix_lens, self.batch.extend_lens, strict=True)
        for (rid, text, length, row), (begin, count) in zip(self._lanes(batch), lens, strict=True):
            new = slots[taken : taken + count]
            self._tokens(rid, tokens[taken : taken + count], begin)
            if length != begin + count or (row[begin:length] != new).any():
                self.device.faults.append(f"{rid}: the row has not the slots of its extend")
            self._write(rid, new, text.keys(begin, length), "extend")
            self._read(text, row, length, rid)
            self._step(rid, text, begin, length, len(said))
            self._draft_extend(rid, text, row, begin, length)
            said.append(text.token(length))
            taken += count
        return self._extended(batch, torch.tensor(said), publish)

    def _draft_extend(self, rid: str, text: Text, row: Any, begin: int, end: int) -> None:
        """Nothing: no draft model."""

    def _extended(self, batch: Any, said: torch.Tensor, publish: Any) -> dict[str, Any]:
        logits = LogitsProcessorOutput(next_token_logits=None)
        return {"logits_output": logits, "next_token_ids": said, "can_run_cuda_graph": False}

    def _decode(self, batch: Any, publish: Any) -> dict[str, Any]:
        said: list[int] = []
        tokens, slots = batch.input_ids.tolist(), batch.out_cache_loc.numpy()
        for lane, (rid, text, length, row) in enumerate(self._lanes(batch)):
            at = length - 1
            self._tokens(rid, tokens[lane : lane + 1], at)
            if row[at] != slots[lane]:
                self.device.faults.append(f"{rid}: the row has not the slot of its decode")
            new = slots[lane : lane + 1]
            self._write(rid, new, text.keys(at, length), "decode")
            self._read(text, row, length, rid)
            self._step(rid, text, at, length, lane)
            said.append(text.token(length))
        return PastWorker._extended(self, batch, torch.tensor(said), publish)


class Runner(Hollow):
    """A model's runner; it has no kinds of layers but attention."""

    hybrid_gdn_config: Any = None
    model_config: Any = None
    mamba2_config = linear_attn_model_spec = None
    kimi_linear_config = hybrid_lightning_config = canary_manager = None
    # Since 0.5.16; a `Hollow` would say yes.
    ngram_embedding_manager = SimpleNamespace(prepare_for_forward=lambda batch, **_: batch)
    prefill_aware_swa = False
    mtp_draft_device_pools: tuple[Any, ...] = ()
    mtp_draft_mamba_pools = mtp_draft_device_pools
    hisparse_coordinator = eplb_manager = None
    token_to_kv_pool = SimpleNamespace(post_capture_active=False)  # 0.5.20


class PastDrafter(PastWorker):
    """A target model and an EAGLE head that drafts a chain, of SGLang's second worker."""

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        target = given["target_worker"]
        self.target, self.texts = target, target.texts
        self.draft_worker = SimpleNamespace(draft_runner=Runner())
        num_steps, _, num_draft_tokens = self.loop.settings["shape"]
        self.num_steps = num_steps
        self.num_draft_tokens = self.speculative_num_draft_tokens = num_draft_tokens

    def _lanes(self, batch: Any) -> Any:
        self.batch = self.target.batch
        return super()._lanes(batch)

    def forward_batch_generation(self, batch: Any, *args: Any, **options: Any) -> Any:
        """Run one batch of both models."""
        self.batch = self.target.batch
        return super().forward_batch_generation(batch, *args, **options)

    def _draft_extend(self, rid: str, text: Text, row: Any, begin: int, end: int) -> None:
        device, keys = self.device, text.draft_keys(begin, end)
        device.write(device.draft, row[begin:end], keys, f"{rid} draft extend")
        device.read(device.draft, row[:end], text.draft_keys(0, end), f"{rid} draft extend")

    def _next(self, tokens: torch.Tensor, lens: torch.Tensor) -> Any:
        from sglang.srt.speculative.eagle_info import EagleDraftInput

        lanes = len(tokens)
        given = {
            "topk_p": torch.ones(lanes, 1),
            "topk_index": torch.zeros(lanes, 1, dtype=torch.int64),
            "hidden_states": torch.zeros(lanes, 1),
            "verified_id": tokens.int(),
            "bonus_tokens": tokens.int(),
            "new_seq_lens": lens,
            "verify_done": None,
            "allocate_lens": lens,
        }
        names = EagleDraftInput.__dataclass_fields__
        return EagleDraftInput(**{name: value for name, value in given.items() if name in names})

    def _extended(self, batch: Any, said: torch.Tensor, publish: Any) -> dict[str, Any]:
        if publish is not None:
            publish(batch.seq_lens)
        result = super()._extended(batch, said, publish)
        lens = batch.seq_lens.clone()
        return result | {"next_draft_input": self._next(said, lens), "new_seq_lens": lens}

    def _decode(self, batch: Any, publish: Any) -> dict[str, Any]:
        count, device = self.num_draft_tokens, self.device
        lanes = self._lanes(batch)
        drafts = batch.spec_info
        bonus = getattr(drafts, "verified_id", None)
        bonus = (bonus if bonus is not None else drafts.bonus_tokens).tolist()
        lens, before = [], batch.seq_lens.clone()
        tokens = torch.zeros(len(lanes), count, dtype=torch.int64)
        for lane, (rid, text, length, row) in enumerate(lanes):
            self._tokens(rid, bonus[lane : lane + 1], length)
            device.read(device.draft, row[:length], text.draft_keys(0, length), f"{rid} draft")
            window = row[length : length + count]
            drafted = row[length : length + self.num_steps]
            device.write(device.draft, drafted, digest(int(rid), length, 3), f"{rid} draft")
            self._read(text, row, length, f"{rid} verify")
            accepted = 1 + digest(self.loop.seed, int(rid), length) % min(self.num_steps + 1, count)
            keys = np.full(count, digest(int(rid), length, 5), np.int64)
            keys[:accepted] = text.keys(length, length + accepted)
            self._write(rid, window, keys, "verify")
            keys = np.full(count, digest(int(rid), length, 9), np.int64)
            keys[:accepted] = text.draft_keys(length, length + accepted)
            device.write(device.draft, window, keys, f"{rid} draft extend")
            said = [text.token(length + 1 + at) for at in range(accepted)]
            tokens[lane, :accepted] = torch.tensor(said)
            lens.append(accepted)
        accept_lens = torch.tensor(lens)
        after = before + accept_lens
        if publish is not None:
            publish(after)
        last = tokens.gather(1, (accept_lens - 1)[:, None]).reshape(-1)
        return super()._extended(batch, tokens.reshape(-1), None) | {
            "accept_lens": accept_lens,
            "speculative_num_draft_tokens": count,
            "new_seq_lens": after,
            "next_draft_input": self._next(last, after),
        }
