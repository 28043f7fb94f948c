"""Replays one case on vLLM's own scheduler with a fake worker. It needs vLLM alone, and no GPU.

    python replay.py        # vLLM's Python on the path, HF_HUB_OFFLINE=1 and the config of opt-125m

The worker mirrors block tables as the model runner does, and keeps what each slot was written for: a
hash of all tokens up to its position. A step runs when its result is waited for, as on a GPU. A read
of a slot that holds something else, or a wrong text, is printed; then the exit code is 1.
"""

import hashlib
import inspect
import json
import math
import sys
from collections import deque
from dataclasses import fields

import torch
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, SpeculativeConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)  # fmt: skip
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

CASE = json.loads("""{}""")
SEED, SET = CASE["seed"], CASE["settings"]
GROUPS, STOP = SET["groups"], 2


def digest(*parts):
    packed = b"".join(part.to_bytes(8, "little", signed=True) for part in parts)
    return 1 + (int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 2)


def only(callable_, **given):
    names = inspect.signature(callable_).parameters
    return {name: value for name, value in given.items() if name in names}


class Text:
    """Every token follows from those before it, so every text is known in advance."""

    def __init__(self, prompt, salt):
        self.tokens, self.keys, self.salt = [], [], salt
        for token in prompt:
            self.append(token)

    def append(self, token):
        self.tokens.append(token)
        self.keys.append(digest(self.keys[-1] if self.keys else self.salt, token))

    def at(self, position):
        while len(self.tokens) <= position:
            said = digest(self.keys[-1], 11)
            self.append(STOP if said % 61 == 0 else 3 + said % 997)
        return self.tokens[position]


def make_scheduler():
    config = VllmConfig(
        scheduler_config=SchedulerConfig(
            max_num_seqs=SET["rows"], max_num_batched_tokens=SET["budget"],
            max_model_len=SET["most_len"], long_prefill_token_threshold=SET["long_prefill"],
            enable_chunked_prefill=True, policy=SET["policy"], is_encoder_decoder=False,
            **only(
                SchedulerConfig, watermark=SET.get("watermark", 0.0),
                prefill_schedule_interval=SET.get("interval", 1),
                scheduler_reserve_full_isl=SET.get("whole", True),
            ),
        ),
        model_config=ModelConfig(
            model="facebook/opt-125m", dtype="float16", max_model_len=SET["most_len"],
            skip_tokenizer_init=True,
        ),
        cache_config=CacheConfig(block_size=16, **only(CacheConfig, swap_space=0)),
        speculative_config=SpeculativeConfig(
            model="ngram", method="ngram", num_speculative_tokens=SET["drafts"]
        ) if SET["drafter"] else None,
    )  # fmt: skip
    config.scheduler_config.async_scheduling = SET["asynchronous"]
    config.cache_config.enable_prefix_caching = SET["caching"]
    config.cache_config.num_gpu_blocks = CASE["num_blocks"]
    if SET["drafter"] == "eagle":
        config.speculative_config.method = "eagle"
    groups = []
    for at, group in enumerate(GROUPS):
        size = dict(block_size=group["block"], num_kv_heads=1, head_size=1, dtype=torch.float32)
        near = {"sliding_window": group["window"]} if group["kind"] == "window" else {}
        spec = (SlidingWindowSpec if near else FullAttentionSpec)(**size, **near)
        groups.append(KVCacheGroupSpec([f"layer{at}"], spec))
    sizes = [group["block"] for group in GROUPS]
    made = (AsyncScheduler if SET["asynchronous"] else Scheduler)(
        vllm_config=config, structured_output_manager=StructuredOutputManager(config),
        kv_cache_config=KVCacheConfig(
            num_blocks=CASE["num_blocks"], kv_cache_tensors=[], kv_cache_groups=groups
        ),
        block_size=math.lcm(*sizes), **only(Scheduler.__init__, hash_block_size=math.gcd(*sizes)),
    )  # fmt: skip
    made.use_v2_model_runner = False
    return made


