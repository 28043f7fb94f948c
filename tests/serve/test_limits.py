"""Keys, names, rooms and times: who is refused gets OpenAI's error, and the others go on."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import threading
import time

import openai
import pytest

from serve_kit import Server, events
from specpool.serve.config import ServeConfig
from specpool.serve.server import fit_connections

ASK = {"prompt": "seq: 2, 4, ", "max_tokens": 1900, "temperature": 0, "n": 2}
LONG = ASK | {"n": 1, "ignore_eos": True}
SHORT = LONG | {"max_tokens": 4}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """Two texts run, two wait; two seconds for each; two keys; one site; two sessions."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("first-key\nsecond-key\n")
    options = ["--batch", "2", "--max-queue", "2", "--request-timeout", "2"]
    options += ["--api-key-file", str(keys), "--allow-origin", "https://site.example"]
    options += ["--max-open-sessions", "2", "--session-timeout", "4"]
    options += ["--name", "toy", "--name", "other", "--max-connections", "40"]
    with Server(*options, environment={"SPECPOOL_API_KEY": "third-key"}) as server:
        server.key = "first-key"
        yield server


KEY = {"authorization": "Bearer first-key"}


def client_of(server, key="first-key", **options):
    options = {"max_retries": 0, "timeout": 60} | options
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, **options)


@pytest.mark.parametrize("key", ["first-key", "second-key", "third-key"])
def test_each_key_opens(guarded, key):
    names = [model.id for model in client_of(guarded, key).models.list().data]
    assert names == ["toy", "other"]


@pytest.mark.parametrize("key", ["first-ke", "first-keyy", "FIRST-KEY", "x", "sch\u00fcssel"])
def test_a_wrong_key_is_a_401(guarded, key):
    raw = {"authorization": f"Bearer {key}".encode().decode("latin-1")}
    paths = ("/v1/models", "/tokenize", "/server_info", "/pool", "/openapi.json", "/v1/none")
    for path in (*paths, "/metrics"):
        status, answer, headers = guarded.ask("GET", path, headers=raw)
        assert status == 401 and answer["error"]["code"] == "invalid_api_key", path
        assert headers["www-authenticate"] == "Bearer"
    assert guarded.ask("GET", "/v1/models")[0] == 401
    assert guarded.ask("GET", "/v1/models", headers={"authorization": "Basic first-key"})[0] == 401


def test_the_client_sees_an_authentication_error(guarded):
    with pytest.raises(openai.AuthenticationError) as error:
        client_of(guarded, "wrong").completions.create(model="toy", prompt="a")
    assert error.value.code == "invalid_api_key"


def test_health_and_the_page_need_no_key(guarded):
    for path in ("/health", "/"):
        assert guarded.ask("GET", path)[0] == 200


@pytest.fixture(scope="module")
def measured():
    """Its metrics are open beside a key; it has targets of time, and leaves a slow reader soon."""
    options = ["--draft", "specpool/tiny-eagle", "--adaptive", "budget", "--batch", "16"]
    options += ["--open-metrics", "--write-timeout", "1"]
    with Server(*options, environment={"SPECPOOL_API_KEY": "first-key"}) as server:
        yield server
        server.check_no_leak()


def test_metrics_may_be_open_beside_a_key(measured):
    assert measured.ask("GET", "/metrics")[0] == 200
    assert measured.ask("GET", "/v1/models")[0] == 401


def test_other_sites_are_named_or_refused(guarded):
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "x-a"}
    for origin, allowed in (("https://site.example", True), ("https://evil.example", False)):
        status, _, headers = guarded.ask(
            "OPTIONS", "/v1/models", headers=asked | {"origin": origin}
        )
        assert (headers.get("access-control-allow-origin") == origin) == allowed
        assert (status == 200) == allowed


def test_a_named_site_sees_when_to_try_again(guarded):
    _, _, headers = guarded.ask("GET", "/health", headers={"origin": "https://site.example"})
    shown = {"x-request-id", "x-specpool-ignored", "x-should-retry", "retry-after"}
    assert set(headers["access-control-expose-headers"].split(", ")) == shown


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "", "localhost.evil.example"]
)
def test_a_loopback_server_has_no_strange_name(guarded, host):
    """A web page may have pointed its own name here; it must not reach the model."""
    status, answer, _ = guarded.ask("GET", "/v1/models", headers=KEY | {"host": host})
    assert status == 403 and answer["error"]["code"] == "host_not_allowed"
    assert guarded.ask("GET", "/v1/models", headers=KEY | {"host": "localhost:1"})[0] == 200


def test_a_full_queue_is_a_429(guarded):
    """Six clients want the four places all the time; later there is room again."""
    answers, stop = [], threading.Event()

    def crowd():
        while not stop.is_set():
            answers.append(guarded.ask("POST", "/v1/completions", LONG, KEY)[0])

    threads = [threading.Thread(target=crowd) for _ in range(6)]
    for thread in threads:
        thread.start()
    try:
        refusal, end = None, time.monotonic() + 60
        while refusal is None:
            assert time.monotonic() < end
            try:
                client_of(guarded).completions.create(model="toy", prompt="a", max_tokens=1)
            except openai.RateLimitError as error:
                refusal = error
        assert refusal.code == "queue_full" and refusal.response.headers["retry-after"] == "1"
        assert guarded.ask("GET", "/health")[0] == 200
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    patient = client_of(guarded, max_retries=8)
    assert patient.completions.create(model="toy", prompt="a", max_tokens=2).choices
    assert set(answers) <= {200, 429, 504}
    guarded.check_no_leak()


