"""Which attention back ends there are, and what each can read."""

from __future__ import annotations

from dataclasses import dataclass

from specpool.errors import ConfigError


@dataclass(frozen=True, slots=True)
class BackEnd:
    """What an attention back end can do.

    Attributes:
        name: as `EngineConfig.attention` has it.
        reads_ragged_masks: one forward may hold prompts and trees (mixed chunks while drafting).
        needs_host_lengths: the host must know every length before a forward: a round then waits for
            the lengths that the one before left on the device.
    """

    name: str
    reads_ragged_masks: bool
    needs_host_lengths: bool


BACK_ENDS = {
    "torch": BackEnd("torch", reads_ragged_masks=True, needs_host_lengths=False),
}


def back_end(name: str) -> BackEnd:
    """The back end of a name.

    Raises:
        ConfigError: there is none.
    """
    if name not in BACK_ENDS:
        raise ConfigError(f"attention must be one of {', '.join(BACK_ENDS)}, got {name!r}")
    return BACK_ENDS[name]
