"""Laws of the MTP layer of a target with recurrent layers, as Qwen3-Next and Qwen3.5 have one."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import mtp_checkpoints
import proposals
from lossless import Comparison, Reference
from recurrent_families import VOCAB, make_config
from specpool import CheckpointError, ConfigError, Engine, SamplingParams, Shape
from specpool.engine.draft import MTPDrafter
from specpool.engine.models import TargetModel

FAMILIES = ["qwen3_next", "qwen3_5", "qwen3_5_moe"]
CHAIN, TREE = Shape.eagle(3, 1, 4), Shape.eagle(3, 2, 7)
PROMPTS = [[(7 * i * i + 3 * k + i) % VOCAB for i in range(n)] for k, n in enumerate((17, 30, 9))]
GREEDY = SamplingParams(max_new_tokens=16, ignore_eos=True)
OPTIONS = {"max_batch": 3, "prefill_tokens": 16, "max_context_len": 128, "dtype": "float32"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if make_config(family) is None:
            pytest.skip(f"no {family} in this transformers")
        if family not in made:
            made[family] = mtp_checkpoints.write_hybrid(tmp_path_factory.mktemp(family), family)
        return made[family]

    return make


@pytest.fixture(scope="module")
def references() -> dict[Path, Reference]:
    """Made as they are asked for."""
    return {}


def engine(folder: Path, **options: object) -> Engine:
    return Engine.from_pretrained(str(folder), draft="mtp", **{**OPTIONS, **options})


def plain_target(folder: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    return model.float().eval()


def compare(references: dict[Path, Reference], folder: Path, texts: list) -> None:
    """Compare pairs of a prompt and the text after it with transformers' own `generate`."""
    if folder not in references:
        references[folder] = Reference(plain_target(folder))
    comparison = Comparison()
    for prompt, text in texts:
        assert len(text) == GREEDY.max_new_tokens
        comparison.add(references[folder], prompt, text)
    comparison.finish()


class PlainHybrid:
    """The target and its MTP layer as transformers' modules run them, without a cache."""

    def __init__(self, folder: Path) -> None:
        self.target = plain_target(folder)
        state = load_file(folder / "model.safetensors")
        self.projection = state["mtp.fc.weight"]
        decoder = self.target.model
        embedding = state.get("mtp.embed_tokens.weight")
        self.embedding = decoder.embed_tokens.weight if embedding is None else embedding
        self.token_norm, self.hidden_norm, self.norm, self.layer = (
            copy.deepcopy(module) for module in (*[decoder.norm] * 3, decoder.layers[1])
        )
        for norm, name in (
            (self.token_norm, "pre_fc_norm_embedding"),
            (self.hidden_norm, "pre_fc_norm_hidden"),
            (self.norm, "norm"),
        ):
            norm.weight.data = state[f"mtp.{name}.weight"]
        for name, parameter in self.layer.named_parameters():
            tensor = state.get(f"mtp.layers.0.{name}")
            if tensor is not None:  # experts, which the file splits, stay those of the target's
                parameter.data = tensor

    @torch.inference_mode()
    def logits(self, text: list[int], path: tuple[int, ...]) -> torch.Tensor:
        """The MTP layer's logits after a path of its own drafts."""
        decoder = self.target.model
        hidden = decoder(torch.tensor([text[:-1]]), use_cache=False)[0]
        for num_drafts in range(len(path) + 1):
            embeds = self.embedding[torch.tensor([[*text[1:], *path[:num_drafts]]])]
            n = embeds.shape[1]
            joined = torch.cat([self.token_norm(embeds), self.hidden_norm(hidden)], -1)
            x = joined @ self.projection.T
            out = self.layer(
                x,
                position_embeddings=decoder.rotary_emb(x, torch.arange(n)[None]),
                attention_mask=torch.full((n, n), -torch.inf).triu(1)[None, None],
            )
            hidden = torch.cat((hidden, self.norm(out)[:, -1:]), 1)
        return self.target.lm_head(hidden[0, -1])


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_it_drafts_what_its_tensors_say_and_the_text_is_transformers(
    folder, references, family, shape, page_size
):
    path = folder(family)
    with engine(path, shape=shape, page_size=page_size, overlap_depth=0, busy_check=2) as mtp:
        trees = proposals.record(mtp)
        outputs = mtp.generate(PROMPTS, GREEDY)
    assert max(output.accept_len for output in outputs) > 1
    compare(references, path, [(output.prompt_ids, output.token_ids) for output in outputs])
    texts = [output.prompt_ids + output.token_ids for output in outputs]
    whole = [tree for tree in trees if len(tree[0]) == len(PROMPTS)]
    proposals.check(PlainHybrid(path).logits, texts, [*whole[:2], whole[-1]])


