"""`python -m benches.peer_llama_cpp MODEL THREADS DRAFTS`: llama.cpp's process of `benches peers`.

Run it with the Python of `make llama-cpp-cpu`. The model's weights are written as a GGUF file in
float32; keys and values are float32 too, so that texts can be equal.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benches.peer_turns import answer, take_stdout

MAX_ROWS = 32
MAX_TOKENS = 2048  # of one call
CONTEXT = MAX_ROWS * 2304  # tokens of all rows; each has a stream of its own

#: GGUF's names of a layer's weights, by those of transformers.
LAYER_WEIGHTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(model: Path, path: Path) -> None:
    """Write a Llama of transformers as GGUF, without its tokenizer."""
    import gguf
    from safetensors.numpy import load_file

    config = json.loads((model / "config.json").read_text())
    weights = load_file(model / "model.safetensors")
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(num_kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    rope = config.get("rope_parameters") or config
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_tokenizer_model("none")

    def add(name: str, source: str, heads: int = 0) -> None:
        weight = weights[source].astype("float32")
        if heads:  # llama.cpp turns neighbours, transformers the halves of a head
            pairs = weight.reshape(heads, 2, head_dim // 2, -1)
            weight = pairs.swapaxes(1, 2).reshape(weight.shape)
        writer.add_tensor(name, weight)

    add("token_embd.weight", "model.embed_tokens.weight")
    add("output_norm.weight", "model.norm.weight")
    if "lm_head.weight" in weights:
        add("output.weight", "lm_head.weight")
    turned = {"attn_q": num_heads, "attn_k": num_kv_heads}
    for layer in range(config["num_hidden_layers"]):
        for source, name in LAYER_WEIGHTS.items():
            add(
                f"blk.{layer}.{name}.weight",
                f"model.layers.{layer}.{source}.weight",
                turned.get(name, 0),
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Decoder:
    """A context of llama.cpp that decodes greedily, all rows in one call."""

    def __init__(self, path: Path, threads: int) -> None:
        """Load a GGUF file."""
        import llama_cpp

        self._api: Any = llama_cpp
        self._log = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._log, None)
        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        model_params.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_params)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max = CONTEXT, MAX_ROWS
        params.n_batch = params.n_ubatch = MAX_TOKENS
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        self._batch = llama_cpp.llama_batch_init(MAX_TOKENS, 0, 1)
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(vocab)

    def forget(self) -> None:
        """Empty the KV."""
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), False)

    def generate(self, prompts: list[list[int]], num_new: int) -> list[list[int]]:
        """Return so many new tokens of each prompt."""
        texts: list[list[int]] = [[] for _ in prompts]
        self._run(
            [
                (row, position, token, position == len(prompt) - 1)
                for row, prompt in enumerate(prompts)
                for position, token in enumerate(prompt)
            ],
            texts,
        )
        for step in range(num_new - 1):
            self._run(
                [
                    (row, len(prompt) + step, texts[row][-1], True)
                    for row, prompt in enumerate(prompts)
                ],
                texts,
            )
        self.forget()
        return texts

    def _run(self, tokens: list[tuple[int, int, int, bool]], texts: list[list[int]]) -> None:
        """Run (row, position, token, whether its logits count); append the rows' next tokens."""
        import numpy as np

        batch = self._batch
        for start in range(0, len(tokens), MAX_TOKENS):
            part = tokens[start : start + MAX_TOKENS]
            batch.n_tokens = len(part)
            for index, (row, position, token, counts) in enumerate(part):
                batch.token[index], batch.pos[index] = token, position
                batch.n_seq_id[index], batch.seq_id[index][0] = 1, row
                batch.logits[index] = counts
            status = self._api.llama_decode(self._context, batch)
            if status:
                raise RuntimeError(f"llama_decode returned {status}")
            for index, (row, _, _, counts) in enumerate(part):
                if counts:
                    logits = self._api.llama_get_logits_ith(self._context, index)
                    values = np.ctypeslib.as_array(logits, (self._vocab_size,))
                    texts[row].append(int(values.argmax()))


def main(model: str, threads: str, drafts: str) -> None:
    """Load the model, and answer traces."""
    answers = take_stdout()
    assert drafts == "0", drafts
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write_gguf(Path(model), path)
        decoder = Decoder(path, int(threads))
    answer(answers, decoder.forget, decoder.generate)


if __name__ == "__main__":
    main(*sys.argv[1:])
