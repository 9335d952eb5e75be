"""What followed which tokens how often: a hash table of fixed size, learnt and unlearnt token by token.

A context is the last 1, 2, 4 or 8 tokens. Its node counts all tokens that followed it and names the last three
different ones, most recent first, each with its own count. Where the table is full a new context takes the place of the
rarest of the eight that could hold it, so memory never grows and no operation is longer than another.

A table is one int32 array: a key per node, then the nodes. Contexts are told apart by a hash alone, by 29 bits of it in
the key and some more in the place, which is enough for guesses.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import int32, int64

from engine_v1.kernels.jit import jit, kernel_part, warmup
from engine_v1.spec_decode.hashing import mix, place

ORDERS = (1, 2, 4, 8)  # lengths of the contexts
MAX_ORDER = ORDERS[-1]
SLOTS = 3  # successors that a node names
WAYS = 8  # nodes that may hold a context
NUM_USED, TOKENS, COUNTS = 1, 2, 2 + SLOTS  # what stands where in a node; the total stands first
NODE_SIZE = COUNTS + SLOTS  # int32s
ENTRY_SIZE = 1 + NODE_SIZE  # with its key


class SuccessorTable:
    """An empty table, or one that was saved, and what kernels need to reach it.

    Args:
        num_nodes: at least so many nodes, rounded up to a power of two; 36 bytes each.
        array: int32[ENTRY_SIZE * a power of two], in place of an empty one.
    """

    def __init__(self, num_nodes: int = 0, array: npt.NDArray[np.int32] | None = None) -> None:
        if array is None:
            array = np.zeros(ENTRY_SIZE * (1 << (max(num_nodes, WAYS) - 1).bit_length()), np.int32)
        self.array = array
        self.capacity = len(array) // ENTRY_SIZE
        self.address: int = array.ctypes.data

    def learn(self, text: npt.NDArray[np.int32], min_order: int = 1) -> None:
        """Count the successors in a text, after contexts of at least ``min_order`` tokens."""
        count_text(text, self.array, min_order, 1)

    def forget(self, text: npt.NDArray[np.int32], min_order: int = 1) -> None:
        """Take back what was learnt."""
        count_text(text, self.array, min_order, -1)


@kernel_part(forceinline=True)
def _key(hashed: int) -> int:
    """Return what stands for a context beside its node; never 0, which is that of a free one."""
    return ((hashed >> 33) & 0x3FFFFFFF) | 1


@kernel_part
def find_node(table: Any, capacity: int, hashed: int) -> int:
    """Return the number of a context's node, or -1."""
    first: int = place(hashed, capacity // WAYS) * WAYS
    key = _key(hashed)
    for node in range(first, first + WAYS):
        if table[node] == key:
            return node
    return -1


@kernel_part
def _new_node(table: Any, capacity: int, hashed: int) -> int:
    """Give a context that has none a node, in place of the rarest if need be; return its number."""
    first: int = place(hashed, capacity // WAYS) * WAYS
    best = first
    for node in range(first, first + WAYS):
        if table[node] == 0:
            best = node
            break
        if table[capacity + node * NODE_SIZE] < table[capacity + best * NODE_SIZE]:
            best = node
    table[best] = _key(hashed)
    for i in range(NODE_SIZE):
        table[capacity + best * NODE_SIZE + i] = 0
    return best


@kernel_part
def _count_up(table: Any, at: int, token: int) -> None:
    """Count a token that followed, and move it to the front; the rarest, then oldest, of the others makes room."""
    used = table[at + NUM_USED]
    tokens, counts = at + TOKENS, at + COUNTS
    slot = 0
    while slot < used and table[tokens + slot] != token:
        slot += 1
    count = 1
    if slot < used:
        count += table[counts + slot]
    elif used < SLOTS:
        table[at + NUM_USED] = used + 1
    else:
        slot = SLOTS - 1
        for other in range(SLOTS - 2, -1, -1):
            if table[counts + other] < table[counts + slot]:
                slot = other
    for i in range(slot, 0, -1):
        table[tokens + i] = table[tokens + i - 1]
        table[counts + i] = table[counts + i - 1]
    table[tokens] = token
    table[counts] = count
    table[at] += 1


@kernel_part
def _count_down(table: Any, at: int, token: int) -> None:
    """Take back one count of a token; without any left it leaves its slot."""
    used = table[at + NUM_USED]
    tokens, counts = at + TOKENS, at + COUNTS
    table[at] -= 1
    for slot in range(used):
        if table[tokens + slot] != token:
            continue
        table[counts + slot] -= 1
        if table[counts + slot] == 0:
            for i in range(slot, used - 1):
                table[tokens + i] = table[tokens + i + 1]
                table[counts + i] = table[counts + i + 1]
            table[at + NUM_USED] = used - 1
        break


@kernel_part
def count_token(
    tokens: Any,
    start: int,
    end: int,
    table: Any,
    capacity: int,
    min_order: int,
    max_order: int,
    by: int,
) -> None:
    """Count ``tokens[end]`` after the contexts before it in ``tokens[start:end]`` (by 1), or take it back (by -1)."""
    hashed = 0
    num_mixed = 0
    for order in ORDERS:
        if order > end - start or order > max_order:
            break
        while num_mixed < order:
            num_mixed += 1
            hashed = mix(hashed, tokens[end - num_mixed])
        if order < min_order:
            continue
        node = find_node(table, capacity, hashed)
        if by < 0:
            if node >= 0:
                _count_down(table, capacity + node * NODE_SIZE, tokens[end])
                if table[capacity + node * NODE_SIZE] <= 0:
                    table[node] = 0
        else:
            if node < 0:
                node = _new_node(table, capacity, hashed)
            _count_up(table, capacity + node * NODE_SIZE, tokens[end])


@jit
def count_text(tokens: Any, table: Any, min_order: int, by: int) -> None:
    """Learn a whole text, or take it back.

    Args:
        tokens: int32[num_tokens].
        table: int32[ENTRY_SIZE * capacity].
        min_order: shortest contexts that count.
        by: 1 to learn, -1 to take back.

    Cost: about 0.1 us per token and order in a table larger than the caches.
    """
    capacity = table.shape[0] // ENTRY_SIZE
    for end in range(1, tokens.shape[0]):
        count_token(tokens, 0, end, table, capacity, min_order, MAX_ORDER, by)


def compile_kernels() -> None:
    """Compile :func:`count_text`, or load it, in its one form."""
    warmup(count_text, [(int32[::1], int32[::1], int64, int64)])
