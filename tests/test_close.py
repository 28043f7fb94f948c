"""Law: `close` ends, whatever the ledger says; the model is handed back; twice is quiet."""

from __future__ import annotations

import ctypes

import pytest

from specpool import ConfigError, CorruptState, Engine, PageStateError, SamplingParams

PARAMS = SamplingParams(max_new_tokens=40, ignore_eos=True)


def stray_write(engine, row):
    """Somebody writes through a wild pointer: the row names a page that is another's."""
    table = engine.ledger.page_table(0)
    cell = table.ctypes.data + row * table.strides[0]
    assert table[row, 0] > 0
    ctypes.c_int32.from_address(cell).value = engine.ledger.groups[0].num_pages
    assert table[row, 0] == engine.ledger.groups[0].num_pages


def forget(engine):
    """Its pages are lost, and the proof that none leaked would say so."""
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


def test_an_abort_that_is_refused_takes_the_row_out_of_use():
    """The other rows serve on; `close` has nothing left to say."""
    engine, numbers, told = corrupted()
    with pytest.raises(PageStateError):
        engine.abort(numbers[1])
    while engine.turn():
        pass
    assert sorted(told) == numbers
    assert {item.finish_reason for item in told.values()} <= {"abort", "length"}
    assert engine.core.scheduler.is_quarantined(2)
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

    from specpool.assets import resolve

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
