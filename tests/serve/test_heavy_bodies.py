"""Bodies that cost much to read: they are refused soon, and others are answered meanwhile."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest
from test_scripted_engine import scripted

from serve_kit import SMALL, Server
from specpool.serve.api.errors import ApiError
from specpool.serve.api.reading import MOST_NODES, num_nodes, read
from specpool.serve.api.requests import ChatRequest, CompletionRequest

MIB = 1 << 20
FUNCTION = {"name": "f", "description": "x" * 200, "parameters": {"type": "object"}}
TOOL = json.dumps({"type": "function", "function": FUNCTION})
USER = '{"role": "user", "content": "a"}'
ANY = ",".join(f'{{"type": "function", "function": {{"name": "f{i}"}}}}' for i in range(1024))
LAST = '{"type": "function", "function": {"name": "f1023"}}'


def many(item: str, size: int = 6 * MIB) -> str:
    """A list that repeats an item, in about `size` bytes."""
    return "[" + ",".join([item] * (size // (len(item) + 1))) + "]"


HEAVY = {
    "ids": '{"prompt": ' + many("7") + "}",
    "lists of ids": '{"prompt": ' + many("[7]") + "}",
    "wrong ids": '{"prompt": ' + many("-1") + "}",
    "texts": '{"prompt": ' + many('"a"') + "}",
    "stops": '{"prompt": "a", "stop": ' + many("1") + "}",
    "stop ids": '{"prompt": "a", "n": 128, "stop_token_ids": ' + many("5", MIB) + "}",
    "wrong stop ids": '{"prompt": "a", "stop_token_ids": ' + many("-1") + "}",
    "nested": '{"prompt": "a", "x": ' + many("[]") + "}",
    "objects": '{"prompt": "a", "x": ' + many('{"a": 1}') + "}",
    "fields": '{"prompt": "a", ' + ",".join(f'"{i:06d}": 1' for i in range(500_000)) + "}",
    "bias": '{"prompt": "a", "logit_bias": {'
    + ",".join(f'"{i}": "x"' for i in range(90_000))
    + "}}",
    "tools": '{"messages": [' + USER + '], "tools": ' + many(TOOL) + "}",
    "messages": '{"messages": ' + many(USER) + "}",
    "allowed tools": '{"messages": ['
    + f'{USER}], "n": 128, "tools": [{ANY}], "tool_choice": '
    + '{"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": '
    + f"{many(LAST, 850_000)}}}}}}}",
    "a long chat": '{"messages": [{"role": "user", "content": "' + "ab " * (2 * MIB) + '"}]}',
    "a long text": '{"prompt": "' + "ab " * (2 * MIB) + '"}',
}


def path_of(body: str) -> str:
    return "/v1/chat/completions" if '"messages"' in body[:20] else "/v1/completions"


@pytest.fixture(scope="module")
def server():
    with Server(*SMALL) as server:
        yield server


def cpu_seconds(process) -> float:
    """The CPU time that a process has taken so far."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.fixture(scope="module")
def parsing_seconds() -> float:
    """The CPU time that it takes here to parse a body of many objects."""
    begin = time.thread_time()
    json.loads(HEAVY["objects"])
    return time.thread_time() - begin


@pytest.mark.skipif(sys.platform != "linux", reason="reads the CPU time of another process")
@pytest.mark.parametrize("name", HEAVY)
def test_a_heavy_body_is_refused_and_holds_up_nobody(server, parsing_seconds, name):
    """Law: no body costs the front much more than one parse, so it keeps nobody waiting longer."""
    body = HEAVY[name].encode()
    before = cpu_seconds(server.process)
    status, answer, _ = server.ask("POST", path_of(HEAVY[name]), raw=body)
    spent = cpu_seconds(server.process) - before
    print(f"{name}: {status}, {spent:.2f} CPU s of the front; a parse takes {parsing_seconds:.2f}")
    assert status in (400, 413), answer
    assert answer["error"]["message"]
    assert spent < 3 * parsing_seconds
    assert server.ask("GET", "/health")[0] == 200


