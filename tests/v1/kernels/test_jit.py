import os
import subprocess
import sys
from pathlib import Path

import numba
import pytest
from numba import types

from engine_v1.kernels import jit as jit_module
from engine_v1.kernels.jit import cache_directory, is_being_compiled, jit, kernel_part, warmup
from engine_v1.paths import cache_root


@jit
def double(x):
    return 2 * x


@pytest.fixture
def fresh_directory():
    """Computes the cache directory anew, before and after."""
    cache_directory.cache_clear()
    yield cache_directory
    cache_directory.cache_clear()


def test_decorating_compiles_nothing():
    """A kernel is compiled when it is warmed up, and numba's configuration is as before."""

    @jit
    def kernel(x):
        return x + 1

    assert not kernel.overloads
    assert numba.config.CACHE_DIR == ""
    warmup(kernel, [(types.int64,)])
    assert kernel(2) == 3


def test_parts_are_compiled_within_their_kernel():
    """Through several levels and for several types; Python gets an error from what there is no machine code of."""

    @kernel_part
    def twice(x):
        return x + x

    @kernel_part
    def four_times(x):
        return twice(twice(x))

    @jit(cache=False)
    def kernel(x, y):
        return four_times(x) + twice(y)

    assert kernel(1, 0.25) == 4.5
    assert kernel(1.5, 1) == 8.0
    for argument in (1, 1.5):
        with pytest.raises(KeyError):
            four_times(argument)
    library = four_times.overloads[types.int64,].library
    assert not library.codegen._engine.is_symbol_defined(four_times.overloads[types.int64,].fndesc.llvm_func_name)


def test_a_new_type_is_an_error_after_warm_up():
    """What was not warmed up does not compile later."""
    warmup(double, [(types.int64,)])
    with pytest.raises(TypeError, match="No matching definition"):
        double("two")
    warmup(double, [(types.float64,)])
    assert double(1.5) == 3.0


@pytest.mark.parametrize("switch", jit_module.KERNEL_SWITCHES)
def test_switches_have_directories_of_their_own(switch, monkeypatch, tmp_path, fresh_directory):
    """Code compiled with a switch on is never loaded with it off."""
    monkeypatch.setenv("ENGINE_V1_CACHE", str(tmp_path))
    monkeypatch.setenv(switch, "0")
    before = fresh_directory()
    cache_directory.cache_clear()
    monkeypatch.setenv(switch, "1")
    assert fresh_directory() != before


def test_sources_are_part_of_the_key(monkeypatch, tmp_path, fresh_directory):
    """Other kernel sources, another directory."""
    monkeypatch.setenv("ENGINE_V1_CACHE", str(tmp_path))
    before = fresh_directory()
    cache_directory.cache_clear()
    monkeypatch.setattr(jit_module, "KERNEL_SOURCES", jit_module.KERNEL_SOURCES[:1])
    assert fresh_directory() != before


def test_nothing_writable_means_no_cache(monkeypatch, tmp_path, fresh_directory):
    """Where no directory can be made kernels are compiled and not kept."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("ENGINE_V1_CACHE", str(blocked / "cache"))
    assert cache_root() is None
    assert fresh_directory() is None

    @jit
    def kernel(x):
        return x - 1

    warmup(kernel, [(types.int64,)])
    assert kernel(2) == 1


def test_starts_at_once_compile_once_and_load(tmp_path):
    """Four processes that start together all get working kernels; a fifth loads what they left."""
    module = tmp_path / "kernel_of_test.py"
    module.write_text(
        "from numba import types\nfrom engine_v1.kernels.jit import jit, warmup\n"
        "@jit\ndef triple(x):\n    return 3 * x\n"
        "warmup(triple, [(types.int64,), (types.float64,)])\n"
        "print(triple(2), triple(0.5), sum(triple.stats.cache_hits.values()))\n"
    )
    environment = {**os.environ, "ENGINE_V1_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(Path.cwd())}
    command = [sys.executable, str(module)]
    starts = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    outputs = [start.communicate(timeout=120)[0].split() for start in starts]
    assert all(output[:2] == ["6", "1.5"] for output in outputs)
    assert sorted(output[2] for output in outputs) == ["0", "2", "2", "2"]
    again = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert again.stdout.split()[2] == "2"


def test_different_kernels_compile_at_the_same_time():
    """Whoever compiles one kernel does not keep others from being compiled."""

    @jit
    def kernel(x):
        return x + 2

    with jit_module._kernel_lock(double.py_func):
        assert is_being_compiled(double.py_func)
        assert not is_being_compiled(kernel.py_func)
        warmup(kernel, [(types.int64,)])
    assert not is_being_compiled(double.py_func)
    assert kernel(2) == 4


def test_slow_compiling_says_so(monkeypatch):
    """A line of progress appears when compiling takes longer than a moment."""
    monkeypatch.setattr(jit_module, "PROGRESS_AFTER_S", 0.0)
    lines = []

    @jit
    def kernel(x):
        return x * x

    warmup(kernel, [(types.float64,)], progress=lines.append)
    assert len(lines) == 1
    assert "compiling kernel kernel" in lines[0]
