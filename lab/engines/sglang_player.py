"""`Player`: plays the verbs of a case on a scheduler of SGLang, and looks at its pools and answers.

What it calls is what a server calls. The loop that it drives, and how a request comes to that, are
in `sglang_loop` for today's releases and in `sglang_past` for old ones.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import time
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Container, Mapping
from typing import Any

from sglang.srt.managers.io_struct import AbortReq, CloseSessionReqInput, OpenSessionReqInput
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.sampling.sampling_params import SamplingParams

from lab.engines.case import Case
from lab.engines.content import STOP, Text, tokens_of
from lab.engines.device import SETUP, Finding
from lab.engines.known import (
    BEHIND,
    ENDED,
    FLUSHED,
    FULL,
    NEAR_POOL,
    RESUMES,
    RETRACTED,
    ROWLESS,
    UNCLOSED,
)
from lab.engines.laws import LAWS
from lab.engines.limit import within_limit

#: Turns after which a case that still runs is endless.
MOST_TURNS = 3000
#: Turns in which requests wait and nothing runs, after which clients close their sessions.
MOST_WAITING = 100
PACKAGE = "/sglang/srt/"
#: What a loop says in which requests wait and nothing runs.
STUCK = "the loop is stuck"
#: The first request's id: aborts name requests by the beginning of an id, so all are as long.
FIRST = 1000


def in_a_fork(run: Callable[[Case], list[Finding]], case: Case) -> list[Finding]:
    """Run a case in a fork, whose settings nobody else sees; return what it broke."""
    here, there = os.pipe()
    child = os.fork()
    if not child:
        os.close(here)
        findings = within_limit(run, case)
        with open(there, "w", encoding="utf-8") as out:
            json.dump([[found.law, found.where, found.text] for found in findings], out)
        os._exit(0)
    os.close(there)
    try:
        with open(here, encoding="utf-8") as told:
            text = told.read()
    except BaseException:
        os.kill(child, 9)
        raise
    finally:
        os.waitpid(child, 0)
    if not text:
        return [Finding("exception", "the process", "the process ended")]
    return [Finding(*parts) for parts in json.loads(text)]


def played(player_of: Callable[[Case], Player], case: Case) -> list[Finding]:
    """Play a case; return what it broke, what tells most in front."""
    findings: list[Finding] = []
    try:
        player = player_of(case)
    except Exception as error:
        return [Finding(SETUP, "the loop", f"{type(error).__name__}: {error}")]
    try:
        player.run()
        player.look("rest")
    except Exception as error:  # an engine that dies has broken a law
        frames = traceback.extract_tb(error.__traceback__)
        last = frames[-1]
        where = f"{last.filename.rpartition(PACKAGE)[2]}, {last.name}"
        if PACKAGE not in last.filename:
            where = "the loop"
        if str(error).startswith(STUCK):
            findings.append(Finding("progress", "turn", str(error) + player.stuck_note()))
        else:
            text = "".join(traceback.format_tb(error.__traceback__)[-2:])
            findings.append(Finding("exception", where, f"{type(error).__name__}: {error}\n{text}"))
    seen = dict.fromkeys(player.loop.simulated.faults)
    read = [_content(text, player.turns) for text in seen]
    # What reaches a request outside of the session is the worse fault.
    read.sort(key=lambda found: "turn" in found.where)
    leaks = [Finding("conservation", "idle", text) for text in player.leaks()]
    misuses = player.accounts.device.findings
    note = player.flush_note + (UNCLOSED if player.waits_to_close() else "")
    return [
        dataclasses.replace(alarm, text=alarm.text + note)
        for alarm in [*read, *misuses, *player.findings, *leaks, *findings]
    ]


def _waits(session: Any) -> bool:
    """Whether a session is closed when its turn ends; old releases close it at once."""
    return bool(getattr(session, "close_on_finish", False))


class Tokenizer:
    """Stands for the process that is told when a request ends that never ran."""

    def __init__(self, running: dict[str, Any]) -> None:
        self.running = running

    def send_output(self, told: Any, req: Any = None) -> None:
        """Take what a scheduler sends; only an end matters here."""
        if isinstance(told, AbortReq):
            self.running.pop(told.rid, None)

    send_pyobj = send_output


def adapter_name(adapter: int) -> str | None:
    """Return the name of an adapter; 0 is none."""
    return f"adapter {adapter}" if adapter else None


def adapter_of(name: str) -> int:
    """Return the adapter of a name."""
    return int(name.removeprefix("adapter ") or 0)


def waiting_flags(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of SGLang's server for priorities and for a queue that is bounded."""
    flags = {"max_queued_requests": settings.get("queue")}
    if priorities := settings.get("priorities"):
        flags["enable_priority_scheduling"] = True
        flags["schedule_low_priority_values_first"] = priorities["low_first"]
        flags["priority_scheduling_preemption_threshold"] = priorities["threshold"]
    return {name: value for name, value in flags.items() if value is not None}


