"""Print how many requests run at once in SGLang's real loop, with its own reserve and with ours.

The same traffic on the same pages, saturated: `PYTHONPATH=.engines/sglang python
tests/embed/sglang_requests.py` after `make engines`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from sglang_loop import Outcome, Setup, run

SETUPS = {
    "P=64, 5/8/64": Setup(page_size=64, shape=(5, 8, 64), num_tokens=32_768),
    "P=64, 5/4/8": Setup(page_size=64, shape=(5, 4, 8), num_tokens=16_384),
    "P=16, 5/4/8": Setup(page_size=16, shape=(5, 4, 8), num_tokens=8_192),
    "P=16, 3/1/4": Setup(page_size=16, shape=(3, 1, 4), num_tokens=4_096),
}
#: More requests than fit: every one waits at once.
SATURATED = {"num_rows": 64, "num_requests": 64, "cache": False, "spread": 0}


def _line(name: str, level: str, outcome: Outcome) -> str:
    if outcome.error or outcome.faults or outcome.leaks:
        raise SystemExit(f"{name} at level {level}: {outcome.error} {outcome.faults[:3]}")
    ahead = outcome.slots_ahead / outcome.sum_running
    return (
        f"{name:14} {level:8} {outcome.mean_decoding:10.2f} {outcome.most_running:10} "
        f"{outcome.forwards:10} {outcome.retracted:10} {ahead:12.0f}"
    )


def main() -> None:
    torch.set_num_threads(1)
    print(
        f"{'':14} {'level':8} {'mean rows':>10} {'most rows':>10} {'forwards':>10} "
        f"{'retracted':>10} {'slots ahead':>12}"
    )
    for name, setup in SETUPS.items():
        for level in ("off", "reserve"):
            outcome = run(replace(setup, level=level, **SATURATED), seconds=300)
            print(_line(name, level, outcome), flush=True)


if __name__ == "__main__":
    main()
