"""A head learns from what it will read, runs as it was trained, and goes on where it stopped."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from families import FAMILIES, make_config, make_model
from specpool import Engine, SamplingParams, Shape
from specpool.engine.draft import DraftTree, EagleDrafter
from specpool.engine.models import TargetModel
from specpool.errors import CheckpointError, ConfigError
from specpool.train.config import TrainConfig
from specpool.train.head import NewHead, layers_of_features
from specpool.train.reader import TargetReader
from specpool.train.texts import Text
from specpool.train.unroll import draft_steps, unroll
from train_kit import Watching, run, save_target, text_file

PROMPTS = [[3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25], [40 + i for i in range(33)]]


def text_of(tokens: list[int]) -> Text:
    array = torch.tensor(tokens, dtype=torch.int32).numpy()
    return Text(array, array >= 0, len(tokens) // 2)


def model_of(family: str):
    """Make a random model, or skip where this transformers has no such family."""
    config = make_config(family)
    return pytest.skip(f"no {family} here") if config is None else make_model(config)


class Recorder:
    """A drafter that keeps what the worker hands to drafters, and proposes nothing sensible."""

    layers = ()
    reads_tokens = False

    def __init__(self, feature_layers: tuple[int, ...]) -> None:
        self.feature_layers = feature_layers
        self.seen: dict[tuple[int, int], tuple[int, torch.Tensor]] = {}

    def attach(self, *args: object) -> None:
        pass

    def extend(self, lanes, tokens, features) -> None:
        counts = lanes.counts.tolist()
        width = lanes.widths if isinstance(lanes.widths, int) else None
        at = 0
        for row, start, count in zip(
            lanes.rows.tolist(), lanes.starts.tolist(), counts, strict=True
        ):
            for i in range(count):
                self.seen[row, start + i] = int(tokens[at + i]), features[at + i].clone()
            at += count if width is None else width

    def propose(self, lanes, shape, root_tokens, tokens) -> DraftTree:
        return DraftTree.chain(root_tokens.unsqueeze(1).repeat(1, shape.num_draft_tokens))


@pytest.mark.sample(10)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_features_are_those_that_a_drafter_reads(family: str) -> None:
    """Law: also of prompts that are prefilled in chunks, and beside other rows."""
    with TargetModel(model_of(family)) as target:
        layers = layers_of_features(target.num_layers)
        recorder = Recorder(layers)
        engine = Engine(target, recorder)
        outputs = engine.generate(PROMPTS, SamplingParams(max_new_tokens=6, ignore_eos=True))
        reader = TargetReader(target, layers, batch_size=3, length=48)
        texts = [[*output.prompt_ids, *output.token_ids] for output in outputs]
        features, hidden = reader.forward([text_of(text) for text in texts])
        features, hidden = features.split([*map(len, texts)]), hidden.split([*map(len, texts)])
        for row, (text, of_text) in enumerate(zip(texts, features, strict=True), 1):
            for position in range(len(PROMPTS[row - 1]) + 2):
                token, served = recorder.seen[row, position]
                assert token == text[position + 1]
                torch.testing.assert_close(of_text[position], served, rtol=1e-4, atol=1e-4)
        for text, of_text in zip(texts, hidden, strict=True):
            plain = target.plain_logits(text)
            torch.testing.assert_close(target.compute_logits(of_text), plain, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt2"])
def test_training_drafts_what_serving_drafts(family: str, tmp_path: Path) -> None:
    """Law: the unroll over a text that ends with a head's drafts proposes these drafts."""
    steps, prompt = 4, PROMPTS[1]
    draft_ids = torch.arange(5, 200)
    with TargetModel(model_of(family)) as target:
        layers = layers_of_features(target.num_layers)
        reader = TargetReader(target, layers, batch_size=2, length=64)
        features, hidden = reader.forward([text_of(prompt)])
        head = NewHead.random(target, draft_ids, features, hidden, seed=1)
        with torch.no_grad():  # so large that drafts differ from step to step
            for name, weight in head.weights.items():
                if weight.dim() == 2:
                    weight.normal_(0, 0.3, generator=torch.Generator().manual_seed(len(name)))
        head.save(tmp_path)
        proposed, put_out = [], []

        class Listening(EagleDrafter):
            def propose_parts(self, parts):
                trees = super().propose_parts(parts)
                proposed.append(trees[0].tokens[0].tolist())
                return trees

            def _draft(self, *given):
                put_out.append(super()._draft(*given))
                return put_out[-1]

        served = EagleDrafter.from_pretrained(tmp_path, target).head
        engine = Engine(target, Listening(served), config=_chain(steps))
        engine.generate([prompt], SamplingParams(max_new_tokens=2, ignore_eos=True))
        root, *drafts = proposed[0]
        # One more text beside it: lanes do not mix.
        reading = reader.read([text_of([*prompt, root, *drafts]), text_of(PROMPTS[0])], draft_ids)
        width = reading.tokens.shape[1]
        with torch.no_grad():
            trained = head.assemble(width)
            outs = list(draft_steps(trained, reading, steps))
            for step, draft in enumerate(drafts):
                entry = len(prompt) - 1 + step
                out = outs[step][entry][None]
                assert int(draft_ids[trained.logits(out).argmax()]) == draft
                if step:  # step 0 is a part of the prefill
                    torch.testing.assert_close(out, put_out[step - 1], rtol=1e-3, atol=1e-3)
        assert len(set(drafts)) > 1, "drafts that are all the same show nothing"


