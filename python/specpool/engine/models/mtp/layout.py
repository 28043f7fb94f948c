"""`find_layout`: where a checkpoint keeps its MTP layer, by the names of its tensors.

deepseek  layers.L.{enorm, hnorm, eh_proj, shared_head.norm}, the decoder layer beside them
          (DeepSeek-V3, GLM-4.5 and others; L is the number of the target's layers)
qwen      mtp.{pre_fc_norm_embedding, pre_fc_norm_hidden, fc, norm}, mtp.layers.0.*; an embedding
          of its own is mtp.embed_tokens (Qwen3-Next, Qwen3.5, K-EXAONE, Mellum)
mimo      mtp_layers.0.{token_layernorm, hidden_layernorm, input_proj, final_layernorm}, the
          decoder layer beside them; its projection reads the hidden state first
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from specpool.engine.models.files.checkpoint import is_of_mtp, normal_name, weight_files
from specpool.engine.models.files.headers import read_header
from specpool.errors import ConfigError


@dataclass(frozen=True, slots=True)
class MtpLayout:
    """The names of an MTP layer's tensors, as `Weights` gives them (no `model.` in front).

    Attributes:
        name: `deepseek`, `qwen` or `mimo`.
        start: the start of the names of all its tensors.
        block: the start of the names of the decoder layer's tensors.
        projection: the matrix [h, 2 h] that joins embedding and hidden state.
        token_norm: the norm [h] of the embedding.
        hidden_norm: the norm [h] of the hidden state.
        final_norm: the norm [h] of the decoder layer's output.
        hidden_first: whether the projection reads the hidden state first, then the embedding.
    """

    name: str
    start: str
    block: str
    projection: str
    token_norm: str
    hidden_norm: str
    final_norm: str
    hidden_first: bool = False

    @property
    def embedding(self) -> str:
        """The embedding [V, h] that a file may hold, mostly a copy of the target's."""
        return self.start + "embed_tokens.weight"

    @property
    def head(self) -> str:
        """The output matrix [V, h] that a file may hold, mostly a copy of the target's."""
        return self.start + "shared_head.head.weight"

    def block_names(self, names: Collection[str]) -> list[str]:
        """Return the names of the decoder layer's tensors among `names`."""
        return [
            name
            for name in names
            if name.startswith(self.block) and name not in self._tensors_beside_block()
        ]

    def unread(self, names: Collection[str], num_layers: int) -> list[str]:
        """Return the tensors of MTP layers among `names` that do not belong to this layer."""
        known = self._tensors_beside_block().union(self.block_names(names))
        return [name for name in names if is_of_mtp(name, num_layers) and name not in known]

    def _tensors_beside_block(self) -> set[str]:
        parts = {self.projection, self.token_norm, self.hidden_norm, self.final_norm}
        return parts | {self.embedding, self.head}


def find_layout(names: Collection[str], num_layers: int) -> MtpLayout:
    """Return the layout of the first MTP layer.

    Args:
        names: the checkpoint's tensors, as `Weights` gives them.
        num_layers: decoder layers of the target.

    Raises:
        ConfigError: there is no MTP layer, its layout is not known, or a tensor of it is missing.
    """
    for layout in _layouts(num_layers):
        if layout.projection in names:
            parts = (layout.token_norm, layout.hidden_norm, layout.final_norm)
            missing = [name for name in parts if name not in names]
            if not layout.block_names(names):
                missing.append(layout.block + "*")
            if missing:
                raise ConfigError(
                    f"the MTP layer has {layout.projection} but lacks {', '.join(missing)}"
                )
            return layout
    beyond = [name for name in sorted(names) if is_of_mtp(name, num_layers)]
    if not beyond:
        raise ConfigError(
            f"the target has no MTP layer: its checkpoint has no tensors beside its {num_layers} "
            "layers"
        )
    known = ", ".join(layout.projection for layout in _layouts(num_layers))
    raise ConfigError(
        f"the layout of the target's MTP layer is not known: it has {beyond[0]} and "
        f"{len(beyond) - 1} more, but none of {known}"
    )


def files_beside(folder: Path, num_layers: int) -> list[Path]:
    """Return the files that hold MTP layers and that the index of the weights does not name.

    Quantizing tools often keep the MTP layer of the original so: `mtp.safetensors` and
    `model_mtp.safetensors` are common names. The tensors decide, not the name.

    Args:
        folder: the target's folder.
        num_layers: decoder layers of the target.

    Raises:
        CheckpointError: the folder has no weights, or one of its safetensors files is not sound.
    """
    named = set(weight_files(folder))
    return [
        path
        for path in sorted(folder.glob("*.safetensors"))
        if path not in named and os.path.isfile(path) and _holds_mtp(path, num_layers)
    ]


def _holds_mtp(path: Path, num_layers: int) -> bool:
    names = [normal_name(name) for name in read_header(path)]
    return bool(names) and all(is_of_mtp(name, num_layers) for name in names)


def _layouts(num_layers: int) -> tuple[MtpLayout, ...]:
    def layout(name: str, prefix: str, parts: tuple[str, str, str, str], block: str) -> MtpLayout:
        projection, token, hidden, final = (prefix + part + ".weight" for part in parts)
        return MtpLayout(name, prefix, block, projection, token, hidden, final, name == "mimo")

    deepseek, qwen, mimo = f"layers.{num_layers}.", "mtp.", "mtp_layers.0."
    return (
        layout("deepseek", deepseek, ("eh_proj", "enorm", "hnorm", "shared_head.norm"), deepseek),
        layout(
            "qwen",
            qwen,
            ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"),
            qwen + "layers.0.",
        ),
        layout(
            "mimo",
            mimo,
            ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm"),
            mimo,
        ),
    )
