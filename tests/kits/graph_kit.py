"""A double of CUDA-graph capture for the CPU, as strict as a real one (`HostCapture`).

It has no graphs, so a replay runs the work again; but it writes down each operation and kernel
launch of the capture, with all sizes, numbers and outside addresses, and a replay must be the same
to the letter. What a real graph would have baked in cannot be another then: a host's number, memory
that has moved since, a branch on what a tensor holds. Results come in the tensors of the capture.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ancestry_kit import load_engine
from kernel_kit import backend
from specpool import Engine, SamplingParams, Shape
from specpool.engine.assets import corpus
from specpool.engine.worker.graphs.capture import Recording, Work, host_capture
from specpool.kernels import launch

NONE, ONE, SEVEN = Shape.none(), Shape.eagle(1, 1, 2), Shape.eagle(7, 1, 8)
CHAIN, TREE = Shape.eagle(3, 1, 4), Shape.eagle(4, 4, 16)
PROMPTS = [p[:n] for p, n in zip(corpus.prompts(6), (17, 40, 9, 3, 26, 33), strict=True)]
# Of unlike lengths, so that all batch sizes come; greedy ones beside drawn ones.
PARAMS = [
    SamplingParams(max_new_tokens=26, ignore_eos=True),
    SamplingParams(max_new_tokens=9, ignore_eos=True, temperature=1.0, seed=3),
    SamplingParams(max_new_tokens=21, ignore_eos=True),
    SamplingParams(max_new_tokens=6, ignore_eos=True, temperature=0.7, top_p=0.9, seed=4),
    SamplingParams(max_new_tokens=13, ignore_eos=True, temperature=1.3, top_k=40, seed=5),
    SamplingParams(max_new_tokens=4, ignore_eos=True),
]


def make(shape: Shape | None, *, head: str = "tiny-eagle", **options: Any) -> Engine:
    return load_engine(
        draft=None if shape is NONE else f"specpool/{head}",
        shape=shape,
        **{
            "max_context_len": 96,
            "max_batch": 4,
            "overlap_depth": 0,
            "busy_check": 2,
            **options,
        },
    )


_WAITS = ["numpy", "tolist", "item", "cpu", "__bool__", "__int__", "__float__", "__index__"]
_HIDDEN = ("nonzero", "masked_select", "_local_scalar_dense", "unique_dim", "_unique2")


class Tape(TorchDispatchMode):
    """Record what work does to a device; refuse everything that would wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[tuple] = []
        self._own_storages: dict[int, int] = {}  # address of a storage made within -> its number
        self._alive: list[Tensor] = []  # so that no address is given twice
        self._read: set[int] = set()  # addresses of the storages that the operation is given

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        assert name not in _HIDDEN, f"{name} waits for the device"
        if name in ("index", "index_put", "index_put_"):
            assert all(i is None or i.dtype != torch.bool for i in args[1]), f"{name} by a mask"
        if name == "repeat_interleave":
            assert kwargs.get("output_size") is not None, f"{name} waits for the device"
        self._read.clear()
        read = self._sign([*args, kwargs])
        result = func(*args, **kwargs)
        for made in result if isinstance(result, tuple | list) else [result]:
            if isinstance(made, Tensor):
                address = made.untyped_storage().data_ptr()
                if address not in self._read and address not in self._own_storages:
                    self._own_storages[address] = len(self._own_storages)
                    self._alive.append(made)
        self.entries.append((name, read))
        return result

    def launch(self, entry, grid, block, args, shared_mem, touches):
        """A kernel's."""
        self.entries.append((entry, grid, block, self._sign(args), shared_mem, self._sign(touches)))

    def _sign(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            storage = value.untyped_storage().data_ptr()
            self._read.add(storage)
            number = self._own_storages.get(storage)
            whose = ("outside", storage) if number is None else ("own", number)
            return *whose, value.dtype, value.storage_offset(), value.shape, value.stride()
        if isinstance(value, dict):
            return {key: self._sign(item) for key, item in value.items()}
        if isinstance(value, tuple | list):
            return [self._sign(item) for item in value]
        return repr(value)


class _Spy:
    """The kernels' runner, written down."""

    def __init__(self, runner: launch.Backend, tape: Tape) -> None:
        self._runner, self._tape = runner, tape

    def launch(self, *args) -> None:
        self._tape.launch(*args)
        self._runner.launch(*args)


@contextlib.contextmanager
def _recorded(tape: Tape) -> Iterator[None]:
    methods = {name: getattr(Tensor, name) for name in _WAITS}

    def refusing(name: str) -> Callable[..., Any]:
        def refuse(self: Tensor, *args: Any) -> Any:
            raise AssertionError(f"{name} of {self.dtype} {tuple(self.shape)} waits for the device")

        return refuse

    for name in _WAITS:
        setattr(Tensor, name, refusing(name))
    try:
        with launch.host_backend(_Spy(launch._host, tape)), tape:
            yield
    finally:
        for name, method in methods.items():
            setattr(Tensor, name, method)


class HostGraph:
    """A captured half of a round; a recording holds its bound `replay`, as of torch's graph."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run

    def replay(self) -> None:
        self._run()


class HostCapture:
    """Captures work on CPU tensors.

    Attributes:
        recordings: how many there are.
        replays: how many ran.
    """

    def __init__(self, is_full: Callable[[int], bool] = lambda number: False) -> None:
        """`is_full`: whether memory runs out at a capture, counted from 1; negative: a warm-up."""
        self.is_full = is_full
        self.recordings = self.replays = self._tried = self._warm = self._bytes = 0

    def warm_up(self, work: Work) -> None:
        self._warm += 1
        self._take(-self._warm)
        _, launch_rest = work()
        launch_rest()

    def record(self, work: Work, *, follows: bool) -> Recording:
        self._tried += 1
        first, rest = Tape(), Tape()
        with _recorded(first):
            outcome, launch_rest = work()
        self._take(self._tried)
        rest._own_storages, rest._alive = dict(first._own_storages), first._alive
        with _recorded(rest):
            launch_rest()
        assert bool(rest.entries) == follows
        packed = outcome.packed
        packed.fill_(-7)  # a capture computes nothing
        running: list[tuple[Tape, Callable[[], None]]] = []

        def decide() -> None:
            tape = Tape()
            with _recorded(tape):
                result, again = work()
            _same(tape, first)
            packed.copy_(result.packed)
            running[:] = [(tape, again)]
            self.replays += 1

        def follow() -> None:
            ((before, again),) = running
            tape = Tape()
            tape._own_storages, tape._alive = before._own_storages, before._alive
            with _recorded(tape):
                again()
            _same(tape, rest)
            running.clear()

        self.recordings += 1
        self._bytes += packed.nbytes
        second = HostGraph(follow).replay if follows else None
        return Recording(outcome, HostGraph(decide).replay, second)

    def used_bytes(self) -> int:
        return 1000 + self._bytes

    def _take(self, number: int) -> None:
        if self.is_full(number):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def _same(tape: Tape, other: Tape) -> None:
    for number, (entry, recorded) in enumerate(zip(tape.entries, other.entries, strict=False)):
        assert entry == recorded, (
            f"launch {number} of a replay is not the capture's: {entry}, was {recorded}"
        )
    assert len(tape.entries) == len(other.entries), "a replay has another number of launches"


@contextlib.contextmanager
def graphs_run(is_full: Callable[[int], bool] = lambda number: False) -> Iterator[HostCapture]:
    """Kernels run on CPU tensors, and engines that are built capture their rounds."""
    capture = HostCapture(is_full)
    with launch.host_backend(backend("fast", "forward")), host_capture(lambda: capture):
        yield capture
