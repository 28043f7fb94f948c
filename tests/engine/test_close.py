"""Law: `close` always ends and hands the model back; a second call does nothing."""

from __future__ import annotations

import ctypes
import gc

import pytest
import torch

from specpool import (
    ConfigError,
    CorruptState,
    Engine,
    EngineConfig,
    PageStateError,
    SamplingParams,
)
from specpool.engine.assets import resolve
from specpool.engine.models import TargetModel

PARAMS = SamplingParams(max_new_tokens=40, ignore_eos=True)


def stray_write(engine, row):
    """Simulate a stray write: the row names a page that is not its own."""
    table = engine.ledger.page_table(0)
    cell = table.ctypes.data + row * table.strides[0]
    assert table[row, 0] > 0
    ctypes.c_int32.from_address(cell).value = engine.ledger.groups[0].num_pages
    assert table[row, 0] == engine.ledger.groups[0].num_pages


def forget(engine):
    """Leave the ledger out of the leak check, because its pages are lost."""
    from conftest import _ENGINES

    _ENGINES.discard(engine)


def corrupted(**options):
    engine = Engine.from_pretrained(max_context_len=128, max_batch=3, page_size=4, **options)
    forget(engine)
    told = {}
    numbers = [
        engine.submit([5, 6, 7, 8, 9, n], PARAMS, on_item=told.__setitem__) for n in range(5)
    ]
    for _ in range(3):
        engine.turn()
    stray_write(engine, engine.core.scheduler.running[1].row)
    return engine, numbers, told


def test_close_says_what_was_not_given_back_and_ends():
    engine, _, _ = corrupted()
    with pytest.raises(CorruptState, match=r"closed, but .*\nthe row of request 2: page"):
        engine.close()
    assert engine.target.closed and engine.ledger.closed
    assert not engine.core.scheduler.requests()
    engine.close()
    with pytest.raises(ConfigError, match="closed"):
        engine.generate([[1]])


def test_an_engine_on_a_closed_model_is_refused_at_once():
    """`close` closes the engine's model too, so a second engine needs a model of its own."""
    target = TargetModel.from_pretrained(resolve("specpool/tiny"))
    config = EngineConfig(max_context_len=64, page_size=4)
    Engine(target, config=config).close()
    with pytest.raises(ConfigError, match="the target model has been closed: load it again"):
        Engine(target, config=config)


def test_an_abort_that_is_refused_takes_the_row_out_of_use():
    """The other rows go on, and `close` has nothing left to report."""
    engine, numbers, told = corrupted()
    with pytest.raises(PageStateError):
        engine.abort(numbers[1])
    while engine.turn():
        pass
    assert sorted(told) == numbers
    assert {item.finish_reason for item in told.values()} <= {"abort", "length"}
    assert engine.core.scheduler.rows.is_quarantined(2)
    assert [o.finish_reason for o in engine.generate([[1, 2]] * 4, PARAMS)] == ["length"] * 4
    engine.close()
    assert engine.target.closed


def test_a_session_whose_row_is_refused_is_closed_with_its_engine():
    engine = Engine.from_pretrained(max_context_len=128, max_batch=3, page_size=4)
    forget(engine)
    session = engine.open_session()
    session.append([5, 6, 7, 8, 9], PARAMS).output()
    stray_write(engine, session._conversation.row)
    with pytest.raises(CorruptState, match="the row of session 1: page"):
        engine.close()
    assert session.closed and engine.target.closed
    engine.close()


def test_a_model_in_memory_is_handed_back_all_the_same():
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(resolve("specpool/tiny")).float()
    engine = Engine.from_pretrained(model, max_context_len=64, page_size=4)
    forget(engine)
    engine.submit([5, 6, 7, 8, 9], PARAMS)
    engine.turn()
    stray_write(engine, 1)
    with pytest.raises(CorruptState):
        engine.close()
    with Engine.from_pretrained(model, max_context_len=64) as second:
        assert second.generate([[1, 2]], PARAMS)[0].finish_reason == "length"


def model_in_memory():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(resolve("specpool/tiny"))


@pytest.mark.parametrize("draft", [None, "specpool/tiny-eagle3", "ngram"])
def test_an_engine_that_goes_out_of_scope_gives_its_model_back(draft):
    """The model comes back at once, without a collection: the garbage collector is off."""
    model = model_in_memory()
    attention = model.config._attn_implementation
    model.train()
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            engine = Engine.from_pretrained(model, draft=draft, max_context_len=128)
            engine.generate([[5, 6, 7]], SamplingParams(max_new_tokens=4))
            with engine.open_session() as session:
                session.append([5, 6, 7], SamplingParams(max_new_tokens=4)).output()
            del session, engine
            assert model.config._attn_implementation == attention
            assert model.training and not any(m._forward_pre_hooks for m in model.modules())
    finally:
        gc.enable()
    assert model(torch.tensor([[5, 6, 7]])).logits.shape[:2] == (1, 3)


def test_what_still_runs_keeps_its_engine():
    model = model_in_memory()
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    stream = Engine.from_pretrained(model, max_context_len=128).stream([5, 6, 7], params)
    gc.collect()
    assert list(stream)[-1].finish_reason == "length"
    session = Engine.from_pretrained(model_in_memory(), max_context_len=128).open_session()
    gc.collect()
    assert session.append([5, 6, 7], params).output().finish_reason == "length"
    session.close()


def test_an_engine_that_is_gone_leaves_its_successor_alone():
    """The first engine was closed; when it is collected, the model belongs to the second."""
    model = model_in_memory()
    first = Engine.from_pretrained(model, max_context_len=128)
    first.close()
    with Engine.from_pretrained(model, max_context_len=128) as second:
        del first
        gc.collect()
        assert second.generate([[5, 6]], SamplingParams(max_new_tokens=3))[0].error is None


def test_a_target_of_the_users_own_stays_open_when_its_engine_is_gone():
    with TargetModel.from_pretrained(resolve("specpool/tiny"), dtype="float32") as target:
        for _ in range(2):
            engine = Engine(target, config=EngineConfig(max_context_len=128))
            assert engine.generate([[5, 6]], SamplingParams(max_new_tokens=3))[0].error is None
            del engine
            gc.collect()
        assert not target.closed
