"""`python -m benches NAME`: the benchmarks and their options."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from specpool.cli.app import run_app
from specpool.cli.options.derived import grouped
from specpool.cli.options.names import NamingGroup, help_if_alone
from specpool.cli.options.types import (
    DeviceName,
    Json,
    PageSize,
    Placement,
    Plot,
    ShapeText,
    Target,
    Threads,
)
from specpool.engine.config import HEADROOM
from specpool.errors import ConfigError

OverlapDepth = Annotated[
    int, typer.Option("--depth", help="D: rounds prepared ahead (1 = overlap).")
]

app = typer.Typer(
    cls=NamingGroup,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Speed and memory of specpool, beside a reference in the same run.",
)


@app.callback(invoke_without_command=True)
def options(context: typer.Context) -> None:
    """Speed and memory of specpool, beside a reference in the same run."""
    help_if_alone(context)


@app.command("plain")
def plain(
    size: Annotated[
        list[str] | None,
        typer.Option(
            help="Size of the target: tiny (the shipped one), or a random Llama of 25m or 125m "
            "parameters; may be repeated. [default: tiny and 25m]"
        ),
    ] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Rows. [default: 1 and 8]")] = None,
    context: Annotated[
        list[int] | None,
        typer.Option(
            help="Tokens with KV where decoding begins; 4096 takes minutes at batch 8. "
            "[default: 32 and 512]"
        ),
    ] = None,
    prompt: Annotated[
        list[int] | None, typer.Option(help="Tokens to prefill. [default: 1000]")
    ] = None,
    requests: Annotated[
        int,
        typer.Option(help="Requests that come at once, for continuous batching; 0 = none."),
    ] = 16,
    repeats: Annotated[int, typer.Option(help="Turns of each side; the median counts.")] = 7,
    threads: Annotated[int, typer.Option(help="CPU threads of torch.")] = 1,
    json: Json = False,
    plot: Plot = None,
) -> None:
    """Decoding without drafts, and prefill, on a CPU beside transformers' generate."""
    from benches.plain import plain as run

    run(
        sizes=size or ["tiny", "25m"],
        batch_sizes=batch or [1, 8],
        contexts=context or [32, 512],
        prompts=prompt or [1000],
        num_requests=requests,
        repeats=repeats,
        threads=threads,
        json=json,
        plot=plot,
    )


@app.command("serve")
def serve(
    streams: Annotated[int, typer.Option(help="Texts at once, beside Engine.generate.")] = 32,
    tokens: Annotated[int, typer.Option(help="Tokens of each text.")] = 96,
    repeats: Annotated[int, typer.Option(help="Turns of each side; the median counts.")] = 5,
    flood: Annotated[int, typer.Option(help="Requests that wait while health is asked.")] = 10_000,
    json: Json = False,
    plot: Plot = None,
) -> None:
    """The server's own cost, and where its engine should run: a process or a thread."""
    from benches.serve import serve as run

    run(streams=streams, tokens=tokens, repeats=repeats, flood=flood, json=json, plot=plot)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """The options that `reserve --trace` takes beside the others; None means its default."""

    memory: Annotated[
        str | None,
        typer.Option(
            help="Bytes of KV, such as 8GiB; with --chains, of the card. [default: 8GiB; 80GiB]"
        ),
    ] = None
    prompt: Annotated[int | None, typer.Option(help="Mean prompt tokens. [default: 384]")] = None
    output: Annotated[int | None, typer.Option(help="Mean output tokens. [default: 256]")] = None
    requests: Annotated[int | None, typer.Option(help="Requests. [default: 512]")] = None
    accept_rate: Annotated[
        float | None,
        typer.Option(help="Probability that a draft is right if those before are. [default: 0.7]"),
    ] = None
    headroom: Annotated[
        int | None,
        typer.Option(help=f"Tokens of growth that admission asks for. [default: {HEADROOM}]"),
    ] = None
    seed: Annotated[int | None, typer.Option(help="Seed of the trace. [default: 0]")] = None


