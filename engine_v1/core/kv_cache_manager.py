"""Which blocks each request holds, and which prefix it can take from the cache."""

import hashlib
from array import array
from collections import Counter, deque

from engine_v1.core.block_pool import NULL_BLOCK, BlockPool
from engine_v1.request import Request

NONE_HASH = bytes(32)  # parent of a first block


def hash_block(parent: bytes, token_ids: list[int], cache_salt: str | None = None) -> bytes:
    """Return the hash of a full block: it stands for these tokens and, through ``parent``, all before them."""
    content = parent + array("i", token_ids).tobytes()
    if cache_salt is not None:
        content += cache_salt.encode()
    return hashlib.blake2b(content, digest_size=32).digest()


class PrefixCacheStats:
    """Prefix-cache totals, and the hit rate over the last ``window`` requests."""

    def __init__(self, window: int = 1000) -> None:
        self.requests = 0
        self.queries = 0  # tokens looked up
        self.hits = 0  # tokens found
        self._window = window
        self._recent: deque[tuple[int, int, int]] = deque()
        self._recent_totals = [0, 0, 0]

    def observe(self, requests: int, queries: int, hits: int) -> None:
        """Add ``requests`` lookups; the oldest beyond the window leave its hit rate."""
        self.requests += requests
        self.queries += queries
        self.hits += hits
        self._recent.append((requests, queries, hits))
        self._recent_totals = [a + b for a, b in zip(self._recent_totals, self._recent[-1], strict=True)]
        while len(self._recent) > 1 and self._recent_totals[0] > self._window:
            self._recent_totals = [a - b for a, b in zip(self._recent_totals, self._recent.popleft(), strict=True)]

    @property
    def hit_rate(self) -> float:
        _, queries, hits = self._recent_totals
        return hits / queries if queries else 0.0


