"""CPUs: how much memory the KV cache may take."""

import os
from pathlib import Path

import torch

_DEFAULT_KV_CACHE_BYTES = 4 << 30  # vLLM's default on CPU; pages are committed as they are used


class CpuPlatform:
    """The host's processors."""

    device = torch.device("cpu")

    def kv_cache_memory_bytes(self, gpu_memory_utilization: float) -> int:  # noqa: ARG002 it is a GPU's
        """Return 4 GiB, or half of the available memory where that is less."""
        return min(_DEFAULT_KV_CACHE_BYTES, available_memory_bytes() // 2)


def available_memory_bytes() -> int:
    """Return the memory that can be had without swapping."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
