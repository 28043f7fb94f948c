"""What the plug-in needs of SGLang, as it is in the releases that it knows."""

from __future__ import annotations

from specpool.plugins import drift

#: Parameters, by name, of what puts the plug-in's parts in place.
SIGNATURES = {
    "sglang.srt.plugins.hook_registry:HookRegistry.register": "target, hook, hook_type, source",
}


def differences(level: str = "pages") -> list[str]:
    """Return in what SGLang differs from what is needed, a line each; an empty list if in nothing.

    Each level is proved by what SGLang does (`pages_proof`, `reserve_proof`, `rows_proof`), each in
    at most 3 s of CPU.

    Args:
        level: the level of the plug-in.
    """
    if lines := drift.differences(SIGNATURES, {}):
        return lines
    if level == "rows":
        from specpool.plugins.sglang import rows_proof

        line = rows_proof.difference()
        return [] if line is None else [line]
    from specpool.plugins.sglang import pages_proof

    line = pages_proof.difference()
    if line is None and level == "reserve":
        from specpool.plugins.sglang import reserve_proof

        line = reserve_proof.difference()
    return [] if line is None else [line]
