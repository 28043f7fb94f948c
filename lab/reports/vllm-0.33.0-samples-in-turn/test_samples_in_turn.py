"""For vLLM's tests/v1/core: samples of one request, the priority policy, and a pool for one."""

import pytest

from vllm.v1.outputs import ModelRunnerOutput

from .utils import create_requests, create_scheduler

pytestmark = pytest.mark.cpu_test


def test_samples_that_arrive_at_the_same_moment_end_one_after_another():
    # Chunks of 16 tokens; 5 of the 6 blocks are for one sample, and 4 for its prompt.
    scheduler = create_scheduler(
        max_num_batched_tokens=32,
        long_prefill_token_threshold=16,
        max_model_len=80,
        num_blocks=1 + 6,
        scheduling_policy="priority",
    )
    scheduler.scheduler_reserve_full_isl = False  # --no-scheduler-reserve-full-isl
    for sample in create_requests(num_requests=2, num_tokens=64, max_tokens=4):
        sample.arrival_time = 0.0  # as ParentRequest's children have it
        scheduler.add_request(sample)
    for _ in range(100):
        output = scheduler.schedule()
        names = list(output.num_scheduled_tokens)
        scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: index for index, name in enumerate(names)},
                sampled_token_ids=[
                    [] if scheduler.requests[name].is_prefill_chunk else [7] for name in names
                ],
            ),
        )
    assert not scheduler.requests
