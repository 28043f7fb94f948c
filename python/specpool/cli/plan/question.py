"""`Question`: the options of `specpool plan`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from specpool.capacity.group_sizes import Layout, Policy
from specpool.cli.options import types as o
from specpool.cli.options.derived import option_of
from specpool.cli.plan.mixed import ACCEPTANCE
from specpool.engine.config import HEADROOM, MAX_SESSIONS, EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The arguments of the command line."""

    memory: Annotated[str, typer.Option(help="Of the device, such as 80GiB (2^30) or 24G (10^9).")]
    target: Annotated[
        str | None,
        typer.Option(
            help="Target model: a folder, a hub name, or specpool/tiny. Or give the numbers below."
        ),
    ] = None
    layers: Annotated[
        int | None, typer.Option(help="Layers of the target.", rich_help_panel="Model")
    ] = None
    kv_heads: Annotated[
        int | None,
        typer.Option(help="Key and value heads of a layer.", rich_help_panel="Model"),
    ] = None
    head_dim: Annotated[
        int | None, typer.Option(help="Size of a head.", rich_help_panel="Model")
    ] = None
    vocab_size: Annotated[
        int | None,
        typer.Option(
            help="Width of the logits, which take memory too. [default: not counted]",
            rich_help_panel="Model",
        ),
    ] = None
    draft_layers: Annotated[
        int | None,
        typer.Option(
            help="Layers of a draft model that is not there yet. [default: 1 beside plain numbers, "
            "0 with --draft or --target]",
            rich_help_panel="Drafts",
        ),
    ] = None
    draft_kv_heads: Annotated[
        int | None,
        typer.Option(
            help="KV heads of a draft layer. [default: the target's]",
            rich_help_panel="Drafts",
        ),
    ] = None
    draft_head_dim: Annotated[
        int | None,
        typer.Option(
            help="Size of a draft head. [default: the target's]", rich_help_panel="Drafts"
        ),
    ] = None
    draft: o.Draft = None
    dtype: Annotated[
        str | None,
        typer.Option(
            help="float32, bfloat16 or float16. [default: the model's, else bfloat16]",
            rich_help_panel="Model",
        ),
    ] = None
    weights: Annotated[
        str | None,
        typer.Option(
            help="Bytes of the weights. [default: the model's, else 0]",
            rich_help_panel="Memory",
        ),
    ] = None
    workspace: Annotated[
        str | None,
        typer.Option(
            help="Bytes for all else: activations, CUDA. [default: a tenth of --memory]",
            rich_help_panel="Memory",
        ),
    ] = None
    tp: Annotated[
        int,
        typer.Option(
            help="Devices that share the target (ranks); --memory is of each.",
            rich_help_panel="Model",
        ),
    ] = 1
    shape: Annotated[
        list[str] | None,
        typer.Option(
            help="SxKxN, or a chain's depth; may be repeated. [default: 3]",
            rich_help_panel="Drafts",
        ),
    ] = None
    adaptive: Annotated[
        str | None,
        typer.Option(
            help="'budget', or the file of such a policy: also print what rows of mixed shapes "
            "hold. Its candidates are the shapes.",
            rich_help_panel="Drafts",
        ),
    ] = None
    acceptance: Annotated[
        float | None,
        typer.Option(
            help="With --adaptive: how likely a draft is right where those before it are. "
            f"[default: {ACCEPTANCE}]",
            rich_help_panel="Drafts",
        ),
    ] = None
    max_context_len: Annotated[int | None, option_of(EngineConfig, "max_context_len")] = None
    page_size: o.PageSize = 16
    placement: o.Placement = "split"
    policy: Annotated[Policy, option_of(EngineConfig, "policy")] = "exact"
    layout: Annotated[Layout, option_of(EngineConfig, "layout")] = "auto"
    draft_window: Annotated[int | None, option_of(EngineConfig, "draft_window")] = None
    draft_sink: Annotated[int, option_of(EngineConfig, "draft_sink")] = 0
    overlap_depth: Annotated[
        int,
        typer.Option(
            "--depth", help="D: rounds prepared ahead (1 = overlap).", rich_help_panel="Scheduling"
        ),
    ] = 0
    max_batch: Annotated[
        int | None,
        typer.Option(
            help="Requests that run at once. [default: all that int32 allows]",
            rich_help_panel="Scheduling",
        ),
    ] = None
    max_sessions: Annotated[int, option_of(EngineConfig, "max_sessions")] = MAX_SESSIONS
    cached_states: Annotated[int | None, option_of(EngineConfig, "cached_states")] = None
    headroom: Annotated[int, option_of(EngineConfig, "headroom")] = HEADROOM
    prompt: Annotated[int | None, typer.Option(help="Tokens of a prompt.")] = None
    output: Annotated[int | None, typer.Option(help="Tokens that a request generates.")] = None
    common: Annotated[
        int | None,
        typer.Option(
            help="Tokens that all prompts begin with, for the prefix cache's worth.",
            rich_help_panel="Requests",
        ),
    ] = None
    live: Annotated[
        list[int] | None,
        typer.Option(
            help="Tokens of a request so far; may be repeated.", rich_help_panel="Requests"
        ),
    ] = None
    trust_remote_code: o.TrustRemoteCode = False
