"""Law: the parts of a round that draft side by side draft what each would draft alone."""

from typing import Any

import numpy as np
import pytest
import torch

from specpool import Engine, SamplingParams
from specpool.engine.assets import corpus
from specpool.engine.draft import EagleDrafter, LMDrafter, NgramDrafter
from specpool.engine.draft.side_by_side import drafts_side_by_side
from specpool.engine.shapes import AdaptiveConfig, BudgetController

NAMES = ["none", "chain:1", "chain:3", "tree:3x4x16", "tree:2x2x5"]
CONFIG = AdaptiveConfig.from_dict({"policy": "budget", "1": {"candidates": NAMES}})


@pytest.mark.sample(1)
@pytest.mark.usefixtures("short_calibration")
@pytest.mark.parametrize(
    ("draft", "layout"),
    [
        pytest.param("tiny-eagle", "dense", marks=pytest.mark.full),
        ("tiny-eagle", "holey"),
        ("tiny-draft", "dense"),
        ("tiny-block", "holey"),
    ],
)
def test_parts_draft_as_each_would_alone(
    draft: str, layout: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One forward of the drafter serves all parts of a depth, and changes no draft of any."""

    def every(self: Any, rows: np.ndarray, shapes: np.ndarray, spare: object = None) -> np.ndarray:
        picks = np.arange(len(rows)) % shapes.shape[1]
        chosen = np.asarray(shapes[np.arange(len(rows)), picks], np.int32)
        self._open = rows, chosen, 0
        return chosen

    monkeypatch.setattr(BudgetController, "choose", every)
    with Engine.from_pretrained(
        draft=f"specpool/{draft}", layout=layout, max_context_len=96, max_batch=9, adaptive=CONFIG
    ) as engine:
        drafter: Any = engine.drafter
        together, num_rounds, num_forwards = drafter.propose_parts, 0, 0
        run = drafter._forward

        def counted(*args: Any, **more: Any) -> torch.Tensor:
            nonlocal num_forwards
            num_forwards += 1
            return run(*args, **more)  # type: ignore[no-any-return]

        def compared(parts: Any) -> Any:
            nonlocal num_rounds, num_forwards
            alone = [together([part])[0] for part in parts]
            num_forwards = 0
            found = together(parts)
            if len(parts) > 1:
                num_rounds += 1
                most = max(part.shape.num_steps for part in parts)
                forwards = {"tiny-draft": most, "tiny-eagle": most - 1, "tiny-block": 1}
                assert num_forwards == forwards[draft]
            for mine, theirs in zip(found, alone, strict=True):
                assert torch.equal(mine.tokens, theirs.tokens)
                assert torch.equal(mine.mask, theirs.mask)
            return found

        drafter._forward, drafter.propose_parts = counted, compared
        params = SamplingParams(max_new_tokens=24)
        found = [o.token_ids for o in engine.generate(corpus.prompts(9, 24), params)]
        assert num_rounds > 5
    with Engine.from_pretrained(max_context_len=96, max_batch=9) as engine:
        params = SamplingParams(max_new_tokens=24)
        assert found == [o.token_ids for o in engine.generate(corpus.prompts(9, 24), params)]


def test_a_subclass_with_a_proposal_of_its_own_is_asked_part_by_part() -> None:
    """Law: what `propose` says is what a round drafts, whoever wrote it."""

    class Own(EagleDrafter):
        def propose(self, *args: Any) -> Any:
            return super().propose(*args)

    assert drafts_side_by_side(EagleDrafter.__new__(EagleDrafter))
    assert drafts_side_by_side(LMDrafter.__new__(LMDrafter))
    assert not drafts_side_by_side(Own.__new__(Own))
    wrapped: Any = EagleDrafter.__new__(EagleDrafter)
    wrapped.propose = lambda *args: None
    assert not drafts_side_by_side(wrapped)
    assert not drafts_side_by_side(NgramDrafter())
