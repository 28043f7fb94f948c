"""Many clients at once: the server lives, refuses beyond its limit, and loses nothing."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from urllib.parse import urlsplit

import pytest

from serve_kit import SMALL, Server
from specpool.cli.bench_serve.http import Caller, CallFailed

#: Seconds of the soak; `make soak-serve` runs ten minutes.
SECONDS = float(os.environ.get("SPECPOOL_SOAK_SECONDS", "1.5"))
BODY = {"prompt": "seq: 2, 4, ", "temperature": 0, "ignore_eos": True, "max_tokens": 4}


def caller_of(server):
    return Caller(urlsplit(server.url), None)


@pytest.fixture(scope="module")
def flooded():
    with Server(*SMALL, "--max-queue", "200", "--no-access-log") as server:
        yield server


async def flood(server, num_requests, num_clients):
    """So many requests of so many clients, with looks at `/health` beside them."""
    caller, statuses, looks = caller_of(server), [], 0
    left = iter(range(num_requests))

    async def client():
        for _ in left:
            statuses.append((await caller.whole("POST", "/v1/completions", BODY))[0])

    async def look():
        nonlocal looks
        while len(statuses) < num_requests:
            assert (await caller.whole("GET", "/health"))[0] == 200
            looks += 1
            await asyncio.sleep(0.02)

    await asyncio.gather(look(), *(client() for _ in range(num_clients)))
    caller.close()
    return statuses, looks


ANSWERED = 'specpool_http_requests_total{path="/v1/completions",status="200"}'


@pytest.mark.parametrize("count", [1_200, pytest.param(10_000, marks=pytest.mark.full)])
def test_many_more_requests_than_places_are_queued_or_refused(flooded, count):
    """512 clients, 208 places. `python -m benches serve` measures how fast health is answered."""
    before = flooded.metrics().get(ANSWERED, 0)
    statuses, looks = asyncio.run(flood(flooded, count, 512))
    assert set(statuses) == {200, 429} and len(statuses) == count
    assert statuses.count(200) >= 208
    assert looks > 1, "health is answered meanwhile"
    flooded.check_no_leak()
    assert flooded.metrics()[ANSWERED] - before == statuses.count(200)


async def soak(server, num_clients, seconds):
    """A mixed trace whose clients leave at random.

    Returns what was not asked for: an error, behind the number of parts that had come; and the
    number of requests. A client with an error goes home.
    """
    caller, end, odd = caller_of(server), time.monotonic() + seconds, []
    count = 0

    async def client(number):
        nonlocal count
        rng = random.Random(number)
        is_first = True  # on a busy machine the time may be over before
        while is_first or time.monotonic() < end:
            is_first = False
            body = BODY | {
                "prompt": f"seq: {rng.randrange(99)}, " * rng.randrange(1, 6),
                "max_tokens": rng.randrange(1, 120),
                "temperature": rng.choice([0, 0.8]),
                "stream": True,
                "n": rng.choice([1, 1, 1, 2]),
            }
            leaves = rng.random() < 0.3
            max_events = rng.randrange(1, 8) if leaves else 1 << 30
            seen = 0
            try:
                events = caller.events("/v1/completions", body)
                async for _ in events:
                    seen += 1
                    if seen >= max_events:
                        await events.aclose()
                        break
            except CallFailed as error:
                odd.append((seen, str(error)))
                return
            count += 1

    await asyncio.gather(*(client(number) for number in range(num_clients)))
    caller.close()
    return odd, count


def test_sixty_four_streams_whose_clients_leave_at_random(flooded):
    """No error that was not asked for, no page leaked, memory flat."""
    asyncio.run(soak(flooded, 64, min(SECONDS / 2, 3)))  # fills caches and pools of memory
    flooded.idle()
    before = memory(flooded)
    odd, count = asyncio.run(soak(flooded, 64, SECONDS))
    assert odd == [] and count >= 64
    flooded.check_no_leak()
    grown = memory(flooded) - before
    print(f"{count} requests of 64 clients, memory grew by {grown / 2**20:.1f} MiB")
    assert grown < 64 << 20


@pytest.mark.full
def test_a_signal_in_the_middle_ends_every_stream_properly():
    """What runs ends in --drain-timeout seconds, or with an error in the stream.

    `test_shutdown.py` has this law with eight streams.
    """
    with Server(*SMALL, "--max-queue", "200", "--no-access-log", "--drain-timeout", "1") as server:

        async def run():
            work = asyncio.create_task(soak(server, 64, SECONDS + 60))
            await asyncio.sleep(SECONDS / 2)
            assert not work.done()
            server.process.send_signal(signal.SIGTERM)
            return await work

        odd, count = asyncio.run(run())
        assert len(odd) == 64
        for seen, error in odd:
            if seen or "in the stream" in error:
                assert "server_shutting_down" in error, (seen, error)
            else:  # it came too late
                assert error.startswith(("503", "no connection", "the connection was cut")), error
        assert server.process.wait(60) == 0
        in_stream = sum("server_shutting_down" in error for _, error in odd)
        print(f"{count} requests ended, {in_stream} of 64 streams were told of the shutdown")


def memory(server):
    """Bytes of the server's two processes."""
    from test_shutdown import children

    total = 0
    for pid in (server.process.pid, *children(server.process.pid)):
        with open(f"/proc/{pid}/statm") as file:
            total += int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return total
