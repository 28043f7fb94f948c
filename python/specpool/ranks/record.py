"""`Record`: what rank 0 tells the others before each turn, as bytes.

A record holds inputs and no plans: each rank makes its own plans of them. A header comes first: the
payload's bytes, the record's number and rank 0's digest, 64 bits each, and a seal of 16 bytes. The
seal is a keyed hash of all other bytes. Only who knows the group's key can make it, so a record
that was altered, or that comes from elsewhere, is found. The number finds one that comes twice,
late or too early.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specpool.arrays import Int32
from specpool.errors import RankError
from specpool.ranks.codec import decode, encode
from specpool.scheduler.step import StepResult

_HEAD = struct.Struct("<qqQ")
_SEAL_BYTES = 16
#: Bytes of the header.
HEAD_BYTES = _HEAD.size + _SEAL_BYTES
#: The most bytes of a payload.
MAX_RECORD = 1 << 28


@dataclass(frozen=True, slots=True)
class Result:
    """What a step gave, on one rank.

    Attributes:
        step: the step's number in the ledger.
        counts: the new tokens of each lane, int32 [B].
        tokens: all of them, lane after lane, int32.
    """

    step: int
    counts: Int32
    tokens: Int32

    @classmethod
    def of(cls, step: int, result: StepResult) -> Result:
        """Pack the tokens of each lane that count."""
        tokens = [token for lane in result.tokens for token in lane]
        return cls(step, result.accept_len, np.array(tokens, np.int32))

    def difference(self, other: Result) -> str | None:
        """Say how another rank's result of the step differs; None = not at all."""
        if self.step != other.step:
            return f"step {self.step} here is step {other.step} there"
        if len(self.counts) != len(other.counts):
            return f"step {self.step} has {len(self.counts)} lanes here, {len(other.counts)} there"
        if np.array_equal(self.counts, other.counts) and np.array_equal(self.tokens, other.tokens):
            return None
        lanes = zip(self._lanes(), other._lanes(), strict=True)
        lane, (here, there) = next((i, pair) for i, pair in enumerate(lanes) if pair[0] != pair[1])
        return f"lane {lane} of step {self.step} got the tokens {here} here, {there} there"

    def _lanes(self) -> list[list[int]]:
        return [lane.tolist() for lane in np.split(self.tokens, np.cumsum(self.counts)[:-1])]


@dataclass(frozen=True, slots=True)
class Record:
    """The inputs of one turn.

    Attributes:
        number: counts the records, from 1.
        digest: the digest of rank 0's ledger after the turn before, before these inputs.
        inputs: a name and its arguments each, in the order in which rank 0 has applied them.
        results: what the steps gave that rank 0 took over since the record before.
        counts: requests that run, wait and have ended, and open sessions; as old as the digest.
    """

    number: int
    digest: int
    inputs: list[list[Any]] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def to_bytes(self, key: bytes) -> bytes:
        """Return the header and the payload, sealed with `key` (1 to 64 bytes).

        Raises:
            RankError: the payload is longer than `MAX_RECORD`, or holds what cannot be sent.
        """
        results = [[each.step, each.counts, each.tokens] for each in self.results]
        payload = encode([self.inputs, results, self.counts])
        if len(payload) > MAX_RECORD:
            raise RankError(f"record {self.number} has {len(payload)} bytes, above {MAX_RECORD}")
        head = _HEAD.pack(len(payload), self.number, self.digest)
        return head + _seal(key, head, payload) + payload

    @classmethod
    def of_bytes(cls, data: bytes, key: bytes) -> Record:
        """Read a record that was sealed with `key`. Nothing else in it is looked at before.

        Raises:
            RankError: the bytes are none; the message says where.
        """
        length = payload_bytes(data)
        _, number, digest = _HEAD.unpack_from(data)
        payload = memoryview(data)[HEAD_BYTES:]
        if len(payload) != length:
            raise RankError(f"record {number}: {length} bytes announced, {len(payload)} came")
        seal = data[_HEAD.size : HEAD_BYTES]
        if not hmac.compare_digest(_seal(key, data[: _HEAD.size], payload), seal):
            raise RankError(
                f"record {number}: its seal does not fit its {length} bytes: it was altered, or it "
                "is not from rank 0 of this group"
            )
        return cls(number, digest, *_parts(number, decode(payload)))


def payload_bytes(data: bytes | bytearray) -> int:
    """Return the length of the payload that a header announces.

    Raises:
        RankError: the header is too short, or wrong.
    """
    if len(data) < HEAD_BYTES:
        raise RankError(f"a record's header has {HEAD_BYTES} bytes, {len(data)} came")
    length, number, _ = _HEAD.unpack_from(data)
    if not 0 <= length <= MAX_RECORD or number < 1:
        raise RankError(f"no record: its header says number {number}, {length} bytes")
    return int(length)


def _seal(key: bytes, head: bytes, payload: bytes | memoryview) -> bytes:
    seal = hashlib.blake2b(head, key=key, digest_size=_SEAL_BYTES)
    seal.update(payload)
    return seal.digest()


def _parts(number: int, value: Any) -> tuple[list[list[Any]], list[Result], list[int]]:
    """Check the shape of a payload; what an input means is checked by who applies it."""
    wrong = RankError(f"record {number}: its payload is no list of inputs, results and counts")
    if not (isinstance(value, list) and len(value) == 3):
        raise wrong
    inputs, results, counts = value
    if not all(isinstance(part, list) for part in value):
        raise wrong
    if not all(type(count) is int for count in counts):
        raise wrong
    for each in inputs:
        if not (isinstance(each, list) and each and isinstance(each[0], str)):
            raise wrong
    return inputs, [_result(each, wrong) for each in results], counts


def _result(value: Any, wrong: RankError) -> Result:
    match value:
        case [int(step), np.ndarray() as counts, np.ndarray() as tokens]:
            if (counts >= 0).all() and counts.sum(dtype=np.int64) == len(tokens):
                return Result(step, counts, tokens)
    raise wrong