def test_it_reads_an_embedding_of_its_own(tmp_path, references):
    """Law: `mtp_use_dedicated_embeddings` is what its drafts say, and the text stays."""
    mtp_checkpoints.add_embedding(mtp_checkpoints.write_hybrid(tmp_path, "qwen3_5"))
    with engine(tmp_path, shape=CHAIN, overlap_depth=0) as mtp:
        trees = proposals.record(mtp)
        outputs = mtp.generate(PROMPTS, GREEDY)
    compare(references, tmp_path, [(output.prompt_ids, output.token_ids) for output in outputs])
    texts = [output.prompt_ids + output.token_ids for output in outputs]
    whole = [tree for tree in trees if len(tree[0]) == len(PROMPTS)]
    proposals.check(PlainHybrid(tmp_path).logits, texts, whole[:2])


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("depth", [0, 1])
def test_turns_hits_and_a_cut_keep_the_text(folder, references, family, depth):
    """A turn drafts on from the KV that the turn before left in the draft pool."""
    path = folder(family)
    texts = []
    with engine(path, shape=TREE, page_size=4, overlap_depth=depth) as mtp:
        with mtp.open_session() as session:
            for cut, more in ((None, PROMPTS[0]), (None, PROMPTS[2]), (20, PROMPTS[2][:3])):
                if cut is not None:
                    session.rewind(cut)
                prompt = [*session.tokens, *more]
                texts.append((prompt, session.append(more, GREEDY).output().token_ids))
        (again,) = mtp.generate([texts[1][0]], GREEDY)
        assert mtp.stats().prefix.hit_ct > 0
    compare(references, path, [*texts, (again.prompt_ids, again.token_ids)])


def test_a_checkpoint_of_text_and_images_has_one_too(folder, tmp_path):
    """Published Qwen3.5 are such: the decoder's tensors have another start, those of MTP not."""
    state = load_file(folder("qwen3_5") / "model.safetensors")
    text = {**make_config("qwen3_5").to_dict(), "mtp_num_hidden_layers": 1}
    config = transformers.Qwen3_5Config(text_config=text)
    config.architectures = ["Qwen3_5ForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    renamed = {
        name.replace("model.", "model.language_model.", 1)
        if name.startswith("model.")
        else name: tensor
        for name, tensor in state.items()
    }
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    rounds = []
    for path in (folder("qwen3_5"), tmp_path):
        with engine(path, shape=CHAIN) as mtp:
            rounds.append([(o.token_ids, o.accept_lens) for o in mtp.generate(PROMPTS, GREEDY)])
    assert rounds[0] == rounds[1]


# --- refusals ------------------------------------------------------------------------------------


def refused(folder: Path, error: type[Exception], match: str) -> None:
    with (
        TargetModel.from_pretrained(folder, dtype="float32") as target,
        pytest.raises(error, match=match),
    ):
        MTPDrafter.from_pretrained(folder, target)


@pytest.mark.parametrize("says", [False, True])
def test_a_recurrent_mtp_layer_is_refused_by_the_name_of_a_tensor(tmp_path, says):
    """Also if the config says that it is recurrent."""
    mtp_checkpoints.write_hybrid(tmp_path, "qwen3_5", copied=2)
    if says:
        config = json.loads((tmp_path / "config.json").read_text())
        config["mtp_layer_types"] = ["linear_attention"]
        (tmp_path / "config.json").write_text(json.dumps(config))
    refused(tmp_path, ConfigError, r"is recurrent, as mtp.layers.0.linear_attn.\w+ says: only one")


@pytest.mark.parametrize(
    ("name", "error", "match"),
    [
        ("mtp.norm.weight", ConfigError, "has mtp.fc.weight but lacks mtp.norm.weight"),
        (
            "mtp.layers.0.self_attn.q_norm.weight",
            CheckpointError,
            "missing mtp.layers.0.self_attn.q_norm.weight",
        ),
    ],
)
def test_a_missing_tensor_is_named(tmp_path, name, error, match):
    mtp_checkpoints.write_hybrid(tmp_path, "qwen3_5")
    mtp_checkpoints.drop(tmp_path, name)
    refused(tmp_path, error, match)


def test_an_embedding_that_the_config_promises_must_be_there(tmp_path):
    mtp_checkpoints.add_embedding(mtp_checkpoints.write_hybrid(tmp_path, "qwen3_5"))
    mtp_checkpoints.drop(tmp_path, "mtp.embed_tokens.weight")
    refused(
        tmp_path,
        CheckpointError,
        "mtp_use_dedicated_embeddings, but mtp.embed_tokens.weight is missing",
    )
