"""The bytes of records: what is read is what was written, and anything else is one error."""

from __future__ import annotations

import functools
import hashlib
import random
import struct
import tracemalloc
from typing import Any

import pytest

from specpool import Grammar, SamplingParams, Shape
from specpool.engine.ranks.record import HEAD_BYTES, MAX_RECORD, Record, StepTokens
from specpool.engine.ranks.wire import RankRequest, request_of, wire_of
from specpool.engine.scheduler.request import Conversation, Request
from specpool.errors import RankError

KEY = b"a key of a group"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (object(), "unsupported"),
        (1 << 140, "can't serialize ints"),
        ("\ud800", "surrogates not allowed"),
        (functools.reduce(lambda inner, _: [inner], range(100_000), []), "recursion"),
    ],
)
def test_what_cannot_be_sent_is_refused(value: Any, said: str) -> None:
    with pytest.raises(RankError, match=said):
        Record(1, 0, [["open", value]]).to_bytes(KEY)


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        (b"\x93\x91" + b"\x91" * 100_000, "recursion"),  # lists within lists
        (b"\x93\xdd\xff\xff\xff\xff" + b"\xc0" * 100, "Expected `array`"),  # a list of 4 GiB
        (b"\x93\x90\x90\xc6\xff\xff\xff\xff", "truncated"),  # bytes of 4 GiB
        (b"\x93\x91\x90\x90\x90", "a call begins with its name"),
        (b"\x93\x90\x91\x92\x01\x91\x91\xa1x\x90", "Expected `int`"),  # a token that is a text
        (b"\x93\x90\x90\x90\x90", "trailing"),
    ],
)
def test_a_payload_that_is_none_takes_no_memory(payload: bytes, said: str) -> None:
    """Also with a right seal, as of a rank with another version."""
    head = struct.pack("<qqQ", len(payload), 1, 0)
    seal = hashlib.blake2b(head + payload, key=KEY, digest_size=16).digest()
    tracemalloc.start()
    with pytest.raises(RankError, match=said):
        Record.of_bytes(head + seal + payload, KEY)
    assert tracemalloc.get_traced_memory()[1] < 1 << 24
    tracemalloc.stop()


def _record() -> Record:
    inputs: list[list[Any]] = [
        ["submit", wire_of(_request())],
        ["abort", 17],
        ["cut", 3, 40],
        ["forget", b"salt"],
        ["turn"],
    ]
    results = [StepTokens(9, [[1, 2, 3], [], [-1]]), StepTokens(10, [[5]])]
    return Record(12, (1 << 64) - 3, inputs, results)


def _request() -> Request:
    return Request(
        request_id=5,
        index=2,
        prompt_len=3,
        tokens=[1, 2, 3],
        params=SamplingParams(
            max_new_tokens=9,
            temperature=0.5,
            seed=(1 << 64) - 1,
            logit_bias={7: -2.5},
            stop=("a", "b"),
            stop_token_ids=(4,),
            n=2,
            cache_salt="tenant",
            structured=Grammar.regex("[a-z]+"),
        ),
        shape=Shape.eagle(3, 2, 6),
        shape_index=2,
        choices=(1, 2),
        max_len=12,
        stop_ids=frozenset({0, 4}),
        seed=(1 << 64) - 1,
        conversation=Conversation(8),
    )


def _sent(request: Request) -> dict[str, Any]:
    """Return what a record's payload holds of a request on the other side."""
    record = Record(1, 0, [["submit", wire_of(request)]])
    wire: dict[str, Any] = Record.of_bytes(record.to_bytes(KEY), KEY).inputs[0][1]
    return wire


def test_a_record_comes_back_as_it_was() -> None:
    record = _record()
    found = Record.of_bytes(record.to_bytes(KEY), KEY)
    assert (found.number, found.digest) == (record.number, record.digest)
    assert [call[0] for call in found.inputs] == ["submit", "abort", "cut", "forget", "turn"]
    for own, other in zip(record.results, found.results, strict=True):
        assert own.difference(other) is None


