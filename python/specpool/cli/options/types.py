"""The declarations of options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specpool.capacity import group_sizes
from specpool.cli.options import sections
from specpool.engine import config

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
DrafterName = Annotated[
    str | None,
    typer.Option(
        "--drafter",
        help="Which of several --draft drafts. [default: the first]",
        rich_help_panel=sections.DRAFTS,
    ),
]
DraftWindow = Annotated[
    int | None,
    typer.Option(
        help="Last tokens of a row that keep draft KV; drafts see no others. [default: all]",
        rich_help_panel=sections.DRAFTS,
    ),
]
DraftSink = Annotated[
    int,
    typer.Option(
        help="First tokens of a row that keep draft KV too, beside --draft-window.",
        rich_help_panel=sections.DRAFTS,
    ),
]
ShapeText = Annotated[
    str | None,
    typer.Option(
        "--shape",
        help="What a round drafts: SxKxN, num_steps x topk x num_draft_tokens (root included), or "
        "a chain's depth alone. [default: 3, that is 3x1x4]",
        rich_help_panel=sections.DRAFTS,
    ),
]
Adaptive = Annotated[
    str | None,
    typer.Option(
        help="A shape for each round: 'ema' (SGLang's rule), 'cost' (the most expected tokens per "
        "second), 'budget' (likewise, for each row), or a file, such as `specpool tune` writes.",
        rich_help_panel=sections.DRAFTS,
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
        rich_help_panel=sections.MODEL,
    ),
]
Threads = Annotated[int, typer.Option(help="CPU threads of torch.", rich_help_panel=sections.MODEL)]
DtypeName = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        help="float32, bfloat16, float16 or auto. [default: float32 on a CPU, else auto]",
        rich_help_panel=sections.MODEL,
    ),
]

# The prompts.
PromptText = Annotated[
    list[str] | None, typer.Option("--prompt", "-p", help="A prompt; may be repeated.")
]
PromptIds = Annotated[
    list[str] | None,
    typer.Option(
        "--prompt-ids",
        help="A prompt as token ids: '1,2,3'; may be repeated.",
        rich_help_panel=sections.PROMPTS,
    ),
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
        "whole = one prompt of many lines. [default: lines; whole for standard input]",
        rich_help_panel=sections.PROMPTS,
    ),
]

# The engine.
PageSize = Annotated[int, typer.Option(help="Slots per page.", rich_help_panel=sections.MEMORY)]
Placement = Annotated[
    group_sizes.Placement,
    typer.Option(
        help="Target and draft layers in page groups of their own, or in one, as SGLang does.",
        rich_help_panel=sections.ADVANCED,
    ),
]
Policy = Annotated[
    group_sizes.Policy,
    typer.Option(
        help="How much a round reserves; double_buffer is what SGLang reserves.",
        rich_help_panel=sections.ADVANCED,
    ),
]
Layout = Annotated[
    group_sizes.Layout,
    typer.Option(
        help="Where drafts lie in a row; holey differs where topk is above 1.",
        rich_help_panel=sections.ADVANCED,
    ),
]
OverlapDepth = Annotated[
    int,
    typer.Option(
        help="1 = prepare a round before the last round's results are read.",
        rich_help_panel=sections.SCHEDULING,
    ),
]
Worker = Annotated[
    str,
    typer.Option(
        help="v2, v1 (gives back what a round reserved, after each) or auto.",
        rich_help_panel=sections.ADVANCED,
    ),
]
MixedChunks = Annotated[
    bool,
    typer.Option(
        "--mixed-chunks",
        help="Chunks share the round's forward of the target.",
        rich_help_panel=sections.SCHEDULING,
    ),
]
PrefillTokens = Annotated[
    int,
    typer.Option(
        help="Most tokens of one prefill step; longer prompts come in chunks.",
        rich_help_panel=sections.SCHEDULING,
    ),
]
Headroom = Annotated[
    int,
    typer.Option(
        help="Tokens that a row must have room for beyond its next round.",
        rich_help_panel=sections.SCHEDULING,
    ),
]
MaxContextLen = Annotated[
    int | None,
    typer.Option(
        help="Most tokens of a sequence. [default: the model's]", rich_help_panel=sections.MEMORY
    ),
]
NumPages = Annotated[
    int | None,
    typer.Option(
        help="Pages per group. [default: what --kv-bytes holds]", rich_help_panel=sections.MEMORY
    ),
]
KvBytes = Annotated[
    str | None,
    typer.Option(
        help="Memory for KV, such as 8GiB. [default: half of what is free]",
        rich_help_panel=sections.MEMORY,
    ),
]
HostBytes = Annotated[
    str | None,
    typer.Option(
        help="Host memory, such as 4GiB, for the KV of retracted requests. [default: 0: they are "
        "prefilled again]",
        rich_help_panel=sections.MEMORY,
    ),
]
Offload = Annotated[
    config.Offload,
    typer.Option(
        help="What goes to host memory: KV whose copies beat a prefill, all, or none.",
        rich_help_panel=sections.MEMORY,
    ),
]
Attention = Annotated[
    str,
    typer.Option(
        help="Back end that reads the pages: torch, flashinfer on CUDA, or auto.",
        rich_help_panel=sections.ADVANCED,
    ),
]
GraphSizes = Annotated[
    str | None,
    typer.Option(
        help="Batch sizes to capture as CUDA graphs: '1,2,4', or none. [default: powers of two and "
        "the whole batch with --device cuda]",
        rich_help_panel=sections.ADVANCED,
    ),
]
BusyCheck = Annotated[
    int | None,
    typer.Option(
        help="Before each turn: 1 = sums, 2 = full audit. [default: SPECPOOL_BUSY_CHECK or 0]",
        rich_help_panel=sections.ADVANCED,
    ),
]
OnFinding = Annotated[
    config.OnFinding,
    typer.Option(
        help="After a finding: end all requests, or only those with rows in it.",
        rich_help_panel=sections.ADVANCED,
    ),
]

# A request.
Temperature = Annotated[float, typer.Option(help="0 = greedy.")]
TopK = Annotated[
    int | None,
    typer.Option(
        help="Keep this many of the most likely tokens; 0 = all.", rich_help_panel=sections.SAMPLING
    ),
]
TopP = Annotated[
    float | None,
    typer.Option(
        help="Keep the likeliest tokens with this mass; 1 = all.", rich_help_panel=sections.SAMPLING
    ),
]
MinP = Annotated[
    float | None,
    typer.Option(
        help="Drop tokens less likely than this share of the likeliest; 0 = none.",
        rich_help_panel=sections.SAMPLING,
    ),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(
        help="Above 1 = tokens of prompt and output become less likely.",
        rich_help_panel=sections.SAMPLING,
    ),
]
PresencePenalty = Annotated[
    float,
    typer.Option(
        help="Taken from the logit of each token of the output; -2 to 2.",
        rich_help_panel=sections.SAMPLING,
    ),
]
FrequencyPenalty = Annotated[
    float,
    typer.Option(
        help="Taken for each time that the output has the token; -2 to 2.",
        rich_help_panel=sections.SAMPLING,
    ),
]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(
        help="TOKEN:VALUE, added to the token's logit, -100 to 100; may be repeated.",
        rich_help_panel=sections.SAMPLING,
    ),
]
JsonSchemaFile = Annotated[
    Path | None,
    typer.Option(
        help="Answer in JSON that has the schema of this file.", rich_help_panel=sections.FORM
    ),
]
JsonObject = Annotated[
    bool,
    typer.Option("--json-object", help="Answer with a JSON object.", rich_help_panel=sections.FORM),
]
Regex = Annotated[
    str | None,
    typer.Option(
        help="Answer with a text that this regular expression matches.",
        rich_help_panel=sections.FORM,
    ),
]
ChoiceText = Annotated[
    list[str] | None,
    typer.Option(
        help="Answer with one of these strings; repeat it.", rich_help_panel=sections.FORM
    ),
]
GrammarFile = Annotated[
    Path | None,
    typer.Option(
        help="Answer in the grammar of this file, GBNF or Lark.", rich_help_panel=sections.FORM
    ),
]
Seed = Annotated[
    int, typer.Option(help="Seed of the sampled text.", rich_help_panel=sections.SAMPLING)
]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        help="A text ends before this string; may be repeated.", rich_help_panel=sections.SAMPLING
    ),
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
    bool,
    typer.Option(
        "--open-metrics", help="Give /metrics without a key too.", rich_help_panel=sections.SERVER
    ),
]
SharePrefixes = Annotated[
    bool,
    typer.Option(
        "--share-prefixes",
        help="All API keys share cached KV, so each can find out what others have sent.",
        rich_help_panel=sections.SERVER,
    ),
]
AllowOrigin = Annotated[
    list[str] | None,
    typer.Option(
        help="Site whose pages may call the server (CORS); * = all; may be repeated.",
        rich_help_panel=sections.SERVER,
    ),
]
AllowHost = Annotated[
    list[str] | None,
    typer.Option(
        help="Name by which a loopback server may be called too; may be repeated.",
        rich_help_panel=sections.SERVER,
    ),
]
TrustProxy = Annotated[
    list[str] | None,
    typer.Option(
        help="Address or network of a proxy whose X-Forwarded-For is believed; may be repeated.",
        rich_help_panel=sections.SERVER,
    ),
]
MaxQueue = Annotated[
    int,
    typer.Option(
        help="Most texts that wait beside those that run; further ones get 429.",
        rich_help_panel=sections.SERVER,
    ),
]
MaxBody = Annotated[
    str,
    typer.Option(
        help="Most bytes of a request's body; beyond it 413.", rich_help_panel=sections.SERVER
    ),
]
MaxConnections = Annotated[
    int,
    typer.Option(help="Most connections that are open at once.", rich_help_panel=sections.SERVER),
]
RequestTimeout = Annotated[
    float,
    typer.Option(
        help="Seconds until a request is aborted; 0 = never.", rich_help_panel=sections.SERVER
    ),
]
ReadTimeout = Annotated[
    float,
    typer.Option(
        help="Seconds in which a request must have come.", rich_help_panel=sections.SERVER
    ),
]
WriteTimeout = Annotated[
    float,
    typer.Option(
        help="Seconds that a part of a stream may wait for its reader.",
        rich_help_panel=sections.SERVER,
    ),
]
DrainTimeout = Annotated[
    float,
    typer.Option(
        help="Seconds that running texts get when the server is told to stop.",
        rich_help_panel=sections.SERVER,
    ),
]
MaxOpenSessions = Annotated[
    int, typer.Option(help="Most sessions that are open at once.", rich_help_panel=sections.SERVER)
]
SessionTimeout = Annotated[
    float,
    typer.Option(
        help="Seconds after which a session without a turn is closed.",
        rich_help_panel=sections.SERVER,
    ),
]
AccessLog = Annotated[
    bool,
    typer.Option(
        "--access-log/--no-access-log",
        help="Write a line for each request.",
        rich_help_panel=sections.SERVER,
    ),
]
