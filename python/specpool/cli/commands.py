"""The typer commands and their options, apart from those that run an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import specpool
from specpool.checks import check_int
from specpool.cli.bench_serve.options import ServeBenchJob
from specpool.cli.engine_commands import chat, generate, serve, train, tune
from specpool.cli.options.derived import OptionsOf, Values, grouped
from specpool.cli.options.names import NamingGroup, help_if_alone
from specpool.cli.options.sections import SectionedCommand
from specpool.cli.options.types import (
    DeviceName,
    Json,
    Plot,
    Target,
    Threads,
    TrustRemoteCode,
)
from specpool.cli.plan.question import Question
from specpool.engine.config import EngineConfig
from specpool.errors import ConfigError

# rich_markup_mode=None: help is not cut at the terminal's width, and an error is one line.
app = typer.Typer(
    cls=NamingGroup,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="KV-cache memory manager for speculative decoding.",
)
app.command(cls=SectionedCommand)(generate)
app.command(cls=SectionedCommand)(chat)
app.command("serve", cls=SectionedCommand)(serve)
app.command(cls=SectionedCommand)(tune)
app.command(cls=SectionedCommand)(train)

bench = typer.Typer(
    cls=NamingGroup,
    rich_markup_mode=None,
    help="Speed of your own models, beside a reference in the same run.",
)
app.add_typer(bench, name="bench")


@bench.callback(invoke_without_command=True)
def bench_options(context: typer.Context) -> None:
    """Speed of your own models, beside a reference in the same run."""
    help_if_alone(context)


@bench.command("generate", cls=SectionedCommand)
@grouped
def bench_generate(
    *,
    target: Target = "specpool/tiny",
    draft: Annotated[
        str | None, typer.Option(help="EAGLE head. [default: both embedded ones, in turn]")
    ] = None,
    engine: Annotated[Values, OptionsOf(EngineConfig, only=("shape", "adaptive"))],
    tokens: Annotated[
        list[int] | None,
        typer.Option(
            help="Tokens of each text; may be repeated. [default: 96 and 400]",
            rich_help_panel="Measurement",
        ),
    ] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option(help="Rows that run at once; may be repeated. [default: 1 and 8]"),
    ] = None,
    requests: Annotated[
        int,
        typer.Option(
            help="Requests to run at once, and one after another; 0 = none.",
            rich_help_panel="Measurement",
        ),
    ] = 64,
    repeats: Annotated[
        int,
        typer.Option(help="Runs of each; the median counts.", rich_help_panel="Measurement"),
    ] = 5,
    device: DeviceName = "cpu",
    threads: Threads = 1,
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
    plot: Plot = None,
) -> None:
    """Compare drafting, plain decoding on pages, and transformers' own generate."""
    from specpool.cli.bench import GenerateBenchJob, generate

    generate(
        GenerateBenchJob(
            target=target,
            draft=draft,
            options=engine,
            num_tokens=tokens or [96, 400],
            batch_sizes=batch or [1, 8],
            num_requests=requests,
            repeats=repeats,
            device=device,
            threads=threads,
            trust_remote_code=trust_remote_code,
            json=json,
            plot=plot,
        )
    )


@bench.command("serve", cls=SectionedCommand)
@grouped
def bench_serve(*, job: ServeBenchJob) -> None:
    """Drive an OpenAI server with a seeded trace: times, goodput and accept length."""
    from specpool.cli.bench_serve.command import run

    run(job)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def deploy(
    context: typer.Context,
    replicas: Annotated[
        str, typer.Option(help="How many replicas, or the fewest and the most, such as 2:8.")
    ] = "1",
    gpus: Annotated[float, typer.Option(help="GPUs of each replica.")] = 0.0,
    cpus: Annotated[float, typer.Option(help="CPU cores of each replica.")] = 1.0,
    ranks: Annotated[
        int, typer.Option(help="Processes of each replica that share the target.")
    ] = 1,
    app: Annotated[str, typer.Option(help="The application's name in the cluster.")] = "specpool",
    stuck_timeout: Annotated[
        float, typer.Option(help="Seconds until an engine that does not answer is killed.")
    ] = 60.0,
    apply: Annotated[
        bool, typer.Option("--apply", help="Apply the config to a cluster instead of printing it.")
    ] = False,
    address: Annotated[
        str, typer.Option(help="The cluster's dashboard, for --apply.")
    ] = "http://127.0.0.1:8265",
    wait: Annotated[
        float, typer.Option(help="Seconds to wait until the replicas run; 0 = do not wait.")
    ] = 600.0,
) -> None:
    """Print Ray Serve's config for replicas of the server, or apply it; `serve`'s options go too.

    --host and --port are those of Serve's proxies.
    """
    from specpool.cli.deploy import DeployJob, run

    run(
        DeployJob(
            replicas=replicas,
            gpus=gpus,
            cpus=cpus,
            ranks=ranks,
            app=app,
            stuck_timeout=stuck_timeout,
            apply=apply,
            address=address,
            wait=wait,
            words=[word for word in context.args if word != "--"],
        )
    )


