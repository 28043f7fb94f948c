"""`python -m benches ranks`: what a record costs, beside one all-reduce of a layer.

Two processes on this machine. A record is packed, sent, read and compared; the reference is the
all-reduce of the hidden states [rows, hidden] of one layer over gloo, in float32, in alternation
with it.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from specpool.cli.results import Result as Figure
from specpool.cli.results import machine, report
from specpool.engine.ranks.group import Ranks
from specpool.engine.ranks.record import Record, StepTokens

_TOKENS = 4  # accepted by each row


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The options of the benchmark."""

    rows: list[int]
    hidden: int
    repeats: int
    arrivals: int
    json: bool


def run(job: Job) -> None:
    """Start two ranks that measure, and print rank 0's figures."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "benches.ranks", json.dumps(asdict(job))],
            env=os.environ
            | {
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit("a rank has failed")
    results = []
    for figures in json.loads(outs[0].splitlines()[-1]):
        rows = figures["rows"]
        for who in ("rank 0", "the slower rank"):
            record, reduced = figures["record"][who], figures["all_reduce"][who]
            name = f"record of {rows} rows, {figures['bytes']} bytes: {who}"
            results.append(
                Figure(name, record, "us", f"all-reduce [{rows}, {job.hidden}]", reduced)
            )
    report("bench ranks", machine("cpu", 1, ("torch",)), results, json_only=job.json, plot=None)


def _record(number: int, rows: int, arrivals: int) -> Record:
    tokens = np.arange(rows * _TOKENS).reshape(rows, _TOKENS).tolist()
    calls: list[list[Any]] = [
        ["submit", {"request_id": i, "tokens": list(range(512))}] for i in range(arrivals)
    ]
    return Record(number, number * 77, [*calls, ["turn"]], [StepTokens(number, tokens)])


def _measure(ranks: Ranks, rows: int, job: Job) -> dict[str, Any]:
    hidden = torch.ones(rows, job.hidden)
    seconds: dict[str, list[float]] = {"record": [], "all_reduce": []}
    size = 0
    for number in range(1, job.repeats + 1):
        dist.barrier()
        started = time.perf_counter()
        sent_record = _record(number, rows, job.arrivals)
        if ranks.leads:
            frame = sent_record.to_bytes(ranks.key)
            size = len(frame)
            ranks.send(frame)
        else:
            heard = Record.of_bytes(ranks.receive(), ranks.key)
            differences = [
                sent.difference(received)
                for sent, received in zip(sent_record.results, heard.results, strict=True)
            ]
            if heard.digest != sent_record.digest or any(differences):
                raise SystemExit("the ranks differ")
        seconds["record"].append(time.perf_counter() - started)
        dist.barrier()
        started = time.perf_counter()
        dist.all_reduce(hidden)
        seconds["all_reduce"].append(time.perf_counter() - started)
        hidden.fill_(1.0)
    figures = {
        name: {"rank 0": 1e6 * statistics.median(samples[job.repeats // 10 :])}
        for name, samples in seconds.items()
    }
    return {"rows": rows, "bytes": size, **figures}


def _rank(text: str) -> None:
    job = Job(**json.loads(text))
    torch.set_num_threads(1)
    with Ranks() as ranks:
        measurements = [_measure(ranks, rows, job) for rows in job.rows]
        _add_slower(ranks, measurements)
        if ranks.leads:
            print(json.dumps(measurements), flush=True)


def _add_slower(ranks: Ranks, measurements: list[dict[str, Any]]) -> None:
    """Add the slower rank's medians, in which a follower waits for the record."""
    for figures in measurements:
        for name in ("record", "all_reduce"):
            medians = figures[name]
            medians["the slower rank"] = -ranks.least(-int(1e3 * medians["rank 0"])) / 1e3
        figures["bytes"] = -ranks.least(-figures["bytes"])


if __name__ == "__main__":
    _rank(sys.argv[1])
