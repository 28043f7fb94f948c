"""A conversation that survives a restart: after each turn its KV is in a file.

    python examples/checkpoint.py conversation.row

Each line of the standard input is a turn. Kill the process whenever you like and start it again:
the conversation goes on after the last turn whose answer was printed, and nothing of it is computed
again.
"""

from __future__ import annotations

import sys
from pathlib import Path

from specpool import Engine, SamplingParams
from specpool.engine.session import Session
from specpool.engine.transfer.parcel import load, save


def restored(engine: Engine, path: Path) -> Session:
    """Return the conversation of the file, or a new one."""
    if not path.exists():
        return engine.open_session()
    session = engine.import_row(load(path, engine.layout))
    if not isinstance(session, Session):
        sys.exit(f"{path} has a request, not a conversation")
    return session


def main() -> None:
    """Answer line after line."""
    path, params = Path(sys.argv[1]), SamplingParams(max_new_tokens=16)
    with Engine.from_pretrained(draft="specpool/tiny-eagle") as engine:
        session = restored(engine, path)
        for line in sys.stdin:
            output = session.append(line.rstrip("\n"), params).output()
            with engine.export(session) as export:  # the end of the block gives it back
                save(export, path)
            print(f"{output.text!r}, {output.num_reused} tokens were there", flush=True)


if __name__ == "__main__":
    main()
