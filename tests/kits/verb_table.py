"""The ledger's verbs as `rust/specpool-core/src/verb.rs` lists them: the table, read as text."""

from __future__ import annotations

import re
from dataclasses import dataclass

from paths import ROOT

ENTRY = re.compile(
    r"(?P<call>[A-Z]\w+) \{[^}]*\}\s+"
    r"(?:in (?P<kind>\d+)(?: or (?P<with_flag>\d+) if [^\n]*?)?\s+)?"
    r"(?:and \w+: [^\n]*,\s+)?"
    r'named "(?P<name>\w+)" gives (?P<gives>\w+) shown "(?P<method>\w+)\('
)


@dataclass(frozen=True)
class Entry:
    """One call: its name in Rust, its bytes in the log, its verb, what it gives, its method."""

    call: str
    kinds: tuple[int, ...]
    name: str
    gives: str
    method: str

    @property
    def function(self) -> str:
        """The name in the C interface, behind `specpool_ledger_`: each call has a function."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", self.call).lower()


def _entries() -> list[Entry]:
    text = (ROOT / "rust/specpool-core/src/verb.rs").read_text(encoding="utf-8")
    table = text[text.index("            logged {") : text.index("            of_pools {")]
    entries = []
    for row in ENTRY.finditer(table):
        kinds = tuple(int(row[part]) for part in ("kind", "with_flag") if row[part])
        entries.append(Entry(row["call"], kinds, row["name"], row["gives"], row["method"]))
    assert len(entries) == len(re.findall(r"\bgives\b", table))
    return entries


ENTRIES = _entries()
# `Ledger`'s methods that change it.
METHODS = {entry.method for entry in ENTRIES}
