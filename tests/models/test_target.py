"""Laws of the target model: over pages it computes what the plain Hugging Face model does."""

from __future__ import annotations

import copy
import functools
import json
import random
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import kernel_reference as ref  # noqa: E402
from families import FAMILIES, VOCAB, PagedLanes, make_config, make_model  # noqa: E402
from specpool import Engine  # noqa: E402
from specpool.engine.models import TargetModel  # noqa: E402
from specpool.errors import ConfigError, ShapeError  # noqa: E402

TOLERANCE = 2e-5


@functools.cache
def pair(family: str) -> tuple[Any, TargetModel]:
    """A plain model and a target with the same weights."""
    config = make_config(family)
    if config is None:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    plain = make_model(config)
    return plain, TargetModel.from_pretrained(copy.deepcopy(plain))


@torch.inference_mode()
def plain_forward(plain: Any, tokens: list[int]) -> Any:
    return plain(input_ids=torch.tensor([tokens]), use_cache=False, output_hidden_states=True)


def some_tokens(count: int, choose: random.Random) -> list[int]:
    return [choose.randrange(3, VOCAB) for _ in range(count)]


def assert_close(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)


def final_norm(decoder: Any) -> Any:
    return next(
        getattr(decoder, name)
        for name in ("norm", "ln_f", "final_layer_norm")
        if hasattr(decoder, name)
    )


@pytest.mark.sample(4)
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_over_pages_equals_plain(family: str, page_size: int) -> None:
    """Ragged prefill, chunked extend, decode, tree verify, and decode after compaction."""
    plain, target = pair(family)
    target.capture((1, 0, target.num_layers))
    choose = random.Random(page_size)
    lanes = PagedLanes(target.layer_kv, page_size, num_lanes=3)
    texts: list[list[int]] = [[], [], []]

    def extend(counts: tuple[int, ...]) -> None:
        starts = [len(text) for text in texts]
        new = [some_tokens(count, choose) for count in counts]
        batch, positions = lanes.batch(starts, counts)
        out = target.forward(
            torch.tensor([token for tokens in new for token in tokens]), positions, batch
        )
        first = 0
        for text, tokens in zip(texts, new, strict=True):
            text += tokens
            theirs = plain_forward(plain, text)
            mine = slice(first, first + len(tokens))
            first += len(tokens)
            assert_close(out.logits[mine], theirs.logits[0, -len(tokens) :])
            assert_close(out.hidden[mine], theirs.hidden_states[-1][0, -len(tokens) :])
            entering_1, entering_0, final = out.features[mine].chunk(3, -1)
            assert_close(entering_1, theirs.hidden_states[1][0, -len(tokens) :])
            assert_close(entering_0, theirs.hidden_states[0][0, -len(tokens) :])
            with torch.inference_mode():
                assert_close(final_norm(target.decoder)(final), out.hidden[mine])

    extend((17, 5, 30))
    extend((3, 1, 6))
    extend((1, 1, 1))

    num_nodes = 8
    starts = [len(text) for text in texts]
    rng = np.random.default_rng(page_size)
    trees = [ref.tree(ref.random_parents(rng, num_nodes)) for _ in range(3)]
    nodes = [some_tokens(num_nodes, choose) for _ in range(3)]
    masks = [torch.tensor(tree["mask"]) for tree in trees]
    paths = [[torch.where(seen)[0].tolist() for seen in mask] for mask in masks]
    node_positions = [
        [start + depth for depth in tree["depths"]]
        for start, tree in zip(starts, trees, strict=True)
    ]
    batch, positions = lanes.batch(starts, (num_nodes,) * 3, masks, node_positions)
    out = target.forward(torch.tensor(nodes).flatten(), positions, batch)
    for lane, text in enumerate(texts):
        for node, path in enumerate(paths[lane]):
            theirs = plain_forward(plain, text + [nodes[lane][i] for i in path])
            assert_close(out.logits[lane * num_nodes + node], theirs.logits[0, -1])

    for lane, text in enumerate(texts):
        accepted = max(paths[lane], key=len)
        lanes.compact(lane, starts[lane], accepted)
        text += [nodes[lane][node] for node in accepted]
    extend((1, 1, 1))


@pytest.mark.sample(16)
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_without_a_mask_equals_plain(family: str, shuffle: bool) -> None:
    """One lane (its pages in a run, read in place) with decode_len, beyond every window."""
    plain, target = pair(family)
    target.capture(())
    choose = random.Random(7)
    lanes = PagedLanes(target.layer_kv, 4, num_lanes=1, shuffle=shuffle)
    text = some_tokens(6, choose)
    batch, positions = lanes.batch([0], [6])
    target.forward(torch.tensor(text), positions, batch)
    for _ in range(7):
        text += some_tokens(1, choose)
        batch, positions = lanes.batch([len(text) - 1], [1], decode_len=len(text))
        out = target.forward(torch.tensor(text[-1:]), positions, batch)
        assert_close(out.logits[0], plain_forward(plain, text).logits[0, -1])


