"""Bad input to sessions: one clear error each; session and engine go on, and nothing is lost."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import pytest

from specpool import ConfigError, Engine, SamplingParams, Session, Shape
from specpool.engine.assets import corpus

PROMPTS = corpus.prompts(4, 40)
PARAMS = SamplingParams(max_new_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    options = {"max_context_len": 128, "page_size": 4, "busy_check": 2, "overlap_depth": 1}
    options["prefix_cache"] = False  # a row goes back to any token
    with Engine.from_pretrained(draft="specpool/tiny-eagle", **options) as engine:
        yield engine


@pytest.fixture
def session(engine) -> Iterator[Session]:
    """A session with one turn behind it. After every test it can have another turn."""
    with engine.open_session() as session:
        first = session.append(PROMPTS[0], PARAMS).output()
        yield session
        if not session.closed:
            tokens = session.tokens
            assert tokens[: len(first.prompt_ids)] == first.prompt_ids
            output = session.append(PROMPTS[1][:3], PARAMS).output()
            assert output.prompt_ids == tokens + PROMPTS[1][:3]
            wanted = engine.generate([output.prompt_ids], PARAMS)[0]
            assert output.token_ids == wanted.token_ids


@contextlib.contextmanager
def refused(engine: Engine, session: Session, says: str) -> Iterator[None]:
    """A ConfigError, and nothing has changed."""
    before = session.tokens, session.is_busy, engine.ledger.state_hash()
    with pytest.raises(ConfigError, match=says):
        yield
    assert (session.tokens, session.is_busy, engine.ledger.state_hash()) == before


@pytest.mark.parametrize("offset", [-1, 47, 1 << 40])
def test_a_rewind_goes_back_within_what_is_there(engine, session, offset):
    with refused(engine, session, rf"offset must be an integer in \[0, 46\], got {offset}"):
        session.rewind(offset)
    with refused(engine, session, "offset must be an integer"):
        session.rewind(1.5)


def test_a_session_has_one_turn_at_a_time(engine, session):
    turn = session.append(PROMPTS[1][:5], SamplingParams(max_new_tokens=40, ignore_eos=True))
    next(turn)
    other = engine.submit(PROMPTS[2], PARAMS)
    says = r"session \d+: its turn \(request \d+\) has not ended"
    with refused(engine, session, f"cannot append to {says}"):
        session.append(PROMPTS[1])
    with refused(engine, session, f"cannot append to {says}"):
        engine.submit(PROMPTS[1], session=session)
    with refused(engine, session, f"cannot rewind {says}"):
        session.rewind(3)
    with refused(engine, session, f"cannot fork {says}"):
        session.fork()
    output = turn.output()
    assert output.finish_reason == "length" and len(output.token_ids) == 40
    while engine.turn():  # the other request was not disturbed
        pass
    with pytest.raises(ConfigError, match=f"no request {other}"):
        engine.abort(other)


def test_a_turn_is_read_once(session):
    turn = session.append(PROMPTS[1][:5], PARAMS)
    assert turn.output().finish_reason == "length"
    with pytest.raises(ConfigError, match="read to its end, or closed"):
        turn.output()
    turn.close()
    turn.close()
    assert next(turn, None) is None


def test_a_closed_session_takes_no_turn(engine, session):
    number = session.number
    session.close()
    session.close()
    session.abort()
    for verb, call in (
        ("append to", lambda: session.append(PROMPTS[1])),
        ("append to", lambda: engine.submit(PROMPTS[1], session=session)),
        ("rewind", lambda: session.rewind(0)),
        ("fork", session.fork),
    ):
        with pytest.raises(ConfigError, match=f"cannot {verb} session {number}: it has been clos"):
            call()


def test_a_history_longer_than_the_context(engine, session):
    says = "the session has 46 tokens and gets 82; .* its limit of 128 leaves room for 81"
    with refused(engine, session, says):
        session.append([5] * 82, PARAMS)
    output = session.append([5] * 81, PARAMS).output()  # the last one that fits
    assert (output.finish_reason, len(output.token_ids)) == ("length", 1)
    with refused(engine, session, "the session has 128 tokens and gets 0; .* leaves room for 0"):
        session.append([], PARAMS)
    assert session.rewind(46) in (45, 46)


def test_a_session_over_its_own_limit(engine):
    with engine.open_session(max_tokens=50) as session:
        session.append(PROMPTS[0], PARAMS).output()
        with refused(engine, session, "has 46 tokens and gets 4; .* limit of 50 leaves room for 3"):
            session.append([5] * 4, PARAMS)
        output = session.append([5], SamplingParams(max_new_tokens=99)).output()
        assert session.num_tokens <= 50 and output.finish_reason in ("length", "stop")
    for most in (1, 129, 0, "9", True):
        with pytest.raises(ConfigError, match=r"max_tokens must be an integer in \[2, 128\], got"):
            engine.open_session(max_tokens=most)


@pytest.mark.parametrize("tokens", [5, None, "abc", b"abc", {5, 6}, [True], [1.5], [[1]]])
def test_a_session_begins_with_a_list_of_integers(engine, tokens):
    with pytest.raises(ConfigError, match="tokens must be integer token ids, got"):
        engine.open_session(tokens=tokens)
    engine.open_session(tokens=[5, 6]).close()


@pytest.mark.parametrize(
    ("prompt", "options", "says"),
    [
        (["x"], {}, "must be a string or integer token ids"),
        ([259], {}, r"the turn has token id 259 at position 46; the vocabulary is \[0, 259\)"),
        ("\ud800", {}, "lone surrogate"),
        ([5], {"params": 3}, "params must be SamplingParams or None"),
        ([5], {"params": SamplingParams(n=2)}, "one sample, got n=2"),
        ([5], {"shape": Shape.eagle(9, 1, 10)}, "is not among the engine's shapes"),
        ([5], {"priority": "high"}, "priority must be an integer"),
    ],
)
def test_a_bad_prompt_or_parameter(engine, session, prompt, options, says):
    with refused(engine, session, says):
        session.append(prompt, **options)
    with refused(engine, session, says):
        engine.submit(prompt, session=session, **options)


def test_a_session_of_another_engine(engine, session):
    with Engine.from_pretrained(max_context_len=64) as other:
        for stray in (session, "first", 1):
            with refused(engine, session, "session must be one of this engine's, got"):
                other.submit([5], session=stray)


def test_an_empty_first_turn(engine):
    with engine.open_session() as session, refused(engine, session, "first turn is empty"):
        session.append([], PARAMS)
    with engine.open_session() as session:
        whole = session.append(PROMPTS[0], SamplingParams(max_new_tokens=9, ignore_eos=True))
        wanted = whole.output().token_ids
        session.rewind(len(PROMPTS[0]) + 4)  # an empty one goes on
        output = session.append([], SamplingParams(max_new_tokens=5, ignore_eos=True)).output()
        assert output.token_ids == wanted[4:]


def test_a_turn_that_is_left_early_leaves_the_session_as_it_was(session):
    async def leave() -> None:
        turn = session.append_async(PROMPTS[1], SamplingParams(max_new_tokens=60, ignore_eos=True))
        async with contextlib.aclosing(turn) as items:
            async for _ in items:
                break

    before = session.tokens
    asyncio.run(leave())
    assert session.tokens == before and not session.is_busy


def test_an_engine_that_is_closed_closes_its_sessions():
    with Engine.from_pretrained(max_context_len=64) as engine:
        session = engine.open_session()
        session.append([5, 6], PARAMS).output()
        turn = session.append([7], PARAMS)
    assert session.closed and not session.is_busy
    with pytest.raises(ConfigError, match="it has been closed"):
        session.append([8])
    with pytest.raises(ConfigError, match="has been closed"):
        engine.open_session()
    session.close()
    turn.close()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_sessions": -1}, r"max_sessions must be an integer in \[0, 65536\], got -1"),
        ({"session_pages": -1}, "session_pages must be an integer"),
        ({"host_bytes": -1}, "host_bytes must be an integer"),
        ({"host_bytes": 5}, r"needs \d+ bytes on the host, host_bytes is 5: raise it"),
        ({"offload": "sometimes"}, "offload must be one of"),
    ],
)
def test_a_bad_option(options, says):
    with pytest.raises(ConfigError, match=says):
        Engine.from_pretrained(max_context_len=64, **options)


def test_caps_of_idle_sessions_take_the_oldest_kv_and_no_tokens():
    options = {"max_context_len": 64, "page_size": 4, "prefix_cache": False}
    with Engine.from_pretrained(max_sessions=2, **options) as engine:
        sessions = [engine.open_session() for _ in range(3)]
        for session in sessions:
            session.append(PROMPTS[0][:20], PARAMS).output()
        assert [s.state for s in engine.stats().sessions] == ["dropped", "idle", "idle"]
        outputs = [session.append([5], PARAMS).output() for session in sessions]
        assert [output.num_reused for output in outputs] == [0, 0, 0]  # each takes the next one's
        assert [o.prompt_ids[:26] for o in outputs] == [outputs[0].prompt_ids[:26]] * 3
    with Engine.from_pretrained(session_pages=8, **options) as engine:
        first, second = engine.open_session(), engine.open_session()
        first.append(PROMPTS[0][:20], PARAMS).output()  # 7 pages
        assert [s.state for s in engine.stats().sessions] == ["idle", "dropped"]
        second.append(PROMPTS[0][:20], PARAMS).output()
        assert [s.state for s in engine.stats().sessions] == ["dropped", "idle"]
        assert engine.stats().sessions[0].num_tokens == 26
    with Engine.from_pretrained(max_sessions=0, **options) as engine:
        session = engine.open_session()
        session.append(PROMPTS[0][:20], PARAMS).output()
        assert session.append([5], PARAMS).output().num_reused == 0


def test_a_rewind_is_use():
    """The session that was not touched for longest gives way."""
    with Engine.from_pretrained(max_sessions=2, max_context_len=64, page_size=4) as engine:
        sessions = [engine.open_session() for _ in range(3)]
        for i, session in enumerate(sessions):
            if i == 2:
                sessions[0].rewind(9)
            session.append(PROMPTS[0][:20], PARAMS).output()
        assert [s.state for s in engine.stats().sessions] == ["idle", "dropped", "idle"]


def test_a_full_host_pool_costs_a_prefill_and_nothing_else():
    options = {"max_context_len": 128, "page_size": 4, "max_sessions": 1, "offload": "always"}
    with Engine.from_pretrained(**options) as engine:
        token_bytes = engine.kv_bytes // engine.ledger.groups[0].num_pages // 4
    with Engine.from_pretrained(host_bytes=132 * token_bytes, **options) as engine:
        sessions = [engine.open_session() for _ in range(4)]
        params = SamplingParams(max_new_tokens=40, ignore_eos=True)
        for session in sessions:
            session.append(PROMPTS[0], params).output()
        stats = engine.stats()
        assert [s.state for s in stats.sessions] == ["host", "dropped", "dropped", "idle"]
        assert stats.host.full_ct == 2
        outputs = [session.append([5], PARAMS).output() for session in sessions]
        assert len({tuple(output.token_ids) for output in outputs}) == 1