scheduler = make_scheduler()
hash_size = getattr(scheduler.kv_cache_manager.block_pool, "hash_block_size", scheduler.block_size)
kv_cache_utils.init_none_hash(sha256)
hasher = kv_cache_utils.get_request_block_hasher(
    hash_size, sha256,
    **only(kv_cache_utils.get_request_block_hasher,
           num_hash_lookahead_tokens=getattr(scheduler, "num_hash_lookahead_tokens", 0)),
)  # fmt: skip
texts, said, rows, memory, wrong, aborted = {}, {}, {}, {}, [], set()


def launch(output):
    """Mirror the block tables; return the lanes of the step."""
    for name in output.finished_req_ids:
        rows.pop(name, None)
    for new in output.scheduled_new_reqs:
        rows[new.req_id] = {"at": new.num_computed_tokens, "known": len(new.prompt_token_ids),
                            "blocks": [list(part) for part in new.block_ids], "drafts": []}  # fmt: skip
    cached = output.scheduled_cached_reqs
    for at, name in enumerate(cached.req_ids):
        if name in cached.resumed_req_ids:
            known = CASE["prompts"][name] + cached.num_output_tokens[at]
            rows[name] = {"at": cached.num_computed_tokens[at], "known": known, "drafts": [],
                          "blocks": [list(part) for part in cached.new_block_ids[at]]}  # fmt: skip
        elif cached.new_block_ids[at] is not None:
            for mine, more in zip(rows[name]["blocks"], cached.new_block_ids[at]):
                mine.extend(more)
    return [
        (name, rows[name], [list(part) for part in rows[name]["blocks"]], count,
         list(output.scheduled_spec_decode_tokens.get(name, ())))
        for name, count in output.num_scheduled_tokens.items()
    ]  # fmt: skip


