"""The declarations of options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specpool import config

Target = Annotated[
    str, typer.Option(help="Target model: a folder, a hub name, or specpool/tiny (embedded).")
]
_DRAFT_HELP = (
    "EAGLE head, block drafter or small language model: a folder, a hub name, specpool/tiny-eagle, "
    "specpool/tiny-eagle3, specpool/tiny-block, specpool/tiny-draft; 'mtp' = the MTP layer in the "
    "target's checkpoint; "
    "'ngram' or 'ngram:6' = prompt lookup and 'suffix' = suffix decoding, on any model; or "
    "'none'.{} [default: specpool/tiny-eagle with the embedded target, else none]"
)
Draft = Annotated[str | None, typer.Option(help=_DRAFT_HELP.format(""))]
Drafts = Annotated[
    list[str] | None,
    typer.Option("--draft", help=_DRAFT_HELP.format(" May be repeated: the first drafts.")),
]
DrafterName = Annotated[
    str | None,
    typer.Option("--drafter", help="Which of several --draft drafts. [default: the first]"),
]
DraftWindow = Annotated[
    int | None,
    typer.Option(
        help="Last tokens of a row that keep draft KV; drafts see no others. [default: all]"
    ),
]
DraftSink = Annotated[
    int,
    typer.Option(help="First tokens of a row that keep draft KV too, beside --draft-window."),
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
        "second), 'budget' (likewise, for each row), or a file, such as `specpool tune` writes."
    ),
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
    ),
]
Threads = Annotated[int, typer.Option(help="CPU threads of torch.")]
DtypeName = Annotated[
    str | None,
    typer.Option(
        "--dtype", help="float32, bfloat16, float16 or auto. [default: float32 on a CPU, else auto]"
    ),
]

# The prompts.
PromptText = Annotated[
    list[str] | None, typer.Option("--prompt", "-p", help="A prompt; may be repeated.")
]
PromptIds = Annotated[
    list[str] | None,
    typer.Option("--prompt-ids", help="A prompt as token ids: '1,2,3'; may be repeated."),
]
PromptFile = Annotated[
    str | None,
    typer.Option(help="A file of prompts; '-' = standard input. See --prompt-format."),
]
PromptFormat = Annotated[
    str | None,
    typer.Option(
        help="Format of --prompt-file: lines = each line is a prompt; jsonl = each line is JSON: a "
        "text, a list of token ids, or an object with 'prompt' (either) or 'messages' (a chat); "
        "whole = one prompt of many lines. [default: lines; whole for standard input]"
    ),
]

# The engine.
PageSize = Annotated[int, typer.Option(help="Slots per page.")]
Placement = Annotated[
    config.Placement,
    typer.Option(help="Target and draft layers in page groups of their own, or in one."),
]
Policy = Annotated[config.Policy, typer.Option(help="How much a round reserves.")]
Layout = Annotated[
    config.Layout,
    typer.Option(help="Where drafts lie in a row; holey differs where topk is above 1."),
]
OverlapDepth = Annotated[
    int, typer.Option(help="1 = prepare a round before the last round's results are read.")
]
Worker = Annotated[
    str, typer.Option(help="v2, v1 (gives back what a round reserved, after each) or auto.")
]
MixedChunks = Annotated[
    bool, typer.Option("--mixed-chunks", help="Chunks share the round's forward of the target.")
]
PrefillTokens = Annotated[
    int, typer.Option(help="Most tokens of one prefill step; longer prompts come in chunks.")
]
Headroom = Annotated[
    int, typer.Option(help="Tokens that a row must have room for beyond its next round.")
]
MaxContextLen = Annotated[
    int | None, typer.Option(help="Most tokens of a sequence. [default: the model's]")
]
NumPages = Annotated[
    int | None, typer.Option(help="Pages per group. [default: what --kv-bytes holds]")
]
KvBytes = Annotated[
    str | None,
    typer.Option(help="Memory for KV, such as 8GiB. [default: half of what is free]"),
]
HostBytes = Annotated[
    str | None,
    typer.Option(
        help="Host memory, such as 4GiB, for the KV of retracted requests. [default: 0: they are "
        "prefilled again]"
    ),
]
Offload = Annotated[
    config.Offload,
    typer.Option(help="What goes to host memory: KV whose copies beat a prefill, all, or none."),
]
Attention = Annotated[
    str,
    typer.Option(help="Back end that reads the pages: torch, flashinfer on CUDA, or auto."),
]
GraphSizes = Annotated[
    str | None,
    typer.Option(
        help="Batch sizes to capture as CUDA graphs: '1,2,4', or none. [default: powers of two and "
        "the whole batch with --device cuda]"
    ),
]
BusyCheck = Annotated[
    int | None,
    typer.Option(
        help="Before each turn: 1 = sums, 2 = full audit. [default: SPECPOOL_BUSY_CHECK or 0]"
    ),
]
OnFinding = Annotated[
    config.OnFinding,
    typer.Option(help="After a finding: end all requests, or only those with rows in it."),
]

# A request.
Temperature = Annotated[float, typer.Option(help="0 = greedy.")]
TopK = Annotated[
    int | None, typer.Option(help="Keep this many of the most likely tokens; 0 = all.")
]
TopP = Annotated[
    float | None, typer.Option(help="Keep the likeliest tokens with this mass; 1 = all.")
]
MinP = Annotated[
    float | None,
    typer.Option(help="Drop tokens less likely than this share of the likeliest; 0 = none."),
]
RepetitionPenalty = Annotated[
    float | None, typer.Option(help="Above 1 = tokens of prompt and output become less likely.")
]
PresencePenalty = Annotated[
    float, typer.Option(help="Taken from the logit of each token of the output; -2 to 2.")
]
FrequencyPenalty = Annotated[
    float, typer.Option(help="Taken for each time that the output has the token; -2 to 2.")
]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(help="TOKEN:VALUE, added to the token's logit, -100 to 100; may be repeated."),
]
JsonSchemaFile = Annotated[
    Path | None, typer.Option(help="Answer in JSON that has the schema of this file.")
]
JsonObject = Annotated[bool, typer.Option("--json-object", help="Answer with a JSON object.")]
Regex = Annotated[
    str | None, typer.Option(help="Answer with a text that this regular expression matches.")
]
ChoiceText = Annotated[
    list[str] | None, typer.Option(help="Answer with one of these strings; repeat it.")
]
GrammarFile = Annotated[
    Path | None, typer.Option(help="Answer in the grammar of this file, GBNF or Lark.")
]
Seed = Annotated[int, typer.Option(help="Seed of the sampled text.")]
Stop = Annotated[
    list[str] | None, typer.Option(help="A text ends before this string; may be repeated.")
]

# The server.
Host = Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 = all of this machine.")]
Port = Annotated[int, typer.Option(help="Port to listen on; 0 = any free one.")]
ApiKeyFile = Annotated[
    Path | None,
    typer.Option(
        help="File of API keys, a line each; clients must send one. SPECPOOL_API_KEY is one more."
    ),
]
OpenMetrics = Annotated[
    bool, typer.Option("--open-metrics", help="Give /metrics without a key too.")
]
SharePrefixes = Annotated[
    bool,
    typer.Option(
        "--share-prefixes",
        help="All API keys share cached KV, so each can find out what others have sent.",
    ),
]
AllowOrigin = Annotated[
    list[str] | None,
    typer.Option(help="Site whose pages may call the server (CORS); * = all; may be repeated."),
]
AllowHost = Annotated[
    list[str] | None,
    typer.Option(help="Name by which a loopback server may be called too; may be repeated."),
]
TrustProxy = Annotated[
    list[str] | None,
    typer.Option(
        help="Address or network of a proxy whose X-Forwarded-For is believed; may be repeated."
    ),
]
MaxQueue = Annotated[
    int, typer.Option(help="Most texts that wait beside those that run; further ones get 429.")
]
MaxBody = Annotated[str, typer.Option(help="Most bytes of a request's body; beyond it 413.")]
MaxConnections = Annotated[int, typer.Option(help="Most connections that are open at once.")]
RequestTimeout = Annotated[
    float, typer.Option(help="Seconds until a request is aborted; 0 = never.")
]
ReadTimeout = Annotated[float, typer.Option(help="Seconds in which a request must have come.")]
WriteTimeout = Annotated[
    float, typer.Option(help="Seconds that a part of a stream may wait for its reader.")
]
DrainTimeout = Annotated[
    float, typer.Option(help="Seconds that running texts get when the server is told to stop.")
]
MaxOpenSessions = Annotated[int, typer.Option(help="Most sessions that are open at once.")]
SessionTimeout = Annotated[
    float, typer.Option(help="Seconds after which a session without a turn is closed.")
]
AccessLog = Annotated[
    bool, typer.Option("--access-log/--no-access-log", help="Write a line for each request.")
]
