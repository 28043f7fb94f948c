"""Cases of the laboratory of engines: drawn, shrunk, told from known faults, written."""

from __future__ import annotations

import ast
import dataclasses
import io
import json
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from lab.engines import limit, server
from lab.engines.case import Case, Verb
from lab.engines.command import printed_objects, tell
from lab.engines.device import SETUP, Finding
from lab.engines.known import (
    ENDED,
    FLUSHED,
    FULL,
    KNOWN,
    LEFT,
    NO_CHUNKS,
    OWN_CHUNK,
    OWN_WINDOW,
    RESUMES,
    RETRACTED,
    STATE,
    UNCLOSED,
    VICTIM,
    KnownFault,
    known_fault,
    ordered,
)
from lab.engines.releases import RELEASES, ROOT, fetch, release_path
from lab.engines.report import LAW_TEXTS, write_report
from lab.engines.server import Engine
from lab.engines.sglang_cases import PLAIN as SGLANG_PLAIN
from lab.engines.sglang_cases import newest_case, past_case, sglang_case
from lab.engines.shrink import shrunk
from lab.engines.vllm_cases import FAMILIES as VLLM_FAMILIES
from lab.engines.vllm_cases import PLAIN, vllm_case
from specpool.errors import ConfigError

REPORTS = ROOT / "lab" / "reports"
#: A file of vLLM, as reports name it.
OFFLOADING = "distributed-kv-transfer-kv-connector-v1-offloading-scheduler-py"
#: For the reports on published faults: the first release without it.
FIRST_GOOD = {
    "sglang-0.5.1.post3-conservation-pages-rest": "sglang-0.5.2",
    "sglang-0.5.3.post3-exception-mem-cache-memory-pool-py-alloc": "sglang-0.5.4",
    "sglang-0.5.10.post1-content-target-kv-read-of-a-session-s-turn": "sglang-0.5.11",
    "sglang-0.5.10.post1-text-prompt-of-a-turn": "sglang-0.5.11",
    "sglang-0.5.13.post1-one-owner-free": "sglang-0.5.14",
    "vllm-0.14.1-order-landing": "vllm-0.16.0",
    "vllm-0.21.0-lengths-turn": "vllm-0.22.0",
    "vllm-0.22.1-usefulness-same-prompt-twice": "vllm-0.23.0",
    f"vllm-0.23.0-exception-{OFFLOADING}-update-state-after-alloc": "vllm-0.24.0",
    "vllm-0.23.0-order-late-write": "vllm-0.24.0",
    "vllm-0.25.1-content-target-kv-read": "vllm-0.26.0",
    "vllm-0.26.0-cache-truth-turn": "vllm-0.27.0",
}


@pytest.mark.parametrize("family", VLLM_FAMILIES)
def test_a_seed_gives_one_case_that_a_file_keeps(family: str, tmp_path: Path) -> None:
    cases = [vllm_case(seed, family) for seed in range(40)]
    assert cases == [vllm_case(seed, family) for seed in range(40)]
    assert len({json.dumps(case.settings) for case in cases}) > 30
    assert all(PLAIN.keys() <= case.settings.keys() for case in cases)
    verbs = {verb.name for case in cases for verb in case.verbs}
    assert verbs == {"send", "abort", "pause", "resume", "reset"}
    piped = [case.settings for case in cases if case.settings["stages"] > 1]
    assert piped and not any(some["asynchronous"] or some["drafts"] for some in piped)
    cases[0].write(tmp_path / "case.json")
    assert Case.read(tmp_path / "case.json") == cases[0]


def test_sessions_overlap_and_are_aborted_paused_and_closed() -> None:
    cases = [sglang_case(seed, "sessions") for seed in range(40)]
    assert cases == [sglang_case(seed, "sessions") for seed in range(40)]
    assert {verb.name for case in cases for verb in case.verbs} == {
        *("send", "follow", "turn", "abort", "pause", "flush", "close")
    }
    turns = [[verb.turn for verb in case.verbs if verb.name == "turn"] for case in cases]
    assert any(len(set(at)) < len(at) for at in turns)
    assert SGLANG_PLAIN.keys() - cases[0].settings.keys() == set()
    assert {case.settings["overlaps"] for case in cases} == {True, False}


