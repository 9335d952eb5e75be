"""Numba CPU kernels: arithmetic only, a row's result independent of its batch."""