class KVCacheManager:
    """Gives requests blocks for their tokens, shares full computed blocks, and frees.

    A request's block i holds its positions ``i * block_size ..< (i + 1) * block_size``. Only full blocks below
    ``num_computed_tokens`` of committed tokens are ever hashed, so a rejected draft is never shared: its slot is
    overwritten by the true token before the block can count as full.

    Args:
        num_blocks: blocks in the pool, the null block included.
        block_size: tokens per block.
        enable_caching: whether blocks are shared by content.
    """

    def __init__(self, *, num_blocks: int, block_size: int, enable_caching: bool) -> None:
        self.block_pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.enable_caching = enable_caching
        self.stats = PrefixCacheStats()
        self.blocks: dict[str, list[int]] = {}  # request id -> block ids
        self._num_hashed_blocks: dict[str, int] = {}  # request id -> leading blocks already offered for sharing

    @property
    def usage(self) -> float:
        """Share of the usable blocks that requests hold, 0 to 1."""
        return 1.0 - self.block_pool.num_free_blocks / self.block_pool.num_usable_blocks

    @property
    def max_request_tokens(self) -> int:
        """The most tokens one request can reach with the whole pool; the last one is never computed."""
        return self.block_pool.num_usable_blocks * self.block_size + 1

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def extend_hashes(self, request: Request) -> None:
        """Bring ``request.block_hashes`` up to its full blocks of known tokens."""
        if not self.enable_caching:
            return
        hashes, size = request.block_hashes, self.block_size
        for i in range(len(hashes), request.num_tokens // size):
            tokens = request.all_token_ids[i * size : (i + 1) * size]
            hashes.append(hash_block(hashes[-1], tokens) if i else hash_block(NONE_HASH, tokens, request.cache_salt))

    def get_computed_blocks(self, request: Request) -> list[int]:
        """Return the longest cached prefix as block ids; at least one token is left to compute.

        Nothing is reserved: pass the blocks to :meth:`allocate_slots` in the same step.
        """
        block_ids: list[int] = []
        if self.enable_caching and not request.sampling_params.skip_reading_prefix_cache:
            for block_hash in request.block_hashes[: (request.num_tokens - 1) // self.block_size]:
                block_id = self.block_pool.cached.get(block_hash)
                if block_id is None:
                    break
                block_ids.append(block_id)
        return block_ids

    def can_allocate(self, num_tokens: int, computed_blocks: list[int]) -> bool:
        """Tell whether a new request could hold ``num_tokens`` tokens now, given its cached prefix."""
        pool = self.block_pool
        taken_from_free = sum(pool.blocks[b].ref_count == 0 for b in computed_blocks)
        num_new = self.num_blocks_for(num_tokens) - len(computed_blocks)
        return num_new + taken_from_free <= pool.num_free_blocks

    def allocate_slots(
        self, request: Request, num_tokens: int, computed_blocks: list[int] | None = None
    ) -> list[int] | None:
        """Make the request's blocks cover its first ``num_tokens`` positions.

        Args:
            request: the request; on its admission, with ``computed_blocks`` from :meth:`get_computed_blocks`.
            num_tokens: positions to cover.
            computed_blocks: cached prefix that the request starts with; None for a request that has blocks.

        Returns:
            The ids appended to its block table (the cached prefix included), or None when the pool has too few: then
            nothing has changed.
        """
        if computed_blocks is None:
            held = self.blocks[request.request_id]
            num_new = self.num_blocks_for(num_tokens) - len(held)
            if num_new <= 0:
                return []
            if num_new > self.block_pool.num_free_blocks:
                return None
            new_blocks = self.block_pool.allocate(num_new)
            held += new_blocks
            return new_blocks
        if not self.can_allocate(num_tokens, computed_blocks):
            return None
        self.block_pool.touch(computed_blocks)
        num_new = self.num_blocks_for(num_tokens) - len(computed_blocks)
        block_ids = computed_blocks + self.block_pool.allocate(num_new)
        self.blocks[request.request_id] = list(block_ids)
        self._num_hashed_blocks[request.request_id] = len(computed_blocks)
        return block_ids

    def num_tokens_without_preemption(self, request: Request) -> int:
        """Return how many positions the request could cover with its blocks and all free ones."""
        held = len(self.blocks[request.request_id])
        return (held + self.block_pool.num_free_blocks) * self.block_size

    def cache_blocks(self, request: Request) -> None:
        """Offer for sharing the blocks that have become full of computed, committed tokens."""
        if not self.enable_caching:
            return
        self.extend_hashes(request)
        blocks = self.blocks[request.request_id]
        num_full = request.num_computed_tokens // self.block_size
        for i in range(self._num_hashed_blocks[request.request_id], num_full):
            self.block_pool.cache(blocks[i], request.block_hashes[i])
        self._num_hashed_blocks[request.request_id] = num_full

    def trim(self, request: Request) -> None:
        """Free the blocks behind the known tokens: they hold nothing but rejected drafts."""
        blocks = self.blocks[request.request_id]
        keep = self.num_blocks_for(request.num_tokens)
        if keep < len(blocks):
            self.block_pool.release(reversed(blocks[keep:]))
            del blocks[keep:]

    def free(self, request: Request) -> None:
        """Return all of the request's blocks, its last ones first; does nothing for a request without any."""
        self.block_pool.release(reversed(self.blocks.pop(request.request_id, [])))
        self._num_hashed_blocks.pop(request.request_id, None)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; False, and no change, while any request holds blocks."""
        return self.block_pool.reset_cache()

    def check_integrity(self) -> None:
        """Assert every invariant of pool and tables: for tests, after each step."""
        pool = self.block_pool
        held = Counter(block_id for blocks in self.blocks.values() for block_id in blocks)
        for block_id, block in enumerate(pool.blocks):
            assert block.ref_count == held[block_id], (
                f"block {block_id}: {block.ref_count} references, {held[block_id]} holders"
            )
            if block_id != NULL_BLOCK:
                assert (block.ref_count == 0) == (block_id in pool.free), (
                    f"block {block_id} in use and free, or neither"
                )
            if block.block_hash is not None:
                assert pool.cached.get(block.block_hash) == block_id, (
                    f"block {block_id} has a hash that leads elsewhere"
                )
        assert NULL_BLOCK not in (*pool.free, *held), "the null block was handed out"
        assert all(pool.blocks[b].block_hash == h for h, b in pool.cached.items()), (
            "a cached hash leads to another block"
        )
        assert all(len(set(blocks)) == len(blocks) for blocks in self.blocks.values()), "a block table repeats a block"
        assert self.blocks.keys() == self._num_hashed_blocks.keys(), "tables and hash progress disagree"
