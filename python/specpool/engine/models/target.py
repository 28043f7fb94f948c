"""`TargetModel`: an unmodified Hugging Face decoder that runs over pages.

transformers lets an attention function be registered by name. The one of this package reads and
writes pages. It finds the batch of the running forward in a context variable, because not every
decoder passes unknown keyword arguments to its attention. The lanes of a batch are flattened to one
sequence: only attention and recurrent mixers mix tokens, and both keep lanes apart (`Mixers`).
"""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from specpool.capacity.state_sizes import StateBytes
from specpool.engine.attention import AttentionBatch
from specpool.engine.attention.cudnn import without_cudnn
from specpool.engine.models.decoder import _find_decoder, _isolate_configs, _no_model, _Standing
from specpool.engine.models.device_lanes import DeviceLanes
from specpool.engine.models.fused_layers import FusedLayers
from specpool.engine.models.gate import (
    check_class,
    check_config,
    context_limit,
    has_recurrent_layers,
    media_tokens,
    refusal,
    text_config,
)
from specpool.engine.models.generation_defaults import GenerationDefaults
from specpool.engine.models.lane_states import LaneStates
from specpool.engine.models.last_rows import LastRows
from specpool.engine.models.mixers import Mixers
from specpool.engine.models.packed_layers import PackedLayers
from specpool.engine.models.paged_attention import _ATTENTION, _BATCH, _register, _torch_attention
from specpool.engine.models.placement import _parse_device, check_dtype, placement_of
from specpool.engine.models.probe import probe
from specpool.engine.models.recurrent import ATTENDING, cache_argument, check_transformers
from specpool.engine.models.state_probe import probe_states
from specpool.engine.models.target_folder import (
    TargetFolder,
    check_values,
    eos_ids,
    find_target,
    load_config,
    load_model,
)
from specpool.engine.models.target_output import TargetOutput
from specpool.engine.models.torch_attention import (
    CALLS_TORCH,
    TorchAttention,
    attention_modules,
    num_shared,
)
from specpool.errors import ConfigError, ShapeError, reading
from specpool.kernels.launch import runs_kernels

