"""The rule of losslessness: our text equals the reference's, but for near-ties of the reference.

A near-tie is also where the reference itself says two things: token by token, and all at once. Over
dozens of tokens Zamba2's cached steps move its logits by 2e-3.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specpool import kernels
from specpool._core import sample_margins

#: A difference does not count where the reference's own top two logits are closer than this (fp32).
#: On a GPU sums are ordered by the kernel that was chosen, and the logits part by about 1e-5.
MAX_GAP = {"cpu": 1e-5, "cuda": 1e-4}
#: Such positions stay below this share.
MAX_TIED_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class Draw:
    """How a text is drawn. As a logits processor it leaves one token, so greedy decoding draws."""

    temperature: float
    seed: int

    def parameters(self, position: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Temperature, top_k, top_p and the uniform number of the token at `position`."""
        uniform = kernels.uniform(torch.tensor([self.seed]), torch.tensor([position]))
        top_k = torch.zeros(1, dtype=torch.int32)
        return torch.tensor([self.temperature]), top_k, torch.ones(1), uniform

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        token = kernels.sample_tokens(scores.float(), *self.parameters(input_ids.shape[1]))
        return torch.full_like(scores, -torch.inf).scatter_(1, token.unsqueeze(1), 0.0)


class Reference:
    """A plain transformers model: texts by its own `generate`, one prompt at a time."""

    def __init__(self, model: Any) -> None:
        """Keep a copy of `model` with transformers' own attention."""
        self.model = copy.deepcopy(model).eval()
        self._texts: dict[tuple[tuple[int, ...], int, Draw | None], list[int]] = {}

    def text(self, prompt: Sequence[int], num_tokens: int, draw: Draw | None = None) -> list[int]:
        """The `num_tokens` tokens of greedy decoding, or as `draw` draws, past ends of sequence."""
        key = (tuple(prompt), num_tokens, draw)
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
                    logits_processor=None if draw is None else [draw],
                )
            self._texts[key] = out[0, len(prompt) :].tolist()
        return self._texts[key]

    def next_token(self, tokens: Sequence[int], draw: Draw | None = None) -> tuple[int, float]:
        """The token after `tokens`, computed at once, and how near it is to another one.

        That is the distance of the two largest logits, or of a drawn number to another token's.
        """
        with torch.inference_mode():
            ids = torch.tensor([list(tokens)], device=self.model.device)
            logits = self.model(input_ids=ids, use_cache=False).logits[:, -1].float()
        if draw is None:
            top = logits[0].topk(2)
            return int(top.indices[0]), float(top.values[0] - top.values[1])
        parameters = draw.parameters(len(tokens))
        margins = sample_margins(logits.numpy(), *(each.numpy() for each in parameters))
        return int(kernels.sample_tokens(logits, *parameters)), float(margins[0])


@dataclass
class Comparison:
    """Counts positions compared and near-ties met; a real difference raises at once."""

    num_positions: int = 0
    ties: list[str] = field(default_factory=list)

    def add(
        self,
        reference: Reference,
        prompt: Sequence[int],
        ours: Sequence[int],
        draw: Draw | None = None,
    ) -> None:
        """Compare one output; after a near-tie the texts may part for good."""
        theirs = reference.text(prompt, len(ours), draw)
        for position, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            self.num_positions += 1
            if a != b:
                at_once, gap = reference.next_token([*prompt, *theirs[:position]], draw)
                where = f"token {position} after {len(prompt)}: ours {a}, theirs {b}, gap {gap:.2e}"
                is_tie = gap < MAX_GAP[reference.model.device.type] or a == at_once
                assert is_tie, where
                self.ties.append(where)
                break

    def finish(self) -> None:
        """Print the near-ties; their share is bounded."""
        for tie in self.ties:
            print("near-tie:", tie)
        assert len(self.ties) <= MAX_TIED_SHARE * self.num_positions, self.ties
