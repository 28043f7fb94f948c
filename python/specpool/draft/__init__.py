"""Drafters: who proposes the tokens that the target model verifies."""

from specpool.draft.base import Drafter, DraftTree
from specpool.draft.eagle import EagleDrafter
from specpool.draft.scripted import ScriptedDrafter

__all__ = ["DraftTree", "Drafter", "EagleDrafter", "ScriptedDrafter"]
