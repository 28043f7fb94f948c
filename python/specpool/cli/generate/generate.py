"""`specpool generate`: prints texts as they come and figures, and compares with plain decoding."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
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
from rich.table import Table

from specpool._core import Shape
from specpool.cli.generate.interrupt import Interrupt
from specpool.cli.generate.printer import Printer, name_of
from specpool.cli.generate.report import Runs, Timed, mean_accept_len, report_of, table_of
from specpool.cli.options import checks
from specpool.cli.options.drafts import check_drafter, drafts_of, keep_kv
from specpool.cli.options.prompts import Given, PromptValue, read_prompts, shown
from specpool.cli.options.shapes import shape_of
from specpool.engine.output import Chunk, RequestOutput
from specpool.errors import ConfigError
from specpool.models.files.names import shown_drafts
from specpool.ranks.environment import world_of_environment
from specpool.sampling_params import SamplingParams
from specpool.shape_names import name_of as name_of_shape

if TYPE_CHECKING:
    from specpool.engine.engine import Engine
    from specpool.engine.texts import Prompt

NUM_BUILT_IN_PROMPTS = 3
# The most runs whose speeds are averaged, and the seconds for those after the first.
MOST_RUNS, MOST_REPEAT_SECONDS = 5, 2.0
# --compare-ancestry: ancestries differ in trees only, and by little, so the defaults are many
# prompts and a tree.
NUM_ANCESTRY_PROMPTS = 24
ANCESTRY_SHAPE = Shape.eagle(4, 4, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The arguments of the command line."""

    target: str
    draft: list[str] | None
    prompts: Given
    chat: bool
    shape: str | None
    dtype: str | None
    device: str
    threads: int
    trust_remote_code: bool
    compare_ancestry: bool
    json: bool
    sampling: dict[str, Any]
    options: dict[str, Any]


