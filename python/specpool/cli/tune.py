"""`specpool tune`: measures which draft shapes are worth it on a model and its prompts.

It writes a file for `EngineConfig.adaptive`, with a range for each measured batch size.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from specpool._core import Shape
from specpool.checks import check_choice, check_int
from specpool.cli.generate.report import mean_accept_len
from specpool.cli.options import checks
from specpool.cli.options.drafts import draft_of
from specpool.cli.options.groups import ModelOptions, PlaceOptions, loading_of
from specpool.cli.options.prompts import Given, PromptValue, read_prompts
from specpool.cli.results import Result, as_json, check_out, check_plot, machine
from specpool.engine.sampling_params import SamplingParams
from specpool.engine.shape_names import chain, depth_order, name_of, parse_shape
from specpool.engine.shapes import AdaptiveConfig
from specpool.engine.shapes.config import POLICIES
from specpool.errors import ConfigError, CorruptState

if TYPE_CHECKING:
    from specpool.engine.engine import Engine

CANDIDATES = (Shape.none(), *map(chain, (1, 2, 3, 5, 7)), Shape.eagle(4, 4, 16))
BATCHES = (1, 8, 32)
#: The least number of prompts of a run, if none are given.
NUM_BUILT_IN = 4
#: The least share of the best shape's tokens per second that makes a shape a candidate.
REACH = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneJob:
    """The arguments of the command line."""

    models: ModelOptions
    prompts: Given
    candidates: list[str]
    batch_sizes: list[int]
    num_tokens: int
    repeats: int
    policy: str
    place: PlaceOptions
    out: Path | None
    force: bool
    json: bool
    plot: Path | None


@dataclass(frozen=True, slots=True)
class Cell:
    """The measured speed of a shape at a batch size."""

    tokens_per_second: float
    accept_len: float  # mean, bonus included


#: Batch size (ascending) -> shape -> its speed.
Cells = Mapping[int, Mapping[Shape, Cell]]


def run(job: TuneJob) -> None:
    """Measure, print, and write the file if asked.

    Raises:
        ConfigError: an option cannot work; nothing is written then.
    """
    check_int("tokens", job.num_tokens, 1, 1 << 20)
    check_int("repeats", job.repeats, 1, 1 << 16)
    checks.check_place(device=job.place.device, threads=job.place.threads, dtype=job.place.dtype)
    check_choice("policy", job.policy, POLICIES)
    for batch in job.batch_sizes:
        check_int("batch", batch, 1, 1 << 16)
    shapes = parse_candidates(job.candidates)
    if job.plot is not None:
        check_plot(job.plot)
    if job.out is not None:
        check_out(job.out, force=job.force)
    elif job.force:
        raise ConfigError("--force says to write over a file: give --out too")
    target = job.models.target
    draft = draft_of(target, job.models.draft)
    if draft is None:
        checks.check_models(target, ())
        raise ConfigError("tune needs a draft model: give --draft")
    batch_sizes = sorted({*job.batch_sizes})
    count = max(NUM_BUILT_IN, batch_sizes[-1])
    prompts = read_prompts(job.prompts, target, count)
    is_given = bool(job.prompts)
    checks.check_models(target, [draft])
    checks.check_prompts(target, prompts)
    checks.start_torch(job.place.threads)
    from specpool.engine.engine import Engine

    with Engine.from_pretrained(
        **loading_of(job.models, job.place, {}),
        shape=shapes[0],
        shapes=shapes,
        max_batch=batch_sizes[-1],
        prefix_cache=False,  # every candidate computes the same prompts
    ) as engine:
        cells = {}
        console = Console(stderr=True)
        with Progress(transient=True, console=console, disable=not console.is_terminal) as progress:
            for batch in batch_sizes:
                num_texts = max(len(prompts) if is_given else NUM_BUILT_IN, batch)
                texts = [prompts[i % len(prompts)] for i in range(num_texts)]
                task = progress.add_task(f"batch {batch}", total=job.repeats)
                runs = _ShapeRuns(engine, texts, batch, job.num_tokens)
                for _ in range(job.repeats):
                    runs.turn(shapes)
                    progress.advance(task)
                cells[batch] = runs.cells()
    _report(job, cells)


def _report(job: TuneJob, cells: Mapping[int, Mapping[Shape, Cell]]) -> None:
    """Print the results, draw them and write the configuration, as the options say."""
    content = configuration(cells, job.policy)
    if job.json:
        report = json.loads(
            as_json(machine(job.place.device, job.place.threads, ("torch",)), results(cells))
        )
        print(json.dumps(report | {"configuration": content}, indent=1))
    else:
        console = Console()
        Console(width=max(console.width, 24 + 24 * len(cells))).print(_table(job, cells))
    if job.plot is not None:
        _draw(cells, job.plot)
    if job.out is not None:
        write(content, job.out, force=job.force)
        Console(stderr=job.json, highlight=False).print(f"written: {job.out}", soft_wrap=True)


def parse_candidates(texts: Sequence[str]) -> tuple[Shape, ...]:
    """Return the shapes that the options name; an option may name several, with commas between.

    Raises:
        ConfigError: a text has another form, EAGLE cannot build a shape, or one is named twice.
    """
    shapes: list[Shape] = []
    for text in ",".join(texts).split(",") if texts else ():
        shape = parse_shape("--candidates", text.strip())
        if shape in shapes:
            raise ConfigError(f"--candidates hold {name_of(shape)} twice")
        shapes.append(shape)
    return tuple(sorted(shapes or CANDIDATES, key=depth_order))


class _ShapeRuns:
    """Runs of each shape in turn, in batches of one size."""

    def __init__(
        self, engine: Engine, texts: list[PromptValue], batch_size: int, num_tokens: int
    ) -> None:
        self._engine = engine
        self._groups = [
            texts[start : start + batch_size] for start in range(0, len(texts), batch_size)
        ]
        self._params = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
        self._rates: dict[Shape, list[float]] = {}
        self._accept_len: dict[Shape, float] = {}

    def turn(self, shapes: Sequence[Shape]) -> None:
        """Run each shape once; before a shape's first run, warm it up."""
        for shape in shapes:
            if shape not in self._rates:
                params = SamplingParams(max_new_tokens=8, ignore_eos=True)
                self._engine.generate(self._groups[0], params, shape=shape, progress=False)
            outputs = []
            start = time.perf_counter()
            for group in self._groups:
                outputs += self._engine.generate(group, self._params, shape=shape, progress=False)
            seconds = time.perf_counter() - start
            for output in outputs:
                if output.error is not None:
                    raise ConfigError(f"{name_of(shape)}, prompt {output.index}: {output.error}")
            num_tokens = sum(len(output.token_ids) for output in outputs)
            self._rates.setdefault(shape, []).append(num_tokens / seconds)
            self._accept_len[shape] = mean_accept_len(outputs)

    def cells(self) -> dict[Shape, Cell]:
        """Return each shape's median speed."""
        return {
            shape: Cell(statistics.median(rates), self._accept_len[shape])
            for shape, rates in self._rates.items()
        }


