"""`LastRows`: the last layer of a model, for the tokens whose logits are wanted alone.

A prompt's logits are wanted for its last token. Behind the last attention no token reads another,
so the output projection and the gated layer that follow need that token's row alone. In a model of
7 layers they are a ninth of a prompt's work, in one of 32 layers a fortieth.

Which modules these are is found out by a short forward, not by their names: those that start after
the last attention, hold a matrix, and turn one tensor of all tokens into another. Rows that are not
wanted come out of them as zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from specpool.engine.models.probe import Probed, probe_batch, probe_tolerance

_WIDTHS, _WANTED = [2, 3], [1, 4]  # of the forward that tries the modules: its last tokens


class LastRows:
    """The modules behind a model's last attention, which can leave out rows."""

    def __init__(self, target: Probed, last_layer: nn.Module) -> None:
        """Find them with two forwards; there are none if the second has other logits."""
        self._modules: list[nn.Module] = []
        device = target.device
        tokens = torch.arange(3, 3 + sum(_WIDTHS), device=device) % target.vocab_size
        batch, positions = probe_batch(device, _WIDTHS, [0, 0], None)
        with self._watch(last_layer, lambda: len(batch.calls) == len(target.kv_layers)):
            every = target.forward(tokens, positions, batch).logits.float()
        batch, positions = probe_batch(device, _WIDTHS, [0, 0], None)
        with self.only(torch.tensor(_WANTED, device=device)):
            few = target.forward(tokens, positions, batch).logits.float()
        if not _agree(few[_WANTED], every[_WANTED], probe_tolerance(target.dtype)):
            self._modules.clear()

    @contextmanager
    def only(self, wanted: Tensor) -> Iterator[None]:
        """Compute these rows, int64 [n], alone in forwards of [1, T] tokens within the block."""
        num_tokens: list[int] = []

        def select(_: nn.Module, arguments: tuple[Tensor]) -> tuple[Tensor]:
            num_tokens.append(arguments[0].shape[1])
            return (arguments[0].index_select(1, wanted),)

        def spread(_: nn.Module, arguments: tuple[Tensor], output: Tensor) -> Tensor:
            rows = output.new_zeros(1, num_tokens.pop(), output.shape[2])
            return rows.index_copy_(1, wanted, output)

        with ExitStack() as hooks:
            for module in self._modules:
                hooks.callback(module.register_forward_pre_hook(select).remove)
                hooks.callback(module.register_forward_hook(spread).remove)
            yield

    @contextmanager
    def _watch(self, layer: nn.Module, has_attended: Callable[[], bool]) -> Iterator[None]:
        """Find the modules in a forward within the block: the outermost of those that fit."""
        running: list[nn.Module] = []

        def begin(module: nn.Module, _: Any) -> None:
            if has_attended():
                running.append(module)

        def end(module: nn.Module, arguments: Any, options: dict[str, Any], output: Any) -> None:
            if module not in running:  # it began before the attention
                return
            running.remove(module)
            if not running and not options and _maps_rows(module, arguments, output):
                self._modules.append(module)

        with ExitStack() as hooks:
            for module in layer.modules():
                hooks.callback(module.register_forward_pre_hook(begin).remove)
                hooks.callback(module.register_forward_hook(end, with_kwargs=True).remove)
            yield


def _agree(logits: Tensor, expected: Tensor, limit: float) -> bool:
    """Return whether logits differ by no more than this part of the expected ones."""
    return bool((logits - expected).norm() <= limit * expected.norm())


def _maps_rows(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> bool:
    """Return whether a call of a module with a matrix turned [1, T, a] into [1, T, b]."""
    if len(arguments) != 1:
        return False
    weights = list(module.parameters())
    return (
        all(isinstance(part, Tensor) and part.ndim == 3 for part in (arguments[0], output))
        and output.shape[:2] == arguments[0].shape[:2] == (1, sum(_WIDTHS))
        and any(weight.ndim > 1 for weight in weights)
        and not any(hasattr(weight, "full_tensor") for weight in weights)  # ranks have hooks there
    )
