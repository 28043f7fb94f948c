"""Whether vLLM does what the plug-in needs."""

from __future__ import annotations

from specpool.plugins import proof


def differences(level: str = "blocks") -> list[str]:
    """Return in what vLLM differs from what is needed, a line each; an empty list if in nothing.

    Each level is proved by what vLLM does: its pool and its manager (`pool_proof`), and its hits
    (`speculative_proof`). All of it takes at most `proof.SECONDS` of CPU.

    Args:
        level: the level of the plug-in.
    """
    from specpool.plugins.vllm import pool_proof

    seconds = proof.SECONDS / (2 if level == "speculative" else 1)
    line = pool_proof.difference(seconds)
    if line is None and level == "speculative":
        from specpool.plugins.vllm import speculative_proof

        line = speculative_proof.difference(seconds)
    return [] if line is None else [line]
