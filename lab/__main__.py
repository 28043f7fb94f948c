"""`python -m lab NAME`: the commands of the laboratory and their options."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from specpool.cli.app import run_app
from specpool.cli.options.derived import grouped
from specpool.cli.options.groups import PromptOptions
from specpool.cli.options.names import NamingGroup, help_if_alone
from specpool.cli.options.types import DeviceName, Json, Plot, Target, Threads
from specpool.errors import ConfigError

_HELP = "Simulations and comparisons of specpool, from a checkout. Each command explains itself."

app = typer.Typer(
    cls=NamingGroup,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help=_HELP,
)


@app.callback(invoke_without_command=True, help=_HELP)
def options(context: typer.Context) -> None:
    """List the commands, if none is named."""
    help_if_alone(context)


@app.command()
def sim(
    seed: Annotated[int, typer.Option(help="Decides every scenario.")] = 0,
    rounds: Annotated[
        float | None, typer.Option(help="Rounds in all, as in 1e6. [default: 2e4]")
    ] = None,
    check: Annotated[
        int | None,
        typer.Option(
            help="0 = check texts and ends of requests; 1 = also the pools' sums and the order of "
            "requests; 2 = also a full audit each turn, and every slot that is read or written. "
            "[default: 2]"
        ),
    ] = None,
    turns: Annotated[
        float | None,
        typer.Option(help="Run sessions alone until this many turns have ended, such as 1e5."),
    ] = None,
    ranks: Annotated[
        int,
        typer.Option(
            help="Simulate so many ranks, whose records are late, lost, repeated or changed; "
            "--rounds counts the turns of all of them."
        ),
    ] = 1,
    mixed_drafters: Annotated[
        bool,
        typer.Option(
            "--mixed-drafters",
            help="Requests differ in who drafts: some drafters read tokens, some skip rounds.",
        ),
    ] = False,
    states: Annotated[
        bool, typer.Option("--states", help="The target has recurrent layers.")
    ] = False,
) -> None:
    """Test the scheduler and the ledger on a simulated device. Exit code 1: a law is broken."""
    from lab.sim.command import sim as run
    from lab.sim.command import sim_ranks

    if ranks != 1:
        if mixed_drafters:
            raise ConfigError("--mixed-drafters runs one process: leave --ranks out")
        if states:
            raise ConfigError("--states runs one process: leave --ranks out")
        if turns is not None:
            raise ConfigError("--turns runs one process: leave --ranks out")
        if check is not None:
            raise ConfigError("--ranks checks all laws: leave --check out")
        num_rounds = 2e4 if rounds is None else rounds
        if not sim_ranks(seed=seed, rounds=num_rounds, num_ranks=ranks):
            raise typer.Exit(1)
        return
    if rounds is not None and turns is not None:
        raise ConfigError("--rounds and --turns both say when to end: give one")
    num_rounds = 2e4 if rounds is None else rounds
    level = 2 if check is None else check
    if not run(
        seed=seed,
        rounds=num_rounds,
        check=level,
        turns=turns,
        mixes=mixed_drafters,
        has_states=states,
    ):
        raise typer.Exit(1)


@app.command()
def fleet(
    seed: Annotated[int, typer.Option(help="Decides every fleet.")] = 0,
    replicas: Annotated[int, typer.Option(help="Replicas of a fleet.")] = 3,
    turns: Annotated[
        float, typer.Option(help="Run fleets until this many turns have ended.")
    ] = 2e3,
) -> None:
    """Test routing and moving sessions on simulated fleets. Exit code 1: a law is broken.

    Networks lose messages, nodes die and come back, and lists of replicas come late. It needs
    starlette, which specpool[serve] brings, and no Ray.
    """
    if importlib.util.find_spec("starlette") is None:
        raise ConfigError("lab fleet needs starlette: pip install 'specpool[serve]'")
    from lab.fleet.command import fleet as run

    if not run(seed=seed, num_replicas=replicas, turns=turns):
        raise typer.Exit(1)


@app.command()
def adaptive(
    batch: Annotated[
        list[int] | None, typer.Option(help="Rows that run at once. [default: 1, 8 and 32]")
    ] = None,
    rounds: Annotated[
        int, typer.Option(help="Rounds of each phase of the simulated text; 0 = no simulation.")
    ] = 1000,
    tokens: Annotated[int, typer.Option(help="Tokens of a text by the shipped pair.")] = 160,
    repeats: Annotated[
        int, typer.Option(help="Runs of each on the shipped pair; 0 = the simulation alone.")
    ] = 9,
    device: DeviceName = "cpu",
    threads: Threads = 1,
    json: Json = False,
    plot: Plot = None,
) -> None:
    """Policies that choose a shape for each round, beside every static shape and plain decoding."""
    from lab.policies.adaptive import adaptive as run

    run(
        batch_sizes=batch or [1, 8, 32],
        rounds=rounds,
        num_tokens=tokens,
        repeats=repeats,
        device=device,
        threads=threads,
        json=json,
        plot=plot,
    )


@app.command()
def budget(
    batch: Annotated[
        list[int] | None, typer.Option(help="Rows that run at once. [default: 1, 4, 16 and 64]")
    ] = None,
    rounds: Annotated[
        int, typer.Option(help="Rounds of each run on the simulated device; 0 = no simulation.")
    ] = 400,
    tokens: Annotated[int, typer.Option(help="Tokens of a text by the shipped pair.")] = 64,
    repeats: Annotated[int, typer.Option(help="Runs of each on the shipped pair; 0 = none.")] = 5,
    device: DeviceName = "cpu",
    threads: Threads = 1,
    json: Json = False,
    plot: Plot = None,
) -> None:
    """A shape for each row, beside one shape for the batch: throughput, goodput, decision cost."""
    from lab.policies.budget import BATCH_SIZES
    from lab.policies.budget import budget as run

    run(
        batch_sizes=batch or BATCH_SIZES,
        rounds=rounds,
        num_tokens=tokens,
        repeats=repeats,
        device=device,
        threads=threads,
        json=json,
        plot=plot,
    )


@app.command()
@grouped
def ancestry(
    *,
    target: Target = "specpool/tiny",
    draft: Annotated[
        str,
        typer.Option(
            help="EAGLE head: a folder, a hub name, specpool/tiny-eagle or specpool/tiny-eagle3; "
            "or 'mtp', the MTP layer in the target's checkpoint."
        ),
    ] = "specpool/tiny-eagle",
    shape: Annotated[str, typer.Option(help="The draft tree of a round: SxKxN.")] = "4x4x16",
    prompts: PromptOptions,
    num_prompts: Annotated[
        int, typer.Option(help="How many built-in prompts, if no prompt is given.")
    ] = 24,
    num_tokens: Annotated[int, typer.Option(help="Most tokens of each text.")] = 96,
    threads: Threads = 1,
    json: Json = False,
) -> None:
    """Compare accept lengths with exact ancestry and with SGLang's reading of a draft tree."""
    from lab.ancestry import AncestryJob, compare

    compare(
        AncestryJob(
            target=target,
            draft=draft,
            shape=shape,
            prompts=prompts.given(),
            num_prompts=num_prompts,
            num_tokens=num_tokens,
            threads=threads,
            json=json,
        )
    )


