"""Laws of the MTP layer as drafter: it drafts what transformers' own would, and changes no text."""

from __future__ import annotations

import itertools
import json
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import mtp_checkpoints
from proposals import check, record
from specpool import CheckpointError, ConfigError, Engine, SamplingParams, Shape
from specpool.cli import main
from specpool.cli.plan.model import model_of_files
from specpool.cli.plan.question import Question
from specpool.engine.draft import MTPDrafter
from specpool.engine.models import TargetModel
from specpool.engine.models.mtp.layout import find_layout

PAIRS = [
    ("DeepseekV3", "deepseek"),
    ("Glm4Moe", "deepseek"),
    ("Llama", "deepseek"),
    ("Qwen2", "mimo"),
    ("Qwen3", "qwen"),
]
PROMPTS = [[(7 * i * i + 3 * k + i) % 96 for i in range(n)] for k, n in enumerate((17, 30, 9))]
CHAIN, TREE = Shape.eagle(3, 1, 4), Shape.eagle(4, 4, 12)
LAYOUTS = [
    {},
    {"page_size": 3, "layout": "holey"},
    {"page_size": 4, "layout": "holey", "placement": "shared"},
    {"page_size": 1, "overlap_depth": 1},
    {"page_size": 4, "worker": "v1"},
]
GREEDY = SamplingParams(max_new_tokens=28, ignore_eos=True)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """transformers lists the MTP layer's tensors as unexpected for a class without such layers."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    made: dict[tuple[str, str], Path] = {}

    def make(family: str, layout: str) -> Path:
        key = family, layout
        if key not in made:
            path = tmp_path_factory.mktemp(family)
            made[key] = mtp_checkpoints.write(path, family, layout)
        return made[key]

    return make


def engine(folder: Path, draft: object = "mtp", **options: object) -> Engine:
    options = {"num_pages": 400, "max_context_len": 160, **options}
    return Engine.from_pretrained(str(folder), draft=draft, **options)


class Plain:
    """The target and its MTP layer as transformers runs them, without a cache."""

    def __init__(self, folder: Path) -> None:
        layers = pytest.importorskip("transformers.modeling_layers")
        if not hasattr(layers, "MtpModel"):
            pytest.skip("this transformers has no MTP layers to compare with")
        self.target = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        self.target = self.target.float().eval()
        # transformers knows the published models' numbers of layers only.
        self.target._keys_to_ignore_on_load_unexpected = [r"model\.layers\.3\."]
        self.mtp = layers.MtpModel.from_pretrained(self.target).float().eval()

    @torch.inference_mode()
    def logits(self, text: list[int], path: tuple[int, ...]) -> torch.Tensor:
        """The MTP layer's logits after a path of its own drafts."""
        output = self.target(torch.tensor([text[:-1]]), use_cache=False, output_hidden_states=True)
        hidden = output.hidden_states[-1]
        for num_drafts in range(len(path) + 1):
            tokens = torch.tensor([[*text[1:], *path[:num_drafts]]])
            n = tokens.shape[1]
            positions = torch.arange(1, n + 1)[None]
            embeds = self.mtp.embed_tokens(tokens)
            mask = torch.full((n, n), torch.finfo(torch.float32).min).triu(1)[None, None]
            out = self.mtp.layers[0](
                embeds,
                hidden,
                position_embeddings=self.mtp.rotary_emb(embeds, position_ids=positions),
                attention_mask=mask,
                position_ids=positions,
                cache=None,
            )
            hidden = torch.cat((hidden, out[:, -1:]), 1)
        return self.mtp._project_to_logits(out[0, -1])


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", ["DeepseekV3", "Glm4Moe"])
@pytest.mark.parametrize(
    ("shape", "options"), [(CHAIN, LAYOUTS[0]), (TREE, LAYOUTS[1]), (TREE, LAYOUTS[2])]
)
def test_proposals_are_those_of_transformers_mtp_layer(folder, family, shape, options):
    """The independent reference: transformers' loader and forward of the same tensors."""
    path = folder(family, "deepseek")
    plain = Plain(path)
    with engine(path, shape=shape, **options) as one:
        trees = record(one)
        outputs = one.generate(PROMPTS, GREEDY)
    texts = [o.prompt_ids + o.token_ids for o in outputs]
    whole = [each for each in trees if len(each[0]) == len(PROMPTS)]
    check(plain.logits, texts, [*whole[:2], whole[-1]])


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("pair", "options", "temperature"), list(itertools.product(PAIRS, LAYOUTS, (0.0, 1.0)))
)
def test_the_text_is_that_of_plain_decoding(folder, pair, options, temperature):
    params = SamplingParams(max_new_tokens=28, temperature=temperature, seed=5, ignore_eos=True)
    path = folder(*pair)
    with engine(path, None) as plain:
        expected = [o.token_ids for o in plain.generate(PROMPTS, params)]
    for shape in (CHAIN, TREE):
        with engine(path, shape=shape, **options) as one:
            outputs = one.generate(PROMPTS, params)
            assert [o.token_ids for o in outputs] == expected
            assert one.stats().draft_ct > 0


