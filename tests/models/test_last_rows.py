"""`LastRows`: behind the last attention, only rows whose logits are wanted are computed."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from families import FAMILIES, PagedLanes, make_config, make_model
from specpool.engine.engine import Engine
from specpool.engine.models import TargetModel
from specpool.engine.sampling_params import SamplingParams

COUNTS, WANTED = (7, 1, 5), [6, 7, 12]  # the lanes' last tokens


@pytest.mark.sample(8)
@pytest.mark.parametrize("family", FAMILIES)
def test_wanted_logits_are_those_of_a_whole_forward(family: str) -> None:
    config = make_config(family)
    if config is None:
        pytest.skip(f"transformers has no {family}")
    target = TargetModel.from_pretrained(make_model(config))
    lanes = PagedLanes(target.layer_kv, 4, num_lanes=3)
    tokens, wanted = torch.arange(3, 3 + sum(COUNTS)), torch.tensor(WANTED)

    def logits(**options: bool) -> torch.Tensor:
        batch, positions = lanes.batch([0, 0, 0], COUNTS)
        return target.forward(tokens, positions, batch, wanted, **options).logits

    torch.testing.assert_close(logits(wants_hidden=False), logits(), atol=2e-5, rtol=0)


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3"])
def test_the_last_layer_leaves_out_the_other_rows(family: str) -> None:
    target = TargetModel.from_pretrained(make_model(make_config(family)))
    lanes = PagedLanes(target.layer_kv, 4, num_lanes=3)
    tokens, wanted = torch.arange(3, 3 + sum(COUNTS)), torch.tensor(WANTED)
    rows: list[tuple[int, int]] = []
    for number, layer in enumerate(target._layers):
        for module in (layer.self_attn.o_proj, layer.mlp.down_proj, layer.self_attn.k_proj):
            module.register_forward_hook(
                lambda _, arguments, output, number=number: rows.append((number, output.shape[1]))
            )
    for wants_hidden, expected in ((False, len(WANTED)), (True, sum(COUNTS))):
        rows.clear()
        batch, positions = lanes.batch([0, 0, 0], COUNTS)
        target.forward(tokens, positions, batch, wanted, wants_hidden=wants_hidden)
        every = sum(COUNTS)
        assert sorted(rows) == sorted([(0, every)] * 3 + [(1, every)] + [(1, expected)] * 2)


@pytest.mark.parametrize("draft", [None, "specpool/tiny-eagle"])
def test_a_prompt_whose_hidden_states_a_drafter_reads_is_whole(draft, monkeypatch) -> None:
    seen: list[bool] = []
    forward = TargetModel.forward

    def watch(self, *arguments, wants_hidden=True, **options):
        if len(arguments[0]) > 20:
            seen.append(wants_hidden)
        return forward(self, *arguments, wants_hidden=wants_hidden, **options)

    monkeypatch.setattr(TargetModel, "forward", watch)
    with Engine.from_pretrained("specpool/tiny", draft=draft, max_context_len=128) as engine:
        seen.clear()
        engine.generate([list(range(3, 33))], SamplingParams(max_new_tokens=2, temperature=0.0))
    assert seen == [draft is not None]