def test_a_request_comes_back_as_it_was() -> None:
    request, conversation = _request(), Conversation(8)
    equipped: list[Request] = []
    wire = _sent(request)
    found = request_of(wire, {8: conversation}, equipped.append)
    assert equipped == [found]
    assert found.conversation is conversation
    for name in Request.__dataclass_fields__:
        if name not in ("conversation", "times", "_token_array"):
            assert getattr(found, name) == getattr(request, name), name


def test_a_request_of_a_session_that_is_not_open_is_refused() -> None:
    with pytest.raises(RankError, match="session 8 is not open on this rank"):
        request_of(_sent(_request()), {}, lambda request: None)


@pytest.mark.parametrize("name", RankRequest.__struct_fields__)
def test_a_request_with_a_part_missing_is_refused(name: str) -> None:
    wire = _sent(_request())
    del wire[name]
    with pytest.raises(RankError):
        request_of(wire, {8: Conversation(8)}, lambda request: None)


def test_two_results_that_differ_name_the_lane() -> None:
    own, other = StepTokens(9, [[1, 2], [3]]), StepTokens(9, [[1, 2], [4]])
    said = own.difference(other)
    assert said == "lane 1 of step 9 got the tokens [3] here, [4] there"
    assert own.difference(StepTokens(8, [[1, 2], [3]])) == "step 9 here is step 8 there"


def test_a_changed_byte_is_always_found() -> None:
    """Also one of the header: a forged digest or number is not believed."""
    whole = _record().to_bytes(KEY)
    for at in range(len(whole)):
        changed = bytearray(whole)
        changed[at] ^= 0x10
        with pytest.raises(RankError, match=r"seal|header|announced"):
            Record.of_bytes(bytes(changed), KEY)


def test_a_record_of_another_group_is_found() -> None:
    with pytest.raises(RankError, match=r"record 12: its seal does not fit its .* bytes"):
        Record.of_bytes(_record().to_bytes(KEY), KEY[::-1])


def test_random_bytes_are_one_error_and_nothing_else() -> None:
    """Also with a right seal, so that the parser behind it is reached."""
    choice, whole = random.Random(3), _record().to_bytes(KEY)[HEAD_BYTES:]
    refused = 0
    for _ in range(20_000):
        payload = bytearray(whole)
        for _ in range(choice.randint(1, 6)):
            match choice.randint(0, 3):
                case 0:
                    payload[choice.randrange(len(payload))] = choice.randrange(256)
                case 1:
                    del payload[choice.randrange(len(payload)) :]
                    payload += b"\xc0"
                case 2:
                    at = choice.randrange(len(payload))
                    payload[at:at] = choice.randbytes(choice.randint(1, 9))
                case 3:
                    at = choice.randrange(len(payload))
                    del payload[at : at + choice.randint(1, 9)]
                    payload += b"\xc0"
        head = struct.pack("<qqQ", len(payload), 1, 0)
        seal = hashlib.blake2b(head + payload, key=KEY, digest_size=16).digest()
        try:
            record = Record.of_bytes(head + seal + payload, KEY)
            for name, *args in record.inputs:
                if name == "submit" and args:
                    request_of(args[0], {8: Conversation(8)}, lambda request: None)
        except RankError:
            refused += 1
    assert refused > 15_000


@pytest.mark.parametrize("length", [-1, MAX_RECORD + 1, 1 << 60])
def test_a_header_that_announces_too_much_is_refused(length: int) -> None:
    with pytest.raises(RankError, match="no record: its header says"):
        Record.of_bytes(struct.pack("<qqQ", length, 1, 0) + bytes(16) + b"\xc0", KEY)


def test_a_short_header_is_refused() -> None:
    with pytest.raises(RankError, match="a record's header has 40 bytes, 5 came"):
        Record.of_bytes(b"12345", KEY)
