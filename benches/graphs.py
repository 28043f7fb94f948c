"""A decode round of the embedded pair with its CUDA graph and without, on a CUDA device.

A figure is the wall time of an engine's turn that consists of one round, until the results are on
the host: the median of turns that both engines take in turn. Then come the share of the time that
the device idles between the rounds under overlap, and random Llamas (`benches.llama`): rounds by
flashinfer beside torch, a long prompt beside transformers, decoding beside its KV, and the rounds
of an 8B model beside a read of what they need.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benches.kernels import cuda_machine
from benches.llama import attention_results, decode_results, prefill_results, round_results
from benches.record import Record
from specpool import Engine, SamplingParams, Shape
from specpool.cli.results import Result, draw, interleaved, report
from specpool.engine.assets import corpus
from specpool.engine.scheduler.step import Step
from specpool.engine.shape_names import name_of
from specpool.engine.worker.results import PendingStep
from specpool.errors import SpecpoolError

BATCHES = (1, 8)
SHAPES = (Shape.none(), Shape.eagle(3, 1, 4), Shape.eagle(4, 4, 16))
CONTEXT = 2048
WARM_UP = 8  # turns: the prompts are among them
IDLE_BATCH, MOST_IDLE = 32, 0.05  # the target: the device idles at most this share of the time


def rounds_of(
    engine: Engine, batch: int, prompts: Sequence[Any] | None = None
) -> Callable[[], float]:
    """Return a function that measures one more round of so many requests, in microseconds."""
    params = SamplingParams(max_new_tokens=CONTEXT, ignore_eos=True)
    prompts = corpus.prompts(batch, 40) if prompts is None else prompts

    def start() -> None:
        for prompt in prompts:
            engine.submit(prompt, params)
        for _ in range(WARM_UP):
            engine.turn()

    def once() -> float:
        if engine.stats().num_running < batch:  # their text is at its end
            while engine.turn():
                pass
            start()
        began = time.perf_counter_ns()
        engine.turn()
        return (time.perf_counter_ns() - began) / 1e3

    start()
    return once


class Moment:
    """A point in the device's time, for a device without CUDA events."""

    def record(self) -> None:
        """Take the time."""
        self._at = time.perf_counter()

    def elapsed_time(self, later: Moment) -> float:
        """Milliseconds to a later moment."""
        return (later._at - self._at) * 1e3


def idle_share(engine: Engine, batch: int, num_rounds: int) -> float:
    """Return the share of the time that the device waits for the host between two rounds.

    A round's first and last moments are recorded on the device's stream, so what the host does
    while the device is busy does not count.
    """
    worker, moments = engine.core.worker, list[tuple[Any, Any]]()
    run, is_cuda = worker.run, engine.target.device.type == "cuda"

    def moment() -> Any:
        event: Any = torch.cuda.Event
        return event(enable_timing=True) if is_cuda else Moment()

    def recorded(steps: list[Step]) -> list[PendingStep]:
        first, last = moment(), moment()
        first.record()
        pending = run(steps)
        last.record()
        moments.append((first, last))
        return pending

    once = rounds_of(engine, batch)
    with patch.object(worker, "run", recorded):
        while len(moments) < num_rounds:
            once()
    if is_cuda:
        torch.cuda.synchronize()
    idle = sum(earlier[1].elapsed_time(later[0]) for earlier, later in pairwise(moments))
    return float(max(idle, 0.0) / moments[0][0].elapsed_time(moments[-1][1]))


def results(
    device: str,
    repeats: int,
    *,
    shapes: Sequence[Shape] = SHAPES,
    batches: Sequence[int] = BATCHES,
    context: int = CONTEXT,
) -> Iterator[Result]:
    """Measure each shape at each batch size, and the memory that the graphs take."""
    for shape in shapes:
        for batch in batches:
            with contextlib.ExitStack() as stack:
                on, off = (
                    stack.enter_context(
                        Engine.from_pretrained(
                            draft="specpool/tiny-eagle" if shape.num_steps else None,
                            shape=shape,
                            device=device,
                            max_batch=batch,
                            max_context_len=context,
                            overlap_depth=0,  # a turn waits for its own round
                            prefix_cache=False,
                            kv_bytes=1 << 28,
                            graph_sizes=sizes,
                        )
                    )
                    for sizes in ((batch,), ())
                )
                runs = [rounds_of(engine, batch) for engine in (on, off)]
                us, eager_us = interleaved(runs, repeats)
                where = f"{name_of(shape)}, batch {batch}"
                yield Result(f"a round, {where}", us, "us", "eagerly", eager_us)
                graphs = on.stats().graphs
                assert graphs is not None and graphs.replay_ct and not graphs.eager_ct
                yield Result(f"graphs, {where}", graphs.num_bytes, "bytes", "KV", on.kv_bytes)
    yield _idle(device, min(repeats, 50), context)
    few = min(repeats, 15)
    yield from attention_results(device, few, shapes, batches, rounds_of)
    yield from prefill_results(device, few)
    yield from decode_results(device, few)
    yield from round_results(device, few)


def _idle(device: str, num_rounds: int, context: int) -> Result:
    """Measure how long the device idles between rounds of a chain under overlap."""
    shape = SHAPES[1]
    with Engine.from_pretrained(
        draft="specpool/tiny-eagle",
        shape=shape,
        device=device,
        max_batch=IDLE_BATCH,
        max_context_len=context,
        overlap_depth=1,
        prefix_cache=False,
    ) as engine:
        share = idle_share(engine, IDLE_BATCH, num_rounds)
    name = f"device idle between rounds, {name_of(shape)}, batch {IDLE_BATCH}, overlap"
    return Result(name, 100 * share, "%", "target", 100 * MOST_IDLE)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--repeats", type=int, default=99, help="rounds of a median")
    parser.add_argument("--json", action="store_true", help="print one object")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="write the results there")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("bench_graphs: torch finds no CUDA device here: nothing to measure", file=sys.stderr)
        return 2
    try:
        where = cuda_machine(torch.device("cuda", 0))
        record = Record("graphs", where, options.write)
        for result in results("cuda", options.repeats):
            print(f"{result.name}: {result.value:.4g} {result.unit}", file=sys.stderr)
            record.add(result)
    except (SpecpoolError, ImportError) as error:
        print(f"bench_graphs: {error}", file=sys.stderr)
        return 2
    report("bench graphs", where, record.results, json_only=options.json, plot=None)
    if record.path is not None:
        rounds = [result for result in record.results if result.unit == "us"]
        try:
            draw("a decode round with its graph", rounds, record.path.with_suffix(".png"))
        except SpecpoolError as error:
            print(f"no picture: {error}", file=sys.stderr)
        print(f"wrote {record.path}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
