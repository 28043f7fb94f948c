"""`specpool generate`: prints texts as they come, and with `--compare` decodes plainly too."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from specpool._core import Shape
from specpool.capacity.group_sizes import DEFAULT_BATCH
from specpool.cli.generate.interrupt import Interrupt
from specpool.cli.generate.output_file import OutputFile
from specpool.cli.generate.printer import Printer, prompt_name
from specpool.cli.generate.report import (
    Runs,
    Timed,
    report_of,
    summary_of,
    table_of,
)
from specpool.cli.options import checks
from specpool.cli.options.drafts import check_drafter
from specpool.cli.options.groups import ModelOptions, PlaceOptions, loading_of
from specpool.cli.options.prompts import Given, PromptValue, read_prompts, shown
from specpool.cli.results import check_out
from specpool.engine.models.files.names import shown_drafts
from specpool.engine.output import Chunk, RequestOutput
from specpool.engine.ranks.environment import world_of_environment
from specpool.engine.sampling_params import SamplingParams
from specpool.engine.shape_names import name_of as name_of_shape
from specpool.errors import ConfigError

if TYPE_CHECKING:
    from specpool.engine.engine import Engine
    from specpool.engine.texts import Prompt

NUM_BUILT_IN_PROMPTS = 3
# With --compare: the fewest and the most runs of each kind, because one run says little about
# speed, and the seconds for those beyond the fewest.
MIN_RUNS, MAX_RUNS, REPEAT_SECONDS = 2, 5, 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateJob:
    """The arguments of the command line."""

    models: ModelOptions
    prompts: Given
    chat: bool
    place: PlaceOptions
    compare: bool
    out: Path | None
    force: bool
    json: bool
    sampling: dict[str, Any]  # of the requests
    options: dict[str, Any]  # of the engine


def prompts_of(job: GenerateJob, texts: Sequence[PromptValue]) -> list[Prompt]:
    """Return the engine's prompts; with `--chat` a text becomes a chat of one message."""
    return [
        [{"role": "user", "content": prompt}] if job.chat and isinstance(prompt, str) else prompt
        for prompt in texts
    ]


def timed(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    interrupt: Interrupt,
    *,
    shape: Shape | None = None,
    on_chunk: Callable[[Chunk], None] = lambda chunk: None,
    on_output: Callable[[RequestOutput], None] = lambda output: None,
) -> Timed:
    """Run the prompts and time the engine alone, without the work of the callbacks.

    A run finds nothing of the runs before it in the prefix cache.
    """
    engine.forget_prefixes()
    outputs: dict[tuple[int, int], RequestOutput] = {}
    seconds = 0.0
    stream = engine.stream(prompts, params, shape=shape)
    try:
        while not interrupt.is_requested:
            start = time.perf_counter()
            item = next(stream, None)
            seconds += time.perf_counter() - start
            if item is None:
                break
            if isinstance(item, Chunk):
                on_chunk(item)
            else:
                outputs[item.index, item.sample] = item
                on_output(item)
    finally:
        stream.close()  # type: ignore[attr-defined]
    return Timed([outputs[key] for key in sorted(outputs)], seconds)


def run(job: GenerateJob) -> None:
    """Run the command.

    Raises:
        ConfigError: an option cannot work.
    """
    checks.check_place(
        device=job.place.device,
        threads=job.place.threads,
        dtype=job.place.dtype,
        graph_sizes=job.options.get("graph_sizes"),
    )
    shape = job.options.get("shape")
    params = checks.sampling_params(job.sampling)
    if job.out is not None:
        check_out(job.out, force=job.force)
    elif job.force:
        raise ConfigError("--force says to write over a file: give --out too")
    target, drafts = job.models.target, job.models.drafts()
    check_drafter(drafts, params.drafter)
    if job.compare and (not drafts or shape == Shape.none()):
        what = "--draft" if not drafts else "a --shape that drafts"
        raise ConfigError(f"--compare compares drafting with plain decoding: give {what}")
    checks.check_engine_config(drafts, job.options)
    checks.check_models(target, drafts)
    texts = read_prompts(job.prompts, target, NUM_BUILT_IN_PROMPTS)
    checks.check_prompts(target, prompts_of(job, texts))
    # More rows than texts would only take more graphs.
    batch = {"max_batch": DEFAULT_BATCH} if len(texts) * params.n <= DEFAULT_BATCH else {}
    loading = loading_of(job.models, job.place, batch | job.options)
    if world_of_environment()[0]:
        checks.follow(loading, job.place.threads)
        return
    checks.start_torch(job.place.threads)
    from specpool.engine.engine import Engine

    ranks = checks.start_ranks(job.place.device)
    status = Console(stderr=True)

    def load() -> Engine:
        with Progress(
            SpinnerColumn(),
            TextColumn("loading {task.description}"),
            transient=True,
            console=status,
            disable=not status.is_terminal,  # else it leaves an empty line
        ) as progress:
            progress.add_task(f"{target}, {shown_drafts(drafts)}")
            return Engine.from_pretrained(**loading, ranks=ranks)

    interrupt = Interrupt()
    with ranks or nullcontext(), interrupt.handled():
        with load() as engine:
            _generate(job, engine, texts, params, interrupt, status)
    if interrupt.is_requested:
        status.print("interrupted: requests aborted, pages returned")
        raise SystemExit(130)