@pytest.mark.sample(1)
@pytest.mark.parametrize("shape", [CHAIN, TREE])
def test_sessions_the_prefix_cache_and_retraction_keep_the_text(folder, shape):
    path = folder("Llama", "deepseek")
    params = SamplingParams(max_new_tokens=36, ignore_eos=True)
    with engine(path, None) as plain:
        expected = [o.token_ids for o in plain.generate(PROMPTS, params)]
        with plain.open_session() as session:
            session.append(PROMPTS[0], params).output()
            turn = session.append(PROMPTS[1][:11], params).output().token_ids
    options = {"page_size": 4, "headroom": 0, "num_pages": 36, "max_context_len": 120}
    with engine(path, shape=shape, **options) as one:
        assert [o.token_ids for o in one.generate(PROMPTS, params)] == expected
        assert one.core.scheduler.num_retracted > 0
        (again,) = one.generate([PROMPTS[2]], params)
        assert again.token_ids == expected[2] and one.stats().prefix.hit_ct > 0
        with one.open_session() as session:
            session.append(PROMPTS[0], params).output()
            assert session.append(PROMPTS[1][:11], params).output().token_ids == turn


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", ["qwen", "mimo"])
def test_one_layer_drafts_alike_in_every_layout(folder, layout):
    """The same numbers under other names, and with the halves of the projection in that order."""
    lens = []
    for each in ("deepseek", layout):
        with engine(folder("Llama", each), shape=TREE) as one:
            lens.append([o.accept_lens for o in one.generate(PROMPTS, GREEDY)])
    assert lens[0] == lens[1]
    assert max(map(max, lens[0])) > 1


def test_a_layer_split_over_files_is_found_by_the_index(folder, tmp_path):
    mtp_checkpoints.write(tmp_path, "Llama", "deepseek")
    with engine(tmp_path, shape=CHAIN) as one:
        expected = one.generate(PROMPTS, GREEDY)
    mtp_checkpoints.shard(tmp_path)
    with engine(tmp_path, shape=CHAIN) as one:
        outputs = one.generate(PROMPTS, GREEDY)
    assert [o.accept_lens for o in outputs] == [o.accept_lens for o in expected]


def beside(folder: Path, name: str) -> int:
    """Move the MTP layer to a file that no index names; return the file's bytes."""
    path = folder / "model.safetensors"
    state = load_file(path)
    layer = {key: state.pop(key) for key in [*state] if key.startswith("mtp.")}
    save_file(state, path, metadata={"format": "pt"})
    mtp_checkpoints.shard(folder)
    save_file(layer, folder / name)
    return (folder / name).stat().st_size


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["mtp.safetensors", "model_mtp.safetensors", "other.safetensors"])
def test_a_layer_in_a_file_that_the_index_does_not_name_is_found(tmp_path, name, caplog):
    """Law: such a layer drafts what it drafts in the target's own file, and a plan counts it."""
    caplog.set_level(logging.INFO, logger="specpool")
    whole = mtp_checkpoints.write(tmp_path / "whole", "Qwen3", "qwen")
    split = Path(shutil.copytree(whole, tmp_path / "split"))
    size = beside(split, name)
    rounds = []
    for path in (whole, split):
        with engine(path) as mtp:
            (output,) = mtp.generate([PROMPTS[0]], GREEDY)
        rounds.append((output.token_ids, output.accept_len))
    assert rounds[0] == rounds[1]
    assert (
        sum(f"from {name}, which its index does not" in r.getMessage() for r in caplog.records) == 1
    )
    plans = [
        model_of_files(Question(memory="1G", target=str(split), draft=d)) for d in ("none", "mtp")
    ]
    assert plans[1].weight_bytes - plans[0].weight_bytes == size


def test_files_beside_the_weights_are_no_mtp_layer(folder, tmp_path):
    """Copies of the weights under other names, of which folders are full, are left alone."""
    path = Path(shutil.copytree(folder("Qwen3", "qwen"), tmp_path / "target"))
    mtp_checkpoints.drop(path, *(n for n in load_file(path / "model.safetensors") if "mtp" in n))
    shutil.copy(path / "model.safetensors", path / "consolidated.safetensors")
    refused(path, ConfigError, "has no MTP layer")


