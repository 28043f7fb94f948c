"""Bad input over HTTP: the right status, one clear message, nothing else disturbed."""

from __future__ import annotations

import json
import re
import socket
import time
from contextlib import ExitStack
from functools import partial

import pytest

from paths import ROOT
from specpool import ConfigError
from specpool.serve.api.sampling import refused

TEXT = {"prompt": "seq: 2, ", "max_tokens": 4}
CHAT = {"messages": [{"role": "user", "content": "seq: 2, "}], "max_tokens": 4}
USER = {"role": "user", "content": "a"}
TOOL = {"type": "function", "function": {"name": "f"}}
DEEP = "[" * 100_000

COMPLETIONS = [
    ({}, "prompt: Field required", "prompt"),
    ({"prompt": None}, "prompt: Input should be a text, token ids, or a list", "prompt"),
    ({"prompt": 7}, "prompt: Input should be a text, token ids, or a list", "prompt"),
    ({"prompt": []}, "there is no prompt", "prompt"),
    ({"prompt": ""}, "a prompt is empty", "prompt"),
    ({"prompt": [[]]}, "a prompt is empty", "prompt"),
    ({"prompt": [-1]}, "prompt[0]: Input should be greater", "prompt[0]"),
    ({"prompt": [300]}, "prompt 0 has token id 300", "prompt"),
    ({"prompt": [[1], [2, 300]]}, "prompt 1 has token id 300", "prompt[1]"),
    ({"prompt": ["a", 1]}, "prompt[1]: Input should be a valid string", "prompt[1]"),
    ({"prompt": ["a", "b" * 300]}, "the prompt has 300 tokens", "prompt[1]"),
    ({"prompt": ["a", "b" * 3000]}, "the prompt has 3000 characters", "prompt[1]"),
    ({"prompt": [5] * 300}, "the prompt has 300 tokens", "prompt"),
    ({"prompt": "a" * 256}, "the prompt has 256 tokens", "prompt"),
    ({"prompt": "a" * 100_000}, "the prompt has 100000 characters; at most ", "prompt"),
    ({"prompt": ["a"] * 129}, "at most 128 prompts", "prompt"),
    (TEXT | {"max_tokens": 0}, "max_tokens: Input should be greater", "max_tokens"),
    (TEXT | {"max_tokens": -5}, "max_tokens: Input should be greater", "max_tokens"),
    (TEXT | {"max_tokens": "5"}, "max_tokens: Input should be a valid integer", "max_tokens"),
    (TEXT | {"max_tokens": 1.5}, "max_tokens", "max_tokens"),
    (TEXT | {"max_tokens": True}, "max_tokens", "max_tokens"),
    (TEXT | {"n": 0}, "n: Input should be greater", "n"),
    (TEXT | {"n": 73}, "the call asks for 73 texts: 73 for each of 1 prompts; at most 72, of", "n"),
    (TEXT | {"prompt": ["a"] * 73}, "of which 8 run and 64 wait", "prompt"),
    (TEXT | {"prompt": ["a"] * 10, "n": 8}, "80 texts: 8 for each of 10 prompts", "n"),
    (TEXT | {"n": 200}, "the call asks for 200 texts: ", "n"),
    (TEXT | {"temperature": -1}, "temperature: Input should be greater", "temperature"),
    (TEXT | {"temperature": 2.5}, "temperature: Input should be less", "temperature"),
    (TEXT | {"temperature": float("nan")}, "temperature", "temperature"),
    (TEXT | {"temperature": float("inf")}, "temperature", "temperature"),
    (TEXT | {"top_p": 1.1}, "top_p", "top_p"),
    (TEXT | {"top_k": -2}, "top_k", "top_k"),
    (TEXT | {"seed": 1 << 65}, "seed", "seed"),
    (TEXT | {"seed": 10**4000}, "seed", "seed"),
    (TEXT | {"stop": [f"{i}!" for i in range(1000)]}, "at most 64 strings, got 1000", "stop"),
    (TEXT | {"stop": [""]}, "stop must hold strings that are not empty", "stop"),
    (TEXT | {"stop": [1]}, "stop", "stop"),
    (TEXT | {"stop": "\ud800"}, "", None),
    (TEXT | {"stop_token_ids": [300]}, "300 among its stop_token_ids", "stop_token_ids"),
    (TEXT | {"stop_token_ids": [5] * 1025}, "at most 1024 items", "stop_token_ids"),
    (TEXT | {"logprobs": 21}, "logprobs", "logprobs"),
    (TEXT | {"logprobs": True}, "logprobs", "logprobs"),
    (TEXT | {"logit_bias": {"x": 1}}, "'x' is no token id", "logit_bias"),
    (TEXT | {"logit_bias": {"5": 101}}, "[-100, 100]", "logit_bias"),
    (TEXT | {"logit_bias": [5]}, "logit_bias", "logit_bias"),
    (TEXT | {"logit_bias": {"300": 5}}, "300 in its logit_bias", "logit_bias"),
    (
        TEXT | {"logit_bias": {f"{i}": 1 for i in range(1025)}},
        "At most 1024 tokens can have a bias, got 1025",
        "logit_bias",
    ),
    (TEXT | {"presence_penalty": 3}, "presence_penalty", "presence_penalty"),
    (TEXT | {"drafter": 3}, "drafter: Input should be a valid string", "drafter"),
    (TEXT | {"drafter": ""}, "drafter must be a name or None, got ''", "drafter"),
    (TEXT | {"drafter": "ngram"}, "names 'ngram'; the engine has '", "drafter"),
    (TEXT | {"best_of": 3}, "best_of is not supported", "best_of"),
    (TEXT | {"suffix": "x"}, "suffix is not supported", "suffix"),
    (TEXT | {"echo": True, "logprobs": 1}, "echo with logprobs", "echo"),
    (TEXT | {"tpot_ms": 5}, "tpot_ms 5, which needs an engine with adaptive='budget'", "tpot_ms"),
    (TEXT | {"tpot_ms": 0}, "tpot_ms: Input should be greater", "tpot_ms"),
    (TEXT | {"tpot_ms": float("nan")}, "tpot_ms: Input should be", "tpot_ms"),
    (TEXT | {"stream": "yes"}, "stream", "stream"),
    (TEXT | {"stream_options": {"include_usage": 1}}, "stream_options.include_usage", None),
    (TEXT | {"cache_salt": "x" * 300}, "cache_salt must be at most 256 bytes", "cache_salt"),
    (TEXT | {"priority": 1 << 40}, "priority", "priority"),
    (TEXT | {"session_offset": 0}, "needs the header x-session-id", "session_offset"),
    (TEXT | {"session_id": "x"}, "name the session in the header", "session_id"),
    (TEXT | {"prompt_logprobs": 1}, "prompt_logprobs is not supported", "prompt_logprobs"),
]
CHATS = [
    ({}, "messages: Field required", "messages"),
    ({"messages": []}, "messages: List should have at least 1 item", "messages"),
    ({"messages": "hello"}, "messages", "messages"),
    ({"messages": [{"content": "x"}]}, "messages[0].role: Field required", "messages[0].role"),
    (
        {"messages": [{"role": "user", "content": 5}]},
        "messages[0].content: Input should be a valid string",
        "messages[0].content",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "part 0 of the content of message 0 of prompt 0 is the type 'image_url': only text",
        "messages[0].content[0]",
    ),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "the body is no JSON: ", None),
    ({"messages": [USER, USER | {"content": "b" * 5000}]}, "the prompt has 5001 char", "messages"),
    ({"messages": [USER | {"content": "b" * 600}]}, "the prompt has 601 tokens", "messages"),
    (CHAT | {"logit_bias": {"300": 5}}, "300 in its logit_bias", "logit_bias"),
    (
        CHAT | {"chat_template_kwargs": {"messages": [], "tools": []}},
        "chat_template_kwargs has 'messages', 'tools', which the server gives the template itself",
        "chat_template_kwargs",
    ),
    (CHAT | {"top_logprobs": 2}, "top_logprobs needs logprobs: true", "top_logprobs"),
    (CHAT | {"tools": [{"type": "function"}]}, "tools[0].function: Field required", None),
    (CHAT | {"tools": [TOOL] * 1025}, "tools: List should have at most 1024 items", "tools"),
    (CHAT | {"tool_choice": "required"}, "there are no tools", "tool_choice"),
    (CHAT | {"tool_choice": "x" * 5000}, "or a function, got 'xxx", "tool_choice"),
    (CHAT | {"functions": [{"name": "f"}]}, "functions is not supported", "functions"),
    (CHAT | {"modalities": ["audio"]}, "modalities is not supported", "modalities"),
    (
        CHAT | {"response_format": {"type": "xml"}},
        "response_format.type must be",
        "response_format",
    ),
    (CHAT | {"response_format": {"type": "json_schema"}}, "must be a JSON schema", None),
    (CHAT | {"max_tokens": 1 << 40}, "max_tokens", "max_tokens"),
]
CASES = [("/v1/completions", *case) for case in COMPLETIONS]
CASES += [("/v1/chat/completions", *case) for case in CHATS]
CASES += [
    ("/v1/sessions", {"max_tokens": 1}, "max_tokens: Input should be greater", "max_tokens"),
    ("/v1/sessions", {"max_tokens": 1 << 20}, "max_tokens must be an integer in", "max_tokens"),
    ("/v1/sessions", [], "body: Input should be a valid dictionary", "body"),
    ("/v1/sessions/x/rewind", {}, "offset: Field required", "offset"),
    ("/v1/sessions/x/rewind", {"offset": -1}, "offset: Input should be greater", "offset"),
    ("/v1/sessions/x/rewind", None, "body: Field required", "body"),
]


