"""Random numbers as a pure function of where they are used, so that drafting cannot shift them."""

import hashlib

import numpy as np
import numpy.typing as npt
from numba import int64, uint64

from engine_v1.kernels.jit import jit, kernel_part

_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def derive_seed(engine_seed: int, arrival_number: int) -> int:
    """Return the uint64 seed of a request that asked for none, from the engine's seed and its arrival number."""
    digest = hashlib.blake2b(f"{engine_seed}/{arrival_number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


@kernel_part
def _mix(z: np.uint64) -> np.uint64:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@jit
def uniforms(
    seeds: npt.NDArray[np.uint64],
    sample_indices: npt.NDArray[np.int64],
    output_indices: npt.NDArray[np.int64],
) -> npt.NDArray[np.float64]:
    """Return one number in [0, 1) per row, a function of its three arguments alone.

    Args:
        seeds: uint64[num_rows], of the requests.
        sample_indices: int64[num_rows], which of the request's n samples.
        output_indices: int64[num_rows], which output token the row decides, from 0.

    Returns:
        float64[num_rows], multiples of 2**-53.

    Source: the finaliser of SplitMix64 (Steele, Lea, Flood 2014), applied as a counter-based hash.
    """
    numbers = np.empty(len(seeds))
    for i in range(len(seeds)):
        z = _mix(seeds[i] + _GAMMA)
        z = _mix(z + _GAMMA * (np.uint64(sample_indices[i]) + np.uint64(1)))
        z = _mix(z + _GAMMA * (np.uint64(output_indices[i]) + np.uint64(1)))
        numbers[i] = np.float64(z >> np.uint64(11)) * 2.0**-53
    return numbers


# The one form in which it is compiled.
UNIFORMS_SIGNATURE = (uint64[::1], int64[::1], int64[::1])
