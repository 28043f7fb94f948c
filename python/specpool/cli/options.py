"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Target = Annotated[
    str, typer.Option(help="Target model: a folder, a hub name, or specpool/tiny (embedded).")
]
Draft = Annotated[
    str | None,
    typer.Option(
        help="EAGLE head: a folder, a hub name, specpool/tiny-eagle, specpool/tiny-eagle3; 'ngram' "
        "or 'ngram:6' = prompt lookup, on any model; or 'none'. [default: specpool/tiny-eagle with "
        "the embedded target, else none]"
    ),
]
ShapeText = Annotated[
    str | None,
    typer.Option(
        "--shape",
        help="What a round drafts: SxKxN, num_steps x topk x num_draft_tokens (root included), or "
        "a chain's depth alone. [default: 3, that is 3x1x4]",
    ),
]
Adaptive = Annotated[
    str | None,
    typer.Option(
        help="A shape for each round: 'ema' (SGLang's rule), 'cost' (the most expected tokens per "
        "second), or a file, such as `specpool tune` writes."
    ),
]
Plot = Annotated[Path | None, typer.Option(help="Write a picture (needs matplotlib).")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
DeviceName = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Run Python code that the target's folder brings: read it first.",
    ),
]
