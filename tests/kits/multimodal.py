"""Small random models of text and images or sound, on disk, for the tests of their text part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

import survey

#: Published sections of multimodal RoPE are of larger heads than those here.
SECTIONS: dict[str, Any] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
}
#: What a type's text part needs beside small sizes.
TEXTS: dict[str, dict[str, Any]] = {
    "qwen2_vl": SECTIONS,
    "qwen2_5_vl": SECTIONS,
    "qwen2_5_omni_thinker": SECTIONS,
    "qwen3_vl": SECTIONS,
    "qwen3_vl_moe": SECTIONS,
    "glm4v": SECTIONS,
    "glm4v_moe": SECTIONS,
    "glm_ocr": SECTIONS,
    "paddleocr_vl": SECTIONS,
}


def make_config(model_type: str) -> Any:
    """A small config of a type; its text decoder is that of the type's default config."""
    config_class: Any = survey.CONFIG_MAPPING[model_type]
    default = config_class()
    text = default.get_text_config(decoder=True)
    parts = {}
    for name in config_class.sub_configs:
        part = getattr(default, name, None)
        if part is not None:
            text_fields = TEXTS.get(model_type, {}) if part is text else {}
            small = survey._shrunk(type(part), text_fields).to_dict()
            parts[name] = {**small, "model_type": part.model_type}
    return survey._taken(config_class, parts)


def write(folder: Path, model_type: str) -> Any:
    """Write a random model of a type into a folder; return the model in memory, in float32."""
    config = make_config(model_type)
    names = {
        **transformers.models.auto.modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
        **transformers.models.auto.modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    }
    torch.manual_seed(0)
    model = getattr(transformers, names[model_type])(config).float().eval()
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            parameter.data.normal_(0, 0.08)
    model.save_pretrained(folder)
    return model
