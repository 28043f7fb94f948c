"""`python -m benches profile`: which operators take a CPU's time while the engine runs.

torch's profiler counts each operator's own time on one thread, and that of the core's attention.
What none of them takes is Python's: the scheduler, the ledger, transformers' modules, and the
profiler, which slows calls and not products.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import specpool._core as core
from benches.peers import TRACES, Trace, model_folder, model_sizes
from benches.plain_rows import SIZES
from specpool.checks import check_choice
from specpool.cli.results import Result, check_plot, machine, report

ATTEND = "specpool::attend_pages"  #: attention of few queries, which is no operator of torch
#: Parts of a forward, and the names of their operators; the first that fits counts.
PARTS = {
    "linear layers": r"linear|mm$|matmul|reorder",
    "attention": rf"scaled_dot_product|^{ATTEND}$",
    "reads and writes of KV": r"index|gather|scatter|take",
    "small operators": r"^aten::",
}
PYTHON = "Python and the rest"


def parts_of(seconds: dict[str, float], total: float) -> dict[str, float]:
    """Return the seconds of each part.

    Args:
        seconds: own seconds of each operator, by its name.
        total: seconds of the run; what no operator of `PARTS` took is `PYTHON`'s.
    """
    parts = dict.fromkeys(PARTS, 0.0)
    for name, operator_seconds in seconds.items():
        part = next((part for part, form in PARTS.items() if re.search(form, name)), None)
        if part is not None:
            parts[part] += operator_seconds
    return {**parts, PYTHON: total - sum(parts.values())}


def profile(*, sizes: Sequence[str], traces: Sequence[str], json: bool, plot: Path | None) -> None:
    """Profile each size and trace: plain decoding, greedy, float32, one thread.

    Raises:
        ConfigError: an option cannot work.
    """
    for size in sizes:
        check_choice("size", size, ("tiny", *SIZES))
    for kind in traces:
        check_choice("trace", kind, TRACES)
    if plot is not None:
        check_plot(plot)
    results = [result for size in sizes for result in _profiles(size, traces)]
    where = machine(packages=("torch", "transformers"))
    report("bench profile", where, results, json_only=json, plot=plot)


def _profiles(size: str, traces: Sequence[str]) -> Iterator[Result]:
    import torch
    from torch.profiler import ProfilerActivity

    from specpool import Engine, SamplingParams

    torch.set_num_threads(1)
    attend = core.attend_pages

    def attend_pages(*args: Any, **options: Any) -> None:
        with torch.profiler.record_function(ATTEND):
            attend(*args, **options)

    with ExitStack() as stack:
        stack.enter_context(patch.object(core, "attend_pages", attend_pages))
        model = model_folder(size, stack)
        engine = stack.enter_context(
            Engine.from_pretrained(
                model, page_size=32, max_batch=32, kv_bytes=1 << 30, dtype="float32"
            )
        )
        for kind in traces:
            trace = Trace.of(kind, *model_sizes(model))
            params = SamplingParams(max_new_tokens=trace.num_new, temperature=0.0, ignore_eos=True)
            engine.generate(trace.prompts, params, progress=False)  # warm
            engine.forget_prefixes()
            with torch.profiler.profile(
                activities=[ProfilerActivity.CPU], acc_events=True
            ) as profiler:
                began = time.perf_counter()
                engine.generate(trace.prompts, params, progress=False)
                total = time.perf_counter() - began
            engine.forget_prefixes()
            seconds = {
                event.key: event.self_cpu_time_total / 1e6 for event in profiler.key_averages()
            }
            for part, part_seconds in parts_of(seconds, total).items():
                yield Result(f"{size}: {kind}: {part}", part_seconds, "s", "the run", total)
