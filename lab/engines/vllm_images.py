"""`Images`: what vLLM's model runner does with encoder outputs, and the laws about them.

A worker keeps the output of an image from the step that encodes it until the scheduler says that it
is free. A step that computes a position of an image reads its output.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

from lab.engines.content import Text
from lab.engines.device import LateDevice
from lab.engines.vllm_rows import Lane


def install(scheduler: Any, wanted: dict[str, int]) -> None:
    """Give a scheduler an encoder's budget for a step, and a cache of its outputs."""
    scheduler.max_num_encoder_input_tokens = wanted["budget"]
    scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=wanted["cache"])
    scheduler.scheduler_config.disable_chunked_mm_input = bool(wanted["whole"])


def features(images: Sequence[Sequence[int]]) -> list[MultiModalFeatureSpec]:
    """Return what vLLM knows of images: offset, length and which one it is."""
    return [
        MultiModalFeatureSpec(
            data=None,
            modality="image",
            identifier=f"image {which}",
            mm_position=PlaceholderRange(offset=offset, length=length),
        )
        for offset, length, which in images
    ]


class Images:
    """The encoder outputs that a worker has, by the names of the images."""

    def __init__(self, device: LateDevice) -> None:
        self.device = device
        self.outputs: set[str] = set()

    def encode(self, output: Any, lanes: list[Lane]) -> None:
        """Begin a step: drop what is free, and encode what is asked for."""
        self.outputs -= {*output.free_encoder_mm_hashes}
        for lane in lanes:
            for at in output.scheduled_encoder_inputs.get(lane.row.name, ()):
                self.outputs.add(f"image {lane.row.text.images[at][2]}")

    def read(self, lane: Lane, begin: int) -> None:
        """A row's part of a step reads the output of each image that it computes a position of."""
        for offset, length, which in lane.row.text.images:
            needs = offset < begin + lane.count and begin < offset + length
            if needs and f"image {which}" not in self.outputs:
                self.device.fault(
                    "content",
                    "encoder output",
                    f"{lane.row.name} computes positions {begin} to {begin + lane.count}, and the "
                    f"worker has no output of image {which} at {offset} to {offset + length}",
                )


def left(manager: Any, texts: Sequence[Text]) -> Iterator[str]:
    """Yield what the cache of encoder outputs counts wrongly when no request is left."""
    held = {name: requests for name, requests in manager.cached.items() if requests}
    if held:
        yield f"no request is left, and these outputs are held: {held}"
    sizes = {f"image {which}": length for text in texts for _, length, which in text.images}
    free = manager.cache_size - sum(sizes[name] for name in manager.cached)
    if (manager.num_free_slots, manager.num_freeable_slots) != (free, manager.cache_size):
        yield (
            f"the cache of {manager.cache_size} counts {manager.num_free_slots} free slots and "
            f"{manager.num_freeable_slots} that can be freed; {free} are free"
        )
