"""`python -m benches held-states`: the states and draft memory that requests hold in three engines.

The same requests, with the same accept lengths, run on this project's ledger, on vLLM's KV cache
manager with its `MambaManager`, and on SGLang's `HybridReqToTokenPool` with its `MambaPool`. Each
says after each step how many states are held; the bytes are those of its own classes for the shapes
of published models (`hybrids`). No kernel runs. The engines do not import together, so each is a
process of its own.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benches.engines import ENGINES, ROOT
from specpool._core import Group, Ledger, Shape
from specpool.capacity.state_sizes import StateBytes, state_group
from specpool.checks import check_int, check_number
from specpool.cli.results import Result, check_plot, machine, report
from specpool.errors import ConfigError

CHAIN = Shape.eagle(3, 1, 4)
NUM_DRAFTS = CHAIN.num_draft_tokens - 1
PROMPT_LENS, OUTPUT_LENS = (64, 512, 2048, 4096), (32, 256)
PAGE_SIZE = 16
OVERLAP_DEPTH = 1  # the ring is longer than without overlap
#: The other engines, by the names of their folders in `.engines`.
PEERS = {"vllm": "vLLM", "sglang": "SGLang"}
#: How each can be set: its title, and whether it then has a prefix cache.
WAYS = {
    ("vllm", "none"): ("vLLM", False),
    ("vllm", "ring"): ("vLLM with ReplaySSM", False),
    ("sglang", "none"): ("SGLang", False),
    ("sglang", "ring"): ("SGLang with ReplaySSM", False),
    ("vllm", "align"): ("vLLM, prefix cache", True),
    ("sglang", "tracked"): ("SGLang, prefix cache", True),
}


@dataclass(frozen=True, slots=True)
class Visit:
    """A request: it comes before a step, and each of its rounds accepts so many tokens."""

    step: int
    prompt_len: int
    accept_lens: Sequence[int]


@dataclass(frozen=True, slots=True)
class Recurrent:
    """What a recurrent layer of a model keeps; all recurrent layers of a model are alike.

    Attributes:
        num_layers: how many there are.
        kind: the model's type, as transformers calls it.
        conv: channels, and the convolution's width.
        state: shape of the recurrent state; empty if there is none.
        num_groups: key heads, or Mamba-2's groups of B and C.
    """

    num_layers: int
    kind: str
    conv: Sequence[int]
    state: Sequence[int]
    num_groups: int


class StateMemory(ABC):
    """The states of requests, as an engine's classes hand them out."""

    @abstractmethod
    def begin(self, number: int, prompt_len: int) -> None:
        """Prefill a request."""

    @abstractmethod
    def decode(self, accept_lens: Mapping[int, int]) -> None:
        """Run a round of the requests; each accepts so many tokens."""

    @abstractmethod
    def end(self, number: int) -> None:
        """Give back what a request holds."""

    @abstractmethod
    def num_held(self) -> int:
        """States that nobody else can get."""


def draw_visits(requests: int, accept_rate: float, seed: int) -> list[Visit]:
    """Return requests that come every fourth step; each draft is right at the rate."""
    rng = random.Random(seed)
    visits = []
    for number in range(requests):
        missing, accept_lens = rng.randint(*OUTPUT_LENS), list[int]()
        while missing > 0:
            right = range(NUM_DRAFTS)
            accept_lens.append(
                1 + next((n for n in right if rng.random() >= accept_rate), NUM_DRAFTS)
            )
            missing -= accept_lens[-1]
        visits.append(Visit(4 * number, rng.choice(PROMPT_LENS), accept_lens))
    return visits


def replay(visits: Sequence[Visit], memory: StateMemory) -> float:
    """Run the requests to their ends; return the states that a running one holds on average.

    Raises:
        AssertionError: something is held at the end.
    """
    rounds: dict[int, list[int]] = {}
    num_states = num_requests = 0
    for step in itertools.count():
        for number, visit in enumerate(visits):
            if visit.step == step:
                memory.begin(number, visit.prompt_len)
                rounds[number] = [*visit.accept_lens]
        memory.decode({number: left.pop(0) for number, left in rounds.items()})
        num_states += memory.num_held()
        num_requests += len(rounds)
        for number in [number for number, left in rounds.items() if not left]:
            memory.end(number)
            del rounds[number]
        if not rounds and step >= visits[-1].step:
            break
    memory.decode({})
    assert memory.num_held() == 0, f"{memory.num_held()} states are held at the end"
    return num_states / num_requests