def check_error(answer, status=400):
    """OpenAI's shape, one line, and nothing of the machine in it."""
    assert set(answer) == {"error"}
    error = answer["error"]
    assert {"message", "type", "param", "code"} <= set(error)
    assert error["message"] and "\n" not in error["message"] and len(error["message"]) < 1000
    assert error["type"] == ("invalid_request_error" if status in (400, 413) else error["type"])
    text = json.dumps(answer)
    assert not re.search(
        rf"Traceback|File |{re.escape(str(ROOT))}|/home|site-packages|\.py\b", text
    )


@pytest.mark.parametrize(
    ("path", "body", "message", "param"), CASES, ids=lambda value: repr(value)[:48]
)
def test_a_wrong_body_is_a_400_that_says_why(server, path, body, message, param):
    status, answer, _ = server.ask("POST", path, body)
    assert status == 400, answer
    check_error(answer)
    assert message in answer["error"]["message"]
    if param is not None:
        assert answer["error"]["param"] == param


@pytest.mark.parametrize(
    ("raw", "headers", "status"),
    [
        (b"{", {}, 400),
        (b"", {}, 400),
        (b"[]", {}, 400),
        (b"null", {}, 400),
        (b'{"prompt": "a", "temperature": NaN}', {}, 400),
        (b'{"prompt": "a\xff"}', {}, 400),
        (DEEP.encode(), {}, 400),
        (b'{"prompt": "a", "max_tokens": 1' + b"0" * 5000 + b"}", {}, 400),
        (b'{"prompt": "a"}', {"content-type": "text/plain"}, 400),
        (b'{"prompt": "a"}', {"content-type": "application/x-www-form-urlencoded"}, 400),
        (b'{"prompt": "' + b"a" * 300_000 + b'"}', {}, 413),
        (b'{"prompt": "' + b"a" * 900_000 + b'"}', {}, 413),  # all of it is sent before the answer
    ],
    ids=lambda value: repr(value)[:32],
)
def test_what_is_no_json_for_us_is_refused(server, raw, headers, status):
    answer = server.ask("POST", "/v1/completions", raw=raw, headers=headers)
    assert answer[0] == status
    check_error(answer[1], status)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a" * 300}),
        ("/v1/completions", {"prompt": [5] * 300}),
        ("/v1/completions", {"prompt": "a" * 100_000}),
        ("/v1/chat/completions", {"messages": [USER | {"content": "b" * 600}]}),
        ("/v1/chat/completions", {"messages": [USER | {"content": "b" * 5000}]}),
        ("/tokenize", {"prompt": "a" * 100_000}),
    ],
    ids=lambda value: repr(value)[:32],
)
def test_libraries_know_a_prompt_that_is_too_long(server, path, body):
    """Law: beside the code stand the words by which LangChain and LiteLLM know it."""
    status, answer, _ = server.ask("POST", path, body)
    assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
    assert answer["error"]["message"].startswith("the prompt is too long: the prompt has ")


