"""Fuzz one target: its corpus first, then inputs made from the corpus by mutation.

    python fuzz/run.py border --runs 5000            # the same inputs each time (--seed)
    python fuzz/run.py event_log --seconds 3600      # as long as you like
    python fuzz/run.py ledger --atheris --seconds 60 # guided by coverage; needs atheris

An input lies in `fuzz/findings/` while it runs. It stays there if it breaks a law, hangs or ends
the process; `python fuzz/run.py border --replay FILE` runs it alone.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import importlib
import os
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TARGETS = ("block_pool", "border", "event_log", "image", "ledger")
#: Bytes of address space beyond what the process has at its start; more is a shortage of memory.
MOST_MEMORY = 2 << 30
#: Seconds for one input: more is a hang.
MOST_SECONDS = 30
MOST_BYTES = 4096


def corpus(target: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted((HERE / "corpus" / target).iterdir())]


def mutated(random: random.Random, inputs: list[bytes]) -> bytes:
    """One of the inputs with some bytes changed, moved, doubled, left out or taken from another."""
    data = bytearray(random.choice(inputs))
    for _ in range(1 + int(random.expovariate(0.4))):
        at = random.randrange(len(data) + 1)
        way = random.randrange(6)
        if way == 0 and at < len(data):
            data[at] ^= 1 << random.randrange(8)
        elif way == 1 and at < len(data):
            data[at] = random.choice((0, 1, 2, 127, 128, 254, 255, random.randrange(256)))
        elif way == 2:
            data[at:at] = random.randbytes(1 + random.randrange(8))
        elif way == 3:
            del data[at : at + 1 + random.randrange(8)]
        elif way == 4:
            other = random.choice(inputs)
            start = random.randrange(len(other) + 1)
            data[at : at + 16] = other[start : start + random.randrange(64)]
        else:
            data += random.randbytes(random.randrange(64))
    return bytes(data[:MOST_BYTES])


def fresh(target: str, seed: int) -> Iterator[bytes]:
    """The corpus, then mutations without end; a third are random bytes."""
    inputs = corpus(target)
    yield from inputs
    source = random.Random(seed)
    while True:
        if source.randrange(3) == 0:
            yield source.randbytes(1 + source.randrange(300))
        else:
            yield mutated(source, inputs)


def limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    max_bytes = pages * resource.getpagesize() + MOST_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, resource.RLIM_INFINITY))


def guarded(target: str, one_input: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Wrap `one_input`: the input stays on disk if it fails, and a hang ends the process."""
    folder = HERE / "findings"
    folder.mkdir(exist_ok=True)
    current = folder / f"{target}-running-{os.getpid()}"  # others may run beside this one

    def run(data: bytes) -> Any:
        current.write_bytes(data)
        faulthandler.dump_traceback_later(MOST_SECONDS, exit=True)
        try:
            return one_input(data)
        except BaseException as error:
            if not isinstance(error, KeyboardInterrupt):
                path = folder / f"{target}-{hashlib.sha1(data).hexdigest()[:12]}"
                path.write_bytes(data)
                print(f"finding: {path}", file=sys.stderr)
            raise
        finally:
            faulthandler.cancel_dump_traceback_later()
            current.unlink()

    return run


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument(
        "--runs", type=int, default=0, help="inputs beside the corpus; 0 = no limit"
    )
    parser.add_argument("--seconds", type=float, default=0, help="0 = no limit")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--atheris", action="store_true", help="let atheris choose the inputs")
    parser.add_argument("--replay", type=Path, help="run this input alone")
    options = parser.parse_args()
    sys.path.insert(0, str(HERE))
    module = (
        instrumented(options.target) if options.atheris else importlib.import_module(options.target)
    )
    one_input = guarded(options.target, module.one_input)
    limit_memory()
    if options.replay is not None:
        print(one_input(options.replay.read_bytes()))
        return
    if options.atheris:
        run_atheris(options, one_input)
    start, runs, results = time.monotonic(), 0, Counter[Any]()
    for data in fresh(options.target, options.seed):
        results[one_input(data)] += 1
        runs += 1
        if runs == options.runs + len(corpus(options.target)) and options.runs:
            break
        if options.seconds and time.monotonic() - start > options.seconds:
            break
    report(options.target, runs, results)


def report(target: str, runs: int, results: Counter[Any]) -> None:
    """Print how many inputs were accepted: a fuzzer whose every input is refused finds nothing."""
    if target == "border":
        counts = [count for name, count in results.items() if name is not None]
        print(f"{runs} inputs, {sum(counts)} accepted by {len(counts)} functions")
    else:
        accepted = sum(count * num_calls for num_calls, count in results.items())
        print(f"{runs} inputs, {accepted} calls or events accepted")


def instrumented(target: str) -> Any:
    """Import the target so that atheris sees which of our lines run."""
    import atheris

    with atheris.instrument_imports(include=["specpool", *TARGETS]):
        return importlib.import_module(target)


def run_atheris(options: argparse.Namespace, one_input: Callable[[bytes], Any]) -> None:
    import atheris

    def quiet(data: bytes) -> None:
        one_input(data)

    limits = [f"-runs={options.runs}"] if options.runs else []
    limits += [f"-max_total_time={int(options.seconds)}"] if options.seconds else []
    folder = HERE / "corpus" / options.target
    found_corpus = HERE / "findings" / f"{options.target}-corpus"
    found_corpus.mkdir(exist_ok=True)
    settings = [
        "-rss_limit_mb=0",
        f"-timeout={MOST_SECONDS}",
        f"-seed={options.seed + 1}",
        f"-max_len={MOST_BYTES}",
    ]
    atheris.Setup([sys.argv[0], *limits, *settings, str(found_corpus), str(folder)], quiet)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
