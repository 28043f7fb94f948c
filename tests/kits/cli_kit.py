"""The command line, run in this process."""

from __future__ import annotations

import functools
import sys

import pytest
import typer.main

from benches.__main__ import main as run_bench
from lab.__main__ import main as run_lab
from specpool.cli import main
from specpool.cli.generate import generate

# Typer would build all commands for each call, which takes longer than most calls do.
typer.main.get_command = functools.cache(typer.main.get_command)


def call(capsys: pytest.CaptureFixture[str], *args: str, stdin: str | None = None, runs: int = 1):
    """Run the command in this process; returns (exit code, stdout, stderr).

    With `--compare` each kind runs once; a user's runs go on for two seconds, or as often as a
    test says with `runs`.
    "benches" or "lab" for a first word stands for `python -m` and it, else it is `specpool`.
    """
    import io

    run = {"benches": run_bench, "lab": run_lab}.get(args[0] if args else "", main)
    limits = generate.MIN_RUNS, generate.MAX_RUNS
    generate.MIN_RUNS = generate.MAX_RUNS = runs
    before, sys.argv = sys.argv, [*args] if run is not main else ["specpool", *args]
    old_stdin = sys.stdin
    if stdin is not None:
        sys.stdin = io.StringIO(stdin)
    try:
        run()
        code = 0
    except SystemExit as error:
        code = error.code or 0
    finally:
        sys.argv, sys.stdin = before, old_stdin
        generate.MIN_RUNS, generate.MAX_RUNS = limits
    out = capsys.readouterr()
    return code, out.out, out.err