def test_a_stale_index_hides_no_layer(folder, tmp_path):
    path = Path(shutil.copytree(folder("Qwen3", "qwen"), tmp_path / "target"))
    index = {"metadata": {"total_size": 5}, "weight_map": {"lm_head.weight": "gone.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with engine(path) as mtp:
        assert mtp.generate([PROMPTS[0]], GREEDY)[0].accept_len > 1
    plan = model_of_files(Question(memory="1G", target=str(path), draft="mtp"))
    assert plan.weight_bytes == (path / "model.safetensors").stat().st_size


def test_a_layers_own_tables_are_read(folder, tmp_path, caplog):
    """Law: a layer whose embedding is no copy of the target's drafts with its own."""
    accepted = []
    for scale in (1.0, -1.0):
        path = mtp_checkpoints.write(tmp_path / str(scale), "Llama", "deepseek")
        file = path / "model.safetensors"
        state = load_file(file)
        name = "model.layers.3.embed_tokens.weight"
        state[name] = scale * state[name]
        projection = state["model.layers.3.eh_proj.weight"]
        projection[:, : projection.shape[1] // 2] *= scale
        save_file(state, file, metadata={"format": "pt"})
        with engine(path) as mtp:
            accepted.append([o.accept_len for o in mtp.generate(PROMPTS, GREEDY)])
    assert accepted[0] == accepted[1]
    said = [
        r.getMessage() for r in caplog.records if "the MTP layer reads its own" in r.getMessage()
    ]
    assert said == [
        "the MTP layer reads its own model.layers.3.embed_tokens.weight, which is not the target's"
    ]


def test_a_plan_counts_the_layer(folder, monkeypatch, capsys):
    """Its KV is that of one layer of the target, which has 3; its weights are in the same files."""
    path = str(folder("Llama", "deepseek"))
    options = ["--draft", "mtp", "--memory", "64MiB", "--max-context-len", "128"]
    monkeypatch.setattr("sys.argv", ["specpool", "plan", "--target", path, *options])
    with pytest.raises(SystemExit) as end:
        main()
    out = capsys.readouterr().out
    assert end.value.code == 0, out
    cells = {line.split()[1]: line.split() for line in out.splitlines() if " 16 " in line}
    layer = 2 * 2 * 8 * 4 * 16  # keys and values, 2 heads of 8, float32, 16 tokens
    assert f"{3 * layer:,}" in cells["target"] and f"{layer:,}" in cells["draft,"]


# --- refusals ------------------------------------------------------------------------------------


def refused(folder: Path, error: type[Exception], match: str) -> None:
    with (
        TargetModel.from_pretrained(folder, dtype="float32") as target,
        pytest.raises(error, match=match),
    ):
        MTPDrafter.from_pretrained(folder, target)


def change(folder: Path, **new: torch.Tensor | None) -> None:
    path = folder / "model.safetensors"
    state = load_file(path)
    for name, tensor in new.items():
        whole = f"model.layers.3.{name.replace('__', '.')}.weight"
        state.pop(whole)
        if tensor is not None:
            state[whole] = tensor
    save_file(state, path, metadata={"format": "pt"})


def test_a_target_without_mtp_layer_is_refused():
    with pytest.raises(ConfigError, match="no MTP layer: its checkpoint has no tensors beside its"):
        Engine.from_pretrained(draft="mtp")


def test_an_unknown_layout_is_refused(tmp_path):
    mtp_checkpoints.write(tmp_path, "Llama", "deepseek")
    change(tmp_path, eh_proj=None)
    refused(tmp_path, ConfigError, r"layout .* not known: it has layers.3.embed_tokens.weight and")
    with pytest.raises(ConfigError, match=r"not known: it has mtp.emb.weight and 0 more"):
        find_layout(["mtp.emb.weight", "layers.0.mlp.gate.weight"], 1)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"hnorm": None}, ConfigError, "has layers.3.eh_proj.weight but lacks layers.3.hnorm"),
        ({"eh_proj": torch.ones(32, 60)}, CheckpointError, r"\[32, 60\], expected \[32, 64\]"),
        ({"enorm": torch.ones(31)}, CheckpointError, r"\[31\], expected \[32\]"),
        ({"mlp__up_proj": None}, CheckpointError, "missing .*mlp.up_proj"),
        ({"mlp__up_proj": torch.ones(48, 31)}, CheckpointError, r"\[48, 31\], expected \[48, 32\]"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, changes, error, match):
    mtp_checkpoints.write(tmp_path, "Llama", "deepseek")
    change(tmp_path, **changes)
    refused(tmp_path, error, match)


def test_quantized_tensors_are_refused(tmp_path):
    """The target's own loader refuses such files; the layer's loader does not rely on it."""
    mtp_checkpoints.write(tmp_path, "Llama", "deepseek")
    with TargetModel.from_pretrained(tmp_path, dtype="float32") as target:
        change(tmp_path, eh_proj=torch.ones(32, 64, dtype=torch.int8))
        with pytest.raises(CheckpointError, match="int8; quantized weights are not supported"):
            MTPDrafter.from_pretrained(tmp_path, target)


def test_a_target_in_memory_has_no_checkpoint_to_look_into(folder):
    model = AutoModelForCausalLM.from_pretrained(folder("Llama", "deepseek"))
    with pytest.raises(ConfigError, match="a loaded model has none: give the target's folder"):
        Engine.from_pretrained(model, draft="mtp")


def test_a_layer_serves_one_engine(folder):
    path = folder("Llama", "deepseek")
    with TargetModel.from_pretrained(path, dtype="float32") as target:
        drafter = MTPDrafter.from_pretrained(path, target)
        first = Engine(target, drafter)
        with pytest.raises(ConfigError, match="attached to another engine"):
            Engine(target, drafter)
        first.close()
        drafter.close()