def test_what_each_layer_keeps_is_what_its_attention_was_given() -> None:
    _, target = pair("gemma3")
    first, second = target.layer_kv
    assert (first.num_kv_heads, first.k_head_dim, first.v_head_dim, first.window) == (2, 16, 16, 8)
    assert second.window is None
    assert (target.vocab_size, target.hidden_size, target.max_context_len) == (VOCAB, 64, 512)
    assert target.dtype == torch.float32 and target.device.type == "cpu"
    assert target.embedding_weight.shape == target.lm_head_weight.shape == (VOCAB, 64)


def test_logits_are_given_for_the_tokens_asked_for() -> None:
    _, target = pair("gemma2")
    lanes = PagedLanes(target.layer_kv, 3, num_lanes=1)
    tokens = torch.arange(10, 15)
    batch, positions = lanes.batch([0], [5])
    every = target.forward(tokens, positions, batch)
    some = target.forward(tokens, positions, batch, torch.tensor([4, 1]))
    none = target.forward(tokens, positions, batch, torch.tensor([], dtype=torch.long))
    assert_close(some.logits, every.logits[[4, 1]])
    assert none.logits.shape == (0, VOCAB) and none.hidden.shape == (5, 64)
    with torch.inference_mode():
        assert_close(target.compute_logits(every.hidden), every.logits)


def test_capture_takes_only_layers_that_exist() -> None:
    _, target = pair("llama")
    target.capture((1,))
    with pytest.raises(ConfigError, match=r"layer 3: allowed are 0\.\.=2"):
        target.capture((0, 3))
    with pytest.raises(ConfigError, match="layer -1"):
        target.capture((-1,))
    lanes = PagedLanes(target.layer_kv, 3, num_lanes=1)
    batch, positions = lanes.batch([0], [2])
    out = target.forward(torch.tensor([4, 5]), positions, batch)
    assert out.features is not None and out.features.shape == (2, 64)


def test_a_forward_with_unequal_sizes_is_refused() -> None:
    _, target = pair("llama")
    lanes = PagedLanes(target.layer_kv, 3, num_lanes=1)
    batch, positions = lanes.batch([0], [2])
    with pytest.raises(ShapeError, match="3 token_ids, 2 positions, 2 write_slots"):
        target.forward(torch.tensor([4, 5, 6]), positions, batch)


# --- A model that was passed in ---------------------------------------------------------------


def test_close_gives_the_model_back_as_it_was() -> None:
    model = make_model(make_config("llama"))
    config = model.config
    sharing = type(model)(config)
    assert sharing.config is config
    before = plain_forward(model, [5, 6, 7]).logits
    layers = model.model.layers
    hooks = [(len(layer._forward_pre_hooks), len(layer._forward_hooks)) for layer in layers]
    model.train()
    layers[0].eval()
    target = TargetModel.from_pretrained(model)
    target.capture((0, 2))
    assert not model.training
    # A model that shares the config runs on as before; this one is in use.
    assert plain_forward(sharing, [5, 6, 7]).logits.shape == before.shape
    with pytest.raises(ConfigError, match=r"close its Engine \(or TargetModel\) first"):
        plain_forward(model, [5, 6, 7])
    target.close()
    target.close()
    assert model.training and not layers[0].training and layers[1].mlp.training
    assert model.config is config and layers[0].self_attn.config is config
    assert config._attn_implementation == "eager"
    left = [(len(layer._forward_pre_hooks), len(layer._forward_hooks)) for layer in layers]
    assert left == hooks
    model.eval()
    assert torch.equal(plain_forward(model, [5, 6, 7]).logits, before)


def test_a_refused_model_is_given_back_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(make_config("llama"))
    monkeypatch.setattr(type(model.model.layers[0].mlp), "forward", lambda self, x: x.cumsum(1))
    with pytest.raises(ConfigError, match="mix tokens outside attention"):
        TargetModel.from_pretrained(model)
    assert model.config._attn_implementation == "eager"


def test_dtype_and_device_of_a_model_in_memory_are_not_changed() -> None:
    model = make_model(make_config("llama"))
    with pytest.raises(ConfigError, match=r"dtype torch\.float32, not torch\.bfloat16"):
        TargetModel.from_pretrained(model, dtype="bfloat16")
    with TargetModel.from_pretrained(model, dtype=torch.float32, device="cpu") as target:
        assert target.model is model


