"""`Engine`: a target model, an optional drafter, and the pages that both use."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, cast

import torch

from specpool._core import Shape
from specpool.checks import check_fields, check_int, shown
from specpool.engine.assembly.assembly import assemble
from specpool.engine.assembly.loading import Draft, close_models, load
from specpool.engine.comparison import Comparison
from specpool.engine.config import EngineConfig
from specpool.engine.core import EngineCore
from specpool.engine.draft import Drafter
from specpool.engine.loop.busy_check import BusyFinding
from specpool.engine.models import TargetModel
from specpool.engine.moving.movable import Movable
from specpool.engine.output import Chunk, RequestOutput, output_of
from specpool.engine.prefixes import KeepsPrefixes
from specpool.engine.progress import ProgressBar
from specpool.engine.ranked import RankedEngine
from specpool.engine.ranks.group import Ranks
from specpool.engine.sampling_params import SamplingParams
from specpool.engine.scheduler.request import Request
from specpool.engine.session import Session
from specpool.engine.stats import EngineStats, PoolStats, engine_stats, pool_stats
from specpool.engine.text.tokenizer import check_tokenizer
from specpool.engine.texts import NextTurn, Prompt, token_ids
from specpool.errors import ConfigError, CorruptState

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Engine(Movable, KeepsPrefixes):
    """A text generator: a Hugging Face decoder on paged KV, with an optional drafter.

    Use it as a context manager, or call `close`. Either restores the attention of a model that was
    passed in. An engine of `from_pretrained` restores it too when it goes out of scope.
    """

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter | Mapping[str, Drafter] | None = None,
        *,
        config: EngineConfig | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """Build the pools for loaded models; most callers want `from_pretrained`.

        `drafter` is one, or several by name: `SamplingParams.drafter` names one of them.

        Raises:
            ConfigError: the configuration, the models and the memory do not fit together.
        """
        check_tokenizer(tokenizer)
        if not isinstance(target, TargetModel):
            raise ConfigError(
                f"target must be a TargetModel, got a {type(target).__name__}: "
                "`Engine.from_pretrained` takes a folder, a hub name or a transformers model"
            )
        config = config or EngineConfig()
        self.target, self.tokenizer = target, tokenizer
        if not isinstance(drafter, Mapping):
            drafter = {} if drafter is None else {type(drafter).__name__: drafter}
        self.drafters: Mapping[str, Drafter] = dict(drafter)
        parts = assemble(target, self.drafters, config, ranks)
        self.config = parts.config  # with what it takes where no option says it
        parts.calibrate()
        self.shape, self.max_context_len = parts.shape, parts.max_context_len
        self.ledger, self.cache, self.kv_bytes = parts.ledger, parts.cache, parts.cache.num_bytes
        self.state = parts.state
        self.state_bytes = 0 if parts.state is None else parts.state.num_bytes
        self.core = EngineCore(parts, tokenizer)
        self._ranks = RankedEngine(self.core, ranks, target)

    @classmethod
    def from_pretrained(
        cls,
        target: str | PathLike[str] | PreTrainedModel = "specpool/tiny",
        *,
        draft: Draft | Sequence[Draft] | Mapping[str, Draft] | None = None,
        dtype: str | torch.dtype | None = None,
        device: str | torch.device = "cpu",
        tokenizer: PreTrainedTokenizerBase | None = None,
        feature_layers: Sequence[int] | None = None,
        trust_remote_code: bool = False,
        ranks: Ranks | None = None,
        **options: Any,
    ) -> Engine:
        """Load a target and a draft model and build an engine.

        Args:
            target: a folder, a hub name, `specpool/tiny` (embedded), or a loaded model.
            draft: an EAGLE head, a block drafter or a small language model of the target's
                tokenizer (folder, hub name, `specpool/tiny-eagle`, `specpool/tiny-eagle3`,
                `specpool/tiny-block`, `specpool/tiny-draft`, a loaded model), `mtp` (the MTP layer
                in the target's checkpoint), `ngram` or `ngram:6` (prompt lookup, see
                `named_drafter`), a drafter object, or None for plain decoding. Or several of them,
                in a list or by name; `SamplingParams.drafter` names one, else the first drafts.
            dtype: `float32`, `bfloat16`, `float16`, `auto` (the checkpoint's) or a torch dtype;
                None means float32 on a CPU, else `auto`. A loaded model keeps its own.
            device: where the models and the KV live. A loaded model stays where it is.
            tokenizer: replaces the tokenizer of the target's folder.
            feature_layers: target layers whose inputs an EAGLE-3 head reads, of a draft loaded
                here; replaces the checkpoint's.
            trust_remote_code: run Python code from the target's folder. If False, a target that
                needs such code is refused before any of it runs.
            ranks: those that share the target (docs/ranks.md): rank 0 leads, all others `follow`.
            **options: fields of `EngineConfig`.

        Raises:
            ConfigError: a path, an option or a checkpoint does not fit.
        """
        check_fields(EngineConfig, options)
        parts = load(
            target,
            draft,
            config=EngineConfig(**options),
            dtype=dtype,
            device=device,
            tokenizer=tokenizer,
            feature_layers=feature_layers,
            trust_remote_code=trust_remote_code,
            ranks=ranks,
        )
        try:
            engine = cls(
                parts.target,
                parts.drafters,
                config=parts.config,
                tokenizer=parts.tokenizer,
                ranks=ranks,
            )
            weakref.finalize(
                engine.core, parts.close
            ).atexit = False  # at the interpreter's exit there is nothing to restore
            return engine
        except BaseException:
            parts.close()
            raise

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        shape: Shape | Sequence[Shape] | None = None,
        priority: int = 0,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Generate for each prompt; return the outputs in the prompts' order, samples together.

        Args:
            prompts: one prompt or a list. A prompt is a string, a list of token ids, or a chat: a
                list of `{"role": ..., "content": ...}` for the tokenizer's chat template.
            params: one for all prompts, or one per prompt.
            shape: one for all prompts, or one per prompt. None = the engine's; `Shape.none()` =
                plain decoding on the same pages; or one of `EngineConfig.shapes`.
            priority: greater runs first; equal priorities run in the order of arrival.
            progress: show a bar on standard error; None means only on a terminal, once the call has
                taken a second.

        Raises:
            ConfigError: a prompt or a parameter cannot work. Nothing has run then.
        """
        requests = self.core.prompts.requests(prompts, params, shape, priority)
        bar = ProgressBar(requests, progress)
        try:
            for index, _ in self.core.news(requests):
                bar.update(index)
        finally:
            bar.close()
        return [output_of(request, self.tokenizer) for request in requests]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        shape: Shape | Sequence[Shape] | None = None,
        priority: int = 0,
    ) -> Iterator[Chunk | RequestOutput]:
        """Generate as `generate` does, but yield chunks round by round, and each output at its end.

        Prompts are checked at once. The requests run while the iterator is consumed; closing the
        iterator aborts those that are left.
        """
        requests = self.core.prompts.requests(prompts, params, shape, priority)
        return self._stream(requests)

    async def stream_async(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        shape: Shape | Sequence[Shape] | None = None,
        priority: int = 0,
    ) -> AsyncIterator[Chunk | RequestOutput]:
        """Stream as `stream` does, for asyncio: the forwards run in a thread, one at a time.

        Streams of several tasks share batches. To stop early, close the iterator
        (`contextlib.aclosing`): this aborts the requests that are left.
        """
        stream = self.stream(prompts, params, shape=shape, priority=priority)
        try:
            while (item := await asyncio.to_thread(self._next, stream)) is not None:
                yield item
        finally:
            with self.core.lock:  # the thread of a cancelled task may still run a turn
                cast("Generator[Any]", stream).close()

    def _next(self, stream: Iterator[Chunk | RequestOutput]) -> Chunk | RequestOutput | None:
        with self.core.lock:
            return next(stream, None)

    def open_session(self, *, max_tokens: int | None = None, tokens: Sequence[int] = ()) -> Session:
        """Open a conversation that keeps its KV between its turns.

        Args:
            max_tokens: the most tokens of all prompts and outputs; None means `max_context_len`.
            tokens: token ids that the session begins with; the first turn computes their KV. With
                `max_tokens` of them there is no room for a turn, but for a `rewind` or `fork`.

        Raises:
            ConfigError: `max_tokens` is not in [2, max_context_len], `tokens` are not a list of
                token ids, there are more than `max_tokens`, or the engine is closed.
        """
        self.core.prompts.check_open()
        if max_tokens is not None:
            check_int("max_tokens", max_tokens, 2, self.max_context_len)
        token_limit, conversation = max_tokens or self.max_context_len, None
        ids = token_ids(tokens, "tokens must be integer token ids")
        self.core.prompts.check_tokens("the session", ids)
        if len(ids) > token_limit:
            raise ConfigError(
                f"the session begins with {len(ids)} tokens, its limit is {token_limit}"
            )
        try:
            with self.core.lock:
                conversation = self.core.scheduler.open(ids)
                return Session(self.core, conversation, token_limit)
        except BaseException:  # such as Ctrl-C: the caller does not get the session
            if conversation is not None:
                with self.core.lock:
                    self.core.scheduler.close(conversation)
            raise

    def submit(
        self,
        prompt: Prompt | NextTurn,
        params: SamplingParams | None = None,
        *,
        shape: Shape | None = None,
        priority: int = 0,
        session: Session | None = None,
        decode: bool = True,
        on_item: Callable[[int, Chunk | RequestOutput], None] | None = None,
    ) -> int:
        """Queue one prompt that later calls of `turn` run, in a loop of your own.

        Args:
            prompt: a string, token ids or the messages of a chat; or, with a session, the turn's
                tokens as `Texts.turn` gives them.
            params: None means the defaults.
            shape: None means the engine's, or one of its shapes.
            priority: as in `generate`.
            session: make the request this session's next turn; the prompt follows its tokens.
            decode: False means chunks and outputs have token ids and no text, and cost less.
            on_item: called within `turn` with the request's number and each new chunk, at last
                with the output. It may call `submit` and `abort`. If it raises, `turn` raises its
                error after all other requests were told, and the request goes on.

        Returns:
            The request's number. The further samples of `params.n` have the numbers that follow.

        Raises:
            ConfigError: as in `generate`.
        """
        if params is not None and not isinstance(params, SamplingParams):
            raise ConfigError(f"params must be SamplingParams or None, got {shown(params)}")
        if isinstance(prompt, int):  # in a list it would be a token id
            raise ConfigError(f"a prompt is a string, token ids or a chat, got {shown(prompt)}")
        if on_item is not None and not callable(on_item):
            raise ConfigError(f"on_item must be a function, got {shown(on_item)}")
        if session is not None and not (isinstance(session, Session) and session.is_of(self.core)):
            raise ConfigError(f"session must be one of this engine's, got {shown(session)}")
        self.core.compile(params)
        request = None
        try:
            with self.core.lock:
                if session is not None:
                    request = session.next_turn(prompt, params, shape, priority)
                elif isinstance(prompt, NextTurn):
                    raise ConfigError("the tokens of a turn need its session")
                else:
                    request = self.core.prompts.requests([prompt], params, shape, priority)[0]
                return self.core.submit(request, on_item, decode)
        except BaseException:  # such as Ctrl-C: the caller does not get the number
            if request is not None:
                self.core.take_back(request)
            raise

    def abort(self, number: int) -> None:
        """Abort a submitted request; its output comes with the next turn.

        Raises:
            ConfigError: no submitted request has this number, or its output has been delivered.
        """
        self.core.abort(number)

    def turn(self) -> bool:
        """Run one turn for all requests; return False when nothing is left to do."""
        return self.core.turn()

    def _stream(self, requests: list[Request]) -> Iterator[Chunk | RequestOutput]:
        # Close the run here. The garbage collector would close it too, but swallow a Ctrl-C.
        with contextlib.closing(self.core.news(requests, tell=True)) as run:
            for _, news in run:
                yield from news

    @property
    def drafter(self) -> Drafter | None:
        """The first drafter; None if there is none."""
        return next(iter(self.drafters.values()), None)

    @property
    def peak_pages(self) -> list[int]:
        """The most pages of each group that were ever taken at once."""
        return list(self.core.loop.peak_pages)

    def compare(self, first: RequestOutput, second: RequestOutput) -> Comparison:
        """Compare two outputs of one request, such as a drafted one and a plain one.

        If the texts differ, each is compared with the model's own choices, which costs one forward
        per text; see `specpool.engine.comparison`.

        Args:
            first: an output of this engine's target that ended by a stop or its length.
            second: another such output of the same prompt, parameters and, if sampled, seed.

        Raises:
            ConfigError: the outputs belong to different requests, one of them has not ended by a
                stop or its length, or the engine is closed.
        """
        self.core.prompts.check_open()
        with self.core.lock:
            return self._ranks.compare(first, second)

    def follow(self) -> None:
        """Apply the records of rank 0 until it closes its engine, on every other rank.

        Raises:
            ConfigError: this process is alone, or rank 0.
            SpecpoolError: this rank has parted from rank 0, or another rank has gone.
        """
        self._ranks.follow()

    def pool_stats(self) -> list[PoolStats]:
        """Return the page counts of each group now."""
        return pool_stats(self.ledger)

    def stats(self) -> EngineStats:
        """Return what the engine holds now, and its counters since it was built."""
        graphs = self.core.worker.graphs
        return engine_stats(
            self.ledger,
            self.core.scheduler,
            self.core.loop.busy_check,
            self.core.loop.clock,
            self.core.host,
            None if graphs is None else graphs.stats(),
        )

    @property
    def findings(self) -> list[BusyFinding]:
        """The latest findings of the busy check, oldest first; each finding appears once."""
        return list(self.core.loop.busy_check.findings)

    def close(self) -> None:
        """Abort what runs, restore the target model's own attention, write the event log.

        Raises:
            CorruptState: the ledger refuses to take something back; the message says what.
                Everything else is done, and a further call does nothing.
            RecordError: the event log cannot be written. Everything else is done, and a further
                call tries again.
        """
        with self.core.lock:  # an asynchronous stream's thread may be inside a forward
            self._ranks.end()
            failures: list[str] = []
            try:
                if not self.ledger.closed:
                    failures = self.core.end_everything()
            finally:
                close_models(self.target, self.drafters)
            self.ledger.close()
            self._ranks.leave()
        if failures:
            raise CorruptState(
                "the engine is closed, but not all was given back:\n" + "\n".join(failures)
            )

    def __enter__(self) -> Engine:
        """Return the engine itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the engine."""
        self.close()
