"""The command: checks the options, starts a server if none is named, and prints the figures."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import ipaddress
import math
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from urllib.parse import SplitResult, urlsplit

from rich.console import Console

from specpool.checks import check_int, split_url
from specpool.cli.bench_serve.options import ServeBenchJob
from specpool.cli.options import checks
from specpool.cli.results import Result, check_plot, draw, machine, report
from specpool.cli.serve import KEY_VARIABLE
from specpool.errors import ConfigError

#: Seconds that a server that is started here may take to load.
_PATIENCE = 600.0


def run(job: ServeBenchJob) -> None:
    """Measure, and print the figures.

    Raises:
        ConfigError: an option cannot work, or the server does not answer.
    """
    url = _checked(job)
    from specpool.cli.bench_serve.trace import of_file, synthetic

    prompts = (
        synthetic(min(job.requests, 1024), job.prompt_characters, job.seed)
        if job.dataset is None
        else of_file(job.dataset)
    )
    with contextlib.ExitStack() as stack:
        if url is None:
            url = urlsplit(stack.enter_context(_server(job)))
        results = asyncio.run(_measured(job, url, prompts))
    setup = machine(packages=("numpy", "httptools"))
    title = "bench serve"
    report(title, setup, results, json_only=job.json, plot=None)
    if job.plot is not None:
        draw(title, [result for result in results if result.unit == "ms"], job.plot)


async def _measured(job: ServeBenchJob, url: SplitResult, prompts: list[str]) -> list[Result]:
    from specpool.cli.bench_serve.drive import How, drafting, drive, model_of
    from specpool.cli.bench_serve.figures import Slo, figures_of
    from specpool.cli.bench_serve.http import Caller, CallFailed
    from specpool.cli.bench_serve.trace import trace_of

    caller = Caller(url, os.environ.get(KEY_VARIABLE))
    try:
        model = job.model or await model_of(caller)
        how = How(model, job.chat, job.temperature, job.seed, job.ignore_eos)
        sizes = {"max_tokens": job.max_tokens, "seed": job.seed}
        single_items = trace_of(prompts, num_requests=6, rate=None, **sizes)
        await drive(caller, single_items[:1], how, concurrency=1, seconds=job.seconds)  # warms up
        singles, alone_seconds = await drive(
            caller, single_items[1:], how, concurrency=1, seconds=job.seconds
        )
        if errors := [r.error for r in singles if r.error]:
            raise ConfigError(f"the server does not answer as OpenAI's: {errors[0]:.300}")
        items = trace_of(prompts, num_requests=job.requests, rate=job.rate, **sizes)
        counts_before = await drafting(caller)
        records, seconds = await drive(
            caller, items, how, concurrency=_concurrency(job), seconds=job.seconds
        )
        counts_after = await drafting(caller)
    except CallFailed as error:
        raise ConfigError(f"{url.geturl()}: {error}") from None
    finally:
        caller.close()
    accept_len = None
    if (
        counts_before is not None
        and counts_after is not None
        and counts_after[0] > counts_before[0]
    ):
        accept_len = 1 + (counts_after[1] - counts_before[1]) / (counts_after[0] - counts_before[0])
    slo = Slo(job.slo_ttft, job.slo_tpot)
    for why in sorted({r.error for r in records if r.error})[:3]:
        Console(stderr=True).print(f"failed: {why}", markup=False, highlight=False)
    return figures_of(records, seconds, singles, alone_seconds, slo, accept_len)


def _checked(job: ServeBenchJob) -> SplitResult | None:
    """Check a job; return its URL, or None to start a server here."""
    if importlib.util.find_spec("httptools") is None:
        raise ConfigError("bench serve needs httptools: pip install 'specpool[serve]'")
    check_int("requests", job.requests, 1, 1 << 20)
    check_int("max_tokens", job.max_tokens, 1, 1 << 20)
    check_int("prompt_characters", job.prompt_characters, 1, 1 << 20)
    if job.concurrency is not None:
        check_int("concurrency", job.concurrency, 1, 1 << 14)
        if job.rate is not None:
            raise ConfigError("--rate and --concurrency both say when requests come: give one")
    for name in ("rate", "seconds", "slo_ttft", "slo_tpot"):
        value = getattr(job, name)
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{name} must be above 0, got {value!r}")
    if not 0 <= job.temperature <= 2:
        raise ConfigError(f"temperature must be a number in [0, 2], got {job.temperature!r}")
    if job.plot is not None:
        check_plot(job.plot)
    if job.model == "":
        raise ConfigError("--model is empty: leave it out for the first that is listed")
    if job.url is None:
        check_int("batch", job.batch, 1, 1 << 16)
        checks.check_models(job.target, [] if job.draft in (None, "none") else [job.draft])
        return None
    if job.draft is not None:
        raise ConfigError(f"--draft {job.draft:.80} is of a server that is started here, not --url")
    url = split_url("url", job.url.removesuffix("/").removesuffix("/v1"))
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ConfigError(f"url must begin with http:// or https://, got {job.url!r:.200}")
    if not _is_loopback(url.hostname) and not job.allow_remote:
        raise ConfigError(
            f"url names {url.hostname}, another machine: a benchmark loads it, so give "
            "--allow-remote if it may be"
        )
    return url


def _concurrency(job: ServeBenchJob) -> int | None:
    """Return how many requests run at once; None if they come at a rate."""
    return None if job.rate is not None else job.concurrency or 16


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@contextlib.contextmanager
def _server(job: ServeBenchJob) -> Iterator[str]:
    """Run `specpool serve` within the block; yield its URL."""
    command = [sys.executable, "-m", "specpool", "serve", "--port", "0", "--no-access-log"]
    command += ["--target", job.target, "--batch", str(job.batch)]
    command += [] if job.draft is None else ["--draft", job.draft]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    timer = threading.Timer(_PATIENCE, process.kill)
    timer.start()
    assert process.stdout is not None and process.stderr is not None
    log: list[str] = []
    reader = threading.Thread(target=lambda: log.extend(process.stderr or ()), daemon=True)
    reader.start()
    try:
        for line in process.stdout:
            if address := re.search(r"http://\S+?:\d+", line):
                break
        else:
            reader.join(5)
            why = log[-1].strip() if log else "it said nothing"
            raise ConfigError(f"the server did not start: {why}")
        timer.cancel()
        yield address[0]
    finally:
        timer.cancel()
        process.terminate()
        try:
            process.communicate(timeout=60)
        except (subprocess.TimeoutExpired, ValueError):
            process.kill()