class LedgerStates(StateMemory):
    """The state slots of this project's ledger, with a round in flight.

    With `prefix_cache` a state is kept one token before each prompt's end, for others.
    """

    def __init__(self, visits: Sequence[Visit], flush: int, *, prefix_cache: bool) -> None:
        max_len = max(visit.prompt_len + sum(visit.accept_lens) for visit in visits)
        max_len += (2 + OVERLAP_DEPTH) * CHAIN.num_draft_tokens
        pages_per_row = -(-max_len // PAGE_SIZE) + 1
        self.ledger = Ledger(
            [Group("kv", page_size=PAGE_SIZE, num_pages=len(visits) * pages_per_row)],
            [CHAIN],
            num_rows=len(visits),
            max_context_len=max_len,
            overlap_depth=OVERLAP_DEPTH,
            states=[state_group(len(visits) * (1 + prefix_cache), flush)],
        )
        self.prefix_cache = prefix_cache
        self._rows: dict[int, int] = {}
        self._flying: list[tuple[int, list[int]]] = []

    def begin(self, number: int, prompt_len: int) -> None:
        """Prefill in one chunk; no two texts are alike."""
        self._rows[number] = row = self.ledger.admit(f"request {number}")
        keep = [0] if self.prefix_cache else []
        plan = self.ledger.prepare_extend([row], [prompt_len], keep=keep)
        self.ledger.launch(plan.step)
        self.ledger.complete(plan.step)
        if self.prefix_cache:
            first = number * self.ledger.max_context_len
            self.ledger.index(row, range(first, first + prompt_len))

    def decode(self, accept_lens: Mapping[int, int]) -> None:
        """Launch a round, then take over the results of the one before."""
        if accept_lens:
            rows = [self._rows[number] for number in accept_lens]
            plan = self.ledger.prepare_decode(rows, [1] * len(rows))
            self.ledger.launch(plan.step)
            self._flying.append((plan.step, [*accept_lens.values()]))
        while len(self._flying) > (OVERLAP_DEPTH if accept_lens else 0):
            step, lens = self._flying.pop(0)
            self.ledger.resolve(step, lens)
            self.ledger.complete(step)

    def end(self, number: int) -> None:
        """Give the row back; its round in flight is dropped."""
        self.ledger.finish(self._rows.pop(number))

    def num_held(self) -> int:
        """Slots that are neither free nor kept for others alone."""
        can_be_taken = self.ledger.free_state_slots(0) + self.ledger.cached_state_slots(0)
        return self.ledger.states[0].num_slots - can_be_taken


def ask(
    peer: str, visits: Sequence[Visit], models: Mapping[str, Recurrent]
) -> dict[str, dict[str, list[float]]]:
    """Run an engine's process; return for each model and way the states and bytes of a request.

    Raises:
        ConfigError: the engine is not there, or the process fails.
    """
    home = ENGINES / peer
    if not (home / peer).is_dir():
        raise ConfigError(f"{home} has no {PEERS[peer]}: `make engines`")
    job = {
        "visits": [asdict(visit) for visit in visits],
        "models": {name: asdict(model) for name, model in models.items()},
    }
    places = os.pathsep.join(map(str, [home, ROOT]))
    settings = {"PYTHONPATH": places, "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_TARGET_DEVICE": "cpu"}
    done = subprocess.run(
        [sys.executable, "-m", f"benches.held_states_{peer}"],
        cwd=ROOT,
        env=os.environ | settings,
        input=json.dumps(job),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ConfigError(f"{PEERS[peer]} ended with {done.returncode}: {done.stderr[-1500:]}")
    answer: dict[str, dict[str, list[float]]] = json.loads(done.stdout.splitlines()[-1])
    return answer


def read_job() -> tuple[list[Visit], dict[str, Recurrent]]:
    """Return what `ask` has written; for an engine's process."""
    job = json.load(sys.stdin)
    models = {name: Recurrent(**model) for name, model in job["models"].items()}
    return [Visit(**visit) for visit in job["visits"]], models


def of_model(name: str) -> tuple[Recurrent, StateBytes]:
    """Return a model's recurrent layers, and the bytes of a slot and a record as allocated."""
    from benches.states import CONFIGS, Marginal, outline

    layers = outline(name)
    (states,) = {
        tuple((state.kind, state.shape) for state in mixer.states) for mixer in layers.mixers
    }
    shapes = dict(states)
    config = json.loads((CONFIGS / name / "config.json").read_text("utf-8"))
    model = Recurrent(
        num_layers=len(layers.mixers),
        kind=config["model_type"],
        conv=shapes["conv"],
        state=shapes.get("recurrent", ()),
        num_groups=config.get("linear_num_key_heads", config.get("n_groups", 1)),
    )
    marginal = Marginal.of(layers)
    return model, StateBytes(marginal.slot, marginal.record, marginal.flush)


def own(visits: Sequence[Visit], size: StateBytes, *, prefix_cache: bool) -> list[float]:
    """Return the states and the bytes of a running request here; the bytes include its ring."""
    memory = LedgerStates(visits, size.flush, prefix_cache=prefix_cache)
    num_states = replay(visits, memory)
    ring_len = memory.ledger.state_ring_len(0)
    return [num_states, num_states * size.slot + ring_len * size.record]


def results(
    model: str,
    ours: Mapping[bool, Sequence[float]],
    answers: Mapping[str, Mapping[str, Sequence[float]]],
) -> list[Result]:
    """Return a model's figures: ours beside those of each engine's ways that serve it."""
    figures = []
    for (peer, way), (title, prefix_cache) in WAYS.items():
        if way in answers[peer]:
            for index, unit in enumerate(("states", "B")):
                values = ours[prefix_cache][index], answers[peer][way][index]
                figures.append(
                    Result(f"{model}: {unit}, {title}", values[0], unit, title, values[1])
                )
    return figures


def held_states(
    *, requests: int, accept_rate: float, seed: int, json: bool, plot: Path | None
) -> None:
    """Run the requests on the three, then print what a running one holds on average.

    Raises:
        ConfigError: an option cannot work, or an engine is not there.
    """
    from benches.states import NAMES

    check_int("requests", requests, 1, 1 << 12)
    check_number("accept_rate", accept_rate, 0, 1)
    check_int("seed", seed, 0, (1 << 31) - 1)
    if plot is not None:
        check_plot(plot)
    visits = draw_visits(requests, accept_rate, seed)
    models, sizes = {}, {}
    for name, title in NAMES.items():
        models[title], sizes[title] = of_model(name)
    answers = {peer: ask(peer, visits, models) for peer in PEERS}
    figures: list[Result] = []
    for model, size in sizes.items():
        ours = {cached: own(visits, size, prefix_cache=cached) for cached in (False, True)}
        of_peers = {peer: answer[model] for peer, answer in answers.items()}
        figures += results(model, ours, of_peers)
    where = machine(packages=("torch", "transformers"))
    report("bench held-states: of a running request", where, figures, json_only=json, plot=plot)
