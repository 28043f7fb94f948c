"""Whose is it? Each route, and what another key, another site's page or the log learns of it."""

from __future__ import annotations

import asyncio
import logging

import pytest
from test_bridge import Wire, done
from test_scripted_engine import Scripted

from serve_kit import SMALL, Server
from specpool import Engine
from specpool.serve.app import routers
from specpool.serve.bridge.messages import Accepted, Reply, Submit, VerbCall

KEYS = ("key-of-a", "key-of-b")
A, B = ({"authorization": f"Bearer {key}"} for key in KEYS)
TEXT = {"prompt": "ab", "max_tokens": 4, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 4, "temperature": 0}

#: Each route: who may call it, and what it shows. "anyone" needs no key and learns nothing of a
#: client. "key": the same for each key, and nothing of a client. "totals": sums of all clients.
#: "own": what the caller's own key sent or opened.
WHO = {
    ("GET", "/"): "anyone",
    ("GET", "/health"): "anyone",
    ("GET", "/openapi.json"): "key",
    ("GET", "/v1/models"): "key",
    ("GET", "/v1/models/"): "key",
    ("GET", "/v1/models/{name:path}"): "key",
    ("POST", "/tokenize"): "own",
    ("POST", "/detokenize"): "own",
    ("POST", "/v1/completions"): "own",
    ("POST", "/v1/chat/completions"): "own",
    ("GET", "/v1/sessions"): "own",
    ("POST", "/v1/sessions"): "own",
    ("GET", "/v1/sessions/{ident}"): "own",
    ("DELETE", "/v1/sessions/{ident}"): "own",
    ("POST", "/v1/sessions/{ident}/rewind"): "own",
    ("POST", "/v1/sessions/{ident}/fork"): "own",
    ("GET", "/metrics"): "totals",
    ("GET", "/server_info"): "totals",
    ("GET", "/pool"): "totals",
}
ROUTES = sorted(WHO)
BODIES = {
    "/tokenize": {"prompt": "ab"},
    "/detokenize": {"tokens": [5]},
    "/v1/completions": TEXT,
    "/v1/chat/completions": CHAT,
    "/v1/sessions/{ident}/rewind": {"offset": 0},
}
#: What a browser says of a page of another site, of older browsers, and of a file or a frame.
FOREIGN = [
    {"origin": "http://evil.example", "sec-fetch-site": "cross-site"},
    {"origin": "http://localhost:9999", "sec-fetch-site": "same-site"},
    {"origin": "http://evil.example"},
    {"origin": "null"},
    {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"},
]


@pytest.fixture(scope="module")
def stats():
    with Engine.from_pretrained(max_context_len=64) as engine:
        return engine.stats()


class Willing(Wire):
    """An engine that answers each message at once."""

    def __init__(self, stats):
        super().__init__()
        pool = [{"name": "kv", "runs": [[2, 1, 5], [3, 1, 6], [1, 0, 0], [1, 1, 7]]}]
        self._answers = {"stats": stats, "pool": pool, "rewind": 0}

    def send(self, message):
        super().send(message)
        if isinstance(message, VerbCall):
            answer = self._answers.get(message.verb, len(self.said))
            self._coming.put_nowait([Reply(message.key, answer)])
        elif isinstance(message, Submit):
            self._coming.put_nowait([Accepted(message.key), done(message.key)])


async def call(front, method, path, headers, ident="x"):
    """Call a route by its pattern; returns status and JSON."""
    filled = path.replace("{ident}", ident).replace("{name:path}", "specpool/tiny")
    return await front.ask(BODIES.get(path, {}), path=filled, method=method, **headers)


@pytest.fixture
def run(stats):
    """Runs a test beside a front with two keys."""

    def run(test, **options):
        async def main():
            front = Scripted(wire=Willing(stats), **{"api_keys": KEYS} | options)
            await front.start()
            await asyncio.wait_for(test(front), 60)

        asyncio.run(main())

    return run


async def opened(front, headers):
    """Open a session; returns its id."""
    status, answer = await front.ask({}, path="/v1/sessions", **headers)
    assert status == 200, answer
    return answer["id"]


def test_each_route_says_who_may(run):
    """Law: a new route is in the table above, with what it shows of whom."""

    async def test(front):
        made = [route for router in routers(front.service) for route in router.routes]
        registered = {(method, route.path) for route in made for method in route.methods}
        assert registered | {("GET", "/openapi.json")} == set(WHO)

    run(test)


@pytest.mark.parametrize("method", ["as it is", "HEAD", "PUT"])
def test_each_route_asks_for_a_key_but_those_for_anyone(run, method):
    """Law: without a key nothing is learned, not even whether a path exists; the engine is idle."""

    async def test(front):
        for route_method, path in [*ROUTES, ("GET", "/none")]:
            who = WHO.get((route_method, path), "key")
            used = route_method if method == "as it is" else method
            for headers in ({}, {"authorization": "Bearer key-of-c"}):
                status, answer = await call(front, used, path, headers)
                if who == "anyone":
                    assert status == (200 if used == route_method else 405), (used, path)
                else:
                    assert status == 401 and answer["error"]["code"] == "invalid_api_key", path
        assert front.wire.said == []

    run(test)


def test_a_session_of_another_key_is_one_that_never_existed(run):
    """Law: whatever is asked of it, the answers are the same, and the session is as before."""

    async def test(front):
        ident = await opened(front, A)
        never = ident[:-8] + "00000000"
        before = await front.ask(None, path=f"/v1/sessions/{ident}", method="GET", **A)
        said = len(front.wire.said)
        for method, path in ROUTES:
            if "{ident}" in path:
                other = await call(front, method, path, B, ident)
                assert other == await call(front, method, path, B, never), path
                assert other[0] == 404 and other[1]["error"]["code"] == "session_not_found"
        for path in ("/v1/completions", "/v1/chat/completions"):
            for more in ({"session_offset": 0}, {"session_offset": 9}, {}, {"n": 2}):
                body = BODIES[path] | more
                answers = [
                    await front.ask(body, path=path, x_session_id=name, **B)
                    for name in (ident, never)
                ]
                assert answers[0] == answers[1] and answers[0][0] == (
                    400 if "n" in more else 404
                ), answers
        assert len(front.wire.said) == said
        assert before == await front.ask(None, path=f"/v1/sessions/{ident}", method="GET", **A)

    run(test)


def test_the_list_has_the_sessions_of_the_own_key(run):
    async def test(front):
        idents = [await opened(front, headers) for headers in (A, B, A)]
        fork = (await front.ask({}, path=f"/v1/sessions/{idents[2]}/fork", **A))[1]["id"]
        for headers, own_idents in ((A, [idents[0], idents[2], fork]), (B, [idents[1]])):
            answer = await front.ask(None, path="/v1/sessions", method="GET", **headers)
            assert [session["id"] for session in answer[1]["data"]] == own_idents
        assert (await front.ask({}, path=f"/v1/sessions/{fork}", method="DELETE", **A))[0] == 200

    run(test)


def test_an_answer_names_a_session_as_its_client_does(run):
    """Law: no answer tells what the server keeps beside the id."""

    async def test(front):
        ident = await opened(front, A)
        body = TEXT | {"session_offset": 0}
        _, answer = await front.ask(body, x_session_id=ident, **A)
        assert answer["session"] == {"id": ident, "offset": 4} and "/" not in ident
        _, answer = await front.ask(body, x_session_id=ident, **A)
        assert answer["error"]["session"] == {"id": ident, "offset": 4}
        _, answer = await front.ask({"offset": 1}, path=f"/v1/sessions/{ident}/rewind", **A)
        assert answer["id"] == ident

    run(test)


@pytest.mark.parametrize(("most", "first", "second"), [(8, 5, 3), (2, 2, 1), (1, 1, 1)])
def test_one_key_leaves_places_for_sessions_of_others(run, most, first, second):
    """Law: one of several keys has at most as many sessions as places are left."""

    async def test(front):
        statuses = [(await front.ask({}, path="/v1/sessions", **A))[0] for _ in range(most + 1)]
        assert statuses == [200] * min(first, most) + [429] * (most + 1 - min(first, most))
        left = [(await front.ask({}, path="/v1/sessions", **B))[0] for _ in range(most)]
        assert left.count(200) == (most - first + 1) // 2

    run(test, max_open_sessions=most)


@pytest.mark.parametrize("keys", [(), KEYS[:1], KEYS[:1] * 2])
def test_a_server_with_one_kind_of_client_gives_it_all_sessions(run, keys):
    async def test(front):
        statuses = [(await front.ask({}, path="/v1/sessions", **A))[0] for _ in range(5)]
        assert statuses == [200] * 4 + [429]

    run(test, max_open_sessions=4, api_keys=keys)


def test_keys_have_salts_of_their_own(run):
    """Law: two keys never share a salt, nor one of a client's own; one key and salt have one."""

    async def test(front):
        salts = []
        for headers in (A, B, A):
            for salt in ("", "x", None):
                more = {} if salt is None else {"cache_salt": salt}
                assert (await front.ask(TEXT | more, **headers))[0] == 200
                salts.append(front.wire.said[-1].params.cache_salt)
        first, other, again = salts[:3], salts[3:6], salts[6:]
        assert first == again and not set(first) & set(other)
        assert len({*first, *other}) == 4 and first[0] == first[2]
        assert (await front.ask(TEXT | {"cache_salt": other[0]}, **A))[0] == 200
        assert front.wire.said[-1].params.cache_salt not in {*first, *other}
        status, answer = await front.ask(TEXT | {"cache_salt": "a" * 5000}, **A)
        assert status == 400 and answer["error"]["param"] == "cache_salt", answer

    run(test)


def test_salts_cannot_be_derived_from_keys(run):
    """Law: another run of the server has other salts."""
    salts = []

    async def test(front):
        await front.ask(TEXT, **A)
        salts.append(front.wire.said[-1].params.cache_salt)

    run(test)
    run(test)
    assert salts[0] != salts[1] and min(map(len, salts)) >= 32


@pytest.mark.parametrize("options", [{"api_keys": ()}, {"share_prefixes": True}])
def test_salts_are_the_clients_own_if_texts_are_shared(run, options):
    async def test(front):
        for headers in (A, B):
            await front.ask(TEXT | {"cache_salt": "x"}, **headers)
            assert front.wire.said[-1].params.cache_salt == "x"

    run(test, **options)


@pytest.mark.parametrize("keys", [KEYS, KEYS[:1], KEYS[:1] * 2, ()])
def test_with_several_keys_the_pages_have_no_rows(run, keys):
    """Law: the pages of one row are the length of one text; a key sees sums of all texts alone."""

    async def test(front):
        _, answer = await front.ask(None, path="/pool", method="GET", **A)
        several = [[5, 1, 0], [1, 0, 0], [1, 1, 0]]
        single = [[2, 1, 5], [3, 1, 6], [1, 0, 0], [1, 1, 7]]
        assert answer["groups"][0]["runs"] == (several if len(set(keys)) > 1 else single)

    run(test, api_keys=keys)


@pytest.mark.parametrize("keys", [KEYS, ()])
@pytest.mark.parametrize("said", FOREIGN, ids=str)
def test_a_page_of_another_site_changes_nothing_and_costs_nothing(run, keys, said):
    """Law: each route refuses it, with or without a key; what is for anyone is not refused."""

    async def test(front):
        for method, path in ROUTES:
            status, answer = await call(front, method, path, A | said)
            if WHO[method, path] == "anyone":
                assert status == 200, path
            else:
                assert status == 403 and answer["error"]["code"] == "origin_not_allowed", path
        assert front.wire.said == []

    run(test, api_keys=keys)


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"origin": "http://localhost:8000", "host": "localhost:8000"},
        {"origin": "http://LOCALHOST:8000", "host": "Localhost:8000"},
        {"origin": "http://127.0.0.1:8000", "host": "127.0.0.1:8000"},
        {"origin": "http://[::1]:8000", "host": "[::1]:8000"},
        {"origin": "http://localhost", "host": "localhost"},
        {"origin": "https://localhost", "host": "localhost", "sec-fetch-site": "same-origin"},
        {"origin": "https://box.example", "sec-fetch-site": "same-origin"},  # behind a proxy
        {"sec-fetch-site": "none", "sec-fetch-mode": "navigate"},
        {"origin": "https://site.example", "sec-fetch-site": "cross-site"},
    ],
    ids=str,
)
def test_the_own_page_a_named_site_and_what_is_no_browser_may_call(run, said):
    async def test(front):
        assert (await front.ask({}, path="/v1/sessions", **A | said))[0] == 200

    run(test, origins=("https://site.example",))


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        ("http://localhost:8001", "localhost:8000"),
        ("http://localhost", "127.0.0.1"),
        ("http://127.0.0.1:8000", "localhost:8000"),
        ("http://localhost:8000.evil.example", "localhost:8000"),
        ("http://evil.example/localhost:8000", "localhost:8000"),
        ("http://user@localhost:8000", "localhost:8000"),
        ("localhost:8000", "localhost:8000"),
        ("", "localhost"),
        ("https://site.example.evil", "localhost"),
    ],
)
def test_an_origin_that_is_almost_the_own_one_is_foreign(run, origin, host):
    async def test(front):
        said = {"origin": origin, "host": host}
        status, answer = await front.ask({}, path="/v1/sessions", **A | said)
        assert status == 403 and answer["error"]["code"] == "origin_not_allowed"

    run(test, origins=("https://site.example",))


