"""Replicas on a real Ray cluster on this machine: sessions, deaths, updates. `make ray` runs it."""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from ray_kit import Cluster, engine_of, followers_of, kill
from specpool import Engine, SamplingParams

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="no Ray: `make ray`"),
    pytest.mark.timeout(900),
    # A client whose server died leaves sockets to the collector.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

SMALL = ("--page-size", "4", "--max-context-len", "256", "--num-pages", "1024", "--batch", "8")
OPTIONS = ("--cpus", "0.5", "--stuck-timeout", "5", "--draft", "specpool/tiny-eagle", *SMALL)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    # The path of a socket has at most 107 characters.
    folder = Path("/tmp") / f"ray{os.getpid()}"
    with Cluster(folder) as cluster:
        yield cluster


@pytest.fixture
def two(cluster):
    """The cluster with two replicas."""
    cluster.deploy("--replicas", "2", *OPTIONS)
    cluster.wait_for(2)
    return cluster


class Stream(threading.Thread):
    """A turn of a session as a stream, through the `openai` client."""

    def __init__(self, cluster: Cluster, ident: str | None, tokens: int = 200) -> None:
        super().__init__(daemon=True)
        self._cluster, self._session, self._tokens = cluster, ident, tokens
        self.begun, self.error, self.ended = threading.Event(), None, 0.0
        self.text = ""
        self.start()

    def run(self) -> None:
        url = f"http://127.0.0.1:{self._cluster.port}/v1"
        session = {} if self._session is None else {"x-session-id": self._session}
        offset = {} if self._session is None else {"session_offset": 0}
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
            try:
                for part in client.completions.create(
                    model="specpool/tiny",
                    prompt="seq: 2, 4, ",
                    max_tokens=self._tokens,
                    temperature=0,
                    stream=True,
                    extra_headers=session,
                    extra_body={"ignore_eos": True, **offset},
                ):
                    self.text += part.choices[0].text if part.choices else ""
                    self.begun.set()
            except openai.OpenAIError as error:
                self.error = error
            finally:
                self.ended = time.monotonic()
                self.begun.set()


def by_owner(idents: list[str]) -> dict[str, list[str]]:
    by_tag: dict[str, list[str]] = {}
    for ident in idents:
        by_tag.setdefault(ident.partition(".")[0], []).append(ident)
    return by_tag


def sessions_on_both(cluster: Cluster, number: int) -> dict[str, list[str]]:
    """Open sessions until each replica has so many."""
    idents: list[str] = []
    while True:
        # One that an earlier config had may have answered the first calls, and left.
        here = cluster.replicas()
        sessions_of = {tag: owned for tag, owned in by_owner(idents).items() if tag in here}
        if len(sessions_of) == 2 and min(map(len, sessions_of.values())) >= number:
            return sessions_of
        idents += cluster.open_sessions(2)
        counts = {tag: len(owned) for tag, owned in by_owner(idents).items()}
        assert len(idents) < 20 * number, (counts, [*here])


PROMPTS = ["seq: 2, 4, ", "and on ", "seq: 3, 6, ", "x", "seq: 9, "]


@pytest.fixture(scope="module")
def expected():
    """What the turns of a session with `PROMPTS` say, by an engine."""
    with Engine.from_pretrained(
        draft="specpool/tiny-eagle", page_size=4, max_context_len=256
    ) as engine:
        session, params = engine.open_session(), SamplingParams(max_new_tokens=4)
        return [session.append(prompt, params).output().text for prompt in PROMPTS]


def test_a_thousand_turns_are_right(two, expected):
    """Law: each of 1,000 turns goes to its session's replica, and says what an engine says."""
    prompts = PROMPTS
    idents = two.open_sessions(200)
    assert len(by_owner(idents)) == 2

    def turns(ident: str) -> list[str]:
        offset, texts = 0, []
        for prompt in prompts:
            status, body = two.turn(ident, offset, prompt)
            assert status == 200, body
            assert body["session"]["id"] == ident
            offset = body["session"]["offset"]
            texts.append(body["choices"][0]["text"])
        return texts

    with ThreadPoolExecutor(8) as pool:
        texts_of_turns = list(pool.map(turns, random.Random(0).sample(idents, len(idents))))
    assert sum(texts == expected for texts in texts_of_turns) * len(prompts) == 1000
    for ident in idents[::10]:  # the path names the session: no header is needed
        assert two.ask("GET", f"/v1/sessions/{ident}")[1]["offset"] > 0
        assert two.ask("POST", f"/v1/sessions/{ident}/rewind", {"offset": 3})[1]["offset"] == 3
        copy = two.ask("POST", f"/v1/sessions/{ident}/fork")[1]["id"]
        assert copy.partition(".")[0] == ident.partition(".")[0]
        assert two.ask("DELETE", f"/v1/sessions/{copy}")[0] == 200
    for ident in idents:
        assert two.ask("DELETE", f"/v1/sessions/{ident}")[0] == 200


