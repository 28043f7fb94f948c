"""`POST /tokenize` and `/detokenize`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from specpool.engine.texts import num_characters
from specpool.serve.api.errors import bad, json_response
from specpool.serve.api.requests import DetokenizeRequest, TokenizeRequest
from specpool.serve.api.sampling import ignored_header
from specpool.serve.routes.chat import messages_of, template_variables, unread_thoughts
from specpool.serve.routes.reading import reading
from specpool.serve.service import Service


def routes(service: Service) -> APIRouter:
    """Return the routes of the tokenizer."""
    router = reading(service.convert_aside)

    @router.post("/tokenize", summary="Turn a text or a chat into tokens")
    async def tokenize(body: TokenizeRequest) -> Response:
        service.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise bad("give either prompt or messages", "prompt")
        prompt: Any = body.prompt if body.messages is None else messages_of(body.messages)
        service.check_characters(
            num_characters(prompt), "prompt" if body.messages is None else "messages"
        )
        variables = template_variables(body, body.tools)
        variables["add_generation_prompt"] = body.add_generation_prompt is not False

        def work() -> list[int]:
            return service.texts.encode(
                0, prompt, adds_special=body.add_special_tokens, variables=variables
            )

        ids = await service.convert_aside(work)
        max_context_len = service.client.ready.max_context_len
        content = {"count": len(ids), "max_model_len": max_context_len, "tokens": ids}
        ignored = [*(body.model_extra or ())]
        if body.messages is not None:
            ignored += unread_thoughts(service, prompt, variables)
        return json_response(content, headers=ignored_header(sorted(ignored)))

    @router.post("/detokenize", summary="Turn tokens into text")
    async def detokenize(body: DetokenizeRequest) -> Response:
        service.check_model(body.model)
        vocab_size = service.client.ready.vocab_size
        wrong = next((token for token in body.tokens if token >= vocab_size), None)
        if wrong is not None:
            raise bad(f"the token {wrong} is outside the vocabulary [0, {vocab_size})", "tokens")

        def work() -> str:
            text = service.tokenizer.decode(body.tokens, clean_up_tokenization_spaces=False)
            return str(text)

        headers = ignored_header(sorted(body.model_extra or ()))
        return json_response({"prompt": await service.convert_aside(work)}, headers=headers)

    return router