def best_of(cells: Mapping[Shape, Cell]) -> Shape:
    """Return the shape with the most tokens per second."""
    return max(cells, key=lambda shape: cells[shape].tokens_per_second)


def configuration(cells: Cells, policy: str) -> dict[str, Any]:
    """Return the file's content: for each batch size the shapes within `REACH` of the best.

    A range reaches up to the next measured batch size, so it also has the shapes that are within
    reach there. Plain decoding always stays, for texts that are harder to guess. Policy `ema` knows
    shapes by their depth, so only the best shape of each depth stays.
    """
    content: dict[str, Any] = {"policy": policy}
    for size, upper in pairwise([*cells, max(cells)]):
        candidates = {
            shape
            for batch_size in (size, upper)
            for shape, cell in cells[batch_size].items()
            if cell.tokens_per_second
            >= REACH * cells[batch_size][best_of(cells[batch_size])].tokens_per_second
            or not shape.num_steps
        }
        if policy == "ema":
            depths = {shape.num_steps for shape in candidates}
            candidates = {
                best_of({s: cells[size][s] for s in candidates if s.num_steps == depth})
                for depth in depths
            }
        names = [name_of(shape) for shape in sorted(candidates, key=depth_order)]
        content[str(size)] = {"candidates": names}
    return content


def write(content: Mapping[str, Any], path: Path, *, force: bool) -> None:
    """Write the file whole or not at all, after reading it back.

    Raises:
        ConfigError: the file cannot be written, or exists now and `force` is not set.
        CorruptState: it reads back as another configuration.
    """
    wanted = AdaptiveConfig.from_dict(content)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in content.items()]
        temporary.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
        if (written := AdaptiveConfig.from_file(temporary)) != wanted:
            raise CorruptState(f"{path} would read as {written}, not as {wanted}")
        check_out(path, force=force)
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        temporary.unlink(missing_ok=True)


def results(cells: Cells) -> list[Result]:
    """Return every figure, beside that of the best shape of its batch size."""
    figures = []
    for size, of_shapes in cells.items():
        best = best_of(of_shapes)
        for shape, cell in of_shapes.items():
            name = f"batch {size}, {name_of(shape)}"
            best_rate = of_shapes[best].tokens_per_second
            figures += [
                Result(
                    name,
                    cell.tokens_per_second,
                    "tokens/s",
                    f"the best, {name_of(best)}",
                    best_rate,
                ),
                Result(f"{name}: accept length", cell.accept_len, "tokens/round", "plain", 1.0),
            ]
    return figures


def _table(job: TuneJob, cells: Cells) -> Table:
    table = Table(
        title=f"tune: {job.models.target}, {job.num_tokens} tokens, medians of {job.repeats}",
        caption="tokens/s, of the best (*), and accept length: tokens a round, bonus included",
    )
    table.add_column("shape")
    for size in cells:
        table.add_column(f"batch {size}", justify="right", no_wrap=True)
    for shape in next(iter(cells.values())):
        columns = []
        for of_shapes in cells.values():
            cell, best = of_shapes[shape], best_of(of_shapes)
            share = cell.tokens_per_second / of_shapes[best].tokens_per_second
            text = f"{cell.tokens_per_second:,.0f}  {share:.2f}  {cell.accept_len:.2f}"
            columns.append(f"[bold]* {text}[/bold]" if shape == best else text)
        table.add_row(name_of(shape), *columns)
    return table


def _draw(cells: Cells, path: Path) -> None:
    """Draw tokens per second over the batch size, a line for each shape.

    Raises:
        ConfigError: the file cannot be written.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    sizes = [*cells]
    for shape in cells[sizes[0]]:
        rates = [cells[size][shape].tokens_per_second for size in sizes]
        axes.plot(sizes, rates, marker="o", label=name_of(shape))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_xlabel("batch size")
    axes.set_ylabel("tokens/s")
    axes.set_title("tune")
    axes.legend(fontsize="small")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write the picture {path}: {error}") from None
    pyplot.close(figure)
