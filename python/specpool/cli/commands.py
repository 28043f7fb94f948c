"""The commands and their options; `bench` has a file of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import specpool
from specpool.cli.bench_commands import bench
from specpool.cli.options import (
    Adaptive,
    DeviceName,
    Draft,
    Json,
    Plot,
    ShapeText,
    Target,
    TrustRemoteCode,
)
from specpool.config import HEADROOM, Layout, Placement, Policy, check_int
from specpool.errors import ConfigError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="KV-cache memory manager for speculative decoding.",
)
app.add_typer(bench, name="bench")


def _version(show: bool) -> None:
    if show:
        typer.echo(f"specpool {specpool.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """KV-cache memory manager for speculative decoding."""


@app.command()
def generate(
    target: Target = "specpool/tiny",
    draft: Draft = None,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="A prompt; may be repeated.")
    ] = None,
    prompt_file: Annotated[
        str | None,
        typer.Option(help="A file with one prompt per line; '-' = one prompt from standard input."),
    ] = None,
    shape: ShapeText = None,
    adaptive: Adaptive = None,
    page_size: Annotated[int, typer.Option(help="Slots per page.")] = 16,
    placement: Annotated[Placement, typer.Option(help="Groups of their own, or one.")] = "split",
    policy: Annotated[Policy, typer.Option(help="How much a round reserves.")] = "exact",
    layout: Annotated[Layout, typer.Option(help="Where drafts lie in a row.")] = "auto",
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16, float16 or auto. [default: float32 on a CPU]"),
    ] = None,
    device: DeviceName = "cpu",
    temperature: Annotated[float, typer.Option(help="0 = greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 = all.")] = 0,
    top_p: Annotated[float, typer.Option(help="1 = all.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the sampled text.")] = 0,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n")] = 96,
    samples: Annotated[int, typer.Option(help="Of each prompt, with seeds that follow.")] = 1,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="A text ends before this string; may be repeated."),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Prompts are a user's messages, for the chat template.")
    ] = False,
    batch: Annotated[int, typer.Option(help="Requests that run at once.")] = 8,
    overlap_depth: Annotated[
        int, typer.Option(help="1 = a round is prepared before the last one's results are read.")
    ] = 0,
    worker: Annotated[
        str, typer.Option(help="v2, v1 (gives back what a round reserved, after each) or auto.")
    ] = "auto",
    prefill_tokens: Annotated[
        int, typer.Option(help="Of one prefill step at most; longer prompts come in chunks.")
    ] = 1024,
    mixed_chunks: Annotated[
        bool, typer.Option("--mixed-chunks", help="Chunks share the round's forward of the target.")
    ] = False,
    max_context_len: Annotated[int | None, typer.Option(help="[default: the model's]")] = None,
    num_pages: Annotated[
        int | None, typer.Option(help="Pages per group. [default: what free memory holds]")
    ] = None,
    busy_check: Annotated[
        int | None,
        typer.Option(
            help="Before each turn: 1 = sums, 2 = full audit. [default: SPECPOOL_BUSY_CHECK or 0]"
        ),
    ] = None,
    threads: Annotated[int, typer.Option(help="CPU threads of torch.")] = 1,
    trust_remote_code: TrustRemoteCode = False,
    compare_ancestry: Annotated[
        bool,
        typer.Option(help="Run exact ancestry and upstream's reading; print both accept lengths."),
    ] = False,
    json: Json = False,
) -> None:
    """Generate with drafts, then decode plainly on the same pages and compare."""
    from specpool.cli.generate import Job, run

    run(
        Job(
            target=target,
            draft=draft,
            prompts=prompt or [],
            prompt_file=prompt_file,
            chat=chat,
            shape=shape,
            dtype=dtype,
            device=device,
            threads=threads,
            compare_ancestry=compare_ancestry,
            json=json,
            sampling={
                "max_new_tokens": max_new_tokens,
                "temperature": temperature,
                "top_k": top_k,
                "top_p": top_p,
                "seed": seed,
                "n": samples,
                "stop": tuple(stop or ()),
            },
            options={
                "page_size": page_size,
                "placement": placement,
                "policy": policy,
                "layout": layout,
                "adaptive": adaptive,
                "max_batch": batch,
                "overlap_depth": overlap_depth,
                "worker": worker,
                "prefill_tokens": prefill_tokens,
                "mixed_chunks": mixed_chunks,
                "max_context_len": max_context_len,
                "num_pages": num_pages,
                **({} if busy_check is None else {"busy_check": busy_check}),
                "trust_remote_code": trust_remote_code,
            },
        )
    )


@app.command()
def chat(
    target: Target = "specpool/tiny",
    draft: Draft = None,
    system: Annotated[
        str | None, typer.Option(help="What the model is told first, on a line of its own.")
    ] = None,
    shape: ShapeText = None,
    adaptive: Adaptive = None,
    page_size: Annotated[int, typer.Option(help="Slots per page.")] = 16,
    placement: Annotated[Placement, typer.Option(help="Groups of their own, or one.")] = "split",
    policy: Annotated[Policy, typer.Option(help="How much a round reserves.")] = "exact",
    layout: Annotated[Layout, typer.Option(help="Where drafts lie in a row.")] = "auto",
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16, float16 or auto. [default: float32 on a CPU]"),
    ] = None,
    device: DeviceName = "cpu",
    temperature: Annotated[float, typer.Option(help="0 = greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 = all.")] = 0,
    top_p: Annotated[float, typer.Option(help="1 = all.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the sampled text.")] = 0,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", help="Of one answer.")
    ] = 256,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="An answer ends before this string; may be repeated."),
    ] = None,
    overlap_depth: Annotated[
        int, typer.Option(help="1 = a round is prepared before the last one's results are read.")
    ] = 0,
    prefill_tokens: Annotated[
        int, typer.Option(help="Of one prefill step at most; longer prompts come in chunks.")
    ] = 1024,
    max_context_len: Annotated[int | None, typer.Option(help="[default: the model's]")] = None,
    num_pages: Annotated[
        int | None, typer.Option(help="Pages per group. [default: what free memory holds]")
    ] = None,
    busy_check: Annotated[
        int | None,
        typer.Option(
            help="Before each turn: 1 = sums, 2 = full audit. [default: SPECPOOL_BUSY_CHECK or 0]"
        ),
    ] = None,
    threads: Annotated[int, typer.Option(help="CPU threads of torch.")] = 1,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Talk with a model: each turn computes its new tokens only. /help lists the commands.

    A target without a chat template, such as the embedded one, goes on with the text as it is.
    """
    from specpool.cli.chat import Job, run

    run(
        Job(
            target=target,
            draft=draft,
            system=system,
            shape=shape,
            dtype=dtype,
            device=device,
            threads=threads,
            sampling={
                "max_new_tokens": max_new_tokens,
                "temperature": temperature,
                "top_k": top_k,
                "top_p": top_p,
                "seed": seed,
                "stop": tuple(stop or ()),
            },
            options={
                "page_size": page_size,
                "placement": placement,
                "policy": policy,
                "layout": layout,
                "adaptive": adaptive,
                "overlap_depth": overlap_depth,
                "prefill_tokens": prefill_tokens,
                "max_context_len": max_context_len,
                "num_pages": num_pages,
                **({} if busy_check is None else {"busy_check": busy_check}),
                "trust_remote_code": trust_remote_code,
            },
        )
    )


