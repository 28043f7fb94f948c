"""`drafts_of`: which drafts `--draft` names; and the checks of what other options say of them."""

from __future__ import annotations

from collections.abc import Sequence

from specpool.checks import shown
from specpool.engine.models.files.names import is_lookup
from specpool.errors import ConfigError


def drafts_of(target: str, given: Sequence[str] | None) -> list[str]:
    """Return the drafts to load, the first of which drafts unless a request names another.

    The embedded target has the embedded head by default. `none` alone is no draft.

    Raises:
        ConfigError: a draft is named twice, or `none` beside others.
    """
    if not given:
        return ["specpool/tiny-eagle"] if target == "specpool/tiny" else []
    if "none" in given:
        if len(given) > 1:
            raise ConfigError(f"draft: none goes with no other, got {', '.join(given):.200}")
        return []
    for name in given:
        if given.count(name) > 1:
            raise ConfigError(f"draft: {shown(name)} is named {given.count(name)} times")
    return [*given]


def draft_of(target: str, given: Sequence[str] | None) -> str | None:
    """Return the single draft of a command that measures one; None = there is none.

    Raises:
        ConfigError: several are given.
    """
    drafts = drafts_of(target, given)
    if len(drafts) > 1:
        raise ConfigError(f"draft: one is measured, got {len(drafts)}: {', '.join(drafts):.200}")
    return drafts[0] if drafts else None


def check_drafter(drafts: Sequence[str], drafter: str | None) -> None:
    """Raise `ConfigError` unless `drafter` is None or one of the drafts."""
    if drafter is not None and drafter not in drafts:
        known = ", ".join(map(repr, drafts)) or "none"
        raise ConfigError(f"drafter: no draft is named {shown(drafter)}; there is {known}")


def keep_kv(drafts: Sequence[str]) -> bool:
    """Return whether any of the drafts is a model, which keeps KV."""
    return not all(is_lookup(name) for name in drafts)
