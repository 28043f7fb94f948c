"""`VllmLoop`: vLLM's engine core around its own scheduler, over a `LateDevice`, driven by a case.

The loop is the one of `EngineCore`: `step`, and `step_with_batch_queue` where batches overlap. The
verbs are the calls that a server makes: `add_request`, `finish_requests`, `set_pause_state`,
`reset_prefix_cache`.
"""

from __future__ import annotations

import traceback
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput
from vllm.v1.request import RequestStatus

from lab.engines.accounts import Accounts
from lab.engines.case import Case, Verb
from lab.engines.content import IMAGE, Text, tokens_of
from lab.engines.device import SETUP, Finding, LateDevice, LaunchedStep
from lab.engines.known import FAILED_LOAD, VICTIM
from lab.engines.laws import LAWS, CachedEntry, EngineView, Lengths, RequestView
from lab.engines.vllm_connector import LateConnector
from lab.engines.vllm_engine import PauseState, make_output, make_request, make_scheduler
from lab.engines.vllm_home import steps_in_flight
from lab.engines.vllm_images import left
from lab.engines.vllm_rows import Lane
from lab.engines.vllm_worker import Worker, group_keys

if TYPE_CHECKING:
    from lab.engines.vllm_host_tier import HostTier

#: Turns after which a case that still runs is endless.
MOST_TURNS = 3000
#: The samples that a request asks for at most.
MOST_SAMPLES = 2
#: Salts are below; 0 is none.
MOST_SALTS = 10
#: The package whose functions name the place of an exception.
PACKAGE = "/vllm/"


def run_vllm(case: Case) -> list[Finding]:
    """Run a case; return what it broke, the first turn's findings alone."""
    try:
        loop = VllmLoop(case)
    except Exception as error:
        return [Finding(SETUP, "the loop", f"{type(error).__name__}: {error}")]
    try:
        loop.run()
    except Exception as error:  # an engine that dies has broken a law
        frames = traceback.extract_tb(error.__traceback__)
        inside = [frame for frame in frames if PACKAGE in frame.filename]
        last = inside[-1] if inside and frames[-1] in inside else None
        where = f"{last.filename.rpartition(PACKAGE)[2]}, {last.name}" if last else "the loop"
        text = f"{type(error).__name__}: {error} ({where}:{last.lineno if last else ''})"
        if last is None:
            text += "".join(traceback.format_tb(error.__traceback__)[-3:])
        return [*loop.device.findings, Finding("exception", where, text)]
    return loop.device.findings