@app.command()
def plan(
    memory: Annotated[str, typer.Option(help="Of the device, such as 80GiB (2^30) or 24G (10^9).")],
    target: Annotated[
        str | None,
        typer.Option(help="Target model: a folder, a hub name, or specpool/tiny. Or give numbers:"),
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Layers of the target.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Key and value heads of a layer.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Size of a head.")] = None,
    draft_layers: Annotated[
        int | None, typer.Option(help="Layers of the draft model. [default: 1, 0 with --draft]")
    ] = None,
    draft_kv_heads: Annotated[int | None, typer.Option(help="[default: the target's]")] = None,
    draft_head_dim: Annotated[int | None, typer.Option(help="[default: the target's]")] = None,
    draft: Draft = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16 or float16. [default: the model's, else bfloat16]"),
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="Bytes of the weights. [default: the model's, else 0]")
    ] = None,
    workspace: Annotated[str, typer.Option(help="Bytes for all else.")] = "0",
    shape: Annotated[
        list[str] | None,
        typer.Option(help="SxKxN, or a chain's depth; may be repeated. [default: 3]"),
    ] = None,
    max_context_len: Annotated[int | None, typer.Option(help="[default: the model's]")] = None,
    page_size: Annotated[int, typer.Option(help="Slots per page.")] = 16,
    placement: Annotated[Placement, typer.Option(help="Groups of their own, or one.")] = "split",
    policy: Annotated[Policy, typer.Option(help="How much a round reserves.")] = "exact",
    layout: Annotated[Layout, typer.Option(help="Where drafts lie in a row.")] = "auto",
    depth: Annotated[int, typer.Option(help="D: rounds prepared ahead (1 = overlap).")] = 0,
    max_batch: Annotated[
        int | None, typer.Option(help="Requests that run at once. [default: all that int32 allows]")
    ] = None,
    headroom: Annotated[
        int, typer.Option(help="Tokens of growth that admission asks for beside the next round.")
    ] = HEADROOM,
    prompt: Annotated[int | None, typer.Option(help="Tokens of a prompt.")] = None,
    output: Annotated[int | None, typer.Option(help="Tokens that a request generates.")] = None,
    live: Annotated[
        list[int] | None, typer.Option(help="Tokens of a request so far; may be repeated.")
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
) -> None:
    """Say what an engine would have room for: pages, rows, requests, and which limit binds.

    A number of requests "at once" is what the scheduler admits together to an empty pool; they
    grow, and some may be retracted later and come back. "To the end": so many run side by side
    from prompt to last token and never wait for a page, so none is retracted, whatever their drafts
    do. No weights are read.
    """
    from specpool.cli.plan import Question
    from specpool.cli.plan import plan as run

    run(
        Question(
            target=target,
            draft=draft,
            layers=layers,
            kv_heads=kv_heads,
            head_dim=head_dim,
            draft_layers=draft_layers,
            draft_kv_heads=draft_kv_heads,
            draft_head_dim=draft_head_dim,
            dtype=dtype,
            memory=memory,
            weights=weights,
            workspace=workspace,
            shapes=shape or [],
            max_context_len=max_context_len,
            page_size=page_size,
            placement=placement,
            policy=policy,
            layout=layout,
            overlap_depth=depth,
            max_batch=max_batch,
            headroom=headroom,
            prompt=prompt,
            output=output,
            live=live or [],
            trust_remote_code=trust_remote_code,
        ),
        as_json=json,
    )


@app.command()
def tune(
    target: Target = "specpool/tiny",
    draft: Draft = None,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="A prompt; may be repeated.")
    ] = None,
    prompt_file: Annotated[
        str | None,
        typer.Option(help="A file with one prompt per line; '-' = one prompt from standard input."),
    ] = None,
    candidates: Annotated[
        list[str] | None,
        typer.Option(
            help="Shapes: chain:S, tree:SxKxN or none; commas between, or repeated. [default: "
            "none, chains of 1, 2, 3, 5 and 7, and tree:4x4x16]"
        ),
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option(help="Rows that run at once. [default: 1, 8 and 32]")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Of each text, whatever ends it.")] = 96,
    repeats: Annotated[int, typer.Option(help="Runs of each; the median counts.")] = 3,
    policy: Annotated[str, typer.Option(help="Of the file: cost or ema.")] = "cost",
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16, float16 or auto. [default: float32 on a CPU]"),
    ] = None,
    device: DeviceName = "cpu",
    threads: Annotated[int, typer.Option(help="CPU threads of torch.")] = 1,
    trust_remote_code: TrustRemoteCode = False,
    out: Annotated[
        Path | None, typer.Option(help="Write the configuration, for --adaptive.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over a file.")] = False,
    json: Json = False,
    plot: Plot = None,
) -> None:
    """Find the draft shapes that are worth it on a model and its prompts, by batch size."""
    from specpool.cli.tune import BATCHES, Job, run

    run(
        Job(
            target=target,
            draft=draft,
            prompts=prompt or [],
            prompt_file=prompt_file,
            candidates=candidates or [],
            batch_sizes=batch or [*BATCHES],
            num_tokens=tokens,
            repeats=repeats,
            policy=policy,
            dtype=dtype,
            device=device,
            threads=threads,
            trust_remote_code=trust_remote_code,
            out=out,
            force=force,
            json=json,
            plot=plot,
        )
    )


