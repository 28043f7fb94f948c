"""A decode round of the embedded pair with its CUDA graph and without, on a CUDA device.

A figure is the wall time of an engine's turn that consists of one round, until the results are on
the host: the median of turns that both engines take in turn.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from benches.kernels import cuda_machine
from specpool import Engine, SamplingParams, Shape
from specpool.assets import corpus
from specpool.cli.results import Result, as_json, draw, interleaved, report
from specpool.errors import SpecpoolError
from specpool.shape_names import name_of

BATCHES = (1, 8)
SHAPES = (Shape.none(), Shape.eagle(3, 1, 4), Shape.eagle(4, 4, 16))
CONTEXT = 2048
WARM_UP = 8  # turns: the prompts are among them


def rounds_of(engine: Engine, batch: int) -> Callable[[], float]:
    """Return a function that measures one more round of so many requests, in microseconds."""
    params = SamplingParams(max_new_tokens=CONTEXT, ignore_eos=True)
    prompts = corpus.prompts(batch, 40)

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
        found = list(results("cuda", options.repeats))
    except (SpecpoolError, ImportError) as error:
        print(f"bench_graphs: {error}", file=sys.stderr)
        return 2
    report("bench graphs", where, found, json_only=options.json, plot=None)
    if options.write is not None:
        device = re.sub(r"[^a-z0-9]+", "-", where["device"].lower()).strip("-")
        path = options.write / f"{where['date']}-{device}-graphs.json"
        path.write_text(as_json(where, found) + "\n")
        rounds = [result for result in found if result.unit == "us"]
        draw("a decode round with its graph", rounds, path.with_suffix(".png"))
        print(f"wrote {path}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