def test_a_sessions_turns_have_one_adapter_unless_the_settings_say_so() -> None:
    switched = {True: False, False: False}
    for case in (sglang_case(seed, "sessions") for seed in range(80)):
        named = [verb.given for verb in case.verbs if verb.name == "turn"]
        adapters = {(turn["session"], turn.get("adapter", 0)) for turn in named}
        several = len(adapters) > len({session for session, _ in adapters})
        switched[case.settings["adapters"] and case.settings["switches"]] |= several
        finding = Finding("conservation", "idle", "1044 of 1024 slots are free")
        fault = known_fault("sglang-0.5.23", case, finding)
        is_own = fault is not None and fault.thread.endswith("session-adapter")
        assert case.settings["overlaps"] or is_own == several  # overlapping turns are another fault
    assert switched == {True: True, False: False}


def test_a_request_of_vllm_has_an_adapter_only_if_the_server_takes_some() -> None:
    numbers: set[int] = set()
    for case in (vllm_case(seed, "plain") for seed in range(80)):
        sent = [verb.given for verb in case.verbs if verb.name == "send"]
        assert all(("adapter" in given) == bool(case.settings["adapters"]) for given in sent)
        numbers |= {given.get("adapter", 0) for given in sent}
    assert numbers == {0, 1, 2, 3}


def test_some_cases_have_priorities_and_all_of_their_requests_have_one() -> None:
    cases = [newest_case(seed, "sessions") for seed in range(80)]
    for case in cases:
        asked = [verb.given for verb in case.verbs if "most" in verb.given]
        assert all(("priority" in given) == bool(case.settings["priorities"]) for given in asked)
    hurried = [case for case in cases if case.settings["priorities"]]
    assert 10 < len(hurried) < 40
    assert {case.settings["queue"] for case in hurried} == {None, 2, 5}
    assert not any(past_case(seed, "decode").settings["priorities"] for seed in range(40))


def test_cases_of_old_releases_have_states_or_a_window_and_no_adapters() -> None:
    cases = [past_case(seed, family) for family in ("states", "window") for seed in range(40)]
    assert cases[:40] == [past_case(seed, "states") for seed in range(40)]
    assert all("spare_states" in case.settings for case in cases[:40])
    assert all(not case.settings["overlap"] and not case.settings["shape"] for case in cases[:40])
    assert all(case.settings["window"] for case in cases[40:])
    shapes = [case.settings["shape"] for case in cases[40:]]
    assert all(shape is None or shape[1] == 1 for shape in shapes) and any(shapes)
    assert not any("adapter" in verb.given for case in cases for verb in case.verbs)
    drafting = [case for case in cases if case.settings["shape"]]
    assert all(case.settings["overlap"] for case in drafting)


def test_todays_windows_and_states_are_what_a_server_accepts() -> None:
    for family in ("plain", "sessions"):
        for case in (newest_case(seed, family) for seed in range(20)):
            assert case.settings["priorities"] or case == sglang_case(case.seed, family)
    cases = {name: [newest_case(seed, name) for seed in range(80)] for name in ("window", "states")}
    assert all(
        any(verb.name == "turn" for case in drawn for verb in case.verbs)
        for drawn in cases.values()
    )
    for drawn in (case.settings for case in cases["window"]):
        assert drawn["window"] + drawn["page"] < drawn["window_tokens"] <= drawn["num_tokens"]
    strategies = set()
    for drawn in (case.settings for case in cases["states"]):
        strategies.add(drawn["strategy"])
        assert drawn["strategy"] != "no_buffer" or (drawn["page"] == 1 and not drawn["overlap"])
        assert drawn["strategy"] != "extra_buffer_lazy" or drawn["overlap"]
        assert drawn["interval"] % drawn["page"] == 0
        assert drawn["interval"] >= (drawn["shape"] or [0])[-1]
        grains = sorted((drawn["grain"], drawn["page"]))
        assert grains[1] % grains[0] == 0
        assert drawn["states"] >= 3 * drawn["rows"]
    assert strategies == {"no_buffer", "extra_buffer", "extra_buffer_lazy"}


