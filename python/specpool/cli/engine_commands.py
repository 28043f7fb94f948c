"""The commands that run an engine: `generate`, `chat`, `serve`, `tune`, `train`; their options."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from specpool.cli.options.derived import OptionsOf, Untyped, Values, grouped
from specpool.cli.options.groups import FormOptions, ModelOptions, PlaceOptions, PromptOptions
from specpool.cli.options.types import (
    DeviceName,
    DtypeName,
    Force,
    Json,
    Plot,
    Target,
    TrustRemoteCode,
)
from specpool.engine.config import MOST_BATCH, SERVED_BATCH, EngineConfig
from specpool.engine.sampling_params import SamplingParams
from specpool.serve.config import ServeConfig
from specpool.train.config import TrainConfig


@grouped
def generate(
    *,
    models: ModelOptions,
    prompts: PromptOptions,
    place: PlaceOptions,
    sampling: Annotated[Values, OptionsOf(SamplingParams, max_new_tokens=96, seed=0)],
    engine: Annotated[Values, OptionsOf(EngineConfig, without=("max_sessions", "session_pages"))],
    form: FormOptions,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="Prompts are a user's messages, for the chat template.",
            rich_help_panel="Prompts",
        ),
    ] = False,
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
            models=models,
            place=place,
            prompts=prompts.given(),
            chat=chat,
            compare=compare,
            out=out,
            force=force,
            json=json,
            sampling=sampling | form.fields(),
            options=engine,
        )
    )


@grouped
def chat(
    *,
    models: ModelOptions,
    system: Annotated[
        str | None, typer.Option(help="A system message; without a chat template, a first line.")
    ] = None,
    place: PlaceOptions,
    sampling: Annotated[
        Values,
        OptionsOf(SamplingParams, without=("n", "logprobs"), max_new_tokens=256, seed=0),
    ],
    engine: Annotated[
        Values, OptionsOf(EngineConfig, without=("max_batch", "worker", "mixed_chunks"))
    ],
    form: FormOptions,
) -> None:
    """Talk with a model: each turn computes its new tokens only. /help lists the commands.

    A target without a chat template, such as the embedded one, goes on with the text as it is.
    """
    from specpool.cli.chat import ChatJob, run

    run(
        ChatJob(
            models=models,
            place=place,
            system=system,
            sampling=sampling | form.fields(),
            options=engine,
        )
    )


@grouped
def serving(
    *,
    models: ModelOptions,
    server: Annotated[Values, OptionsOf(ServeConfig)],
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            help="File of API keys, a line each; clients must send one. SPECPOOL_API_KEY is one "
            "more."
        ),
    ] = None,
    chat_template: Annotated[
        Path | None,
        typer.Option(
            help="File with a chat template (Jinja) instead of the model's.",
            rich_help_panel="Model",
        ),
    ] = None,
    engine: Annotated[
        Values,
        OptionsOf(
            EngineConfig,
            max_batch=Untyped(
                f"{SERVED_BATCH}; what memory gives with --device cuda, at most {MOST_BATCH}"
            ),
            max_sessions=64,
        ),
    ],
    place: PlaceOptions,
) -> Any:  # a `ServeJob`
    """Serve a model to OpenAI's clients, with a page to talk to; without options the embedded pair.

    It listens on this machine alone unless --host says otherwise.
    """
    from specpool.cli.serve import ServeJob

    return ServeJob(
        models=models,
        place=place,
        chat_template=chat_template,
        api_key_file=api_key_file,
        serve=server,
        options=engine,
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
        typer.Option(help="Tokens of each text; stops are ignored.", rich_help_panel="Measurement"),
    ] = 96,
    repeats: Annotated[
        int,
        typer.Option(help="Runs of each; the median counts.", rich_help_panel="Measurement"),
    ] = 3,
    policy: Annotated[
        str,
        typer.Option(help="Policy in the file: cost or ema.", rich_help_panel="Measurement"),
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
            models=models,
            place=place,
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


@grouped
def train(
    *,
    target: Target,
    config: Annotated[Values, OptionsOf(TrainConfig)],
    dtype: DtypeName = None,
    device: DeviceName = "cpu",
    threads: Annotated[
        int | None,
        typer.Option(
            help="CPU threads of torch. [default: one for each core]", rich_help_panel="Model"
        ),
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
) -> None:
    """Train an EAGLE-3 head for a target on your own texts, and measure it on held-out ones.

    Ctrl-C writes a checkpoint; the same command with --resume goes on from it.
    """
    from specpool.cli.train import run

    run(
        TrainConfig(
            **config,
            target=target,
            dtype=dtype,
            device=device,
            trust_remote_code=trust_remote_code,
        ),
        threads=(os.cpu_count() or 1) if threads is None else threads,
        as_json=json,
    )