def test_a_prompt_that_the_engine_finds_too_long_says_so_too():
    error = refused(ConfigError("prompt 0 has 9 tokens; max_context_len 8 leaves room for 7"))
    assert error.body["error"]["code"] == "context_length_exceeded"
    assert str(error).startswith("the prompt is too long: prompt 0 has 9 tokens; ")
    error = refused(ConfigError("prompt 0 is wrong"))
    assert (str(error), error.body["error"]["code"]) == ("prompt 0 is wrong", None)


@pytest.mark.parametrize("raw", [b"[]", b"null", b"3", b'"a"'])
def test_a_body_that_is_no_object_is_told_so(server, raw):
    status, answer, _ = server.ask("POST", "/v1/completions", raw=raw)
    assert status == 400
    assert answer["error"]["message"] == "the body must be a JSON object"


def test_paths_and_methods_that_are_not_there(server):
    for method, path, status in (
        ("GET", "/v1/none", 404),
        ("GET", "/../../etc/passwd", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/health", 405),
        ("GET", "/docs", 404),
        ("POST", "/v1/sessions/xyz/fork", 410),
    ):
        answer = server.ask(method, path)
        assert answer[0] == status, path
        check_error(answer[1], status)


def test_unknown_fields_are_ignored_and_named(server):
    status, _, headers = server.ask(
        "POST", "/v1/completions", TEXT | {"temprature": 0, "user": "me", "metadata": {"a": 1}}
    )
    assert status == 200 and headers["x-specpool-ignored"] == "metadata, temprature, user"


def test_a_failure_of_one_choice_disturbs_no_other(server):
    """A request that is refused in the engine leaves those beside it alone."""
    for _ in range(3):
        assert server.ask("POST", "/v1/completions", {"prompt": [[1, 2], [300]]})[0] == 400
    assert server.ask("POST", "/v1/completions", TEXT)[0] == 200


# --- below HTTP


def head(*lines: str) -> bytes:
    return "\r\n".join(
        ["POST /v1/completions HTTP/1.1", "Host: localhost", *lines, "", ""]
    ).encode()


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"hello\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (head("X-A: " + "a" * 65536), 431),
        (head(*(f"X-{i}: {'a' * 64}" for i in range(1000))), 431),
        (b"GET /" + b"a" * 65536 + b" HTTP/1.1\r\n\r\n", 431),
        (b"GET /" + b"a" * 65536, 431),
        (head("Content-Length: -1"), 400),
        (head("Content-Length: 999999999999999999999"), 400),
        (head("Content-Type: application/json", "Content-Length: 9999999"), 413),
    ],
    ids=lambda value: repr(value)[:32],
)
def test_what_is_no_http_for_us_is_refused(server, content, status):
    answer = server.raw(content)
    line, _, rest = answer.partition(b"\r\n")
    assert line.startswith(f"HTTP/1.1 {status}".encode()), answer[:200]
    check_error(json.loads(rest.partition(b"\r\n\r\n")[2]), status)


