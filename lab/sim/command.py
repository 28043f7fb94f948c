"""`python -m lab sim`: runs the real scheduler and ledger on a simulated device."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import Progress

from lab.counts import SEEDS, check_count, counts_table, print_findings
from lab.sim import Failure, Scenario, Tally, broken_law, scenario, shrink
from lab.sim.ranks import RanksSimulation, RanksTally
from lab.sim.simulation import Simulation
from specpool.checks import check_int


def sim(
    *,
    seed: int,
    rounds: float,
    check: int,
    turns: float | None = None,
    mixes: bool = False,
    has_states: bool = False,
) -> bool:
    """Simulate, then print a table, and the first broken law with its shrunk scenario.

    With `turns`, simulate sessions until that many turns have ended; else run for `rounds`. With
    `mixes`, each request has its own drafter; with `has_states`, the target has recurrent layers.

    Returns:
        Whether every law held.

    Raises:
        ConfigError: an option cannot work.
    """
    check_int("seed", seed, 0, (1 << 31) - 1)
    check_int("check", check, 0, 2)
    check_count("rounds", rounds)
    if turns is not None:
        check_count("turns", turns)
    tally, failure = Tally(), None
    started = time.perf_counter()
    console = Console(stderr=True)
    with Progress(transient=True, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("simulating", total=turns or rounds)
        while (done := tally.rounds if turns is None else tally.turns) < (turns or rounds):
            progress.update(task, completed=done)
            number = seed * SEEDS + tally.scenarios
            max_rounds = int(rounds) - tally.rounds if turns is None else None
            failure = _run_scenario(
                scenario(
                    number,
                    talks_only=turns is not None,
                    mixes_drafters=mixes,
                    has_states=has_states,
                ),
                max_rounds,
                check,
                tally,
            )
            if failure is not None:
                break
    seconds = time.perf_counter() - started
    table = counts_table(f"sim: seed {seed}, check level {check}", tally)
    table.add_row("seconds", f"{seconds:,.1f}")
    table.add_row("rounds per second", f"{tally.rounds / seconds:,.0f}")
    print_findings(table, failure)
    return failure is None


def sim_ranks(*, seed: int, rounds: float, num_ranks: int) -> bool:
    """Simulate ranks and their records until so many turns have run, on all ranks together.

    Returns:
        Whether every law held.

    Raises:
        ConfigError: an option cannot work.
    """
    check_int("seed", seed, 0, (1 << 31) - 1)
    check_int("ranks", num_ranks, 2, 64)
    check_count("rounds", rounds)
    tally, failure, started = RanksTally(), None, time.perf_counter()
    console = Console(stderr=True)
    with Progress(transient=True, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("simulating", total=rounds)
        while failure is None and tally.rank_rounds < rounds:
            progress.update(task, completed=tally.rank_rounds)
            simulation = RanksSimulation(seed * SEEDS + tally.scenarios, num_ranks)
            try:
                simulation.run()
            except Exception as error:
                failure = (
                    f"scenario {tally.scenarios}, fault {simulation.fault}: "
                    f"{type(error).__name__}: {error}"
                )
            tally.add(simulation.tally)
    table = counts_table(f"sim: seed {seed}, {num_ranks} ranks", tally)
    table.add_row("seconds", f"{time.perf_counter() - started:,.1f}")
    print_findings(table, failure)
    return failure is None


def _run_scenario(
    scenario: Scenario, max_rounds: int | None, check: int, tally: Tally
) -> Failure | None:
    """Run a scenario and add its counts to `tally`; return its failure, if a law broke."""
    simulation = Simulation(scenario, check)
    try:
        simulation.run(max_rounds)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        return shrink(simulation.scenario, message, check=check, breaks=broken_law)
    finally:
        tally.add(simulation.tally)
    return None