def _version(show: bool) -> None:
    if show:
        typer.echo(f"specpool {specpool.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """KV-cache memory manager for speculative decoding."""
    help_if_alone(context)


@app.command(cls=SectionedCommand)
@grouped
def plan(*, question: Question, json: Json = False) -> None:
    """Show what an engine would have room for: pages, rows, requests, and which limit binds.

    Requests "at once" are those that the scheduler admits together to an empty pool. They grow, so
    some may be retracted later and come back. Requests "to the end" run side by side from prompt to
    last token and never wait for a page, so none is retracted, whatever their drafts do. No weights
    are read.
    """
    from specpool.cli.plan.plan import plan as run

    run(question, as_json=json)


@app.command()
def info(json: Json = False) -> None:
    """Show installed packages, and which back ends work here."""
    from specpool.cli.info import show

    show(json=json)


@app.command()
def doctor(
    engine: Annotated[str, typer.Option(help="Engine with the plug-in: vllm or sglang.")],
    level: Annotated[
        str | None,
        typer.Option(
            "--try", help="Load the plug-in at this level in a process, and say whether it serves."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Show whether the plug-in of an engine is on here, at which level, and what it has done.

    It reads what the plug-in's processes write to the folder SPECPOOL_STATUS. Exit code 1: the
    plug-in is not on, or an engine freed wrongly.
    """
    from specpool.cli.doctor import doctor as run

    if not run(engine, level=level, json=json):
        raise typer.Exit(1)


Log = Annotated[Path, typer.Argument(help="An event log: Ledger(record=...), SPECPOOL_RECORD.")]


@app.command()
def replay(
    log: Log,
    against: Annotated[
        Path | None, typer.Option(help="Find the first event that differs from this log's.")
    ] = None,
    at: Annotated[
        int | None,
        typer.Option(
            help="Show the state right after this step's preparation; of a block pool's log, "
            "after this call."
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="The summary alone.")] = False,
) -> None:
    """Run an event log again. Exit code 1: two logs differ; 2: a log cannot be read or replayed."""
    from rich.console import Console

    from specpool.record import blocks
    from specpool.record import replay as command

    if against is not None and at is not None:
        raise ConfigError("--against and --at exclude each other: give one")
    if quiet and (against is not None or at is not None):
        raise ConfigError("--quiet is for a whole log: leave out --against and --at")
    if blocks.is_pool_log(log):
        _refuse_for_a_pool(log, {"--against": against})
        if at is None:
            blocks.replay(log, quiet=quiet)
        else:
            blocks.show(log, at=at)
        return
    if against is not None:
        if not command.against(log, against, Console(highlight=False)):
            raise typer.Exit(1)
    elif at is not None:
        command.at_step(log, at, Console(highlight=False))
    else:
        command.run(log, quiet=quiet)


def _refuse_for_a_pool(log: Path, options: dict[str, object]) -> None:
    """Refuse options that need a ledger's rows or its events."""
    given = [name for name, value in options.items() if value is not None]
    if given:
        names = " and ".join(given)
        raise ConfigError(f"{names}: {log} is the log of a BlockPool; only a ledger's log has that")


@app.command()
def inspect(
    log: Log,
    at: Annotated[
        int | None,
        typer.Option(
            help="Right after this step's preparation; of a block pool's log, after this call. "
            "[default: the log's end]"
        ),
    ] = None,
    row: Annotated[
        int | None, typer.Option(help="Row to draw. [default: one with a round in flight]")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write one self-contained page with a slider instead.")
    ] = None,
    frames: Annotated[
        int | None, typer.Option(help="Most events of the page. [default: 400]")
    ] = None,
) -> None:
    """Draw the pools and the rows of a recorded ledger. Exit code 2: the log is damaged.

    A damaged log is drawn up to the damage. Of a recorded block pool it lists the blocks in use.
    """
    from rich.console import Console

    from specpool.record import blocks
    from specpool.record import inspect as command

    if frames is not None:
        check_int("frames", frames, 2, 1 << 20)
        if html is None:
            raise ConfigError("--frames needs a page: give --html too")
    if blocks.is_pool_log(log):
        _refuse_for_a_pool(log, {"--row": row, "--html": html})
        blocks.show(log, at=at)
        return
    if html is None:
        command.show(log, Console(highlight=False), step=at, row=row)
        return
    page = command.write_page(log, html, step=at, row=row, max_frames=frames or 400)
    shown = f"events {page.first} to {page.last}"
    typer.echo(f"{html}: {shown} of {page.num_events} in {log}")
    if page.last - page.first < page.num_events:
        typer.echo(f"--frames {page.num_events + 1} shows them all, --at N those around a step N")
    if page.damage is not None:
        raise page.damage
