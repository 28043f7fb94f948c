"""Drafters: who proposes the tokens that the target model verifies.

`EagleDrafter` runs an EAGLE head; `NgramDrafter` looks the text's end up in the text before it;
`ScriptedDrafter` knows the text and errs at a rate that is dialled, for tests and benchmarks. One
of your own needs the attributes and methods of `Drafter`; one that is also `Choosy` lets rounds
pass that are not worth drafting, one that is `Patient` spends little on rounds without drafts.
"""

from specpool.draft.base import Choosy, Drafter, DraftTree, Patient
from specpool.draft.eagle import EagleDrafter
from specpool.draft.ngram import NgramDrafter
from specpool.draft.scripted import ScriptedDrafter
from specpool.models.files.names import ngram_of

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
    max_ngram = ngram_of(name)
    return None if max_ngram is None else NgramDrafter(max_ngram=max_ngram)
