"""`Prompts`: makes requests of prompts and parameters, and checks all before any is queued."""

from __future__ import annotations

import itertools
import logging
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

from specpool._core import Shape
from specpool.checks import check_int, shown
from specpool.engine.draft import Drafter
from specpool.engine.models import TargetModel
from specpool.engine.sampling_params import SamplingParams
from specpool.engine.scheduler.request import Conversation, Message, Request, TokenLogprob
from specpool.engine.scheduler.scheduler import Scheduler
from specpool.engine.text.structured.compiler import Compiler
from specpool.engine.text.tokenizer import cleans_spaces
from specpool.engine.texts import NextTurn, Prompt, Texts, is_chat
from specpool.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger("specpool")


class Prompts:
    """A maker of requests that fit the engine."""

    def __init__(
        self,
        target: TargetModel,
        tokenizer: PreTrainedTokenizerBase | None,
        scheduler: Scheduler,
        *,
        shape: Shape,
        shapes: Sequence[Shape],
        num_pages: Sequence[int],
        max_context_len: int,
        compiler: Compiler,
        drafters: Mapping[str, Drafter],
    ) -> None:
        """Keep the limits that prompts and parameters are checked against.

        Args:
            target: gives the vocabulary size and the tokens that end a text.
            tokenizer: None if prompts are token ids.
            scheduler: decides whether a request can ever fit.
            shape: the shape of a request that names none.
            shapes: the ledger's shapes.
            num_pages: the pages of each group.
            max_context_len: the most tokens of a sequence.
            compiler: compiles the forms of texts.
            drafters: the engine's, by name.
        """
        self._target, self._tokenizer, self._scheduler = target, tokenizer, scheduler
        self._defaults, self._has_told = target.generation_defaults, False
        self._texts = Texts(tokenizer)
        self._shape, self._shapes = shape, list(shapes)
        self._num_pages, self._max_context_len = list(num_pages), max_context_len
        self._ids = itertools.count(1)
        self._compiler = compiler
        self._drafters = [*drafters]
        self._reads_tokens = [drafter.reads_tokens for drafter in drafters.values()] or [False]

    def requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        shape: Shape | Sequence[Shape] | None,
        priority: int,
    ) -> list[Request]:
        """Make a request for each sample of each prompt; nothing is queued yet.

        Raises:
            ConfigError: a prompt or a parameter cannot work.
        """
        self.check_open()
        several_prompts = _several(prompts)
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(several_prompts)
        if not isinstance(params, Sequence) or any(
            not isinstance(p, SamplingParams) for p in params
        ):
            raise ConfigError(f"params must be SamplingParams or a list of it, got {shown(params)}")
        if len(params) != len(several_prompts):
            raise ConfigError(
                f"{len(several_prompts)} prompts, but {len(params)} sampling parameters"
            )
        shapes = self._shapes_of(shape, len(several_prompts))
        check_int("priority", priority, -(1 << 31), (1 << 31) - 1)
        requests = []
        for index, prompt in enumerate(several_prompts):
            prompt_params = params[index]
            tokens = self._texts.encode(index, prompt)
            if not tokens:
                raise ConfigError(f"prompt {index} is empty")
            if is_chat(prompt):
                prompt_params = self._chat_params(prompt_params)
            first = self._request(
                f"prompt {index}", index, tokens, prompt_params, shapes[index], priority
            )
            num_samples = prompt_params.n
            first.siblings = [self._sibling(first, sample) for sample in range(1, num_samples)]
            requests += [first, *first.siblings]
        return requests

    def turn(
        self,
        conversation: Conversation,
        prompt: Prompt | NextTurn,
        params: SamplingParams | None,
        shape: Shape | None,
        priority: int,
        max_tokens: int,
    ) -> Request:
        """Make the request of a conversation's next turn; nothing is queued yet.

        Raises:
            ConfigError: a prompt or a parameter cannot work, or the turn exceeds `max_tokens`.
        """
        self.check_open()
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise ConfigError(f"params must be SamplingParams or None, got {shown(params)}")
        if params.n > 1:
            raise ConfigError(f"a turn has one sample, got n={params.n}: fork the session")
        (turn_shape,) = self._shapes_of(shape, 1)
        check_int("priority", priority, -(1 << 31), (1 << 31) - 1)
        history = conversation.tokens
        next_turn = (
            prompt if isinstance(prompt, NextTurn) else self._texts.turn(conversation, prompt)
        )
        if next_turn.history_len != len(history):
            raise ConfigError(
                f"the turn was tokenized for a session of {next_turn.history_len} tokens, which "
                f"has {len(history)}"
            )
        if is_chat(prompt):  # a `NextTurn` already has the ends of its chat
            params = self._chat_params(params)
        tokens = next_turn.tokens
        if not tokens:
            raise ConfigError("the session's first turn is empty")
        if len(tokens) >= max_tokens:
            raise ConfigError(
                f"the session has {len(history)} tokens and gets {len(tokens) - len(history)}; "
                f"with one new token at least, its limit of {max_tokens} leaves room for "
                f"{max(max_tokens - len(history) - 1, 0)}"
            )
        request = self._request("the turn", 0, tokens, params, turn_shape, priority, max_tokens)
        request.conversation, request.said = conversation, next_turn.said
        request.messages = next_turn.messages
        return request

    def moved(
        self,
        tokens: list[int],
        prompt_len: int,
        params: SamplingParams,
        shape: Shape | None,
        priority: int,
        accept_lens: list[int],
        prefill_token_indices: list[int],
        logprobs: list[TokenLogprob],
        max_tokens: int | None = None,
    ) -> Request:
        """Make the request that goes on where another engine's has stopped; nothing is queued yet.

        `max_tokens` limits the text of a session's turn.

        Raises:
            ConfigError: this engine could not run it.
        """
        self.check_open()
        name = "the moved request"
        self.check_tokens(name, tokens)
        if len(tokens) - prompt_len >= params.max_new_tokens:
            raise ConfigError(
                f"{name} has {len(tokens) - prompt_len} tokens of output, at most "
                f"{params.max_new_tokens}: it should have ended"
            )
        request = self._request(name, 0, tokens[:prompt_len], params, shape, priority, max_tokens)
        if len(tokens) >= request.max_len:
            raise ConfigError(
                f"{name} has {len(tokens)} tokens, this engine ends it at {request.max_len}"
            )
        request.tokens = list(tokens)
        request.accept_lens = accept_lens
        request.prefill_token_indices = prefill_token_indices
        request.logprobs = logprobs
        if request.watch is not None:
            request.watch.push(request.output_ids)
        return request

    def log_defaults(self, *, draws: bool) -> None:
        """Log once what requests take from the target's files, and what they do not.

        `draws` says whether requests draw if they give no temperature.
        """
        if self._has_told:
            return
        self._has_told = True
        self._defaults.log(draws=draws)
        if self._tokenizer is not None and cleans_spaces(self._tokenizer):
            _log.warning(
                "tokenizer_config: clean_up_tokenization_spaces is not taken: texts have the "
                "spaces that their tokens have, because a text that streams cannot lose them later"
            )

    def check_tokens(self, name: str, tokens: list[int]) -> None:
        """Raise `ConfigError` for a token that the vocabulary does not have."""
        vocab_size = self._target.vocab_size
        if not tokens or (min(tokens) >= 0 and max(tokens) < vocab_size):
            return
        for position, token in enumerate(tokens):
            if not 0 <= token < vocab_size:
                raise ConfigError(
                    f"{name} has token id {token} at position {position}; "
                    f"the vocabulary is [0, {vocab_size})"
                )

    def _check_text(self, name: str, tokens: list[int]) -> None:
        """Raise `ConfigError` for a token that stands for an image or sound, which is not read."""
        for token in self._target.media_tokens.keys() & set(tokens):
            raise ConfigError(
                f"{name} has token id {token} at position {tokens.index(token)}, which stands for "
                f"an image, a video or sound ({self._target.media_tokens[token]}): this engine "
                "reads text alone"
            )

    def check_open(self) -> None:
        """Raise `ConfigError` if the engine or its target model has been closed."""
        if self._target.closed:
            raise ConfigError("the engine, or its target model, has been closed: make a new one")

    def _shapes_of(
        self, shape: Shape | Sequence[Shape] | None, num_prompts: int
    ) -> list[Shape | None]:
        """Return a shape for each prompt; None means the engine's."""
        shapes: list[Shape | None]
        if shape is None or isinstance(shape, Shape):
            shapes = [shape] * num_prompts
        elif isinstance(shape, Sequence) and len(shape) == num_prompts:
            shapes = list(shape)
        else:
            raise ConfigError(
                f"shape must be a Shape, or one for each of {num_prompts} prompts: {shown(shape)}"
            )
        for wanted in shapes:
            if wanted is not None and wanted not in self._shapes:
                raise ConfigError(f"{wanted} is not among the engine's shapes {self._shapes}")
        return shapes

    def _sibling(self, first: Request, sample: int) -> Request:
        """Make a further sample of the same prompt; its seed is the first's seed + `sample`."""
        seed = (first.seed + sample) % (1 << 64)
        sibling = first.sibling(next(self._ids), sample, seed)
        if first.watch is not None:
            sibling.watch = first.params.text_stream(self._tokenizer, first.stop_ids)
        if first.matcher is not None:
            sibling.matcher = first.matcher.fresh()
        return sibling

    def _request(
        self,
        name: str,
        index: int,
        tokens: list[int],
        params: SamplingParams,
        shape: Shape | None,
        priority: int,
        max_tokens: int | None = None,
    ) -> Request:
        longest = self._max_context_len
        self.check_tokens(name, tokens)
        self._check_text(name, tokens)
        if len(tokens) >= longest:
            raise ConfigError(
                f"{name} has {len(tokens)} tokens; with one new token at least, "
                f"max_context_len {longest} leaves room for {longest - 1}"
            )
        if (filled := self._defaults.fill(params, len(tokens))) is not params:
            self.log_defaults(draws=False)
            params = filled
        self._check_params(name, params)
        drafter = self._drafter_of(name, params)
        max_steps, choices, rounds = params.max_draft_steps, None, self._scheduler.round_shapes
        if shape is None:
            shape, shape_index, choices = rounds.allowed(self._shape, max_steps)
        else:
            shape_index = self._shapes.index(shape)
            if max_steps is not None and shape.num_steps > max_steps:
                raise ConfigError(f"{name} asks for {shape}, and for {max_steps} steps at most")
        stop_ids = params.stop_ids(self._target.eos_token_ids)
        matcher, forced = None, 0
        if params.structured is not None:
            matcher = self._compiler.matcher(params.structured, stop_ids)
            shape_index, choices, forced = rounds.with_forced(shape_index, choices, max_steps)
        request = Request(
            request_id=next(self._ids),
            index=index,
            prompt_len=len(tokens),
            tokens=tokens,
            params=params,
            shape=shape,
            shape_index=shape_index,
            choices=choices,
            max_len=min(len(tokens) + params.max_new_tokens, max_tokens or longest),
            stop_ids=stop_ids,
            seed=fresh_seed() if params.seed is None else params.seed,
            priority=priority if params.priority is None else params.priority,
            watch=params.text_stream(self._tokenizer, stop_ids) if params.stop else None,
            matcher=matcher,
            forced_shape=forced,
            drafter=drafter,
            reads_tokens=self._reads_tokens[drafter],
        )
        if not self._scheduler.fits(request):
            max_pages = self._scheduler.max_pages(request).tolist()
            raise ConfigError(
                f"{name} needs {max_pages} pages when it is {request.max_len} tokens long, the "
                f"groups have {self._num_pages}: lower max_new_tokens"
            )
        return request

    def _chat_params(self, params: SamplingParams) -> SamplingParams:
        target = self._target
        return self._texts.chat_params(params, target.eos_token_ids, target.vocab_size)

    def _drafter_of(self, name: str, params: SamplingParams) -> int:
        """Return the number of the drafter that the parameters name, else 0."""
        if params.drafter is None:
            return 0
        if params.drafter not in self._drafters:
            known = ", ".join(map(repr, self._drafters)) or "none"
            raise ConfigError(
                f"drafter: {name} names {shown(params.drafter)}; the engine has {known}"
            )
        return self._drafters.index(params.drafter)

    def _check_params(self, name: str, params: SamplingParams) -> None:
        """Raise `ConfigError` for parameters that the engine or its vocabulary cannot fulfil."""
        if params.tpot_ms is not None and self._scheduler.round_shapes.budget is None:
            raise ConfigError(
                f"{name} has tpot_ms {params.tpot_ms:g}, which needs an engine with "
                "adaptive='budget'"
            )
        vocab_size = self._target.vocab_size
        for field, tokens in (
            ("in its logit_bias", params.logit_bias),
            ("among its stop_token_ids", params.stop_token_ids),
            ("among its suppress_tokens", params.suppress_tokens or ()),
            ("among its begin_suppress_tokens", params.begin_suppress_tokens or ()),
            ("among its bad_words_ids", itertools.chain.from_iterable(params.bad_words_ids or ())),
        ):
            for token in tokens:
                if token >= vocab_size:
                    raise ConfigError(
                        f"{name} has {token} {field}, which no token can be; the vocabulary is "
                        f"[0, {vocab_size})"
                    )
        if params.logprobs is not None and params.logprobs > vocab_size:
            raise ConfigError(
                f"{name} asks for logprobs of {params.logprobs} tokens; the vocabulary has "
                f"{vocab_size}"
            )


def _several(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """Return a list of prompts; one prompt alone becomes a list of one."""
    if isinstance(prompts, str):
        return [prompts]
    try:
        several = [prompts[i] for i in range(len(prompts))]
    except (TypeError, KeyError, IndexError):
        raise ConfigError(
            f"prompts must be a string, token ids, or a list of them, got {shown(prompts)}"
        ) from None
    if is_chat(several):
        return [cast("Sequence[Message]", several)]
    # The items of an integer array are 0-dimensional arrays, which have `__index__` as ints do.
    if several and not isinstance(several[0], str) and hasattr(several[0], "__index__"):
        if getattr(several[0], "ndim", 0) == 0:
            return [cast("Sequence[int]", several)]
    return cast("Sequence[Prompt]", several)


def fresh_seed() -> int:
    """Draw a random 64-bit seed for a request that names none."""
    return secrets.randbits(64)
