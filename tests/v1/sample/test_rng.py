import numpy as np

from engine_v1.sample.rng import derive_seed, uniforms


def numbers(seed, sample_index, output_index):
    arrays = np.broadcast_arrays(
        np.array(seed, np.uint64), np.asarray(sample_index, np.int64), np.asarray(output_index, np.int64)
    )
    return uniforms(*(array.flatten() for array in arrays)).reshape(arrays[0].shape)


def test_a_number_depends_on_seed_sample_and_position_alone():
    """A position's number is the same whether computed alone or among others, and differs from all others'."""
    cases = [(s, i, j) for s in (0, 1, 2**63, 2**64 - 1) for i in range(3) for j in range(50)]
    together = numbers([s for s, _, _ in cases], [i for _, i, _ in cases], [j for _, _, j in cases])
    alone = [numbers([s], [i], [j])[0] for s, i, j in cases]
    assert together.tolist() == alone
    assert len(set(alone)) == len(alone)


def test_numbers_are_uniform():
    """100,000 consecutive positions fill 20 bins evenly (chi-square at 99.9 %), within [0, 1)."""
    values = numbers(7, 0, np.arange(100_000))
    assert values.min() >= 0.0
    assert values.max() < 1.0
    counts = np.histogram(values, 20, (0, 1))[0]
    assert ((counts - 5000) ** 2 / 5000).sum() < 43.8  # 19 degrees of freedom


def test_neighbouring_seeds_and_positions_are_uncorrelated():
    """Numbers of seeds s and s + 1, and of positions j and j + 1, do not follow each other."""
    grid = numbers(np.arange(300)[:, None], 0, np.arange(300)[None, :])
    for a, b in ((grid[:-1], grid[1:]), (grid[:, :-1], grid[:, 1:])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.02


def test_a_request_without_seed_gets_one_from_its_arrival():
    """The same engine seed and arrival number give the same seed, others another; all are uint64."""
    assert derive_seed(0, 5) == derive_seed(0, 5)
    seeds = {derive_seed(e, n) for e in range(20) for n in range(200)}
    assert len(seeds) == 4000
    assert all(0 <= s < 2**64 for s in seeds)
