"""For SGLang's test/registered/unit/session: what a turn leaves to its session and to the tree.

Turns overlap, are retracted, come with another key, or end with a token that has no KV.
"""

import unittest
from array import array
from types import SimpleNamespace

import torch

from sglang.srt.managers.io_struct import (
    CloseSessionReqInput,
    OpenSessionReqInput,
    SessionParams,
    TokenizedGenerateReqInput,
)
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH, Req, release_req
from sglang.srt.managers.schedule_policy import PrefillAdder
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_parallel, publish
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.session.session_controller import SessionController
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=6, suite="base-a-test-cpu")

SLOTS = 64
ROWS = 4


class TestSessionTurns(unittest.TestCase):
    def setUp(self):
        publish(
            ServerArgs(
                model_path="dummy",
                device="cpu",
                attention_backend="torch_native",
                page_size=1,
                enable_streaming_session=True,
            ),
            role="scheduler",
        )
        override = get_parallel().override(tp_rank=0)
        override.__enter__()
        self.addCleanup(override.__exit__, None, None, None)
        kv = MHATokenToKVPool(
            size=SLOTS, page_size=1, dtype=torch.float16, head_num=1, head_dim=2,
            layer_num=1, device="cpu", enable_memory_saver=False,
        )  # fmt: skip
        self.allocator = TokenToKVPoolAllocator(
            SLOTS, dtype=torch.float16, device="cpu", kvcache=kv, need_sort=False
        )
        self.rows = ReqToTokenPool(ROWS, 128, "cpu", False)
        self.cache = UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.rows,
                token_to_kv_pool_allocator=self.allocator,
                page_size=1,
                tree_components=(ComponentType.FULL,),
            )
        )
        self.texts = {}  # of each slot: the text whose KV was written there
        self.sessions = SessionController(self.cache)
        self.sessions.open(OpenSessionReqInput(capacity_of_str_len=1 << 20, session_id="s", streaming=True))

    def ask(self, rid, tokens, **keys):
        """Create the request of a turn."""
        sampling = SamplingParams(max_new_tokens=8)
        sampling.normalize(None)
        asked = TokenizedGenerateReqInput(
            rid=rid, input_text="", input_embeds=None, token_type_ids=None,
            input_ids=array("q", tokens), mm_inputs=None, sampling_params=sampling,
            return_logprob=False, logprob_start_len=-1, top_logprobs_num=0,
            token_ids_logprob=None, stream=False, session_params=SessionParams(id="s"), **keys,
        )  # fmt: skip
        return self.sessions.get("s").create_req(asked, None, 1000, eos_token_ids={2})

    def prefill(self, *batch):
        """Prefill requests as the scheduler does, who matches all of them first."""
        for req in batch:
            req.init_next_round_input(self.cache)
            req.lock = self.cache.lock(req.last_node)
        for req in batch:
            cached, length = req.prefix_len, len(req.origin_input_ids)
            is_fresh = not req.kv.holds_kv
            hit = self.cache.prefix_device_indices(req) if is_fresh else None
            [row] = self.rows.alloc([req])
            if is_fresh:
                self.rows.req_to_token[row, :cached] = hit
            new = self.allocator.alloc(length - cached)
            self.rows.req_to_token[row, cached:length] = new
            req.kv.kv_allocated_len = req.kv.kv_committed_len = length
            self.write(new, req.origin_input_ids)
            self.cache.maybe_hand_to_session(req)
        for req in batch:
            self.cache.checkpoint(req, up_to=len(req.origin_input_ids))
            req.output_ids.append(9)  # said by the prefill; it has no KV yet

    def run_turn(self, rid, tokens, **keys):
        """Prefill a turn; return the request and its cached length."""
        req = self.ask(rid, tokens, **keys)
        self.prefill(req)
        return req, req.prefix_len

    def run_round(self, req, drafts, correct, bonus):
        """Verify drafts: the KV of the last token and of all of them is written."""
        written = req.origin_input_ids + req.output_ids + array("q", drafts)
        start = req.kv.kv_committed_len
        new = self.allocator.alloc(len(written) - start)
        self.rows.req_to_token[req.kv.req_pool_idx, start : len(written)] = new
        self.write(new, written)
        req.output_ids.extend([*drafts[:correct], bonus])
        req.kv.kv_allocated_len = len(written)
        req.kv.kv_committed_len = start + 1 + correct

    def write(self, slots, text):
        """Note that slots get the KV of the last tokens of a text."""
        start = len(text) - len(slots)
        for at, slot in enumerate(slots.tolist(), start + 1):
            self.texts[slot] = tuple(text[:at])

    def end(self, req, reason):
        req.finished_reason = reason
        release_kv_cache(req, self.cache, checkpoint=True)

    def close(self):
        self.sessions.close(CloseSessionReqInput(session_id="s"))
        self.cache.evict(EvictParams(num_tokens=SLOTS))
        return self.allocator.available_size(), self.rows.available_size()

    def test_a_turn_that_is_refused_leaves_the_running_one_its_session(self):
        first, _ = self.run_turn("1", range(3, 13))
        refused, _ = self.run_turn("2", range(20, 25))
        self.end(refused, FINISH_ABORT())
        self.assertIsNotNone(self.ask("3", range(30, 33)).to_finish)  # the first one still runs
        self.end(first, FINISH_LENGTH(1))
        last, cached = self.run_turn("4", range(40, 43))
        self.assertEqual(cached, 10)
        self.end(last, FINISH_LENGTH(1))
        self.assertEqual(self.close(), (SLOTS, ROWS))

    def test_a_turn_that_is_refused_runs_in_one_batch_with_the_first_one(self):
        first, refused = self.ask("1", range(3, 13)), self.ask("2", range(20, 25))
        self.prefill(first, refused)
        self.end(refused, FINISH_ABORT())
        self.end(first, FINISH_LENGTH(1))
        self.assertEqual(self.close(), (SLOTS, ROWS))

    def test_an_aborted_turn_publishes_no_kv_of_a_rejected_draft(self):
        first, _ = self.run_turn("1", range(3, 13))
        self.run_round(first, drafts=[50, 51, 52], correct=1, bonus=60)
        self.end(first, FINISH_LENGTH(3))
        second, _ = self.run_turn("2", range(20, 25))
        self.end(second, FINISH_ABORT())
        text = second.origin_input_ids
        hit = self.cache.match_prefix(MatchPrefixParams(key=RadixKey(text, None)))
        slots = self.cache.path_device_indices(hit.last_device_node).tolist()
        self.assertGreater(len(slots), 0)
        for at, slot in enumerate(slots, 1):
            self.assertEqual(self.texts[slot], tuple(text[:at]))
        self.assertEqual(self.close(), (SLOTS, ROWS))

    def test_a_retracted_turn_is_not_history_and_its_session_can_be_closed(self):
        first, _ = self.run_turn("1", range(3, 13))
        release_kv_cache(first, self.cache, checkpoint=False)  # as retract_all
        first.reset_for_retract()
        session = self.sessions.get("s")
        self.assertTrue(session._inflight)  # it waits, to run again
        self.assertEqual(session.req_nodes, {})
        session.abort_req()  # the waiting request is aborted, as in abort_request
        self.assertEqual(self.close(), (SLOTS, ROWS))
        self.assertNotIn("s", self.sessions)

    def test_a_turn_gives_way_only_if_that_frees_a_row(self):
        turn, _ = self.run_turn("1", range(3, 13))
        sampling = SamplingParams(max_new_tokens=8)
        sampling.normalize(None)
        plain = Req("2", "", array("q", range(20, 25)), sampling, eos_token_ids={2}, vocab_size=1000)
        turn.priority = plain.priority = 0
        urgent = Req("3", "", array("q", range(30, 35)), sampling, eos_token_ids={2}, vocab_size=1000)
        urgent.priority = 1
        self.prefill(plain)
        urgent.init_next_round_input(self.cache)
        for running in (turn, plain):
            with self.subTest(rid=running.rid):
                batch = SimpleNamespace(
                    reqs=[running],
                    filter_batch=lambda keep_indices: None,
                    release_req=lambda _, left: release_req(
                        req=running, remaing_req_count=left, req_to_token_pool=self.rows,
                        token_to_kv_pool_allocator=self.allocator, tree_cache=self.cache,
                        hisparse_coordinator=None,
                    ),
                )  # fmt: skip
                free = self.rows.available_size()
                adder = PrefillAdder(1, self.cache, self.allocator, batch, 1.0, 64, None)
                gives_way = adder.preempt_to_schedule(urgent)
                self.assertEqual(self.rows.available_size(), free + gives_way)
                self.assertEqual(gives_way, running is plain)

    def test_a_turn_with_another_adapter_or_salt_does_not_run_on_its_sessions_kv(self):
        for keys in ({"lora_id": "b"}, {"extra_key": "b"}, {"cache_salt": "b"}):
            with self.subTest(**keys):
                self.setUp()
                first, _ = self.run_turn("1", range(3, 13), **dict.fromkeys(keys, "a"))
                self.end(first, FINISH_LENGTH(1))
                second, cached = self.run_turn("2", range(20, 25), **keys)
                self.assertEqual(cached, 0)
                self.end(second, FINISH_LENGTH(1))
                self.assertEqual(self.close(), (SLOTS, ROWS))

    def test_an_aborted_turn_with_another_adapter_publishes_no_slot_twice(self):
        first, _ = self.run_turn("1", range(3, 13), lora_id="a")
        self.end(first, FINISH_LENGTH(1))
        second, _ = self.run_turn("2", range(20, 25), lora_id="b")
        self.end(second, FINISH_ABORT())
        held = []
        for adapter in ("a", "b"):
            key = RadixKey(array("q", range(3, 13)), adapter)
            hit = self.cache.match_prefix(MatchPrefixParams(key=key))
            path = self.cache.path_device_indices(hit.last_device_node)
            held.append(set(path.tolist()))
        self.assertFalse(held[0] & held[1])
        self.assertEqual(self.close(), (SLOTS, ROWS))

    def test_a_turn_with_the_same_adapter_runs_on_its_sessions_kv(self):
        first, _ = self.run_turn("1", range(3, 13), lora_id="a")
        self.end(first, FINISH_LENGTH(1))
        second, cached = self.run_turn("2", range(20, 25), lora_id="a")
        self.assertEqual(cached, 10)
        self.end(second, FINISH_LENGTH(1))
        self.assertEqual(self.close(), (SLOTS, ROWS))


if __name__ == "__main__":
    unittest.main()
