"""`text_part`: the class of a multimodal model without the parts that text does not reach.

A checkpoint of images and text names its decoder's tensors as the whole model does, and
transformers has no class for the decoder alone in most cases. So the whole class is built, on the
meta device, and its towers and projectors are dropped before any weight is read.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from specpool.engine.models.decoder import _find_decoder
from specpool.engine.models.gate import text_config


def has_other_parts(model_class: Any, config: Any) -> bool:
    """Return whether a class builds more than the text decoder of a config."""
    text, kind = text_config(config), getattr(model_class, "config_class", None)
    return text is not config and kind is not None and not isinstance(text, kind)


def text_part(model_class: Any) -> Any:
    """Return a class that builds the same model without the parts that text does not reach.

    Its `from_pretrained` reads the weights of the text part alone. Its forward takes text.
    """

    def build(model: Any, *args: Any, **options: Any) -> None:
        model_class.__init__(model, *args, **options)
        # transformers would list the tensors of the dropped parts as unexpected. Version 5 asks the
        # model for those to ignore, version 4 the class.
        dropped = {rf"^{re.escape(name)}\." for name in _drop(model)}
        model._keys_to_ignore_on_load_unexpected = {
            *(model._keys_to_ignore_on_load_unexpected or ()),
            *dropped,
        }
        type(model)._keys_to_ignore_on_load_unexpected = [*model._keys_to_ignore_on_load_unexpected]

    # transformers finds conversions of weights, and this package attention, by name and module.
    members = {"__init__": build, "__module__": model_class.__module__}
    return type(model_class.__name__, (model_class,), members)


def _drop(model: Any) -> list[str]:
    """Drop the modules beside decoder, embedding and output matrix; return their names."""
    roots = (_find_decoder(model), model.get_input_embeddings(), model.get_output_embeddings())
    used = {id(module) for root in roots if root is not None for module in root.modules()}
    dropped: list[str] = []

    def drop_in(module: nn.Module, start: str) -> None:
        for name, child in [*module.named_children()]:
            if id(child) in used:
                continue
            if any(id(part) in used for part in child.modules()):
                drop_in(child, f"{start}{name}.")
            elif next(child.parameters(), None) is not None:
                setattr(module, name, None)
                dropped.append(start + name)

    if id(model) not in used:
        drop_in(model, "")
    return dropped
