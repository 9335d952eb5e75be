import pytest

from engine_v1.core.kv_cache_manager import NONE_HASH, KVCacheManager, PrefixCacheStats, hash_block
from tests.factories import make_request

COMMON = [t for t in range(3) for _ in range(16)]  # three full blocks


def make_manager(num_blocks=11, block_size=16, enable_caching=True):
    return KVCacheManager(num_blocks=num_blocks, block_size=block_size, enable_caching=enable_caching)


def admit(manager, request):
    """Give a request its cached prefix and blocks for all its tokens; return both."""
    manager.extend_hashes(request)
    computed = manager.get_computed_blocks(request)
    blocks = manager.allocate_slots(request, request.num_tokens, computed)
    manager.check_integrity()
    return computed, blocks


def compute_all(manager, request):
    """What a step leaves behind when it computed all known tokens and one more was committed."""
    request.num_computed_tokens = request.num_tokens
    manager.cache_blocks(request)
    manager.check_integrity()


def free(manager, request):
    manager.free(request)
    manager.check_integrity()


def test_prefix_walk():
    """Hits, reference counts, the order of the free list and eviction follow one walk through a pool of 10 blocks."""
    manager = make_manager()
    a = make_request("r1", [*COMMON, *[3] * 7])
    assert admit(manager, a) == ([], [1, 2, 3, 4])
    compute_all(manager, a)
    assert [b.block_hash is not None for b in manager.block_pool.blocks[1:5]] == [True, True, True, False]

    b = make_request("r2", [*COMMON, *[4] * 5])
    assert admit(manager, b) == ([1, 2, 3], [1, 2, 3, 5])
    assert [manager.block_pool.blocks[i].ref_count for i in (1, 2, 3)] == [2, 2, 2]
    assert manager.block_pool.num_free_blocks == 5

    free(manager, a)
    free(manager, b)
    assert list(manager.block_pool.free) == [5, 4, 6, 7, 8, 9, 10, 3, 2, 1]

    c = make_request("r3", [*COMMON, *[5] * 6])
    assert admit(manager, c) == ([1, 2, 3], [1, 2, 3, 5])
    assert manager.block_pool.num_free_blocks == 6
    free(manager, c)

    d = make_request("r4", [99] * 160)
    assert admit(manager, d) == ([], [5, 4, 6, 7, 8, 9, 10, 3, 2, 1])
    assert not manager.block_pool.cached


def test_decode_takes_a_block_only_when_the_last_one_is_full():
    """55 tokens hold 4 blocks; up to 64 they need no other, 78 need a fifth; a block is shared once it is full."""
    manager = make_manager()
    request = make_request("r1", [*COMMON, *[3] * 7], max_tokens=64)
    admit(manager, request)
    compute_all(manager, request)
    for _ in range(4):
        request.append_output_token(8)
    assert manager.allocate_slots(request, 59) == []
    compute_all(manager, request)
    assert manager.block_pool.blocks[4].block_hash is None
    for _ in range(19):
        request.append_output_token(7)
    assert manager.allocate_slots(request, 78) == [5]
    compute_all(manager, request)
    assert manager.block_pool.blocks[4].block_hash is not None
    assert manager.block_pool.blocks[5].block_hash is None


def test_least_recently_used_blocks_are_evicted_first():
    """After 87 and 48 tokens were freed, a request of 35 tokens with the first one's start still hits 32 tokens."""
    manager = make_manager()
    first = make_request("r1", [t for t in range(5) for _ in range(16)] + [5] * 7)
    second = make_request("r2", list(range(100, 148)))
    assert admit(manager, first)[1] == [1, 2, 3, 4, 5, 6]
    compute_all(manager, first)
    assert admit(manager, second)[1] == [7, 8, 9]
    compute_all(manager, second)
    assert manager.block_pool.num_free_blocks == 1
    free(manager, first)
    free(manager, second)
    third = make_request("r3", [*[0] * 16, *[1] * 16, 9, 9, 9])
    computed, blocks = admit(manager, third)
    assert computed == [1, 2]
    assert len(blocks) == 3
    assert manager.block_pool.num_free_blocks == 7


def test_hit_blocks_are_not_evicted_for_the_request_that_hits_them():
    """With two usable blocks, one of them hit, the new block is the other one."""
    manager = make_manager(num_blocks=3)
    first = make_request("r1", [0] * 16)
    admit(manager, first)
    compute_all(manager, first)
    free(manager, first)
    assert admit(manager, make_request("r2", [*[0] * 16, 1])) == ([1], [1, 2])


