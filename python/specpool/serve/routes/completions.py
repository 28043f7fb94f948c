"""`POST /v1/completions`."""

from __future__ import annotations

from typing import Any, cast

from fastapi import APIRouter, Request
from starlette.responses import Response

from specpool.engine.sampling_params import SamplingParams
from specpool.engine.texts import Prompt
from specpool.serve.api.choice import AnswerChoice, Delta
from specpool.serve.api.errors import bad
from specpool.serve.api.requests import CompletionRequest
from specpool.serve.api.sampling import check_supported, params_of
from specpool.serve.routes.calls import ANSWERS, Call
from specpool.serve.routes.reading import reading
from specpool.serve.service import Service

#: OpenAI's default of `max_tokens`.
_DEFAULT_TOKENS = 16


class CompletionForm:
    """The form of a completion's answer."""

    def __init__(self, body: CompletionRequest, echoes: list[str]) -> None:
        """Write choices, each behind its text of `echoes`."""
        self._num_top, self._echoes = body.logprobs, echoes

    def first(self, choice: AnswerChoice) -> dict[str, Any] | None:
        """Return the part with the echo of the prompt."""
        echo = self._echoes[choice.index]
        return _choice(choice, echo, None, None) if echo else None

    def part(self, choice: AnswerChoice, delta: Delta) -> dict[str, Any] | None:
        """Return the part of a stream with a delta's text."""
        if not delta.text and delta.finish_reason is None and self._num_top is None:
            return None
        logprobs = self._logprobs(choice, delta)
        return _choice(choice, delta.text, logprobs, delta.finish_reason)

    def whole(self, choice: AnswerChoice, deltas: list[Delta]) -> dict[str, Any]:
        """Return a choice in one piece."""
        assert choice.done is not None
        text = "".join(delta.text for delta in deltas)
        whole = Delta(entries=[entry for delta in deltas for entry in delta.entries])
        del whole.entries[len(choice.done.token_ids) :]  # tokens behind a stop string
        logprobs = self._logprobs(choice, whole)
        text = self._echoes[choice.index] + text
        return _choice(choice, text, logprobs, deltas[-1].finish_reason)

    def _logprobs(self, choice: AnswerChoice, delta: Delta) -> dict[str, Any] | None:
        if self._num_top is None:
            return None
        echo_len = len(self._echoes[choice.index])
        return choice.log.completion(delta.entries, self._num_top, echo_len)


def _choice(
    choice: AnswerChoice, text: str, logprobs: dict[str, Any] | None, reason: str | None
) -> dict[str, Any]:
    return {
        "index": choice.index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": reason,
    }


def prompts_of(body: CompletionRequest) -> list[Prompt]:
    """Return the prompts: one text, several, token ids, or several lists of them."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise bad("there is no prompt", "prompt")
    if isinstance(prompt[0], int):
        return [prompt]
    return [cast("Prompt", entry) for entry in prompt]


def routes(service: Service) -> APIRouter:
    """Return the route of completions."""
    router = reading(service.read_aside)

    @router.post("/v1/completions", summary="Go on with a text", responses=ANSWERS)
    async def complete(body: CompletionRequest, request: Request) -> Response:
        model = service.check_model(body.model)
        call = Call(service, request, body, model, check_supported(body, "suffix"))
        if body.best_of is not None and body.best_of != (body.n or 1):
            raise bad("best_of is not supported beyond n", "best_of", "unsupported_parameter")
        if body.echo and body.logprobs is not None:
            raise bad("echo with logprobs is not supported", "echo", "unsupported_parameter")
        prompts = prompts_of(body)
        if len(prompts) > service.config.max_choices:
            raise bad(f"at most {service.config.max_choices} prompts, got {len(prompts)}", "prompt")
        if request.headers.get("x-session-id") is not None and len(prompts) != 1:
            raise bad(f"a turn of a session has one prompt, got {len(prompts)}", "prompt")

        def params(room: int) -> SamplingParams:
            wanted = body.max_tokens or _DEFAULT_TOKENS
            temperature = service.client.ready.temperature
            return params_of(body, min(wanted, room), body.logprobs, temperature)

        generation = await call.generation(prompts, params, {})

        def form() -> CompletionForm:
            echoes = [""] * len(generation.choices)
            if body.echo:
                texts = [p if isinstance(p, str) else _text(service, p) for p in prompts]
                echoes = [text for text in texts for _ in range(body.n or 1)]
            return CompletionForm(body, echoes)

        return await call.answer(generation, form, "text_completion", "cmpl")

    return router


def _text(service: Service, ids: Any) -> str:
    text = service.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    return str(text)
