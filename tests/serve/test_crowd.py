"""A crowd does not stop the event loop: a few go on at a time, and garbage is searched rarely."""

from __future__ import annotations

import asyncio
import errno
import gc
import itertools
import socket
import subprocess
import sys
import weakref

import pytest
import uvicorn

from specpool.serve import front as front_module
from specpool.serve import garbage
from specpool.serve.front import Front
from specpool.serve.turns import Turns


class Short(socket.socket):
    """A listener without descriptors for the first three tries."""

    tries = 0

    def accept(self):
        self.tries += 1
        if self.tries <= 3:
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


async def empty(scope, receive, send):
    raise AssertionError("nothing is asked")


async def take(listener, num_clients):
    """Let so many clients wait, then serve; returns the rounds of the loop until all are in."""
    listener.bind(("127.0.0.1", 0))
    listener.listen(256)
    clients = [socket.create_connection(listener.getsockname(), 10) for _ in range(num_clients)]
    front = Front(uvicorn.Config(empty, lifespan="off", log_config=None))
    served = asyncio.create_task(front.serve(sockets=[listener]))
    while not front.started:
        await asyncio.sleep(0)
    rounds, end = 0, asyncio.get_running_loop().time() + 20
    while len(front.server_state.connections) < num_clients:
        assert asyncio.get_running_loop().time() < end
        await asyncio.sleep(0)
        rounds += 1
    for client in clients:
        client.close()
    front.should_exit = True
    await served
    return rounds


def test_connections_are_taken_a_few_in_each_round():
    assert asyncio.run(take(socket.socket(), 128)) >= 30


def test_a_server_without_descriptors_goes_on_later(monkeypatch):
    monkeypatch.setattr(front_module, "_PAUSE", 0.01)
    listener = Short()
    asyncio.run(take(listener, 5))
    assert listener.tries > 8


def test_a_few_of_a_crowd_go_on_in_each_round_in_order():
    """Others run between two rounds; those who left meanwhile take nobody's place."""

    async def run():
        turns, done, seen = Turns(3), [], []

        async def one(number):
            await turns.take()
            done.append(number)

        async def other():
            while len(done) < 60:
                seen.append(len(done))
                await asyncio.sleep(0)

        crowd = [asyncio.create_task(one(number)) for number in range(90)]
        await asyncio.sleep(0)
        for task in crowd[:30]:
            task.cancel()
        await asyncio.gather(*crowd, other(), return_exceptions=True)
        assert done == list(range(30, 90))
        steps = [after - before for before, after in itertools.pairwise(seen)]
        assert max(steps) <= 3 and len(seen) >= 20
        await asyncio.wait_for(turns.take(), 5)  # an empty queue goes on

    asyncio.run(run())


@pytest.fixture
def collector():
    thresholds, num_frozen = gc.get_threshold(), gc.get_freeze_count()
    gc.unfreeze()
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()
    if num_frozen:
        gc.freeze()


@pytest.mark.parametrize(("num_open", "is_found"), [(64, True), (65, False)])
def test_garbage_is_searched_when_few_requests_are_open(monkeypatch, collector, num_open, is_found):
    monkeypatch.setattr(garbage, "_PAUSE", 0.01)

    class Cycle:
        pass

    async def run():
        garbage.settle()
        task = asyncio.create_task(garbage.tidy(lambda: num_open))
        await asyncio.sleep(0)
        assert gc.get_freeze_count() > 1000
        cycle = Cycle()
        cycle.me = cycle
        seen = weakref.ref(cycle)
        gc.disable()
        del cycle
        for _ in range(30 if not is_found else 12_000):
            if seen() is None:
                break
            await asyncio.sleep(0.01)
        gc.enable()
        task.cancel()
        return seen() is None

    assert asyncio.run(run()) == is_found
    assert gc.get_threshold()[2] == garbage._RARELY


def test_what_was_loaded_is_searched_again_at_exit():
    """Libraries in C++ print a line for each of their objects that outlives the interpreter."""
    code = """
from specpool.serve import garbage
class Loaded:
    def __del__(self):
        print("freed")
loaded = Loaded()
loaded.itself = loaded
garbage.settle()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "freed\n"
