"""CPUs: which backend computes a model, and how much memory the KV cache may take."""

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from engine_v1.config import EngineConfig
from engine_v1.kernels.formats import padded
from engine_v1.kernels.parallel import parallel_entry
from engine_v1.models.gguf_checkpoint import is_converted_gguf, read_matrices
from engine_v1.models.llama import EMBEDDING_NAME, LlamaForCausalLM
from engine_v1.models.loader import LoadedModel
from engine_v1.models.registry import get_model_class
from engine_v1.worker.backend import Backend, TorchBackend

if TYPE_CHECKING:
    from engine_v1.kernels.packed_weights import PackedWeights

BACKEND_SWITCH = "ENGINE_V1_CPU_BACKEND"  # "kernels" or "torch"; unset: kernels wherever they can compute the model
_DEFAULT_KV_CACHE_BYTES = 4 << 30  # vLLM's default on CPU; pages are committed as they are used


class CpuPlatform:
    """The host's processors.

    Raises:
        ForkedProcessError: this process was forked after kernels had run.
    """

    device = torch.device("cpu")

    def __init__(self) -> None:
        # Before anything is loaded: torch's threads do not survive a fork either, and would wait for ever.
        parallel_entry.check_process()

    def kv_cache_memory_bytes(self, gpu_memory_utilization: float) -> int:  # noqa: ARG002 it is a GPU's
        """Return 4 GiB, or half of the available memory where that is less."""
        return min(_DEFAULT_KV_CACHE_BYTES, available_memory_bytes() // 2)

    def cached_head_dim(self, head_dim: int) -> int:
        """Return ``head_dim`` rounded up to whole tiles of the kernels."""
        return padded(head_dim)

    def compiling_ahead(self, architecture: str, dtype: torch.dtype) -> AbstractContextManager[object]:
        """Return a context in which a second process compiles kernels, on a machine that has not compiled them yet."""
        uses_kernels = os.environ.get(BACKEND_SWITCH, "") != "torch"
        if not uses_kernels or not _has_kernels(get_model_class([architecture]), dtype):
            return nullcontext()
        from engine_v1.kernels.compile_ahead import compiling_ahead
        from engine_v1.kernels.decoder import row_dtype

        return compiling_ahead(row_dtype(dtype))

    def make_backend(self, loaded: LoadedModel, config: EngineConfig, *, num_blocks: int) -> Backend:
        """Return the Numba kernels for the Llama family in bfloat16 or float32, torch for anything else.

        Raises:
            ValueError: the environment asks for kernels where there are none, or for something else.
        """
        wanted = os.environ.get(BACKEND_SWITCH, "")
        if wanted not in ("", "kernels", "torch"):
            raise ValueError(f"{BACKEND_SWITCH}={wanted!r} must be 'kernels' or 'torch'; unset it for the default")
        model = loaded.model
        can_use_kernels = _has_kernels(type(model), loaded.dtype)
        if wanted == "kernels" and not can_use_kernels:
            raise ValueError(
                f"{BACKEND_SWITCH}='kernels' but there are none for {type(model).__name__} in {loaded.dtype}; "
                "unset it to compute through torch"
            )
        quantization = config.model.quantization
        if wanted == "torch" or not can_use_kernels:
            return TorchBackend.create(loaded, config, num_blocks=num_blocks, device=self.device)
        from engine_v1.kernels.decoder import CpuDecoder
        from engine_v1.worker.cpu_backend import CpuBackend, compile_sampling

        assert isinstance(model, LlamaForCausalLM), "kernels were found to fit"
        weights = packed_weights(loaded, quantization)
        compile_sampling()  # before the decoder's kernels, which a second process may be at
        decoder = CpuDecoder(
            model,
            num_blocks=num_blocks,
            block_size=config.cache.block_size,
            max_num_tokens=config.scheduler.max_num_batched_tokens,
            max_model_len=config.scheduler.max_model_len,
            weights=weights,
        )
        return CpuBackend(decoder, config.model.logprobs_mode)


def _has_kernels(model_class: type, dtype: torch.dtype) -> bool:
    """Say whether there are kernels for a model. A subclass of Llama may compute something else than they do."""
    return model_class is LlamaForCausalLM and dtype != torch.float16


def packed_weights(loaded: LoadedModel, quantization: str | None) -> "PackedWeights":
    """Map a model's packed weights from the cache directory, or read and pack them and keep them there.

    Either way the model's embedding is there afterwards.

    Raises:
        FileNotFoundError: a file of the checkpoint, or the GGUF of its blocks, is missing.
        ValueError: "gguf" for a checkpoint that is none, or whose blocks there are no kernels for.
    """
    from engine_v1.kernels import weight_cache
    from engine_v1.kernels.decoder import row_dtype
    from engine_v1.kernels.packed_weights import pack_weights

    if quantization == "gguf" and not is_converted_gguf(loaded.directory):
        raise ValueError(
            f"quantization='gguf' computes with a GGUF file's blocks, and {loaded.directory} is none; "
            "use quantization='int8'"
        )
    model: Any = loaded.model
    path = weight_cache.weights_path(loaded.weights.files, loaded.config, loaded.dtype, quantization)
    weights = None if path is None else weight_cache.read_weights(path)
    embedding = None if weights is None else loaded.weights.tensor(EMBEDDING_NAME)
    if weights is not None and embedding is not None:
        model.embed = embedding.to(loaded.dtype)
        return weights
    loaded.read_weights()
    blocks = read_matrices(loaded.directory) if quantization == "gguf" else None
    # Nothing else reads the matrices, and a large model must not be in memory twice.
    weights = pack_weights(model, row_dtype(loaded.dtype), quantization=quantization, blocks=blocks, free_weights=True)
    if path is not None:
        weight_cache.write_weights(path, weights)
    return weights


def available_memory_bytes() -> int:
    """Return the memory that can be had without swapping."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
