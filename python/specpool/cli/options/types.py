"""The declarations of options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specpool.capacity import group_sizes
from specpool.cli.options.derived import option_of
from specpool.engine.config import EngineConfig

Target = Annotated[
    str, typer.Option(help="Target model: a folder, a hub name, or specpool/tiny (embedded).")
]
_DRAFT_HELP = (
    "Draft model: a folder, a hub name, or specpool/tiny-eagle, tiny-eagle3, tiny-block or "
    "tiny-draft (embedded); 'mtp' = the MTP layer of the target; 'ngram', 'ngram:6' or 'suffix' = "
    "lookup, for any model; or 'none'.{} [default: specpool/tiny-eagle with the embedded target, "
    "else none]"
)
Draft = Annotated[str | None, typer.Option(help=_DRAFT_HELP.format(""))]
Drafts = Annotated[
    list[str] | None,
    typer.Option("--draft", help=_DRAFT_HELP.format(" May be repeated: the first drafts.")),
]
Plot = Annotated[Path | None, typer.Option(help="Write a picture (needs matplotlib).")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite the file of --out.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
DeviceName = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Run Python code from the target's folder: read it first.",
        rich_help_panel="Model",
    ),
]
Threads = Annotated[int, typer.Option(help="CPU threads of torch.", rich_help_panel="Model")]
DtypeName = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        help="float32, bfloat16, float16 or auto. [default: float32 on a CPU, else auto]",
        rich_help_panel="Model",
    ),
]

# Options of the engine, for commands with few of them.
ShapeText = Annotated[str | None, option_of(EngineConfig, "shape")]
PageSize = Annotated[int, option_of(EngineConfig, "page_size")]
Placement = Annotated[group_sizes.Placement, option_of(EngineConfig, "placement")]
