"""The log of a `BlockPool`, run again and shown: how it ended, and which blocks are in use."""

from __future__ import annotations

from pathlib import Path

from specpool import BlockPool
from specpool.cli.pictures.terminal import printable

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


def show(log: Path, *, blocks: bool) -> None:
    """Run the log again, and print a summary; with `blocks`, also those that are in use.

    Raises:
        RecordError: the log cannot be read, or the replay differs.
    """
    pool, calls, end = BlockPool.replay(log)
    print(f"{log}: {calls} calls, {ENDS[end]}")
    print(f"final digest {pool.digest or 0:016x}, as recorded")
    if blocks:
        print(f"{pool!r}".strip("<>"))
        print("\n".join(_in_use(pool)))


def _in_use(pool: BlockPool) -> list[str]:
    taken = pool.taken().tolist()
    lines = [f"{len(taken)} of {pool.num_blocks} blocks are held or fenced"]
    for block in taken[:MOST_LINES]:
        state, refs, tag, fence, last_verb = pool.record_of(block)
        who = f"fenced behind step {fence}" if state == "fenced" else f"held {refs} times"
        name = f"  # {printable(tag)}" if tag else ""
        lines.append(f"{block:>8}  {who}, last verb {last_verb}{name}")
    if len(taken) > MOST_LINES:
        lines.append(f"          and {len(taken) - MOST_LINES} more")
    return lines