def _generate(
    job: GenerateJob,
    engine: Engine,
    texts: Sequence[PromptValue],
    params: SamplingParams,
    interrupt: Interrupt,
    status: Console,
) -> None:
    prompts, console = prompts_of(job, texts), Console()
    if job.compare and not job.json:
        pools = ", ".join(
            f"{p.name}: {p.num_pages} pages of {p.page_size} slots" for p in engine.pool_stats()
        )
        console.print(f"{engine.kv_bytes / 2**20:.1f} MiB of KV ({pools})", highlight=False)
    if job.compare:  # both kinds of rounds once, so that neither run is timed while it warms up
        for shape in (None, Shape.none()):
            timed(engine, prompts[:1], SamplingParams(max_new_tokens=8), interrupt, shape=shape)
    total = len(prompts) * params.n * params.max_new_tokens
    rounds_before = _round_cts(engine)
    with (
        OutputFile(job.out, prompts, force=job.force) as file,
        _bar(status if job.json else None, "generating", total) as advance,
    ):
        printer = None
        if not job.json:
            printer = Printer(
                console,
                [shown(text) for text in texts],
                params.n,
                marks=job.compare,
                token_text=_token_text(engine) if params.logprobs is not None else None,
            )

        def on_output(output: RequestOutput) -> None:
            file.write(output)
            if printer is not None:
                printer.finish(output)

        generated = timed(
            engine,
            prompts,
            params,
            interrupt,
            on_chunk=advance if printer is None else printer.chunk,
            on_output=on_output,
        )
    peak_pages = list(engine.peak_pages)
    round_cts = _round_cts(engine) - rounds_before
    runs = Runs([generated], [])
    if job.compare:
        with _bar(status, "decoding plainly, for comparison", total) as advance:
            runs.plain.append(
                timed(engine, prompts, params, interrupt, shape=Shape.none(), on_chunk=advance)
            )
        _repeat(engine, prompts, params, interrupt, runs)
    if interrupt.is_requested:
        return
    report = report_of(engine, runs, peak_pages)
    if round_cts:
        report["chosen"] = {name_of_shape(s): count for s, count in round_cts.most_common()}
    if job.json:
        report["outputs"] = [asdict(output) for output in generated.outputs]
        print(json.dumps(report))
    elif job.compare:
        console.print(table_of(report))
    else:
        console.file.flush()
        status.print(summary_of(report, params), highlight=False, soft_wrap=True)
    _exit(generated, report, params)


def _exit(generated: Timed, report: dict[str, Any], params: SamplingParams) -> None:
    """Print the errors and exit: 2 if a request failed, 1 if a text differs from plain decoding."""
    for output in generated.outputs:
        if output.error is not None:
            name = prompt_name(output.index, output.sample, params.n)
            print(f"error: {name}: {output.error}", file=sys.stderr)
    for comparison in report["comparisons"] or []:
        if comparison["verdict"] == "fault":
            name = prompt_name(comparison["index"], comparison["sample"], params.n)
            print(f"error: {name}: {comparison['line']}", file=sys.stderr)
    if report["errors"]:
        raise SystemExit(2)
    if report["same_as_plain"] is False:
        raise SystemExit(1)


def _repeat(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    interrupt: Interrupt,
    runs: Runs,
) -> None:
    """Add further runs of both kinds in turn, until there are enough for a range."""
    seconds, pair_seconds = 0.0, runs.drafted[0].seconds + runs.plain[0].seconds
    while not interrupt.is_requested and (
        len(runs.drafted) < MIN_RUNS
        or (len(runs.drafted) < MAX_RUNS and seconds + pair_seconds <= REPEAT_SECONDS)
    ):
        runs.drafted.append(timed(engine, prompts, params, interrupt))
        runs.plain.append(timed(engine, prompts, params, interrupt, shape=Shape.none()))
        pair_seconds = runs.drafted[-1].seconds + runs.plain[-1].seconds
        seconds += pair_seconds


def _token_text(engine: Engine) -> Callable[[int], str]:
    """Return a function from a token to its text; without a tokenizer, to its number."""
    tokenizer = engine.tokenizer
    return str if tokenizer is None else lambda token: str(tokenizer.decode([token]))


def _round_cts(engine: Engine) -> Counter[Shape]:
    """Return the number of rounds by the shape that the controller chose."""
    stats = engine.stats().adaptive
    return Counter({} if stats is None else stats.round_cts)


@contextmanager
def _bar(console: Console | None, text: str, total: int) -> Iterator[Callable[[Chunk], None]]:
    """Show a progress bar over tokens within the block; yield the function that advances it."""
    columns = (TextColumn(text), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    off = console is None or not console.is_terminal  # else it leaves an empty line
    with Progress(*columns, transient=True, console=console, disable=off) as progress:
        task = progress.add_task(text, total=total)
        yield lambda chunk: progress.advance(task, len(chunk.token_ids))
