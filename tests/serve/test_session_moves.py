"""A session moves from one server to another: its text, its KV, its name, and who answers."""

from __future__ import annotations

import asyncio
import dataclasses
import pickle
from collections import deque

import pytest

from specpool import Engine, SamplingParams
from specpool.engine.texts import Texts
from specpool.errors import ConfigError
from specpool.serve.api.errors import ApiError
from specpool.serve.bridge.client import EngineFault, EngineGone
from specpool.serve.bridge.parcel import ParcelNumbers
from specpool.serve.bridge.runner import Runner, done_of, ready_of
from specpool.serve.config import ServeConfig
from specpool.serve.sessions import Sessions, ident_of

GREEDY = SamplingParams(max_new_tokens=8, ignore_eos=True)
PROMPTS = ["seq: 2, 4, ", "and on ", [5, 6, 7]]


class Side:
    """A server without HTTP: the real sessions, and the real engine behind the runner's verbs."""

    def __init__(self, tag: str, **options):
        self.config = ServeConfig(max_open_sessions=options.pop("max_open_sessions", 4))
        given = {"draft": "specpool/tiny-eagle", "page_size": 4, "max_context_len": 256}
        self.engine = Engine.from_pretrained(**given | options)
        self.runner, self.ready = Runner(self.engine, deque()), ready_of(self.engine)
        self.now = 100.0
        self.sessions = Sessions(self, self.config, tag, lambda: self.now)
        self.texts = Texts(self.engine.tokenizer)
        self.calls = []

    async def call(self, verb, *args, timeout=None):
        self.calls.append(verb)
        return pickle.loads(pickle.dumps(self.runner.verbs[verb](*args)))

    def turn(self, ident: str, offset: int, prompt, params=GREEDY):
        """One turn, as the paths of the server run it; returns the output."""
        record = self.sessions.begin(ident, offset)
        turn = self.sessions.turn(record, self.texts, prompt, {})
        session = self.runner._session(record.conversation.number)
        output = session.append(pickle.loads(pickle.dumps(turn)), params).output()
        self.sessions.end(record, turn, done_of(0, output), params, frozenset())
        return output

    def content(self):
        """What an arrival that fails must leave as it was."""
        stats = self.engine.stats()
        free = [self.engine.ledger.free_pages(g) for g in range(len(self.engine.ledger.groups))]
        return len(self.sessions), stats.num_sessions, free


@pytest.fixture
def sides():
    made = []

    def make(tag: str, **options) -> Side:
        made.append(Side(tag, **options))
        return made[-1]

    yield make
    for side in made:
        side.engine.close()


def run(work):
    return asyncio.run(work)


async def moved(here: Side, there: Side, ident: str):
    """Move a session as the servers do; returns the parcel."""
    record, parcel = await here.sessions.pack(ident)
    parcel = pickle.loads(pickle.dumps(parcel))
    await there.sessions.take_in(parcel)
    await here.sessions.leave(record)
    return parcel


