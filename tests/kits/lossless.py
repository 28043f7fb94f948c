"""The rule of losslessness: our text equals the reference's, but for near-ties of the reference."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

#: A difference does not count where the reference's own top two logits are closer than this (fp32).
#: On a GPU sums are ordered by the kernel that was chosen, and the logits part by about 1e-5.
MAX_GAP = {"cpu": 1e-5, "cuda": 1e-4}
#: Such positions stay below this share.
MAX_TIED_SHARE = 0.01


class Reference:
    """A plain transformers model: greedy texts by its own `generate`, one prompt at a time."""

    def __init__(self, model: Any) -> None:
        """Keep a copy of `model` with transformers' own attention."""
        self.model = copy.deepcopy(model).eval()
        self._texts: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def text(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """The `num_tokens` tokens that greedy decoding gives, end-of-sequence ignored."""
        key = (tuple(prompt), num_tokens)
        if key not in self._texts:
            ids = torch.tensor([list(prompt)], device=self.model.device)
            with torch.inference_mode():
                out = self.model.generate(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=num_tokens,
                    do_sample=False,
                    eos_token_id=None,
                    pad_token_id=0,
                )
            self._texts[key] = out[0, len(prompt) :].tolist()
        return self._texts[key]

    def gap(self, tokens: Sequence[int]) -> float:
        """Distance of the two largest logits after `tokens`."""
        with torch.inference_mode():
            ids = torch.tensor([list(tokens)], device=self.model.device)
            logits = self.model(input_ids=ids, use_cache=False).logits
        top = logits[0, -1].float().topk(2).values
        return float(top[0] - top[1])


@dataclass
class Comparison:
    """Counts positions compared and near-ties met; a real difference raises at once."""

    num_positions: int = 0
    ties: list[str] = field(default_factory=list)

    def add(self, reference: Reference, prompt: Sequence[int], ours: Sequence[int]) -> None:
        """Compare one output; after a near-tie the texts may part for good."""
        theirs = reference.text(prompt, len(ours))
        for position, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            self.num_positions += 1
            if a != b:
                gap = reference.gap([*prompt, *theirs[:position]])
                where = f"token {position} after {len(prompt)}: ours {a}, theirs {b}, gap {gap:.2e}"
                assert gap < MAX_GAP[reference.model.device.type], where
                self.ties.append(where)
                break

    def finish(self) -> None:
        """Print the near-ties; their share is bounded."""
        for tie in self.ties:
            print("near-tie:", tie)
        assert len(self.ties) <= MAX_TIED_SHARE * self.num_positions, self.ties
