"""An LLM inference engine whose scheduler speculates: drafts change nothing but the number of steps."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine_v1.config import SpeculativeConfig
    from engine_v1.engine.engine_thread import EngineDeadError
    from engine_v1.entrypoints.async_llm import AsyncLLM
    from engine_v1.entrypoints.llm import LLM
    from engine_v1.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, SpecDecodeMetrics
    from engine_v1.sampling_params import RequestOutputKind, SamplingParams
    from engine_v1.structured_output.params import StructuredOutputsParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EngineDeadError",
    "Logprob",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "SpecDecodeMetrics",
    "SpeculativeConfig",
    "StructuredOutputsParams",
    "__version__",
]

# Resolved on first use, so that importing the package loads no torch and compiles nothing.
_HOMES = {
    "AsyncLLM": "engine_v1.entrypoints.async_llm",
    "LLM": "engine_v1.entrypoints.llm",
    "CompletionOutput": "engine_v1.outputs",
    "EngineDeadError": "engine_v1.engine.engine_thread",
    "Logprob": "engine_v1.outputs",
    "RequestMetrics": "engine_v1.outputs",
    "RequestOutput": "engine_v1.outputs",
    "RequestOutputKind": "engine_v1.sampling_params",
    "SamplingParams": "engine_v1.sampling_params",
    "SpecDecodeMetrics": "engine_v1.outputs",
    "SpeculativeConfig": "engine_v1.config",
    "StructuredOutputsParams": "engine_v1.structured_output.params",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
