"""Hashes of the last tokens of a text, by which the drafters' tables find what followed them."""

from engine_v1.kernels.jit import kernel_part

MULTIPLIER = 0x5851F42D4C957F2D  # Knuth's, of MMIX: odd, with its bits well spread


@kernel_part(forceinline=True)
def mix(hashed: int, token: int) -> int:
    """Return the hash of tokens that reach one further towards the start of the text; 0 is that of none."""
    hashed = (hashed + token + 1) * MULTIPLIER
    return hashed ^ (hashed >> 32)


@kernel_part(forceinline=True)
def place(hashed: int, num_places: int) -> int:
    """Return which of so many places, a power of two, a hash belongs to."""
    return (hashed ^ (hashed >> 29)) & (num_places - 1)
