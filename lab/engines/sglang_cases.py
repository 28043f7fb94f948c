"""`sglang_case`: hostile random traffic and settings for SGLang's scheduler, from a seed."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from lab.engines.case import Case, Verb

FAMILIES = ("plain", "sessions", "window", "states")
#: Until 0.5.21; `decode` from 0.5.1 to 0.5.4.
PAST_FAMILIES = ("plain", "sessions", "window", "states", "allocator", "decode")
#: What a shrunk case has, where its fault does not need something else.
PLAIN = {
    "page": 1,
    "shape": None,
    "overlap": False,
    "num_tokens": 1024,
    "rows": 8,
    "chunk": None,
    "mixed": False,
    "conservativeness": 1.0,
    "overlaps": False,
    "adapters": False,
    "switches": False,
    "priorities": None,
    "queue": None,
}


def sglang_case(seed: int, family: str) -> Case:
    """Return the case of a seed."""
    rng = random.Random(f"{family} {seed}")
    shape = rng.choice((None, (3, 1, 4), (3, 1, 4), (2, 1, 3)))
    settings: dict[str, Any] = {
        "page": rng.choice((1, 1, 4, 16)),
        "shape": shape and list(shape),
        "overlap": rng.random() < 0.5,
        "num_tokens": rng.choice((256, 512, 1024)),
        "rows": rng.choice((3, 8)),
        "chunk": rng.choice((None, None, 48)),
        "mixed": False,
        "conservativeness": rng.choice((0.3, 1.0)),
        "sessions": rng.randint(1, 2) if family == "sessions" else 0,
        "overlaps": family == "sessions" and rng.random() < 0.3,  # a turn comes beside another
        "adapters": rng.random() < 0.3,
        "switches": rng.random() < 0.3,  # a session's turns have several adapters
        "priorities": None,
        "queue": None,
    }
    return Case("sglang", family, seed, settings, tuple(_verbs(rng, settings)))


def newest_case(seed: int, family: str) -> Case:
    """Return the case of a seed for today's releases, of models with windows or states too."""
    case = sglang_case(seed, family)
    rng = random.Random(f"newest {family} {seed}")
    settings: dict[str, Any] = {}
    if family == "window":
        settings["window"] = rng.choice((3, 4, 15, 16, 32))
        settings["window_tokens"] = min(rng.choice((64, 128, 256)), case.settings["num_tokens"])
        settings["sessions"] = rng.choice((0, 0, 1, 2))
    if family == "states":
        settings = _states(rng, case.settings)
    return _with_priorities(_with_turns(case, settings, rng))


