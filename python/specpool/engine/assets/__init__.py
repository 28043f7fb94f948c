"""The embedded toys: a byte-level Llama, and four drafters for it."""

from __future__ import annotations

from importlib.resources import files

#: Names that stand for the embedded checkpoints wherever a folder or a hub name is asked for.
EMBEDDED = {
    "specpool/tiny": "tiny/target",
    "specpool/tiny-eagle": "tiny/eagle1",
    "specpool/tiny-eagle3": "tiny/eagle3",
    "specpool/tiny-block": "tiny/block",
    "specpool/tiny-draft": "tiny/draft",
}


def resolve(source: str) -> str:
    """Return the folder of an embedded checkpoint; return any other name unchanged."""
    if source not in EMBEDDED:
        return source
    return str(files(__name__).joinpath(EMBEDDED[source]))