def code_of(act, *args):
    with pytest.raises(ApiError) as error:
        act(*args)
    return error.value.status, error.value.body["error"]["code"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_session_goes_on_under_its_name_with_its_text_and_kv(sides, temperature):
    """Law: a turn after the move says what it says without, and computes what is new alone."""
    here, there, still = sides("here"), sides("there"), sides("still")
    params = dataclasses.replace(GREEDY, temperature=temperature, seed=5)
    idents = [run(side.sessions.open(None)).ident for side in (here, still)]
    offset = 0
    for index, prompt in enumerate(PROMPTS):
        outputs = [
            side.turn(ident, offset, prompt, params)
            for side, ident in zip((here if index < 2 else there, still), idents, strict=True)
        ]
        assert outputs[0].token_ids == outputs[1].token_ids
        assert outputs[0].num_reused == outputs[1].num_reused and (
            outputs[0].num_reused or not index
        )
        offset = len(outputs[0].prompt_ids) + 8
        if index == 1:
            parcel = run(moved(here, there, idents[0]))
            assert parcel.image is not None and parcel.ident == idents[0]
    assert there.sessions.find(idents[0]).offset == offset
    assert here.content()[:2] == (0, 0)


def test_a_session_belongs_to_its_key_wherever_it_is(sides):
    """Law: before, while and after it moves, another key's request finds what never existed."""
    here, there = sides("here"), sides("there")
    own = run(here.sessions.open(None, "a")).ident
    offset = len(here.turn(own, 0, PROMPTS[0]).prompt_ids) + 8
    public_id = own.partition("/")[0]
    other, never = ident_of(public_id, "b"), ident_of(public_id[:-4] + "0000", "b")

    def check(ident):
        for side in (here, there):
            for act in (side.sessions.find, lambda i, side=side: side.sessions.begin(i, offset)):
                assert code_of(act, ident) == code_of(act, never)
            assert side.sessions.may_come(ident) == side.sessions.may_come(never)
            assert not side.sessions.of_key("b")

    async def move():
        record, parcel = await here.sessions.pack(own)
        check(other)
        parcel = pickle.loads(pickle.dumps(parcel))
        await there.sessions.take_in(parcel)
        check(other)
        await here.sessions.leave(record)

    check(other)
    run(move())
    for ident in (other, public_id, ident_of(own, "b"), ident_of(public_id, "")):
        check(ident)
    (record,) = there.sessions.of_key("a")
    assert record.ident == own and record.public_id == public_id == record.body()["id"]
    assert there.turn(own, offset, PROMPTS[1]).num_reused
    copy = run(there.sessions.fork(own))
    assert copy.key_id == "a" and copy.public_id != public_id


def test_the_time_that_a_session_was_idle_goes_along(sides):
    """Law: a move is no use of a session, and each server has a clock of its own."""
    here, there = sides("here"), sides("there")
    ident = run(here.sessions.open(None)).ident
    here.now, there.now = here.now + 3000, 7000.0
    run(moved(here, there, ident))
    there.now += 599
    run(there.sessions.close_idle())
    assert len(there.sessions) == 1
    there.now += 2
    run(there.sessions.close_idle())
    assert there.content()[:2] == (0, 0)


def test_another_layout_takes_the_text_alone(sides):
    """Law: pages of another size are of no use, and the text goes on as it would have."""
    here, there = sides("here"), sides("there", page_size=8)
    ident = run(here.sessions.open(None)).ident
    output = here.turn(ident, 0, PROMPTS[0])
    run(moved(here, there, ident))
    after = there.turn(ident, len(output.prompt_ids) + 8, PROMPTS[1])
    assert after.num_reused == 0 and after.prompt_ids[: len(output.prompt_ids)] == output.prompt_ids


def test_a_session_that_is_too_large_goes_as_text(sides, monkeypatch):
    monkeypatch.setattr("specpool.serve.bridge.runner.MOST_IMAGE", 100)
    here, there = sides("here"), sides("there")
    ident = run(here.sessions.open(None)).ident
    output = here.turn(ident, 0, PROMPTS[0])
    assert run(moved(here, there, ident)).image is None
    assert there.turn(ident, len(output.prompt_ids) + 8, PROMPTS[1]).num_reused == 0


@pytest.mark.parametrize("most_image", [0, 1 << 20])
def test_a_session_that_is_full_moves(sides, monkeypatch, most_image):
    """Law: one with no room for a turn goes along, with KV or without, and can be rewound there."""
    monkeypatch.setattr("specpool.serve.bridge.runner.MOST_IMAGE", most_image)
    here, there = sides("here"), sides("there")
    max_tokens = len(PROMPTS[0]) + 8
    ident = run(here.sessions.open(max_tokens)).ident
    here.turn(ident, 0, PROMPTS[0])
    parcel = run(moved(here, there, ident))
    assert (parcel.image is None) == (not most_image)
    assert there.sessions.find(ident).offset == there.sessions.find(ident).max_tokens == max_tokens
    run(there.sessions.rewind(ident, 9))
    assert len(there.turn(ident, 9, [5], dataclasses.replace(GREEDY, max_new_tokens=2)).token_ids)


@pytest.mark.parametrize("fault", [EngineFault("no memory"), EngineGone("it has ended")])
def test_an_export_that_fails_lets_the_text_go_alone(sides, monkeypatch, fault):
    """Law: without an engine nothing goes, and the session is as before."""
    here, there = sides("here"), sides("there")
    ident = run(here.sessions.open(None)).ident
    output = here.turn(ident, 0, PROMPTS[0])

    def fail(number):
        raise fault

    monkeypatch.setitem(here.runner.verbs, "export", fail)
    if isinstance(fault, EngineGone):
        with pytest.raises(EngineGone):
            run(here.sessions.pack(ident))
        assert not here.sessions.find(ident).is_busy
        return
    assert run(moved(here, there, ident)).image is None
    assert there.sessions.find(ident).offset == len(output.prompt_ids) + 8


def test_a_parcel_that_was_refused_is_refused_for_ever(sides):
    """Law: its session has gone on where it was, so a copy that comes late is another one."""
    here, there = sides("here"), sides("there", max_open_sessions=1)
    other, ident = (run(side.sessions.open(None)).ident for side in (there, here))
    record, late = run(here.sessions.pack(ident))
    with pytest.raises(ApiError, match="which is the most"):
        run(there.sessions.take_in(late))
    here.sessions.unpack(record)
    output = here.turn(ident, 0, PROMPTS[0])
    run(there.sessions.close(other))
    with pytest.raises(ApiError, match="was refused before"):
        run(there.sessions.take_in(late))
    assert there.content()[:2] == (0, 0)
    parcel = run(moved(here, there, ident))
    assert parcel.number > late.number
    assert there.sessions.find(ident).offset == len(output.prompt_ids) + 8


def test_it_answers_nothing_while_it_leaves(sides):
    """Law: a packed session is 503 for every call, is not closed as idle, and goes on if asked."""
    here = sides("here")
    ident = run(here.sessions.open(None)).ident

    async def main():
        record, _ = await here.sessions.pack(ident)
        for act in (here.sessions.find, lambda i: here.sessions.begin(i, 0)):
            assert code_of(act, ident) == (503, "session_moving")
        for work in (
            here.sessions.pack(ident),
            here.sessions.rewind(ident, 0),
            here.sessions.fork(ident),
            here.sessions.close(ident),
        ):
            with pytest.raises(ApiError, match="moves to another replica"):
                await work
        here.now += 1e6
        await here.sessions.close_idle()
        assert len(here.sessions) == 1
        here.sessions.unpack(record)

    run(main())
    here.turn(ident, 0, PROMPTS[0])


def test_a_session_that_has_moved_on_is_not_one_that_was_closed(sides):
    """Law: its opener says 410, and knows that it may come back; of a closed one it says 404."""
    here, there = sides("here"), sides("there")
    ident, closed = (run(here.sessions.open(None)).ident for _ in range(2))
    run(here.sessions.close(closed))
    assert not here.sessions.may_come(ident) and not here.sessions.may_come(closed)
    run(moved(here, there, ident))
    assert here.sessions.may_come(ident) and not here.sessions.may_come(closed)
    assert code_of(here.sessions.find, ident) == (410, "session_lost")
    assert code_of(here.sessions.find, closed) == (404, "session_not_found")
    other = run(here.sessions.open(None)).ident
    run(here.sessions.pack(other))
    assert here.sessions.may_come(other)


def test_a_busy_session_does_not_leave(sides):
    here = sides("here")
    ident = run(here.sessions.open(None)).ident
    here.sessions.begin(ident, 0)
    with pytest.raises(ApiError, match="has not ended"):
        run(here.sessions.pack(ident))
    assert "export" not in here.calls


def test_a_parcel_that_comes_again_does_nothing(sides):
    """Law: a sender that has not heard the answer sends again; turns since then stay."""
    here, there, third = sides("here"), sides("there"), sides("third")
    ident = run(here.sessions.open(None)).ident
    parcel = run(moved(here, there, ident))
    output = there.turn(ident, 0, PROMPTS[0])
    run(there.sessions.take_in(parcel))
    assert there.sessions.find(ident).offset == len(output.token_ids) + len(output.prompt_ids)
    run(moved(there, third, ident))  # it moves on
    run(there.sessions.take_in(parcel))
    assert len(there.sessions) == 0 and there.engine.stats().num_sessions == 0
    back = run(moved(third, there, ident))  # it comes back, which is no repetition
    assert back.number == 3 and there.sessions.find(ident).offset > 0
    run(there.sessions.close(ident))
    run(there.sessions.take_in(back))
    assert code_of(there.sessions.find, ident) == (410, "session_lost")


def test_two_parcels_at_once_are_one_session(sides):
    here, there = sides("here"), sides("there")
    ident = run(here.sessions.open(None)).ident

    call = there.call

    async def later(*args):
        await asyncio.sleep(0)  # the engine answers later, and others go on
        return await call(*args)

    there.call = later

    async def main():
        _, parcel = await here.sessions.pack(ident)
        await asyncio.gather(*(there.sessions.take_in(parcel) for _ in range(4)))

    run(main())
    assert there.content()[:2] == (1, 1)


def test_what_comes_back_replaces_the_copy_that_was_sent(sides):
    """Law: a sender without an answer keeps its copy; the longer text that returns replaces it."""
    here, there = sides("here"), sides("there")
    ident = run(here.sessions.open(None)).ident

    async def main():
        old, parcel = await here.sessions.pack(ident)
        await there.sessions.take_in(parcel)  # and the answer is lost
        there.turn(ident, 0, PROMPTS[0])
        await moved(there, here, ident)
        await here.sessions.leave(old)  # of no effect: it is another copy

    refuse = here.runner.verbs["close"]

    def fail_after(number):
        refuse(number)
        raise EngineFault("no memory")

    here.runner.verbs["close"] = fail_after  # a fault of this kind changes nothing any more
    run(main())
    assert here.sessions.find(ident).offset > 8 and here.content()[:2] == (1, 1)


@pytest.mark.parametrize(
    ("options", "change", "says"),
    [
        ({"max_open_sessions": 0}, {}, "0 sessions are open, which is the most"),
        ({}, {"model": ("another", "0")}, "the session is of the model"),
        ({}, {"ident": "there.0"}, "the session is here already"),
        ({"max_context_len": 16}, {"tokens": list(range(40))}, "the session begins with 40 tokens"),
        ({}, {"tokens": [10**6], "image": None}, "token id 1000000"),
    ],
)
def test_what_cannot_come_changes_nothing(sides, options, change, says):
    """Law: a parcel that is refused says why, leaves nothing there, and goes on here."""
    here, there = sides("here"), sides("there", **options)
    ident = run(here.sessions.open(None)).ident
    if "ident" in change:
        there.sessions._records["there.0"] = there.sessions._keep(
            here.sessions._records[ident].conversation, 9, ""
        )
    output = here.turn(ident, 0, PROMPTS[0])
    record, parcel = run(here.sessions.pack(ident))
    parcel = dataclasses.replace(parcel, **change)
    before = there.content()
    with pytest.raises((ApiError, ConfigError), match=says):
        run(there.sessions.take_in(parcel))
    assert there.content() == before
    here.sessions.unpack(record)
    assert here.turn(ident, len(output.prompt_ids) + 8, PROMPTS[1]).num_reused > 0


def test_a_session_may_begin_with_tokens():
    """Law: a session that begins with a text goes on as one that has said it."""
    with Engine.from_pretrained(draft="specpool/tiny-eagle", max_context_len=64) as engine:
        tokens = list(b"seq: 2, 4, ")
        (expected,) = engine.generate([tokens], GREEDY)
        session = engine.open_session(tokens=tokens)
        assert session.num_tokens == len(tokens)
        assert session.append("", GREEDY).output().token_ids == expected.token_ids
        for wrong, says in (([999], "token id 999"), ([1] * 65, "with 65 tokens, its limit is 64")):
            with pytest.raises(ConfigError, match=says):
                engine.open_session(tokens=wrong)
        assert engine.stats().num_sessions == 1


def test_parcel_numbers_only_grow_and_the_oldest_are_forgotten():
    numbers = ParcelNumbers()
    numbers.note("a", 3)
    numbers.note("a", 2)
    assert numbers.latest("a") == 3 and numbers.latest("b") == 0 and "a" in numbers
    for i in range(4096):
        numbers.note(f"s{i}", 1)
    assert "a" not in numbers and "s0" in numbers
