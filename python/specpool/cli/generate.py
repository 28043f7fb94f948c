"""`specpool generate`: text as it comes, the figures, and the proof against plain decoding."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import FrameType
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
from rich.text import Text

from specpool._core import Shape
from specpool.adaptive.shapes import name_of as name_of_shape
from specpool.cli import checks
from specpool.cli.prompt_files import Given, PromptValue, read_prompts, shown
from specpool.cli.shapes import shape_of
from specpool.config import SamplingParams
from specpool.errors import ConfigError
from specpool.names import ngram_of
from specpool.output import Chunk
from specpool.request import RequestOutput

if TYPE_CHECKING:
    from specpool.engine import Engine
    from specpool.prompts import Prompt

NUM_BUILT_IN_PROMPTS = 3
# Ancestors differ in trees only, and by little: many prompts and a tree unless others are given.
NUM_ANCESTRY_PROMPTS = 24
ANCESTRY_SHAPE = Shape.eagle(4, 4, 16)
# Round an accepted draft where there is no colour: single angle quotation marks.
MARKS = ("\u2039", "\u203a")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What the command line asked for."""

    target: str
    draft: str | None
    prompts: Given
    chat: bool
    shape: str | None
    dtype: str | None
    device: str
    threads: int
    compare_ancestry: bool
    json: bool
    sampling: dict[str, Any]
    options: dict[str, Any]


def draft_of(target: str, draft: str | None) -> str | None:
    """The draft model to load: the embedded head goes with the embedded target."""
    if draft is None:
        return "specpool/tiny-eagle" if target == "specpool/tiny" else None
    return None if draft == "none" else draft


def prompts_of(job: Job, given: Sequence[PromptValue]) -> list[Prompt]:
    """What the engine is given; with `--chat` a text is a chat of one message."""
    return [
        [{"role": "user", "content": each}] if job.chat and isinstance(each, str) else each
        for each in given
    ]


class Interrupt:
    """Ctrl-C asks to stop after the round; a second one stops at once."""

    def __init__(self) -> None:
        self.asked = False

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Catch SIGINT inside the block."""
        before = signal.signal(signal.SIGINT, self._ask)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


class Printer:
    """Prints chunks as they come, one prompt after the other, accepted drafts marked."""

    def __init__(self, console: Console, prompts: Sequence[str], num_samples: int = 1) -> None:
        self._console, self._prompts, self._num_samples = console, prompts, num_samples
        num_outputs = len(prompts) * num_samples
        self._waiting: list[list[tuple[str, bool]]] = [[] for _ in range(num_outputs)]
        self._done = [False] * num_outputs
        self._current = -1
        self._advance()

    def chunk(self, chunk: Chunk) -> None:
        """Print a chunk, or keep it until the outputs before are done."""
        place = chunk.index * self._num_samples + chunk.sample
        self._waiting[place] += chunk.pieces
        if place == self._current:
            self._flush()

    def done(self, output: RequestOutput) -> None:
        """An output is complete."""
        self._done[output.index * self._num_samples + output.sample] = True
        while self._current < len(self._done) and self._done[self._current]:
            self._console.print()
            self._advance()

    def _advance(self) -> None:
        self._current += 1
        if self._current < len(self._done):
            index, sample = divmod(self._current, self._num_samples)
            self._console.rule(name_of(index, sample, self._num_samples))
            if sample == 0:
                self._print(self._prompts[index], "dim")
            self._flush()

    def _flush(self) -> None:
        for text, from_draft in self._waiting[self._current]:
            if from_draft and self._console.color_system is None:
                text = f"{MARKS[0]}{text}{MARKS[1]}"
            style = "green" if from_draft else "bold yellow"
            self._print(text, style)
        self._waiting[self._current].clear()

    def _print(self, text: str, style: str) -> None:
        """As it is: a `Text` is not searched for markup and names of emoji."""
        self._console.print(Text(text, style=style), end="", soft_wrap=True)


def name_of(index: int, sample: int, num_samples: int) -> str:
    """How an output is called."""
    return f"prompt {index + 1}" + (f", sample {sample + 1}" if num_samples > 1 else "")


@dataclass(slots=True)
class Timed:
    """Outputs of one run, and how long the engine took."""

    outputs: list[RequestOutput]
    seconds: float

    @property
    def num_tokens(self) -> int:
        """Generated tokens."""
        return sum(len(output.token_ids) for output in self.outputs)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second."""
        return self.num_tokens / self.seconds if self.seconds else 0.0


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
    """Run the prompts; the time is the engine's alone, without what is done with the chunks."""
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


