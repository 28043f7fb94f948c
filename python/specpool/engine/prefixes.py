"""`KeepsPrefixes`: an engine that keeps the KV of texts for later prompts, and drops it."""

from __future__ import annotations

from specpool.checks import check_salt, shown
from specpool.engine.config import EngineConfig
from specpool.engine.core import EngineCore
from specpool.engine.models import TargetModel
from specpool.engine.sampling_params import SamplingParams
from specpool.engine.scheduler.pins import Pin
from specpool.engine.texts import Prompt
from specpool.errors import ConfigError


class KeepsPrefixes:
    """The part of `Engine` that pins texts and empties the prefix cache."""

    core: EngineCore
    target: TargetModel
    config: EngineConfig

    def pin(self, prompt: Prompt) -> Pin:
        """Keep the KV of a text, such as a system prompt, for prompts that begin with it.

        Every later prompt that begins with the text uses its KV. Only whole pages are kept; of a
        target with recurrent layers, all but the last token, with their state. If memory runs out,
        the oldest pinned text is dropped before a running request is retracted. The call computes
        the text's KV and returns when it is there.

        Raises:
            ConfigError: the prompt is not valid, or fills no page; or, with recurrent layers, has
                one token.
        """
        params = SamplingParams(max_new_tokens=1)
        (request,) = self.core.prompts.requests([prompt], params, None, 0)
        # Tokens behind the last whole page would move the windows off the pinned pages.
        page_size = 1 if self.target.keeps_state else self.config.page_size
        whole = len(request.tokens) // page_size * page_size
        if not whole:
            raise ConfigError(
                f"the prompt cannot be pinned: {len(request.tokens)} tokens fill no page of "
                f"{self.config.page_size}"
            )
        (request,) = self.core.prompts.requests([request.tokens[:whole]], params, None, 0)
        request.wants_pin = True
        try:
            for _ in self.core.news([request]):
                pass
            if request.pin is None:
                raise ConfigError(f"the prompt cannot be pinned: {request.error}")
            return request.pin
        except BaseException:  # such as Ctrl-C: the caller does not get the pin
            if request.pin is not None:
                self.unpin(request.pin)
            raise

    def unpin(self, pin: Pin) -> None:
        """Drop a pinned text; requests that run on its pages go on. A second call does nothing.

        Raises:
            ConfigError: `pin` is not a result of `Engine.pin`.
        """
        if not isinstance(pin, Pin):
            raise ConfigError(f"unpin takes what pin gave, got {shown(pin)}")
        with self.core.lock, self.core.loop.recovering():
            self.core.scheduler.unpin(pin)

    def forget_prefixes(self, cache_salt: str | None = None) -> None:
        """Drop every text of the prefix cache, for example because the weights have changed.

        Args:
            cache_salt: drop only the texts of this salt; None means all.

        Raises:
            ConfigError: the salt is wrong, or the engine is closed.
        """
        self.core.prompts.check_open()
        if cache_salt is not None:
            check_salt(cache_salt)
        with self.core.lock:
            salt = None if cache_salt is None else cache_salt.encode()
            self.core.scheduler.forget(salt)
