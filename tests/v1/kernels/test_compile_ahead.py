import sys

import numpy as np
import pytest
import torch

from engine_v1.kernels import compile_ahead, forward
from engine_v1.kernels import jit as jit_module
from engine_v1.kernels.compile_ahead import compile_kernels, compiling_ahead
from engine_v1.kernels.decoder import CpuDecoder
from engine_v1.kernels.jit import cache_directory, warmup
from engine_v1.kernels.logprobs import logprob_rows
from engine_v1.kernels.parallel import num_threads
from engine_v1.kernels.step_layout import LAY_OUT_SIGNATURE, lay_out
from engine_v1.platforms import get_platform
from engine_v1.worker.cpu_backend import compile_sampling
from tests.v1.kernels.models import make_model

BF16 = np.dtype(np.uint16)
SMALL_KERNEL = """
from numba import types
from engine_v1.kernels.jit import native_function

SIGNATURE = types.int64(types.int64)

def double(x):
    return 2 * x

def compile_it():
    return native_function(double, SIGNATURE)
"""


@pytest.fixture
def small(monkeypatch, tmp_path):
    """A machine of two CPUs that has compiled nothing, and a module whose one small kernel is the largest there is."""
    monkeypatch.setenv("ENGINE_V1_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(compile_ahead, "num_threads", lambda: 2)
    (tmp_path / "small_kernel.py").write_text(SMALL_KERNEL)
    monkeypatch.syspath_prepend(tmp_path)
    cache_directory.cache_clear()
    import small_kernel

    monkeypatch.setattr(compile_ahead, "_PROGRAM", "import small_kernel; small_kernel.compile_it()")
    monkeypatch.setattr(compile_ahead, "_kernels", lambda _: [(small_kernel.double, small_kernel.compile_it)])
    yield small_kernel
    del sys.modules["small_kernel"]
    cache_directory.cache_clear()


def was_loaded(small):
    """Compile a small kernel, or load it; say which."""
    assert small.compile_it()
    return jit_module._native_functions[small.double, str(small.SIGNATURE)].cache_hits == 1


def test_what_the_second_process_compiled_is_loaded(small):
    """A kernel is compiled once, by the second process, and later starts have no such process."""
    with compiling_ahead(BF16) as process:
        assert process.wait(timeout=60) == 0
        assert was_loaded(small)
    with compiling_ahead(BF16) as process:
        assert process is None


def test_a_second_process_that_dies_changes_nothing(small):
    """Where the second process ends early the engine's own compiles."""
    with compiling_ahead(BF16) as process:
        process.kill()
        process.wait()
        assert not was_loaded(small)


@pytest.mark.parametrize("executable", ["", None, "/bin/false", "/nowhere/python"])
def test_without_a_python_to_start_there_is_no_second_process(small, monkeypatch, executable):
    """A program that contains Python is not started again, and one that is missing is no error."""
    monkeypatch.setattr(sys, "executable", executable)
    with compiling_ahead(BF16) as process:
        assert process is None
        assert not was_loaded(small)


def test_one_cpu_has_no_second_process(small, monkeypatch):
    """Where both would share one CPU nothing would be gained."""
    monkeypatch.setattr(compile_ahead, "num_threads", num_threads)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with compiling_ahead(BF16) as process:
        assert process is None


def test_nothing_writable_means_no_second_process(small, monkeypatch, tmp_path):
    """What a second process compiles could not be loaded."""
    monkeypatch.setenv("ENGINE_V1_CACHE", str(tmp_path / "small_kernel.py"))
    cache_directory.cache_clear()
    with compiling_ahead(BF16) as process:
        assert process is None


@pytest.mark.usefixtures("small")
def test_the_second_process_is_gone_after_a_failed_start(monkeypatch):
    """It neither runs on nor stays as a zombie."""
    monkeypatch.setattr(compile_ahead, "_PROGRAM", "import time; time.sleep(600)")
    with pytest.raises(ValueError, match="no such model"), compiling_ahead(BF16) as process:
        raise ValueError("no such model")
    assert process.returncode is not None


def test_kernels_that_somebody_is_at_are_left_alone(small):
    """The second process does not wait for the first."""
    with jit_module._kernel_lock(small.double):
        compile_kernels(BF16)
    assert not jit_module.is_kept(small.double)
    compile_kernels(BF16)
    assert jit_module.is_kept(small.double)


@pytest.mark.parametrize("act", [BF16, np.dtype(np.float32)], ids=str)
def test_the_forms_are_those_that_an_engine_loads(act):
    """The second process compiles what an engine of that dtype needs for unquantised weights, and nothing else."""
    model = make_model(dtype=torch.bfloat16 if act == BF16 else torch.float32)
    CpuDecoder(model, num_blocks=2, block_size=16, max_num_tokens=16)
    compile_sampling()
    warmup(lay_out, [LAY_OUT_SIGNATURE])

    def compiled():
        kernels = (logprob_rows, forward.begin_step, lay_out)
        return len(jit_module._native_functions), [list(kernel.overloads) for kernel in kernels]

    before = compiled()
    compile_kernels(act)
    assert compiled() == before


def test_models_without_kernels_have_no_second_process(monkeypatch):
    """float16, and models that torch computes, need none of the kernels."""
    monkeypatch.setattr(compile_ahead, "is_kept", lambda _: False)
    platform = get_platform("cpu")
    with platform.compiling_ahead("LlamaForCausalLM", torch.float16) as process:
        assert process is None
    monkeypatch.setenv("ENGINE_V1_CPU_BACKEND", "torch")
    with platform.compiling_ahead("LlamaForCausalLM", torch.bfloat16) as process:
        assert process is None