@app.command("reserve")
@grouped
def reserve(
    *,
    page_size: PageSize = 64,
    shape: Annotated[str, typer.Option(help="What a round drafts: SxKxN.")] = "5x8x64",
    overlap_depth: OverlapDepth = 1,
    layers: Annotated[int, typer.Option(help="Layers of the target.")] = 32,
    draft_layers: Annotated[int, typer.Option(help="Layers of the draft model.")] = 1,
    trace: Annotated[
        bool,
        typer.Option(
            "--trace",
            help="Count instead how many requests of a trace run at once, SGLang's way and ours, "
            "on the same bytes of a simulated device. It takes the options --memory to --seed too.",
        ),
    ] = False,
    chains: Annotated[
        bool,
        typer.Option(
            "--chains",
            help="Count instead how many requests fit on a card that drafts chains, with the draft "
            "KV of all tokens and with that of a window. It takes --memory too.",
        ),
    ] = False,
    of_trace: TraceOptions,
    json: Json = False,
    plot: Plot = None,
) -> None:
    """Slots that a round reserves, by policy, placement and layout; closed form and brute force."""
    from benches.reserve import reserve
    from benches.trace import trace as run_trace

    given = {name: value for name, value in asdict(of_trace).items() if value is not None}
    if trace and chains:
        raise ConfigError("--trace and --chains count different things: give one of them")
    unknown = [] if trace else [name for name in given if not chains or name != "memory"]
    if unknown:
        names = ", ".join("--" + name.replace("_", "-") for name in unknown)
        raise ConfigError(f"only --trace takes {names}")
    if chains:
        if (shape, layers, draft_layers) != ("5x8x64", 32, 1):
            raise ConfigError("--chains has pairs of its own: no --shape, --layers, --draft-layers")
        from benches.chains import chains as run_chains

        run_chains(
            page_size=page_size,
            overlap_depth=overlap_depth,
            memory=of_trace.memory,
            json=json,
            plot=plot,
        )
        return
    options: dict[str, Any] = {
        "page_size": page_size,
        "shape": shape,
        "overlap_depth": overlap_depth,
        "target_layers": layers,
        "draft_layers": draft_layers,
        "json": json,
        "plot": plot,
    }
    if trace:
        run_trace(**options, **given)
    else:
        reserve(**options)


@app.command("states")
def states(
    memory: Annotated[
        str | None, typer.Option(help="Bytes of KV and states. [default: 32GiB]")
    ] = None,
    requests: Annotated[int, typer.Option(help="Requests of the trace.")] = 1024,
    overlap_depth: OverlapDepth = 0,
    seed: Annotated[int, typer.Option(help="Seed of the trace.")] = 0,
    json: Json = False,
    plot: Plot = None,
) -> None:
    """Recurrent states in slots and rings, beside a whole state for each draft token."""
    from benches.states import states as run

    run(
        memory=memory,
        requests=requests,
        overlap_depth=overlap_depth,
        seed=seed,
        json=json,
        plot=plot,
    )


@app.command("held-states")
def held_states(
    requests: Annotated[int, typer.Option(help="Requests that come one after the other.")] = 32,
    accept_rate: Annotated[float, typer.Option(help="How often a draft is right.")] = 0.7,
    seed: Annotated[int, typer.Option(help="Seed of lengths and accepts.")] = 0,
    json: Json = False,
    plot: Plot = None,
) -> None:
    """States and draft memory of requests of hybrid models, beside vLLM's and SGLang's."""
    from benches.held_states import held_states as run

    run(requests=requests, accept_rate=accept_rate, seed=seed, json=json, plot=plot)


