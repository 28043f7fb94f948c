"""`RankedProcess`: an engine of two processes behind a front, and the end of all if one ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

import warm_kit
from specpool import ConfigError, SamplingParams
from specpool.cli.deploy import launch_of
from specpool.engine.engine import Engine
from specpool.serve.bridge import ranked_process
from specpool.serve.bridge.client import EngineClient
from specpool.serve.bridge.messages import Done
from specpool.serve.bridge.ranked_process import RankedProcess

WORDS = ["--draft", "specpool/tiny-eagle", "--page-size", "4", "--max-context-len", "256"]
#: Of `subprocess`, what starts the ranks behind the engine; they have torch from their start.
WARM = SimpleNamespace(
    Popen=warm_kit.Popen,
    DEVNULL=subprocess.DEVNULL,
    TimeoutExpired=subprocess.TimeoutExpired,
)
Scene = Callable[[EngineClient, RankedProcess], Awaitable[Any]]


def _play(scene: Scene, world: int = 2) -> Any:
    """Play a scene with an engine of some ranks; no process is left after it."""

    async def played() -> Any:
        launch = launch_of(WORDS, has_files=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ranked_process, "subprocess", WARM)
            processes = RankedProcess(launch.loading, 1, WORDS, world)
        client = EngineClient(processes)
        try:
            return await asyncio.wait_for(scene(client, processes), 120)
        finally:
            await client.close()
            await asyncio.to_thread(processes.close)
            assert all(each.returncode is not None for each in processes.followers)

    return asyncio.run(played())


@pytest.mark.parametrize(
    "how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.full)]
)
def test_two_processes_answer_as_one_and_end_together(how: signal.Signals) -> None:
    async def scene(client: EngineClient, processes: RankedProcess) -> tuple[list[int], str]:
        await client.start()
        stream = client.submit([5, 6, 7, 8], SamplingParams(max_new_tokens=24))
        tokens: list[int] = []
        while news := await stream.news():
            if isinstance(news[-1], Done):
                tokens = news[-1].token_ids
        os.kill(processes.followers[0].pid, how)
        await client.ended.wait()
        return tokens, str(client.failure)

    found, failure = _play(scene)
    assert "rank 1" in failure, failure
    options = {"page_size": 4, "max_context_len": 256}
    with Engine.from_pretrained(draft="specpool/tiny-eagle", **options) as engine:
        (alone,) = engine.generate([[5, 6, 7, 8]], SamplingParams(max_new_tokens=24))
    assert found == alone.token_ids


@pytest.mark.full
def test_a_rank_that_ends_while_it_loads_ends_the_start() -> None:
    """Law: nobody waits for a rank that cannot come."""

    async def scene(client: EngineClient, processes: RankedProcess) -> str:
        processes.followers[0].kill()
        started = time.monotonic()
        with pytest.raises(Exception, match="rank 1"):
            await client.start()
        assert time.monotonic() - started < 60  # less than ranks wait for each other
        return str(client.failure)

    assert "rank 1 has ended with exit code -9" in _play(scene)


@pytest.mark.full
def test_what_ranks_refuse_is_told_once() -> None:
    async def scene(client: EngineClient, processes: RankedProcess) -> list[int]:
        with pytest.raises(ConfigError, match="'llama' has 2 KV heads, which 3 ranks cannot share"):
            await client.start()
        return [await asyncio.to_thread(_code, each) for each in processes.followers]

    assert _play(scene, world=3) == [2, 2]


def _code(process: subprocess.Popen[bytes]) -> int:
    return process.wait(60)
