"""The commands that run an engine: `generate`, `chat`, `serve`, `tune`, `train`; their options."""

from __future__ import annotations

import functools
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from specpool.cli.options import sections
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
    DeviceName,
    DrafterName,
    DtypeName,
    Force,
    Json,
    OverlapDepth,
    Plot,
    ShapeText,
    Stop,
    TrustRemoteCode,
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
    samples: Annotated[
        int,
        typer.Option(
            help="Samples of each prompt; seeds count up.", rich_help_panel=sections.SAMPLING
        ),
    ] = 1,
    stop: Stop = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="Prompts are a user's messages, for the chat template.",
            rich_help_panel=sections.PROMPTS,
        ),
    ] = False,
    batch: Annotated[
        int, typer.Option(help="Requests that run at once.", rich_help_panel=sections.SCHEDULING)
    ] = 8,
    steps: StepOptions,
    memory: MemoryOptions,
    checks: CheckOptions,
    logprobs: Annotated[
        int | None,
        typer.Option(
            help="Log probabilities of each token and of this many likeliest ones.",
            rich_help_panel=sections.SAMPLING,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Write the outputs, a line of JSON each, as they are complete."),
    ] = None,
    force: Force = False,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare", help="Decode plainly too: compare texts and speeds, and print a table."
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Generate texts, and print them as they come."""
    from specpool.cli.generate.generate import GenerateJob, run

    run(
        GenerateJob(
            **asdict(models),
            **asdict(place),
            prompts=prompts.given(),
            chat=chat,
            shape=shape,
            compare=compare,
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
        int,
        typer.Option(
            help="Most sessions that keep KV between their turns.", rich_help_panel=sections.MEMORY
        ),
    ] = 16,
    session_pages: Annotated[
        int | None,
        typer.Option(
            help="Most pages of each group for idle sessions. [default: all free]",
            rich_help_panel=sections.MEMORY,
        ),
    ] = None,
    checks: CheckOptions,
) -> None:
    """Talk with a model: each turn computes its new tokens only. /help lists the commands.

    A target without a chat template, such as the embedded one, goes on with the text as it is.
    """
    from specpool.cli.chat import ChatJob, run

    run(
        ChatJob(
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
            help="What clients call the model; may be repeated. "
            "[default: --target, without a path]",
            rich_help_panel=sections.MODEL,
        ),
    ] = None,
    server: ServerOptions,
    chat_template: Annotated[
        Path | None,
        typer.Option(
            help="File with a chat template (Jinja) instead of the model's.",
            rich_help_panel=sections.MODEL,
        ),
    ] = None,
    shape: ShapeText = None,
    adaptive: Adaptive = None,
    pages: LayoutOptions,
    place: PlaceOptions,
    reads: AttentionOptions,
    batch: Annotated[
        int, typer.Option(help="Texts that run at once.", rich_help_panel=sections.SCHEDULING)
    ] = 32,
    steps: StepOptions,
    memory: MemoryOptions,
    max_sessions: Annotated[
        int,
        typer.Option(
            help="Most sessions that keep KV between their turns.", rich_help_panel=sections.MEMORY
        ),
    ] = 64,
    session_pages: Annotated[
        int | None,
        typer.Option(
            help="Most pages of each group for idle sessions. [default: all free]",
            rich_help_panel=sections.MEMORY,
        ),
    ] = None,
    checks: CheckOptions,
) -> Any:  # a `ServeJob`
    """Serve a model to OpenAI's clients, with a page to talk to; without options the embedded pair.

    It listens on this machine alone unless --host says otherwise.
    """
    from specpool.cli.serve import ServeJob

    return ServeJob(
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
    tokens: Annotated[
        int,
        typer.Option(
            help="Tokens of each text; stops are ignored.", rich_help_panel=sections.MEASUREMENT
        ),
    ] = 96,
    repeats: Annotated[
        int,
        typer.Option(help="Runs of each; the median counts.", rich_help_panel=sections.MEASUREMENT),
    ] = 3,
    policy: Annotated[
        str,
        typer.Option(help="Policy in the file: cost or ema.", rich_help_panel=sections.MEASUREMENT),
    ] = "cost",
    place: PlaceOptions,
    out: Annotated[
        Path | None, typer.Option(help="Write the configuration, for --adaptive.")
    ] = None,
    force: Force = False,
    json: Json = False,
    plot: Plot = None,
) -> None:
    """Find the draft shapes that are worth it on a model and its prompts, by batch size."""
    from specpool.cli.tune import BATCHES, TuneJob, run

    run(
        TuneJob(
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


def train(
    target: Annotated[
        str, typer.Option(help="Target model: a folder, a hub name, or specpool/tiny (embedded).")
    ],
    data: Annotated[
        list[Path],
        typer.Option(
            help="A file of plain text, or of JSON lines (.jsonl): objects with 'text', 'prompt', "
            "'prompt' and 'completion', or 'messages'; may be repeated."
        ),
    ],
    out: Annotated[Path, typer.Option(help="A new folder for the head and its training.")],
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the training in --out.")
    ] = False,
    minutes: Annotated[
        float | None, typer.Option(help="Wall time of the training. [default: no limit]")
    ] = None,
    epochs: Annotated[
        float | None,
        typer.Option(
            help="Passes over the texts. [default: 4, or no limit with --minutes]",
            rich_help_panel=sections.TRAINING,
        ),
    ] = None,
    length: Annotated[
        int,
        typer.Option(help="Most tokens of a text in training.", rich_help_panel=sections.TRAINING),
    ] = 512,
    batch_size: Annotated[
        int, typer.Option("--batch", help="Texts of a step.", rich_help_panel=sections.TRAINING)
    ] = 8,
    unroll: Annotated[
        int,
        typer.Option(
            help="Draft steps that training takes in a row, from its own output.",
            rich_help_panel=sections.TRAINING,
        ),
    ] = 4,
    draft_vocab_size: Annotated[
        int,
        typer.Option(
            "--draft-vocab",
            help="Most tokens that the head can propose.",
            rich_help_panel=sections.TRAINING,
        ),
    ] = 32_000,
    lr: Annotated[
        float | None,
        typer.Option(
            help="Greatest learning rate. [default: 0.512 / hidden size, at most 0.004]",
            rich_help_panel=sections.TRAINING,
        ),
    ] = None,
    held_out: Annotated[
        float,
        typer.Option(
            help="Share of the texts that training does not see.", rich_help_panel=sections.TRAINING
        ),
    ] = 0.05,
    new_tokens: Annotated[
        int,
        typer.Option(
            help="Most tokens of the target's answer to a prompt without one.",
            rich_help_panel=sections.TRAINING,
        ),
    ] = 256,
    temperature: Annotated[
        float,
        typer.Option(
            help="Temperature of these answers; 0 = greedy.", rich_help_panel=sections.TRAINING
        ),
    ] = 0.0,
    checkpoint_minutes: Annotated[
        float,
        typer.Option(help="Wall time between two checkpoints.", rich_help_panel=sections.TRAINING),
    ] = 5.0,
    seed: Annotated[
        int,
        typer.Option(
            help="Seed of the split, the order, the answers and the weights.",
            rich_help_panel=sections.TRAINING,
        ),
    ] = 0,
    dtype: DtypeName = None,
    device: DeviceName = "cpu",
    threads: Annotated[
        int | None,
        typer.Option(
            help="CPU threads of torch. [default: one for each core]",
            rich_help_panel=sections.MODEL,
        ),
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
) -> None:
    """Train an EAGLE-3 head for a target on your own texts, and measure it on held-out ones.

    Ctrl-C writes a checkpoint; the same command with --resume goes on from it.
    """
    from specpool.cli.train import run
    from specpool.train.config import TrainConfig

    config = TrainConfig(
        target=target,
        data=tuple(data),
        out=out,
        resume=resume,
        minutes=minutes,
        epochs=epochs,
        length=length,
        batch_size=batch_size,
        unroll=unroll,
        draft_vocab_size=draft_vocab_size,
        lr=lr,
        held_out=held_out,
        new_tokens=new_tokens,
        temperature=temperature,
        checkpoint_minutes=checkpoint_minutes,
        seed=seed,
        dtype=dtype,
        device=device,
        trust_remote_code=trust_remote_code,
    )
    run(config, threads=(os.cpu_count() or 1) if threads is None else threads, as_json=json)