def test_states_of_sessions_are_known_by_what_their_fault_needs() -> None:
    text = f"1001 goes on from {STATE}3 tokens in slot 2, which has other tokens"
    turns = (Verb(1, "turn", {"session": 0}), Verb(2, "turn", {"session": 0}))
    given = {"shape": [3, 1, 4], "page": 1, "window": 0}
    drafting = Case("sglang", "states", 1, given, turns)
    fault = known_fault("sglang-0.5.23", drafting, Finding("states", "a step", text + LEFT))
    assert fault is not None and fault.thread.endswith("session-states")
    assert known_fault("sglang-0.5.23", drafting, Finding("states", "a step", text)) is None
    plain = dataclasses.replace(drafting, settings=given | {"shape": None})
    assert known_fault("sglang-0.5.23", plain, Finding("states", "a step", text)) is None
    paged = dataclasses.replace(plain, settings=plain.settings | {"page": 4})
    assert known_fault("sglang-0.5.23", paged, Finding("states", "a step", text)) is None
    stopped = dataclasses.replace(paged, verbs=(*turns, Verb(3, "abort", {"number": 1})))
    fault = known_fault("sglang-0.5.23", stopped, Finding("cache truth", "pages", text))
    assert fault is not None and fault.thread.endswith("page-of-a-state")


@pytest.mark.parametrize("note", [OWN_WINDOW, OWN_CHUNK, NO_CHUNKS])
def test_a_wait_for_slots_of_a_window_is_known_by_its_note(note: str) -> None:
    given = {"window": 4, "chunk": None if note == NO_CHUNKS else 48, "page": 1, "shape": None}
    case = Case("sglang", "window", 1, given, ())
    fault = known_fault("sglang-0.5.23", case, Finding("progress", "turn", f"stuck{note}"))
    assert fault is not None and fault.says == note
    assert known_fault("sglang-0.5.23", case, Finding("progress", "turn", "stuck")) is None


def test_the_decode_side_and_the_allocator_alone_have_cases_of_their_own() -> None:
    decodes = [past_case(seed, "decode") for seed in range(40)]
    settings = [case.settings for case in decodes]
    assert all(not some["shape"] and not some["overlap"] for some in settings)
    assert {some["rows"] for some in settings} == {1, 2, 3}  # so that arrived requests wait
    assert any(verb.name == "abort" for case in decodes for verb in case.verbs)
    calls = [past_case(seed, "allocator") for seed in range(40)]
    assert {verb.name for case in calls for verb in case.verbs} == {"grow", "leave", "end"}
    assert {case.settings["page"] for case in calls} == {1, 4, 16}


def toy_run(case: Case) -> list[Finding]:
    """A reset behind a prompt of five tokens breaks a law; without late steps another one."""
    names = [verb.name for verb in case.verbs]
    long = [verb.given.get("length", 0) >= 5 for verb in case.verbs]
    if "reset" not in names or not any(long[: names.index("reset")]):
        return []
    return [Finding("text" if case.settings["is_late"] else "rows", "turn", "broken")]


def no_fault(case: Case, finding: Finding) -> None:
    """Nothing is known."""


def test_a_case_shrinks_while_the_same_law_breaks_at_the_same_place() -> None:
    case = next(
        case
        for case in (vllm_case(seed, "plain") for seed in range(400))
        if (found := toy_run(case)) and found[0].law == "text" and len(case.verbs) > 8
    )
    plain = PLAIN | {"is_late": False}
    small, finding = shrunk(case, toy_run(case)[0], toy_run, no_fault, plain)
    assert finding.law == "text" and small.settings["is_late"]
    assert [verb.name for verb in small.verbs] == ["send", "reset"]
    assert small.verbs[0].given["length"] == 5 and small.verbs[0].given["most"] == 1
    assert all(small.settings[name] == value for name, value in PLAIN.items() if name != "is_late")


@pytest.mark.parametrize("is_known", [False, True])
def test_a_small_case_shows_the_same_known_fault_as_the_large_one_or_none(is_known: bool) -> None:
    def run(case: Case) -> list[Finding]:
        return [Finding("text", "turn", "broken")] if case.verbs else []

    def fault_of(case: Case, finding: Finding) -> str | None:
        """Return that below four verbs another fault breaks the same law at the same place."""
        return "a fault" if is_known == (len(case.verbs) >= 4) else None

    verbs = tuple(Verb(1 + at, "reset", {"running": True}) for at in range(9))
    case = Case("vllm", "plain", 1, PLAIN, verbs)
    assert len(shrunk(case, run(case)[0], run, fault_of, PLAIN)[0].verbs) == 4