@app.command("ledger")
def ledger(
    batch: Annotated[
        list[int] | None, typer.Option(help="Rows of a step. [default: 1, 32, 256, 1024 and 4096]")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Turns of each side; the median counts.")] = 5,
    overlap_depth: OverlapDepth = 0,
    placement: Placement = "shared",
    layout: Annotated[str, typer.Option(help="Where drafts lie: dense or holey.")] = "dense",
    json: Json = False,
    plot: Plot = None,
) -> None:
    """The ledger's calls for one decode step, beside the same bookkeeping in plain Python."""
    from benches.ledger import BATCHES
    from benches.ledger import ledger as run

    run(
        batch_sizes=batch or BATCHES,
        repeats=repeats,
        overlap_depth=overlap_depth,
        placement=placement,
        layout=layout,
        json=json,
        plot=plot,
    )


@app.command("windows")
def windows(
    family: Annotated[
        list[str] | None,
        typer.Option(help="Family of models with sliding layers. [default: all four]"),
    ] = None,
    window: Annotated[int, typer.Option(help="Positions that a sliding layer sees.")] = 64,
    batch: Annotated[int, typer.Option(help="Rows that run at once.")] = 4,
    prompt: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 64,
    tokens: Annotated[int, typer.Option(help="Tokens to generate.")] = 448,
    page_size: PageSize = 16,
    overlap_depth: OverlapDepth = 1,
    json: Json = False,
    plot: Plot = None,
) -> None:
    """Memory held per row: sliding layers in window groups, and all layers in full groups."""
    from benches.windows import windows

    windows(
        families=family or (),
        window=window,
        num_rows=batch,
        prompt_len=prompt,
        num_tokens=tokens,
        page_size=page_size,
        overlap_depth=overlap_depth,
        json=json,
        plot=plot,
    )


@app.command("scheduler")
def scheduler(
    batch: Annotated[
        list[int] | None, typer.Option(help="Rows of a round. [default: 1, 32, 256 and 1024]")
    ] = None,
    shape: Annotated[str, typer.Option(help="What a round drafts: SxKxN.")] = "3x1x4",
    page_size: PageSize = 16,
    overlap_depth: OverlapDepth = 1,
    repeats: Annotated[int, typer.Option(help="Turns of each batch; the median counts.")] = 5,
    json: Json = False,
    plot: Plot = None,
) -> None:
    """The host's time for a round of scheduler and ledger, in its parts."""
    from benches.scheduler import BATCHES
    from benches.scheduler import scheduler as run

    run(
        batch_sizes=batch or BATCHES,
        shape=shape,
        page_size=page_size,
        overlap_depth=overlap_depth,
        repeats=repeats,
        json=json,
        plot=plot,
    )


@app.command("host")
def host(
    target: Target = "specpool/tiny",
    draft: Annotated[
        str, typer.Option(help="EAGLE head, whose KV goes along; none = the target's alone.")
    ] = "specpool/tiny-eagle",
    shape: ShapeText = None,
    tokens: Annotated[
        list[int] | None, typer.Option(help="Tokens with KV; may be repeated. [default: 1000]")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Runs of each; the median counts.")] = 9,
    device: DeviceName = "cpu",
    threads: Threads = 1,
    json: Json = False,
    plot: Plot = None,
) -> None:
    """Time to bring a request back from the host, beside prefilling it again."""
    from benches.host import host as run

    run(
        target=target,
        draft=draft,
        shape=shape,
        num_tokens=tokens or [1000],
        repeats=repeats,
        device=device,
        threads=threads,
        json=json,
        plot=plot,
    )


@app.command("transfer")
def transfer(
    target: Target = "specpool/tiny",
    draft: Annotated[
        str, typer.Option(help="EAGLE head, whose KV goes along; none = the target's alone.")
    ] = "specpool/tiny-eagle",
    tokens: Annotated[int, typer.Option(help="Tokens of the session.")] = 4096,
    page_size: Annotated[int, typer.Option(help="Slots per page.")] = 16,
    repeats: Annotated[int, typer.Option(help="Runs of each; the median counts.")] = 15,
    device: DeviceName = "cpu",
    threads: Threads = 1,
    json: Json = False,
    plot: Plot = None,
) -> None:
    """Speed at which a session moves to another engine, beside a copy of its bytes."""
    from benches.transfer import transfer as run

    run(
        target=target,
        draft=draft,
        num_tokens=tokens,
        page_size=page_size,
        repeats=repeats,
        device=device,
        threads=threads,
        json=json,
        plot=plot,
    )


@app.command("ranks")
def ranks(
    rows: Annotated[
        list[int] | None, typer.Option(help="Rows of a round; may be repeated. [default: 1, 8, 32]")
    ] = None,
    hidden: Annotated[int, typer.Option(help="Width of the layer that is reduced.")] = 4096,
    arrivals: Annotated[int, typer.Option(help="Prompts of 512 tokens in each record.")] = 0,
    repeats: Annotated[int, typer.Option(help="Records of each; the median counts.")] = 400,
    json: Json = False,
) -> None:
    """The record that rank 0 broadcasts each turn, beside one layer's all-reduce (gloo)."""
    from benches.ranks import Job, run

    run(Job(rows=rows or [1, 8, 32], hidden=hidden, repeats=repeats, arrivals=arrivals, json=json))


@app.command("session")
def session(
    target: Target = "specpool/tiny",
    draft: Annotated[
        str, typer.Option(help="EAGLE head, whose KV stays too; none = the target's alone.")
    ] = "specpool/tiny-eagle",
    shape: ShapeText = None,
    history: Annotated[int, typer.Option(help="Tokens of the turns before.")] = 1500,
    new: Annotated[
        list[int] | None,
        typer.Option(help="Tokens that the turn adds; may be repeated. [default: 16 and 128]"),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Runs of each; the median counts.")] = 9,
    device: DeviceName = "cpu",
    threads: Threads = 1,
    json: Json = False,
    plot: Plot = None,
) -> None:
    """Time to a turn's first token, beside the same tokens as a new prompt."""
    from benches.session import session as run

    run(
        target=target,
        draft=draft,
        shape=shape,
        history=history,
        num_new=new or [16, 128],
        repeats=repeats,
        device=device,
        threads=threads,
        json=json,
        plot=plot,
    )


@app.command("embed")
def embed(
    nano_vllm: Annotated[
        Path | None, typer.Option(help="A checkout of nano-vllm, whose manager is measured too.")
    ] = None,
    mini_sglang: Annotated[
        Path | None, typer.Option(help="The same of mini-sglang, whose keys are compared in C++.")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Turns of each side; the median counts.")] = 7,
    json: Json = False,
    plot: Plot = None,
) -> None:
    """`BlockPool` under other engines, beside their own block managers."""
    from benches.embed import embed as run

    run(nano_vllm=nano_vllm, mini_sglang=mini_sglang, repeats=repeats, json=json, plot=plot)


@app.command("sglang")
def sglang(
    path: Annotated[
        Path | None,
        typer.Option(help="Folder of SGLang's package; by default that of `make engines`."),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Turns of each side; the median counts.")] = 15,
    json: Json = False,
    plot: Plot = None,
) -> None:
    """The plug-in for SGLang beside SGLang's own allocators."""
    from benches.sglang import sglang as run

    run(path, repeats=repeats, json=json, plot=plot)


@app.command("vllm")
def vllm(
    path: Annotated[
        Path | None,
        typer.Option(help="Folder of vLLM's package; by default that of `make engines`."),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Turns of each side; the median counts.")] = 15,
    json: Json = False,
    plot: Plot = None,
) -> None:
    """The plug-in for vLLM beside vLLM's own block pool."""
    from benches.vllm import vllm as run

    run(path, repeats=repeats, json=json, plot=plot)


@app.command("peers")
def peers(
    peer: Annotated[
        str,
        typer.Option(help="The other engine: vllm, llama-cpp, or plain: our own plain rounds."),
    ] = "vllm",
    python: Annotated[
        Path | None,
        typer.Option(help="Python that has it; by default that of `make vllm-cpu llama-cpp-cpu`."),
    ] = None,
    size: Annotated[
        list[str] | None,
        typer.Option(
            help="Size of the model: tiny (the shipped one), or a random Llama of 25m or 125m "
            "parameters; may be repeated. [default: all three]"
        ),
    ] = None,
    trace: Annotated[
        list[str] | None,
        typer.Option(
            help="Prompts: one, ragged-8, ragged-24, shared, repeating or long; may be repeated. "
            "[default: all]"
        ),
    ] = None,
    drafts: Annotated[
        list[int] | None,
        typer.Option(
            help="Tokens of prompt lookup a round, 0 = plain; may be repeated. [default: 0]"
        ),
    ] = None,
    threads: Annotated[
        list[int] | None,
        typer.Option(help="CPU threads of both; may be repeated. [default: 1 and 2]"),
    ] = None,
    adaptive: Annotated[
        str | None,
        typer.Option(
            help="Policy that chooses our drafts, at most --drafts: cost or budget. "
            "[default: as many each round]"
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Pairs that count; the median counts.")] = 5,
    json: Json = False,
    plot: Plot = None,
) -> None:
    """Decoding beside another engine, or our plain rounds, on the same CPU, with equal texts."""
    from benches.peers import TRACES
    from benches.peers import peers as run

    run(
        peer=peer,
        python=python,
        sizes=size or ["tiny", "25m", "125m"],
        traces=trace or TRACES,
        drafts=drafts or [0],
        threads=threads or [1, 2],
        adaptive=adaptive,
        repeats=repeats,
        json=json,
        plot=plot,
    )


@app.command("profile")
def profile(
    size: Annotated[
        list[str] | None,
        typer.Option(
            help="Size of the model: tiny (the shipped one), or a random Llama of 25m or 125m "
            "parameters; may be repeated. [default: 25m]"
        ),
    ] = None,
    trace: Annotated[
        list[str] | None,
        typer.Option(
            help="Prompts: one, ragged-8, ragged-24, shared, repeating or long; may be repeated. "
            "[default: one, ragged-24, shared, long]"
        ),
    ] = None,
    json: Json = False,
    plot: Plot = None,
) -> None:
    """Which operators take a CPU's time while plain requests run."""
    from benches.cpu_profile import profile as run

    run(
        sizes=size or ["25m"],
        traces=trace or ["one", "ragged-24", "shared", "long"],
        json=json,
        plot=plot,
    )


@app.command("vllm-engine")
def vllm_engine(
    size: Annotated[
        list[str] | None,
        typer.Option(
            help="Size of the model: tiny (the shipped pair) or a random Llama of 25m parameters; "
            "may be repeated. [default: both]"
        ),
    ] = None,
    mode: Annotated[
        list[str] | None,
        typer.Option(
            help="Drafts: plain, ngram or eagle (tiny alone); may be repeated. [default: all]"
        ),
    ] = None,
    level: Annotated[
        list[str] | None,
        typer.Option(
            help="Level of the plug-in: off, blocks or speculative; may be repeated. [default: all]"
        ),
    ] = None,
) -> None:
    """vLLM's whole engine on a CPU: equal texts at each level, and a planted double free."""
    from benches.vllm_engine import LEVELS, MODES, SIZES
    from benches.vllm_engine import vllm_engine as run

    run(sizes=size or SIZES, modes=mode or MODES, levels=level or LEVELS)


@app.command("prefix")
def prefix(
    target: Target = "specpool/tiny",
    draft: Annotated[
        str, typer.Option(help="EAGLE head, whose KV is found too; none = the target's alone.")
    ] = "specpool/tiny-eagle",
    shape: ShapeText = None,
    requests: Annotated[int, typer.Option(help="Requests of the common system prompt.")] = 64,
    common: Annotated[int, typer.Option(help="Tokens of that prompt.")] = 600,
    repeats: Annotated[int, typer.Option(help="Runs of each; the median counts.")] = 3,
    threads: Threads = 1,
    json: Json = False,
    plot: Plot = None,
) -> None:
    """Tokens computed, time to first token and throughput, with the prefix cache and without."""
    from benches.prefix import prefix as run

    run(
        target=target,
        draft=draft,
        shape=shape,
        num_requests=requests,
        common=common,
        repeats=repeats,
        threads=threads,
        json=json,
        plot=plot,
    )


@app.command("grammar")
def grammar(
    vocab: Annotated[
        int,
        typer.Option(
            help="Tokens of a vocabulary that is trained on Python's own library, for the masks; "
            "0 = none."
        ),
    ] = 32_000,
    repeats: Annotated[int, typer.Option(help="Runs of each; the median counts.")] = 5,
    threads: Threads = 1,
    json: Json = False,
    plot: Plot = None,
) -> None:
    """Masks of a JSON schema by node, and rounds with forced spans beside rounds without."""
    from benches.grammar import grammar as run

    run(vocab=vocab, repeats=repeats, threads=threads, json=json, plot=plot)


@app.command("drafters")
def drafters(
    steps: Annotated[int, typer.Option(help="Drafts of a round.")] = 5,
    tokens: Annotated[int, typer.Option(help="Tokens of each text of the toys.")] = 128,
    prompt: Annotated[
        int, typer.Option(help="Tokens of a prompt of the random model; 0 = the toys alone.")
    ] = 2000,
    repeats: Annotated[int, typer.Option(help="Runs of each; the median counts.")] = 5,
    threads: Threads = 1,
    json: Json = False,
    plot: Plot = None,
) -> None:
    """A small model, prompt lookup and suffix decoding beside transformers' own, batch 1."""
    from benches.drafters import drafters as run

    run(
        steps=steps,
        tokens=tokens,
        prompt=prompt,
        repeats=repeats,
        threads=threads,
        json=json,
        plot=plot,
    )


@app.command("replicas")
def replicas(
    number: Annotated[
        list[int] | None,
        typer.Option(help="Replicas that a router knows. [default: 3, 100, 1000 and 10000]"),
    ] = None,
    fleet: Annotated[int, typer.Option(help="Replicas of the simulated fleets.")] = 1000,
    repeats: Annotated[int, typer.Option(help="Runs of each; the median counts.")] = 7,
    json: Json = False,
    plot: Plot = None,
) -> None:
    """A router's choices by the number of replicas, and what simulated fleets lose by deaths."""
    from benches.replicas import replicas as run

    run(
        numbers=number or [3, 100, 1000, 10_000],
        fleet=fleet,
        repeats=repeats,
        json=json,
        plot=plot,
    )


@app.command("recurrent")
def recurrent(
    family: Annotated[
        list[str] | None,
        typer.Option(help="qwen3_5, bamba or lfm2; may be repeated. [default: all]"),
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option(help="Rows; may be repeated. [default: 1, 4 and 8]")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Turns of each side; the median counts.")] = 5,
    threads: Threads = 1,
    json: Json = False,
    plot: Plot = None,
) -> None:
    """Chains on models with recurrent layers, beside plain decoding and the synchronous worker."""
    from benches.recurrent import FAMILIES
    from benches.recurrent import recurrent as run

    run(
        families=family or list(FAMILIES),
        batch_sizes=batch or [1, 4, 8],
        repeats=repeats,
        threads=threads,
        json=json,
        plot=plot,
    )


@app.command("beside")
def beside(
    checkout: Annotated[Path, typer.Argument(help="Another checkout, with `make install` done.")],
    starts: Annotated[int, typer.Option(help="Processes of plain decoding.")] = 12,
    json: Json = False,
    plot: Plot = None,
) -> None:
    """A ledger's step, a scheduler's round and plain decoding, beside another checkout's."""
    from benches.beside import beside as run

    run(checkout=checkout, starts=starts, json=json, plot=plot)


@app.command("draft-windows")
def draft_windows(
    length: Annotated[int, typer.Option(help="Tokens of a text in training.")] = 2048,
    target_minutes: Annotated[
        float, typer.Option(help="CPU time in which the target learns long texts.")
    ] = 4.0,
    draft_minutes: Annotated[float, typer.Option(help="The same for each drafter.")] = 1.5,
    prompts: Annotated[int, typer.Option(help="Held-out prompts.")] = 6,
    prompt: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 1600,
    tokens: Annotated[int, typer.Option(help="Tokens to generate.")] = 440,
    keep: Annotated[
        Path | None,
        typer.Option(help="Folder of trained models: those in it are used, others are kept."),
    ] = None,
    threads: Threads = 1,
    json: Json = False,
    plot: Plot = None,
) -> None:
    """Accept lengths with draft windows on long texts, of three kinds of drafters."""
    from benches.draft_windows import draft_windows

    draft_windows(
        length=length,
        target_minutes=target_minutes,
        draft_minutes=draft_minutes,
        prompts=prompts,
        prompt=prompt,
        tokens=tokens,
        keep=keep,
        threads=threads,
        json=json,
        plot=plot,
    )


@app.command("train")
def train(
    kind: Annotated[
        list[str] | None, typer.Option(help="qwen3 or gemma3; may be repeated. [default: both]")
    ] = None,
    hidden_size: Annotated[int, typer.Option(help="Of the target; a multiple of 64.")] = 512,
    layers: Annotated[int, typer.Option(help="Of the target.")] = 8,
    target_minutes: Annotated[
        float, typer.Option(help="CPU time in which the target learns the corpus.")
    ] = 6.0,
    epochs: Annotated[
        float, typer.Option(help="Passes of the head's training over a megabyte of text.")
    ] = 0.06,
    keep: Annotated[
        Path | None,
        typer.Option(help="Folder of trained targets: those in it are used, others are kept."),
    ] = None,
    threads: Threads = 1,
    json: Json = False,
    plot: Plot = None,
) -> None:
    """Heads that `specpool train` makes for trained random models, beside prompt lookup."""
    from benches.train import KINDS
    from benches.train import train as run

    run(
        kinds=kind or KINDS,
        hidden_size=hidden_size,
        layers=layers,
        target_minutes=target_minutes,
        epochs=epochs,
        keep=keep,
        threads=threads,
        json=json,
        plot=plot,
    )


def main() -> None:
    """Run the benchmark that the command line names."""
    run_app(lambda: app)


if __name__ == "__main__":
    main()