def test_a_request_that_does_not_fit_changes_nothing():
    """Free blocks that the request itself hits do not count as room for its other tokens."""
    manager = make_manager(num_blocks=5)
    first = make_request("r1", [0] * 33)
    admit(manager, first)
    compute_all(manager, first)
    free(manager, first)
    other = make_request("r2", [7] * 16)
    admit(manager, other)
    before = [b.ref_count for b in manager.block_pool.blocks]
    request = make_request("r3", [0] * 32 + [1] * 17)
    manager.extend_hashes(request)
    computed = manager.get_computed_blocks(request)
    assert len(computed) == 2
    assert not manager.can_allocate(49, computed)
    assert manager.allocate_slots(request, 49, computed) is None
    assert [b.ref_count for b in manager.block_pool.blocks] == before
    manager.check_integrity()


def test_without_caching_nothing_is_shared():
    """10 tokens in blocks of 4 take 3 blocks, 16 take a fourth, and 4 more find none."""
    manager = make_manager(num_blocks=5, block_size=4, enable_caching=False)
    request = make_request("r1", [1] * 10)
    assert admit(manager, request) == ([], [1, 2, 3])
    assert manager.allocate_slots(request, 16) == [4]
    assert manager.allocate_slots(request, 20) is None
    compute_all(manager, request)
    assert not manager.block_pool.cached
    free(manager, request)
    assert admit(manager, make_request("r2", [1] * 10))[0] == []


def test_at_least_one_token_is_left_to_compute():
    """A prompt that is cached as a whole still computes its last block, for the logits of its last token."""
    manager = make_manager()
    first = make_request("r1", COMMON)
    admit(manager, first)
    compute_all(manager, first)
    assert admit(manager, make_request("r2", COMMON))[0] == [1, 2]


def test_requests_share_only_with_those_of_the_same_salt():
    """cache_salt separates tenants: equal prompts with different salts share nothing."""
    manager = make_manager()
    salted = make_request("r1", COMMON, cache_salt="tenant a")
    admit(manager, salted)
    compute_all(manager, salted)
    assert admit(manager, make_request("r2", COMMON))[0] == []
    assert admit(manager, make_request("r3", [*COMMON, 9], cache_salt="tenant a"))[0] == [1, 2, 3]


def test_block_hashes_form_a_chain():
    """A block's hash stands for its tokens and all before them; 6 tokens in blocks of 3 have 2 hashes."""
    manager = make_manager(block_size=3)
    request = make_request("r1", [1, 2, 3, 4, 5, 6])
    manager.extend_hashes(request)
    first = hash_block(NONE_HASH, [1, 2, 3])
    assert request.block_hashes == [first, hash_block(first, [4, 5, 6])]
    assert (
        len(
            {
                first,
                hash_block(NONE_HASH, [1, 2, 4]),
                hash_block(first, [1, 2, 3]),
                hash_block(NONE_HASH, [1, 2, 3], "x"),
            }
        )
        == 4
    )


def test_trim_frees_the_blocks_behind_the_known_tokens():
    """Blocks taken for drafts that were rejected go back to the front of the free list."""
    manager = make_manager(block_size=4)
    request = make_request("r1", [1] * 7)
    admit(manager, request)
    manager.allocate_slots(request, 13)
    manager.trim(request)
    manager.check_integrity()
    assert manager.blocks["r1"] == [1, 2]
    assert list(manager.block_pool.free)[:3] == [3, 4, 5]


def test_reset_while_in_use_is_refused():
    """The cache is reset only when no request holds a block."""
    manager = make_manager()
    request = make_request("r1", COMMON)
    admit(manager, request)
    compute_all(manager, request)
    assert not manager.reset_prefix_cache()
    free(manager, request)
    assert manager.reset_prefix_cache()
    assert admit(manager, make_request("r2", COMMON))[0] == []


def test_usage_is_the_share_of_blocks_held():
    """4 of 10 usable blocks are 40 %."""
    manager = make_manager()
    admit(manager, make_request("r1", 55))
    assert manager.usage == pytest.approx(0.4)


def test_hit_rate_covers_the_latest_requests():
    """The rate of a window of 5 requests forgets the oldest observations, but never the newest."""
    stats = PrefixCacheStats(window=5)
    assert stats.hit_rate == 0.0
    for observed, rate in [
        ((1, 20, 9), 0.45),
        ((4, 80, 16), 0.25),
        ((1, 10, 2), 0.2),
        ((11, 20, 10), 0.5),
        ((22, 40, 30), 0.75),
    ]:
        stats.observe(*observed)
        assert stats.hit_rate == pytest.approx(rate)
    assert (stats.requests, stats.queries, stats.hits) == (39, 170, 67)
