"""Kernels counted as they run, and reads of the device forbidden while a step runs."""

from __future__ import annotations

import contextlib
from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernel_kit import backend
from specpool.kernels import launch


@contextlib.contextmanager
def kernels_run(order: object = "forward"):
    """Kernels run on CPU tensors; how often each was launched."""
    runner = backend("fast", order)
    first, seen = len(runner.launches), Counter()
    with launch.host_backend(runner):
        yield seen
    seen.update(name.removesuffix("_kernel") for name in runner.launches[first:])


READS = ["numpy", "tolist", "item", "cpu", "__bool__", "__int__", "__float__", "__index__"]


class NoHiddenReads(TorchDispatchMode):
    """Refuses the operations whose result's size, or way, depends on what a tensor holds."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in ("nonzero", "masked_select", "_local_scalar_dense", "unique_dim"), name
        if name in ("index", "index_put", "index_put_"):
            assert all(i is None or i.dtype != torch.bool for i in args[1]), f"{name} by a mask"
        if name == "repeat_interleave":
            assert (kwargs or {}).get("output_size") is not None, name
        return func(*args, **(kwargs or {}))


def forbidden(name, running):
    method = getattr(torch.Tensor, name)

    def read(self, *args):
        assert not running[0], f"{name} of {self.dtype} {tuple(self.shape)}"
        return method(self, *args)

    return read


def watched(method, running, steps):
    def run(*args):
        running[0] = True
        steps[0] += 1
        try:
            with NoHiddenReads():
                return method(*args)
        finally:
            running[0] = False

    return run
