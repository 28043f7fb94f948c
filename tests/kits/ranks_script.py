"""What a rank of the tests runs: play scenes on engines, lead or follow; each prints JSON.

python ranks_script.py scenes JSON            some `SCENES` by the names of `SETUPS`
python ranks_script.py long TURNS             one engine, requests until so many turns ran
python ranks_script.py timed JSON             as `scenes`, and shapes chosen by clocks at random
python ranks_script.py plant KIND RECORD      rank 1 does something of its own at a record
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import itertools
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import mtp_checkpoints
from specpool import ConfigError, Grammar, SamplingParams, Shape
from specpool.engine.assets import resolve
from specpool.engine.engine import Engine
from specpool.engine.ranks.following import Follower
from specpool.engine.ranks.group import Ranks
from specpool.engine.shapes import BudgetController, CostController

CHAIN, TREE = Shape.eagle(3, 1, 4), Shape.eagle(3, 2, 6)
SMALL: dict[str, Any] = {"page_size": 4, "max_context_len": 192, "max_batch": 4}
SETUPS: dict[str, dict[str, Any]] = {
    "eagle chain D0": {"draft": "specpool/tiny-eagle", "shape": CHAIN, "overlap_depth": 0},
    "eagle tree D1": {"draft": "specpool/tiny-eagle", "shape": TREE, "overlap_depth": 1},
    "eagle3 chain D1": {"draft": "specpool/tiny-eagle3", "shape": CHAIN, "overlap_depth": 1},
    "eagle3 tree D0": {"draft": "specpool/tiny-eagle3", "shape": TREE, "overlap_depth": 0},
    "two drafters D1": {
        "draft": ["specpool/tiny-draft", "ngram"],
        "shape": CHAIN,
        "overlap_depth": 1,
    },
    "block chain D0": {"draft": "specpool/tiny-block", "shape": CHAIN, "overlap_depth": 0},
    "block tree D1": {"draft": "specpool/tiny-block", "shape": TREE, "overlap_depth": 1},
    "mtp chain D1": {"draft": "mtp", "shape": CHAIN, "overlap_depth": 1},
    "mtp tree D0": {"draft": "mtp", "shape": TREE, "overlap_depth": 0},
    "plain D1": {"draft": None, "overlap_depth": 1},
    "few pages": {
        "draft": "specpool/tiny-eagle",
        "shape": CHAIN,
        "overlap_depth": 1,
        "num_pages": 44,
        "max_context_len": 96,
        "busy_check": 2,
    },
}
PROMPTS = ["seq: 2, 4, 6, ", "Once upon a time", "seq: 5, 10, ", "The cat"]


def engine_of(name: str, ranks: Ranks | None = None) -> Engine:
    """Build the engine of a setup; a setup without `num_pages` gets enough."""
    options = {**SMALL, "num_pages": 256, **SETUPS[name]}
    target = _tiny_with_mtp() if options["draft"] == "mtp" else "specpool/tiny"
    return Engine.from_pretrained(target, ranks=ranks, **options)


@functools.cache
def _tiny_with_mtp() -> Path:
    """A copy of the embedded target with an MTP layer, the same one in every process."""
    folder = Path(tempfile.mkdtemp(prefix="specpool-ranks-")) / "tiny-mtp"
    atexit.register(shutil.rmtree, folder.parent)
    shutil.copytree(resolve("specpool/tiny"), folder)
    torch.manual_seed(0)
    config = json.loads((folder / "config.json").read_text())
    mtp_checkpoints.add_layer(folder, "qwen", config["num_hidden_layers"])
    return folder


def play(engine: Engine, scenes: Sequence[str]) -> dict[str, Any]:
    """Play scenes; return what they gave."""
    results = {name: SCENES[name](engine) for name in scenes}
    stats = engine.stats()
    results["counts"] = [stats.retracted_ct, len(engine.findings)]
    return results


def _greedy(engine: Engine) -> Any:
    params = SamplingParams(max_new_tokens=24)
    return [[o.token_ids, o.accept_lens] for o in engine.generate(PROMPTS, params)]


def _drawn(engine: Engine) -> Any:
    params = [
        SamplingParams(max_new_tokens=20, temperature=0.9, top_p=0.95, seed=1),
        SamplingParams(max_new_tokens=20, temperature=1.2, top_k=30, seed=(1 << 64) - 1, n=3),
        SamplingParams(max_new_tokens=20, temperature=0.7, seed=3, frequency_penalty=0.5),
        SamplingParams(max_new_tokens=20, logit_bias={30: 2.0, 31: -100}, stop=("5",)),
    ]
    return [[o.token_ids, o.finish_reason] for o in engine.generate(PROMPTS, params)]


def _sessions(engine: Engine) -> Any:
    params, outcomes = SamplingParams(max_new_tokens=10), []
    with engine.open_session() as session:
        for text in ("seq: 1, 2, ", "and ", "then "):
            outcomes.append(session.append(text, params).output().token_ids)
        with session.fork() as copy:
            outcomes.append(copy.append("other ", params).output().token_ids)
        session.rewind(12)
        turn = session.append("again ", SamplingParams(max_new_tokens=60))
        next(turn)
        turn.close()
        output = session.append("last ", params).output()
        outcomes += [output.token_ids, output.num_reused, session.num_tokens]
        tokens = session.tokens
    with engine.open_session(tokens=tokens) as session:  # as one that comes from another engine
        with session.fork() as copy:
            return [
                *outcomes,
                *(branch.append("on", params).output().token_ids for branch in (session, copy)),
            ]


def _prefixes(engine: Engine) -> Any:
    text, params = "the same long beginning of every prompt: ", SamplingParams(max_new_tokens=8)
    first = engine.generate([text + "one"], params)
    two = engine.generate([text + "two", text + "three"], params)
    pin = engine.pin(text)
    three = engine.generate([text + "four"], params)
    engine.unpin(pin)
    engine.forget_prefixes()
    four = engine.generate([text + "one"], params)
    return [[o.token_ids, o.num_reused] for o in (*first, *two, *three, *four)]


def _forms(engine: Engine) -> Any:
    if importlib.util.find_spec("llguidance") is None:
        return None
    form = Grammar.regex("(yes|no), [0-9]{3}(;| and [a-c]{2,5})")
    params = SamplingParams(max_new_tokens=24, structured=form)
    return [o.text for o in engine.generate(PROMPTS[:2], params)]


def _aborts(engine: Engine) -> Any:
    """Submit, run some turns, abort from within a callback and from outside."""
    outcomes: dict[int, Any] = {}

    def tell(number: int, item: Any) -> None:
        if hasattr(item, "finish_reason"):
            outcomes[number] = [item.finish_reason, item.token_ids]
        elif number == first and len(item.token_ids) > 0:
            engine.abort(first)

    params = SamplingParams(max_new_tokens=30)
    first = engine.submit(PROMPTS[0], params, on_item=tell)
    second = engine.submit(PROMPTS[1], params, on_item=tell, priority=3)
    third = engine.submit(PROMPTS[2], SamplingParams(max_new_tokens=9), on_item=tell)
    for _ in range(3):
        engine.turn()
    engine.abort(second)
    while engine.turn():
        pass
    return [outcomes[number] for number in (first, second, third)]


def _drafters(engine: Engine) -> Any:
    texts = []
    for drafter in engine.drafters:
        params = SamplingParams(max_new_tokens=24, drafter=drafter)
        texts += [output.token_ids for output in engine.generate(PROMPTS[:2], params)]
    return texts


def _many(engine: Engine) -> Any:
    """More requests than rows and, with few pages, more text than pages: some are retracted."""
    params = SamplingParams(max_new_tokens=56, ignore_eos=True)
    return [o.token_ids for o in engine.generate(PROMPTS * 2, params)]


def _compared(engine: Engine) -> Any:
    """Let the model judge a text that one token of was changed."""
    (output,) = engine.generate(PROMPTS[:1], SamplingParams(max_new_tokens=12))
    other = list(output.token_ids)
    other[5] = (other[5] + 7) % 200
    changed = type(output)(
        **{name: getattr(output, name) for name in output.__dataclass_fields__}
        | {"token_ids": other}
    )
    return engine.compare(output, changed).verdict


SCENES = {
    "greedy": _greedy,
    "drawn": _drawn,
    "sessions": _sessions,
    "prefixes": _prefixes,
    "forms": _forms,
    "aborts": _aborts,
    "many": _many,
    "compared": _compared,
    "drafters": _drafters,
}


def _scenes(ranks: Ranks, scenes: dict[str, list[str]]) -> Any:
    results = {}
    for name in scenes:
        with engine_of(name, ranks) as engine:
            if ranks.leads:
                results[name] = play(engine, scenes[name])
                results["move"] = _refusal_of_a_move(engine)
            else:
                engine.follow()
    return results


def _refusal_of_a_move(engine: Engine) -> str:
    with engine.open_session() as session:
        try:
            engine.export(session)
        except ConfigError as error:
            return str(error)
    return ""


def _long(ranks: Ranks, turns: int) -> Any:
    with engine_of("few pages", ranks) as engine:
        if not ranks.leads:
            engine.follow()
            return None
        return run_long(engine, turns)


def run_long(engine: Engine, turns: int) -> Any:
    """Submit and abort at random until so many turns ran; return what was counted."""
    choice, started, live = random.Random(7), time.monotonic(), list[int]()
    gone, sessions = set[int](), [engine.open_session() for _ in range(2)]
    done = 0

    def tell(number: int, item: Any) -> None:
        nonlocal done
        if hasattr(item, "finish_reason"):
            gone.add(number)
            done += 1

    for turn in itertools.count():
        if turn == turns:
            break
        live = [number for number in live if number not in gone]
        if len(live) < 7 and choice.random() < 0.5:
            params = SamplingParams(
                max_new_tokens=choice.randint(1, 70),
                temperature=choice.choice([0.0, 1.0]),
                seed=turn,
                ignore_eos=True,
            )
            session = choice.choice([None, None, *sessions])
            if session is not None and (session.is_busy or session.num_tokens > 30):
                if not session.is_busy:
                    session.rewind(choice.randint(0, 10))
                session = None
            text = choice.choice(PROMPTS)
            live.append(engine.submit(text, params, session=session, on_item=tell))
        if live and choice.random() < 0.03:
            engine.abort(choice.choice(live))
        engine.turn()
    core, stats = engine.core, engine.stats()
    return {
        "turns": turns,
        "records": core.journal.num_records,
        "done": done,
        "retracted": stats.retracted_ct,
        "digest": core.journal._digest,
        "seconds": time.monotonic() - started,
    }


def _timed(ranks: Ranks) -> Any:
    """Generate by each controller that has a clock; return the texts, and the times it was told."""
    rng, observed = random.Random(ranks.rank), list[float]()
    ticks = itertools.accumulate(rng.choice([1e-5, 1e-2]) for _ in itertools.count())
    time.perf_counter = lambda: next(ticks)  # each rank's own, so that nothing else can agree
    _spy(
        CostController, "on_round_seconds", lambda _, shape, size, seconds: observed.append(seconds)
    )
    _spy(
        BudgetController,
        "on_round_seconds",
        lambda _, shape, size, seconds: observed.append(seconds),
    )
    _spy(BudgetController, "observe", lambda _, shapes, seconds, *__: observed.append(seconds))
    _spy(BudgetController, "choose", lambda self, *_: observed.append(self._clock()))
    texts = {}
    for policy in ("cost", "budget"):
        options = {**SMALL, "num_pages": 256, "adaptive": policy, "overlap_depth": 1}
        with Engine.from_pretrained(
            "specpool/tiny", draft="specpool/tiny-eagle", ranks=ranks, **options
        ) as engine:
            if not ranks.leads:
                engine.follow()
                continue
            targets = [None, 3.0, 30.0, 300.0] if policy == "budget" else [None] * 4
            params = [
                SamplingParams(max_new_tokens=60, ignore_eos=True, tpot_ms=tpot_ms)
                for tpot_ms in targets
            ]
            texts[policy] = [output.token_ids for output in engine.generate(PROMPTS, params)]
    return texts, observed


def _spy(kind: type, name: str, note: Callable[..., None]) -> None:
    """Call `note` before each call of a method."""
    method = getattr(kind, name)

    def noting(*args: Any) -> Any:
        note(*args)
        return method(*args)

    setattr(kind, name, noting)


def _plant(ranks: Ranks, kind: str, record: int) -> Any:
    if not ranks.leads:
        _planted(kind, record)
    with engine_of("eagle chain D0", ranks) as engine:
        if kind.startswith(f"forward {ranks.rank} "):
            _fail_forward(engine, record, kind.split()[-1])
        if not ranks.leads:
            engine.follow()
            return None
        if kind in TAMPERED:
            _tamper(ranks, kind, record)
        params = SamplingParams(max_new_tokens=60, ignore_eos=True)
        return [o.token_ids for o in engine.generate(PROMPTS, params)]


TAMPERED = ("garbage", "forged", "replayed")


def _tamper(ranks: Ranks, kind: str, record: int) -> None:
    """Change what rank 0 sends at a record; the digest stays that of the record before."""
    send, sent = ranks.send, list[bytes]()

    def tampered(frame: bytes) -> None:
        sent.append(frame)
        match kind if len(sent) == record else "":
            case "garbage":
                send(bytes(range(64)) * 4)
            case "forged":  # a call more or less is not seen by lengths
                send(frame[:-1] + bytes([frame[-1] ^ 1]))
            case "replayed":
                send(sent[-2])
            case _:
                send(frame)

    ranks.send = tampered  # type: ignore[method-assign]


def _fail_forward(engine: Engine, record: int, error: str) -> None:
    """Let a forward of this rank fail in the turn of a record."""
    worker, journal = engine.core.loop._worker, engine.core.journal
    run = worker.run

    def failing(steps: Any) -> Any:
        if journal.num_records == record:
            raise {"RuntimeError": RuntimeError, "ValueError": ValueError}[error]("planted")
        return run(steps)

    worker.run = failing  # type: ignore[method-assign]


def _planted(kind: str, record: int) -> None:
    """Make this rank do something of its own after a record."""
    apply = Follower.apply

    def planted(self: Follower, data: bytes) -> bool:
        goes_on = apply(self, data)
        journal, ledger = self._journal, self._scheduler.state.ledger
        if journal.num_records == record:
            if kind == "admit":
                ledger.admit("planted")
                journal._digest = ledger.digest or 0
            elif kind == "token":
                journal._latest_results[-1].tokens[0][0] ^= 1
            elif kind == "die":
                os.kill(os.getpid(), 9)
            elif kind == "stop":
                os.kill(os.getpid(), 19)
            elif kind == "raise":
                raise RuntimeError("a planted error")
        return goes_on

    Follower.apply = planted  # type: ignore[method-assign]


def _main(arguments: list[str]) -> None:
    torch.set_num_threads(1)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # gloo prints there
    with Ranks() as ranks:
        match arguments:
            case ["scenes", scenes]:
                results = _scenes(ranks, json.loads(scenes))
            case ["long", turns]:
                results = _long(ranks, int(turns))
            case ["timed", scenes]:
                results = _scenes(ranks, json.loads(scenes))
                results["timed"] = _timed(ranks)  # the last: it changes the clock of the process
            case ["plant", kind, record]:
                results = _plant(ranks, kind, int(record))
            case _:
                raise SystemExit(f"unknown: {arguments}")
        print(json.dumps(results), file=out, flush=True)


if __name__ == "__main__":
    _main(sys.argv[1:])
