"""The commands that run an engine, and their options: `generate`, `chat`, `serve`, `tune`."""

from __future__ import annotations

import functools
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from specpool.cli.options.groups import (
    AttentionOptions,
    CheckOptions,
    FormOptions,
    LayoutOptions,
    MemoryOptions,
    ModelOptions,
    PlaceOptions,
    PromptOptions,
    SamplingOptions,
    ServerOptions,
    StepOptions,
    engine_options,
    grouped,
)
from specpool.cli.options.types import (
    Adaptive,
    DrafterName,
    Json,
    OverlapDepth,
    Plot,
    ShapeText,
    Stop,
)


@grouped
def generate(
    *,
    models: ModelOptions,
    prompts: PromptOptions,
    drafter: DrafterName = None,
    shape: ShapeText = None,
    adaptive: Adaptive = None,
    pages: LayoutOptions,
    place: PlaceOptions,
    reads: AttentionOptions,
    sampling: SamplingOptions,
    form: FormOptions,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", help="Most tokens of each text.")
    ] = 96,
    samples: Annotated[int, typer.Option(help="Samples of each prompt; seeds count up.")] = 1,
    stop: Stop = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Prompts are a user's messages, for the chat template.")
    ] = False,
    batch: Annotated[int, typer.Option(help="Requests that run at once.")] = 8,
    steps: StepOptions,
    memory: MemoryOptions,
    checks: CheckOptions,
    logprobs: Annotated[
        int | None,
        typer.Option(help="Log probabilities of each token and of this many likeliest ones."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Write the outputs, a line of JSON each, as they are complete."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file of --out.")] = False,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare", help="Decode plainly too: compare texts and speeds, and print a table."
        ),
    ] = False,
    compare_ancestry: Annotated[
        bool,
        typer.Option(
            "--compare-ancestry",
            help="Run exact ancestry and SGLang's reading; print both accept lengths.",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Generate texts, and print them as they come."""
    from specpool.cli.generate.generate import Job, run

    run(
        Job(
            **asdict(models),
            **asdict(place),
            prompts=prompts.given(),
            chat=chat,
            shape=shape,
            compare=compare,
            compare_ancestry=compare_ancestry,
            out=out,
            force=force,
            json=json,
            sampling=sampling.fields()
            | form.fields()
            | {"max_new_tokens": max_new_tokens, "n": samples, "stop": tuple(stop or ())}
            | {"drafter": drafter, "logprobs": logprobs},
            options=engine_options(
                pages,
                reads,
                memory,
                steps,
                checks,
                adaptive=adaptive,
                max_batch=batch,
            ),
        )
    )


@grouped
def chat(
    *,
    models: ModelOptions,
    system: Annotated[
        str | None, typer.Option(help="A system message; without a chat template, a first line.")
    ] = None,
    drafter: DrafterName = None,
    shape: ShapeText = None,
    adaptive: Adaptive = None,
    pages: LayoutOptions,
    place: PlaceOptions,
    reads: AttentionOptions,
    sampling: SamplingOptions,
    form: FormOptions,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", help="Most tokens of one answer.")
    ] = 256,
    stop: Stop = None,
    overlap_depth: OverlapDepth = 0,
    memory: MemoryOptions,
    max_sessions: Annotated[
        int, typer.Option(help="Most sessions that keep KV between their turns.")
    ] = 16,
    session_pages: Annotated[
        int | None,
        typer.Option(help="Most pages of each group for idle sessions. [default: all free]"),
    ] = None,
    checks: CheckOptions,
) -> None:
    """Talk with a model: each turn computes its new tokens only. /help lists the commands.

    A target without a chat template, such as the embedded one, goes on with the text as it is.
    """
    from specpool.cli.chat import Job, run

    run(
        Job(
            **asdict(models),
            **asdict(place),
            system=system,
            shape=shape,
            sampling=sampling.fields()
            | form.fields()
            | {"max_new_tokens": max_new_tokens, "stop": tuple(stop or ()), "drafter": drafter},
            options=engine_options(
                pages,
                reads,
                memory,
                checks,
                adaptive=adaptive,
                overlap_depth=overlap_depth,
                max_sessions=max_sessions,
                session_pages=session_pages,
            ),
        )
    )


@grouped
def serving(
    *,
    models: ModelOptions,
    name: Annotated[
        list[str] | None,
        typer.Option(
            help="What clients call the model; may be repeated. [default: --target, without a path]"
        ),
    ] = None,
    server: ServerOptions,
    chat_template: Annotated[
        Path | None, typer.Option(help="File with a chat template (Jinja) instead of the model's.")
    ] = None,
    shape: ShapeText = None,
    adaptive: Adaptive = None,
    pages: LayoutOptions,
    place: PlaceOptions,
    reads: AttentionOptions,
    batch: Annotated[int, typer.Option(help="Texts that run at once.")] = 32,
    steps: StepOptions,
    memory: MemoryOptions,
    max_sessions: Annotated[
        int, typer.Option(help="Most sessions that keep KV between their turns.")
    ] = 64,
    session_pages: Annotated[
        int | None,
        typer.Option(help="Most pages of each group for idle sessions. [default: all free]"),
    ] = None,
    checks: CheckOptions,
) -> Any:  # a `Job` of `specpool.cli.serve`
    """Serve a model to OpenAI's clients, with a page to talk to; without options the embedded pair.

    It listens on this machine alone unless --host says otherwise.
    """
    from specpool.cli.serve import Job

    return Job(
        **asdict(models),
        **asdict(place),
        shape=shape,
        chat_template=chat_template,
        api_key_file=server.api_key_file,
        names=name or [],
        serve=server.fields(),
        options=engine_options(
            pages,
            reads,
            memory,
            steps,
            checks,
            adaptive=adaptive,
            max_batch=batch,
            max_sessions=max_sessions,
            session_pages=session_pages,
        ),
    )


@functools.wraps(serving)
def serve(**given: Any) -> None:
    """Run the server with the options of `serving`."""
    from specpool.cli.serve import run

    run(serving(**given))


@grouped
def tune(
    *,
    models: ModelOptions,
    prompts: PromptOptions,
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
    tokens: Annotated[int, typer.Option(help="Tokens of each text; stops are ignored.")] = 96,
    repeats: Annotated[int, typer.Option(help="Runs of each; the median counts.")] = 3,
    policy: Annotated[str, typer.Option(help="Policy in the file: cost or ema.")] = "cost",
    place: PlaceOptions,
    out: Annotated[
        Path | None, typer.Option(help="Write the configuration, for --adaptive.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file of --out.")] = False,
    json: Json = False,
    plot: Plot = None,
) -> None:
    """Find the draft shapes that are worth it on a model and its prompts, by batch size."""
    from specpool.cli.tune import BATCHES, Job, run

    run(
        Job(
            **asdict(models),
            **asdict(place),
            prompts=prompts.given(),
            candidates=candidates or [],
            batch_sizes=batch or [*BATCHES],
            num_tokens=tokens,
            repeats=repeats,
            policy=policy,
            out=out,
            force=force,
            json=json,
            plot=plot,
        )
    )
