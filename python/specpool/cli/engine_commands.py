"""The commands that run an engine, and their options: `generate`, `chat`, `tune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from specpool.cli.options import (
    Adaptive,
    Attention,
    BusyCheck,
    DeviceName,
    Draft,
    DtypeName,
    GraphSizes,
    Headroom,
    HostBytes,
    Json,
    KvBytes,
    Layout,
    MaxContextLen,
    NumPages,
    Offload,
    OnFinding,
    OverlapDepth,
    PageSize,
    Placement,
    Plot,
    Policy,
    PrefillTokens,
    PromptFile,
    PromptFormat,
    PromptIds,
    PromptText,
    Seed,
    ShapeText,
    Stop,
    Target,
    Temperature,
    Threads,
    TopK,
    TopP,
    TrustRemoteCode,
)
from specpool.config import HEADROOM
from specpool.errors import ConfigError
from specpool.num_bytes import parse_bytes


def generate(
    target: Target = "specpool/tiny",
    draft: Draft = None,
    prompt: PromptText = None,
    prompt_ids: PromptIds = None,
    prompt_file: PromptFile = None,
    prompt_format: PromptFormat = None,
    shape: ShapeText = None,
    adaptive: Adaptive = None,
    page_size: PageSize = 16,
    placement: Placement = "split",
    policy: Policy = "exact",
    layout: Layout = "auto",
    dtype: DtypeName = None,
    device: DeviceName = "cpu",
    threads: Threads = 1,
    trust_remote_code: TrustRemoteCode = False,
    attention: Attention = "torch",
    graph_sizes: GraphSizes = None,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", help="Tokens of each text at most.")
    ] = 96,
    samples: Annotated[int, typer.Option(help="Of each prompt, with seeds that follow.")] = 1,
    stop: Stop = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Prompts are a user's messages, for the chat template.")
    ] = False,
    batch: Annotated[int, typer.Option(help="Requests that run at once.")] = 8,
    overlap_depth: OverlapDepth = 0,
    worker: Annotated[
        str, typer.Option(help="v2, v1 (gives back what a round reserved, after each) or auto.")
    ] = "auto",
    mixed_chunks: Annotated[
        bool, typer.Option("--mixed-chunks", help="Chunks share the round's forward of the target.")
    ] = False,
    prefill_tokens: PrefillTokens = 1024,
    headroom: Headroom = HEADROOM,
    max_context_len: MaxContextLen = None,
    num_pages: NumPages = None,
    kv_bytes: KvBytes = None,
    host_bytes: HostBytes = None,
    offload: Offload = "cost",
    busy_check: BusyCheck = None,
    on_finding: OnFinding = "raise",
    compare_ancestry: Annotated[
        bool,
        typer.Option(
            "--compare-ancestry",
            help="Run exact ancestry and upstream's reading; print both accept lengths.",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Generate with drafts, then decode plainly on the same pages and compare."""
    from specpool.cli.generate import Job, run
    from specpool.cli.prompt_files import Given

    run(
        Job(
            target=target,
            draft=draft,
            prompts=Given(prompt or [], prompt_ids or [], prompt_file, prompt_format),
            chat=chat,
            shape=shape,
            dtype=dtype,
            device=device,
            threads=threads,
            trust_remote_code=trust_remote_code,
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
            options=engine_options(
                page_size=page_size,
                placement=placement,
                policy=policy,
                layout=layout,
                adaptive=adaptive,
                attention=attention,
                overlap_depth=overlap_depth,
                prefill_tokens=prefill_tokens,
                headroom=headroom,
                max_context_len=max_context_len,
                num_pages=num_pages,
                offload=offload,
                on_finding=on_finding,
                max_batch=batch,
                worker=worker,
                mixed_chunks=mixed_chunks,
                kv_bytes=kv_bytes,
                host_bytes=host_bytes,
                graph_sizes=graph_sizes,
                busy_check=busy_check,
            ),
        )
    )