def test_a_client_that_goes_on_sending_hears_why_it_is_refused(server):
    """Law: what a refused client still sends does not cut off the answer."""
    answer = server.raw(b"GET /" + b"a" * (8 << 20))
    assert answer.startswith(b"HTTP/1.1 431"), answer[:200]


@pytest.mark.parametrize(
    ("line", "size", "status"),
    [("Origin: http://evil.example", 200_000, 403), ("X-A: b", 600_000, 413)],
    ids=["by its head", "by its size"],
)
def test_a_refused_body_that_still_comes_does_not_cut_off_the_answer(server, line, size, status):
    """Law: a request is refused at once, and its connection closes in order behind its body."""
    parts = [b" " * (size // 8)] * 8
    start = head(line, "Content-Type: application/json", f"Content-Length: {8 * len(parts[0])}")
    with socket.create_connection(("127.0.0.1", server.port), 20) as sock:
        sock.sendall(start + parts[0])
        answer = sock.recv(65536)
        for part in parts[1:]:
            sock.sendall(part)
            time.sleep(0.01)
        answer += b"".join(iter(partial(sock.recv, 65536), b""))
    assert answer.startswith(f"HTTP/1.1 {status}".encode()), answer[:200]
    check_error(json.loads(answer.partition(b"\r\n\r\n")[2]), status)


def test_a_refused_body_that_does_not_come_holds_no_connection(server):
    start = head("Origin: http://evil.example", "Content-Length: 200000")
    for lines in ("", "Expect: 100-continue\r\n"):
        answer = server.raw(start[:-2] + lines.encode() + b"\r\n")
        assert answer.startswith(b"HTTP/1.1 403") and answer.endswith(b"}"), answer


def test_what_is_no_http_ends_the_request_before_it(server):
    body = json.dumps({"prompt": "a", "max_tokens": 64, "stream": True})
    first = head("Content-Type: application/json", f"Content-Length: {len(body)}") + body.encode()
    with socket.create_connection(("127.0.0.1", server.port), 20) as sock:  # open to the end
        sock.sendall(first + b"no HTTP\r\n\r\n")
        answer = b"".join(iter(partial(sock.recv, 65536), b""))
        assert b"HTTP/1.1 400 Refused" in answer and b"[DONE]" not in answer, answer[:200]
        server.idle()
        time.sleep(0.5)  # a request that still ran would write, which the log would tell


def test_half_open_connections_are_closed(server):
    """After --read-timeout seconds (3); the server answers others meanwhile."""
    contents = {
        "silent": b"",
        "line": b"POST /v1/compl",
        "headers": head()[:-2],
        "body": head("Content-Length: 100") + b'{"prompt"',
    }
    start = time.monotonic()
    with ExitStack() as stack:
        connections = {}
        for name, content in contents.items():
            address = ("127.0.0.1", server.port)
            connections[name] = stack.enter_context(socket.create_connection(address, 120))
            connections[name].sendall(content)
        assert server.ask("GET", "/health")[0] == 200
        answers = {name: sock.recv(65536)[:12] for name, sock in connections.items()}
    assert time.monotonic() - start > 2
    refused = b"HTTP/1.1 408"
    assert answers == {"silent": b"", "line": refused, "headers": refused, "body": refused}
