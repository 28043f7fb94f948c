"""`run_sglang`: today's SGLang over the device of `tests/embed`, driven by a case.

The loop, the device and the fake models are those that the tests of the plug-in run; here they play
verbs. Content is checked at every read; pages, rows and the tree between turns by `SglangAccounts`;
SGLang's own sums when it is idle and at the end.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import sglang_loop
import sglang_torch
from sglang.srt.managers.io_struct import (
    ContinueGenerationReqInput,
    PauseGenerationReqInput,
    SessionParams,
    TokenizedGenerateReqInput,
)
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.utils import validate_input_length
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.runtime_context import get_parallel

from lab.engines.case import Case
from lab.engines.content import STOP, VOCABULARY
from lab.engines.device import Finding
from lab.engines.known import NO_CHUNKS, OWN_CHUNK, OWN_WINDOW
from lab.engines.sglang_accounts import SglangAccounts
from lab.engines.sglang_hybrid import HybridLoop, HybridSetup
from lab.engines.sglang_player import (
    Player,
    Tokenizer,
    adapter_name,
    adapter_of,
    in_a_fork,
    played,
    waiting_flags,
)

#: Settings of models with windows, or with recurrent states.
HYBRID = ("window", "window_tokens", "states", "strategy", "grain", "interval", "most_states")


def run_sglang(case: Case) -> list[Finding]:
    """Run a case in a fork, whose settings nobody else sees; return what it broke."""
    return in_a_fork(lambda case: played(NewestPlayer, case), case)


def _window_of(tree: Any, handle: Any) -> Iterator[Any]:
    """The nodes with slots of a window that a lock of a cached prefix holds."""
    node, covered = tree.resolve_node_handle(handle), 0
    while getattr(node, "parent", None) is not None and covered < tree.sliding_window_size:
        covered += len(node.key)
        if node.component_data[ComponentType.SWA].value is not None:
            yield node
        node = node.parent


class NewestPlayer(Player):
    """Plays verbs on the loop of the plug-in's tests."""

    def make_loop(self) -> Any:
        """Return SGLang's scheduler over the device of `tests/embed`."""
        sglang_torch.install()
        settings = self.case.settings
        given: dict[str, Any] = {
            "page_size": settings["page"],
            "shape": settings["shape"] and tuple(settings["shape"]),
            "overlap": settings["overlap"],
            "num_tokens": settings["num_tokens"],
            "num_rows": settings["rows"],
            "chunk": settings["chunk"],
            "conservativeness": settings["conservativeness"],
            "num_requests": 0,
            "num_sessions": settings["sessions"],
            "seed": self.case.seed,
            "server": tuple(waiting_flags(settings).items()),
        }
        loop: Any
        if case_kinds := {name: settings[name] for name in HYBRID if name in settings}:
            loop = HybridLoop(HybridSetup(**given, **case_kinds))
        else:
            loop = sglang_loop.Loop(sglang_loop.Setup(**given))
        self.rank = get_parallel().override(tp_rank=0)  # after the settings are published
        self.rank.__enter__()
        loop._pause_intervals = deque()
        # As `TpModelWorker.get_worker_info` has both.
        loop.max_req_len = settings["num_tokens"] - 1
        loop.max_req_input_len = loop.max_req_len - 5
        loop.mm_receiver = None
        # Until 0.5.22; since then it calls `send_abort_output`.
        loop.ipc_channels = SimpleNamespace(send_to_tokenizer=Tokenizer(self.running))
        loop.grammar_manager = SimpleNamespace(
            has_waiting_grammars=lambda: False,
            grammar_queue=[],
            abort_requests=lambda _: None,
            clear=lambda: None,
        )
        loop.model_worker.clear_cache_pool = lambda: None
        return loop

    def make_accounts(self) -> SglangAccounts:
        """Return accounts of pages and rows."""
        return SglangAccounts(self.loop, adapter_of, self.hole_note)

    def run(self) -> None:
        """Run the event loop, then close and evict all."""
        loop = self.loop
        (loop.event_loop_overlap if self.case.settings["overlap"] else loop.event_loop_normal)()
        loop.finish()

    def leaks(self) -> list[str]:
        """Return what SGLang's checker said when it was idle."""
        leaks: list[str] = self.loop.outcome.leaks
        return leaks

    def window_note(self, req: Any) -> str:
        """What is known of one that waits, by what SGLang's budget asks for a window."""
        if not (window := self.case.settings.get("window")):
            return ""
        page, chunk = self.case.settings["page"], self.loop.setup.chunk_size
        length = -(-(len(req.origin_input_ids) + len(req.output_ids) - req.prefix_len) // page)
        max_new = req.sampling_params.max_new_tokens - len(req.output_ids)
        now = min(length * page, chunk or length * page)
        needed = max(now - window, 0) + min(length * page + max_new, window) + page
        left = self.case.settings["window_tokens"] - needed
        if left <= 0 and not chunk:
            return NO_CHUNKS
        room = self._window_room() - sum(
            len(node.component_data[ComponentType.SWA].value)
            for node in _window_of(self.loop.tree_cache, req.last_node)
            if not node.component_data[ComponentType.SWA].lock_ref
        )
        is_alone = self.slots().keys() <= {f"s{self.turns.get(req.rid)}"}
        return OWN_WINDOW if left > 0 and needed >= room and is_alone else ""

    def _window_room(self) -> int:
        """Slots of a window's pool that are free or may be."""
        room: int = self.loop.token_to_kv_pool_allocator.swa_available_size()
        return room + int(self.loop.tree_cache.swa_evictable_size())

    def stuck_note(self) -> str:
        """What is known of a prompt that waits between two chunks, or of the first that waits."""
        settings = self.case.settings
        has_window, is_between = bool(settings.get("window")), self.loop.chunked_req is not None
        if has_window and is_between and self._window_room() <= settings["page"]:
            return OWN_CHUNK
        return super().stuck_note()

    def slots(self) -> dict[str, Any]:
        """Return the records of sessions."""
        slots: dict[str, Any] = self.loop.tree_cache.session.slots
        return slots

    def pause(self, mode: str) -> None:
        """Pause, as over HTTP."""
        self.loop.pause_generation(PauseGenerationReqInput(mode=mode))

    def resume(self) -> None:
        """Resume, as over HTTP."""
        self.loop.continue_generation(ContinueGenerationReqInput())

    def flush(self) -> bool:
        """Flush, as over HTTP."""
        return bool(self.loop.flush_cache(empty_cache=False))

    def arrive(
        self,
        name: str,
        tokens: list[int],
        most: int,
        session: str | None,
        adapter: int = 0,
        priority: int | None = None,
    ) -> None:
        """Make a request as `handle_generate_request` does."""
        given: dict[str, Any] = {"eos_token_ids": {STOP}, "vocab_size": VOCABULARY}
        if session is None:
            given |= {"lora_id": adapter_name(adapter), "priority": priority}
            req = Req(name, "", array("q", tokens), self.sampling(most), **given)
        else:
            asked = TokenizedGenerateReqInput(
                rid=name,
                input_text="",
                input_embeds=None,
                token_type_ids=None,
                input_ids=array("q", tokens),
                mm_inputs=None,
                sampling_params=self.sampling(most),
                return_logprob=False,
                logprob_start_len=-1,
                top_logprobs_num=0,
                token_ids_logprob=None,
                stream=False,
                session_params=SessionParams(id=session),
                lora_id=adapter_name(adapter),
                priority=priority,
            )
            at = self.loop.session_controller.get(session)
            req = at.create_req(asked, None, VOCABULARY, eos_token_ids={STOP})
        self.loop.init_req_max_new_tokens(req)
        refused = validate_input_length(req, self.loop.max_req_input_len, False)
        if refused:
            req.set_finish_with_abort(refused)
        self.admit(req, adapter)
        self.loop._add_request_to_queue(req)