def accept_histogram(outputs: Sequence[RequestOutput]) -> dict[int, int]:
    """Rounds by accept length, bonus included."""
    counts = Counter(n for output in outputs for n in output.accept_lens)
    return dict(sorted(counts.items()))


def mean_accept_len(outputs: Sequence[RequestOutput]) -> float:
    """Mean accept length over all rounds, bonus included."""
    rounds = sum(output.verify_ct for output in outputs)
    return sum(sum(output.accept_lens) for output in outputs) / rounds if rounds else 0.0


def run(job: Job) -> None:
    """Run the command.

    Raises:
        ConfigError: an option that cannot work.
    """
    checks.check_place(device=job.device, threads=job.threads, dtype=job.dtype)
    shape = shape_of(job.shape)
    if shape is None and job.compare_ancestry:
        shape = ANCESTRY_SHAPE
    params = checks.sampling_params(job.sampling)
    count = NUM_ANCESTRY_PROMPTS if job.compare_ancestry else NUM_BUILT_IN_PROMPTS
    draft = draft_of(job.target, job.draft)
    if job.compare_ancestry:
        _check_ancestry(job, shape, draft)
    checks.engine_config(shape, draft, job.options)
    checks.check_models(job.target, draft)
    texts = read_prompts(job.prompts, job.target, count)
    checks.start_torch(job.threads)
    from specpool.engine import Engine

    console = Console(stderr=job.json)

    def load(**options: Any) -> Engine:
        with Progress(
            SpinnerColumn(),
            TextColumn("loading {task.description}"),
            transient=True,
            console=console,
        ) as progress:
            progress.add_task(f"{job.target} and {draft}")
            return Engine.from_pretrained(
                job.target,
                draft=draft,
                dtype=job.dtype,
                device=job.device,
                shape=shape,
                **job.options,
                **options,
            )

    interrupt = Interrupt()
    with interrupt.handled():
        if job.compare_ancestry:
            _compare_ancestry(job, load, prompts_of(job, texts), params, interrupt, console)
        else:
            with load() as engine:
                _generate(job, engine, texts, params, interrupt, console)
    if interrupt.asked:
        console.print("interrupted: requests aborted, pages returned")
        raise SystemExit(130)


def _check_ancestry(job: Job, shape: Shape | None, draft: str | None) -> None:
    """Raise `ConfigError` where both ancestries would be the same."""
    if draft is None or ngram_of(draft) is not None:
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
    for kind in (None, Shape.none()):
        timed(engine, prompts[:1], warm_up, interrupt, shape=kind)
    total = len(prompts) * params.n * params.max_new_tokens
    before = _chosen(engine)
    if job.json:
        with _bar(console, "generating", total) as on_chunk:
            drafted = timed(engine, prompts, params, interrupt, on_chunk=on_chunk)
    else:
        printer = Printer(console, [shown(text) for text in texts], params.n)
        drafted = timed(
            engine, prompts, params, interrupt, on_chunk=printer.chunk, on_output=printer.done
        )
    peak = list(engine.peak_pages)
    chosen = _chosen(engine) - before
    with _bar(console, "decoding plainly, for comparison", total) as on_chunk:
        plain = timed(engine, prompts, params, interrupt, shape=Shape.none(), on_chunk=on_chunk)
    if interrupt.asked:
        return
    report = _report(engine, drafted, plain, peak)
    if chosen:
        report["chosen"] = {name_of_shape(shape): count for shape, count in chosen.most_common()}
    if job.json:
        report["outputs"] = [asdict(output) for output in drafted.outputs]
        print(json.dumps(report))
    else:
        console.print(_table(report))
    for output in drafted.outputs:
        if output.error is not None:
            name = name_of(output.index, output.sample, params.n)
            print(f"error: {name}: {output.error}", file=sys.stderr)
    if report["errors"]:
        raise SystemExit(2)


