"""Drafters: who proposes the tokens that the target model verifies.

`EagleDrafter` runs an EAGLE head; `NgramDrafter` looks the text's end up in the text before it;
`ScriptedDrafter` knows the text and errs at a rate that is dialled, for tests and benchmarks. One
of your own needs the attributes and methods of `Drafter`; one that is also `Choosy` lets rounds
pass that are not worth drafting, one that is `Patient` spends little on rounds without drafts.
"""

from specpool.config import check_int
from specpool.draft.base import Choosy, Drafter, DraftTree, Patient
from specpool.draft.eagle import EagleDrafter
from specpool.draft.ngram import MAX_NGRAM, NgramDrafter
from specpool.draft.scripted import ScriptedDrafter
from specpool.errors import ConfigError

__all__ = [
    "Choosy",
    "DraftTree",
    "Drafter",
    "EagleDrafter",
    "NgramDrafter",
    "Patient",
    "ScriptedDrafter",
    "named_drafter",
]


def named_drafter(name: str) -> Drafter | None:
    """The drafter that a name alone stands for; None = the name is of a checkpoint.

    Args:
        name: `ngram`, or `ngram:6` for n-grams of at most 6 tokens.

    Raises:
        ConfigError: `ngram:` with anything else than a number in `[1, MAX_NGRAM]`.
    """
    kind, colon, number = name.partition(":")
    if kind != "ngram":
        return None
    if not colon:
        return NgramDrafter()
    if not (number.isascii() and number.isdigit()):
        raise ConfigError(f"ngram:n needs a number n in [1, {MAX_NGRAM}], got {name!r:.80}")
    check_int("the n of ngram:n", int(number), 1, MAX_NGRAM)
    return NgramDrafter(max_ngram=int(number))