def test_a_large_body_that_has_come_is_refused_without_a_wait():
    """Law: only a body that still comes holds its connection; its size need not be in its head."""

    class NothingMore:
        async def wait(self):
            raise AssertionError("the body has come, and more is waited for")

    async def test(front):
        for path in ("/v1/sessions", "/v1/completions"):
            status, _ = await front.ask({"x": "a" * 66_000}, path=path, leaves=NothingMore())
            assert status == 413 and front.headers["connection"] == "close"

    scripted(test, max_body=1024)


def test_a_path_without_texts_takes_small_bodies_only(server):
    raw = b'{"x": "' + b"a" * 66_000 + b'"}'
    for path in ("/v1/sessions", "/v1/sessions/x/rewind"):
        status, answer, _ = server.ask("POST", path, raw=raw)
        assert status == 413 and "more than 65536 bytes" in answer["error"]["message"], path


def test_nodes_are_counted_outside_of_strings():
    for text, count in (
        ("[]", 1),
        ('{"a": [1, {"b": null}]}', 5),
        ('{"[{:": "[[[\\"{{{\\\\"}', 2),
        ('"\\\\\\"[["', 0),
        ('["\\\\", [], "]["]', 2),
    ):
        json.loads(text)
        assert num_nodes(text.encode()) == count, text


def test_the_most_nodes_are_read_and_no_more():
    """The object, its two members and the list count too."""
    room = MOST_NODES - 4
    for extra, is_read in ((0, True), (1, False)):
        body = '{"prompt": "a", "x": [' + ",".join(["[]"] * (room + extra)) + "]}"
        if is_read:
            assert read(CompletionRequest, body.encode()).prompt == "a"
            continue
        with pytest.raises(ApiError) as caught:
            read(CompletionRequest, body.encode())
        assert caught.value.status == 413
        assert f"{MOST_NODES + 1}" in str(caught.value) and f"{MOST_NODES}" in str(caught.value)


def test_the_arguments_of_calls_have_as_many_nodes_and_no_more():
    """Law: they are parsed within their strings, and all calls of a chat count together."""
    for extra, is_read in ((0, True), (1, False)):
        lists = [",".join(["[]"] * (MOST_NODES // 2 - 1 + more)) for more in (0, extra)]
        calls = [{"function": {"name": "f", "arguments": f"[{items}]"}} for items in lists]
        chat = [{"role": "assistant", "tool_calls": [call]} for call in calls]
        body = json.dumps({"messages": chat}).encode()
        if is_read:
            assert len(read(ChatRequest, body).messages) == 2
            continue
        with pytest.raises(ApiError) as caught:
            read(ChatRequest, body)
        assert f"{MOST_NODES + 1}" in str(caught.value) and f"{MOST_NODES}" in str(caught.value)
        assert caught.value.body["error"]["param"] == "messages"


@pytest.mark.parametrize(
    ("model", "body", "param"),
    [
        (CompletionRequest, {"prompt": 7}, "prompt"),
        (CompletionRequest, {"prompt": None}, "prompt"),
        (CompletionRequest, {"prompt": [1, -1]}, "prompt[1]"),
        (CompletionRequest, {"prompt": ["a", 1]}, "prompt[1]"),
        (CompletionRequest, {"prompt": [[1], [2, "x"]]}, "prompt[1][1]"),
        (CompletionRequest, {"prompt": "a", "stop": [1]}, "stop"),
        (CompletionRequest, {"prompt": "a", "logit_bias": {"str": "x"}}, "logit_bias.str"),
        (CompletionRequest, {"prompt": "a", "stream_options": {"include_usage": 1}}, None),
        (ChatRequest, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (ChatRequest, {"messages": [{"content": "x"}]}, "messages[0].role"),
        (
            ChatRequest,
            {"messages": [{"role": "user", "content": ["x"]}]},
            "messages[0].content",
        ),
        (
            ChatRequest,
            {"messages": [{"role": "user"}], "tools": [{"type": "function", "function": {}}]},
            "tools[0].function.name",
        ),
    ],
    ids=lambda value: repr(value)[:48],
)
def test_a_mistake_is_named_by_the_clients_own_field(model, body, param):
    with pytest.raises(ApiError) as caught:
        read(model, json.dumps(body).encode())
    error = caught.value.body["error"]
    assert error["param"] == (param or "stream_options.include_usage")
    assert error["message"].startswith(error["param"] + ": ")
    assert "list[" not in error["message"] and ".str:" not in error["message"].replace(
        "logit_bias.str", ""
    )
