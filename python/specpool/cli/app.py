"""`main`: runs the command line, and turns errors into a message and exit code 2."""

from __future__ import annotations

import errno
import io
import os
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer

# The error codes of a write to a full or broken disk.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
# The most characters of a message: it may quote an argument or a file.
_MOST_CHARACTERS = 4000


def main() -> None:
    """Run the command line; see `run_app`."""

    def commands() -> typer.Typer:
        from specpool.cli.commands import app

        return app

    run_app(commands)


def run_app(load: Callable[[], typer.Typer]) -> None:
    """Run the application that `load` imports.

    A user's error prints one line on stderr and gives exit code 2. The process ends in this call.
    """
    try:
        import rich  # noqa: F401
        import typer
    except ImportError as error:
        print(
            f"error: the command line needs {error.name}: pip install 'specpool[cli]'",
            file=sys.stderr,
        )
        raise SystemExit(2) from None
    from specpool.errors import SpecpoolError

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for terminals without Unicode
    # All parsing errors derive from `typer.BadParameter`'s parent, which typer does not export.
    usage_error: type[Exception] = typer.BadParameter.__mro__[1]
    try:
        try:
            code = load()(standalone_mode=False)
        finally:
            if sys.stdout is not None:  # it is None if a shell has closed it
                sys.stdout.flush()  # here, because an error at exit cannot be caught
    except typer.Abort:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    except usage_error as error:
        _tell(_one_line(error))
        raise SystemExit(2) from None
    except SpecpoolError as error:
        from specpool.record.terminal import printable

        # The message may contain names from an untrusted log file.
        lines = "\n".join(map(printable, str(error).split("\n")))
        _tell(lines)
        raise SystemExit(2) from None
    except BrokenPipeError:
        _give_up_output()  # the reader has closed the pipe
        raise SystemExit(1) from None
    except OSError as error:
        if error.filename is not None or error.errno not in _NO_ROOM:
            raise
        _give_up_output()
        print(f"error: cannot write the output: {error.strerror}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    raise SystemExit(code or 0)


def _tell(text: str) -> None:
    """Print an error; of a very long message the beginning and the end."""
    if len(text) > _MOST_CHARACTERS:
        left_out = len(text) - _MOST_CHARACTERS
        half = _MOST_CHARACTERS // 2
        text = f"{text[:half]} ... ({left_out} characters) ... {text[-half:]}"
    print(f"error: {text}", file=sys.stderr)


def _one_line(error: Exception) -> str:
    """Return the message of a parsing error of typer or pydantic, on one line."""
    text: str = error.format_message()  # type: ignore[attr-defined]
    text = " ".join(text.split()).replace("Value error, ", "").removesuffix(".")
    if text.startswith("Got unexpected extra argument"):
        text += _prompt_hint(error)
    return re.sub(r"Input should be a valid (\w+), unable to parse.*", r"must be of type \1", text)


def _prompt_hint(error: Exception) -> str:
    """Return how the command takes a prompt, if it takes one; it has no bare arguments."""
    context = getattr(error, "ctx", None)
    parameters = () if context is None else context.command.params
    names = [parameter.opts for parameter in parameters if "--prompt" in parameter.opts]
    return f": give a prompt with {' or '.join(names[0])}, as in -p 'text'" if names else ""


def _give_up_output() -> None:
    """Discard what is still buffered, so that the flush at exit does not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
