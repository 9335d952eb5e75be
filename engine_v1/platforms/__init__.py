"""What the device at hand can do, chosen once."""

from contextlib import AbstractContextManager
from typing import Protocol

import torch

from engine_v1.config import EngineConfig
from engine_v1.models.loader import LoadedModel
from engine_v1.worker.backend import Backend


class Platform(Protocol):
    """A kind of device."""

    device: torch.device

    def kv_cache_memory_bytes(self, gpu_memory_utilization: float) -> int:
        """Return how much memory the KV cache may take by default, once the weights are loaded."""
        ...

    def cached_head_dim(self, head_dim: int) -> int:
        """Return how many numbers the KV cache stores for a head of ``head_dim``."""
        ...

    def compiling_ahead(self, architecture: str, dtype: torch.dtype) -> AbstractContextManager[object]:
        """Return a context in which a second process may compile what a model's backend will load."""
        ...

    def make_backend(self, loaded: LoadedModel, config: EngineConfig, *, num_blocks: int) -> Backend:
        """Return the fastest backend for this model, with a KV cache of that many blocks."""
        ...


def get_platform(device: str) -> Platform:
    """Return the platform for ``LLM(device=...)``.

    Args:
        device: "cpu", "cuda", "cuda:N", or "auto": CUDA where there is one.

    Raises:
        ValueError: another device, or CUDA asked for where there is none.
    """
    kind = device
    if device == "auto":
        kind = device = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu":
        from engine_v1.platforms.cpu import CpuPlatform

        return CpuPlatform()
    if kind.partition(":")[0] == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"device={device!r} but torch finds no CUDA device; use device='cpu' or 'auto'")
        from engine_v1.platforms.cuda import CudaPlatform

        return CudaPlatform(torch.device(device))
    raise ValueError(f"device={device!r} is not supported; use 'auto', 'cpu' or 'cuda'")