@pytest.mark.sample(10)
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, torch.float32) for family in FAMILIES),
        *itertools.product(("qwen3", "gemma3"), (torch.bfloat16, torch.float16)),
    ],
)
def test_every_decoder_gets_a_head_that_learns(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Law: steps lower the loss of a batch, and an engine drafts with what is written."""
    draft_ids, texts = torch.arange(20, 220), [text_of([*range(3, 30)]), text_of([*range(40, 80)])]
    with TargetModel(model_of(family).to(dtype)) as target:
        layers = layers_of_features(target.num_layers)
        reader = TargetReader(target, layers, batch_size=2, length=40)
        head = NewHead.random(target, draft_ids, *reader.forward(texts), seed=0)
        reading, losses = reader.read(texts, draft_ids), []
        with torch.no_grad():  # however large the features of the target's layers are
            features = reading.features.flatten(0, 1)
            trained = head.assemble(64)
            combined = trained.combine(features.to(trained.dtype))
            assert 0.3 < float(combined.float().square().mean().sqrt()) < 1.2
        optimizer = torch.optim.AdamW(head.weights.values(), lr=1e-3)
        for _ in range(4):
            result = unroll(head.assemble(64), reading, draft_ids, 3)
            optimizer.zero_grad()
            result.loss.backward()
            assert all(weight.grad is not None for weight in head.weights.values())
            optimizer.step()
            losses.append(float(result.loss.detach()))
        assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 0.005
        head.save(tmp_path)
        engine = Engine(target, EagleDrafter.from_pretrained(tmp_path, target))
        (output,) = engine.generate(PROMPTS[:1], SamplingParams(max_new_tokens=4, ignore_eos=True))
        assert output.error is None and output.num_drafts > 0


def _chain(steps: int):
    from specpool.engine.config import EngineConfig

    return EngineConfig(shape=Shape.eagle(steps, 1, steps + 1))


def test_the_loss_is_that_of_a_slow_twin() -> None:
    """Law: per step, the mean cross entropy over entries whose token the draft vocabulary has."""
    draft_ids = torch.arange(100, 180)
    with TargetModel(make_model(make_config("llama"))) as target:
        reader = TargetReader(target, layers_of_features(2), batch_size=2, length=40)
        texts = [text_of(prompt) for prompt in PROMPTS]
        texts[1].learned[:20] = False
        reading = reader.read(texts, draft_ids)
        head = NewHead.random(target, draft_ids, *reader.forward(texts), seed=2).assemble(64)
        with torch.no_grad():
            result = unroll(head, reading, draft_ids, 3)
            outs = list(draft_steps(head, reading, 3))
            width, losses, agree = reading.tokens.shape[1], [], []
            for step in range(3):
                of_step, hits, count = [], 0, 0
                for lane, text in enumerate(texts):
                    logits = target.plain_logits(text.tokens.tolist())
                    for entry in range(step, len(text.tokens) - 1):
                        if not text.learned[entry + 1]:
                            continue
                        best = int(logits[entry + 1].argmax())
                        drafted = head.logits(outs[step][lane * width + entry][None])[0]
                        hits += int(draft_ids[drafted.argmax()]) == best
                        count += 1
                        if 100 <= best < 180:
                            wanted = logits[entry + 1][draft_ids].softmax(-1)
                            of_step.append(float(-(wanted * drafted.log_softmax(-1)).sum()))
                losses.append(sum(of_step) / len(of_step))
                agree.append((hits, count))
        expected = sum(0.8**j * x for j, x in enumerate(losses)) / sum(0.8**j for j in range(3))
        assert float(result.loss) == pytest.approx(expected, rel=1e-4)
        assert result.agreeing.tolist() == [hits for hits, _ in agree]
        assert result.drafted.tolist() == [count for _, count in agree]
        # The target's own loss, of the learned tokens that are followed by one.
        own = [
            float(-target.plain_logits(text.tokens.tolist()).log_softmax(-1)[i, text.tokens[i + 1]])
            for text in texts
            for i in range(1, len(text.tokens) - 1)
            if text.learned[i]
        ]
        assert reading.num_losses == len(own)
        assert reading.loss == pytest.approx(sum(own), rel=1e-4)


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_a_head_is_trained_written_and_measured(family: str, tmp_path: Path) -> None:
    """Law: the loss falls; the folder is a head that an engine loads, as other engines name it."""
    target, out = save_target(tmp_path / "target", family), tmp_path / "head"
    config = TrainConfig(
        target=str(target),
        data=(text_file(tmp_path, 3000),),
        out=out,
        length=32,
        epochs=2,
        draft_vocab_size=64,
    )
    watcher = Watching()
    report = run(config, watcher)
    losses = [float(note.rsplit(" ", 1)[1]) for note in watcher.notes if note.startswith("step")]
    assert report.finished and report.steps == len(losses) and report.epochs == 2
    assert losses[-1] < losses[0]
    assert set(report.accept_lens) == {"head", "prompt lookup"}
    assert all(1 <= length <= 4 for length in report.accept_lens.values())
    assert report.held_out.target_loss > 1 and len(report.held_out.agreement) == 4
    assert report.num_texts + report.num_held_out == 94

    raw, tensors = (
        json.loads((out / "config.json").read_text()),
        load_file(out / "model.safetensors"),
    )
    assert raw["architectures"] == ["LlamaForCausalLMEagle3"]
    assert raw["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    assert {"midlayer.hidden_norm.weight", "fc.weight", "norm.weight", "lm_head.weight"} < {
        *tensors
    }
    ids = tensors["d2t"] + torch.arange(64)
    assert tensors["t2d"].nonzero().flatten().tolist() == ids.tolist()
    with Engine.from_pretrained(target, draft=out, max_context_len=64) as engine:
        (output,) = engine.generate(["seq: 1,"], SamplingParams(max_new_tokens=8, ignore_eos=True))
    assert output.num_drafts > 0


def test_a_head_for_the_embedded_target_beats_prompt_lookup(tmp_path: Path) -> None:
    config = TrainConfig(
        target="specpool/tiny",
        data=(text_file(tmp_path, 20_000),),
        out=tmp_path / "head",
        length=64,
        batch_size=4,
        epochs=1,
    )
    report = run(config)
    # It was 2.32 beside 1.32, after four seconds of CPU time.
    assert report.accept_lens["head"] > 1.4 * report.accept_lens["prompt lookup"]
    assert report.held_out.target_loss < 0.5


def test_a_stopped_training_goes_on_as_if_it_had_not_been_stopped(tmp_path: Path) -> None:
    target, text = save_target(tmp_path / "target", "llama"), text_file(tmp_path, 750)
    options = {"target": str(target), "data": (text,), "length": 32, "epochs": 2, "batch_size": 4}
    whole = run(TrainConfig(**options, out=tmp_path / "whole"))
    first = run(TrainConfig(**options, out=tmp_path / "parts"), Watching(stop_after=7))
    assert (first.finished, first.steps, first.held_out) == (False, 7, None)
    # What was written is a head already.
    with TargetModel.from_pretrained(target) as model:
        EagleDrafter.from_pretrained(tmp_path / "parts", model)
    rest = run(TrainConfig(**options, out=tmp_path / "parts", resume=True))
    assert (rest.finished, rest.steps) == (True, whole.steps) and whole.steps > 8
    whole_weights, part_weights = (
        load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts")
    )
    assert all(torch.equal(whole_weights[name], part_weights[name]) for name in whole_weights)
    assert (rest.held_out, rest.accept_lens) == (whole.held_out, whole.accept_lens)
    # A training that has come to its end is measured again.
    again = run(TrainConfig(**options, out=tmp_path / "parts", resume=True))
    assert (again.steps, again.held_out) == (whole.steps, whole.held_out)
    with pytest.raises(ConfigError, match="cannot resume: batch_size was 4, and is 8 now"):
        run(TrainConfig(**{**options, "batch_size": 8}, out=tmp_path / "parts", resume=True))
    text.write_text(text.read_text() + "more\n")
    with pytest.raises(ConfigError, match="cannot resume: the data's content has changed"):
        run(TrainConfig(**options, out=tmp_path / "parts", resume=True))
    state = tmp_path / "parts" / "training" / "state.safetensors"
    state.write_bytes(state.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="is not a training's state"):
        run(TrainConfig(**options, out=tmp_path / "parts", resume=True))


def test_what_cannot_be_trained_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    text, out = text_file(tmp_path), tmp_path / "head"

    def refused(match: str, **options: object) -> None:
        given = {"data": (text,), "out": out, "length": 32} | options
        with pytest.raises(ConfigError, match=match):
            run(TrainConfig(**given))
        assert not out.exists()

    llama = save_target(tmp_path / "llama", "llama")
    refused("length must be at most 511 for this target, got 600", target=str(llama), length=600)
    short = tmp_path / "short.txt"
    short.write_text("too short a text")
    refused(
        "1 texts of at most 32 tokens, 16 tokens in all, are too little: training needs 8",
        target=str(llama),
        data=(short,),
    )
    quantized = json.loads((llama / "config.json").read_text())
    folder = tmp_path / "quantized"
    folder.mkdir()
    quantized["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    (folder / "config.json").write_text(json.dumps(quantized))
    refused("quantized model of type 'llama'", target=str(folder))
    mamba = tmp_path / "mamba"
    mamba.mkdir()
    config = {"model_type": "mamba", "architectures": ["MambaForCausalLM"], "hidden_size": 64}
    (mamba / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    refused("of type 'mamba': it has recurrent layers", target=str(mamba))
    bert = tmp_path / "bert"
    bert.mkdir()
    (bert / "config.json").write_text(json.dumps({"model_type": "bert"}))
    refused("cannot run a model of type 'bert' over pages", target=str(bert))


def test_a_loss_that_is_not_finite_ends_the_training(tmp_path: Path) -> None:
    target = save_target(tmp_path / "target", "llama")
    options = {"target": str(target), "data": (text_file(tmp_path),), "length": 32, "lr": 1.0}
    with pytest.raises(ConfigError, match=r"diverged at step \d+: the loss is (nan|inf)"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("specpool.train.training._MOST_NORM", float("nan"))
            run(TrainConfig(**options, out=tmp_path / "head", epochs=1))
