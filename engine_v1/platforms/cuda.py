"""CUDA devices: torch computes, and what memory is left holds the KV cache."""

from contextlib import AbstractContextManager, nullcontext

import torch

from engine_v1.config import EngineConfig
from engine_v1.models.loader import LoadedModel
from engine_v1.worker.backend import Backend, TorchBackend


class CudaPlatform:
    """One CUDA device, driven through torch.

    Args:
        device: which one.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def kv_cache_memory_bytes(self, gpu_memory_utilization: float) -> int:
        """Return what is left of ``gpu_memory_utilization`` of the device after what is in use on it."""
        free, total = torch.cuda.mem_get_info(self.device)
        return max(0, int(total * gpu_memory_utilization) - (total - free))

    def cached_head_dim(self, head_dim: int) -> int:
        """Return ``head_dim``."""
        return head_dim

    def compiling_ahead(self, architecture: str, dtype: torch.dtype) -> AbstractContextManager[object]:  # noqa: ARG002
        """Return a context that does nothing: torch's kernels come compiled."""
        return nullcontext()

    def make_backend(self, loaded: LoadedModel, config: EngineConfig, *, num_blocks: int) -> Backend:
        """Return the torch backend."""
        return TorchBackend.create(loaded, config, num_blocks=num_blocks, device=self.device)
