"""Drafters: they propose the tokens that the target model verifies.

`EagleDrafter` runs an EAGLE head, `BlockDrafter` a block drafter (DFlash), `MTPDrafter` the MTP
layer of the target's checkpoint, `LMDrafter` a small language model. `NgramDrafter` searches the
text for earlier copies of its last tokens. `SuffixDrafter` counts what followed them, in one text
or in all. `ScriptedDrafter` knows the text and errs at a given
rate, for tests and benchmarks. A drafter of your own needs the attributes and methods of `Drafter`.
If it also has those of `Choosy`, it can skip rounds that are not worth drafting; with those of
`Patient` it can save work in rounds without drafts; with those of `Reader` it gets tokens without
features.
"""

from specpool.engine.draft.base import Choosy, Drafter, DraftTree, Patient, Reader
from specpool.engine.draft.block import BlockDrafter
from specpool.engine.draft.eagle import EagleDrafter
from specpool.engine.draft.lm import LMDrafter
from specpool.engine.draft.mtp import MTPDrafter
from specpool.engine.draft.ngram import NgramDrafter
from specpool.engine.draft.scripted import ScriptedDrafter
from specpool.engine.draft.suffix import SuffixDrafter
from specpool.engine.models.files.names import check_draft_name, ngram_of, suffix_of

__all__ = [
    "BlockDrafter",
    "Choosy",
    "DraftTree",
    "Drafter",
    "EagleDrafter",
    "LMDrafter",
    "MTPDrafter",
    "NgramDrafter",
    "Patient",
    "Reader",
    "ScriptedDrafter",
    "SuffixDrafter",
    "named_drafter",
]


def named_drafter(name: str) -> Drafter | None:
    """Return the drafter that a name alone stands for; None if the name is of a checkpoint.

    Args:
        name: `ngram`, or `ngram:6` for n-grams of at most 6 tokens; `suffix`, or `suffix:shared`
            for a suffix automaton of all requests' texts.

    Raises:
        ConfigError: the name is nearly one of these; `ngram:` is followed by anything else than a
            number in `[1, MAX_NGRAM]`, or `suffix:` by anything else than `shared`.
    """
    check_draft_name(name)
    shares = suffix_of(name)
    if shares is not None:
        return SuffixDrafter(shares=shares)
    max_ngram = ngram_of(name)
    return None if max_ngram is None else NgramDrafter(max_ngram=max_ngram)