@pytest.mark.parametrize("method", ["as it is", "HEAD", "OPTIONS"])
def test_no_route_answers_to_a_name_that_another_site_points_here(run, method):
    """Law: for a browser such a page is the server's own, so the name alone tells them apart."""

    async def test(front):
        said = {"host": "evil.example", "origin": "http://evil.example"}
        for route_method, path in [*ROUTES, ("GET", "/none")]:
            used = route_method if method == "as it is" else method
            status, answer = await call(front, used, path, A | said | {"sec-fetch-site": "none"})
            assert status == 403 and answer["error"]["code"] == "host_not_allowed", path
        assert front.wire.said == []

    run(test)


@pytest.mark.parametrize("host", ["127.0.0.2", "127.1.2.3", "::1", "localhost"])
def test_a_loopback_server_answers_to_the_address_that_it_listens_on(run, host):
    """Law: its greeting names this address, and no other site can point it elsewhere."""

    async def test(front):
        name = f"[{host}]" if ":" in host else host
        for said in (f"{name}:8000", name):
            assert (await front.ask({}, path="/v1/sessions", **A | {"host": said}))[0] == 200
        said = {"host": "evil.example"}
        assert (await front.ask({}, path="/v1/sessions", **A | said))[0] == 403

    run(test, host=host)