def _chosen(engine: Engine) -> Counter[Shape]:
    """Rounds by the shape that a controller chose."""
    stats = engine.stats().adaptive
    return Counter({} if stats is None else stats.round_cts)


@contextmanager
def _bar(console: Console, text: str, total: int) -> Iterator[Callable[[Chunk], None]]:
    """A progress bar over tokens; gives what advances it."""
    columns = (TextColumn(text), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, transient=True, console=console) as progress:
        task = progress.add_task(text, total=total)
        yield lambda chunk: progress.advance(task, len(chunk.token_ids))


def _report(
    engine: Engine, drafted: Timed, plain: Timed, peak_pages: Sequence[int]
) -> dict[str, Any]:
    pairs = zip(drafted.outputs, plain.outputs, strict=True)
    identical = all(a.token_ids == b.token_ids for a, b in pairs)
    shape = engine.shape
    return {
        "shape": [shape.num_steps, shape.topk, shape.num_draft_tokens],
        "rounds": sum(output.verify_ct for output in drafted.outputs),
        "accept_len": mean_accept_len(drafted.outputs),
        "accept_histogram": accept_histogram(drafted.outputs),
        "tokens": drafted.num_tokens,
        "tokens_per_second": drafted.tokens_per_second,
        "plain_tokens_per_second": plain.tokens_per_second,
        "speedup": drafted.tokens_per_second / (plain.tokens_per_second or 1.0),
        "identical_to_plain": identical,
        "errors": [output.error for output in drafted.outputs if output.error is not None],
        "pools": [
            {
                "group": pool.name,
                "pages": pool.num_pages,
                "peak_used": peak,
                "free": pool.free_pages,
                "leaked": pool.num_pages - pool.free_pages,
            }
            for pool, peak in zip(engine.pool_stats(), peak_pages, strict=True)
        ],
    }


def _table(report: dict[str, Any]) -> Table:
    table = Table(show_header=False, title="specpool generate")
    steps, topk, nodes = report["shape"]
    if "chosen" in report:
        counts = ", ".join(f"{name} {count}" for name, count in report["chosen"].items())
        table.add_row("shapes, rounds of each", counts)
    else:
        table.add_row("shape", f"num_steps {steps}, topk {topk}, num_draft_tokens {nodes}")
    table.add_row("rounds", str(report["rounds"]))
    table.add_row("accept length", f"{report['accept_len']:.2f} tokens a round, bonus included")
    most = max(report["accept_histogram"].values(), default=1)
    for length, count in report["accept_histogram"].items():
        table.add_row(f"  {length}", f"{'█' * max(1, round(24 * count / most))} {count}")
    table.add_row("speed", f"{report['tokens_per_second']:.0f} tokens/s")
    table.add_row(
        "plain decoding, same run",
        f"{report['plain_tokens_per_second']:.0f} tokens/s: drafting is {report['speedup']:.2f}x",
    )
    for pool in report["pools"]:
        table.add_row(
            f"{pool['group']} pages",
            f"{pool['pages']}: {pool['peak_used']} at the peak, {pool['free']} free, "
            f"{pool['leaked']} leaked",
        )
    table.add_row("identical to plain decoding", "yes" if report["identical_to_plain"] else "NO")
    for error in report["errors"]:
        table.add_row("error", error)
    return table


def _compare_ancestry(
    job: Job,
    load: Any,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    interrupt: Interrupt,
    console: Console,
) -> None:
    """Accept lengths with the true ancestors and with upstream's reading of the branches."""
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