def test_a_known_fault_explains_its_law_in_its_releases_with_its_settings() -> None:
    case = vllm_case(0, "plain")
    case = dataclasses.replace(
        case, settings=case.settings | {"policy": "priority", "caching": True}, verbs=()
    )
    fcfs = dataclasses.replace(case, settings=case.settings | {"policy": "fcfs"})
    truth = Finding("cache truth", "turn", f"block 5 holds other KV{VICTIM}")
    fault = known_fault("vllm-0.33.0", case, truth)
    assert fault is not None and "#57580" in fault.thread
    assert known_fault("vllm-0.33.1", case, truth) is None
    assert known_fault("vllm-0.33.0", fcfs, truth) is None
    unnoted = Finding("cache truth", "turn", "block 5 holds other KV")
    assert known_fault("vllm-0.33.0", case, unnoted) is None  # no victim of the same step
    assert known_fault("vllm-0.33.0", case, Finding("one owner", "take", "")) is None
    assert known_fault("sglang-0.33.0", case, truth) is None
    assert all(fault.thread and fault.laws for fault in KNOWN)
    reported = [fault.thread for fault in KNOWN if fault.thread.startswith("lab/")]
    assert reported and all((ROOT / thread / "report.md").is_file() for thread in reported)


@pytest.mark.parametrize(
    ("stages", "spare", "is_known"), [(3, 0, True), (3, 1, False), (2, 0, False)]
)
def test_the_least_pool_lacks_the_states_of_a_pipelines_stages(
    stages: int, spare: int, is_known: bool
) -> None:
    case = vllm_case(0, "states")
    settings = case.settings | {"stages": stages, "spare": spare}
    finding = Finding("progress", "endless", "3000 turns, and work is left")
    case = dataclasses.replace(case, settings=settings)
    fault = known_fault("vllm-0.33.0", case, finding)
    assert (fault is not None and "states-of-stages" in fault.thread) == is_known
    assert (known_fault("vllm-0.29.0", case, finding) is not None) == (stages > 2)


@pytest.mark.parametrize(
    ("finding", "first", "last", "good", "thread"),
    [
        (Finding("order", "late write", ""), "0.16.0", "0.23.0", "0.24.0", "vLLM #45357"),
        (Finding("progress", "endless", ""), "0.24.0", "0.29.0", "0.33.0", "vLLM #49674"),
        (Finding("text", "turn", ""), "0.16.0", "0.26.0", "0.27.0", "read: `num_stale_output"),
        (Finding("order", "landing", ""), "0.24.0", "0.26.0", "0.27.0", "read: `num_stale_output"),
    ],
)
def test_faults_of_steps_in_flight_are_known_in_pipelines(
    finding: Finding, first: str, last: str, good: str, thread: str
) -> None:
    case = vllm_case(0, "connector")
    connector = case.settings["connector"] | {"is_async": True}
    settings = case.settings | {"connector": connector, "stages": 2, "asynchronous": False}
    case = dataclasses.replace(case, settings=settings, verbs=())
    for release in (first, last):
        threads = [
            fault.thread for fault in KNOWN if fault.explains(f"vllm-{release}", case, finding)
        ]
        assert any(name.startswith(thread) for name in threads)
    alone = dataclasses.replace(case, settings=settings | {"stages": 1})
    for release, clean in ((good, case), (first, alone)):
        threads = [
            fault.thread for fault in KNOWN if fault.explains(f"vllm-{release}", clean, finding)
        ]
        assert not any(name.startswith(thread) for name in threads)


def test_a_stuck_loop_is_known_where_the_first_locks_a_window_of_the_cache() -> None:
    case, text = past_case(24, "window"), "the loop is stuck: 1 requests wait"
    fault = known_fault("sglang-0.5.13.post1", case, Finding("progress", "turn", text + RESUMES))
    assert fault is not None and fault.thread == "SGLang #32379"
    assert known_fault("sglang-0.5.13.post1", case, Finding("progress", "turn", text)) is None
    assert known_fault("sglang-0.5.20", case, Finding("progress", "turn", text + RESUMES)) is None


