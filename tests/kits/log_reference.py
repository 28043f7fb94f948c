"""A second reader of event logs, written from docs/event_log.md, whose table it reads."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from paths import ROOT

MASK = (1 << 64) - 1
START = 0x73706563706F6F6C
HEAD = "| kind | event | arguments | aside |"


def _kinds(page: str) -> Iterator[tuple[int, tuple[str, tuple[str, ...]]]]:
    """Each kind in the page's table of events: its verb and its arguments; arrays end in `[]`."""
    for line in page.split(HEAD)[1].split("\n\n")[0].splitlines()[2:]:
        numbers, events, arguments = (cell.strip() for cell in line.split("|")[1:4])
        verbs = re.findall(r"[a-z]\w+", re.sub(r"\(.*\)|:.*| on a prefix", "", events))
        kinds = [int(number) for number in numbers.split(", ")]
        for kind, verb in zip(kinds, verbs if len(verbs) > 1 else verbs * len(kinds), strict=True):
            # `admit_cached` and `admit_lent` are calls of one verb.
            verb = "admit" if verb.startswith("admit") else verb
            yield kind, (verb, tuple(_arguments(arguments, kind)))


def _arguments(cell: str, kind: int) -> Iterator[str]:
    """The names in a cell; `25: salt` is an argument of kind 25 alone."""
    for text in cell.replace(", group after group", "").split(", "):
        only, _, name = text.rpartition(": ")
        if name and only in ("", str(kind)):
            array = name.startswith("array of ")
            yield name.removeprefix("array of ").replace(" ", "_") + "[]" * array


KINDS = dict(_kinds((ROOT / "docs" / "event_log.md").read_text(encoding="utf-8")))


def word(state: int, value: int) -> int:
    mixed = ((state ^ (value & MASK)) * 0x9E3779B97F4A7C15) & MASK
    return mixed ^ (mixed >> 32)


def over_bytes(state: int, data: bytes) -> int:
    whole = len(data) // 8 * 8
    for at in range(0, whole, 8):
        state = word(state, int.from_bytes(data[at : at + 8], "little"))
    return word(word(state, int.from_bytes(data[whole:], "little")), len(data))


def over_list(state: int, values: list[int]) -> int:
    for value in values:
        state = word(state, value)
    return word(state, len(values))


@dataclass
class Record:
    offset: int
    verb: str
    arguments: dict[str, Any]
    event: bytes
    tag: str | None
    snapshot: int
    digest: int


@dataclass
class Log:
    made_by: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)


class Reader:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, count: int) -> bytes:
        assert self.at + count <= len(self.data)
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self) -> int:
        value = shift = 0
        while True:
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    def fixed(self, width: int) -> int:
        return int.from_bytes(self.take(width), "little")

    def text(self) -> str:
        return self.take(self.number()).decode()

    def flag(self) -> bool:
        return {0: False, 1: True}[self.take(1)[0]]

    def optional(self) -> int | None:
        value = self.number()
        return value - 1 if value else None

    def many(self, read_item) -> list[Any]:
        return [read_item() for _ in range(self.number())]

    def array(self) -> list[int]:
        count = self.number()
        if count == 0:
            return []
        form = self.take(1)[0]
        if form < 2:
            first = self.number()
            return [first + form * at for at in range(count)]
        return [self.fixed({2: 1, 3: 2, 4: 4}[form]) for _ in range(count)]


def read(data: bytes) -> Log:
    reader, log = Reader(data), Log()
    assert reader.take(8) == b"\x89SPLOG\r\n"
    version = reader.number()
    assert version == 1
    head = reader.take(reader.number())
    assert reader.fixed(4) == over_bytes(word(START, version), head) & 0xFFFFFFFF
    _read_head(Reader(head), log)
    digest = START
    while reader.at < len(data):
        offset = reader.at
        body = reader.take(reader.number())
        after, checksum = reader.fixed(8), reader.fixed(4)
        state = over_bytes(START, body)
        assert checksum == word(word(state, digest), after) & 0xFFFFFFFF
        log.records.append(_read_record(offset, body, after))
        digest = after
    return log


def _read_group(head: Reader) -> dict[str, Any]:
    group = {
        "name": head.text(),
        "page_size": head.number(),
        "num_pages": head.number(),
        "hosts_drafts": head.flag(),
    }
    flags = head.number()
    group["layout"] = "holey" if flags & 1 else "dense"
    group["window"] = head.optional()
    return group | {"sink": head.number() if flags & 2 else 0}


def _read_states(head: Reader) -> dict[str, Any]:
    return {
        "name": head.text(),
        "num_slots": head.number(),
        "flush": head.number(),
        "eager": head.flag(),
    }


def _read_head(head: Reader, log: Log) -> None:
    log.made_by = head.text()
    log.config = {
        "groups": head.many(lambda: _read_group(head)),
        "shapes": head.many(lambda: (head.number(), head.number(), head.number())),
        "num_rows": head.number(),
        "max_context_len": head.number(),
        "max_batch": head.optional(),
        "overlap_depth": head.number(),
        "policy": "double_buffer" if head.flag() else "exact",
        "row_width": head.many(head.number),
        "max_chunk": head.optional(),
        "draft_kv": head.flag(),
        "sessions": head.flag(),
        "page_fencing": head.flag(),
    }
    if head.at < len(head.data):
        log.config["states"] = head.many(lambda: _read_states(head))
    assert head.at == len(head.data)


def _read_record(offset: int, body: bytes, digest: int) -> Record:
    reader = Reader(body)
    kind = reader.take(1)[0]
    verb, names = KINDS[kind]
    arguments: dict[str, Any] = {}
    for name in names:
        if name.endswith("[]"):
            arguments[name[:-2]] = reader.array()
        elif name == "salt":
            arguments[name] = reader.take(reader.number())
        else:
            arguments[name] = reader.number()
    if kind in (6, 7, 8, 9):
        arguments["writes_draft"] = kind % 2 == 1
    if kind in (33, 34):
        arguments["writes_draft"] = kind == 34
    if kind in (23, 24):
        arguments["needs_draft"] = kind == 24
    event, tag, snapshot = body[: reader.at], None, 0
    if verb in ("admit", "fork") and reader.at < len(body):
        tag = reader.text()
    elif verb in ("snapshot", "restore"):
        snapshot = reader.number()
    assert reader.at == len(body)
    return Record(offset, verb, arguments, event, tag, snapshot, digest)