def run(lanes):
    """Run a step: all writes, then all reads; return what each lane says."""
    ends, spoken = [], []
    for name, row, blocks, count, drafts in lanes:
        text, begin = texts[name], row["at"]
        last = begin + count - len(drafts)
        drafts = [own if draft < 0 else draft
                  for draft, own in zip(drafts, row["drafts"] + [-1] * len(drafts))]  # fmt: skip
        accepted = 0
        while last >= row["known"] and accepted < len(drafts):
            if drafts[accepted] != text.at(last + accepted):
                break
            accepted += 1
        ends.append((begin, last, accepted))
        for group, (spec, part) in enumerate(zip(GROUPS, blocks)):
            for position in range(begin, begin + count):
                text.at(position)
                key = (group, text.keys[position] if position < last + accepted else "rejected")
                memory[part[position // spec["block"]], position % spec["block"]] = key
    for (name, row, blocks, count, drafts), (begin, last, accepted) in zip(lanes, ends):
        text = texts[name]
        for group, (spec, part) in enumerate(zip(GROUPS, blocks)):
            low = max(0, begin - spec["window"] + 1) if spec["kind"] == "window" else 0
            for position in range(low, last + accepted):
                block = part[position // spec["block"]]
                if memory.get((block, position % spec["block"])) != (group, text.keys[position]):
                    wrong.append(f"{name} reads position {position} in block {block} of group "
                                 f"{group}, which holds something else")  # fmt: skip
        spoken.append([])
        row["at"] = begin + count
        if last >= row["known"]:
            spoken[-1] = [text.at(last + at) for at in range(accepted + 1)]
            row["at"], row["known"] = last + accepted, last + accepted + 1
            row["drafts"] = propose(text, row["known"], CASE["prompts"][name])
    return spoken


def propose(text, known, num_prompt):
    count = SET["drafts"]
    if SET["drafter"] == "ngram":
        count = digest(SEED, known, 5) % (count + 1)
    right = digest(SEED, num_prompt, known, 7) % (count + 1)
    if SET["accepted"] != 50:
        right = count * SET["accepted"] // 100
    tokens = [text.at(known + at) for at in range(count)]
    return [t if at < right else 3 + (t + 1) % 997 for at, t in enumerate(tokens)]


def process(output, lanes, spoken):
    names = [lane[0] for lane in lanes]
    given = dict(req_ids=names, req_id_to_index={name: at for at, name in enumerate(names)},
                 sampled_token_ids=spoken, logprobs=None, prompt_logprobs_dict={}, pooler_output=[])  # fmt: skip
    has = {field.name for field in fields(ModelRunnerOutput)}
    result = ModelRunnerOutput(**{name: value for name, value in given.items() if name in has})
    for part in scheduler.update_from_output(output, result).values():
        for out in part.outputs:
            name, text = out.request_id, texts[out.request_id]
            for token in out.new_token_ids:
                wanted = text.at(CASE["prompts"][name] + len(said[name]))
                said[name].append(token)
                if token != wanted:
                    wrong.append(
                        f"{name} says {token} as token {len(said[name]) - 1}, not {wanted}"
                    )
    if SET["drafter"] and not SET["asynchronous"]:
        speakers = [at for at, tokens in enumerate(spoken) if tokens]
        drafts = [list(lanes[at][1]["drafts"]) for at in speakers]
        scheduler.update_draft_token_ids(DraftTokenIds([names[at] for at in speakers], drafts))


def stem(number, length):
    return [3 + digest(SEED, number, at) % 997 for at in range(length)]


def send(number, stem_, shared, length, most, salt=0, priority=0, samples=1):
    """Each sample is a request of the scheduler; they arrive at the same moment."""
    tokens, arrival = stem(stem_, shared) + stem(1000 + number, length)[shared:], len(texts)
    for name in names_of(number)[:samples]:
        CASE["prompts"][name], said[name] = length, []
        texts[name] = Text(tokens, salt)
        sampling = SamplingParams(max_tokens=most, temperature=0.0, stop_token_ids=[STOP])
        scheduler.add_request(Request(**only(
            Request.__init__, request_id=name, prompt_token_ids=tokens, sampling_params=sampling,
            pooling_params=None, eos_token_id=None, priority=priority, arrival_time=arrival,
            cache_salt=str(salt) if salt else None, block_hasher=hasher,
        )))  # fmt: skip


def names_of(number):
    return [str(number), str(number + 1000)]


def play(verb):
    given = dict(verb["given"])
    print(f"turn {verb['turn']}: {verb['name']} {given}")
    if verb["name"] == "send":
        send(given.pop("number"), given.pop("stem"), **given)
    elif verb["name"] == "abort":
        scheduler.finish_requests(names_of(given["number"]), RequestStatus.FINISHED_ABORTED)
    elif verb["name"] == "reset":
        scheduler.reset_prefix_cache(reset_running_requests=given["running"])


CASE["prompts"], batches, verbs = {}, deque(), deque(CASE["verbs"])
if CASE["twice"]:  # the same prompt twice, alone in the engine
    for turn in (1, 200):
        given = {"number": 900 + turn, "stem": 99, "shared": CASE["twice"], "length": CASE["twice"]}
        verbs.append({"turn": turn, "name": "send", "given": {**given, "most": 1}})
for turn in range(1, 400):
    while verbs and verbs[0]["turn"] <= turn:
        play(verbs.popleft())
    if scheduler.has_requests():
        output = scheduler.schedule()
        lanes = launch(output)
        for new in output.scheduled_new_reqs:
            print(f"turn {turn}: {new.req_id} starts with {new.num_computed_tokens} tokens cached")
            if new.req_id == "1100" and not new.num_computed_tokens:
                wrong.append("the same prompt a second time hits nothing")
        batches.append((output, lanes, None if SET["is_late"] else run(lanes)))
        late = SET["asynchronous"] and output.total_num_scheduled_tokens and SET["is_late"]
        if late and len(batches) < 2:
            continue
    if batches:
        output, lanes, spoken = batches.popleft()
        process(output, lanes, run(lanes) if spoken is None else spoken)
    if wrong:
        break
for request in scheduler.requests.values():
    wrong.append(f"{request.request_id} never ends: {request.num_computed_tokens} tokens computed of "
                 f"{request.num_tokens}, {len(scheduler.running)} run")  # fmt: skip
print("\n".join(wrong[:5]) or "every read and every text is right")
sys.exit(bool(wrong))
