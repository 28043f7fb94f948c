"""`with_twin`: makes a launcher call its CPU twin for tensors on a CPU."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

import specpool._core as _core
from specpool.errors import ShapeError
from specpool.kernels import twin_moves as moves
from specpool.kernels.fields import Fields
from specpool.kernels.launch import runs_kernels

P = ParamSpec("P")
R = TypeVar("R")

_CPU = torch.device("cpu")
_PLACED = (Tensor, Fields)  # a union of types takes longer to check, in every call


def with_twin(twin: Callable[..., Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a launcher so that `twin` runs for CPU tensors, unless kernels run on them.

    The twin gets the same arguments: tensors as NumPy arrays over the same memory, and `Fields` as
    their buffers. It checks them as strictly as the launcher, and also checks values. Slots are
    returned as int64, for torch's indexing, unless `out` is given. `hi` is dropped, because the
    twin can read the lengths.
    """

    def decorate(launcher: Callable[P, R]) -> Callable[P, R]:
        # The first tensor gives the device; only `select_topk` begins with a number.
        device_arg = int(launcher.__name__ == "select_topk")
        parameters = inspect.signature(launcher).parameters.values()
        names = [
            parameter.name
            for parameter in parameters
            if parameter.kind == parameter.POSITIONAL_OR_KEYWORD
        ]

        @functools.wraps(launcher)
        def run(*args: P.args, **options: P.kwargs) -> R:
            if len(args) != len(names):
                by_name = names[len(args) :]
                if len(args) > len(names) or not options.keys() >= set(by_name):
                    return launcher(*args, **options)  # raises a TypeError that names the argument
                args += tuple(options.pop(name) for name in by_name)  # type: ignore[assignment]
            first: object = args[device_arg]
            if runs_kernels(first.device if isinstance(first, _PLACED) else _CPU):
                return launcher(*args, **options)
            out = options.pop("out", None)
            options.pop("hi", None)
            twin_options: dict[str, Any] = {}
            for name, value in options.items():
                twin_options[name] = value if isinstance(value, int | str) else as_array(value)
            if isinstance(first, Fields):
                twin_options["slot_dim"] = first.slot_dim
                if names[2] == "page_size" and args[2] != first.page_size:
                    raise ShapeError(
                        f"page_size must be the fields' {first.page_size}, got {args[2]}"
                    )
            results = twin(*[as_array(arg) for arg in args], **twin_options)
            if out is None and isinstance(results, np.ndarray):
                return torch.from_numpy(results)  # type: ignore[return-value]
            return _as_tensors(out, results)  # type: ignore[no-any-return]

        def as_array(value: Any) -> Any:
            if isinstance(value, Tensor):
                try:
                    return value.numpy()
                except TypeError:
                    return _converted(value)
            if isinstance(value, np.ndarray):
                raise ShapeError(
                    f"{launcher.__name__} takes a tensor where it got an ndarray; arrays are for "
                    "the twins in specpool.kernels.twins"
                )
            return value.source if isinstance(value, Fields) else value

        return run

    return decorate


def _converted(tensor: Tensor) -> Any:
    """Copy a tensor that NumPy cannot share: bfloat16 logits become float32.

    Raises:
        ShapeError: the tensor is not on a CPU.
    """
    if tensor.device.type != "cpu":
        where = f"one is on {tensor.device}"
        raise ShapeError(f"tensors must be on one device, CUDA or cpu: {where}") from None
    return tensor.float().numpy()


def _as_tensors(out: Any, results: Any) -> Any:
    """Return `results` as tensors, copied into `out` if that is given."""
    if isinstance(results, tuple):
        if out is not None and len(out) != len(results):
            raise ShapeError(f"out must hold {len(results)} tensors, got {len(out)}")
        buffers = [None] * len(results) if out is None else out
        for buffer, result in zip(buffers, results, strict=True):
            if buffer is not None:
                _check_out(buffer, torch.from_numpy(result))
        return tuple(
            _as_tensors(buffer, result) for buffer, result in zip(buffers, results, strict=True)
        )
    if not isinstance(results, np.ndarray):
        return results
    result = torch.from_numpy(results)
    if out is None:
        return result
    _check_out(out, result)
    if out.shape == result.shape:
        return out.copy_(result)
    out[: len(result)].copy_(result)
    return out


def _check_out(out: Tensor, result: Tensor) -> None:
    if out.shape != result.shape and not (out.ndim == result.ndim == 1 and len(out) > len(result)):
        raise ShapeError(f"out must hold {list(result.shape)}, got {list(out.shape)}")
    # A twin's slots are int64, a kernel's int32.
    if out.dtype != result.dtype and {out.dtype, result.dtype} != {torch.int32, torch.int64}:
        wanted, actual = (str(kind).removeprefix("torch.") for kind in (result.dtype, out.dtype))
        raise ShapeError(f"out must be {wanted}, got {actual}")


