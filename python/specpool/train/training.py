"""`train`: trains an EAGLE-3 head for a target, on a user's texts, and measures it."""

from __future__ import annotations

import hashlib
import math
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from specpool.engine.assets import resolve
from specpool.engine.config import EngineConfig
from specpool.engine.engine import Engine
from specpool.engine.models import TargetModel
from specpool.engine.models.gate import has_recurrent_layers
from specpool.engine.models.target_folder import TargetFolder, find_target, load_config
from specpool.engine.sampling_params import SamplingParams
from specpool.engine.text.tokenizer import load_tokenizer
from specpool.errors import ConfigError
from specpool.train.config import TrainConfig
from specpool.train.head import NewHead, check_target, config_of, layers_of_features, refuse_states
from specpool.train.measure import NUM_PROMPTS, NUM_STEPS, accept_lens
from specpool.train.reader import TargetReader, TargetReading
from specpool.train.state import (
    Checkpoint,
    check_folder,
    check_settings,
    load_texts,
    save_texts,
)
from specpool.train.texts import LEAST_ANSWER, Row, Text, TextRows, TextTokenizer
from specpool.train.unroll import Unrolled, unroll

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: The fewest and the most texts that are held out.
LEAST_HELD_OUT, MOST_HELD_OUT = 4, 64
_WARM_UP_STEPS = 50
# The share of the training for which the learning rate is held, and its last value's share.
_HELD, _LAST = 0.4, 0.02
_BETAS, _WEIGHT_DECAY, _MOST_NORM = (0.9, 0.95), 0.01, 1.0
# Batches whose texts are sorted by length together, so that little of a batch is padding.
_SORTED_BATCHES = 16
# Requests at once, and prompts between two looks at the clock, while the target answers.
_ANSWERING, _PROMPTS_AT_ONCE = 8, 64


class Watcher(Protocol):
    """Watches a training: shows its progress, and may ask it to stop."""

    @property
    def stop(self) -> bool:
        """Whether the training should write a checkpoint and end."""

    def begin(self, task: str, total: float) -> None:
        """Note that a part of the work begins, of `total` units."""

    def advance(self, num_done: float, note: str) -> None:
        """Note that `num_done` units of it are done."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Figures over held-out texts.

    Attributes:
        target_loss: the target's own loss of the texts, nats per token.
        head_loss: the head's loss against the target's distribution, nats, mean of the unroll.
        agreement: for each draft step, how often the head's likeliest token is the target's, after
            drafts that are the text's own tokens.
    """

    target_loss: float
    head_loss: float
    agreement: list[float]


@dataclass(frozen=True, slots=True)
class TrainReport:
    """The result of a training.

    Attributes:
        out: the head's folder.
        finished: whether training came to its end; if not, `resume` goes on.
        num_texts: texts that were trained on.
        num_held_out: texts that were not.
        num_left_out: rows of the data with no answer that fits into `length` tokens.
        num_parameters: of the head, those of its checkpoint.
        steps: steps in all.
        epochs: passes over the texts.
        seconds: wall time of the steps.
        cpu_seconds: CPU time of the steps, of all threads.
        held_out: figures over the held-out texts; None if training was stopped.
        accept_lens: tokens of a round in a chain of 3 on held-out prompts, by drafter; None if
            training was stopped.
        command: a command that uses the head.
    """

    out: str
    finished: bool
    num_texts: int
    num_held_out: int
    num_left_out: int
    num_parameters: int
    steps: int
    epochs: float
    seconds: float
    cpu_seconds: float
    held_out: HeldOut | None
    accept_lens: dict[str, float] | None
    command: str


def train(config: TrainConfig, rows: TextRows, watcher: Watcher) -> TrainReport:
    """Train a head, or go on with its training, and measure it.

    Args:
        config: the options.
        rows: what `read_rows` returned for `config.data`.
        watcher: shows the progress, and may stop the work.

    Raises:
        ConfigError: the target has no head of this kind, the data is too little, the folder must
            not be written to, or the training diverges. Nothing is written but checkpoints.
    """
    check_folder(config.out, resume=config.resume)
    folder = find_target(
        resolve(config.target), trust_remote_code=config.trust_remote_code, config_only=True
    )
    _check_config(load_config(folder))
    folder = find_target(resolve(config.target), trust_remote_code=config.trust_remote_code)
    settings = {
        **config.settings(),
        "data_digest": rows.digest,
        "target_digest": _digest(folder),
    }
    begun = None
    if config.resume:
        begun = Checkpoint.load(config.out)
        check_settings(begun.settings, settings)
    tokenizer = load_tokenizer(folder.path, trust_remote_code=config.trust_remote_code)
    dtype = config.dtype or ("float32" if config.device == "cpu" else "auto")
    with TargetModel.from_pretrained(folder, dtype=dtype, device=config.device) as target:
        check_target(target)
        _check_length(config, target)
        target.model.requires_grad_(False)
        return _Training(config, target, tokenizer, watcher, settings).run(rows, begun)