def _states(rng: random.Random, settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of recurrent states that a server accepts, and a pool for all of its rows."""
    strategies = ("extra_buffer", "extra_buffer", "extra_buffer_lazy", "no_buffer")
    drawn: dict[str, Any] = {"strategy": rng.choice(strategies)}
    slots = 3  # for each row: its own, and what the tree gets
    if drawn["strategy"] == "no_buffer":
        drawn |= {"page": 1, "overlap": False}
    elif drawn["strategy"] == "extra_buffer_lazy":
        drawn["overlap"] = True
        slots += 1
    else:
        slots += 1 + settings["overlap"]
    drawn["states"] = slots * settings["rows"] + rng.randint(0, 6)
    drawn["grain"] = rng.choice((4, 8, 16))
    drawn["interval"] = rng.choice((16, 32))  # whole pages, and no fewer than drafts
    drawn["most_states"] = rng.choice((-1, -1, -1, 2))
    drawn["sessions"] = rng.choice((0, 0, 1, 2))
    return drawn


def _with_turns(case: Case, settings: dict[str, Any], rng: random.Random) -> Case:
    """Return a case with more settings; a model with sessions gets turns, by new verbs."""
    verbs = case.verbs
    if settings.get("sessions"):
        verbs = tuple(_verbs(rng, case.settings | settings))
    return dataclasses.replace(case, settings=case.settings | settings, verbs=verbs)


def _with_priorities(case: Case) -> Case:
    """Return a case; three of ten get priorities, few rows, and requests that come together."""
    rng = random.Random(f"priorities {case.family} {case.seed}")
    if rng.random() > 0.3:
        return case
    settings = {
        "priorities": {"low_first": rng.random() < 0.5, "threshold": rng.choice((0, 0, 1))},
        "queue": rng.choice((None, None, 2, 5)),  # requests that may wait
        "rows": rng.choice((1, 2, 3)),
    }
    haste = rng.choice((1, 4, 8))
    verbs = []
    for verb in case.verbs:
        given = verb.given | ({"priority": rng.randint(0, 3)} if "most" in verb.given else {})
        verbs.append(Verb(1 + verb.turn // haste, verb.name, given))
    return dataclasses.replace(case, settings=case.settings | settings, verbs=tuple(verbs))


def past_case(seed: int, family: str) -> Case:
    """Return the case of a seed for a release until 0.5.21: drafts are chains, and overlap."""
    case = sglang_case(seed, family)
    shape = case.settings["shape"]
    settings = {"shape": shape and [shape[0], 1, shape[0] + 1], "adapters": False}
    settings["overlap"] = case.settings["overlap"] or bool(shape)
    rng = random.Random(f"past {family} {seed}")
    if family == "states":  # their tree has pages of one slot, no drafts, and nothing overlaps
        settings |= {"page": 1, "shape": None, "overlap": False}
        settings["spare_states"] = rng.randint(0, 6)  # beyond three for each row
    if family == "window":
        settings["window"] = rng.choice((4, 16, 32))
        settings["window_tokens"] = rng.choice((128, 256))
        settings["sessions"] = rng.randint(0, 2)
    if family == "decode":
        settings |= {"shape": None, "overlap": False, "rows": rng.choice((1, 2, 3))}
        settings["rows_to_come"] = rng.choice((1, 4))  # beside those that run
        settings["reserved"] = rng.choice((4, 16))  # slots for each request's next tokens
        settings["latest"] = rng.choice((1, 4, 12))  # turns until a transfer has landed
    if family == "allocator":
        settings |= {"shape": None, "window": 4, "window_tokens": rng.choice((64, 128, 256))}
        calls = tuple(_calls(rng))
        return dataclasses.replace(case, settings=case.settings | settings, verbs=calls)
    verbs = [dataclasses.replace(verb, given=_without_adapter(verb)) for verb in case.verbs]
    case = dataclasses.replace(case, settings=case.settings | settings, verbs=tuple(verbs))
    return case if family == "decode" else _with_priorities(case)


def _calls(rng: random.Random) -> list[Verb]:
    """Calls of an allocator: rows grow, leave their window's front, and end."""
    verbs: list[Verb] = []
    for turn in range(1, rng.randint(3, 30)):
        name = rng.choice(("grow", "grow", "grow", "leave", "leave", "end"))
        given = {"number": rng.randint(0, 3)}
        if name == "grow":
            given["length"] = rng.choice((1, 1, rng.randint(1, 60)))
        elif name == "leave":
            given["length"] = rng.randint(1, 30)
        verbs.append(Verb(turn, name, given))
    return verbs


def _without_adapter(verb: Verb) -> dict[str, Any]:
    return {name: value for name, value in verb.given.items() if name != "adapter"}


def _verbs(rng: random.Random, settings: dict[str, Any]) -> list[Verb]:
    verbs: list[Verb] = []
    turn, number = 1, 0
    for _ in range(rng.randint(2, 14)):
        given: dict[str, Any] = {}
        names = ["send", "send", "follow", "abort", "abort", "pause", "flush"]
        if settings["sessions"]:
            names += ["turn"] * 6 + ["close"]
        name = rng.choice(names)
        if name in ("send", "follow", "turn"):
            length = rng.randint(1, 60)
            given = {"number": number, "length": length, "most": rng.randint(1, 30)}
            if name == "send":
                given |= {"stem": rng.randint(0, 1), "shared": rng.randint(0, length)}
            elif name == "follow":
                given["of"] = rng.randint(0, max(0, number - 1))
            else:
                given["session"] = rng.randrange(settings["sessions"])
            if settings["adapters"]:
                is_same = name == "turn" and not settings["switches"]
                given["adapter"] = given["session"] if is_same else rng.choice((0, 1, 1, 2))
            number += 1
        elif name == "abort":
            given = {"number": max(0, number - 1 - rng.choice((0, 0, 0, 1, 2)))}
        elif name == "pause":
            given = {"mode": rng.choice(("in_place", "retract")), "turns": rng.randint(0, 6)}
        elif name == "close":
            given = {"session": rng.randrange(settings["sessions"])}
        verbs.append(Verb(turn, name, given))
        turn += rng.choice((0, 0, 1, 2, 4, 8, 30))
    return verbs