def _expect(name: str, value: Any, *dtypes: type[np.generic]) -> None:
    if not isinstance(value, np.ndarray) or value.dtype not in dtypes:
        kinds = " or ".join(dtype.__name__ for dtype in dtypes)
        actual = value.dtype if isinstance(value, np.ndarray) else type(value).__name__
        raise ShapeError(f"{name} must be a tensor of {kinds}, got {actual}")


def build_tree(
    scores: Any, tokens: Any, parents: Any, root_tokens: Any, *, topk: int, num_draft_tokens: int
) -> tuple[Any, ...]:
    """Run the twins `organize` and `build_tree`, as the kernel does both."""
    chosen = _core.organize(scores, tokens, parents, topk=topk, num_draft_tokens=num_draft_tokens)
    parent_list, indices, drafts = chosen
    links = _core.build_tree(parent_list, indices, topk=topk)
    return np.concatenate([root_tokens[:, None], drafts], 1), *links


def check_tree(
    tokens: Any, depths: Any, mask: Any, child: Any, sibling: Any, roots: Any, *, vocab_size: int
) -> tuple[Any, Any, Any]:
    """Do the work of the kernel with the core's check."""
    broken = _core.find_broken_trees(
        tokens, depths, mask, child, sibling, roots, vocab_size=vocab_size
    )
    is_broken = np.zeros(len(tokens), np.bool_)
    is_broken[[lane for lane, _ in broken]] = True
    lanes = is_broken[:, None]
    safe = np.where(lanes, roots[:, None], tokens), np.where(lanes, np.int32(0), depths)
    return *safe, is_broken


def sample_tokens(logits: Any, *parameters: Any, min_p: Any = None) -> Any:
    """Call the twin for logits of any float type of the kernel (bfloat16 comes as float32)."""
    _expect("logits", logits, np.float32, np.float16)
    return _core.sample_tokens(logits.astype(np.float32, copy=False), *parameters, min_p=min_p)


def uniform(seeds: Any, positions: Any) -> Any:
    """Call the twin for seeds of either dtype, with their 64 bits as uint64."""
    _expect("seeds", seeds, np.int64, np.uint64)
    return _core.uniform(seeds.view(np.uint64), positions)


def move_kv(buffers: Any, src: Any, dst: Any, *, slot_dim: int, disjoint: bool = False) -> None:
    """Call the twin with int64 slots; it does not need the promise of `disjoint`."""
    _expect("src", src, np.int32, np.int64)
    _expect("dst", dst, np.int32, np.int64)
    moves.move_kv(buffers, src.astype(np.int64), dst.astype(np.int64), slot_dim=slot_dim)


def copy_parent_drafts(*args: Any, layout: str = "holey", **options: Any) -> None:
    """Call the twin, which serves the holey layout alone."""
    if layout != "holey":
        raise ShapeError(f"layout must be 'holey' on a CPU, got {layout!r}")
    moves.copy_parent_drafts(*args, **options)


def copy_slots(
    target: Fields, source: Fields, dst: Tensor | None, src: Tensor | None, n: int
) -> None:
    """Copy slots as the kernel behind `gather_kv` and `scatter_kv` does, on buffers of any form.

    Args:
        target: buffers to write.
        source: buffers to read, of the same widths.
        dst: int32 [n], each once; None means 0, 1, ...
        src: int32 [n]; None means 0, 1, ...
        n: the number of slots.
    """
    places = []
    for name, fields, slots in (("dst", target, dst), ("src", source, src)):
        index = torch.arange(n) if slots is None else slots.long()
        _core.check_slots(name, index.numpy(), fields.num_slots)
        places.append(index)
    if dst is not None:
        _core.check_moves(places[0].numpy(), places[0].numpy(), target.num_slots)
    for written, read in zip(target.views(), source.views(), strict=True):
        (written_slots, read_slots), size, other = places, written.shape[1], read.shape[1]
        written[written_slots // size, written_slots % size] = read[
            read_slots // other, read_slots % other
        ]


def rotate_heads(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, rotary_dim: int, is_rounded: bool
) -> tuple[Tensor, Tensor]:
    """Rotate heads as the kernel does, by the operators of transformers' `rotate_half`."""
    half = rotary_dim // 2
    angles = [part if part.shape[1] == rotary_dim else part.repeat(1, 2) for part in (cos, sin)]
    cos, sin = (part.unsqueeze(1) for part in angles)

    def rotated(heads: Tensor) -> Tensor:
        x = heads if is_rounded else heads.float()
        low, high, rest = x[..., :half], x[..., half:rotary_dim], x[..., rotary_dim:]
        pairs = x[..., :rotary_dim] * cos + torch.cat((-high, low), 2) * sin
        return torch.cat((pairs.to(heads.dtype), rest.to(heads.dtype)), 2)

    return rotated(q), rotated(k)


def write_kv(k_buffer: Tensor, v_buffer: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Write tokens into slots by torch's own operators."""
    k_buffer.index_copy_(0, slots, k)
    v_buffer.index_copy_(0, slots, v)
