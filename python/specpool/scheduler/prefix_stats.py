"""`PrefixStats`: the numbers of the prefix cache."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefixStats:
    """The contents and the counters of the prefix cache.

    Attributes:
        hit_ct: tokens of admitted requests whose KV was found.
        host_ct: tokens of admitted requests whose KV was found on the host.
        miss_ct: tokens of admitted requests whose KV was not found.
        num_entries: entries of the index: pieces of text of up to the least common multiple of the
            page sizes.
        num_tokens: tokens of these entries.
        cached_pages: pages of all groups that only the index holds.
        eviction_ct: how often an entry, or a page below a window, was given up to make room.
        num_bytes: bytes that the index takes, the pages not among them.
    """

    hit_ct: int
    host_ct: int
    miss_ct: int
    num_entries: int
    num_tokens: int
    cached_pages: int
    eviction_ct: int
    num_bytes: int
