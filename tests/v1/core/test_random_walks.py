"""Seeded random walks over scheduler and blocks, with a KV cache that remembers what was written into each slot."""

import random

import pytest

from engine_v1.request import RequestStatus
from tests.factories import make_request, make_scheduler, sampled


def next_token(tokens):
    """The target: repeats itself often, but not always; 0 is EOS."""
    if len(tokens) % 7 == 0:
        return hash((17, tuple(tokens[-3:]))) % 5
    return 1 + (tokens[-1] + tokens[-2] * 3) % 4 if len(tokens) > 1 else 1


def plain_decoding(prompt, max_tokens):
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] == 0:
            break
    return tokens[len(prompt) :]


class SlotCache:
    """Stands for the model: writes what each slot stands for, and checks what each row would read."""

    def __init__(self, block_size):
        self.block_size = block_size
        self.tables = {}  # row -> block ids, as the runner keeps them
        self.slots = {}  # (block, offset) -> the tokens up to there, salted

    def execute(self, step, requests):
        tokens_by_id = {}
        for share in step.scheduled:
            request = requests[share.request_id]
            table = self.tables.setdefault(share.row, [])
            table[share.block_offset :] = share.new_block_ids
            known = request.num_tokens - request.num_computed_tokens
            assert share.num_scheduled_tokens <= known + len(share.spec_token_ids)
            tokens = request.all_token_ids + share.spec_token_ids
            end = share.num_computed_tokens + share.num_scheduled_tokens
            for position in range(share.num_computed_tokens, end):
                self.slots[self.slot(table, position)] = (request.cache_salt, tuple(tokens[: position + 1]))
            for position in range(end):  # what the last row reads, and therefore every row before it
                assert self.slots[self.slot(table, position)] == (
                    request.cache_salt,
                    tuple(tokens[: position + 1]),
                )
            if share.samples:
                tokens_by_id[share.request_id] = self.verify(request, share.spec_token_ids)
        return tokens_by_id

    def slot(self, table, position):
        return table[position // self.block_size], position % self.block_size

    @staticmethod
    def verify(request, drafts):
        history = list(request.all_token_ids)
        emitted = []
        for draft in [*drafts, None]:
            emitted.append(next_token(history))
            history.append(emitted[-1])
            if draft != emitted[-1]:
                break
        return emitted


def propose(rng, scheduler, k):
    """Drafts of any length, right for a while and then wrong, as a lookup's are."""
    for request in scheduler.running:
        request._spec_token_ids = []
        if request.num_pending_tokens != 1 or rng.random() < 0.2:
            continue
        history = list(request.all_token_ids)
        for _ in range(rng.randint(0, request.max_draft_tokens(k))):
            token = next_token(history) if rng.random() < 0.8 else rng.randint(0, 4)
            request._spec_token_ids.append(token)
            history.append(token)


def random_prompt(rng):
    """Prompts that share prefixes of several blocks, with others and with other requests' outputs."""
    prompt = [1, 2] if rng.random() < 0.5 else [rng.randint(1, 4), rng.randint(1, 4)]
    for _ in range(rng.choice([0, 3, 10, 30])):
        prompt.append(next_token(prompt) or 1)
    return prompt + [rng.randint(1, 4) for _ in range(rng.randint(0, 4))]


CONFIGS = {
    "roomy": {"num_blocks": 400, "block_size": 4, "max_num_batched_tokens": 64},
    "tight": {"num_blocks": 24, "block_size": 4, "max_num_batched_tokens": 32},
    "tight, blocks of one": {"num_blocks": 90, "block_size": 1, "max_num_batched_tokens": 24},
    "thin budget": {"num_blocks": 60, "block_size": 4, "max_num_batched_tokens": 8},
    "no cache": {
        "num_blocks": 24,
        "block_size": 4,
        "max_num_batched_tokens": 32,
        "enable_prefix_caching": False,
    },
    "threshold": {
        "num_blocks": 40,
        "block_size": 3,
        "max_num_batched_tokens": 32,
        "long_prefill_token_threshold": 5,
    },
    "unchunked": {
        "num_blocks": 30,
        "block_size": 4,
        "max_num_batched_tokens": 96,
        "enable_chunked_prefill": False,
    },
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("seed", range(4))
def test_every_request_gets_what_plain_decoding_gives(name, seed):
    """Through preemption, aborts, prefix hits and ragged drafts: the invariants, every slot read, and every output."""
    rng = random.Random(f"{name}/{seed}")
    scheduler = make_scheduler(max_num_seqs=6, max_model_len=96, num_speculative_tokens=6, **CONFIGS[name])
    model = SlotCache(CONFIGS[name]["block_size"])
    finished, aborted, num_added, drafted = [], 0, 0, 0
    for _ in range(700):
        while len(scheduler.requests) < 9 and rng.random() < 0.4:
            request = make_request(
                f"r{num_added}",
                random_prompt(rng),
                max_tokens=rng.randint(1, 30),
                eos_token_id=0,
                cache_salt=rng.choice([None, None, "a"]),
            )
            scheduler.add_request(request)
            num_added += 1
        if scheduler.requests and rng.random() < 0.02:
            victim = rng.choice(list(scheduler.requests))
            aborted += len(scheduler.finish_requests([victim], RequestStatus.FINISHED_ABORTED))
            scheduler.check_integrity()
        if rng.random() < 0.005:
            scheduler.reset_prefix_cache(reset_running_requests=True)
            scheduler.check_integrity()
        if not scheduler.requests:
            continue
        propose(rng, scheduler, 6)
        step = scheduler.schedule()
        assert step.scheduled, "somebody makes progress"
        assert step.total_num_scheduled_tokens <= CONFIGS[name]["max_num_batched_tokens"]
        drafted += sum(map(len, step.scheduled_spec_decode_tokens.values()))
        updated = scheduler.update_from_output(step, sampled(model.execute(step, scheduler.requests)))
        finished += [r for r in updated if r.is_finished]
        scheduler.check_integrity()
    assert len(finished) > 40
    assert aborted > 0
    assert drafted > 200
    for request in finished:
        assert request.output_token_ids == plain_decoding(request.prompt_token_ids, request.max_tokens)
    if name.startswith("tight"):
        assert scheduler.num_preemptions > 0
    if scheduler.kv_cache.enable_caching:
        assert scheduler.kv_cache.stats.hits > 0