def test_all_sites_may_call_if_all_are_named(run):
    async def test(front):
        for said in FOREIGN:
            assert (await front.ask({}, path="/v1/sessions", **A | said))[0] == 200

    run(test, origins=("*",))


def test_a_person_may_follow_a_link_to_a_figure(run):
    """Law: another site's link opens a page that only the person sees."""

    async def test(front):
        said = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
        assert (await front.ask(None, path="/metrics", method="GET", **A | said))[0] == 200
        assert (await front.ask({}, path="/v1/sessions", **A | said))[0] == 403

    run(test)


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, "specpool.access")
    return lambda: [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    "headers", [A, B, {}, A | FOREIGN[0]], ids=["own", "other", "none", "site"]
)
def test_the_log_has_patterns_and_no_ids(run, lines, headers):
    """Law: whoever calls and whatever becomes of it, a line has the route's pattern alone."""

    async def test(front):
        ident = await opened(front, A)
        for method, path in ROUTES:
            await call(front, method, path, headers, ident)
        for path in (f"/v1/sessions/{ident}/", f"/v1/sessions/{ident}/forks", f"/{ident}\n1.2.3.4"):
            await front.ask(None, path=path, method="GET", **headers)
        await front.ask(TEXT | {"session_offset": 0}, x_session_id=ident, **headers)
        text = "\n".join(lines())
        assert ident not in text and "key-of" not in text and "1.2.3.4" not in text
        for method, path in ROUTES:
            if path not in ("/health", "/metrics", "/pool"):
                assert f" {method} {path} " in text, path
        samples = [s for family in front.service.counters.answers.collect() for s in family.samples]
        labels = {sample.labels["path"] for sample in samples}
        assert labels <= {path for _, path in WHO} | {"unknown"}

    run(test, access_log=True)


