"""Laws of declared fields: type and limits decide which values a configuration takes."""

# No `from __future__ import annotations`: `declared` reads types, not texts.

from dataclasses import dataclass, field
from typing import Annotated, Literal

import pytest

from specpool import ConfigError
from specpool.fields import Option, Within, check_values, declared


@dataclass
class Config:
    name: str
    size: Annotated[int, Within(1, 4), Option("Memory")] = 2
    share: Annotated[float | None, Within(0, 0.5)] = None
    mode: Literal["fast", "slow"] = "fast"
    on: bool = False
    sizes: tuple[int, ...] = field(default_factory=tuple)

    def __post_init__(self):
        check_values(self)


def test_fields_are_read_as_they_are_declared():
    by_name = {each.name: each for each in declared(Config)}
    assert [*by_name] == ["name", "size", "share", "mode", "on", "sizes"]
    assert by_name["size"].kind is int and by_name["size"].option == Option("Memory")
    assert by_name["share"].kind is float and by_name["share"].is_optional
    assert not by_name["size"].is_optional and by_name["share"].option is None
    assert [each.is_required for each in by_name.values()] == [True] + [False] * 5


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"size": 0}, "size must be an integer in [1, 4], got 0"),
        ({"size": True}, "size must be an integer in [1, 4], got True"),
        ({"size": None}, "size must be an integer in [1, 4], got None"),
        ({"share": 0.6}, "share must be a number in [0, 0.5], got 0.6"),
        ({"share": float("nan")}, "share must be a number in [0, 0.5], got nan"),
        ({"mode": "fats"}, "mode must be one of fast, slow, got 'fats': did you mean 'fast'?"),
        ({"on": 1}, "on must be True or False, got 1"),
        ({"size": 9, "mode": "x"}, "size must be an integer in [1, 4], got 9"),
    ],
)
def test_a_value_that_a_declaration_does_not_allow_is_refused(values, says):
    with pytest.raises(ConfigError) as error:
        Config("a", **values)
    assert str(error.value) == says


def test_all_other_values_are_left_to_the_class():
    Config(5, size=4, share=0.5, mode="slow", on=True, sizes="no tuple")
