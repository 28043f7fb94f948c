"""What the front and the engine say to each other. All of it can be pickled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specpool.engine.sampling_params import SamplingParams
from specpool.engine.scheduler.request import TokenLogprob
from specpool.engine.texts import NextTurn

# --- the front says ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submit:
    """Queue a prompt, with all its samples. `Accepted` or `Refused` follows."""

    key: int  # the front's number of the call
    prompt: list[int] | NextTurn
    params: SamplingParams
    session: int | None
    priority: int


@dataclass(frozen=True, slots=True)
class Abort:
    """Abort what is left of a `Submit`."""

    key: int


@dataclass(frozen=True, slots=True)
class VerbCall:
    """Do something between two turns. `Reply` or `Refused` follows."""

    key: int
    verb: str  # a name in `Runner.verbs`
    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    """Close the engine and end."""


# --- the engine says --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine is loaded.

    Attributes:
        max_context_len: the most tokens of a sequence.
        vocab_size: tokens of the vocabulary.
        eos_token_ids: tokens that end a text.
        max_batch: the most requests that run at once.
        groups: name, page size and pages of each group.
        config: what a client may know of the engine, for `/server_info`.
        tokenizer: the folder of the tokenizer; None if there is none.
        temperature: of a request that gives none.
        model_key: a hash of the target's configuration; targets of another hash read other tokens.
    """

    max_context_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    max_batch: int
    groups: tuple[tuple[str, int, int], ...]
    config: dict[str, Any]
    tokenizer: str | None
    temperature: float = 1.0
    model_key: str = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine could not be loaded, or cannot go on. Nothing follows."""

    message: str
    is_users: bool  # an option or a checkpoint does not fit


@dataclass(frozen=True, slots=True)
class Accepted:
    """A `Submit` was queued."""

    key: int


@dataclass(frozen=True, slots=True)
class Refused:
    """A `Submit` or `VerbCall` cannot work; nothing has changed."""

    key: int
    message: str
    is_users: bool  # False means a fault of the engine, whose message is not for clients


@dataclass(frozen=True, slots=True)
class Reply:
    """The result of a `VerbCall`."""

    key: int
    value: Any


@dataclass(frozen=True, slots=True)
class Tokens:
    """New tokens of one sample."""

    key: int
    sample: int
    ids: list[int]
    from_draft: list[bool]
    logprobs: list[TokenLogprob] | None


@dataclass(frozen=True, slots=True)
class Done:
    """One sample has ended; see `RequestOutput` for most fields.

    Attributes:
        num_prompt: tokens of the prompt.
        num_accepted: generated tokens that were drafts, without the bonus tokens.
    """

    key: int
    sample: int
    finish_reason: str
    error: str | None
    stop_hit: str | None
    num_prompt: int
    token_ids: list[int]
    num_reused: int
    num_drafts: int
    num_accepted: int
    accept_lens: list[int]
    queue_seconds: float | None
    first_token_seconds: float | None
    seconds: float
