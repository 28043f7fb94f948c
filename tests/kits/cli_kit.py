"""The command line, run in this process."""

from __future__ import annotations

import sys

import pytest

from benches.__main__ import main as run_bench
from specpool.cli import main


def call(capsys: pytest.CaptureFixture[str], *args: str, stdin: str | None = None):
    """Run the command in this process; returns (exit code, stdout, stderr).

    "benches" for a first word stands for `python -m benches`, else it is `specpool`.
    """
    import io

    run, words = (run_bench, args) if args[:1] == ("benches",) else (main, ("specpool", *args))
    before, sys.argv = sys.argv, [*words]
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
    out = capsys.readouterr()
    return code, out.out, out.err
