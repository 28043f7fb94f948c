"""`ServeBenchJob`: the options of `specpool bench serve`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from specpool.cli.options.types import Draft, Json, Plot, Target


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeBenchJob:
    """The server and how it is asked, the requests and when they come, and the service level."""

    url: Annotated[
        str | None,
        typer.Option(help="Any OpenAI server. [default: start specpool serve for the run]"),
    ] = None
    allow_remote: Annotated[
        bool,
        typer.Option(
            "--allow-remote", help="--url may be another machine.", rich_help_panel="Server"
        ),
    ] = False
    target: Target = "specpool/tiny"
    draft: Draft = None
    batch: Annotated[
        int,
        typer.Option(help="Texts that run at once, without --url.", rich_help_panel="Server"),
    ] = 32
    model: Annotated[
        str | None,
        typer.Option(
            help="The model's name. [default: the first that is listed]",
            rich_help_panel="Server",
        ),
    ] = None
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Chats instead of completions.", rich_help_panel="Requests"),
    ] = False
    temperature: Annotated[float, typer.Option(help="0 = greedy.", rich_help_panel="Requests")] = (
        0.0
    )
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos/--stop-at-eos",
            help="Send ignore_eos (vLLM's, ours).",
            rich_help_panel="Requests",
        ),
    ] = True
    dataset: Annotated[
        Path | None,
        typer.Option(
            help="Prompts: ShareGPT's JSON, or lines of JSON with turns, prompt or messages. "
            "[default: synthetic texts]"
        ),
    ] = None
    requests: Annotated[int, typer.Option(help="Most requests.")] = 128
    rate: Annotated[float | None, typer.Option(help="Requests a second, by a Poisson process.")] = (
        None
    )
    concurrency: Annotated[
        int | None,
        typer.Option(help="Requests that run at once, each begun when one ends. [default: 16]"),
    ] = None
    prompt_characters: Annotated[
        int, typer.Option(help="Mean length of synthetic texts.", rich_help_panel="Requests")
    ] = 128
    max_tokens: Annotated[
        int, typer.Option(help="Mean of the most new tokens.", rich_help_panel="Requests")
    ] = 64
    seed: Annotated[
        int,
        typer.Option(help="Decides order, lengths and arrivals.", rich_help_panel="Requests"),
    ] = 0
    seconds: Annotated[
        float,
        typer.Option(help="Most seconds; what runs then is given up.", rich_help_panel="Requests"),
    ] = 120.0
    slo_ttft: Annotated[
        float | None,
        typer.Option(help="Goodput: most ms to the first token.", rich_help_panel="Measurement"),
    ] = None
    slo_tpot: Annotated[
        float | None,
        typer.Option(help="Goodput: most ms for a further token.", rich_help_panel="Measurement"),
    ] = None
    json: Json = False
    plot: Plot = None
