"""Laws of the journal: it hears of a call before the call is made, and a process alone has none."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from lab.sim import Settings
from scheduler_loop import arrival
from specpool import ConfigError, Engine, SamplingParams
from specpool.engine.scheduler.config import SchedulerConfig
from specpool.engine.scheduler.scheduler import Scheduler


class Calls:
    """A journal that keeps what it hears, or refuses calls that ask for something."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.heard: list[tuple[Any, ...]] = []
        self.refuses = refuses

    def begin(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler

    def note(self, call: str, *args: Any) -> None:
        if self.refuses:
            raise ConfigError(f"{call} is refused")
        self.heard.append((call, *args))

    def note_end(self, call: str, *args: Any) -> None:
        self.heard.append((call, *args))


def scheduler_with(journal: Calls) -> Scheduler:
    settings = Settings(page_sizes=(4,), num_pages=(20,), max_context_len=32)
    config = SchedulerConfig(max_batch=4, prefill_tokens=16)
    return Scheduler(settings.ledger(), config, journal=journal)


def test_every_call_from_outside_is_heard_once():
    journal = Calls()
    scheduler, request = scheduler_with(journal), arrival(1).request()
    assert journal.scheduler is scheduler
    scheduler.submit(request)
    with pytest.raises(ConfigError, match="request 1 has been submitted already"):
        scheduler.submit(request)
    scheduler.abort(request)
    scheduler.abort(request)
    conversation = scheduler.open([1, 2, 3])
    copy = scheduler.fork(conversation)
    scheduler.cut(copy, 2)
    scheduler.close(copy)
    scheduler.forget(b"a")
    assert journal.heard == [
        ("submit", request),
        ("abort", 1),
        ("open", [1, 2, 3]),
        ("fork", 1),
        ("cut", 2, 2),
        ("close", 2),
        ("forget", b"a"),
    ]


def test_a_refused_call_changes_nothing():
    journal = Calls()
    scheduler = scheduler_with(journal)
    conversation = scheduler.open([1, 2, 3])
    journal.refuses = True
    for call, args in (
        (scheduler.submit, (arrival(1).request(),)),
        (scheduler.open, ([1],)),
        (scheduler.fork, (conversation,)),
        (scheduler.cut, (conversation, 1)),
    ):
        with pytest.raises(ConfigError, match="is refused"):
            call(*args)
    assert not scheduler.has_requests
    assert [*scheduler.conversations.open.values()] == [conversation]
    assert conversation.tokens == [1, 2, 3]


def test_a_prompt_passes_no_code_of_ranks_in_a_process_alone():
    modules: set[str] = set()

    def watch(frame: Any, event: str, argument: Any) -> None:
        modules.add(frame.f_globals.get("__name__", ""))

    with Engine.from_pretrained(max_context_len=64, num_pages=16) as engine:
        assert engine.core.journal is None
        before = sys.getprofile()
        sys.setprofile(watch)
        try:
            (output,) = engine.generate(["The sun"], SamplingParams(max_new_tokens=4))
        finally:
            sys.setprofile(before)
    assert output.finish_reason in ("stop", "length")
    assert "specpool.engine.scheduler.scheduler" in modules
    assert not {name for name in modules if name.startswith("specpool.engine.ranks")}