@pytest.mark.parametrize(
    ("law", "note", "thread"),
    [("progress", FULL, "#28530"), ("conservation", UNCLOSED, "#31765")],
)
def test_faults_of_sessions_until_0_5_21_are_known_by_their_notes(
    law: str, note: str, thread: str
) -> None:
    turn = Verb(1, "turn", {"number": 1, "length": 1, "most": 1, "session": 0})
    verbs = (turn, Verb(1, "abort", {"number": 1}))
    case = dataclasses.replace(past_case(1, "sessions"), verbs=verbs)
    fault = known_fault("sglang-0.5.11", case, Finding(law, "turn", f"broken{note}"))
    assert fault is not None and thread in fault.thread
    assert known_fault("sglang-0.5.11", case, Finding(law, "turn", "broken")) is None
    later = known_fault("sglang-0.5.23", case, Finding(law, "turn", f"broken{note}"))
    assert later is None or thread not in later.thread


def test_the_history_that_a_retracted_turn_leaves_is_known_by_its_note() -> None:
    turns = tuple(Verb(at, "turn", {"number": at, "session": 0}) for at in (1, 9))
    case = sglang_case(1, "sessions")
    settings = case.settings | {"overlaps": False, "switches": False}
    case = dataclasses.replace(case, settings=settings, verbs=turns)
    long = Finding("text", "prompt of a turn", "1009 has 9 tokens, its history and new 0 and 4")
    retracted = dataclasses.replace(long, text=long.text + RETRACTED)
    for release in ("sglang-0.5.11", "sglang-0.5.23"):
        fault = known_fault(release, case, retracted)
        assert fault is not None and "#40252" in fault.thread
        assert known_fault(release, case, long) is None


def test_a_flush_is_known_to_spoil_only_what_was_under_way() -> None:
    case = dataclasses.replace(past_case(1, "decode"), verbs=(Verb(2, "flush", {}),))
    wrong = Finding("content", "target KV read of a plain request", "1000 reads 4 of 9 wrongly")
    flushed = dataclasses.replace(wrong, text=wrong.text + FLUSHED)
    fault = known_fault("sglang-0.5.2", case, flushed)
    assert fault is not None and "is_fully_idle" in fault.thread
    assert known_fault("sglang-0.5.2", case, wrong) is None
    assert known_fault("sglang-0.5.10", case, flushed) is None


def test_an_alarm_that_stays_where_it_is_hides_no_other_one() -> None:
    turn = {"length": 4, "most": 4, "session": 0}
    verbs = tuple(Verb(at, "turn", {"number": at, **turn}) for at in (1, 9))
    case = dataclasses.replace(sglang_case(1, "sessions"), verbs=verbs)
    case = dataclasses.replace(
        case, settings=case.settings | {"shape": [3, 1, 4], "overlaps": False}
    )
    place = "target KV read of a session's turn"
    hole = Finding("content", place, f"1001 reads 1 of 9 slots wrongly{ENDED}")
    other = Finding("content", place, "1001 reads 2 of 9 slots wrongly")
    assert known_fault("sglang-0.5.23", case, hole) is not None
    assert known_fault("sglang-0.5.23", case, other) is None  # no turn ended there
    assert ordered("sglang-0.5.23", case, [hole, other]) == [other, hole]
    assert ordered("sglang-0.5.24", case, [hole, other]) == [hole, other]
    victim = Finding("cache truth", "turn", f"block 5 holds other KV{VICTIM}")
    case = dataclasses.replace(
        vllm_case(0, "plain"), settings=vllm_case(0, "plain").settings | {"policy": "priority"}
    )
    assert ordered("vllm-0.33.0", case, [victim, other]) == [victim, other]