def chat(
    target: Target = "specpool/tiny",
    draft: Draft = None,
    system: Annotated[
        str | None, typer.Option(help="What the model is told first, on a line of its own.")
    ] = None,
    shape: ShapeText = None,
    adaptive: Adaptive = None,
    page_size: PageSize = 16,
    placement: Placement = "split",
    policy: Policy = "exact",
    layout: Layout = "auto",
    dtype: DtypeName = None,
    device: DeviceName = "cpu",
    threads: Threads = 1,
    trust_remote_code: TrustRemoteCode = False,
    attention: Attention = "torch",
    graph_sizes: GraphSizes = None,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", help="Tokens of one answer at most.")
    ] = 256,
    stop: Stop = None,
    overlap_depth: OverlapDepth = 0,
    prefill_tokens: PrefillTokens = 1024,
    headroom: Headroom = HEADROOM,
    max_context_len: MaxContextLen = None,
    num_pages: NumPages = None,
    kv_bytes: KvBytes = None,
    host_bytes: HostBytes = None,
    offload: Offload = "cost",
    max_sessions: Annotated[
        int, typer.Option(help="Sessions that keep KV between their turns, at most.")
    ] = 16,
    session_pages: Annotated[
        int | None,
        typer.Option(help="Pages of each group that they keep. [default: all that are free]"),
    ] = None,
    busy_check: BusyCheck = None,
    on_finding: OnFinding = "raise",
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
            trust_remote_code=trust_remote_code,
            sampling={
                "max_new_tokens": max_new_tokens,
                "temperature": temperature,
                "top_k": top_k,
                "top_p": top_p,
                "seed": seed,
                "stop": tuple(stop or ()),
            },
            options=engine_options(
                page_size=page_size,
                placement=placement,
                policy=policy,
                layout=layout,
                adaptive=adaptive,
                attention=attention,
                overlap_depth=overlap_depth,
                prefill_tokens=prefill_tokens,
                headroom=headroom,
                max_context_len=max_context_len,
                num_pages=num_pages,
                offload=offload,
                on_finding=on_finding,
                max_sessions=max_sessions,
                session_pages=session_pages,
                kv_bytes=kv_bytes,
                host_bytes=host_bytes,
                graph_sizes=graph_sizes,
                busy_check=busy_check,
            ),
        )
    )


def engine_options(
    *,
    kv_bytes: str | None,
    host_bytes: str | None,
    graph_sizes: str | None,
    busy_check: int | None,
    **options: Any,
) -> dict[str, Any]:
    """Return fields of `EngineConfig`; those given as text become numbers.

    Raises:
        ConfigError: a text of another form.
    """
    if kv_bytes is not None:
        options["kv_bytes"] = parse_bytes("kv_bytes", kv_bytes)
    if host_bytes is not None:
        options["host_bytes"] = parse_bytes("host_bytes", host_bytes)
    if graph_sizes is not None:
        options["graph_sizes"] = () if graph_sizes == "none" else _sizes(graph_sizes)
    if busy_check is not None:
        options["busy_check"] = busy_check
    return options


def _sizes(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isascii() and part.strip().isdigit() for part in parts):
        raise ConfigError(
            f"graph_sizes must be batch sizes with commas between, or none, got {text!r:.80}"
        )
    return tuple(int(part) for part in parts)


def tune(
    target: Target = "specpool/tiny",
    draft: Draft = None,
    prompt: PromptText = None,
    prompt_ids: PromptIds = None,
    prompt_file: PromptFile = None,
    prompt_format: PromptFormat = None,
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
    dtype: DtypeName = None,
    device: DeviceName = "cpu",
    threads: Threads = 1,
    trust_remote_code: TrustRemoteCode = False,
    out: Annotated[
        Path | None, typer.Option(help="Write the configuration, for --adaptive.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over a file.")] = False,
    json: Json = False,
    plot: Plot = None,
) -> None:
    """Find the draft shapes that are worth it on a model and its prompts, by batch size."""
    from specpool.cli.prompt_files import Given
    from specpool.cli.tune import BATCHES, Job, run

    run(
        Job(
            target=target,
            draft=draft,
            prompts=Given(prompt or [], prompt_ids or [], prompt_file, prompt_format),
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
