"""The pool of KV-cache blocks: free list, reference counts, and which full block holds which tokens."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

NULL_BLOCK = 0  # never handed out: the target of padding


@dataclass(slots=True)
class Block:
    """A block's bookkeeping; what it stores lives in the attention backend."""

    ref_count: int = 0
    block_hash: bytes | None = None  # set while its content can be shared


class BlockPool:
    """Hands out blocks, shares full ones by hash and evicts the least recently used.

    Invariants: a block is free exactly when its ``ref_count`` is 0; a block has a ``block_hash`` exactly when
    ``cached`` maps that hash to it; the null block is neither free nor cached. Free blocks keep their content and hash
    until they are handed out again. Blocks without a hash are handed out before any cached one is evicted.

    Args:
        num_blocks: blocks in all, the null block included.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 2, "the null block and one to hand out"
        self.blocks = [Block() for _ in range(num_blocks)]
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))  # next one first
        self.cached: dict[bytes, int] = {}

    @property
    def num_usable_blocks(self) -> int:
        return len(self.blocks) - 1

    @property
    def num_free_blocks(self) -> int:
        return len(self.free)

    def allocate(self, count: int) -> list[int]:
        """Hand out ``count`` blocks with one reference each, dropping what they had cached.

        Raises:
            ValueError: fewer are free; nothing has changed.
        """
        if count > len(self.free):
            raise ValueError(f"No free blocks available: {count} wanted, {len(self.free)} free")
        block_ids = [self.free.popitem(last=False)[0] for _ in range(count)]
        for block_id in block_ids:
            block = self.blocks[block_id]
            if block.block_hash is not None:
                del self.cached[block.block_hash]
                block.block_hash = None
            block.ref_count = 1
        return block_ids

    def touch(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each of these cached blocks, which thereby leave the free list."""
        for block_id in block_ids:
            block = self.blocks[block_id]
            if block.ref_count == 0:
                del self.free[block_id]
            block.ref_count += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Drop a reference to each; those that nobody holds join the free list in this order.

        Give a request's blocks last first, so that its start outlives its end in the cache.
        """
        for block_id in block_ids:
            block = self.blocks[block_id]
            assert block.ref_count > 0, f"block {block_id} released more often than referenced"
            block.ref_count -= 1
            if block.ref_count == 0:
                self.free[block_id] = None
                if block.block_hash is None:
                    self.free.move_to_end(block_id, last=False)

    def cache(self, block_id: int, block_hash: bytes) -> None:
        """Let others share this full block; where another block already holds the same tokens, that one stays."""
        if block_hash not in self.cached:
            self.cached[block_hash] = block_id
            self.blocks[block_id].block_hash = block_hash

    def reset_cache(self) -> bool:
        """Forget all cached content; refused (False) while any block is in use."""
        if self.num_free_blocks != self.num_usable_blocks:
            return False
        for block_id in self.cached.values():
            self.blocks[block_id].block_hash = None
        self.cached.clear()
        return True
