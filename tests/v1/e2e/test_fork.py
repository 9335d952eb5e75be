import multiprocessing

import pytest

from engine_v1 import LLM, SamplingParams
from tests.checkpoints import write_random_llama

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*")  # Python's own warning of what is tested


def inherited(llm, model, queue):
    """In the child: use the parent's engine, then make one; report both errors."""
    errors = []
    for attempt in (lambda: llm.generate([[1, 2, 3]], use_tqdm=False), lambda: LLM(model, dtype="float32")):
        try:
            attempt()
            errors.append("no error")
        except RuntimeError as error:
            errors.append(str(error))
    queue.put(errors)


def test_a_forked_child_is_told_to_use_spawn(tmp_path):
    """Neither the inherited engine nor a new one hangs or dies: both raise an error that names the remedy."""
    model = str(write_random_llama(tmp_path))
    with LLM(model, dtype="float32", kv_cache_memory_bytes=1 << 22) as llm:
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2), use_tqdm=False)
        context = multiprocessing.get_context("fork")
        queue = context.Queue()
        child = context.Process(target=inherited, args=(llm, model, queue))
        child.start()
        errors = queue.get(timeout=60)
        child.join(timeout=60)
        assert child.exitcode == 0
        assert all('get_context("spawn")' in error for error in errors), errors
        assert llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2), use_tqdm=False)[0].finished
