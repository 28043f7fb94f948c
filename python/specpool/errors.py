"""The exceptions of specpool. Their messages have the numbers."""

from __future__ import annotations

import contextlib
import copyreg
from collections.abc import Iterator
from typing import Any


class SpecpoolError(Exception):
    """Base of every specpool error. A refused call has changed nothing."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Restore without `__init__`, because its arguments are not the exception's `args`.
        return copyreg.__newobj__, (type(self), *self.args), vars(self)  # type: ignore[attr-defined]


class OutOfPages(SpecpoolError):  # noqa: N818 - the contract's name
    """A group has too few free pages, or a `BlockPool` too few blocks.

    Attributes:
        group: name of the group; "blocks" of a `BlockPool`.
        need: pages that the call needs.
        free: pages that can be handed out now.
        cached: pages that only the prefix cache holds; they can be handed out too.
        fenced: freed pages that a launched step may still touch.
        reclaimable: pages that only idle rows hold.
    """

    def __init__(
        self,
        message: str,
        group: str,
        need: int,
        free: int,
        cached: int,
        fenced: int,
        reclaimable: int,
    ) -> None:
        super().__init__(message)
        self.group, self.need, self.free, self.cached = group, need, free, cached
        self.fenced, self.reclaimable = fenced, reclaimable


class OutOfMemory(SpecpoolError, MemoryError):  # noqa: N818 - beside OutOfPages and OutOfRows
    """The machine has too little memory for a call; the call has changed nothing.

    Attributes:
        num_bytes: bytes of the block that could not be allocated.
    """

    def __init__(self, message: str, num_bytes: int) -> None:
        super().__init__(message)
        self.num_bytes = num_bytes

    def __reduce__(self) -> tuple[Any, ...]:
        # Restore by calling the type, because only MemoryError's own `__new__` makes instances.
        return type(self), (*self.args, self.num_bytes), vars(self)


class OutOfRows(SpecpoolError):  # noqa: N818 - the contract's name
    """Every row is taken. Attributes: num_rows, fenced."""

    def __init__(self, message: str, num_rows: int, fenced: int) -> None:
        super().__init__(message)
        self.num_rows, self.fenced = num_rows, fenced


class RowOverflow(SpecpoolError):  # noqa: N818 - the contract's name
    """A claim would pass the end of a row. Attributes: group, row, need, width (slots)."""

    def __init__(self, message: str, group: str, row: int, need: int, width: int) -> None:
        super().__init__(message)
        self.group, self.row, self.need, self.width = group, row, need, width


class ContextEnd(SpecpoolError):  # noqa: N818 - the contract's name
    """Rows have reached max_context_len. Attributes: rows."""

    def __init__(self, message: str, rows: list[int]) -> None:
        super().__init__(message)
        self.rows = rows


class PageStateError(SpecpoolError):
    """A page is not in the state that the call needs. Attributes: page, state, owner."""

    def __init__(self, message: str, page: int = -1, state: str = "", owner: str = "") -> None:
        super().__init__(message)
        self.page, self.state, self.owner = page, state, owner


class StalePlan(SpecpoolError):  # noqa: N818 - the contract's name
    """A row of the step has been released since prepare. Attributes: step, row."""

    def __init__(self, message: str, step: int, row: int) -> None:
        super().__init__(message)
        self.step, self.row = step, row


class OrderError(SpecpoolError):
    """A call came out of order in a step's life."""


class NotReady(SpecpoolError):  # noqa: N818 - the contract's name
    """A row cannot take part in the call yet, because something of it is in flight."""


class DraftLag(SpecpoolError):  # noqa: N818 - the contract's name
    """A row's draft KV is behind its target KV. Attributes: row, drafted, resolved."""

    def __init__(self, message: str, row: int, drafted: int, resolved: int) -> None:
        super().__init__(message)
        self.row, self.drafted, self.resolved = row, drafted, resolved


class ShapeError(SpecpoolError):
    """An argument has a wrong length, dtype, value or combination."""


class ConfigError(SpecpoolError, ValueError):
    """A configuration that cannot work."""


class CheckpointError(ConfigError):
    """A checkpoint that does not fit; the message names the tensor or key and what is expected."""


class CorruptState(SpecpoolError):  # noqa: N818 - the contract's name
    """An audit found a broken invariant; the message is the report."""


class RankError(SpecpoolError):
    """Ranks cannot go on together: one has ended, or what it says is no record."""


class RecordError(SpecpoolError):
    """An event log that cannot be written, read or replayed; the message says at which byte."""


class TransferError(SpecpoolError):
    """A row that cannot move: a damaged or foreign image, a wrong key, a peer that is gone."""


def is_fault(error: BaseException) -> bool:
    """Return whether code has failed: an `Exception`, or a Rust library's panic, which is not one.

    Ctrl-C and the end of the process are not faults.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def one_line(error: BaseException, max_length: int = 400) -> str:
    """Return an error's message as one line of at most `max_length` characters.

    The error's type comes first, except for ValueError, OSError and ImportError with a message.
    """
    text = " ".join(str(error).split())
    if not text or not isinstance(error, ValueError | OSError | ImportError):
        text = f"{type(error).__name__}: {text}".removesuffix(": ")
    return text if len(text) <= max_length else text[: max_length - 3] + "..."


@contextlib.contextmanager
def reading(beginning: str, kind: type[ConfigError] = CheckpointError) -> Iterator[None]:
    """Turn any error of a library that reads a file into one error of `kind`.

    A broken or hostile file can raise errors of any type in transformers, and a Rust panic in
    tokenizers, which is not an `Exception`. Errors of specpool pass unchanged.

    Args:
        beginning: begins the message: what could not be done.
        kind: the error to raise.
    """
    try:
        yield
    except SpecpoolError:
        raise
    except BaseException as error:
        if not is_fault(error):
            raise
        raise kind(f"{beginning}: {one_line(error)}") from error


def wants_trust(error: CheckpointError) -> bool:
    """Return whether an error of `reading` means that a checkpoint needs its own Python code."""
    return "trust_remote_code" in str(error.__cause__)


def needs_trust(name: str, part: str) -> CheckpointError:
    """Return the error for a checkpoint that needs its own Python code, which is not trusted."""
    return CheckpointError(
        f"{name}: its {part} is Python code in the checkpoint (auto_map), which is not run unless "
        "you trust it: read it, then give trust_remote_code=True (--trust-remote-code)"
    )
