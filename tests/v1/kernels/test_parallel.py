import io
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from engine_v1.kernels import parallel
from tests.v1.kernels.models import make_decoder, make_model, run_whole


def run_python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=120,
        check=False,
    )


def test_decoders_in_several_threads_neither_block_nor_mix():
    """Engines in several Python threads give what each gives by itself."""
    models = [make_model(seed=seed) for seed in range(3)]
    alone = [run_whole(make_decoder(model), [50])[1][0] for model in models]
    together = [None] * 3

    def work(i):
        for _ in range(10):
            together[i] = run_whole(make_decoder(models[i]), [50])[1][0]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for a, b in zip(alone, together, strict=True):
        assert np.array_equal(a, b)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_is_told_to_spawn():
    """After kernels have run, a forked child's first kernel raises an error that names spawn; it is not killed."""
    code = """
import os, sys
from engine_v1.kernels.parallel import parallel_entry
with parallel_entry:
    pass
pid = os.fork()
if pid == 0:
    try:
        with parallel_entry:
            pass
    except RuntimeError as error:
        os._exit(7 if "spawn" in str(error) else 8)
    os._exit(9)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    assert run_python(code).returncode == 7


def test_omp_num_threads_limits_the_threads(monkeypatch):
    """OMP_NUM_THREADS is honoured, and refused when it is no number."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1,2")
    assert parallel.num_threads() == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    with pytest.raises(ValueError, match="OMP_NUM_THREADS='many'"):
        parallel.num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert 1 <= parallel.num_threads() <= len(os.sched_getaffinity(0))


def test_launching_leaves_numbas_configuration_alone():
    """The layer is chosen without a lasting change to numba's global configuration."""
    code = """
import numba
before = numba.config.THREADING_LAYER, numba.config.CACHE_DIR
from engine_v1.kernels.parallel import launch_threads
print(launch_threads() in ("omp", "tbb", "workqueue"), before == (numba.config.THREADING_LAYER, numba.config.CACHE_DIR))
"""
    assert run_python(code).stdout.split() == ["True", "True"]


def test_workqueue_warns():
    """The slow layer is named with what to install."""
    code = """
import warnings
from engine_v1.kernels.parallel import launch_threads
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    print(launch_threads(), any("libgomp" in str(w.message) for w in caught))
"""
    assert run_python(code, NUMBA_THREADING_LAYER="workqueue").stdout.split() == ["workqueue", "True"]


def test_portable_kernels_compute_the_same_model():
    """With the bf16 instruction switched off the same model comes out, up to rounding."""
    model = make_model(dtype=torch.bfloat16)
    here = run_whole(make_decoder(model), [30])[1][0]
    code = """
import numpy, sys, torch
from engine_v1.kernels.intrinsics import HAS_BF16_DOT
from tests.v1.kernels.models import make_decoder, make_model, run_whole
assert not HAS_BF16_DOT
numpy.save(sys.stdout.buffer, run_whole(make_decoder(make_model(dtype=torch.bfloat16)), [30])[1][0])
"""
    result = subprocess.run(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        env={**os.environ, "ENGINE_V1_DISABLE_BF16_DOT": "1", "PYTHONPATH": str(Path.cwd())},
        timeout=300,
        check=True,
    )
    there = np.load(io.BytesIO(result.stdout))
    assert np.abs(here - there).max() < 0.1
