"""What is kept of earlier outputs: bounds, partitions, and tables on disk."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_v1.spec_decode.shared_memory import (
    MAX_PARTITIONS,
    SharedMemory,
    corpus_table,
    load_table,
    save_table,
)
from engine_v1.spec_decode.successors import ENTRY_SIZE, ORDERS


def contexts(partition):
    """The number of contexts that a partition knows."""
    table = partition.table
    return int((table.array[: table.capacity] != 0).sum())


class TestBounds:
    @settings(max_examples=60, deadline=None)
    @given(
        outputs=st.lists(
            st.tuples(st.sampled_from(["a", "b", None]), st.lists(st.integers(0, 3), max_size=30)), max_size=25
        ),
        max_requests=st.integers(0, 5),
        max_tokens=st.integers(0, 60),
    )
    def test_bounds_hold_over_all_partitions_and_the_newest_stay(self, outputs, max_requests, max_tokens):
        """After every output both bounds hold; what is kept is the newest, and the tables know nothing else."""
        memory = SharedMemory(max_requests, max_tokens)
        expected = []
        for salt, output in outputs:
            memory.learn(salt, output)
            text = output[-max_tokens:] if max_tokens else []
            if max_requests and len(text) >= 2:
                expected.append((salt, text))
            while len(expected) > max_requests or sum(len(text) for _, text in expected) > max_tokens:
                expected.pop(0)
            assert memory.num_requests == len(expected) <= max_requests
            assert memory.num_tokens == sum(len(text) for _, text in expected) <= max(0, max_tokens)
        for salt in ("a", "b", None):
            texts = [text for one, text in expected if one == salt]
            fresh = SharedMemory(100, 10_000)
            for text in texts:
                fresh.learn(salt, text)
            assert contexts(memory.partition(salt)) == contexts(fresh.partition(salt))

    def test_tables_shrink_with_what_they_hold(self):
        """A partition whose outputs have gone does not keep their room."""
        memory = SharedMemory(10, 10_000)
        rng = np.random.default_rng(0)
        memory.learn("a", rng.integers(0, 10_000, 5000).tolist())
        large = memory.partition("a").table.capacity
        for _ in range(10):
            memory.learn("b", [1, 2, 3])
        assert memory.partition("a").table.capacity * 8 * len(ORDERS) <= large

    def test_the_partition_unused_for_longest_goes_as_a_whole(self):
        """With one salt too many the first is forgotten, unless it has been used since."""
        memory = SharedMemory(1000, 10_000)
        for number in range(MAX_PARTITIONS):
            memory.learn(str(number), [1, 2, 3])
        memory.partition("0")
        memory.learn("new", [1, 2, 3])
        assert memory.num_requests == MAX_PARTITIONS
        assert contexts(memory.partition("0")) > 0
        assert contexts(memory.partition("1")) == 0


class TestDisk:
    def test_a_table_comes_back_as_it_was(self, tmp_path):
        """Saved and loaded, it holds the same counts."""
        table = corpus_table([[1, 2, 3, 1, 2], [4, 5, 4]])
        save_table(tmp_path / "corpus.npy", table)
        loaded = load_table(tmp_path / "corpus.npy")
        assert (loaded.array == table.array).all()
        assert [path.name for path in tmp_path.iterdir()] == ["corpus.npy"]

    @pytest.mark.parametrize(
        "array", [np.zeros(ENTRY_SIZE * 8, np.int64), np.zeros(ENTRY_SIZE * 9, np.int32), np.zeros(0, np.int32)]
    )
    def test_another_array_is_refused(self, tmp_path, array):
        """The error names the file."""
        np.save(tmp_path / "corpus.npy", array)
        with pytest.raises(ValueError, match=r"corpus\.npy holds no table"):
            load_table(tmp_path / "corpus.npy")