def test_a_session_id_in_the_body_alone_is_refused(two):
    body = {"prompt": "a", "session_id": two.open_sessions(1)[0], "session_offset": 0}
    status, answer = two.ask("POST", "/v1/completions", body)
    assert (status, answer["error"]["code"]) == (400, "session_header_missing")


def test_a_hint_leads_to_the_replica_that_has_the_prefix(two):
    """Law: the second request of each hint finds the first one's KV."""
    rng, cached = random.Random(7), []
    for i in range(12):
        text = "".join(rng.choices("abcdefgh ", k=60))
        for _ in range(2):
            status, answer = two.ask(
                "POST",
                "/v1/completions",
                {"prompt": text, "max_tokens": 2, "temperature": 0},
                {"x-prefix-hint": f"prefix {i}"},
            )
            assert status == 200, answer
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert all(number > 30 for number in cached), cached


def test_a_killed_replica_takes_only_its_own_with_it(two):
    """Law: its clients see an error at once, the other's sessions go on, a new replica serves."""
    owned, pids = sessions_on_both(two, 10), two.replicas()
    victim, other = owned
    streams = {tag: [Stream(two, ident) for ident in owned[tag][:3]] for tag in owned}
    assert all(stream.begun.wait(60) for tag_streams in streams.values() for stream in tag_streams)
    engine = engine_of(pids[victim])
    kill(pids[victim])
    killed, waits = time.monotonic(), []
    for stream in streams[victim]:
        stream.join(20)
        assert isinstance(stream.error, openai.APIError | openai.APIConnectionError), stream.text
        waits.append(stream.ended - killed)
    assert max(waits) < 5, waits
    for stream in streams[other]:
        stream.join(60)
        assert stream.error is None and len(stream.text) > 100
    for lost in owned[victim][3:8]:  # it might be on its way: a turn waits for it
        for ident in owned[other][3:]:
            status, body = two.ask("GET", f"/v1/sessions/{ident}")
            assert status == 200, body
        while (answer := two.turn(lost, 0, "seq: 2, "))[0] == 503:  # until Serve's list says so
            assert time.monotonic() - killed < 30, answer
            time.sleep(0.5)
        assert (answer[0], answer[1]["error"]["code"]) == (410, "session_lost")
    for ident in owned[other][3:]:
        status, body = two.turn(ident, 0, "seq: 2, 4, ")
        assert status == 200, body
    two.wait_for(2, but={victim})
    print(f"errors after {max(waits):.2f} s, two replicas after {time.monotonic() - killed:.1f} s")
    assert len(sessions_on_both(two, 1)) == 2
    assert not Path(f"/proc/{engine}").exists()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_replica_ends_with_its_engine(two, how):
    """Dead: its streams end with an error, and another replica comes. Stuck: it is killed first."""
    owned, pids = sessions_on_both(two, 2), two.replicas()
    victim, other = owned
    stream = Stream(two, owned[victim][0])
    assert stream.begun.wait(60)
    engine = engine_of(pids[victim])
    os.kill(engine, how)
    stream.join(60)
    assert stream.error is not None and "engine" in str(stream.error), stream.error
    two.wait_for(2, but={victim})
    assert not Path(f"/proc/{engine}").exists()
    assert two.turn(owned[other][0], 0, "seq: 2, ")[0] == 200
    assert two.turn(owned[victim][1], 0, "seq: 2, ")[0] == 410