class _Training:
    """One training: its texts, its head and its optimizer."""

    def __init__(
        self,
        config: TrainConfig,
        target: TargetModel,
        tokenizer: PreTrainedTokenizerBase | None,
        watcher: Watcher,
        settings: dict[str, Any],
    ) -> None:
        self._config, self._target, self._tokenizer = config, target, tokenizer
        self._watcher, self._settings = watcher, settings
        self._num_left_out = 0

    def run(self, rows: TextRows, begun: Checkpoint | None) -> TrainReport:
        config = self._config
        if begun is None:
            texts, num_held_out = self._texts(rows.rows)
            save_texts(config.out, texts, num_held_out)
        else:
            texts, num_held_out = load_texts(config.out)
        self._held_out, self._train_on = texts[:num_held_out], texts[num_held_out:]
        layers = layers_of_features(self._target.num_layers)
        self._reader = TargetReader(
            self._target, layers, batch_size=config.batch_size, length=config.length
        )
        self._begin(begun)
        finished = self._steps()
        self._save()
        held_out = lens = None
        if finished:
            held_out = self._evaluate()
            prompts = [text.prompt for text in self._held_out[:NUM_PROMPTS]]
            self._watcher.begin("measuring the accept length", 1)
            lens = accept_lens(self._target, config.out, prompts)
        return self._report(finished, held_out, lens)

    def _texts(self, rows: Sequence[Row]) -> tuple[list[Text], int]:
        """Return all texts in random order, and how many of them, the first, are held out."""
        config = self._config
        tokens = TextTokenizer(
            self._tokenizer, vocab_size=self._target.vocab_size, length=config.length
        )
        texts: list[Text] = []
        questions: list[list[int]] = []
        self._watcher.begin("reading the texts", len(rows))
        for number, row in enumerate(rows):
            if row.is_plain:
                texts += tokens.plain(row)
            elif row.is_question:
                questions.append(tokens.prompt(row))
            else:
                self._keep(texts, tokens.answered(row))
            self._watcher.advance(number + 1, f"{len(texts)} texts")
        for prompt, answer in self._answers(questions):
            self._keep(texts, tokens.joined(prompt, answer))
        num_held_out = max(LEAST_HELD_OUT, round(config.held_out * len(texts)))
        num_held_out = min(num_held_out, MOST_HELD_OUT)
        if len(texts) < 2 * LEAST_HELD_OUT:
            count = sum(len(text.tokens) for text in texts)
            raise ConfigError(
                f"data: {len(texts)} texts of at most {config.length} tokens, {count} tokens in "
                f"all, are too little: training needs {2 * LEAST_HELD_OUT} texts at least, of "
                f"which {LEAST_HELD_OUT} are held out; give more text, or a smaller length"
            )
        order = np.random.default_rng(config.seed).permutation(len(texts))
        return [texts[i] for i in order], num_held_out

    def _keep(self, texts: list[Text], text: Text | None) -> None:
        if text is None:
            self._num_left_out += 1
        else:
            texts.append(text)

    def _answers(self, prompts: Sequence[list[int]]) -> Iterator[tuple[list[int], list[int]]]:
        """Yield each prompt that leaves room for an answer, with the target's answer."""
        config = self._config
        room = config.length - LEAST_ANSWER
        fitting = [prompt for prompt in prompts if 0 < len(prompt) <= room]
        self._num_left_out += len(prompts) - len(fitting)
        if not fitting:
            return
        engine = Engine(
            self._target,
            config=EngineConfig(max_batch=_ANSWERING, max_context_len=config.length + 1),
        )
        self._watcher.begin("asking the target", len(fitting))
        for start in range(0, len(fitting), _PROMPTS_AT_ONCE):
            if self._watcher.stop:
                raise KeyboardInterrupt
            batch = fitting[start : start + _PROMPTS_AT_ONCE]
            params = [
                SamplingParams(
                    max_new_tokens=min(config.new_tokens, config.length - len(prompt)),
                    temperature=config.temperature,
                    seed=config.seed + start + i,
                )
                for i, prompt in enumerate(batch)
            ]
            for prompt, output in zip(
                batch, engine.generate(batch, params, progress=False), strict=True
            ):
                yield prompt, output.token_ids
            self._watcher.advance(start + len(batch), "")

    def _begin(self, begun: Checkpoint | None) -> None:
        """Make the head and the optimizer, new or as they were."""
        config, target = self._config, self._target
        if begun is None:
            draft_ids = self._frequent_tokens()
            texts = self._train_on[: config.batch_size]
            features, hidden = self._reader.forward(texts)
            # The features of a text's first token often differ in size from all others.
            firsts = np.cumsum([0, *(len(text.tokens) for text in texts)])[:-1]
            not_first = torch.ones(len(features), dtype=torch.bool)
            not_first[torch.from_numpy(firsts)] = False
            not_first = not_first.to(target.device)
            self._head = NewHead.random(
                target, draft_ids, features[not_first], hidden[not_first], config.seed
            )
            self._step, self._seconds, self._cpu_seconds = 0, 0.0, 0.0
        else:
            held = {name: tensor.to(target.device) for name, tensor in begun.tensors.items()}
            names = [name for name in held if name.startswith("weight.")]
            weights = {name.removeprefix("weight."): held[name] for name in names}
            draft_ids = held["kept"]
            raw = config_of(target, len(draft_ids))
            self._head = NewHead(target, raw, draft_ids, held["scale"], weights)
            self._step = begun.step
            self._seconds, self._cpu_seconds = begun.seconds, begun.cpu_seconds
        self._lr = config.lr or min(4e-3, 0.512 / target.hidden_size)
        self._optimizer = torch.optim.AdamW(
            self._head.weights.values(),
            lr=self._lr,
            betas=_BETAS,
            weight_decay=_WEIGHT_DECAY,
        )
        if begun is not None:
            for name, weight in self._head.weights.items():
                self._optimizer.state[weight] = {
                    "step": torch.tensor(float(begun.step)),
                    "exp_avg": held[f"mean.{name}"],
                    "exp_avg_sq": held[f"square.{name}"],
                }

    def _frequent_tokens(self) -> Tensor:
        """Return the ids of the most frequent tokens of the texts, ascending, int64 [Vd]."""
        vocab_size = self._target.vocab_size
        counts = np.zeros(vocab_size, np.int64)
        for text in self._train_on:
            counts += np.bincount(text.tokens[text.learned], minlength=vocab_size)
        size = min(self._config.draft_vocab_size, vocab_size)
        draft_ids = np.sort(np.argsort(-counts, kind="stable")[:size])
        return torch.from_numpy(draft_ids).to(self._target.device)

    def _steps(self) -> bool:
        """Take steps until the training's end; return False if the watcher stopped it first."""
        config, watcher = self._config, self._watcher
        steps_per_epoch = -(-len(self._train_on) // config.batch_size)
        total = (
            math.inf
            if config.most_epochs == math.inf
            else (max(1, round(config.most_epochs * steps_per_epoch)))
        )
        limit = math.inf if config.minutes is None else 60 * config.minutes
        watcher.begin("training", 1.0)
        saved_at, average = self._seconds, math.nan
        batches: list[list[Text]] = []
        epoch = -1
        while True:
            share = max(self._step / total, self._seconds / limit)
            if share >= 1 or watcher.stop:
                return share >= 1
            began, cpu_began = time.perf_counter(), time.process_time()
            if self._step // steps_per_epoch != epoch:
                epoch = self._step // steps_per_epoch
                batches = self._batches(epoch)
            texts = batches[self._step % steps_per_epoch]
            loss = self._take_step(self._reader.read(texts, self._head.draft_ids), share)
            if not math.isfinite(loss):
                raise ConfigError(
                    f"training has diverged at step {self._step}: the loss is {loss}; give a lr "
                    f"below {self._lr:g}"
                )
            self._step += 1
            self._seconds += time.perf_counter() - began
            self._cpu_seconds += time.process_time() - cpu_began
            average = loss if math.isnan(average) else 0.95 * average + 0.05 * loss
            share = min(1.0, max(self._step / total, self._seconds / limit))
            watcher.advance(share, f"step {self._step}, loss {average:.3f}")
            if self._seconds - saved_at >= 60 * config.checkpoint_minutes:
                self._save()
                saved_at = self._seconds

    def _batches(self, epoch: int) -> list[list[Text]]:
        """Return the texts of an epoch in batches, in an order that seed and epoch decide."""
        rng = np.random.default_rng((self._config.seed, 1 + epoch))
        texts, size = self._train_on, self._config.batch_size
        order = rng.permutation(len(texts)).tolist()
        wide = size * _SORTED_BATCHES
        order = [
            i
            for start in range(0, len(order), wide)
            for i in sorted(order[start : start + wide], key=lambda i: len(texts[i].tokens))
        ]
        batches = [
            [texts[i] for i in order[start : start + size]] for start in range(0, len(order), size)
        ]
        return [batches[i] for i in rng.permutation(len(batches))]

    def _take_step(self, reading: TargetReading, share: float) -> float:
        """Take one step of the optimizer when `share` of the training is over; return the loss."""
        rate = min(1.0, (self._step + 1) / _WARM_UP_STEPS)
        if share > _HELD:
            rate *= max(_LAST, (1 - share) / (1 - _HELD))
        self._optimizer.param_groups[0]["lr"] = self._lr * rate
        head = self._head.assemble(reading.tokens.shape[1])
        result = unroll(head, reading, self._head.draft_ids, self._config.unroll)
        self._optimizer.zero_grad()
        torch.autograd.backward(result.loss)
        torch.nn.utils.clip_grad_norm_(self._head.weights.values(), _MOST_NORM)
        self._optimizer.step()
        return float(result.loss.detach())

    @torch.no_grad()
    def _evaluate(self) -> HeldOut:
        """Return the figures over the held-out texts."""
        size, draft_ids = self._config.batch_size, self._head.draft_ids
        texts = sorted(self._held_out, key=lambda text: len(text.tokens))
        results: list[Unrolled] = []
        loss, count = 0.0, 0
        self._watcher.begin("measuring the held-out loss", len(texts))
        for start in range(0, len(texts), size):
            reading = self._reader.read(texts[start : start + size], draft_ids)
            head = self._head.assemble(reading.tokens.shape[1])
            results.append(unroll(head, reading, draft_ids, self._config.unroll))
            loss, count = loss + reading.loss, count + reading.num_losses
            self._watcher.advance(start + size, "")
        agreeing, drafted = (
            torch.stack(counts).sum(0)
            for counts in zip(
                *((result.agreeing, result.drafted) for result in results), strict=True
            )
        )
        return HeldOut(
            target_loss=loss / max(1, count),
            head_loss=sum(float(result.loss) for result in results) / len(results),
            agreement=(agreeing / drafted).tolist(),
        )

    def _save(self) -> None:
        """Write the head and the state."""
        head, optimizer = self._head, self._optimizer
        tensors = {"kept": head.draft_ids, "scale": head.scale}
        for name, weight in head.weights.items():
            state = optimizer.state.get(weight) or {
                "exp_avg": torch.zeros_like(weight),
                "exp_avg_sq": torch.zeros_like(weight),
            }
            tensors[f"weight.{name}"] = weight
            tensors[f"mean.{name}"] = state["exp_avg"]
            tensors[f"square.{name}"] = state["exp_avg_sq"]
        out = self._config.out
        head.save(out)
        Checkpoint(tensors, self._settings, self._step, self._seconds, self._cpu_seconds).save(out)

    def _report(
        self, finished: bool, held_out: HeldOut | None, lens: dict[str, float] | None
    ) -> TrainReport:
        config = self._config
        steps_per_epoch = -(-len(self._train_on) // config.batch_size)
        words = ["specpool", "generate", "--target", config.target, "--draft", str(config.out)]
        words += ["--shape", str(NUM_STEPS), "--prompt"]
        return TrainReport(
            out=str(config.out),
            finished=finished,
            num_texts=len(self._train_on),
            num_held_out=len(self._held_out),
            num_left_out=self._num_left_out,
            num_parameters=sum(weight.numel() for weight in self._head.weights.values()),
            steps=self._step,
            epochs=self._step / steps_per_epoch,
            seconds=self._seconds,
            cpu_seconds=self._cpu_seconds,
            held_out=held_out,
            accept_lens=lens,
            command=f"{shlex.join(words)} '...'",
        )


def _check_config(config: Any) -> None:
    """Refuse a target by its config, before its weights are read."""
    if has_recurrent_layers(config):
        raise refuse_states(config.model_type)
    if getattr(config, "quantization_config", None):
        raise ConfigError(
            f"cannot train a head for a quantized model of type {config.model_type!r}: train on "
            "the model that it was made of"
        )


def _check_length(config: TrainConfig, target: TargetModel) -> None:
    # The reader's rows have room for one token more than a text has.
    max_length = target.max_context_len - 1
    if config.length > max_length:
        raise ConfigError(
            f"length must be at most {max_length} for this target, got {config.length}"
        )


def _digest(folder: TargetFolder) -> str:
    """Return a digest of a target's files: the content of its config, and the weights' sizes."""
    digest = hashlib.sha256((folder.path / "config.json").read_bytes())
    for path in sorted(folder.path.glob("*.safetensors")) + sorted(folder.path.glob("*.bin")):
        digest.update(f"{path.name} {path.stat().st_size}".encode())
    return digest.hexdigest()
