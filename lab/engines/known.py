"""Faults of engines that are published or open, by release, so that they are told from new ones.

An alarm is known if its law is the fault's and the case has what the fault needs. It is counted,
and no more. Each has a thread of the engine, or what was read in the release that mends it. A case
counts as known by its first alarm, behind which others may follow from it; the alarms of a fault
that `stays` where it is are looked past.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from lab.engines.case import Case
from lab.engines.content import STOP
from lab.engines.device import Finding
from lab.engines.laws import ALL_FREE
from lab.engines.vllm_home import steps_in_flight

#: What a loop notes of a block that got its hash in a step from which its request was taken again.
VICTIM = ", and whose request was taken out of the step that was to write it"
#: Of a block that a failed load should have filled, or that was computed from such blocks.
FAILED_LOAD = ", and which holds what came of a failed load"
#: What a loop notes where a closed session waits for a turn that is gone.
UNCLOSED = ", and a closed session waits for a turn that is gone"
#: Of slots of which each is that of the last token of a session's turn, which ended or was
#: retracted: the session counts it as written.
ENDED = ", where a turn of a session ended"
RETRACTED = ", where a turn of a session was retracted"
#: Of a loop that is stuck.
NEAR_POOL = ", and the first that waits leaves less than a page of the pool"
RESUMES = ", and the first that waits resumes on a cached prefix of a window or more"
OWN_WINDOW = ", and the first that waits does not fit beside the window that its own prefix locks"
NO_CHUNKS = ", and the first that waits needs more slots of a window than there are, without chunks"
OWN_CHUNK = ", and a prompt between two chunks holds all but a page of its window's pool"
FULL = ", and the batch is marked as full though nothing runs"
BEHIND = ", and a turn waits behind it whose session holds slots and is closed when the turn ends"
#: Of a case that was clean until a flush emptied the pools although requests were under way.
FLUSHED = ", after a flush with requests under way"
ROWLESS = ", and the first that waits has a row in its session, but no other one is free"
#: Of a recurrent state, read by a step or cached.
STATE = "the state behind "
LEFT = ", which a turn of a session left when it ended or was retracted"
#: What silently wrong KV breaks, whoever looks first.
WRONG_KV = ("cache truth", "content", "text")


@dataclasses.dataclass(frozen=True)
class KnownFault:
    """A fault of releases `first` to `last`, both included."""

    name: str
    engine: str
    first: str
    last: str
    laws: tuple[str, ...]
    needs: Callable[[Case], bool]
    thread: str
    where: str = ""  # what the place of the alarm says
    says: str = ""  # and its text
    stays: bool = False  # nothing else breaks by it

    def explains(self, release: str, case: Case, finding: Finding) -> bool:
        """Return whether an alarm of a release may be this fault."""
        engine, _, version = release.partition("-")
        if engine != self.engine or finding.law not in self.laws or self.where not in finding.where:
            return False
        if self.says not in finding.text or not self.needs(case):
            return False
        return _parts(self.first) <= _parts(version) <= _parts(self.last)


def known_fault(release: str, case: Case, finding: Finding) -> KnownFault | None:
    """Return the known fault that explains an alarm."""
    return next((fault for fault in KNOWN if fault.explains(release, case, finding)), None)


def ordered(release: str, case: Case, findings: list[Finding]) -> list[Finding]:
    """Return findings with those of faults that stay where they are behind the others."""

    def stays(finding: Finding) -> bool:
        fault = known_fault(release, case, finding)
        return fault is not None and fault.stays

    return sorted(findings, key=stays)


def _parts(version: str) -> tuple[int, ...]:
    """0.5.10.post1 is behind 0.5.10 and before 0.5.11."""
    return tuple(int(part.removeprefix("post")) for part in version.split("."))


def _restarts(case: Case) -> bool:
    """Whether running requests start again, with results of theirs in flight."""
    return any(
        (verb.name == "reset" and verb.given["running"])
        or (verb.name == "pause" and verb.given["clears"])
        for verb in case.verbs
    )


def _drafts_late(case: Case) -> bool:
    return bool(case.settings["asynchronous"] and case.settings["drafts"])


def _plays(case: Case, name: str, times: int = 1) -> bool:
    return sum(verb.name == name for verb in case.verbs) >= times


def _overlaps(case: Case) -> bool:
    return bool(case.settings.get("overlaps")) and _plays(case, "turn", 2)


def _switches(case: Case) -> bool:
    """Whether the turns of a session have several adapters."""
    named = [verb.given for verb in case.verbs if verb.name == "turn"]
    adapters = {(turn["session"], turn.get("adapter", 0)) for turn in named}
    return len(adapters) > len({session for session, _ in adapters})


def _leaves_a_state_behind_a_page(case: Case) -> bool:
    """Whether a turn that begins inside a page may leave its state to the tree."""
    return case.settings["page"] > 1 and _plays(case, "turn", 2) and _plays(case, "abort")


def _has(case: Case, kind: str) -> bool:
    return any(group["kind"] == kind for group in case.settings["groups"])


def _lacks_states(case: Case) -> bool:
    """Whether a request may have more states, one for each stage, than the pool is given for."""
    return _has(case, "states") and case.settings.get("stages", 1) - 2 > case.settings["spare"]


def _loads_late(case: Case) -> bool:
    return bool(case.settings["connector"] and case.settings["connector"]["is_async"])


def _stores_on_the_host(case: Case) -> bool:
    return "host_blocks" in (case.settings["connector"] or {})


def _fails(case: Case, policy: str, is_async: bool) -> bool:
    connector = case.settings["connector"] or {}
    wanted = (policy, is_async)
    return bool(connector.get("fails")) and (connector["policy"], connector["is_async"]) == wanted


def _has_one_token(case: Case) -> bool:
    """Whether a prompt is one token, which is a whole block."""
    lengths = [verb.given.get("length") for verb in case.verbs if verb.name == "send"]
    return 1 in lengths and case.settings["groups"][0]["block"] == 1


def _is_padded_beyond(case: Case) -> bool:
    """Whether a step of all drafts is longer than what a prefill may have."""
    return bool(0 < case.settings["long_prefill"] <= case.settings["drafts"])


def _has_images_longer_than_a_chunk(case: Case) -> bool:
    """Whether an image is to be in one chunk, and is longer than what a long prefill may have."""
    images = case.settings.get("images") or {}
    return bool(images.get("whole")) and 0 < case.settings["long_prefill"] < images["most"]


def _samples(case: Case) -> bool:
    """Whether requests that arrive at the same moment may push each other out."""
    several = any(verb.given.get("samples", 1) > 1 for verb in case.verbs)
    return several and case.settings["policy"] == "priority"


KNOWN = (
    KnownFault(
        "an abort frees blocks into which a load is under way",
        "vllm",
        "0.10.0",
        "0.14.1",
        ("order", "content", "cache truth"),
        _loads_late,
        "vLLM #32255",
    ),
    KnownFault(
        "blocks that a launched step uses are given to a load",
        "vllm",
        "0.14.0",
        "0.23.0",
        ("order", "content", "cache truth"),
        lambda case: _loads_late(case) and steps_in_flight(case.settings) > 1,
        "vLLM #45357",
        "late write",
    ),
    KnownFault(
        "victims whose blocks a launched step still uses are preempted for nothing, in turn",
        "vllm",
        "0.24.0",
        "0.29.0",
        ("progress",),
        lambda case: bool(case.settings["connector"]) and steps_in_flight(case.settings) > 1,
        "vLLM #49674, #49675",
        "endless",
    ),
    KnownFault(
        "loads hold blocks that none of them can do without, for ever",
        "vllm",
        "0.10.0",
        "0.25.1",
        ("progress",),
        _loads_late,
        "read: loads reserve blocks in 0.33.0",
    ),
    KnownFault(
        "a preempted request whose stores run is admitted again, with a load",
        "vllm",
        "0.21.0",
        "0.23.0",
        ("exception",),
        _stores_on_the_host,
        "vLLM #46014",
        "offloading/scheduler.py, update_state_after_alloc",
    ),
    KnownFault(
        "a connector is not told whose stores a reset cuts off, and they read blocks of others",
        "vllm",
        "0.14.0",
        "0.24.0",
        WRONG_KV,
        lambda case: _stores_on_the_host(case) and _restarts(case),
        "read: `reset_preempted_req_ids` is told in 0.25.1",
    ),
    KnownFault(
        "a reset of running requests drops a result although none is in flight",
        "vllm",
        "0.14.0",
        "0.21.0",
        ("lengths", "text", "progress", "content", "exception"),
        lambda case: case.settings["asynchronous"] and _restarts(case),
        "vLLM #42043, #42117",
    ),
    KnownFault(
        "the block that a lookup with drafts drops is never cached in a group with a window",
        "vllm",
        "0.22.0",
        "0.22.1",
        ("usefulness",),
        lambda case: case.settings["drafter"] == "eagle",
        "vLLM #44082",
    ),
    KnownFault(
        "a session's turn that ends inside a round keeps the KV of a rejected draft",
        "sglang",
        "0.5.10",
        "0.5.23",
        ("content",),
        lambda case: bool(case.settings["shape"]) and _plays(case, "turn", 2),
        "docs/sglang.md",
        "of a session's turn",
        ENDED,
        stays=True,
    ),
    KnownFault(
        "a turn that is retracted keeps the KV of a rejected draft, as if it had ended",
        "sglang",
        "0.5.22",
        "0.5.23",
        ("content", "cache truth"),
        lambda case: bool(case.settings["shape"]) and _plays(case, "turn"),
        "SGLang #40252 (open)",
        says=RETRACTED,
        stays=True,
    ),
    KnownFault(
        "a turn that is retracted counts as the last one of its session, even if it is aborted",
        "sglang",
        "0.5.11",
        "0.5.23",
        ("text",),
        lambda case: _plays(case, "turn", 2),  # a full queue aborts too
        "SGLang #40252 (open)",
        "prompt of a turn",
        RETRACTED,
    ),
    KnownFault(
        "a victim of the priority policy that was scheduled in the same step leaves hashes of "
        "blocks that nobody writes",
        "vllm",
        "0.10.0",
        "0.33.0",
        ("cache truth", "content"),
        lambda case: case.settings["policy"] == "priority" and case.settings["caching"],
        "vLLM #43569, #57580 (open)",
        says=VICTIM,
    ),
    KnownFault(
        "a reset of running requests drops results by their tokens and not by their steps",
        "vllm",
        "0.22.0",
        "0.25.1",
        ("lengths", "text", "content", "progress", "exception"),
        lambda case: _drafts_late(case) and _restarts(case),
        "read: `async_tokens_to_discard` until 0.25.1",
    ),
    KnownFault(
        "a result in flight of a preempted request counts for the row that it gets again",
        "vllm",
        "0.14.0",
        "0.26.0",
        ("text", "lengths", "content", "exception", "order"),
        lambda case: case.settings.get("stages", 1) > 1,
        "read: `num_stale_output_tokens` since 0.27.0",
    ),
    KnownFault(
        "a window is moved by drafts that are not accepted yet",
        "vllm",
        "0.14.0",
        "0.25.1",
        WRONG_KV,
        lambda case: _drafts_late(case) and _has(case, "window"),
        "read: `remove_skipped_blocks` counts tokens in flight since 0.26.0",
    ),
    KnownFault(
        "a group of states lengthens a hit by the block that a lookup with drafts drops",
        "vllm",
        "0.25.1",
        "0.25.1",
        ("content", "text"),
        lambda case: _has(case, "states") and case.settings["drafter"] == "eagle",
        "vLLM #43559, #46281",
    ),
    KnownFault(
        "a chunk of prefill that ends inside a block leaves its state under the hash of the block",
        "vllm",
        "0.25.1",
        "0.26.0",
        ("cache truth", "states"),
        lambda case: _has(case, "states") and case.settings["drafter"] == "eagle",
        "vLLM #45477, #51113",
    ),
    KnownFault(
        "a turn that is refused, or comes with the first one, takes the mark of the one that runs",
        "sglang",
        "0.5.10",
        "0.5.23",
        ("content", "rows", "exception", "conservation", "one owner", "progress", "text"),
        _overlaps,
        "SGLang #36503, #40250, #36475, #40252 (open)",
    ),
    KnownFault(
        "an aborted turn publishes the KV of a rejected draft that its session holds",
        "sglang",
        "0.5.22",
        "0.5.23",
        ("content", "cache truth"),
        lambda case: (
            bool(case.settings["shape"]) and _plays(case, "turn", 2) and _plays(case, "abort")
        ),
        "lab/reports/sglang-0.5.23-content-draft-kv-read-of-a-plain-request",
        says=ENDED,
        stays=True,
    ),
    KnownFault(
        "a turn with another adapter runs on the KV of its session, and publishes it when aborted",
        "sglang",
        "0.5.22",
        "0.5.23",
        ("content", "rows", "conservation", "exception", "progress", "text", "states"),
        _switches,
        "lab/reports/sglang-0.5.23-session-adapter",
    ),
    KnownFault(
        "a turn that is retracted and then aborted keeps its session's KV for ever",
        "sglang",
        "0.5.23",
        "0.5.23",
        ("conservation", "progress"),
        lambda case: _plays(case, "turn"),
        "lab/reports/sglang-0.5.23-session-retracted",
        says=UNCLOSED,
    ),
    KnownFault(
        "a turn goes on from the state of its session's last round, which has other tokens",
        "sglang",
        "0.5.22",
        "0.5.23",
        ("states", "cache truth"),
        lambda case: bool(case.settings["shape"]) and _plays(case, "turn", 2),
        "lab/reports/sglang-0.5.23-session-states",
        says=LEFT,
        stays=True,
    ),
    KnownFault(
        "an aborted turn leaves its state under a key that ends at the page before",
        "sglang",
        "0.5.22",
        "0.5.23",
        ("states", "cache truth"),
        _leaves_a_state_behind_a_page,
        "lab/reports/sglang-0.5.23-session-page-of-a-state",
        says=STATE,
        stays=True,
    ),
    KnownFault(
        "a prompt that the entry accepts leaves less than a page of the pool, and waits for ever",
        "sglang",
        "0.5.22",
        "0.5.23",
        ("progress",),
        lambda case: case.settings["page"] > 1,
        "lab/reports/sglang-0.5.23-near-pool",
        says=NEAR_POOL,
    ),
    KnownFault(
        "without chunks, a prompt that never fits the pool of a window waits for ever",
        "sglang",
        "0.5.22",
        "0.5.23",
        ("progress",),
        lambda case: bool(case.settings.get("window")) and not case.settings["chunk"],
        "SGLang #31205 (closed as inactive; read: `SWAPrefillBudget.check_prefill`)",
        says=NO_CHUNKS,
    ),
    KnownFault(
        "a prompt between two chunks waits for slots that it holds itself",
        "sglang",
        "0.5.22",
        "0.5.23",
        ("progress",),
        lambda case: bool(case.settings.get("window")) and bool(case.settings["chunk"]),
        "SGLang #36458 (open, for a disabled cache; with it, pools near the window)",
        says=OWN_CHUNK,
    ),
    KnownFault(
        "what never fits beside the window that its own cached prefix locks waits for ever",
        "sglang",
        "0.5.22",
        "0.5.23",
        ("progress",),
        lambda case: bool(case.settings.get("window")),
        "lab/reports/sglang-0.5.23-own-window",
        says=OWN_WINDOW,
    ),
    KnownFault(
        "a request waits for slots of a session whose turn waits behind it",
        "sglang",
        "0.5.10",
        "0.5.23",
        ("progress",),
        lambda case: _plays(case, "turn"),
        "docs/sglang.md",
        says=BEHIND,
    ),
    KnownFault(
        "a failed load leaves hashes of blocks that a sharing request computed from it",
        "vllm",
        "0.26.0",
        "0.33.0",
        ("cache truth",),
        lambda case: _fails(case, "fail", is_async=False),
        "lab/reports/vllm-0.33.0-failed-load-shared",
        says=FAILED_LOAD,
    ),
    KnownFault(
        "a request that is to compute lost blocks again leaves their hashes when it leaves",
        "vllm",
        "0.26.0",
        "0.33.0",
        ("cache truth", "text"),
        lambda case: _fails(case, "recompute", is_async=False),
        "lab/reports/vllm-0.33.0-failed-load-preempted",
    ),
    KnownFault(
        "a failed load reserves blocks against its own retry",
        "vllm",
        "0.26.0",
        "0.33.0",
        ("progress",),
        lambda case: _fails(case, "recompute", is_async=True),
        "lab/reports/vllm-0.33.0-failed-load-retry",
    ),
    KnownFault(
        "a load that fits alone is not admitted, for blocks of drafts that it may not need",
        "vllm",
        "0.33.0",
        "0.33.0",
        ("progress",),
        lambda case: _loads_late(case) and case.settings["drafts"] > 0,
        "lab/reports/vllm-0.33.0-load-with-drafts",
        says=ALL_FREE,
    ),
    KnownFault(
        "the only token of a prompt is loaded again and again",
        "vllm",
        "0.23.0",
        "0.33.0",
        ("progress",),
        lambda case: _loads_late(case) and _has_one_token(case),
        "lab/reports/vllm-0.33.0-one-token-loaded-again",
        "endless",
    ),
    KnownFault(
        "samples of one request preempt themselves in turn, and none gets further",
        "vllm",
        "0.14.0",
        "0.33.0",
        ("progress",),
        _samples,
        "lab/reports/vllm-0.33.0-samples-in-turn",
        "endless",
    ),
    KnownFault(
        "an image of a victim that was scheduled in the same step counts as encoded",
        "vllm",
        "0.14.0",
        "0.33.0",
        ("content",),
        lambda case: bool(case.settings.get("images")) and case.settings["policy"] == "priority",
        "lab/reports/vllm-0.33.0-image-of-a-victim",
        "encoder output",
    ),
    KnownFault(
        "images that are longer than a long prefill's chunk, and may not be split, wait for ever",
        "vllm",
        "0.33.0",
        "0.33.0",
        ("progress",),
        _has_images_longer_than_a_chunk,
        "vLLM #52306 (open)",
    ),
    KnownFault(
        "a decode is padded to the number of drafts, and then cut to what a long prefill may have",
        "vllm",
        "0.25.1",
        "0.33.0",
        ("exception", "lengths"),
        _is_padded_beyond,
        "vLLM #54028 (open)",
    ),
    KnownFault(
        "the least pool leaves out the states of steps in flight, and requests take turns for ever",
        "vllm",
        "0.27.0",
        "0.33.0",
        ("progress",),
        _lacks_states,
        "lab/reports/vllm-0.33.0-states-of-stages",
    ),
    KnownFault(
        "the least pool leaves out the states of steps in flight, by more blocks than since 0.30.0",
        "vllm",
        "0.27.0",
        "0.29.0",
        ("progress",),
        lambda case: (
            _has(case, "states")
            and case.settings.get("stages", 1) > 2
            and case.settings["spare"] <= 3
        ),
        "clean with these pools in 0.30.0; lab/reports/vllm-0.33.0-states-of-stages",
        "endless",
    ),
    KnownFault(
        "an aborted turn saves its lengths and its row in its session",
        "sglang",
        "0.5.10",
        "0.5.10.post1",
        (
            "text",
            "rows",
            "content",
            "conservation",
            "one owner",
            "exception",
            "progress",
            "lengths",
        ),
        lambda case: _plays(case, "turn") and _plays(case, "abort"),
        "SGLang #22790",
    ),
    KnownFault(
        "a round that goes beyond the last token of a turn leaves its surplus in the session",
        "sglang",
        "0.5.10",
        "0.5.10.post1",
        ("rows", "content", "conservation", "one owner", "exception", "progress", "lengths"),
        lambda case: bool(case.settings["shape"]) and _plays(case, "turn", 2),
        "SGLang #22897",
    ),
    KnownFault(
        "rows that sessions hold are not counted when requests are admitted",
        "sglang",
        "0.5.10",
        "0.5.11",
        ("exception",),
        lambda case: _plays(case, "turn"),
        "read: `get_num_allocatable_reqs` counts free rows since 0.5.12.post1",
        "alloc_req_slots",
    ),
    KnownFault(
        "a turn whose session has its row waits for a row that is free",
        "sglang",
        "0.5.12.post1",
        "0.5.23",
        ("progress",),
        lambda case: _plays(case, "turn"),
        "SGLang #37583 (open)",
        says=ROWLESS,
    ),
    KnownFault(
        "a turn gives way for a row, which its session keeps",
        "sglang",
        "0.5.10",
        "0.5.23",
        ("exception",),
        lambda case: _plays(case, "turn") and bool(case.settings.get("priorities")),
        "lab/reports/sglang-0.5.23-preempted-turn",
        "alloc_req_slots",
    ),
    KnownFault(
        "slots of a window that a grouped free is to give back are those of a newer mapping",
        "sglang",
        "0.5.18",
        "0.5.18",
        ("rows", "conservation"),
        lambda case: bool(case.settings.get("window")),
        "SGLang #36081, #36135",
        "window",
    ),
    KnownFault(
        "a round that passes both a stop token and the cap says what is behind the stop token",
        "sglang",
        "0.5.10",
        "0.5.17",
        ("text",),
        lambda case: bool(case.settings["shape"]),
        "read: `_cap_finished_len_at_max_new_tokens` since 0.5.18",
        "end",
    ),
    KnownFault(
        "a request is to have room for a whole window beside the one that its cached prefix locks",
        "sglang",
        "0.5.11",
        "0.5.15.post1",
        ("progress",),
        lambda case: bool(case.settings.get("window")),
        "SGLang #32379",
        says=RESUMES,
    ),
    KnownFault(
        "a refusal while nothing runs marks the batch as full, and closing a session does not undo",
        "sglang",
        "0.5.11",
        "0.5.21",
        ("progress",),
        lambda case: _plays(case, "turn"),
        "read: the mark is cleared where nothing runs in 0.5.22; related to SGLang #28530",
        says=FULL,
    ),
    KnownFault(
        "a turn that is aborted in the queue stays its session's turn, and that never closes",
        "sglang",
        "0.5.11",
        "0.5.21",
        ("conservation", "progress"),
        lambda case: _plays(case, "turn") and _plays(case, "abort"),
        "SGLang #31765",
        says=UNCLOSED,
    ),
    KnownFault(
        "taking a row evicts no cached state",
        "sglang",
        "0.5.3",
        "0.5.3.post3",
        ("exception",),
        lambda case: "spare_states" in case.settings,
        "SGLang #11214, #11616",
        "memory_pool.py, alloc",
    ),
    KnownFault(
        "an abort of a request whose KV has come, and that has not run, keeps its KV for ever",
        "sglang",
        "0.5.1",
        "0.5.1.post3",
        ("conservation", "progress", "exception"),
        lambda case: "rows_to_come" in case.settings and _plays(case, "abort"),
        "SGLang #9817",
    ),
    KnownFault(
        "a page that has left the window in part is freed again with its other slots",
        "sglang",
        "0.5.10",
        "0.5.13.post1",
        ("one owner", "rows", "conservation", "exception"),
        lambda case: case.family == "allocator",
        "SGLang #27779",
    ),
    KnownFault(
        "the decode side goes on behind a first token that ends the text",
        "sglang",
        "0.5.1",
        "0.5.4",
        ("text",),
        lambda case: "rows_to_come" in case.settings,
        "read: `process_batch_result_prebuilt` looks at it in 0.5.10",
        says=f"alone it says [{STOP}]",
    ),
    KnownFault(
        "a flush empties the cache though a prefill is between two chunks or in its first step",
        "sglang",
        "0.5.1",
        "0.5.4",
        ("exception", "progress", "content", "rows", "conservation", "one owner", "text"),
        lambda case: _plays(case, "flush"),
        "read: `is_fully_idle` in 0.5.10",
        says=FLUSHED,
    ),
)
