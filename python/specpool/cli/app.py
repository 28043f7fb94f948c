"""The typer application, and the one place where errors become a message and exit code 2."""

from __future__ import annotations

import io
import os
import sys


def main() -> None:
    """Run the command line; an error of the user's gives one line on stderr and exit code 2."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        print(
            f"error: the command line needs {error.name}: pip install 'specpool[hf]'",
            file=sys.stderr,
        )
        raise SystemExit(2) from None
    from specpool.cli.commands import app
    from specpool.errors import SpecpoolError

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without Unicode shows what it can
    try:
        app()
    except SpecpoolError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except BrokenPipeError:
        # Who read the output has had enough; nothing must be written to it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