def test_a_request_that_takes_too_long_is_a_504(guarded):
    with pytest.raises(openai.InternalServerError) as error:
        client_of(guarded).completions.create(model="toy", extra_body={"ignore_eos": True}, **ASK)
    assert error.value.status_code == 504 and error.value.code == "request_timeout"
    assert error.value.response.headers["x-should-retry"] == "false"
    guarded.check_no_leak()


def test_a_stream_that_takes_too_long_ends_with_an_error(guarded):
    stream = client_of(guarded).completions.create(
        model="toy", stream=True, extra_body={"ignore_eos": True}, **ASK
    )
    with pytest.raises(openai.APIError) as error:
        assert sum(1 for _ in stream) > 3
    assert error.value.code == "request_timeout"
    _, text, _ = guarded.ask("POST", "/v1/completions", LONG | {"n": 2, "stream": True}, KEY)
    *_, last = events(text)
    assert last["error"]["code"] == "request_timeout"  # and no [DONE] behind it
    guarded.check_no_leak()


def test_the_most_sessions_and_their_end(guarded):
    opened = [guarded.ask("POST", "/v1/sessions", {}, KEY) for _ in range(3)]
    assert [status for status, *_ in opened] == [200, 200, 429]
    assert opened[2][1]["error"]["code"] == "too_many_sessions"
    ident = opened[0][1]["id"]
    assert guarded.ask("POST", f"/v1/sessions/{ident}/fork", headers=KEY)[0] == 429
    end = time.monotonic() + 120
    while guarded.ask("GET", "/v1/sessions", headers=KEY)[1]["data"]:
        assert time.monotonic() < end
        time.sleep(0.1)
    assert guarded.ask("GET", f"/v1/sessions/{ident}", headers=KEY)[0] == 404
    guarded.check_no_leak()


def test_a_reader_that_does_not_read_is_left(measured):
    """After --write-timeout seconds its texts are aborted, long before their own time is over."""
    body = json.dumps(LONG | {"stream": True, "logprobs": 20, "n": 8}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer first-key\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    before = measured.metrics()
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", measured.port))
        sock.sendall(head.encode() + body)
        end, aborted = time.monotonic() + 60, "specpool_aborted_requests_total"
        finished = "specpool_finished_requests_total"
        while (found := measured.metrics())[aborted] == before[aborted]:
            assert measured.ask("POST", "/v1/completions", SHORT, KEY)[0] == 200
            assert found[finished] < before[finished] + 500
            assert time.monotonic() < end
            time.sleep(0.05)
        measured.check_no_leak()


def test_connections_beyond_the_most_are_closed(guarded):
    held = [socket.create_connection(("127.0.0.1", guarded.port), 10) for _ in range(60)]
    try:
        still_open, end = list(held), time.monotonic() + 120
        while len(still_open) > 40:
            assert time.monotonic() < end
            for sock in list(still_open):
                sock.settimeout(0.05)
                with contextlib.suppress(TimeoutError):
                    with contextlib.suppress(ConnectionResetError):
                        assert sock.recv(1) == b""
                    still_open.remove(sock)
        assert len(still_open) >= 20
    finally:
        for sock in held:
            sock.close()
    end = time.monotonic() + 120
    while True:
        try:
            assert guarded.ask("GET", "/health")[0] == 200
            break
        except OSError:
            assert time.monotonic() < end
    guarded.check_no_leak()


def test_idle_connections_make_room_also_where_few_files_may_be_open():
    """Law: without a key nobody keeps others out, whatever the system's usual limit is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (160, hard))
    try:
        server = Server("--max-connections", "240")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with server, contextlib.ExitStack() as held:
        for _ in range(300):
            held.enter_context(socket.create_connection(("127.0.0.1", server.port), 10))
        for _ in range(3):
            assert server.ask("GET", "/health")[0] == 200
        assert "no connection can be taken" not in "".join(server.err)


@pytest.mark.parametrize(
    ("soft", "hard", "set_to", "num"),
    [
        (1024, 1 << 20, 4192, 4096),
        (1024, resource.RLIM_INFINITY, 4192, 4096),
        (1024, 2048, 2048, 1952),
        (64, 64, 64, 1),
        (1 << 16, 1 << 16, None, 4096),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None, 4096),
    ],
)
def test_there_are_as_many_connections_as_files_may_be_open(monkeypatch, soft, hard, set_to, num):
    limits = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.append(pair))
    assert fit_connections(ServeConfig()).max_connections == num
    assert limits == ([] if set_to is None else [(set_to, hard)])


def test_no_key_and_no_prompt_is_logged(guarded):
    guarded.ask("POST", "/v1/completions?secret=12345", SHORT | {"prompt": "my secret"}, KEY)
    log = guarded.log("POST /v1/completions 200")
    assert not {"first-key", "secret", "third-key"} & set(log.replace("=", " ").split())


def test_a_target_of_time_is_taken_and_its_misses_are_counted(measured):
    """No machine makes a token in a microsecond: each round of this row misses."""
    assert measured.metrics()["specpool_missed_row_rounds_total"] == 0
    for more in ({}, {"tpot_ms": 1e6}, {"tpot_ms": 0.001}):
        before = measured.metrics()["specpool_missed_row_rounds_total"]
        body = SHORT | {"max_tokens": 60} | more
        assert measured.ask("POST", "/v1/completions", body, KEY)[0] == 200
        misses = measured.metrics()["specpool_missed_row_rounds_total"] - before
        assert (misses > 0) == (more == {"tpot_ms": 0.001}), more