@app.command()
def info(json: Json = False) -> None:
    """What is installed, and which back ends work here."""
    from specpool.cli.info import show

    show(json=json)


Log = Annotated[Path, typer.Argument(help="An event log: Ledger(record=...), SPECPOOL_RECORD.")]


@app.command()
def replay(
    log: Log,
    against: Annotated[
        Path | None, typer.Option(help="Find the first event that differs from this log's.")
    ] = None,
    at: Annotated[
        int | None, typer.Option(help="Show the state right after this step's preparation.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="The summary alone.")] = False,
) -> None:
    """Run an event log again. Exit code 1: two logs differ; 2: a log cannot be read or replayed."""
    from rich.console import Console

    from specpool.cli import replay as command

    if against is not None and at is not None:
        raise ConfigError("--against and --at are two questions: ask one")
    if against is not None:
        if not command.against(log, against, Console(highlight=False)):
            raise typer.Exit(1)
    elif at is not None:
        command.at_step(log, at, Console(highlight=False))
    else:
        command.run(log, quiet=quiet)


@app.command()
def inspect(
    log: Log,
    at: Annotated[
        int | None,
        typer.Option(help="Right after this step's preparation. [default: the log's end]"),
    ] = None,
    row: Annotated[
        int | None, typer.Option(help="Whose slots. [default: one with a round in flight]")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write one self-contained page with a slider instead.")
    ] = None,
    frames: Annotated[int, typer.Option(help="Most events of the page.")] = 400,
) -> None:
    """Draw the pools and the rows of a recorded ledger. Exit code 2: the log is damaged.

    A damaged log is drawn up to the damage.
    """
    from rich.console import Console

    from specpool.cli import inspect as command

    check_int("frames", frames, 2, 1 << 20)
    if html is None:
        command.show(log, Console(highlight=False), step=at, row=row)
        return
    page = command.write_page(log, html, step=at, row=row, max_frames=frames)
    typer.echo(f"{html}: events {page.first} to {page.last} of {log}")
    if page.damage is not None:
        raise page.damage


@app.command()
def sim(
    seed: Annotated[int, typer.Option(help="Decides every scenario.")] = 0,
    rounds: Annotated[float, typer.Option(help="Rounds in all, as in 1e6.")] = 2e4,
    check: Annotated[
        int,
        typer.Option(
            help="0 = the texts and ends of requests; 1 = also the pools' sums and who comes when; "
            "2 = also a full audit each turn, and every slot that is read or written."
        ),
    ] = 2,
    turns: Annotated[
        float | None,
        typer.Option(help="Sessions alone, until so many of their turns have ended, as in 1e5."),
    ] = None,
) -> None:
    """The scheduler and the ledger on a simulated device. Exit code 1: a law is broken."""
    from specpool.cli.sim import sim as run

    if not run(seed=seed, rounds=rounds, check=check, turns=turns):
        raise typer.Exit(1)