class VllmLoop:
    """One run of a case."""

    def __init__(self, case: Case) -> None:
        self.case, self.settings = case, case.settings
        self.device = LateDevice()
        self.scheduler: Any = make_scheduler(self.settings)
        self.manager = self.scheduler.kv_cache_manager
        self.pool = self.manager.block_pool
        self.accounts = Accounts(self.device, self.pool.num_gpu_blocks)
        self._wrap_pool()
        self._wrap_preemption()
        self.worker = Worker(
            self.device,
            self.settings,
            case.seed,
            self.pool.num_gpu_blocks,
            lambda name: self.requests[name].text,
            getattr(self.scheduler, "num_hash_lookahead_tokens", 0) > 0,
        )
        self.connector: LateConnector | HostTier | None = self.scheduler.connector
        if isinstance(self.connector, LateConnector):
            self.connector.serve(self.worker, self.device, case.seed, self.settings)
        elif self.connector is not None:
            from lab.engines.vllm_host_tier import HostTier  # old releases have no such connector

            self.connector = HostTier(self.worker, self.device, case.seed, self.settings)
        self.arrived: set[str] = set()  # whose loads have landed, untold
        self.requests: dict[str, RequestView] = {}
        self.batches: deque[tuple[Any, LaunchedStep, list[Lane]]] = deque()
        self.tick = self.idle_turns = 0
        self.num_sent = 0
        self.depth = steps_in_flight(self.settings)
        self.clears_when_idle = False
        #: What each hash stands for: a text, and where its block ends.
        self.hashes: dict[bytes, tuple[Text, int]] = {}

    def _wrap_pool(self) -> None:
        """Count every block that vLLM's pool hands out, shares and takes back."""
        pool, accounts = self.pool, self.accounts
        take, share, give_back = pool.get_new_blocks, pool.touch, pool.free_blocks

        def get_new_blocks(*args: Any, **given: Any) -> Any:
            blocks = take(*args, **given)
            accounts.take(block.block_id for block in blocks)
            for block in blocks:
                self.device.notes.pop(block.block_id, None)
            return blocks

        def touch(blocks: Any, *args: Any, **given: Any) -> Any:
            flat = [block for part in blocks for block in _flat(part)]
            result = share(blocks, *args, **given)
            accounts.share(block.block_id for block in flat)
            return result

        def free_blocks(blocks: Any, *args: Any, **given: Any) -> Any:
            listed = list(blocks)
            accounts.give_back(block.block_id for block in listed)
            return give_back(listed, *args, **given)

        pool.get_new_blocks, pool.touch, pool.free_blocks = get_new_blocks, touch, free_blocks

    def _wrap_preemption(self) -> None:
        """Note the blocks that nobody will write: hashed in this step, whose request leaves it."""
        preempt = self.scheduler._preempt_request
        self.hashed: dict[int, Any] = {}  # by block, before this step

        def preempt_request(request: Any, *args: Any, **given: Any) -> None:
            for block in chain(*self.manager.get_blocks(request.request_id).blocks):
                key = block.block_hash
                if key is not None and self.hashed.get(block.block_id) != key:
                    self.device.notes[block.block_id] = VICTIM
            preempt(request, *args, **given)

        self.scheduler._preempt_request = preempt_request

    # The run.

    def run(self) -> None:
        """Play the verbs, let all requests end, and look at the rest."""
        verbs = deque(self.case.verbs)
        while verbs or self._has_work():
            while verbs and verbs[0].turn <= self.tick + 1:
                self._play(verbs.popleft())
            if not verbs and self._is_paused():
                self.resume()
            self.turn()
            if self.device.findings:
                return
            if self.tick > MOST_TURNS:
                self.device.fault("progress", "endless", f"{MOST_TURNS} turns, and work is left")
                return
        self._rest()
        if not self.device.findings and self.settings["caching"] and not self.worker.may_spoil:
            self._hit_twice()

    def _has_work(self) -> bool:
        return bool(self.batches or self.scheduler.requests or self.scheduler.has_requests())

    def _play(self, verb: Verb) -> None:
        getattr(self, verb.name)(**verb.given)

    def turn(self) -> None:
        """One round of the engine core."""
        self.tick += 1
        if self.connector is not None:
            self.arrived |= self.connector.land(self.tick, self._owned())
        before = len(self.batches)
        if self.depth > 1:
            ran = self._step_with_batch_queue()
        else:
            ran = self._step()
        waits = bool(self.scheduler.requests) and not self._is_paused()
        waits &= not (self.connector and self.connector.under_way)
        self.idle_turns = self.idle_turns + 1 if waits and not ran and not before else 0
        if self.clears_when_idle and not self.batches and not self.scheduler.has_requests():
            self.clears_when_idle = False
            self.scheduler.reset_prefix_cache(reset_running_requests=True)
        self._look("turn")

    def _runs(self) -> bool:
        """Whether there is a step to run: a load that has arrived is told with one."""
        return bool(self.scheduler.has_requests() or self.arrived)

    def _step(self) -> bool:
        if not self._runs():
            return False
        output, step, lanes = self._launch()
        self._process(output, step, lanes)
        if self.settings["drafter"]:
            names = [lane.row.name for lane in lanes if lane.said]
            drafts = [list(lane.row.drafts) for lane in lanes if lane.said]
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))
        return bool(output.total_num_scheduled_tokens > 0)

    def _step_with_batch_queue(self) -> bool:
        ran = False
        if self._runs():
            output, step, lanes = self._launch()
            ran = output.total_num_scheduled_tokens > 0
            self.batches.appendleft((output, step, lanes))
            if ran and len(self.batches) < self.depth and not self.batches[-1][1].has_run:
                return True
        elif not self.batches:
            return False
        self._process(*self.batches.pop())
        return ran

    def _launch(self) -> tuple[Any, LaunchedStep, list[Lane]]:
        self.hashed = {block.block_id: block.block_hash for block in self.pool.blocks}
        output = self.scheduler.schedule()
        self._note_hashes()
        loads = []
        if self.connector is not None:
            metadata = output.kv_connector_metadata
            loads = self.connector.begin(metadata, self.tick, self._owned())
        step, lanes = self.worker.launch(output, loads)
        if not self.settings["is_late"]:
            self.device.run_through(step)
        return output, step, lanes

    def _process(self, output: Any, step: LaunchedStep, lanes: list[Lane]) -> None:
        """Wait for a step, and give the scheduler what it said."""
        self.device.run_through(step)
        self.worker.has_results(lanes)
        names = [lane.row.name for lane in lanes]
        loaded = set() if self.connector is None or self.connector.is_async else set(names)
        result = make_output(
            req_ids=names,
            req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=[list(lane.said) for lane in lanes],
            kv_connector_output=self._told(loaded),
        )
        for outputs in self.scheduler.update_from_output(output, result).values():
            for said in outputs.outputs:
                request = self.requests[said.request_id]
                request.said += said.new_token_ids
                request.is_finished |= said.finish_reason is not None
                request.is_aborted |= str(said.finish_reason) == "error"  # its load has failed
        self._note_hashes()

    def _told(self, loaded: set[str]) -> Any:
        """What the workers' connectors tell with a result, which had loads of `loaded` in it."""
        if self.connector is None:
            return None
        arrived, self.arrived = self.arrived, set()
        lost = self.connector.take_lost(arrived | loaded)
        self.device.notes |= dict.fromkeys(lost, FAILED_LOAD)
        told = self.connector.told()
        if not arrived and not lost and told is None:
            return None
        more = {} if told is None else {"kv_connector_worker_meta": told}
        return KVConnectorOutput(finished_recving=arrived, invalid_block_ids=lost, **more)

    def _note_hashes(self) -> None:
        size = getattr(self.pool, "hash_block_size", self.scheduler.block_size)
        for name, request in self.scheduler.requests.items():
            text = self.requests[name].text
            for at, key in enumerate(request.block_hashes, 1):
                self.hashes.setdefault(bytes(key), (text, at * size))

    # What a server calls.

    def send(
        self,
        number: int,
        stem: int,
        shared: int,
        length: int,
        most: int,
        salt: int = 0,
        priority: int = 0,
        samples: int = 1,
        images: Sequence[Sequence[int]] = (),
        adapter: int = 0,
    ) -> None:
        """A request comes: `shared` tokens of a stem, and own ones up to its length.

        An image is an offset, a length, and which one it is; those beyond the prompt are not in it.
        Each of its samples is a request of the scheduler, and all arrive at the same moment.
        """
        seed = self.case.seed
        own = tokens_of(seed, 1000 + number, length)
        tokens = tokens_of(seed, stem, shared) + own[shared:]
        images = [image for image in images if image[0] + image[1] <= length]
        for offset, size, _ in images:
            tokens[offset : offset + size] = [IMAGE] * size
        self.num_sent += 1
        given = salt, priority, self.num_sent, images, adapter
        for name in self.names_of(number)[:samples]:
            # KV of another adapter is other KV, as with another salt.
            text = Text(tokens, salt + MOST_SALTS * adapter, images)
            self.requests[name] = RequestView(text, most)
            self.scheduler.add_request(make_request(self.scheduler, name, tokens, most, *given))

    @staticmethod
    def names_of(number: int) -> list[str]:
        """The requests that the scheduler may have of one that was sent, by their samples."""
        return [str(number + 1000 * sample) for sample in range(MOST_SAMPLES)]

    def abort(self, number: int) -> None:
        """The client of a request leaves."""
        for name in self.scheduler.requests.keys() & {*self.names_of(number)}:
            self.requests[name].is_aborted = True
            self.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)

    def reset(self, running: bool) -> None:
        """The prefix cache is emptied; `running` requests start again.

        While blocks are held for a load, or by a launched step, vLLM says that it cannot.
        """
        self.hashed = {block.block_id: block.block_hash for block in self.pool.blocks}
        try:
            self.scheduler.reset_prefix_cache(reset_running_requests=running)
        except RuntimeError as error:
            if self.connector is None or "Failed to reset" not in str(error):
                raise

    def pause(self, mode: str, clears: bool) -> None:
        """Generation is paused; once idle, the caches are cleared if asked."""
        if PauseState is None:
            return
        if mode == "abort":
            for request in self.scheduler.requests:
                self.requests[request].is_aborted = True
            self.scheduler.finish_requests(
                list(self.scheduler.requests), RequestStatus.FINISHED_ABORTED
            )
        state = PauseState.PAUSED_ALL if mode == "keep" else PauseState.PAUSED_NEW
        self.scheduler.set_pause_state(state)
        self.clears_when_idle = clears

    def resume(self) -> None:
        """Generation goes on."""
        self.clears_when_idle = False
        if PauseState is not None:
            self.scheduler.set_pause_state(PauseState.UNPAUSED)

    def _is_paused(self) -> bool:
        return PauseState is not None and bool(self.scheduler.pause_state != PauseState.UNPAUSED)

    # What the laws look at.

    def _look(self, when: str) -> None:
        view = self.view()
        for law in LAWS:
            check = law.at_turn if when == "turn" else law.at_rest
            for text in check(view):
                self.device.fault(law.name, when, f"turn {self.tick}: {text}")

    def view(self) -> EngineView:
        """Return the engine as the laws see it."""
        scheduler = self.scheduler
        free = [block.block_id for block in self.pool.free_block_queue.get_all_free_blocks()]
        others = Counter(
            block.block_id
            for _, blocks in getattr(scheduler, "deferred_frees", ())
            for block in blocks
            if not block.is_null
        )
        in_flight: Counter[str] = Counter()
        for _, _, lanes in self.batches:
            for lane in lanes:
                in_flight[lane.row.name] += lane.count
        lengths = {
            request.request_id: Lengths(
                request.num_tokens,
                request.num_computed_tokens,
                in_flight[request.request_id],
                request.num_output_placeholders,
            )
            for request in scheduler.running
        }
        return EngineView(
            self.accounts,
            free,
            self.pool.get_num_free_blocks(),
            self._rows(),
            lengths,
            self.requests,
            others=others,
            entries=None if self.batches else list(self._entries()),
            num_waiting=len(scheduler.requests) - len(scheduler.running),
            idle_turns=self.idle_turns,
        )

    def _rows(self) -> dict[str, list[list[int]]]:
        """The blocks of each request in each group, without block 0."""
        managers = self.manager.coordinator.single_type_managers
        rows: dict[str, list[list[int]]] = {}
        for at, manager in enumerate(managers):
            for name, blocks in manager.req_to_blocks.items():
                parts = rows.setdefault(name, [[] for _ in managers])
                parts[at] = [block.block_id for block in blocks if not block.is_null]
        return rows

    def _owned(self) -> dict[str, set[int]]:
        return {name: {*chain(*row)} for name, row in self._rows().items()}

    def _entries(self) -> Iterator[CachedEntry]:
        """Yield each entry of the hash index, with what its block holds."""
        for block in self.pool.blocks:
            if block.block_hash is None:
                continue
            group, key = get_group_id(block.block_hash), bytes(get_block_hash(block.block_hash))
            found = self.hashes.get(key) or self.hashes.get(key[-32:])
            if found is None:
                continue
            if self.worker.recomputes and self.accounts.holders[block.block_id]:
                continue  # its holder may have to compute it again
            (text, end), size = found, self.settings["groups"][group]["block"]
            if self.settings["groups"][group]["kind"] == "states":
                yield self._state_entry(block.block_id, text, end)
                continue
            begin = (end - 1) // size * size  # the tail of a prompt may end inside a block
            held = self.worker.target.keys[block.block_id, : end - begin]
            note = self.device.note([block.block_id])
            yield CachedEntry(
                f"{end} tokens in group {group}",
                block.block_id,
                held,
                group_keys(text.keys(begin, end), group),
                note,
            )
            if group == 0 and self.settings["drafter"] == "eagle":
                # The draft KV of the last position depends on the token behind the block.
                held = self.worker.draft.keys[block.block_id, : end - 1 - begin]
                keys = text.draft_keys(begin, end - 1)
                yield CachedEntry(f"{end} tokens of drafts", block.block_id, held, keys, note)

    def _state_entry(self, block: int, text: Text, end: int) -> CachedEntry:
        """The entry of a state, which is of all tokens up to its end."""
        assert self.worker.states is not None
        held, note = self.worker.states.memory.keys[block], self.device.note([block])
        promised = np.array([text.state_key(end)], np.int64)
        return CachedEntry(f"the state of {end} tokens", block, held, promised, note)

    def _rest(self) -> None:
        self._look("rest")
        for name, request in self.requests.items():
            if not request.is_finished and not request.is_aborted:
                self.device.fault("text", "rest", f"{name} never ended")
        if self.worker.images is not None:
            texts = [request.text for request in self.requests.values()]
            for text in left(self.scheduler.encoder_cache_manager, texts):
                self.device.fault("conservation", "encoder", text)

    def _hit_twice(self) -> None:
        """The law of usefulness: the same prompt twice, alone in the engine, must hit."""
        # Not of whole blocks: of those vLLM keeps no recurrent state that a prompt of them can use.
        length = self.settings["most_len"] - 5
        blocks = [-(-length // group["block"]) + 1 for group in self.settings["groups"]]
        longest = max(group["block"] for group in self.settings["groups"])
        # In a smaller pool the first prompt's own blocks are reused before it ends.
        if length < 3 * longest + 1 or self.pool.num_gpu_blocks <= sum(blocks) + 1:
            return
        for number in (900, 901):
            self.send(number, 99, length, length, 1)
            while self._has_work() and self.tick < MOST_TURNS:
                self.turn()
            if self.device.findings:
                return
        if not self.worker.hits["901"]:
            self.device.fault(
                "usefulness",
                "same prompt twice",
                f"a prompt of {length} tokens is sent twice to an idle engine, and hits nothing",
            )
        self._rest()


def _flat(part: Any) -> list[Any]:
    """The blocks of a call of `touch`: old releases give a list for each group."""
    return list(part) if isinstance(part, (list, tuple)) else [part]
