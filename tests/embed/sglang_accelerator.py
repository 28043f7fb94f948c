"""An accelerator that is not there: only kernels read what lies on it, and waits are counted.

A tensor on it is one in the host's memory that says otherwise. While an `Accelerator` is entered,
torch's functions keep the two apart as they do with a GPU: an operation on tensors of both is an
error, and `waits` counts each call that would hold the host until the device is done, by the file
and function that makes it. Time, streams and kernels are not emulated: what is launched is done.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache import allocation
from sglang.srt.mem_cache.allocator import paged
from torch.overrides import TorchFunctionMode

HERE = Path(__file__).parent

DEVICE = torch.device("cuda", 0)
#: What gives the host a number, or a tensor whose shape depends on what the device holds.
READS = {
    "item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__contains__", "equal",
    "allclose", "nonzero", "argwhere", "unique", "unique_consecutive", "_unique2", "masked_select",
    "is_nonzero",
}  # fmt: skip
#: What cannot be asked of a tensor on a device.
HOST_ONLY = {"numpy", "__array__"}
INDEXING = {"__getitem__", "__setitem__"}


class OnDevice(torch.Tensor):
    """A tensor on the accelerator."""

    def record_stream(self, stream: Any) -> None:
        """Nothing: there is one stream."""


def on_host(value: Any) -> Any:
    """The same with each tensor of the accelerator as one of the host, on the same memory."""
    if isinstance(value, OnDevice):
        return value.as_subclass(torch.Tensor)
    if isinstance(value, dict):
        return {key: on_host(each) for key, each in value.items()}
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(map(on_host, value))
    return value


def _moved(value: Any) -> Any:
    """The same with each tensor on the accelerator, on the same memory."""
    if isinstance(value, torch.Tensor):
        return value.as_subclass(OnDevice)
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(map(_moved, value))
    return value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _device_of(values: Any) -> str | None:
    """The kind of the first device that is named among the values."""
    for value in values:
        if isinstance(value, torch.device):
            return value.type
        if isinstance(value, str) and value.partition(":")[0] in ("cpu", DEVICE.type):
            return value.partition(":")[0]
    return None


class Accelerator(TorchFunctionMode):
    """The accelerator; `waits` and `pageable` count by `file:function`."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        #: Copies that are not waited for, of memory that is not pinned: the driver may wait.
        self.pageable: Counter[str] = Counter()
        self._kernels = 0

    @contextlib.contextmanager
    def kernel(self) -> Iterator[None]:
        """What runs within it runs on the device: it may read what lies there."""
        self._kernels += 1
        try:
            yield
        finally:
            self._kernels -= 1

    def launched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function as a kernel, which runs on the device."""

        def run(*args: Any, **options: Any) -> Any:
            with self.kernel():
                return function(*args, **options)

        return run

    def install(self) -> None:
        """Put it in the place of the device module, and its kernels in that of SGLang's."""
        module = SimpleNamespace(Event=lambda: Event(self), current_stream=lambda: None)
        torch.get_device_module = lambda device=None: module
        for each in list(sys.modules.values()):  # SGLang asks torch for CUDA, which is not there
            if each.__name__.startswith("sglang.") and hasattr(each, "is_pin_memory_available"):
                each.is_pin_memory_available = lambda device=None: True
        allocation.assign_req_to_token_pool_func = self.launched(
            allocation.assign_req_to_token_pool_func
        )

        def extend(
            prefix: Any, seq: Any, last: Any, free: Any, out: Any, _: int, page_size: int
        ) -> None:
            paged.alloc_extend_naive(prefix, seq, last, free, out, page_size, "cpu")

        def decode(seq: Any, last: Any, free: Any, out: Any, _: int, page_size: int) -> None:
            opens = int(((seq - 1) % page_size == 0).sum())
            paged.alloc_decode_naive(seq, last, free, out, page_size, opens)

        paged.alloc_extend_kernel = _Grid(self.launched(extend))
        paged.alloc_decode_kernel = _Grid(self.launched(decode))

    def serve(self, worker: Any) -> None:
        """Run a fake model's forwards as kernels; their results lie on the device."""
        forward = worker.forward_batch_generation

        def on_device(holder: Any) -> None:
            for name, value in vars(holder).items():
                if isinstance(value, torch.Tensor):
                    setattr(holder, name, _moved(value))

        def run(batch: Any, **options: Any) -> Any:
            with self.kernel():
                result = forward(batch, **options)
                on_device(result)
                if result.next_draft_input is not None:
                    on_device(result.next_draft_input)
            return result

        worker.forward_batch_generation = run

    def note(self, counter: Counter[str], what: str) -> None:
        """Count under the innermost function that is neither torch's nor a test's."""
        if self._kernels:
            return
        frame: Any = sys._getframe(1)
        while frame is not None:
            path = Path(frame.f_code.co_filename)
            if ("specpool" in path.parts or "sglang" in path.parts) and path.parent != HERE:
                counter[f"{'/'.join(path.parts[-3:])}:{frame.f_code.co_name}: {what}"] += 1
                return
            frame = frame.f_back
        counter[f"test: {what}"] += 1

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        options = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):
            return self._property(func, name, args)
        if name in ("to", "cpu", "cuda", "copy_", "pin_memory"):
            return self._copy(func, name, args, options)
        found = list(_tensors([args, list(options.values())]))
        is_here = any(isinstance(each, OnDevice) for each in found)
        there = [each for each in found if not isinstance(each, OnDevice)]
        if not self._kernels and is_here:
            if name in HOST_ONLY:
                raise TypeError(f"{name} of a tensor on {DEVICE}: copy it to the host first")
            is_mixed = any(on_host(each).dim() for each in there)
            if name in READS or (name == "repeat_interleave" and "output_size" not in options):
                self.note(self.waits, name)
            elif name in INDEXING:
                self._index(name, args)
            elif is_mixed:
                raise RuntimeError(f"{name} of tensors on the host and on {DEVICE}")
        device = _device_of([options["device"]]) if options.get("device") is not None else None
        if device == DEVICE.type:
            options["device"] = "cpu"
            if name in ("tensor", "as_tensor"):
                self.note(self.waits, f"{name} from the host")
        pinned = bool(options.pop("pin_memory", False))
        result = func(*on_host(args), **on_host(options))
        if pinned:
            result.is_in_pinned_memory = True
        if name in READS - {"nonzero", "argwhere", "unique", "masked_select"} or device == "cpu":
            return result
        return _moved(result) if is_here or device == DEVICE.type else result

    def _property(self, func: Any, name: str, args: tuple[Any, ...]) -> Any:
        tensor, prop = args[0], func.__self__.__name__
        if isinstance(tensor, OnDevice) and name == "__get__":
            known = {"device": DEVICE, "is_cuda": True, "is_cpu": False}
            if prop in known:
                return known[prop]
            return _moved(func(*on_host(args)))
        return func(*on_host(args))

    def _index(self, name: str, args: tuple[Any, ...]) -> None:
        """Indices that lie elsewhere, masks, single numbers and values of the host."""
        target, index = args[0], list(_tensors([args[1]]))
        if not isinstance(target, OnDevice):
            if any(isinstance(each, OnDevice) for each in index):
                raise RuntimeError(f"a tensor on the host is indexed by one on {DEVICE}")
            self.note(self.waits, "a value of the device is copied to the host")
            return
        for each in index:
            plain = on_host(each)
            if not isinstance(each, OnDevice):
                self.note(self.waits, f"{name} by indices of the host")
            elif plain.dtype == torch.bool or not plain.dim():
                self.note(self.waits, f"{name} by a mask or a number of the device")
        for each in _tensors(args[2:]):
            if not isinstance(each, OnDevice) and each.dim() and each.numel():
                self.note(self.waits, f"{name} of values of the host")

    def _copy(self, func: Any, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        tensor = args[0]
        if name == "pin_memory":
            pinned = func(tensor) if torch.cuda.is_available() else tensor.clone()
            pinned.is_in_pinned_memory = True
            return pinned
        if name == "copy_":
            source, target = args[1], tensor
            self._cross(source, isinstance(target, OnDevice), options, target)
            func(*on_host(args), **options)
            return tensor
        wanted = "cpu" if name == "cpu" else DEVICE.type if name == "cuda" else None
        if name == "to":
            named = [*args[1:], options.get("device")]
            others = [each for each in args[1:] if isinstance(each, torch.Tensor)]
            if others:
                wanted = DEVICE.type if isinstance(others[0], OnDevice) else "cpu"
            else:
                wanted = _device_of(named)
        is_here = isinstance(tensor, OnDevice)
        goes = is_here if wanted is None else wanted == DEVICE.type
        self._cross(tensor, goes, options, None)
        if name != "to":
            return (_moved if goes else lambda each: each)(on_host(tensor).clone())
        dtypes = [each for each in (*args[1:], options.get("dtype")) if type(each) is torch.dtype]
        copied = on_host(tensor)
        is_copy = options.get("copy", False) or goes != is_here
        copied = copied.to(*dtypes[:1], copy=is_copy) if dtypes or is_copy else copied
        return _moved(copied) if goes else copied

    def _cross(self, source: Any, goes: bool, options: dict[str, Any], target: Any) -> None:
        """Count a copy between the host and the device."""
        if isinstance(source, OnDevice) == goes:
            return
        way = "up" if goes else "down"
        if not options.get("non_blocking", False):
            self.note(self.waits, f"a copy {way} that is waited for")
        elif not getattr(source if goes else target, "is_in_pinned_memory", not goes):
            self.note(self.pageable, f"a copy {way} of memory that is not pinned")


class _Grid:
    """What a Triton kernel is asked for: `kernel[grid](...)`."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return self._run


class Event:
    """An event of the accelerator; asking whether it is done waits for it."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def record(self, *_: Any, **__: Any) -> None:
        """Nothing: what was launched is done."""

    def wait(self, *_: Any) -> None:
        """A stream waits, the host does not."""

    def synchronize(self) -> None:
        """The host waits."""
        self._accelerator.note(self._accelerator.waits, "an event")
