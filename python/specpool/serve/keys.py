"""`Keys`: the API keys of a server: which one calls, and which texts it shares KV with."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import replace
from typing import Annotated

from fastapi import Depends, Request

from specpool.engine.sampling_params import SamplingParams
from specpool.serve.api.errors import ApiError
from specpool.serve.config import ServeConfig


class Keys:
    """The keys, by their hashes.

    A key's id is its hash, so it is the same on all servers that have the key. A server without
    keys has clients of one id, "".
    """

    def __init__(self, config: ServeConfig) -> None:
        """Take the keys of these options."""
        # Hashes have one length, so that a comparison tells nothing of a key.
        self._hashes = [_hash(key.encode()) for key in config.api_keys]
        self._shares_prefixes = config.share_prefixes
        self._secret = secrets.token_bytes(32)

    def check(self, authorization: str) -> str:
        """Return the id of the key in a request's header `authorization`.

        Raises:
            ApiError: the key is missing or wrong.
        """
        if not self._hashes:
            return ""
        scheme, _, key = authorization.partition(" ")
        key_hash = _hash(key.strip().encode("latin-1", "replace"))
        # No `any`: each key is compared, whichever fits.
        fits = [hmac.compare_digest(key_hash, known_hash) for known_hash in self._hashes]
        if scheme.lower() != "bearer" or not sum(fits):
            raise ApiError(
                401,
                "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        return key_hash.hex()

    def salted(self, key_id: str, params: SamplingParams) -> SamplingParams:
        """Return the parameters with the salt of the key and of the client together.

        Other keys have other salts, so no client finds another's text in the prefix cache. A secret
        of this process goes in, so that no client can know a salt and give it as its own.

        Args:
            key_id: the id of the key that sends the text.
            params: with the salt that the client gives.
        """
        if self._shares_prefixes or not key_id:
            return params
        content = f"{key_id} {params.cache_salt}".encode()
        salt = hmac.new(self._secret, content, hashlib.sha256).hexdigest()
        return replace(params, cache_salt=salt)


async def _key_id(request: Request) -> str:
    key_id: str = request.scope["specpool.key"]
    return key_id


#: The id of the key that calls a route, as `AccessGuard` has found it.
KeyId = Annotated[str, Depends(_key_id)]


def _hash(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