def test_ids_of_requests_do_not_count_the_requests_of_others(run, lines):
    async def test(front):
        for _ in range(3):
            await front.ask(None, path="/v1/models", method="GET", **A)
        idents = [line.split()[-1] for line in lines()]
        assert len({ident[:8] for ident in idents}) == 3, idents

    run(test, access_log=True)


@pytest.mark.parametrize(
    ("proxies", "client", "forwarded", "address"),
    [
        ((), ("10.0.0.1", 5), "6.6.6.6", "10.0.0.1"),
        (("10.0.0.0/8",), ("10.0.0.1", 5), "6.6.6.6", "6.6.6.6"),
        (("10.0.0.1",), ("10.0.0.1", 5), "6.6.6.6, 10.0.0.1", "6.6.6.6"),
        (("10.0.0.1",), ("10.0.0.2", 5), "6.6.6.6", "10.0.0.2"),
        (("10.0.0.1",), ("10.0.0.1", 5), "6.6.6.6, 7.7.7.7", "7.7.7.7"),
        (("10.0.0.1",), ("10.0.0.1", 5), "GET /v1/models 200 1.0 ms", "-"),
        (("10.0.0.1",), ("10.0.0.1", 5), "fe80::1%GET 200", "fe80::1"),
        (("10.0.0.1",), ("10.0.0.1", 5), "\x1b[31m", "-"),
        ((), ("fe80::1", 5), "6.6.6.6", "fe80::1"),
        ((), None, "6.6.6.6", "-"),
        ((), ("a\nb", 5), "6.6.6.6", "-"),
    ],
)
def test_the_log_has_one_address_that_no_client_can_choose(
    run, lines, proxies, client, forwarded, address
):
    """Law: `x-forwarded-for` of a named proxy counts, and nothing in it but an address."""

    async def test(front):
        await front.ask(
            None,
            path="/v1/models",
            method="GET",
            client=client,
            x_forwarded_for=forwarded,
            x_real_ip="6.6.6.6",
            forwarded="for=6.6.6.6",
            **A,
        )
        (line,) = lines()
        assert line.startswith(f"{address} GET /v1/models 200 ") and len(line.split()) == 7

    run(test, access_log=True, proxies=proxies)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """A whole server with two keys."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("\n".join(KEYS))
    with Server(*SMALL, "--api-key-file", str(keys)) as server:
        server.key = KEYS[0]
        yield server
        server.check_no_leak()


def cached(server, headers, text, **more):
    body = {"prompt": text, "max_tokens": 1} | more
    status, answer, _ = server.ask("POST", "/v1/completions", body, headers)
    assert status == 200, answer
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_cached_tokens_tell_a_key_nothing_of_another(guarded):
    """Law: a text is found by the key that sent it, under the salt that it gave; by no other."""
    secret = "user: alice password: hunter2!"
    for salt in ("", "x"):
        assert cached(guarded, A, secret, cache_salt=salt) == 0
        assert cached(guarded, B, secret + "..", cache_salt=salt) == 0
        assert cached(guarded, A, secret + "..", cache_salt=salt) >= len(secret)
    assert cached(guarded, A, secret, cache_salt="y") == 0


def test_a_text_of_a_session_is_found_by_its_own_key_alone(guarded):
    secret = "bob's password: tr0ub4dor"
    ident = guarded.ask("POST", "/v1/sessions", {}, A)[1]["id"]
    cached(guarded, A | {"x-session-id": ident}, secret, session_offset=0)
    assert guarded.ask("DELETE", f"/v1/sessions/{ident}", headers=A)[0] == 200
    assert cached(guarded, B, secret + "..") == 0
    assert cached(guarded, A, secret + "..") > 0


def test_a_page_of_another_site_opens_no_session(guarded):
    """Law: whatever type and body a browser may send unasked."""
    said = "origin: http://evil.example\r\nsec-fetch-site: cross-site\r\nconnection: close\r\n"
    for kind in ("", "content-type: text/plain\r\n", "content-type: multipart/form-data\r\n"):
        for body in ("", "{}"):
            for key in ("", f"authorization: Bearer {KEYS[0]}\r\n"):
                head = "POST /v1/sessions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
                head += said + kind + key + f"content-length: {len(body)}\r\n\r\n"
                answer = guarded.raw((head + body).encode())
                assert answer.startswith(b"HTTP/1.1 403 "), answer
                assert b"access-control" not in answer.lower()
    assert guarded.ask("GET", "/v1/sessions", headers=A)[1]["data"] == []


def test_no_header_forges_an_address(guarded):
    """Law: the whole server believes no proxy that its options do not name."""
    ident = "forged-or-not"
    said = A | {"x-forwarded-for": "6.6.6.6", "x-request-id": ident}
    assert guarded.ask("GET", "/v1/models", headers=said)[0] == 200
    (line,) = [line for line in guarded.log(ident).splitlines() if ident in line]
    assert line.startswith("127.0.0.1 GET /v1/models 200 ")
