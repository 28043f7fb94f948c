"""The dtype and the device of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from specpool.checks import shown
from specpool.errors import ConfigError, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_DEVICES = ("cpu", "cuda")


def check_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return the torch dtype of an option; None or "auto" gives None, the stored dtype.

    Raises:
        ConfigError: not float32, bfloat16 or float16.
    """
    if dtype is None or dtype == "auto":
        return None
    parsed = _DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if parsed not in _DTYPES.values():
        raise ConfigError(f"dtype {shown(dtype)}: allowed are auto, {', '.join(_DTYPES)}")
    return parsed


def _parse_device(device: torch.device | str) -> torch.device:
    try:
        parsed = torch.device(device)
        if parsed.type not in _DEVICES:
            raise ConfigError(f"device {shown(str(device))}: allowed are {', '.join(_DEVICES)}")
        # Return "cuda:0" for "cuda", because weights have an index and devices compare by it.
        return torch.empty(0, device=parsed).device
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ConfigError(
            f"device {shown(str(device))} cannot be used: {one_line(error)}{_advice(device)}"
        ) from error


def _advice(device: torch.device | str) -> str:
    """Return what to do about a CUDA device that cannot be used, as the end of a sentence."""
    if not str(device).startswith("cuda"):
        return ""
    if torch.version.cuda is None:
        return "; install torch's CUDA build, or take device 'cpu'"
    if not torch.cuda.is_available():
        return "; see that nvidia-smi lists a GPU and that its driver knows CUDA " + (
            f"{torch.version.cuda}, or take device 'cpu'"
        )
    return f"; there are {torch.cuda.device_count()} CUDA devices, from cuda:0 on"


def placement_of(model: PreTrainedModel) -> tuple[torch.dtype, torch.device]:
    """Return the dtype and the device of a model; raise `ConfigError` if it cannot run there."""
    for name, module in model.named_modules():
        if type(module).__module__.startswith(("torch.ao.nn", "torch.nn.quantized")):
            raise ConfigError(
                f"the model's {name} is a {type(module).__name__} of torch's own quantization, "
                "whose weights are not tensors: give the model of before"
            )
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1 or "meta" in {device.type for device in devices}:
        names = ", ".join(sorted(map(str, devices)))
        raise ConfigError(f"the model's weights must be on one device, they are on: {names}")
    device = devices.pop()
    if device.type not in _DEVICES:
        raise ConfigError(f"the model is on {device}: allowed are {', '.join(_DEVICES)}")
    if model.dtype not in _DTYPES.values():
        raise ConfigError(
            f"the model's weights are {model.dtype}: allowed are {', '.join(_DTYPES)}; load it "
            "with dtype=, or convert it with .to()"
        )
    return model.dtype, device
