"""A card without a card: engines over tensors that say they are on `cuda:0` and hold no numbers.

torch's own fake tensors compute shapes, dtypes and devices as on a card. So these are errors here
as they are there: a tensor of the host among tensors of the device, an operator that does not take
its arguments on a card, a read of what the device holds. A kernel of our own is checked against its
C++ signature in place of being launched. Every other kit runs on CPU tensors, and sees none of it.

What comes back to the host is made up: each round accepts one token.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

from capture_double import FakeCuda
from kernel_kit import backend
from specpool.capacity.layer_kv import LayerKV
from specpool.engine.draft import NgramDrafter, SuffixDrafter
from specpool.engine.draft.base import DraftTree
from specpool.engine.models import TargetModel, fused_layers, last_rows
from specpool.engine.models import target as target_module
from specpool.engine.models.eagle import head
from specpool.engine.models.files.checkpoint import Weights
from specpool.engine.models.state_probe import first_forward
from specpool.kernels import launch

DEVICE = torch.device("cuda", 0)
MEMORY = (60 << 30, 80 << 30)  # bytes that are free, and all


class Kernels:
    """The kernels' back end: it checks a launch and runs nothing.

    Attributes:
        launches: how often each kernel was launched.
    """

    def __init__(self) -> None:
        self.launches: Counter[str] = Counter()

    def kernels(self, device: torch.device) -> dict[str, Any]:
        return {}

    def launch(
        self,
        entry: str,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: Sequence[launch.Arg],
        shared_mem: int,
        touches: Sequence[Tensor],
    ) -> None:
        self.launches[entry.removesuffix("_kernel")] += 1
        for tensor in [*(arg for arg in args if isinstance(arg, Tensor)), *touches]:
            assert tensor.device == DEVICE, f"{entry}: {tuple(tensor.shape)} on {tensor.device}"
            assert tensor.is_contiguous(), f"{entry}: {tuple(tensor.shape)} {tensor.stride()}"
        assert all(0 < size for size in grid) and all(size < 1 << 16 for size in grid[1:]), grid
        assert shared_mem <= launch.SHARED_BYTES
        packed = [np.int64(0) if arg is None else arg for arg in args]
        backend("fast", "forward").kernel(entry).check(grid, block, packed, shared_mem=shared_mem)


class NoWaits(TorchDispatchMode):
    """Refuse copies from the device that the host waits for.

    Fake tensors refuse all other reads themselves.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if isinstance(made, Tensor) and made.device.type == "cpu":
            given = [*args, *kwargs.values()]
            reads = any(
                isinstance(argument, Tensor) and argument.device.type == "cuda"
                for argument in given
            )
            name = func.overloadpacket.__name__
            is_started = name == "copy_" and (kwargs.get("non_blocking") or True in args[2:])
            assert is_started or not reads, f"{name} waits for the device"
        return made


def numbers(tensor: Tensor) -> NDArray[Any]:
    """Return what the host reads of a tensor that was copied to it.

    Of a round, int64 [B, A + 2]: tokens, that one counts, and that all logits were finite.
    """
    content = np.zeros(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
    if tensor.dtype == torch.int64:
        content[...] = 1 + np.arange(content.size).reshape(content.shape) % 200
        if content.ndim == 2 and content.shape[1] > 2:
            content[:, -2:] = 1, 0
    return content


class _Event:
    def record(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass


class _Runtime:
    """The part of CUDA's runtime that pins memory of the host."""

    def cudaHostRegister(self, *args: int) -> int:  # noqa: N802
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        return 0


# What works with numbers on the host, while an engine loads or proposes: fake tensors have none.
_ON_THE_HOST = [
    (Weights, "__getitem__"),
    (head, "_check_tensors"),
    (NgramDrafter, "propose"),
    (SuffixDrafter, "propose"),
    (DraftTree, "check_values"),
    (Tensor, "numpy"),  # of a real one
]


def _really(run: Callable[..., Any]) -> Callable[..., Any]:
    def really(*args: Any, **options: Any) -> Any:
        with unset_fake_temporarily():
            return run(*args, **options)

    return really


def _address(tensor: Tensor) -> int:
    """Return an address that no other storage has."""
    return tensor.untyped_storage()._cdata + tensor.storage_offset() * tensor.itemsize


def _numpy(tensor: Tensor) -> NDArray[Any]:
    assert tensor.device.type == "cpu", "a read of the device"
    return numbers(tensor)


class Card:
    """The fake card, within `running`.

    Attributes:
        kernels: the kernels' back end.
        cuda: the double of torch's captures, through which `CudaCapture` itself runs.
        layer_kv: what the layers of models keep, by `kind_of`. It is found by numbers, so on a CPU.
        continues: by the same, whether recurrent mixers start several tokens from a state.
    """

    def __init__(self) -> None:
        self.kernels, self.cuda = Kernels(), FakeCuda()
        self.layer_kv: dict[tuple[Any, ...], Sequence[LayerKV]] = {}
        self.continues: dict[tuple[Any, ...], bool] = {}

    def probe(self, *sources: Any) -> Card:
        """Probe models, so that they can run."""
        for source in sources:
            with TargetModel.from_pretrained(source) as target:
                self.layer_kv[kind_of(target)] = target.layer_kv
                if target.mixers is not None:
                    self.continues[kind_of(target)] = target.mixers.continues
        return self

    def _probe_states(self, target: TargetModel) -> tuple[tuple[int, ...], tuple[LayerKV, ...]]:
        layers, layer_kv, target.mixers = first_forward(target)
        target.mixers.continues = self.continues[kind_of(target)]
        return layers, layer_kv

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Within the block `device="cuda"` is this card."""
        empty = torch.empty
        with torch.device("cpu"):  # at its first use torch notes which functions take a device
            empty(0)

        def unpinned(*size: Any, pin_memory: bool = False, **options: Any) -> Tensor:
            return empty(*size, **options)

        with pytest.MonkeyPatch.context() as patch:
            self.cuda.install(patch, holds_tensors=True)
            patch.setattr(launch, "_cuda", self.kernels)
            patch.setattr(target_module, "probe", lambda target: self.layer_kv[kind_of(target)])
            patch.setattr(target_module, "probe_states", self._probe_states)
            # Whether a head's embedding is a copy of the target's is found by numbers too.
            patch.setattr(head, "is_copy", lambda table, targets: True)
            # So is what a model's modules compute: here each is what it may be.
            patch.setattr(fused_layers, "_agrees", lambda *results, **how: True)
            patch.setattr(last_rows, "_agree", lambda *logits: True)
            patch.setattr(torch, "empty", unpinned)
            patch.setattr(Tensor, "pin_memory", lambda tensor, *device: tensor)
            patch.setattr(FakeTensor, "data_ptr", _address)
            for owner, name in _ON_THE_HOST:
                patch.setattr(owner, name, _really(getattr(owner, name)))
            patch.setattr(FakeTensor, "numpy", _numpy)
            for name, value in {
                "mem_get_info": lambda *device: MEMORY,
                "get_device_capability": lambda *device: (9, 0),
                "current_device": lambda: DEVICE.index,
                "Event": lambda **options: _Event(),
                "cudart": _Runtime,
            }.items():
                patch.setattr(torch.cuda, name, value)
            with FakeTensorMode(allow_non_fake_inputs=True), NoWaits():
                yield


def kind_of(target: TargetModel) -> tuple[Any, ...]:
    """Return what tells models with unlike layers apart."""
    return target.config.model_type, target.num_layers, target.hidden_size
