"""The log of a `BlockPool`, run again and shown: how it ended, and which blocks are in use."""

from __future__ import annotations

from pathlib import Path

from specpool import BlockPool
from specpool.checks import check_int
from specpool.errors import RecordError
from specpool.plugins.wrong_free import MARK
from specpool.record.terminal import printable

MAGIC = b"\x89SPBLK\r\n"  # how such a log begins
MOST_LINES = 40

# The printed text for each way in which a log ends.
ENDS = {
    "closed": "closed",
    "limit": "ended at its record_limit; the pool went on unrecorded",
    "open": "not closed: its writer still runs, or died",
}


def is_pool_log(log: Path) -> bool:
    """Return whether the file begins as the log of a pool. A file that cannot be read does not."""
    try:
        with log.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def replay(log: Path, *, quiet: bool) -> None:
    """Run the log again; print every call (unless `quiet`) and a summary.

    Raises:
        RecordError: the log cannot be read, or the replay differs.
    """
    _summary(log, *BlockPool.replay(log, show=None if quiet else _print_call))


def show(log: Path, *, at: int | None) -> None:
    """Print a summary, wrong frees, and the blocks in use, at the log's end or after call `at`.

    Raises:
        RecordError: the log has no such call, or cannot be replayed up to it.
        ConfigError: `at` is below 0.
    """
    if at is not None:
        check_int("at", at, 0, 1 << 62)
    wrong: list[str] = []

    def note(index: int, text: str, tag: str | None) -> None:
        if tag is not None and tag.startswith(MARK):
            wrong.append(f"call {index}: {printable(tag)}")

    pool, calls, end = BlockPool.replay(log, most=at, show=note)
    if at is not None and calls < at:
        raise RecordError(f"{log} has {calls} calls, there is no call {at}")
    _summary(log, pool, calls, end)
    print(f"{pool!r}".strip("<>"))
    print("\n".join([*wrong, *_in_use(pool)]))


def _print_call(index: int, text: str, tag: str | None) -> None:
    name = f"  # {printable(tag)}" if tag else ""
    print(f"{index:>8}  {text}{name}")


def _summary(log: Path, pool: BlockPool, calls: int, end: str | None) -> None:
    if end is None:
        print(f"{log}: after {calls} calls")
    else:
        print(f"{log}: {calls} calls, {ENDS[end]}")
    print(f"{'final ' if end else ''}digest {pool.digest or 0:016x}, as recorded")


def _in_use(pool: BlockPool) -> list[str]:
    blocks = pool.taken().tolist()
    lines = [f"{len(blocks)} of {pool.num_blocks} blocks are held or fenced"]
    for block in blocks[:MOST_LINES]:
        state, refs, tag, fence, last_verb = pool.record_of(block)
        holder = f"fenced behind step {fence}" if state == "fenced" else f"held {refs} times"
        name = f"  # {printable(tag)}" if tag else ""
        lines.append(f"{block:>8}  {holder}, last verb {last_verb}{name}")
    if len(blocks) > MOST_LINES:
        lines.append(f"          and {len(blocks) - MOST_LINES} more")
    return lines
