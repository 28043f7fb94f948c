"""`specpool sim`: runs the real scheduler and ledger on a simulated device."""

from __future__ import annotations

import importlib.util
import time
from dataclasses import fields
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from specpool.checks import check_int
from specpool.errors import ConfigError
from specpool.sim import Failure, Scenario, Tally, broken_law, scenario, shrink
from specpool.sim.ranks import RanksSimulation, RanksTally
from specpool.sim.simulation import Simulation

# A scenario's seed is the command's seed * SEEDS + the scenario's number.
SEEDS = 1 << 32


def sim(
    *, seed: int, rounds: float, check: int, turns: float | None = None, mixes: bool = False
) -> bool:
    """Simulate, then print a table, and the first broken law with its shrunk scenario.

    With `turns`, simulate sessions until that many turns have ended; else run for `rounds`. With
    `mixes`, each request has its own drafter.

    Returns:
        Whether every law held.

    Raises:
        ConfigError: an option cannot work.
    """
    check_int("seed", seed, 0, (1 << 31) - 1)
    check_int("check", check, 0, 2)
    if not rounds >= 1 or rounds > 1e12 or rounds != int(rounds):
        raise ConfigError(f"rounds must be a whole number in [1, 1e12], got {rounds:g}")
    if turns is not None:
        _check_turns(turns)
    tally, failure = Tally(), None
    started = time.perf_counter()
    console = Console(stderr=True)
    with Progress(transient=True, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("simulating", total=turns or rounds)
        while (done := tally.rounds if turns is None else tally.turns) < (turns or rounds):
            progress.update(task, completed=done)
            number = seed * SEEDS + tally.scenarios
            each = scenario(number, talks_only=turns is not None, mixes_drafters=mixes)
            left = int(rounds) - tally.rounds if turns is None else None
            failure = _one(each, left, check, tally)
            if failure is not None:
                break
    seconds = time.perf_counter() - started
    console = Console(highlight=False)
    console.print(_table(seed, check, tally, seconds, failure))
    if failure is not None:
        console.print(str(failure), markup=False, soft_wrap=True)
    return failure is None


def fleets(*, seed: int, num_replicas: int, turns: float) -> bool:
    """Simulate fleets of replicas until so many turns have ended, and print a table.

    Fleets with all kinds of faults take turns with fleets that are updated twice.

    Returns:
        Whether every law held.

    Raises:
        ConfigError: an option cannot work, or a package is missing.
    """
    check_int("seed", seed, 0, (1 << 31) - 1)
    check_int("replicas", num_replicas, 1, 10_000)
    _check_turns(turns)
    if importlib.util.find_spec("starlette") is None:
        raise ConfigError("sim --replicas needs starlette: pip install 'specpool[serve]'")
    from specpool.serve.replicas.fleet.client import FleetTally
    from specpool.serve.replicas.fleet.fleet import Fleet
    from specpool.serve.replicas.fleet.settings import fleet_settings, update_settings

    tally, failure = FleetTally(), ""
    started = time.perf_counter()
    while tally.turns < turns and not failure:
        make = update_settings if tally.scenarios % 2 else fleet_settings
        settings = make(seed * SEEDS + tally.scenarios, num_replicas)
        fleet = Fleet(settings)
        try:
            fleet.run()
        except Exception as error:
            failure = f"{type(error).__name__}: {error}\nFleet({make.__name__}({settings.seed}, "
            failure += f"{num_replicas})).run()"
        tally.add(fleet.tally)
    console = Console(highlight=False)
    seconds = time.perf_counter() - started
    table = _counts(f"sim: seed {seed}, {num_replicas} replicas", tally)
    table.add_row("seconds", f"{seconds:,.1f}")
    table.add_row("findings", "[bold]1[/bold]" if failure else "0")
    console.print(table)
    if failure:
        console.print(failure, markup=False, soft_wrap=True)
    return not failure


def _check_turns(turns: float) -> None:
    if not turns >= 1 or turns > 1e12 or turns != int(turns):
        raise ConfigError(f"turns must be a whole number in [1, 1e12], got {turns:g}")


def sim_ranks(*, seed: int, rounds: float, num_ranks: int) -> bool:
    """Simulate ranks and their records until so many turns have run, on all ranks together.

    Returns:
        Whether every law held.

    Raises:
        ConfigError: an option cannot work.
    """
    check_int("seed", seed, 0, (1 << 31) - 1)
    check_int("ranks", num_ranks, 2, 64)
    if not rounds >= 1 or rounds > 1e12 or rounds != int(rounds):
        raise ConfigError(f"rounds must be a whole number in [1, 1e12], got {rounds:g}")
    tally, broken, started = RanksTally(), None, time.perf_counter()
    console = Console(stderr=True)
    with Progress(transient=True, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("simulating", total=rounds)
        while broken is None and tally.rank_rounds < rounds:
            progress.update(task, completed=tally.rank_rounds)
            each = RanksSimulation(seed * SEEDS + tally.scenarios, num_ranks)
            try:
                each.run()
            except Exception as error:
                broken = (
                    f"scenario {tally.scenarios}, fault {each.fault}: {type(error).__name__}: "
                    f"{error}"
                )
            tally.add(each.tally)
    table = Table(title=f"sim: seed {seed}, {num_ranks} ranks")
    table.add_column("")
    table.add_column("", justify="right")
    for field in fields(tally):
        table.add_row(field.name.replace("_", " "), f"{getattr(tally, field.name):,}")
    table.add_row("seconds", f"{time.perf_counter() - started:,.1f}")
    table.add_row("findings", "0" if broken is None else "[bold]1[/bold]")
    console = Console(highlight=False)
    console.print(table)
    if broken is not None:
        console.print(broken, markup=False, soft_wrap=True)
    return broken is None


def _one(scenario: Scenario, most_rounds: int | None, check: int, tally: Tally) -> Failure | None:
    """Run a scenario and add its counts to `tally`; return its failure, if a law broke."""
    simulation = Simulation(scenario, check)
    try:
        simulation.run(most_rounds)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        return shrink(simulation.scenario, message, check=check, breaks=broken_law)
    finally:
        tally.add(simulation.tally)
    return None


def _table(seed: int, check: int, tally: Tally, seconds: float, failure: Failure | None) -> Table:
    table = _counts(f"sim: seed {seed}, check level {check}", tally)
    table.add_row("seconds", f"{seconds:,.1f}")
    table.add_row("rounds per second", f"{tally.rounds / seconds:,.0f}")
    table.add_row("findings", "0" if failure is None else "[bold]1[/bold]")
    return table


def _counts(title: str, tally: Any) -> Table:
    table = Table(title=title)
    table.add_column("")
    table.add_column("", justify="right")
    for each in fields(tally):
        table.add_row(each.name.replace("_", " "), f"{getattr(tally, each.name):,}")
    return table