def prompts_of(job: Job, given: Sequence[PromptValue]) -> list[Prompt]:
    """Return the engine's prompts; with `--chat` a text becomes a chat of one message."""
    return [
        [{"role": "user", "content": each}] if job.chat and isinstance(each, str) else each
        for each in given
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
        while not interrupt.asked:
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
    return Timed([outputs[place] for place in sorted(outputs)], seconds)


def run(job: Job) -> None:
    """Run the command.

    Raises:
        ConfigError: an option cannot work.
    """
    checks.check_place(
        device=job.device,
        threads=job.threads,
        dtype=job.dtype,
        graph_sizes=job.options.get("graph_sizes"),
    )
    shape = shape_of(job.shape)
    if shape is None and job.compare_ancestry:
        shape = ANCESTRY_SHAPE
    params = checks.sampling_params(job.sampling)
    count = NUM_ANCESTRY_PROMPTS if job.compare_ancestry else NUM_BUILT_IN_PROMPTS
    drafts = drafts_of(job.target, job.draft)
    check_drafter(drafts, params.drafter)
    if job.compare_ancestry:
        _check_ancestry(job, shape, drafts)
    checks.check_engine_config(shape, drafts, job.options)
    checks.check_models(job.target, drafts)
    texts = read_prompts(job.prompts, job.target, count)
    checks.check_prompts(job.target, prompts_of(job, texts))
    loading = {
        "target": job.target,
        "draft": drafts or None,
        "dtype": job.dtype,
        "device": job.device,
        "shape": shape,
        "trust_remote_code": job.trust_remote_code,
        **job.options,
    }
    if world_of_environment()[0]:
        checks.follow(loading, job.threads)
        return
    checks.start_torch(job.threads)
    from specpool.engine.engine import Engine

    ranks = checks.start_ranks(job.device)
    console = Console(stderr=job.json)

    def load(**options: Any) -> Engine:
        with Progress(
            SpinnerColumn(),
            TextColumn("loading {task.description}"),
            transient=True,
            console=console,
            disable=not console.is_terminal,  # else it leaves an empty line
        ) as progress:
            progress.add_task(f"{job.target}, {shown_drafts(drafts)}")
            return Engine.from_pretrained(**loading, ranks=ranks, **options)

    interrupt = Interrupt()
    with ranks or nullcontext(), interrupt.handled():
        if job.compare_ancestry:
            _compare_ancestry(job, load, prompts_of(job, texts), params, interrupt, console)
        else:
            with load() as engine:
                _generate(job, engine, texts, params, interrupt, console)
    if interrupt.asked:
        console.print("interrupted: requests aborted, pages returned")
        raise SystemExit(130)


def _check_ancestry(job: Job, shape: Shape | None, drafts: Sequence[str]) -> None:
    """Raise `ConfigError` if both ancestries would be the same, or there are ranks."""
    if (world := world_of_environment()[1]) > 1:
        raise ConfigError(f"--compare-ancestry runs in one process, there are {world} ranks")
    if not keep_kv(drafts):
        raise ConfigError("--compare-ancestry needs a draft model")
    if job.options.get("adaptive") is not None:
        raise ConfigError("--compare-ancestry takes one shape, not --adaptive: give --shape")
    if shape is not None and shape.topk == 1:
        raise ConfigError(
            f"--compare-ancestry needs a tree, topk above 1: in {name_of_shape(shape)} ancestors "
            "and branch are the same"
        )


def _generate(
    job: Job,
    engine: Engine,
    texts: Sequence[PromptValue],
    params: SamplingParams,
    interrupt: Interrupt,
    console: Console,
) -> None:
    prompts = prompts_of(job, texts)
    if not job.json:
        pools = ", ".join(
            f"{p.name}: {p.num_pages} pages of {p.page_size} slots" for p in engine.pool_stats()
        )
        console.print(f"{engine.kv_bytes / 2**20:.1f} MiB of KV ({pools})", highlight=False)
    warm_up = SamplingParams(max_new_tokens=8)
    has_drafts = engine.shape != Shape.none() or engine.stats().adaptive is not None
    for kind in (None, Shape.none()):
        timed(engine, prompts[:1], warm_up, interrupt, shape=kind)
    total = len(prompts) * params.n * params.max_new_tokens
    before = _chosen(engine)
    if job.json:
        with _bar(console, "generating", total) as on_chunk:
            first = timed(engine, prompts, params, interrupt, on_chunk=on_chunk)
    else:
        printer = Printer(console, [shown(text) for text in texts], params.n)
        first = timed(
            engine, prompts, params, interrupt, on_chunk=printer.chunk, on_output=printer.done
        )
    peak = list(engine.peak_pages)
    chosen = _chosen(engine) - before
    plain = None
    if has_drafts:
        with _bar(console, "decoding plainly, for comparison", total) as on_chunk:
            plain = timed(engine, prompts, params, interrupt, shape=Shape.none(), on_chunk=on_chunk)
    runs = _repeat(engine, prompts, params, interrupt, first, plain)
    if interrupt.asked:
        return
    report = report_of(engine, runs, peak)
    if chosen:
        report["chosen"] = {name_of_shape(shape): count for shape, count in chosen.most_common()}
    if job.json:
        report["outputs"] = [asdict(output) for output in first.outputs]
        print(json.dumps(report))
    else:
        console.print(table_of(report))
    for output in first.outputs:
        if output.error is not None:
            name = name_of(output.index, output.sample, params.n)
            print(f"error: {name}: {output.error}", file=sys.stderr)
    for found in report["comparisons"] or []:
        if found["verdict"] == "fault":
            name = name_of(found["index"], found["sample"], params.n)
            print(f"error: {name}: {found['line']}", file=sys.stderr)
    if report["errors"]:
        raise SystemExit(2)
    if report["same_as_plain"] is False:
        raise SystemExit(1)


def _repeat(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    interrupt: Interrupt,
    first: Timed,
    plain: Timed | None,
) -> Runs:
    """Repeat both runs in turn while this is quick, because one run says little about speed."""
    runs, spent = Runs([first], [] if plain is None else [plain]), 0.0
    latest = first.seconds + (0.0 if plain is None else plain.seconds)
    while len(runs.drafted) < MOST_RUNS and spent + latest <= MOST_REPEAT_SECONDS:
        runs.drafted.append(timed(engine, prompts, params, interrupt))
        latest = runs.drafted[-1].seconds
        if plain is not None:
            runs.plain.append(timed(engine, prompts, params, interrupt, shape=Shape.none()))
            latest += runs.plain[-1].seconds
        spent += latest
        if interrupt.asked:
            break
    return runs


def _chosen(engine: Engine) -> Counter[Shape]:
    """Return the number of rounds by the shape that the controller chose."""
    stats = engine.stats().adaptive
    return Counter({} if stats is None else stats.round_cts)


@contextmanager
def _bar(console: Console, text: str, total: int) -> Iterator[Callable[[Chunk], None]]:
    """Show a progress bar over tokens within the block; yield the function that advances it."""
    columns = (TextColumn(text), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    off = not console.is_terminal  # else it leaves an empty line
    with Progress(*columns, transient=True, console=console, disable=off) as progress:
        task = progress.add_task(text, total=total)
        yield lambda chunk: progress.advance(task, len(chunk.token_ids))


def _compare_ancestry(
    job: Job,
    load: Any,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    interrupt: Interrupt,
    console: Console,
) -> None:
    """Print accept lengths with the true ancestors and with SGLang's reading of the branches."""
    results = {}
    for ancestry in ("exact", "branch"):
        with load(ancestry=ancestry) as engine:
            outputs = timed(engine, prompts, params, interrupt).outputs
            results[ancestry] = {
                "accept_len": mean_accept_len(outputs),
                "rounds": sum(output.verify_ct for output in outputs),
            }
        if interrupt.asked:
            return
    if job.json:
        print(json.dumps(results))
        return
    table = Table(title="draft tokens attend to")
    for column in ("", "accept length", "rounds"):
        table.add_column(column)
    names = {"exact": "their true ancestors", "branch": "their branch's slots (upstream)"}
    for ancestry, result in results.items():
        table.add_row(names[ancestry], f"{result['accept_len']:.3f}", str(result["rounds"]))
    console.print(table)
