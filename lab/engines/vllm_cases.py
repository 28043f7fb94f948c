"""`vllm_case`: hostile random traffic and settings for vLLM's scheduler, from a seed.

The generator is told a family of models and deployments, never a fault: `plain` has one group of
full attention, `window` a second one with a sliding window, `states` a second one with recurrent
layers, prompts of `images` have images, `connector` loads prefixes from outside, loads of `failing`
fail, and `host` stores prompts in the host's memory and loads them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from lab.engines.case import Case, Verb

FAMILIES = ("plain", "window", "connector", "failing", "host", "states", "images")
#: What a shrunk case has, where its fault does not need something else.
PLAIN = {
    "spare": 120,
    "long_prefill": 0,
    "policy": "fcfs",
    "rows": 6,
    "asynchronous": False,
    "is_late": True,
    "drafter": None,
    "drafts": 0,
    "accepted": 100,
    "budget": 64,
    "caching": True,
    "most_len": 96,
    "stages": 1,
    "watermark": 0.0,
    "interval": 1,
    "whole": True,
    "adapters": 0,
}


def vllm_case(seed: int, family: str) -> Case:
    """Return the case of a seed."""
    rng = random.Random(f"{family} {seed}")
    settings = _settings(rng, family)
    verbs = _verbs(rng, settings)
    rng = random.Random(f"adapters {family} {seed}")
    settings["adapters"] = rng.choice((0, 0, 0, 0, 1, 2))  # that a step may have
    for verb in verbs:
        if settings["adapters"] and verb.name == "send":
            verb.given["adapter"] = rng.choice((0, 1, 1, 2, 3))
    return Case("vllm", family, seed, settings, tuple(verbs))


def _settings(rng: random.Random, family: str) -> dict[str, Any]:
    block = rng.choice((1, 2, 4, 8))
    groups: list[dict[str, Any]] = [{"kind": "full", "block": block}]
    if family == "window":
        finer = rng.choice([size for size in (1, 2, 4, 8) if size <= block])
        window = rng.randint(2, rng.choice((4, 24)))
        groups.append({"kind": "window", "block": finer, "window": window})
    settings: dict[str, Any] = {
        "groups": groups,
        "most_len": rng.choice((48, 64, 96)),
        "rows": rng.randint(1, 6),
        "budget": rng.choice((8, 16, 24, 64)),
        "long_prefill": rng.choice((0, 0, 0, 1, 3, 7)),
        "caching": rng.random() < 0.85,
        "policy": rng.choice(("fcfs", "priority")),
        "asynchronous": rng.random() < 0.6,
        "is_late": rng.random() < 0.8,  # a step runs as late as it can
        "drafter": rng.choice((None, "eagle", "ngram")),
        "drafts": rng.randint(1, 4),
        "accepted": rng.choice((0, 50, 50, 100)),  # percent of the drafts
        "spare": rng.choice((0, 0, 3, 10, 40, 120)),  # blocks beyond the least pool
        "connector": None,
        "stages": rng.choice((1, 1, 1, 1, 1, 2, 3)),  # of a pipeline, each with a step of its own
        "watermark": rng.choice((0.0, 0.0, 0.1, 0.4)),  # of the pool, free when one is admitted
        "interval": rng.choice((1, 1, 2, 4)),  # steps between those with prefills
        "whole": rng.random() < 0.6,  # is admitted only if the whole prompt fits
    }
    if settings["stages"] > 1:
        # The first model runner refuses to run ahead, and drafts are broken: #52071, #49355.
        settings |= {"asynchronous": False, "drafter": None}
    if settings["asynchronous"] and settings["drafter"] == "ngram":
        settings["drafter"] = "eagle"
    if settings["drafter"] is None:
        settings["drafts"] = 0
    if family == "states":
        # A step of drafts ends one block at most; a chunk of prefill has whole ones.
        block = rng.choice([size for size in (2, 4, 8) if size > settings["drafts"]])
        groups[:] = [{"kind": kind, "block": block} for kind in ("full", "states")]
        settings |= {"caching": True, "long_prefill": 0}
        settings["asynchronous"] &= not settings["drafts"]
    settings["images"] = None
    if family == "images":
        most = rng.choice((4, 12))  # tokens of the largest one
        settings["images"] = {
            "most": most,
            "budget": most * rng.choice((1, 1, 3)),  # tokens that a step encodes
            "cache": most * rng.choice((1, 2, 6)),
            "whole": most <= settings["budget"] and rng.random() < 0.3,  # is in one chunk
        }
    if family in ("connector", "failing", "host"):
        if settings["drafter"] == "eagle":  # what is loaded has no draft KV
            settings |= {"drafter": None, "drafts": 0}
        settings["connector"] = {
            "is_async": rng.random() < (0.5 if family == "failing" else 0.8),
            "latest": rng.choice((1, 4, 12)),  # turns until a transfer has landed
            "hits": rng.choice((50, 100)),  # percent of the requests
        }
        if family == "host":
            settings["connector"] = {
                "host_blocks": rng.choice((4, 16, 64)),
                "prompt_only": rng.random() < 0.5,
                "latest": rng.choice((1, 4, 12)),
                "is_async": True,
            }
        if family == "failing":
            # Not with a step in flight: vLLM #45138, it loses track of what that says.
            overlaps = settings["asynchronous"] or settings["stages"] > 1
            policies = ("fail",) if overlaps else ("fail", "recompute")
            settings["connector"] |= {
                "fails": rng.choice((30, 60)),  # percent of the loads
                "policy": rng.choice(policies),
            }
    return settings


def _images(rng: random.Random, most: int, length: int) -> list[list[int]]:
    """Some images in their order: the offset, the length, and which one it is."""
    images: list[list[int]] = []
    offset = rng.randint(0, 6)
    while len(images) < 4:
        which = rng.randint(1, 5)
        size = 1 + which * 7 % most  # the same for the same image
        if offset + size >= length:
            break
        images.append([offset, size, which])
        offset += size + rng.choice((0, 1, 8))
    return images


def _verbs(rng: random.Random, settings: dict[str, Any]) -> list[Verb]:
    verbs: list[Verb] = []
    sent = rng.randint(1, 10)
    last = rng.choice((1, 8, 30, 60))
    for number in range(sent):
        length = rng.randint(1, settings["most_len"] - 2)
        given: dict[str, Any] = {
            "number": number,
            "stem": rng.randint(0, 2),
            "shared": rng.randint(0, length),  # tokens that others with this stem have too
            "length": length,
            "most": rng.randint(1, settings["most_len"] - length),
        }
        if rng.random() < 0.15:
            given["salt"] = rng.randint(1, 2)
        if settings["policy"] == "priority":
            given["priority"] = rng.randint(0, 2)
        if rng.random() < 0.15:
            given["samples"] = 2
        if settings["images"]:
            given["images"] = _images(rng, settings["images"]["most"], length)
        verbs.append(Verb(rng.randint(1, last), "send", given))
    rate = rng.choice((0.0, 0.3, 1.0))
    hostile: dict[str, Callable[[], dict[str, Any]]] = {
        "abort": lambda: {"number": rng.randrange(sent)},
        "reset": lambda: {"running": rng.random() < 0.5},
        "pause": lambda: {
            "mode": rng.choice(("keep", "abort", "wait")),
            "clears": rng.random() < 0.7,
        },
        "resume": dict,
    }
    names = ["abort", "abort", "reset", "pause", "resume", "resume"]
    if settings["connector"]:  # vLLM says that it cannot reset while a load is under way
        hostile["pause"] = lambda: {"mode": rng.choice(("keep", "abort", "wait")), "clears": False}
    for _ in range(int(rate * rng.randint(0, 12))):
        name = rng.choice(names)
        verbs.append(Verb(rng.randint(1, last + 40), name, hostile[name]()))
    return sorted(verbs, key=lambda verb: verb.turn)
