"""For vLLM's tests/v1/kv_connector/unit: KV loads that fail, and loads that are never admitted."""

import pytest

from vllm.v1.request import RequestStatus

from .utils import (
    create_mock_connector,
    create_model_runner_output,
    create_request,
    create_scheduler,
    create_vllm_config,
)

pytestmark = pytest.mark.cpu_test


def make_scheduler(hits, policy, num_blocks=10000, is_async=False, **config):
    scheduler = create_scheduler(
        create_vllm_config(kv_load_failure_policy=policy, **config), num_blocks=num_blocks
    )
    connector = scheduler.connector = create_mock_connector()
    connector.get_num_new_matched_tokens.side_effect = lambda request, computed: (
        max(0, hits.get(request.request_id, 0) - computed),
        is_async and hits.get(request.request_id, 0) > computed,
    )
    connector.request_finished.return_value = (False, None)
    connector.take_events.return_value = ()
    connector.has_pending_block_frees.return_value = False
    connector.requires_kv_delivery = False
    connector.get_loaded_kv_cache_group_ids.return_value = ()
    connector.supports_divergent_local_hybrid_hits = False
    return scheduler


def test_fail_evicts_what_a_sharing_request_computed_from_a_lost_block():
    # A loads a block; B, in the same step, hits it and computes the next one from it.
    first = create_request(request_id=1, num_tokens=17, common_prefix_len=17)
    second = create_request(request_id=2, num_tokens=33, common_prefix_len=33)
    scheduler = make_scheduler({first.request_id: 16}, "fail")
    scheduler.add_request(first)
    scheduler.add_request(second)
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {first.request_id: 1, second.request_id: 17}
    (lost, computed) = scheduler.kv_cache_manager.get_block_ids(second.request_id)[0][:2]
    scheduler.update_from_output(
        output, create_model_runner_output([first, second], invalid_block_ids={lost})
    )
    assert first.status == second.status == RequestStatus.FINISHED_ERROR
    blocks = scheduler.kv_cache_manager.block_pool.blocks
    assert blocks[lost].block_hash is None
    assert blocks[computed].block_hash is None  # computed from the lost one


@pytest.mark.parametrize("how", ["abort", "preempt"])
def test_recompute_keeps_no_hash_of_a_lost_block_when_its_request_leaves(how):
    request = create_request(request_id=1, num_tokens=65, common_prefix_len=65)
    scheduler = make_scheduler({request.request_id: 64}, "recompute")
    scheduler.add_request(request)
    output = scheduler.schedule()
    lost = scheduler.kv_cache_manager.get_block_ids(request.request_id)[0][0]
    scheduler.update_from_output(
        output, create_model_runner_output([request], invalid_block_ids={lost})
    )
    assert request.num_computed_tokens == 0  # to be computed again, and is not
    if how == "abort":
        scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
    else:
        scheduler.running.remove(request)
        scheduler._preempt_request(request, 0.0)
    later = create_request(request_id=2, num_tokens=65, common_prefix_len=65)
    _, hit, _ = scheduler.kv_cache_manager.get_computed_blocks(later)
    assert hit == 0  # nobody has written the first block


def test_a_failed_load_does_not_reserve_blocks_against_its_own_retry():
    request = create_request(request_id=1, num_tokens=65)
    scheduler = make_scheduler(
        {request.request_id: 64}, "recompute", num_blocks=8, is_async=True
    )
    scheduler.add_request(request)
    output = scheduler.schedule()
    assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    lost = scheduler.kv_cache_manager.get_block_ids(request.request_id)[0][0]
    scheduler.update_from_output(
        output,
        create_model_runner_output(
            [], finished_recving={request.request_id}, invalid_block_ids={lost}
        ),
    )
    for _ in range(5):
        scheduler.update_from_output(scheduler.schedule(), create_model_runner_output([]))
    # The pool is empty, and the load was admitted before.
    assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS


def test_a_load_that_fits_alone_is_admitted_with_speculative_decoding():
    request = create_request(request_id=1, num_tokens=79)
    scheduler = make_scheduler(
        {request.request_id: 79},
        "fail",
        num_blocks=1 + 5,
        is_async=True,
        num_speculative_tokens=4,
        max_model_len=80,
    )
    scheduler.add_request(request)
    scheduler.schedule()
    assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