# NOTE: importing transformers takes seconds of CPU, so each function that needs it imports it.
if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TargetModel:
    """A Hugging Face decoder that reads and writes KV in pages.

    Use it as a context manager, or call `close`, to restore a model that was passed in.

    Attributes:
        model: the transformers model.
        config: the config that the model runs with (a copy).
        device: the device of the weights.
        dtype: the dtype of the weights.
        num_layers: decoder layers.
        hidden_size: width h of the hidden states that the language model head reads.
        vocab_size: V, width of the logits.
        max_context_len: longest context in tokens.
        context_reason: why it is not the config's number of positions; empty if it is.
        layer_kv: the KV that each layer of `kv_layers` keeps per token.
        kv_layers: the layers with attention, by the index that they attend with.
        decoder: the module that turns token ids into the hidden states before the output matrix.
        mixers: the recurrent mixers; None if there are none.
        eos_token_ids: tokens that end a text; may be empty.
        media_tokens: tokens that stand for an image, a video or sound, with the config's key.
        closed: whether `close` was called.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Take over ``model`` until `close`. See `from_pretrained` for the errors."""
        check_values(model.config)
        check_config(model.config)
        self._is_recurrent = has_recurrent_layers(model.config)
        # Of a multimodal model, the decoder's class says how it attends.
        is_text = text_config(model.config) is model.config
        kind = type(model if is_text else _find_decoder(model))
        check_class(kind, model.config.model_type, is_recurrent=self._is_recurrent)
        if model.config._attn_implementation == _ATTENTION:
            raise ConfigError(
                "the model in memory is in use by another engine, or a copy of one that is: close"
                " that engine first"
            )
        self.model = model
        self.dtype, self.device = self._place(model)
        self._captured: dict[int, Tensor] = {}
        self._capture_order: tuple[int, ...] = ()
        self._hooks: list[Any] = []
        self._training = [module for module in model.modules() if module.training]
        self._configs = _isolate_configs(model)
        self._fused_layers: FusedLayers | None = None
        self._packed_layers: PackedLayers | None = None
        self._last_rows: LastRows | None = None
        self._torch_modules: list[Any] = []
        self._torch_attention: Any = nullcontext()
        if text_config(model.config).model_type in CALLS_TORCH:
            self._torch_modules = attention_modules(model)
            self._torch_attention = TorchAttention(
                _torch_attention, num_shared(text_config(model.config))
            )
            for module in self._torch_modules:  # each names its attention function in its config
                module.config = copy.copy(module.config)
        self.closed = False
        self.mixers: Mixers | None = None
        try:
            model.train(False)
            if runs_kernels(self.device):
                self._fused_layers = FusedLayers(model)
            _register()
            self._set_attention(_ATTENTION)
            self._describe()
            self._probe()
        except BaseException:
            self.close()
            raise

    @classmethod
    def from_pretrained(
        cls,
        source: str | os.PathLike[str] | TargetFolder | PreTrainedModel,
        *,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        local_files_only: bool = False,
        revision: str | None = None,
        trust_remote_code: bool = False,
        world: int = 1,
    ) -> TargetModel:
        """Load a decoder, or take over a loaded one.

        Args:
            source: a folder (also a result of `find_target`), a hub name, or a loaded model. A
                loaded model keeps its weights, dtype and device, and `close` restores it.
            dtype: a torch dtype or "float32", "bfloat16", "float16"; "auto" or None: as stored.
            device: where to run; the CPU by default.
            local_files_only: never ask the network.
            revision: branch, tag or commit on the hub.
            trust_remote_code: run Python code of the checkpoint; if False, a model that needs it is
                refused.
            world: the ranks that share the model; each loads its part of it.

        Raises:
            ConfigError: there is nothing at ``source``, the dtype or device is unknown, or the
                model cannot run over pages; the message has the reason.
            CheckpointError: tensors are missing or have other shapes than the config says.
        """
        wanted_dtype = check_dtype(dtype)
        wanted_device = None if device is None else _parse_device(device)
        if not isinstance(source, str | os.PathLike | TargetFolder | nn.Module):
            raise _no_model(source)
        from transformers import PreTrainedModel

        if isinstance(source, PreTrainedModel):
            if world > 1:
                raise ConfigError(f"{world} ranks load their parts themselves: give a folder")
            target = cls(source)
            for name, wanted, actual in (
                ("dtype", wanted_dtype, target.dtype),
                ("device", wanted_device, target.device),
            ):
                if wanted is not None and wanted != actual:
                    target.close()
                    raise ConfigError(f"the model in memory has {name} {actual}, not {wanted}")
            return target
        if isinstance(source, nn.Module):
            raise _no_model(source)
        folder = source
        if not isinstance(folder, TargetFolder):
            folder = find_target(
                folder,
                revision=revision,
                local_files_only=local_files_only,
                trust_remote_code=trust_remote_code,
            )
        model = load_model(folder, load_config(folder), wanted_dtype, world)
        with reading(f"cannot run the model from {folder.name!r}", ConfigError):
            return cls(model.to(wanted_device or torch.device("cpu")))  # type: ignore[arg-type]

    @property
    def keeps_state(self) -> bool:
        """Whether rows have recurrent states beside KV. Such a state cannot be cut back."""
        return self.mixers is not None

    @property
    def state_bytes(self) -> StateBytes | None:
        """What a row keeps of the recurrent mixers; None if there are none."""
        return None if self.mixers is None else self.mixers.state_bytes

    @cached_property
    def generation_defaults(self) -> GenerationDefaults:
        """What the model's generation_config says of texts.

        Raises:
            ConfigError: a value is wrong; the message has its key.
        """
        return GenerationDefaults.from_config(
            getattr(self.model, "generation_config", None), self.vocab_size
        )

    @property
    def embedding_weight(self) -> Tensor:
        """The input embeddings [V, h], unscaled. Ranks that share the model ask for it together."""
        embeddings: Any = self.model.get_input_embeddings()
        return _full_tensor(embeddings.weight)

    @property
    def lm_head_weight(self) -> Tensor:
        """The weight of the language model head, [V, h]; see `embedding_weight` for ranks."""
        return _full_tensor(self._lm_head.weight)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [n, V] of hidden states [n, h] after the final norm.

        The factors and the soft cap of some families are applied, as the model does it.
        """
        logits: Tensor = self._lm_head(hidden).contiguous()  # ranks gather its columns
        if self._logit_factor is not None:
            logits = logits * self._logit_factor
        if self._logit_divisor is not None:
            logits = logits / self._logit_divisor
        if self._logit_softcap is not None:
            logits = torch.tanh(logits / self._logit_softcap) * self._logit_softcap
        return logits

    def pack(self, max_bytes: int) -> int:
        """Pack linear layers where that is quicker, for forwards over pages (`PackedLayers`).

        Args:
            max_bytes: the most bytes of packed weights, which are a second copy.

        Returns:
            The bytes taken; 0 except on a CPU in float32.
        """
        if self._packed_layers is None and self.device.type == "cpu":
            self._packed_layers = PackedLayers(self.model, max_bytes)
            self._packed_layers.switch(on=True)
        return 0 if self._packed_layers is None else self._packed_layers.num_bytes

    def capture(self, layers: Sequence[int]) -> None:
        """Record, from now on, the hidden states that *enter* these layers.

        Args:
            layers: layer indices 0..=num_layers; num_layers is the input of the final norm. The
                features of a forward are concatenated in this order. Empty: record none.

        Raises:
            ConfigError: an index is outside 0..=num_layers; the old choice stays.
        """
        if tuple(layers) == self._capture_order:
            return
        for layer in layers:
            if not 0 <= layer <= self.num_layers:
                raise ConfigError(
                    f"cannot capture layer {layer}: allowed are 0..={self.num_layers}"
                )
        self._remove_hooks()
        self._capture_order = tuple(layers)
        for layer in sorted(set(layers)):
            if layer < self.num_layers:
                hook = self._layers[layer].register_forward_pre_hook(
                    self._input_hook(layer), with_kwargs=True
                )
            else:
                hook = self._layers[-1].register_forward_hook(self._output_hook)
            self._hooks.append(hook)

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        logits_index: Tensor | None = None,
        *,
        states: Sequence[LaneStates | DeviceLanes] = (),
        wants_hidden: bool = True,
    ) -> TargetOutput:
        """Run one forward of a flattened, ragged batch.

        Args:
            tokens: int64 [T], lane after lane; or embeddings [T, h] in their place.
            positions: int64 [T], the position of each token (in a tree, of its node).
            batch: the pages that each layer reads and writes.
            logits_index: int64 [n], tokens whose logits are wanted (may be empty); None: all.
            states: what the lanes read of their recurrent states, of consecutive tokens each; none
                if there are no mixers.
            wants_hidden: whether the hidden states of tokens without logits are read; otherwise
                they may be left out, and then hold any numbers.

        Returns:
            Logits [n, V], hidden states [T, h], and the captured features or None.

        Raises:
            ShapeError: T of tokens, positions and the batch's views differ.
        """
        num_tokens = tokens.shape[0]
        for view in batch.views:
            if not num_tokens == positions.shape[0] == view.num_tokens:
                raise ShapeError(
                    f"{num_tokens} token_ids, {positions.shape[0]} positions,"
                    f" {view.num_tokens} write_slots"
                )
        flat = tokens.unsqueeze(0), positions.unsqueeze(0)
        if self.mixers is None:
            some_rows: Any = nullcontext()
            if not wants_hidden and logits_index is not None and self._last_rows is not None:
                some_rows = self._last_rows.only(logits_index)
            with some_rows:
                hidden = self._run(*flat, batch, use_cache=False)
        else:
            assert states
            with self.mixers.reading(states):
                hidden = self._run(*flat, batch, **self._on_cache(self.mixers.cache))
        wanted = hidden if logits_index is None else hidden.index_select(0, logits_index)
        features = None
        if self._capture_order:
            features = torch.cat([self._captured[i] for i in self._capture_order], -1)
            self._captured.clear()
        return TargetOutput(self.compute_logits(wanted), hidden, features)

    @torch.inference_mode()
    def forward_from(
        self, cache: Any, tokens: Tensor, positions: Tensor, batch: AttentionBatch
    ) -> None:
        """Run one forward of lanes as transformers runs the decoder, on a cache of transformers.

        Args:
            cache: of `paged_cache`; holds the states after these tokens on return.
            tokens: int64 [B, n].
            positions: int64 [B, n].
            batch: the pages that each attention layer reads and writes, lane after lane.
        """
        self._run(tokens, positions, batch, **self._on_cache(cache))

    def _on_cache(self, cache: Any) -> dict[str, Any]:
        """Return the decoder's arguments for a forward on a cache of transformers."""
        return {self._cache_argument: cache, "use_cache": True}

    @cached_property
    def _cache_argument(self) -> str:
        return cache_argument(self.decoder, self.config)

    def _run(
        self, tokens: Tensor, positions: Tensor, batch: AttentionBatch, **arguments: Any
    ) -> Tensor:
        """Run the decoder on [B, n] tokens; return hidden states [B * n, h]."""
        if self._takes_positions:
            arguments["position_ids"] = positions
        if self._counts_by_cache or self._torch_modules:
            arguments[self._cache_argument] = _Standing(positions)
        if self._torch_modules:  # given a mask, transformers does not build one
            arguments["attention_mask"] = positions.new_zeros((1, 1, 1, 1))
        batch_before, attending_before = _BATCH.set(batch), ATTENDING.set(None)
        try:
            with self._torch_attention, without_cudnn(self.device):
                name = "inputs_embeds" if tokens.is_floating_point() else "input_ids"
                output = self.decoder(**{name: tokens}, **arguments)
        finally:
            _BATCH.reset(batch_before)
            ATTENDING.reset(attending_before)
        hidden: Tensor = output[0]
        return hidden.flatten(0, 1).to(self.dtype)  # mamba adds up its layers in float32

    @torch.inference_mode()
    def plain_logits(self, token_ids: Sequence[int]) -> Tensor:
        """Return the logits [n, V] of one text by the model's own eager attention."""
        self._set_attention("eager")
        try:
            tokens = torch.tensor([list(token_ids)], device=self.device)
            output = self.model(input_ids=tokens, use_cache=False)
            logits: Tensor = output.logits[0]
            return logits
        finally:
            self._set_attention(_ATTENTION)

    @torch.inference_mode()
    def plain_hidden(self, token_ids: Sequence[int]) -> Tensor:
        """Return the hidden states [n, h] of one text by the model's own eager attention.

        `compute_logits` turns them into the logits of `plain_logits`. The call needs memory for
        n * n attention weights of each head of a layer.
        """
        self._set_attention("eager")
        try:
            tokens = torch.tensor([list(token_ids)], device=self.device)
            hidden: Tensor = self.decoder(input_ids=tokens, use_cache=False)[0]
            return hidden[0].to(self.dtype)
        finally:
            self._set_attention(_ATTENTION)
            self._captured.clear()

    def close(self) -> None:
        """Restore the model's attention, hooks and training flags. A second call does nothing."""
        if self.closed:
            return
        self.closed = True
        self._remove_hooks()
        if self.mixers is not None:
            self.mixers.close()
        if self._fused_layers is not None:
            self._fused_layers.switch(on=False)
        if self._packed_layers is not None:
            self._packed_layers.switch(on=False)
        for module, config in self._configs:
            module.config = config
        for module in self._training:
            module.training = True

    def __enter__(self) -> TargetModel:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _set_attention(self, attention: str) -> None:
        """Run over pages, fused on a GPU, or as transformers runs the model with this attention."""
        if self._fused_layers is not None:
            self._fused_layers.switch(on=attention == _ATTENTION)
        if self._packed_layers is not None:
            self._packed_layers.switch(on=attention == _ATTENTION)
        for module, _ in self._configs:
            module.config._attn_implementation = attention
        for module in self._torch_modules if attention == _ATTENTION else ():
            module.config._attn_implementation = "sdpa"

    def _describe(self) -> None:
        """Find the parts of the model and its sizes."""
        self.config = self.model.config
        text = text_config(self.config)
        # LongCat's layers attend twice.
        self.num_layers: int = getattr(text, "num_layers", None) or text.num_hidden_layers
        self.max_context_len, self.context_reason = context_limit(self.config)
        model: Any = self.model
        self._lm_head = model.get_output_embeddings()
        if self._lm_head is None:
            raise refusal(self.config.model_type, "it has no language model head")
        self.vocab_size, self.hidden_size = self._lm_head.weight.shape
        self.decoder = _find_decoder(self.model)
        names = inspect.signature(self.decoder.forward).parameters
        # Llama 4 scales queries by the length of its cache plus their place in the forward.
        self._counts_by_cache = bool(getattr(text, "attn_temperature_tuning", False))
        self._takes_positions = not self._is_recurrent or "position_ids" in names
        self._layers = self._find_layers()
        self._logit_softcap: float | None = getattr(text, "final_logit_softcapping", None)
        # Cohere; Falcon-H1
        factor = getattr(text, "logit_scale", None) or getattr(text, "lm_head_multiplier", None)
        self._logit_factor: float | None = factor
        self._logit_divisor: float | None = getattr(text, "logits_scaling", None)  # Granite
        eos = getattr(getattr(self.model, "generation_config", None), "eos_token_id", None)
        eos = getattr(text, "eos_token_id", None) if eos is None else eos
        self.eos_token_ids = eos_ids(eos)
        self.media_tokens = media_tokens(self.config)

    def _find_layers(self) -> nn.ModuleList:
        for child in self.decoder.children():
            if isinstance(child, nn.ModuleList) and len(child) == self.num_layers:
                return child
        raise refusal(
            self.config.model_type,
            f"its decoder {type(self.decoder).__name__} has no list of {self.num_layers} layers",
        )

    def _place(self, model: PreTrainedModel) -> tuple[torch.dtype, torch.device]:
        return placement_of(model)

    def _probe(self) -> None:
        """Find out what each layer keeps, with a few short forwards."""
        self.kv_layers = tuple(range(text_config(self.config).num_hidden_layers))
        if not self._is_recurrent:
            self.layer_kv = probe(self)
            self._last_rows = LastRows(self, self._layers[-1])
            return
        check_transformers(self.config)
        self.kv_layers, self.layer_kv = probe_states(self)

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._captured.clear()

    def _input_hook(self, layer: int) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._captured[layer] = (args[0] if args else kwargs["hidden_states"]).squeeze(0)

        return hook

    def _output_hook(self, _: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        hidden = output if isinstance(output, Tensor) else output[0]  # a tuple before 4.54
        self._captured[self.num_layers] = hidden.squeeze(0)


def _full_tensor(weight: Any) -> Tensor:
    """Return a weight of which each rank may hold a part."""
    whole: Tensor = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    return whole