engines = typer.Typer(
    cls=NamingGroup,
    help="Break the schedulers of other engines: releases that `make lab-engines` has unpacked.",
)
app.add_typer(engines, name="engines")


@engines.command()
def hunt(
    release: Annotated[str, typer.Argument(help="Such as vllm-0.33.0.")],
    family: Annotated[
        str,
        typer.Option(
            help="What is served: plain; window, states, images, connector, failing or host with "
            "vLLM; sessions with SGLang, in old releases also window, states, allocator or decode."
        ),
    ] = "plain",
    seed: Annotated[int, typer.Option(help="The first case.")] = 0,
    seconds: Annotated[float, typer.Option(help="CPU seconds of each process.")] = 60.0,
    cases: Annotated[float, typer.Option(help="The most cases, such as 1e4.")] = 1e9,
    jobs: Annotated[int, typer.Option(help="Processes.")] = 2,
    known: Annotated[
        bool, typer.Option("--known", help="Tell faults that are published as if they were not.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="A folder for a report of each fault.")] = None,
    record: Annotated[
        Path | None, typer.Option(help="A file that gets a line of JSON with what was found.")
    ] = None,
) -> None:
    """Run random cases, and make what breaks a law smaller. Exit code 1: an unknown fault."""
    from lab.engines.command import hunt as run

    if not run(
        release=release,
        family=family,
        seed=seed,
        seconds=seconds,
        cases=cases,
        jobs=jobs,
        known=known,
        out=out,
        record=record,
    ):
        raise typer.Exit(1)


@engines.command()
def replay(
    path: Annotated[Path, typer.Argument(help="A case.json of a report.")],
    release: Annotated[str, typer.Option(help="Such as vllm-0.33.0.")],
) -> None:
    """Replay a written case. Exit code 1: it breaks a law."""
    from lab.engines.command import replay as run

    if not run(release=release, path=path):
        raise typer.Exit(1)


@app.command()
def house(
    root: Annotated[
        Path, typer.Option(help="The checkout. [default: the one that this command is in]")
    ] = Path(__file__).parents[1],
    verb: Annotated[
        str, typer.Option(help="Count the source files that name this verb of the ledger.")
    ] = "end_turn",
) -> None:
    """Print the sizes of a checkout: lines, files and words, rooms, and names that stand twice."""
    from lab.house import house as run

    run(root=root, verb=verb)


def main() -> None:
    """Run the command line; see `run_app`."""
    run_app(lambda: app)


if __name__ == "__main__":
    main()
