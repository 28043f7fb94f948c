"""Forms that take for ever: they end at their limit, and hold up no other form."""

from __future__ import annotations

import time

import pytest

from specpool import ConfigError, Engine, Grammar, SamplingParams
from specpool.engine.text.structured.trial import Trial
from specpool.serve.bridge import forms as module
from specpool.serve.bridge.forms import Forms
from specpool.serve.bridge.messages import Submit

# Multiples of 2 or 5 would compile in two seconds, others take until memory ends.
ENDLESS = [
    Grammar.json_schema({"type": "integer", "multipleOf": number})
    for number in range(123456789, 123456819)
    if number % 2 and number % 5
]


@pytest.fixture(scope="module")
def core():
    with Engine.from_pretrained(max_context_len=64) as engine:
        yield engine.core


@pytest.fixture
def forms(core, monkeypatch):
    monkeypatch.setattr(module, "QUICK_SECONDS", 0.2)
    monkeypatch.setattr(module, "MAX_SECONDS", 0.5)
    forms = Forms(core.compiler, core.compile)
    yield forms
    forms.close()


@pytest.fixture
def idle_trials(monkeypatch):
    """Trials of `ENDLESS` forms that sleep until their limit, instead of keeping a core busy."""

    def check(trial, grammar, seconds):
        if grammar in ENDLESS:
            time.sleep(seconds)
            raise TimeoutError

    monkeypatch.setattr(Trial, "check", check)


def submit(key, grammar):
    return Submit(key, [97], SamplingParams(structured=grammar), None, 0)


def results(forms, count):
    """What came of so many forms: by key, the error or None, in their order."""
    errors, end = {}, time.monotonic() + 120
    while len(errors) < count:
        assert time.monotonic() < end, errors
        for done, message in forms.take():
            errors[message.key] = done.exception()
        time.sleep(0.01)
    return errors


def test_a_trial_is_ended_at_its_limit_and_the_next_one_works(core):
    trial = Trial(core.compiler.vocabulary)
    try:
        trial.check(Grammar.regex("[a-c]+"), 60)
        for _ in range(2):
            with pytest.raises(TimeoutError):
                trial.check(ENDLESS[0], 0.5)
        with pytest.raises(ConfigError, match="structured: "):
            trial.check(Grammar.json_schema({"type": "nonsense"}), 60)
        trial.check(Grammar.regex("[a-c]+"), 60)
    finally:
        trial.close()


def test_a_form_is_compiled_in_the_second_process(forms, monkeypatch):
    """Law: an endless form is refused at its limit, and the process for the next one starts."""
    forms.add(submit(1, ENDLESS[0]))
    assert "took more than 0.5 s to compile: make it smaller" in str(results(forms, 1)[1])
    monkeypatch.setattr(module, "QUICK_SECONDS", 60.0)
    forms.add(submit(2, Grammar.regex("[a-c]{2}")))
    forms.add(submit(3, Grammar.json_schema({"type": "nonsense"})))
    errors = results(forms, 2)
    assert errors[2] is None and "structured: " in str(errors[3])


def test_quick_forms_pass_slow_ones(forms, idle_trials, monkeypatch):
    """Law: every quick form is done before the slow ones that came before it have ended."""
    for key in range(2):
        forms.add(submit(key, ENDLESS[key]))
    for key in range(2, 6):
        forms.add(submit(key, Grammar.regex(f"[a-c]{{{key}}}")))
    errors = results(forms, 6)
    assert set(list(errors)[:4]) == {2, 3, 4, 5}
    for key, error in errors.items():
        if key >= 2:
            assert error is None
        else:
            assert "took more than 0.5 s to compile: make it smaller" in str(error)
    assert not forms

    def tried_again(*_):
        raise AssertionError("it is known by now")

    monkeypatch.setattr(Trial, "check", tried_again)
    forms.add(submit(9, ENDLESS[0]))
    assert "took more than 0.5 s" in str(results(forms, 1)[9])


def test_slow_forms_beyond_the_most_are_refused(forms, idle_trials, monkeypatch):
    monkeypatch.setattr(module, "MOST_SLOW", 2)
    for key in range(6):
        forms.add(submit(key, ENDLESS[key]))
    texts = [str(error) for error in results(forms, 6).values()]
    assert sum("2 slow forms wait: try again later" in text for text in texts) >= 2
    assert sum("make it smaller" in text for text in texts) >= 2


def test_a_form_that_nobody_waits_for_is_forgotten(forms):
    forms.add(submit(1, ENDLESS[0]))
    assert forms and forms.drop(1) and not forms.drop(1)
    assert not forms and forms.take() == []
