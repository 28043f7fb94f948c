"""`python -m benches vllm`: the plug-in's block pool beside vLLM's own, on a CPU.

Both get the same calls in turns, first on the pool, then as vLLM's scheduler makes them. A call's
time is that of the call alone; what it took is given back off the clock.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from benches.engines import Run, freed, load, timed
from specpool.cli.results import Result, interleaved, machine, report

COUNTS, ROWS, BLOCK_SIZE, NUM_STEPS = (1, 8, 64, 512), (1, 32, 256), 16, 5

_timed = partial(timed, num_calls=20)
_freed = partial(freed, num_calls=20)


def _pool_calls(pool_of: type, count: int) -> dict[str, Run]:
    """The calls on a pool of its own, `count` blocks each."""
    from benches.vllm_setup import request

    def new_pool() -> Any:
        return pool_of(2 * count + 2, True, BLOCK_SIZE)

    def cached_pool() -> tuple[Any, list[Any]]:
        """A pool in which nobody holds `count` blocks that are known."""
        pool = new_pool()
        blocks = pool.get_new_blocks(count)
        pool.cache_full_blocks(text, blocks, 0, count, BLOCK_SIZE, 0)
        pool.free_blocks(reversed(blocks))
        return pool, blocks

    text = request("r", range(count * BLOCK_SIZE), BLOCK_SIZE)
    pool, (full, known) = new_pool(), cached_pool()
    giver = new_pool()
    taken = giver.get_new_blocks(count)

    def forget(_: Any) -> None:
        giver.evict_blocks({block.block_id for block in taken})

    def take(pool: Any = pool) -> Any:
        return pool.get_new_blocks(count)

    def evict() -> Run:
        """Every block that is taken is one that was known."""
        pool, _ = cached_pool()
        pool.get_new_blocks(pool.get_num_free_blocks() - count)

        def undo(blocks: Any) -> None:
            pool.cache_full_blocks(text, blocks, 0, count, BLOCK_SIZE, 0)
            pool.free_blocks(reversed(blocks))

        return _timed(lambda: pool.get_new_blocks(count), undo)

    return {
        "get_new_blocks": _timed(take, pool.free_blocks),
        "get_new_blocks, all given up": evict(),
        "free_blocks": _freed(take, pool.free_blocks),
        "free_blocks, all known": _freed(
            lambda: full.touch(known), lambda _: full.free_blocks(reversed(known))
        ),
        "touch": _timed(lambda: full.touch(known), lambda _: full.free_blocks(reversed(known))),
        "cache_full_blocks": _timed(
            lambda: giver.cache_full_blocks(text, taken, 0, count, BLOCK_SIZE, 0), forget
        ),
    }


def _manager_calls(pool_of: type, rows: int) -> dict[str, Run]:
    """Rounds of `rows` requests, and requests that come and go, as the scheduler makes them."""
    from benches.vllm_setup import manager, request

    managed = manager(pool_of, 200 * rows + 200, BLOCK_SIZE)
    requests = []
    for row in range(rows):
        wanted = request(f"r{row}", range(row, row + 100 + row % BLOCK_SIZE), BLOCK_SIZE)
        managed.allocate_slots(wanted, wanted.num_tokens, num_lookahead_tokens=NUM_STEPS)
        wanted.num_computed_tokens = wanted.num_tokens
        requests.append(wanted)
    lens = [wanted.num_tokens for wanted in requests]
    done = [0]

    def turn() -> None:
        for wanted in requests:
            managed.allocate_slots(wanted, 1 + NUM_STEPS, num_lookahead_tokens=NUM_STEPS)

    def advance(_: Any) -> None:
        """Each round accepts four tokens; they are taken back after 400."""
        done[0] += 1
        for wanted, start in zip(requests, lens, strict=True):
            wanted.num_computed_tokens = start + 4 * (done[0] % 100)

    prompts = [request(f"p{n}", range(n, n + 1000), BLOCK_SIZE) for n in range(0, 20 * 1000, 1000)]
    counter = [0]

    def admit() -> Any:
        counter[0] += 1
        wanted = prompts[counter[0] % len(prompts)]
        blocks, known, _ = managed.get_computed_blocks(wanted)
        managed.allocate_slots(wanted, wanted.num_tokens - known, known, blocks)
        return wanted

    calls = {"allocate_slots of a round": _timed(turn, advance)}
    if rows == 1:
        calls["admission of 1,000 known tokens"] = _timed(admit, managed.free)
        calls["free of 1,000 tokens"] = _freed(admit, managed.free)
    return calls


def _slots_ahead(pool_of: type, method: str, block_size: int) -> float:
    """Mean slots that a row has behind its committed tokens before a round, over all offsets."""
    from benches.vllm_setup import manager, request, scheduler

    total = 0
    for start in range(100, 100 + 4 * block_size):
        managed = manager(pool_of, 400, block_size)
        lookahead = scheduler(managed, NUM_STEPS, method=method).num_lookahead_tokens
        wanted = request("r", range(start), block_size)
        managed.allocate_slots(wanted, start, num_lookahead_tokens=lookahead)
        wanted.num_computed_tokens = start
        managed.allocate_slots(wanted, 1 + NUM_STEPS, num_lookahead_tokens=lookahead)
        total += len(managed.get_block_ids("r")[0]) * block_size - start
        managed.free(wanted)
    return total / (4 * block_size)


def _hits(pool_of: type) -> float:
    """Tokens of a turn of a chat that are found, with vLLM's hashes of a KV connector."""
    from benches.vllm_setup import admit, manager, request

    managed = manager(pool_of, 4000, BLOCK_SIZE, use_eagle=True)
    num_hits = 0
    for turn in range(1, 65):
        wanted = request(f"r{turn}", range(37 * turn), BLOCK_SIZE)
        num_hits += (admit(managed, wanted) or [0])[0]
        managed.free(wanted)
    return num_hits / 64


