"""`POST /tokenize` and `/detokenize`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from specpool.engine.texts import num_characters
from specpool.serve.api.errors import bad, json_response
from specpool.serve.api.requests import DetokenizeRequest, TokenizeRequest
from specpool.serve.routes.chat import messages_of, variables_of
from specpool.serve.routes.reading import reading
from specpool.serve.service import Service


def routes(service: Service) -> APIRouter:
    """Return the routes of the tokenizer."""
    router = reading(service)

    @router.post("/tokenize", summary="Turn a text or a chat into tokens")
    async def tokenize(body: TokenizeRequest) -> Response:
        service.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise bad("give either prompt or messages", "prompt")
        prompt: Any = body.prompt if body.messages is None else messages_of(body.messages)
        service.check_characters(
            num_characters(prompt), "prompt" if body.messages is None else "messages"
        )
        variables = variables_of(body)

        def work() -> list[int]:
            goes_on = not body.add_special_tokens
            return service.texts.encode(0, prompt, goes_on=goes_on, variables=variables)

        ids = await service.aside(work)
        most = service.client.ready.max_context_len
        return json_response({"count": len(ids), "max_model_len": most, "tokens": ids})

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

        return json_response({"prompt": await service.aside(work)})

    return router
