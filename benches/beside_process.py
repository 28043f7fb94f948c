"""The loads of `python -m benches beside`, run by the package and the benches of one checkout.

For each line that comes in, a turn of the load runs, and its CPU seconds are written.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable


def ledger_step() -> Callable[[], float]:
    """64 rows with chains of 3 on a ledger alone."""
    from benches.ledger_load import LedgerLoad, Setting
    from specpool._core import Shape

    setting = Setting("", 16, Shape.eagle(3, 1, 4), overlap_depth=1)
    load = LedgerLoad(setting, 64, setting.ledger(64))

    def turn() -> float:
        seconds = 0.0
        for _ in range(20_000):
            start = time.process_time()
            load.step()
            seconds += time.process_time() - start
            load.refill()
        return seconds

    return turn


def scheduler_round() -> Callable[[], float]:
    """32 rows with chains of 3; the simulated device does not count."""
    time.perf_counter_ns = time.process_time_ns  # the clock of `HostLoad`
    from benches.scheduler import HostLoad
    from specpool._core import Shape

    load = HostLoad(32, Shape.eagle(3, 1, 4), 1, 16)
    for _ in range(200):
        load.turn()
    return lambda: sum(sum(load.turn()) for _ in range(500)) / 1e6


def plain_decode() -> Callable[[], float]:
    """Texts of a random Llama of 25 million parameters, in batches of 4."""
    import torch

    from benches.plain_runs import _model, _tokens
    from specpool.engine.engine import Engine
    from specpool.engine.sampling_params import SamplingParams

    torch.set_num_threads(1)
    engine = Engine.from_pretrained(
        _model("25m"), max_batch=4, max_context_len=128, prefix_cache=False
    )
    prompts = _tokens(4, 16, 8192)
    params = SamplingParams(max_new_tokens=32, ignore_eos=True)

    def turn() -> float:
        start = time.process_time()
        engine.generate(prompts, params)
        return time.process_time() - start

    return turn


LOADS: dict[str, Callable[[], Callable[[], float]]] = {
    "a ledger's step": ledger_step,
    "a scheduler's round": scheduler_round,
    "plain decoding": plain_decode,
}

if __name__ == "__main__":
    timed = LOADS[sys.argv[1]]()
    for _ in sys.stdin:
        print(timed(), flush=True)