def test_a_report_has_the_law_the_events_and_a_script_that_stands_alone(tmp_path: Path) -> None:
    verbs = (Verb(4, "send", {"number": 8, "length": 1}), Verb(5, "reset", {"running": True}))
    case = dataclasses.replace(vllm_case(1, "window"), verbs=verbs)
    folder = write_report(tmp_path, "vllm-0.21.0", case, Finding("lengths", "turn", "2 of 2"))
    assert folder.name == "vllm-0.21.0-lengths-turn"
    page = (folder / "report.md").read_text()
    for part in ("2 of 2", "turn 5: reset(running=True)", "--max-model-len", "and a window of"):
        assert part in page
    script = (folder / "replay.py").read_text()
    tree = ast.parse(script)
    imported = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert not [name for name in imported if name and name.startswith(("lab", "specpool"))]
    assert json.dumps(case.seed) in script and '"running": true' in script
    turns = sglang_case(1, "sessions")
    trace = f'File "{ROOT}/.engines/sglang/a.py", line 1'
    folder = write_report(tmp_path, "sglang-0.5.23", turns, Finding("progress", "turn", trace))
    assert str(ROOT) not in (folder / "report.md").read_text()
    assert not (folder / "replay.py").exists()
    assert "--enable-streaming-session" in (folder / "report.md").read_text()


def test_a_release_that_is_not_there_or_has_another_name_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"make lab-engines RELEASES=vllm-9\.9\.9"):
        release_path("vllm-9.9.9")
    with pytest.raises(
        SystemExit, match=r"named like vllm-0\.21\.0 or sglang-0\.5\.23, got 'vllm'"
    ):
        fetch(["vllm"])


def test_errors_of_a_release_do_not_stop_a_hunt(tmp_path: Path) -> None:
    """A pipe that nobody reads would be full after 64 KiB."""
    shout = "import sys; sys.stderr.write('x' * (1 << 20)); print('{}'); raise SystemExit({})"
    assert list(
        printed_objects([sys.executable, "-c", shout.format('{"a": 1}', 0)], tmp_path, "it")
    ) == [{"a": 1}]
    with pytest.raises(ConfigError, match=r"it does not run:\nx{2000}$"):
        list(printed_objects([sys.executable, "-c", shout.format("{}", 1)], tmp_path, "it"))


def test_a_case_hangs_by_its_cpu_time_and_not_while_its_process_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limit, "CASE_SECONDS", 0.02)
    case = vllm_case(1, "plain")

    def waits(_: Case) -> list[Finding]:
        time.sleep(0.1)
        return []

    def loops(_: Case) -> list[Finding]:
        while True:
            pass

    assert limit.within_limit(waits, case) == []
    assert [found.where for found in limit.within_limit(loops, case)] == ["hang"]
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)


def test_a_family_that_the_engine_does_not_have_is_refused() -> None:
    engine = Engine(vllm_case, lambda _: [], PLAIN, VLLM_FAMILIES)
    with pytest.raises(SystemExit, match=r"one of plain, window, .*, images, got 'decode'"):
        next(server.hunt("vllm-0.33.0", {"family": "decode", "jobs": 0}, engine))


def test_a_family_with_which_a_release_cannot_be_made_is_refused_and_raises_no_alarm() -> None:
    refusal = Finding(SETUP, "the loop", "TypeError: 8 arguments were given")
    engine = Engine(vllm_case, lambda _: [refusal], PLAIN, VLLM_FAMILIES)
    job = {"family": "window", "seed": 1, "seconds": 9, "cases": 4, "jobs": 2, "known": True}
    printed = []
    with pytest.raises(SystemExit, match=r"'window' does not run in vllm-0\.9\.9: .* 8 arguments"):
        printed += server.hunt("vllm-0.9.9", job, engine)
    assert printed == []


def test_a_hunt_ends_by_its_cpu_time_and_not_while_its_process_waits() -> None:
    """As many cases are run on a loaded machine as on one that is alone."""

    def waits(_: Case) -> list[Finding]:
        time.sleep(0.03)
        return []

    def computes(_: Case) -> list[Finding]:
        until = time.process_time() + 0.03
        while time.process_time() < until:
            pass
        return []

    job = {"family": "plain", "seed": 1, "seconds": 0.1, "cases": 8, "known": False}
    ran = []
    for run in (waits, computes):
        out = io.StringIO()
        server._work(
            "vllm-0.33.0", job, Engine(vllm_case, run, PLAIN, VLLM_FAMILIES), run, range(100), out
        )
        ran.append(json.loads(out.getvalue())["cases"])
    assert ran[0] == 8 and 2 <= ran[1] < 8


