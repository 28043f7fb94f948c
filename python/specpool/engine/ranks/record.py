"""`Record`: what rank 0 sends to the others before each turn, as bytes.

A record holds inputs and no plans: each rank makes its own plans of them. A header comes first: the
payload's bytes, the record's number and rank 0's digest, 64 bits each, and a seal of 16 bytes. The
seal is a keyed hash of all other bytes. Only a process with the group's key can make it, so a
record that was altered, or that comes from elsewhere, is refused. The number shows a record that
comes twice, late or too early. The payload is MessagePack of plain values, which cannot run code.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass, field
from typing import Any

import msgspec

from specpool.errors import RankError

_HEAD = struct.Struct("<qqQ")
_SEAL_BYTES = 16
#: Bytes of the header.
HEAD_BYTES = _HEAD.size + _SEAL_BYTES
#: The most bytes of a payload.
MAX_RECORD = 1 << 28


class StepTokens(msgspec.Struct, frozen=True, array_like=True):
    """What a step gave, on one rank.

    Attributes:
        step: the step's number in the ledger.
        tokens: the new tokens of each lane.
    """

    step: int
    tokens: list[list[int]]

    def difference(self, other: StepTokens) -> str | None:
        """Describe how another rank's result of the step differs; None if it is the same."""
        if self.step != other.step:
            return f"step {self.step} here is step {other.step} there"
        if len(self.tokens) != len(other.tokens):
            return f"step {self.step} has {len(self.tokens)} lanes here, {len(other.tokens)} there"
        for lane, (own_tokens, other_tokens) in enumerate(
            zip(self.tokens, other.tokens, strict=True)
        ):
            if own_tokens != other_tokens:
                return (
                    f"lane {lane} of step {self.step} got the tokens {own_tokens} here, "
                    f"{other_tokens} there"
                )
        return None


class _Payload(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    inputs: list[list[Any]]
    results: list[StepTokens]
    counts: list[int]


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
    results: list[StepTokens] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def to_bytes(self, key: bytes) -> bytes:
        """Return the header and the payload, sealed with `key` (1 to 64 bytes).

        Raises:
            RankError: the payload is longer than `MAX_RECORD`, or holds what cannot be sent.
        """
        payload = encoded(_Payload(self.inputs, self.results, self.counts))
        if len(payload) > MAX_RECORD:
            raise RankError(f"record {self.number} has {len(payload)} bytes, above {MAX_RECORD}")
        head = _HEAD.pack(len(payload), self.number, self.digest)
        return head + _seal(key, head, payload) + payload

    @classmethod
    def of_bytes(cls, data: bytes, key: bytes) -> Record:
        """Read a record that was sealed with `key`. Nothing else in it is looked at before.

        Raises:
            RankError: the bytes are not a record; the message says where.
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
        try:
            parts = msgspec.msgpack.decode(payload, type=_Payload)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise RankError(f"record {number}: {error!s:.200}") from None
        for call in parts.inputs:  # the follower checks what a call means
            if not (call and isinstance(call[0], str)):
                raise RankError(f"record {number}: a call begins with its name, got {call!r:.200}")
        return cls(number, digest, parts.inputs, parts.results, parts.counts)


def encoded(value: Any) -> bytes:
    """Return a value as MessagePack.

    Raises:
        RankError: a part of it is of a type, a size or a depth that cannot be sent.
    """
    try:
        return msgspec.msgpack.encode(value)
    except (TypeError, OverflowError, RecursionError, UnicodeEncodeError) as error:
        raise RankError(f"this cannot be sent to another rank: {error!s:.200}") from None


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
