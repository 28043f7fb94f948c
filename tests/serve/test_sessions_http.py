"""Sessions over HTTP: a turn computes what is new, and is never appended twice."""

from __future__ import annotations

import time

import openai
import pytest

from specpool import Engine, SamplingParams

PARAMS = {"model": "specpool/tiny", "max_tokens": 12, "temperature": 0}


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=60) as client:
        yield client


@pytest.fixture
def session(server):
    return server.ask("POST", "/v1/sessions", {})[1]["id"]


def turn(client, ident, offset, text, **more):
    return client.chat.completions.create(
        messages=[{"role": "user", "content": text}],
        extra_headers={"x-session-id": ident},
        extra_body={"session_offset": offset},
        **PARAMS | more,
    )


def test_turns_are_those_of_an_engines_session(client, server, session):
    """Law: the answers, the offsets and what was reused are those of `Session.append`."""
    with Engine.from_pretrained(
        draft="specpool/tiny-eagle", page_size=4, max_context_len=256
    ) as engine:
        engine.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
        engine_session = engine.open_session()
        offset = 0
        for text in ("seq: 2, 4, ", "seq: 3, 6, ", "and on"):
            expected = engine_session.append(
                [{"role": "user", "content": text}], SamplingParams(max_new_tokens=12)
            ).output()
            answer = turn(client, session, offset, text)
            assert answer.choices[0].message.content == expected.text
            assert answer.session == {"id": session, "offset": engine_session.num_tokens}
            cached = answer.usage.prompt_tokens_details.cached_tokens
            assert cached >= expected.num_reused - 4 and (offset == 0 or cached > 0)
            offset = engine_session.num_tokens
        found = server.ask("GET", f"/v1/sessions/{session}")[1]
        assert found["turn_ends"] == engine_session.turn_ends and found["offset"] == offset


def test_a_turn_that_is_sent_again_is_not_appended_twice(client, session):
    first = turn(client, session, 0, "seq: 2, 4, ")
    hits = []
    client._client.event_hooks["response"].append(lambda r: hits.append(r.status_code))
    with pytest.raises(openai.ConflictError) as error:
        turn(client, session, 0, "seq: 2, 4, ")
    assert error.value.code == "session_offset_mismatch"
    assert error.value.response.headers["x-should-retry"] == "false" and hits == [409]
    assert error.value.body["session"] == first.session
    again = turn(client, session, first.session["offset"], "and on")
    assert again.session["offset"] > first.session["offset"]


def test_a_turn_without_its_offset_is_refused(client, session):
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(prompt="a", extra_headers={"x-session-id": session}, **PARAMS)
    assert error.value.code == "session_offset_missing"


def test_completions_go_on_with_a_text(client, session):
    whole = client.completions.create(prompt="seq: 2, 4, ", **PARAMS | {"max_tokens": 16})
    text, offset = "", 0
    for prompt in ("seq: 2, 4, ", ""):
        stream = client.completions.create(
            prompt=prompt,
            stream=True,
            extra_headers={"x-session-id": session},
            extra_body={"session_offset": offset},
            **PARAMS | {"max_tokens": 8},
        )
        parts = list(stream)
        text += "".join(part.choices[0].text for part in parts if part.choices)
        offset = parts[-1].session["offset"]
    assert text == whole.choices[0].text and offset == len("seq: 2, 4, ") + 16


def test_rewind_and_fork(client, server, session):
    first = turn(client, session, 0, "seq: 2, 4, ")
    middle = first.session["offset"]
    turn(client, session, middle, "seq: 5, 10, ")
    status, back, _ = server.ask("POST", f"/v1/sessions/{session}/rewind", {"offset": middle})
    assert status == 200 and back["offset"] == middle and 0 < back["kept_tokens"] <= middle
    copy = server.ask("POST", f"/v1/sessions/{session}/fork")[1]
    assert copy["offset"] == middle and copy["id"] != session
    here, there = (turn(client, i, middle, "seq: 7, 14, ") for i in (session, copy["id"]))
    assert here.choices[0].message.content == there.choices[0].message.content
    status, answer, _ = server.ask("POST", f"/v1/sessions/{session}/rewind", {"offset": 9999})
    assert status == 400 and "offset must be an integer in [0, " in answer["error"]["message"]


def test_a_client_that_leaves_leaves_the_session_as_it_was(client, server, session):
    first = turn(client, session, 0, "seq: 2, 4, ")
    offset = first.session["offset"]
    stream = turn(client, session, offset, "seq: 3, ", stream=True, max_tokens=150)
    next(iter(stream))
    with pytest.raises(openai.ConflictError) as error:
        turn(client.with_options(max_retries=0), session, offset, "seq: 3, ")
    assert error.value.code == "session_busy"
    stream.close()
    end = time.monotonic() + 120
    while server.ask("GET", f"/v1/sessions/{session}")[1]["busy"]:
        assert time.monotonic() < end
        time.sleep(0.02)
    assert server.ask("GET", f"/v1/sessions/{session}")[1]["offset"] == offset
    turn(client, session, offset, "seq: 3, ")


def test_a_refused_turn_gives_its_session_back(client, server, session):
    for text in ("a" * 300, ""):
        with pytest.raises(openai.BadRequestError):
            client.completions.create(
                prompt=text,
                extra_headers={"x-session-id": session},
                extra_body={"session_offset": 0},
                **PARAMS,
            )
        assert not server.ask("GET", f"/v1/sessions/{session}")[1]["busy"]


def test_sessions_that_are_not_there(client, server, session):
    assert server.ask("DELETE", f"/v1/sessions/{session}")[0] == 200
    for ident, status, code in (
        (session, 404, "session_not_found"),
        ("0badc0de.12", 410, "session_lost"),
    ):
        with pytest.raises(openai.APIStatusError) as error:
            turn(client, ident, 0, "a")
        assert (error.value.status_code, error.value.code) == (status, code)
        assert server.ask("GET", f"/v1/sessions/{ident}")[0] == status
        assert server.ask("DELETE", f"/v1/sessions/{ident}")[0] == status
    assert server.ask("POST", "/v1/sessions", {"max_tokens": 1})[0] == 400
    assert server.ask("POST", "/v1/sessions", {"max_tokens": 9999})[0] == 400
