"""What earlier requests generated, kept as counts of successors and shared by the requests that may see it."""

import os
from collections import OrderedDict, deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from engine_v1.spec_decode.successors import ENTRY_SIZE, ORDERS, WAYS, SuccessorTable, compile_kernels

MAX_PARTITIONS = 64
ADJACENCY_NODES = 1 << 15


class Partition:
    """What the requests of one cache_salt share."""

    def __init__(self) -> None:
        self.texts: deque[npt.NDArray[np.int32]] = deque()  # oldest first
        self.num_tokens = 0
        self.table = SuccessorTable()  # their successors
        self.adjacency = SuccessorTable()  # successors of all that was generated lately, by running requests too


class SharedMemory:
    """The outputs of the last requests, and which token followed which in all that was generated lately.

    Requests of different cache_salts have partitions of their own and never meet. Bounds hold over all partitions:
    the outputs of the oldest requests go first, and the partition unused for longest goes as a whole.

    Invariant: ``num_requests <= max_requests`` and ``num_tokens <= max_tokens``.

    Args:
        max_requests: outputs kept.
        max_tokens: tokens kept, of all outputs.
        min_order: shortest contexts of kept outputs that count.
        recycles: keep adjacencies.

    Cost: 72 to 144 bytes per token and order, in tables that double; 1.2 MB for the adjacencies of a partition.
    """

    def __init__(self, max_requests: int, max_tokens: int, *, min_order: int = 1, recycles: bool = False) -> None:
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self._min_order = min_order
        self._recycles = recycles
        self._num_orders = sum(order >= min_order for order in ORDERS)
        self._partitions: OrderedDict[str | None, Partition] = OrderedDict()  # least recently used first
        self._salts: deque[str | None] = deque()  # of the kept outputs, oldest first
        compile_kernels()

    @property
    def num_requests(self) -> int:
        return len(self._salts)

    @property
    def num_tokens(self) -> int:
        return sum(partition.num_tokens for partition in self._partitions.values())

    def partition(self, cache_salt: str | None) -> Partition:
        """Return a salt's partition, made where there is none."""
        partition = self._partitions.get(cache_salt)
        if partition is None:
            partition = self._partitions[cache_salt] = Partition()
            if self._recycles:
                partition.adjacency = SuccessorTable(ADJACENCY_NODES)
            if len(self._partitions) > MAX_PARTITIONS:
                oldest, _ = self._partitions.popitem(last=False)
                self._salts = deque(salt for salt in self._salts if salt != oldest)
        self._partitions.move_to_end(cache_salt)
        return partition

    def learn(self, cache_salt: str | None, token_ids: Sequence[int]) -> None:
        """Keep an output, and drop the oldest ones as far as the bounds demand."""
        text = np.array(token_ids[-self.max_tokens :] if self.max_tokens else [], np.int32)
        if self.max_requests == 0 or len(text) < 2:
            return
        partition = self.partition(cache_salt)
        partition.texts.append(text)
        partition.num_tokens += len(text)
        self._salts.append(cache_salt)
        if self._num_orders * partition.num_tokens > partition.table.capacity:
            self._make_anew(partition)
        else:
            partition.table.learn(text, self._min_order)
        while self.num_requests > self.max_requests or self.num_tokens > self.max_tokens:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        partition = self._partitions[self._salts.popleft()]
        text = partition.texts.popleft()
        partition.num_tokens -= len(text)
        partition.table.forget(text, self._min_order)
        if partition.table.capacity > max(WAYS, 8 * self._num_orders * partition.num_tokens):
            self._make_anew(partition)

    def _make_anew(self, partition: Partition) -> None:
        """Give a partition a table of the size that its outputs need, twice as many nodes as there can be contexts."""
        partition.table = SuccessorTable(2 * self._num_orders * partition.num_tokens)
        for text in partition.texts:
            partition.table.learn(text, self._min_order)


def corpus_table(texts: Sequence[Sequence[int]]) -> SuccessorTable:
    """Return the successors of reference texts, given as token ids."""
    compile_kernels()
    table = SuccessorTable(len(ORDERS) * sum(map(len, texts)) * 4 // 3)
    for text in texts:
        table.learn(np.array(text, np.int32))
    return table


def save_table(path: Path, table: SuccessorTable) -> None:
    """Write a table to disk in NumPy's format, whole or not at all."""
    partial = path.with_suffix(f".{os.getpid()}.partial")
    with partial.open("wb") as file:
        np.save(file, table.array)
    partial.replace(path)


def load_table(path: Path) -> SuccessorTable:
    """Read a table that :func:`save_table` wrote.

    Raises:
        ValueError: the file holds something else.
    """
    array = np.load(path, allow_pickle=False)
    num_nodes, rest = divmod(array.size, ENTRY_SIZE)
    if array.dtype != np.int32 or array.ndim != 1 or rest or num_nodes.bit_count() != 1:
        raise ValueError(f"{path} holds no table of successors; delete it and it is made again.")
    return SuccessorTable(array=np.ascontiguousarray(array))
