"""Laws of the exceptions: pickling and copying keep their text and numbers."""

from __future__ import annotations

import concurrent.futures
import copy
import inspect
import multiprocessing
import pickle

import pytest

from specpool import Group, Ledger, OutOfPages, Shape, SpecpoolError, errors

# Made-up arguments, by the names that the constructors give them.
VALUES = {
    "message": "need 12 pages, 7 free",
    "group": "kv",
    "state": "owned",
    "owner": "row 3",
    "rows": [1, 4],
}
CLASSES = [
    one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, SpecpoolError)
]


def made(kind: type[SpecpoolError]) -> SpecpoolError:
    if not inspect.isfunction(kind.__init__):
        return kind(VALUES["message"])
    names = list(inspect.signature(kind).parameters)
    return kind(*(VALUES.get(name, 10 + at) for at, name in enumerate(names)))


def same(one: BaseException, two: BaseException) -> bool:
    seen = [(type(error), str(error), error.args, vars(error)) for error in (one, two)]
    return one is not two and seen[0] == seen[1]


def test_every_class_is_tried():
    assert {"OutOfPages", "StalePlan", "ConfigError"} <= {kind.__name__ for kind in CLASSES}
    assert len(CLASSES) == 18
    assert sum(len(vars(made(kind))) for kind in CLASSES) == 22


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickling_keeps_class_message_and_numbers(kind, protocol):
    error = made(kind)
    assert same(pickle.loads(pickle.dumps(error, protocol)), error)


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copying_keeps_class_message_and_numbers(kind, copied):
    error = made(kind)
    assert same(copied(error), error)


class Late(OutOfPages):
    """An embedder's own, with arguments of its own."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"{seconds} s late", "kv", 1, 2, 3, 4, 5)
        self.seconds = seconds


def test_a_subclass_and_what_was_hung_on_it_travel_too():
    error = Late(0.5)
    error.request = "r7"
    assert same(pickle.loads(pickle.dumps(error)), error)
    assert copy.copy(error).request == "r7"


def overfill() -> None:
    groups = [Group("kv", page_size=4, num_pages=20)]
    ledger = Ledger(groups, [Shape.eagle(3, 1, 4)], num_rows=2, max_context_len=64)
    ledger.prepare_extend([ledger.admit(), ledger.admit()], [60, 60])


def test_a_worker_process_hands_on_what_the_ledger_said():
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        with pytest.raises(OutOfPages) as here:
            overfill()
        with pytest.raises(OutOfPages) as there:
            pool.submit(overfill).result(timeout=60)
    assert (here.value.group, here.value.need, here.value.free) == ("kv", 30, 20)
    assert str(there.value) == str(here.value) and vars(there.value) == vars(here.value)