#: The newest releases that are unpacked by `make lab-engines`.
NEWEST = {"vllm": "vllm-0.33.0", "sglang": "sglang-0.5.23"}
#: Laws of which a fault of an engine is planted elsewhere.
PLANTED_ELSEWHERE = {"order"}  # test_engine_laws, and the replays of two published faults


def marked_rows(mark: str) -> list[list[str]]:
    """The cells of a table in docs/lab.md, without its head."""
    text = (ROOT / "docs" / "lab.md").read_text(encoding="utf-8")
    lines = text.partition(f"<!-- {mark} -->")[2].partition("<!-- end -->")[0].strip().splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_table_of_hunts_has_the_sums_of_the_record() -> None:
    sums: dict[str, list[int]] = {}
    lines = (REPORTS / "hunts.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(set(lines)) == len(lines)
    for hunt in map(json.loads, lines):
        met = (hunt["cases"], sum(hunt["known"].values()), len(hunt["alarms"]))
        before = sums.get(hunt["release"], [0, 0, 0])
        sums[hunt["release"]] = [a + b for a, b in zip(before, met, strict=True)]
    rows = [[release, *(f"{number:,}" for number in sums[release])] for release in sorted(sums)]
    assert marked_rows("hunts") == rows


def law_table() -> dict[str, dict[str, str]]:
    """The table of laws in docs/lab.md: for each engine, the cell of each law."""
    rows = marked_rows("laws")
    return {
        "vllm": {law: cell for law, _, cell, _ in rows},
        "sglang": {law: cell for law, _, _, cell in rows},
    }


def test_the_table_of_laws_names_every_law_and_the_file_that_checks_it() -> None:
    for cells in law_table().values():
        assert cells.keys() == LAW_TEXTS.keys()
        for law, cell in cells.items():
            if cell.startswith("no: "):
                continue
            text = (ROOT / "lab" / "engines" / cell.strip("`")).read_text(encoding="utf-8")
            assert f'"{law}"' in text, f"{law} is not in {cell}"


@pytest.mark.full
@pytest.mark.parametrize("engine", NEWEST)
def test_each_law_of_the_table_finds_the_fault_planted_into_a_running_engine(engine: str) -> None:
    release = NEWEST[engine]
    if not (RELEASES / release).exists():
        pytest.skip(f"{release} is not unpacked: make lab-engines")
    found = {told["plant"]: told["laws"] for told in tell(release, {}, "lab.engines.plants")}
    assert found.pop("") == []
    checked = {law for law, cell in law_table()[engine].items() if not cell.startswith("no: ")}
    law_of = {name: name.partition(" of ")[0] for name in found}
    assert {*law_of.values()} == checked - PLANTED_ELSEWHERE
    assert not {name: laws for name, laws in found.items() if law_of[name] not in laws}


@pytest.mark.full
@pytest.mark.parametrize("fault", [fault for fault in KNOWN if fault.thread.startswith("lab/")])
def test_a_fault_that_was_found_here_is_in_its_last_release_and_is_known(fault: KnownFault) -> None:
    release = f"{fault.engine}-{fault.last}"
    if not (RELEASES / release).exists():
        pytest.skip(f"{release} is not unpacked: make lab-engines")
    case = ROOT / fault.thread / "case.json"
    alarm = Finding(**next(tell(release, {"replay": str(case)}))["alarm"])
    assert known_fault(release, Case.read(case), alarm) is fault


@pytest.mark.full
@pytest.mark.parametrize("name", FIRST_GOOD)
def test_a_published_fault_is_in_its_last_bad_release_and_not_in_its_first_good_one(
    name: str,
) -> None:
    case = REPORTS / name / "case.json"
    bad = "-".join(name.split("-")[:2])
    for release in (bad, FIRST_GOOD[name]):
        if not (RELEASES / release).exists():
            pytest.skip(f"{release} is not unpacked: make lab-engines")
    found = list(tell(bad, {"replay": str(case)}))
    law = found[0]["alarm"]
    place = re.sub(r"[^a-z0-9]+", "-", f"{law['law']} {law['where']}".lower()).strip("-")
    assert name == f"{bad}-{place}"
    good = FIRST_GOOD[name]
    left = [Finding(**told["alarm"]) for told in tell(good, {"replay": str(case)})]
    assert all(known_fault(good, Case.read(case), alarm) for alarm in left)