def _results(repeats: int) -> list[Result]:
    from benches.vllm_setup import OWN_POOL
    from specpool.plugins.vllm import pool, speculative

    pool.install()
    speculative.install()
    ours, theirs = pool.SpecpoolBlockPool, OWN_POOL
    sides: list[tuple[str, dict[str, Run], dict[str, Run]]] = [
        (f"{count} blocks", _pool_calls(ours, count), _pool_calls(theirs, count))
        for count in COUNTS
    ]
    for rows in ROWS:
        both = _manager_calls(ours, rows), _manager_calls(theirs, rows)
        sides.append((f"{rows} requests", *both))
    results = []
    for size, runs, references in sides:
        for name, run in runs.items():
            value, reference = interleaved([run, references[name]], repeats)
            results.append(Result(f"{size}: {name}", value, "us", "vLLM's own", reference))
    for block_size in (1, BLOCK_SIZE, 64):
        # vLLM's reserve stays as it is for a draft model.
        counts = [_slots_ahead(ours, method, block_size) for method in ("eagle3", "draft_model")]
        title = f"P={block_size}, {NUM_STEPS} steps: slots ahead of a committed token"
        results.append(Result(title, counts[0], "slots", "vLLM's own", counts[1]))
    title = f"P={BLOCK_SIZE}, a chat of 64 turns: tokens found per turn"
    results.append(Result(title, _hits(ours), "tokens", "vLLM's own", _hits(theirs)))
    return results


def vllm(path: Path | None, *, repeats: int, json: bool, plot: Path | None) -> None:
    """Measure, and print what each call takes on both sides.

    Raises:
        ConfigError: an option cannot work.
    """
    load("vllm", "vLLM", path, repeats=repeats, plot=plot)
    import torch

    results = _results(repeats)
    where = machine(threads=torch.get_num_threads(), packages=("torch",))
    report("bench vllm", where, results, json_only=json, plot=plot)
