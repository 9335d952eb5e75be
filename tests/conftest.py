"""Fixtures that several parts share."""

import os
import signal
from pathlib import Path

import pytest
import torch

# The tensors of most tests are tiny: a second thread of torch's costs more than it gives. Kernels keep all threads.
torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def interrupts():
    """Let Ctrl-C raise: a shell that starts the suite in the background has it ignored, and tests send it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def one_kernel_thread():
    """Let engines made in this file compute with one thread: for thousands of tiny steps a second one is in the way."""
    from engine_v1.kernels.parallel import num_threads_cached

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        num_threads_cached.cache_clear()
        yield
    num_threads_cached.cache_clear()


@pytest.fixture(scope="session")
def demo_model_path():
    """The demo model's directory; tests that need it are skipped where it can be neither found nor fetched."""
    from engine_v1.models.hub import DEMO_MODEL, resolve_model

    try:
        return resolve_model(DEMO_MODEL)
    except FileNotFoundError as error:
        pytest.skip(f"the demo model is not at hand: {error}")


@pytest.fixture(scope="session")
def spec_bench_questions():
    """The first turns of 60 Spec-Bench prompts; skipped where $ENGINE_V1_SPEC_BENCH does not name the file."""
    from engine_v1.entrypoints.bench_datasets import read_jsonl, spec_bench

    path = os.environ.get("ENGINE_V1_SPEC_BENCH")
    if not path:
        pytest.skip("ENGINE_V1_SPEC_BENCH does not name Spec-Bench's question.jsonl")
    prompts = spec_bench(read_jsonl(Path(path)), 60)
    return [prompt.messages[0]["content"] for prompt in prompts]