class Load:
    """Threads that ask for texts without a pause, half of them as streams."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._is_over = cluster, threading.Event()
        self.count, self.failures = 0, []
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._one, args=(i,)) for i in range(6)]
        for thread in self._threads:
            thread.start()

    def _one(self, number: int) -> None:
        while not self._is_over.is_set():
            if number % 2:
                stream = Stream(self._cluster, None, 64)
                stream.join(120)
                fine = stream.error is None and len(stream.text) >= 64
                outcome = stream.error or stream.text
            else:
                status, body = self._cluster.ask(
                    "POST",
                    "/v1/completions",
                    {"prompt": "seq: 2, 4, ", "max_tokens": 32, "ignore_eos": True},
                )
                fine, outcome = status == 200 and body["usage"]["completion_tokens"] == 32, body
            with self._lock:
                self.count += 1
                if not fine:
                    self.failures.append(outcome)

    def end(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(120)


class Talks:
    """Threads whose sessions say `PROMPTS` again and again, and go back to their begin."""

    def __init__(self, cluster: Cluster, idents: list[str], expected: list[str]) -> None:
        self._cluster, self._expected = cluster, expected
        self._is_over, self._lock = threading.Event(), threading.Lock()
        self.count = self.num_again = 0
        self.failures = []
        self._threads = [threading.Thread(target=self._one, args=(idents[i::4],)) for i in range(4)]
        for thread in self._threads:
            thread.start()

    def _one(self, idents: list[str]) -> None:
        while not self._is_over.is_set() and not self.failures:
            for ident in idents:
                offset = 0
                for prompt, text in zip(PROMPTS, self._expected, strict=True):
                    status, body = self._patient(self._cluster.turn, ident, offset, prompt)
                    if status != 200 or body["choices"][0]["text"] != text:
                        self.failures.append((ident, status, body))
                        return
                    offset = body["session"]["offset"]
                    with self._lock:
                        self.count += 1
                path = f"/v1/sessions/{ident}/rewind"
                self._patient(self._cluster.ask, "POST", path, {"offset": 0})
            self._is_over.wait(0.2)

    def _patient(self, ask, *args):
        """Ask again while the session moves, as the `openai` client does."""
        for _ in range(20):
            status, body = ask(*args)
            if status != 503 or body["error"]["code"] != "session_moving":
                break
            with self._lock:
                self.num_again += 1
            time.sleep(0.5)
        return status, body

    def end(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(120)


@pytest.mark.parametrize(
    "words",
    [("--replicas", "2", "--max-queue", "900"), ("--replicas", "1")],
    ids=["update", "less"],
)
def test_nothing_that_was_accepted_is_lost(two, words, expected):
    """Law: while replicas are replaced or removed under load, every request is answered.

    Every session goes on under its id with its text: those that talk, and those that are idle.
    """
    before, owned = set(two.replicas()), sessions_on_both(two, 8)
    idents = [ident for tag_idents in owned.values() for ident in tag_idents]
    idle, talking = idents[::2], idents[1::2]
    ends = {}
    for ident in idle:
        status, body = two.turn(ident, 0, PROMPTS[0])
        assert status == 200 and body["choices"][0]["text"] == expected[0], body
        ends[ident] = body["session"]["offset"]
    load, talks = Load(two), Talks(two, talking, expected)
    try:
        time.sleep(1)
        two.deploy(*words, *OPTIONS)
        two.wait_for(int(words[1]), but=before if words[1] == "2" else None)
        time.sleep(1)
    finally:
        load.end()
        talks.end()
    moved = [ident for ident in idents if ident.partition(".")[0] not in two.replicas()]
    print(f"{load.count} requests, {talks.count} turns, {len(moved)} sessions have moved")
    print(f"{len(load.failures)} failures, {talks.num_again} turns were sent again")
    assert load.count > 20 and not load.failures, load.failures[:3]
    assert talks.count > len(talking) and not talks.failures, talks.failures[:3]
    assert len(moved) >= (16 if words[1] == "2" else 8)
    for ident in idle:
        status, body = two.turn(ident, ends[ident], PROMPTS[1])
        assert status == 200 and body["choices"][0]["text"] == expected[1], body
        assert body["session"]["id"] == ident
        cached = body["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached >= ends[ident] - 4, body["usage"]  # its KV has come along


def test_ranks_of_a_replica_end_with_each_other(cluster):
    """Law: two processes answer as one, and if one is killed, another replica serves soon."""
    options = {"page_size": 4, "max_context_len": 256}
    with Engine.from_pretrained(draft="specpool/tiny-eagle", **options) as engine:
        (alone,) = engine.generate(["seq: 2, 4, "], SamplingParams(max_new_tokens=16))
    before = set(cluster.replicas())
    cluster.deploy("--replicas", "1", "--ranks", "2", *OPTIONS)
    body = {"prompt": "seq: 2, 4, ", "max_tokens": 16, "temperature": 0}
    for _ in range(2):
        cluster.wait_for(1, but=before)
        status, answer = cluster.ask("POST", "/v1/completions", body)
        assert (status, answer["choices"][0]["text"]) == (200, alone.text), answer
        ((tag, pid),) = cluster.replicas().items()
        before.add(tag)
        engine_pid, (follower,) = engine_of(pid), followers_of(pid)
        os.kill(follower, signal.SIGKILL)
        end = time.monotonic() + 60
        while Path(f"/proc/{engine_pid}").exists():
            assert time.monotonic() < end, "the engine goes on without its rank"
            time.sleep(0.2)
