import pytest

from engine_v1.core.block_pool import NULL_BLOCK, BlockPool


def test_free_blocks_are_handed_out_in_order_and_the_null_block_never():
    """A fresh pool hands out every block but the null block, lowest first."""
    pool = BlockPool(5)
    assert NULL_BLOCK not in pool.free
    assert pool.allocate(0) == []
    assert pool.allocate(1) == [1]
    assert pool.allocate(3) == [2, 3, 4]
    assert pool.num_free_blocks == 0


def test_allocating_more_than_is_free_changes_nothing():
    """Asking for too many blocks raises and leaves the pool as it was."""
    pool = BlockPool(4)
    pool.allocate(2)
    with pytest.raises(ValueError, match="No free blocks available"):
        pool.allocate(2)
    assert list(pool.free) == [3]


def test_blocks_pop_from_the_free_list_in_its_order():
    """Taking 0, 1, 2 and 3 blocks from the list 1 3 5 4 6 2 gives [], [1], [3 5], [4 6 2]."""
    pool = BlockPool(7)
    pool.allocate(6)
    for block_id in (1, 3, 5, 4, 6, 2):
        pool.blocks[block_id].block_hash = bytes([block_id])
        pool.cached[bytes([block_id])] = block_id
        pool.release([block_id])
    assert list(pool.free) == [1, 3, 5, 4, 6, 2]
    assert [pool.allocate(n) for n in (0, 1, 2, 3)] == [[], [1], [3, 5], [4, 6, 2]]
    assert not pool.cached


def test_uncached_blocks_are_freed_to_the_front_and_cached_ones_to_the_back():
    """Content that can be shared is evicted last, the tail of a request before its start."""
    pool = BlockPool(6)
    blocks = pool.allocate(3)
    pool.cache(1, b"a")
    pool.cache(2, b"b")
    pool.release(reversed(blocks))
    assert list(pool.free) == [3, 4, 5, 2, 1]


def test_touch_takes_a_free_cached_block_out_of_the_free_list():
    """A prefix hit keeps its block from eviction, and counts one reference per holder."""
    pool = BlockPool(3)
    pool.cache(*pool.allocate(1), b"a")
    pool.release([1])
    pool.touch([1])
    pool.touch([1])
    assert list(pool.free) == [2]
    assert pool.blocks[1].ref_count == 2
    pool.release([1])
    assert list(pool.free) == [2]


def test_the_first_block_of_equal_content_stays_the_shared_one():
    """A second block with the same tokens is used, but not shared."""
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    pool.cache(first, b"a")
    pool.cache(second, b"a")
    assert pool.cached == {b"a": first}
    assert pool.blocks[second].block_hash is None


def test_reset_is_refused_while_a_block_is_in_use():
    """Cached content is forgotten only when nobody holds a block."""
    pool = BlockPool(3)
    pool.cache(*pool.allocate(1), b"a")
    assert not pool.reset_cache()
    pool.release([1])
    assert pool.reset_cache()
    assert not pool.cached
    assert pool.blocks[1].block_hash is None


def test_releasing_a_free_block_is_a_bug():
    """An unbalanced release is caught where it happens."""
    with pytest.raises(AssertionError, match="released more often"):
        BlockPool(3).release([1])