# --- Loading ----------------------------------------------------------------------------------


def test_a_folder_is_loaded_in_the_dtype_asked_for(tmp_path: Any) -> None:
    config = make_config("llama")
    config.eos_token_id = [2, 7]
    model = make_model(config)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    with TargetModel.from_pretrained(str(tmp_path)) as target:
        assert target.dtype == torch.bfloat16
        assert target.eos_token_ids == {2, 7}
    with TargetModel.from_pretrained(tmp_path, dtype="float32", local_files_only=True) as target:
        assert target.dtype == torch.float32
        assert torch.equal(target.lm_head_weight, model.lm_head.weight.float())


@pytest.mark.sample(16)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_rounding_to_16_bits_does_not_refuse_a_model(family: str, dtype: Any) -> None:
    """With seed 2 a router of gpt-oss has a near-tie that bfloat16 decides differently."""
    config = make_config(family)
    if config is None:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    with TargetModel.from_pretrained(make_model(config, seed=2).to(dtype)) as target:
        assert target.dtype == dtype


@pytest.mark.parametrize("dtype", ["float8", "int8", torch.int8])
def test_an_unknown_dtype_is_refused(dtype: Any) -> None:
    with pytest.raises(ConfigError, match="allowed are auto, float32, bfloat16, float16"):
        TargetModel.from_pretrained("./nowhere", dtype=dtype)


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="device 'abacus' cannot be used"):
        TargetModel.from_pretrained("./nowhere", device="abacus")


@pytest.mark.parametrize(
    ("cuda", "is_available", "advice"),
    [
        (None, False, "; install torch's CUDA build, or take device 'cpu'"),
        (
            "13.0",
            False,
            "; see that nvidia-smi lists a GPU and that its driver knows CUDA 13.0, or",
        ),
        ("13.0", True, "; there are 2 CUDA devices, from cuda:0 on"),
    ],
)
def test_a_cuda_device_that_cannot_be_used_says_what_to_do(
    monkeypatch, cuda: str | None, is_available: bool, advice: str
) -> None:
    def refuse(*size: Any, **options: Any) -> Any:
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_available)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(ConfigError) as caught:
        TargetModel.from_pretrained("./nowhere", device="cuda:7")
    assert str(caught.value).startswith("device 'cuda:7' cannot be used: ")
    assert advice in str(caught.value)


def test_a_wrong_path_is_named(tmp_path: Any) -> None:
    missing = tmp_path / "missing"
    for source in (missing, str(missing), "./missing"):
        with pytest.raises(ConfigError, match=r"missing.*: there is no such folder"):
            TargetModel.from_pretrained(source)
    with pytest.raises(ConfigError, match=r"the folder has no config\.json"):
        TargetModel.from_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="no model at 'no-such/model': there is no such folder"):
        TargetModel.from_pretrained("no-such/model", local_files_only=True)


def test_a_folder_without_weights_is_refused(tmp_path: Any) -> None:
    make_config("llama").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"no model\.safetensors"):
        TargetModel.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        TargetModel.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_type"}))
    with pytest.raises(ConfigError, match="no_such_type"):
        TargetModel.from_pretrained(tmp_path)