def _content(text: str, turns: Container[str]) -> Finding:
    """Sort a fault of the device: by the model whose slots were read, and by who read them."""
    reader = "a session's turn" if text.partition(" ")[0] in turns else "a plain request"
    kind = re.search(r"(draft|target|window) slots wrongly", text)
    if kind:
        return Finding("content", f"{kind[1]} KV read of {reader}", text)
    if "goes on from" in text:
        return Finding("states", f"a step of {reader}", text)
    if "is fed" in text:
        return Finding("content", f"tokens fed to {reader}", text)
    return Finding("rows", f"a step of {reader}", text)


class Player(ABC):
    """Stands for the traffic of the loop: plays the verbs, and looks at what is said."""

    def __init__(self, case: Case) -> None:
        self.case, settings = case, case.settings
        self.running: dict[str, Any] = {}
        self.loop = self.make_loop()
        self.loop.traffic = self
        self.findings: list[Finding] = []
        self.verbs = deque(case.verbs)
        self.tick = self.quiet = 0
        self.resumes = 0  # the turn in which a pause ends
        self.most: dict[str, int] = {}
        self.ended: dict[str, list[int]] = {}  # prompt and answer
        self.adapters: dict[str, int] = {}  # by request; 0 is none
        self.turns: dict[str, int] = {}  # requests that are turns, and their sessions
        self.new: list[int] = []  # tokens that the turn that comes adds
        self.histories: dict[int, list[list[int]]] = {}  # of sessions; a tail may count or not
        self.retracted: set[int] = set()  # sessions of which a turn was retracted
        self.open = set(range(settings["sessions"]))
        self.accounts = self.make_accounts()
        self.requests: list[Any] = []  # all that ever came
        #: Positions for which nobody may have written KV, by the key that they should hold.
        self.holes: dict[int, str] = {}
        self.flush_note = ""
        self._note_reads()
        self._note_retractions()

    # What differs between ranges of releases.

    @abstractmethod
    def make_loop(self) -> Any:
        """Return the scheduler of the case."""

    @abstractmethod
    def make_accounts(self) -> Any:
        """Return the accounts of its pools."""

    @abstractmethod
    def run(self) -> None:
        """Run the scheduler's own loop until the case is over."""

    @abstractmethod
    def leaks(self) -> list[str]:
        """Return what the scheduler's own sums say."""

    @abstractmethod
    def arrive(
        self,
        name: str,
        tokens: list[int],
        most: int,
        session: str | None,
        adapter: int = 0,
        priority: int | None = None,
    ) -> None:
        """A request comes; what the scheduler makes of it goes to `admit`."""

    @abstractmethod
    def slots(self) -> dict[str, Any]:
        """Return what sessions hold, by their names."""

    @abstractmethod
    def pause(self, mode: str) -> None:
        """Generation stops; `retract` gives all KV back."""

    @abstractmethod
    def resume(self) -> None:
        """Generation goes on."""

    @abstractmethod
    def flush(self) -> bool:
        """The caches are emptied, if the engine thinks that it is idle; return whether it does."""

    # What is known of wrong reads.

    def _note_reads(self) -> None:
        """Say of a wrong read whether all of it are holes that turns of sessions left."""
        device = self.loop.simulated
        read = device.read

        def noted(kv: Any, slots: Any, keys: Any, what: str) -> None:
            known = len(device.faults)
            read(kv, slots, keys, what)
            if len(device.faults) > known:
                wrong = (kv.held[slots] != keys).nonzero()[0].tolist()
                text = self.loop.model_worker.texts[what.partition(" ")[0]]
                device.faults[-1] += self.hole_note(text, wrong)

        device.read = noted

    def _note_retractions(self) -> None:
        queue, queued = self.loop._add_request_to_queue, set[str]()

        def add(req: Any, *args: Any, **given: Any) -> None:
            if req.rid in queued and req.rid in self.turns:
                self._note_retraction(req)
            queued.add(req.rid)
            queue(req, *args, **given)

        self.loop._add_request_to_queue = add
        if not hasattr(self.loop, "send_abort_output"):  # until 0.5.21
            return
        send = self.loop.send_abort_output

        def send_abort(abort: Any, req: Any = None) -> None:
            if req is not None and req.rid in self.turns:  # retracted, and too large to wait
                self._note_retraction(req)
            send(abort, req)

        self.loop.send_abort_output = send_abort

    def _note_retraction(self, req: Any) -> None:
        text = self.loop.model_worker.texts[req.rid]
        self._leave_hole(text, len(req.origin_input_ids) + len(req.output_ids), RETRACTED)
        self.retracted.add(self.turns[req.rid])
        self._leave_state(self.turns[req.rid])

    def _leave_state(self, session: int) -> None:
        """Note the recurrent state that a turn leaves to its session, if the model has any."""
        steps, record = getattr(self.loop, "state_steps", None), self.slots().get(f"s{session}")
        if steps and record and record.kv.mamba_pool_idx is not None:
            steps.leave(int(record.kv.mamba_pool_idx))

    def _leave_hole(self, text: Text, length: int, note: str) -> None:
        self.holes[int(text.keys(length - 1, length)[0])] = note

    def hole_note(self, text: Text, positions: list[int]) -> str:
        """What is known of these positions of a text, if something is of each; else nothing."""
        keys = [int(text.keys(position, position + 1)[0]) for position in positions]
        notes = {self.holes.get(key, "") for key in keys} or {""}
        return "" if "" in notes else max(notes)  # a retraction is the rarer one

    # What the loop calls.

    def turn(self) -> None:
        """Look at the pools, take what ended, and play what is due."""
        self.tick += 1
        self.look("turn")
        for name, req in list(self.running.items()):
            if req.finished():
                self.end(name, req)
        self._reap()
        if self.resumes and self.tick >= self.resumes:
            self.resumes = 0
            self.resume()
        if self.loop.waiting_queue and self.tick - self.loop.last_forward[1] > MOST_WAITING:
            for session in sorted(self.open):  # their KV is theirs until they are closed
                self.play_close(session)
        if self.tick > MOST_TURNS:
            raise RuntimeError(f"{STUCK}: {MOST_TURNS} turns, and work is left")
        while self.verbs and self.verbs[0].turn <= self.tick:
            verb = self.verbs.popleft()
            getattr(self, f"play_{verb.name}")(**verb.given)
        if not self.verbs and not self.running and self.quiet < 3:
            self.quiet += 1
            self._probe(self.quiet)

    def _reap(self) -> None:
        """Let the scheduler drop sessions that were closed."""
        if self.case.settings["sessions"]:
            self.loop.session_controller.maybe_reap(time.monotonic(), 0)

    def look(self, when: str) -> None:
        """Let the laws look at the pools, until one of them is broken."""
        device = self.accounts.device
        if device.findings:
            return
        for pool, view in self.accounts.views(self.requests).items():
            for law in LAWS:
                check = law.at_turn if when == "turn" else law.at_rest
                for text in check(view):
                    device.fault(law.name, f"{pool}, {when}", f"turn {self.tick}: {text}")

    def is_over(self) -> bool:
        """Whether all has been sent and has ended."""
        return not self.verbs and not self.running and self.quiet >= 3

    def close(self) -> None:
        """Close all sessions, also those that waited for a turn."""
        for session in sorted(self.open):
            self.play_close(session)
        self._reap()

    def waits_to_close(self) -> bool:
        """Whether a session that is closed waits for a turn although none of its turns is left."""
        if not self.case.settings["sessions"]:
            return False
        busy = {f"s{self.turns[name]}" for name in self.running if name in self.turns}
        sessions = self.loop.session_controller.sessions.items()
        return any(_waits(closed) and name not in busy for name, closed in sessions)

    def stuck_note(self) -> str:
        """What is known of the first that waits, if any does.

        It may leave no page of the pool, in a session no two, lock a window in the cache, wait for
        slots of a session that cannot be closed, for a batch that is marked as full, or for a row.
        """
        if not self.loop.waiting_queue:
            return ""
        req, page = self.loop.waiting_queue[0], self.case.settings["page"]
        left = self.case.settings["num_tokens"] - len(req.origin_input_ids) - len(req.output_ids)
        if left < 2 * page if req.rid in self.turns else left <= page:
            return NEAR_POOL
        if note := self.window_note(req):
            return note
        held = self.slots()
        sessions = self.loop.session_controller.sessions
        waiting = [turn.rid for turn in self.loop.waiting_queue[1:]]
        behind = [f"s{self.turns[name]}" for name in waiting if name in self.turns]
        is_held = any(name in held and _waits(sessions[name]) for name in behind)
        if is_held:
            return BEHIND
        batch = self.loop.running_batch
        note = FULL if batch and batch.batch_is_full and batch.is_empty() else ""
        has_row = f"s{self.turns.get(req.rid)}" in held
        if has_row and not self.loop.req_to_token_pool.available_size():
            note += ROWLESS
        return note

    def window_note(self, req: Any) -> str:
        """What is known of one that waits for slots of a window's pool."""
        window = self.case.settings.get("window")
        return RESUMES if window and len(req.prefix_indices) >= window else ""

    def end(self, name: str, req: Any) -> None:
        """Take what a request said, and compare."""
        del self.running[name]
        said = list(req.output_ids)[: getattr(req, "finished_len", None)]  # if it keeps more
        self.ended[name] = list(req.origin_input_ids) + said
        text = self.loop.model_worker.texts[name]
        wanted, is_aborted = (
            text.answer(self.most[name]),
            isinstance(req.finished_reason, FINISH_ABORT),
        )
        if name in self.turns and not is_aborted:
            self._leave_hole(text, len(self.ended[name]), ENDED)
            self._leave_state(self.turns[name])
            prompt, tail = list(req.origin_input_ids), list(req.output_ids)
            tail = tail[: req.sampling_params.max_new_tokens]
            self.histories[self.turns[name]] = [self.ended[name], prompt + tail]
        if not is_aborted and said != wanted:
            self.findings.append(
                Finding("text", "end", f"{name} says {said}; alone it says {wanted}")
            )

    def _expect_history(self, req: Any) -> None:
        """A turn's prompt is what its session's finished turns read and said, and new tokens."""
        if req.rid not in self.turns or self.case.settings.get("overlaps", True):
            return
        if req.finished() or getattr(req, "to_finish", None):  # it is refused
            return
        prompt, session = list(req.origin_input_ids), self.turns[req.rid]
        histories = self.histories.get(session, [[]])
        if all(prompt != history + self.new for history in histories):
            lengths = " or ".join(str(len(history)) for history in histories)
            text = (
                f"{req.rid} has {len(prompt)} tokens, its history and what is new {lengths} and "
                f"{len(self.new)}{RETRACTED if session in self.retracted else ''}"
            )
            self.findings.append(Finding("text", "prompt of a turn", text))

    # What a server calls.

    def play_send(
        self, number: int, length: int, most: int, stem: int, shared: int, **marks: int
    ) -> None:
        """A request: `shared` tokens of a stem, and own ones up to its length."""
        own = tokens_of(self.case.seed, 1000 + number, length)
        tokens = tokens_of(self.case.seed, stem, shared) + own[shared:]
        self.arrive(str(FIRST + number), tokens, most, None, **marks)

    def play_follow(self, number: int, length: int, most: int, of: int, **marks: int) -> None:
        """A request whose prompt is all that another one read and said, and `length` tokens."""
        before = self.ended.get(str(FIRST + of), [])
        tokens = before + tokens_of(self.case.seed, 1000 + number, length)
        self.arrive(str(FIRST + number), tokens, most, None, **marks)

    def play_turn(self, number: int, length: int, most: int, session: int, **marks: int) -> None:
        """A turn of a session; beside another one only if the settings say so."""
        name, controller = str(FIRST + number), self.loop.session_controller
        overlaps = self.case.settings.get("overlaps", True)
        is_busy = any(self.turns.get(running) == session for running in self.running)
        if session not in self.open or (is_busy and not overlaps):
            return
        if controller.get(f"s{session}") is None:
            opened = OpenSessionReqInput(
                capacity_of_str_len=1 << 20, session_id=f"s{session}", streaming=True
            )
            controller.open(opened)
        self.turns[name] = session
        self.new = tokens_of(self.case.seed, 1000 + number, length)
        self.arrive(name, self.new, most, f"s{session}", **marks)

    def play_abort(self, number: int) -> None:
        """The client of a request leaves."""
        if str(FIRST + number) in self.running:
            self.loop.abort_request(AbortReq(rid=str(FIRST + number)))

    def play_pause(self, mode: str, turns: int) -> None:
        """Generation is paused for some turns; `retract` gives all KV back."""
        if not self.resumes:
            self.pause(mode)
            self.resumes = self.tick + 1 + turns
            if mode == "retract":  # past the queue's own entry
                for name in self.running.keys() & self.turns.keys():
                    self._note_retraction(self.running[name])

    def play_flush(self) -> None:
        """The caches are emptied, if the engine thinks that it is idle."""
        is_clean = not (
            self.findings or self.loop.simulated.faults or self.accounts.device.findings
        )
        if self.flush() and self.running and is_clean:
            self.flush_note = FLUSHED

    def play_close(self, session: int) -> None:
        """A session is closed."""
        if self.loop.session_controller.get(f"s{session}") is not None:
            self.loop.session_controller.close(CloseSessionReqInput(session_id=f"s{session}"))
        self.open.discard(session)

    def _probe(self, at: int) -> None:
        """When all is done, ask once more for the longest texts: what is cached must be true."""
        longest = sorted(self.ended, key=lambda name: len(self.ended[name]), reverse=True)
        if len(longest) >= at:
            name, length = longest[at - 1], self.case.settings["num_tokens"] - 40
            tokens = [*self.ended[name][:length], 5, 7]
            self.arrive(str(FIRST + 900 + at), tokens, 2, None, self.adapters[name])

    def sampling(self, most: int) -> Any:
        """Return the parameters of a greedy request that says up to `most` tokens."""
        sampling = SamplingParams(max_new_tokens=most, temperature=0, stop_token_ids=[STOP])
        sampling.normalize(None)
        return sampling

    def admit(self, req: Any, adapter: int) -> None:
        """Take what the scheduler made of a request, before it is queued."""
        name = req.rid
        self.adapters[name] = adapter  # KV of another adapter is other KV, as with a salt
        kind = getattr(self.loop, "text_kind", Text)
        self.loop.model_worker.texts[name] = kind(list(req.origin_input_ids), adapter)
        self.most[name] = req.sampling_params.max_new_tokens
        self.running[name] = req
        self.requests.append(req)
        self._expect_history(req)
