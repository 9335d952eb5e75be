"""CUDA devices: how much memory the KV cache may take."""

import torch


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