def test_rotary_factors_that_follow_the_batch_end_the_context(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """longrope changes every lane once one of them passes the original length."""
    settings = copy.deepcopy(FAMILIES["phi3"][1])
    factors = [1.0] * (settings["hidden_size"] // settings["num_attention_heads"] // 2)
    rope = {"type": "longrope", "short_factor": factors, "long_factor": factors}
    config = transformers.Phi3Config(
        **settings, original_max_position_embeddings=64, rope_scaling=rope
    )
    model = make_model(config)
    with TargetModel.from_pretrained(model) as target:
        assert target.max_context_len == 64
    said = r"of original_max_position_embeddings its longrope rotary embedding changes"
    with pytest.raises(ConfigError, match=f"100 is above the model's 64 positions: .*{said}"):
        Engine.from_pretrained(model, max_context_len=100)
    with Engine.from_pretrained(model, num_pages=20) as engine:
        assert engine.max_context_len == 64
    assert (
        sum(
            "max_context_len is 64: its config says" in record.getMessage()
            for record in caplog.records
        )
        == 1
    )


# --- Models that cannot run over pages --------------------------------------------------------

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "deepseek_v32": ("DeepseekV32Config", {}, "an indexer picks the .* keys"),
    "bert": ("BertConfig", {}, r"it is an encoder \(is_decoder is false\)"),
    "t5": ("T5Config", {}, "encoder-decoder"),
    "bart": ("BartConfig", {}, "encoder-decoder"),
    "gpt2": ("GPT2Config", {"add_cross_attention": True}, "cross attention"),
    "mllama": ("MllamaConfig", {}, "cross attention"),
    "recurrent_gemma": ("RecurrentGemmaConfig", {}, "recurrent.*these types run: bailing_hybrid"),
    "minimax": ("MiniMaxConfig", {}, "recurrent"),
    "rwkv": ("RwkvConfig", {}, "recurrent"),
    "bloom": ("BloomConfig", {}, "alibi adds a bias .* by itself"),
    "mpt": ("MptConfig", {}, "alibi adds a bias .* by itself"),
    "falcon": ("FalconConfig", {"alibi": True}, "alibi adds a bias .* by itself"),
    "gemma3n_text": ("Gemma3nTextConfig", {}, "share the KV"),
    "openai-gpt": ("OpenAIGPTConfig", {}, "OpenAIGPTLMHeadModel computes attention by itself"),
    "clip_text_model": ("CLIPTextConfig", {}, "no causal language model"),
}


@pytest.mark.parametrize("model_type", REFUSED)
def test_what_cannot_run_is_refused_by_its_config(model_type: str, tmp_path: Any) -> None:
    """Before weights are read: the folder holds a config only."""
    name, arguments, reason = REFUSED[model_type]
    config_class = getattr(transformers, name, None)
    if config_class is None:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    config_class(**arguments).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"type '{model_type}' over pages.*{reason}"):
        TargetModel.from_pretrained(tmp_path)


def test_chunks_are_known_by_type(tmp_path: Any) -> None:
    """A layer of another type may mean something else by a chunk."""
    config = make_config("qwen3")
    config.layer_types = ["chunked_attention", "full_attention"]
    config.attention_chunk_size = 8
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"attention_chunk_size 8.* these types run: llama4_text"):
        TargetModel.from_pretrained(tmp_path)


def test_a_window_as_long_as_a_chunk_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both layers would lie in one group, which has one kind of mask."""
    with pytest.raises(ConfigError, match="some layers see chunks, others windows"):
        _patched(monkeypatch, {"sliding_window": 8}, "llama4", layer=1)


def test_a_model_in_memory_that_cannot_run_is_refused() -> None:
    config = transformers.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=1, n_head=2)
    with pytest.raises(ConfigError, match="alibi"):
        TargetModel.from_pretrained(make_model(config))


def _patched(
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, Any],
    family: str = "llama",
    layer: int | None = None,
) -> None:
    """Loads a model whose attention is called with these arguments changed (of one layer)."""
    model = make_model(make_config(family))
    attention = type(model.model.layers[0].self_attn)
    original = attention.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        changed = change if layer in (None, self.layer_idx) else {}
        return original(self, *args, **{**kwargs, **changed})

    monkeypatch.setattr(attention, "forward", forward)
    TargetModel.from_pretrained(model)


def test_an_unknown_argument_of_attention_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="unknown 'position_bias'"):
        _patched(monkeypatch, {"position_bias": torch.zeros(1)})


def test_a_bias_in_the_mask_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks that only hide may be given and are not used; a bias would be lost."""
    with pytest.raises(ConfigError, match="layer 0 adds a bias to its scores"):
        _patched(monkeypatch, {"attention_mask": torch.ones(1, 1, 1, 1)})


def test_a_layer_without_attention_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(make_config("llama"))
    layer = model.model.layers[1]
    monkeypatch.setattr(
        layer.self_attn, "forward", lambda hidden_states, **_: (hidden_states, None)
    )
    with pytest.raises(ConfigError, match=r"2 layers should each .* from layers \[0\]"):
        TargetModel.from_pretrained(model)


def test_a_window_in_the_config_only_is_refused() -> None:
    """The mask alone would carry it, and over pages no mask of the model is read."""
    model = make_model(make_config("llama"))
    model.config.sliding_window = 8
    with pytest.raises(ConfigError, match="layer 0 a window of 8"):
        TargetModel.from_pretrained(model)


def test_unknown_logits_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """compute_logits serves the draft head, so it must be what the model itself does."""
    model = make_model(make_config("granite"))
    model.config.logits_scaling = 4.0
    original = type(model).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(self, *args, **kwargs)
        out.logits = out.logits * 3
        return out

    monkeypatch.setattr(type(model), "forward", forward)
    with pytest.raises(ConfigError, match="transform logits"):
        TargetModel.from_pretrained(model)
