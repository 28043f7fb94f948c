"""For vLLM's tests/v1/core: an image of a victim that was scheduled in the same step."""

import pytest

from vllm.multimodal.inputs import PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.outputs import ModelRunnerOutput

from .utils import create_requests, create_scheduler

pytestmark = pytest.mark.cpu_test


def step(scheduler, encoded):
    """One step of a worker that keeps what it encodes; a miss ends it, as it ends vLLM's."""
    output = scheduler.schedule()
    encoded.difference_update(output.free_encoder_mm_hashes)
    for name, inputs in output.scheduled_encoder_inputs.items():
        features = scheduler.requests[name].mm_features
        encoded.update(features[index].identifier for index in inputs)
    for name, count in output.num_scheduled_tokens.items():
        request = scheduler.requests[name]
        end = request.num_computed_tokens
        for feature in request.mm_features:
            begin, length = feature.mm_position.offset, feature.mm_position.length
            if begin < end and end - count < begin + length:
                assert feature.identifier in encoded, f"Encoder cache miss, {name} at {begin}"
    names = list(output.num_scheduled_tokens)
    result = ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: index for index, name in enumerate(names)},
        sampled_token_ids=[
            [] if scheduler.requests[name].is_prefill_chunk else [7] for name in names
        ],
    )
    scheduler.update_from_output(output, result)


def test_an_image_of_a_victim_of_the_same_step_is_encoded_when_it_runs_again():
    # Seven blocks of 16 tokens, which either request fits. In the fourth step the late one is
    # scheduled with its image and the last block; the urgent one needs a block, and takes all of
    # the late one's.
    scheduler = create_scheduler(
        max_num_batched_tokens=32,
        long_prefill_token_threshold=16,
        max_model_len=96,
        num_blocks=1 + 7,
        scheduling_policy="priority",
    )
    scheduler.max_num_encoder_input_tokens = 16
    scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=16)
    image = PlaceholderRange(offset=64, length=16)
    (late,) = create_requests(
        num_requests=1, num_tokens=80, max_tokens=1, mm_positions=[[image]], req_ids=["late"]
    )
    (urgent,) = create_requests(num_requests=1, num_tokens=48, max_tokens=1, req_ids=["urgent"])
    late.priority = 1
    encoded = set()
    scheduler.add_request(late)
    step(scheduler, encoded)
    scheduler.add_request(urgent)
    for _ in range(20):
        step(scheduler, encoded)
    assert late.num_preemptions == 1
    assert not scheduler.requests
