"""Does a CUDA device give the same tokens whatever else is in the step, and what does speculation gain there?

Five minutes on one device. The same prompts are answered greedily with speculation off and on, one, three and eight at
a time, with chunk budgets that cut prompts differently, and again with a warm prefix cache; every answer is compared
with that of an engine that has one request at a time, no speculation and no cache. CUDA's matrix products round
differently for different numbers of rows. In float32 that is too little to change a token, so all answers must be
equal; in bfloat16 it is not where two tokens are nearly as likely, so equal answers are counted and printed. (The CPU's
kernels compute a row the same way in any company, and all are equal in either.) Then tokens per second with speculation
off and on.

Exit status: 0; 1 if an answer differs in float32; 2 if there is no CUDA device. `--device cpu` tries the script itself.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine_v1 import LLM, SamplingParams
from engine_v1.entrypoints import bench
from engine_v1.entrypoints.bench_datasets import prefix_repetition
from engine_v1.entrypoints.bench_report import describe_machine, format_machine, format_table, report
from engine_v1.models.hub import DEMO_MODEL

SPECULATIVE_CONFIG = {"method": "ngram"}
MAX_MODEL_LEN = 1024
EXACT_DTYPE = "float32"
COUNTED_DTYPE = "bfloat16"
EXIT_DIFFERENT = 1
EXIT_NO_DEVICE = 2

Answer = tuple[tuple[int, ...], str | None]  # token ids, finish reason


@dataclass(frozen=True)
class Setting:
    """How the same prompts are run."""

    speculate: bool
    max_num_seqs: int
    max_num_batched_tokens: int | None = None  # None: the device's default
    prefix_caching: bool = True

    def __str__(self) -> str:
        budget = self.max_num_batched_tokens or "default"
        return f"n-gram {'on' if self.speculate else 'off'}, {self.max_num_seqs} at a time, budget {budget}"


REFERENCE = Setting(speculate=False, max_num_seqs=1, prefix_caching=False)
SETTINGS = [
    Setting(speculate, max_num_seqs, budget)
    for max_num_seqs, budget in ((1, None), (3, None), (8, None), (8, 100), (8, 16))
    for speculate in (False, True)
]


@dataclass(frozen=True)
class Load:
    """What is asked of every setting."""

    model: str
    device: str
    prompts: list[list[dict[str, str]]]  # conversations
    max_tokens: int


def answer(load: Load, setting: Setting, dtype: str, *, num_passes: int) -> list[list[Answer]]:
    """Return the answers to all prompts, so many times over with one engine: later passes find a warm prefix cache."""
    params = SamplingParams(temperature=0.0, max_tokens=load.max_tokens)
    with LLM(
        load.model,
        dtype=dtype,
        device=load.device,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=setting.max_num_seqs,
        max_num_batched_tokens=setting.max_num_batched_tokens,
        enable_prefix_caching=setting.prefix_caching,
        speculative_config=SPECULATIVE_CONFIG if setting.speculate else None,
    ) as llm:
        passes = [llm.chat(load.prompts, params, use_tqdm=False) for _ in range(num_passes)]
    del llm
    gc.collect()  # the next engine is to have this one's memory
    return [[_read(output) for output in outputs] for outputs in passes]


def _read(output: Any) -> Answer:
    """Return what is compared of an output.

    Raises:
        RuntimeError: if the request failed: it would equal other failures.
    """
    completion = output.outputs[0]
    if completion.finish_reason == "error":
        raise RuntimeError(f"request {output.request_id} failed: {completion.stop_reason}")
    return tuple(completion.token_ids), completion.finish_reason


def describe_difference(expected: Answer, got: Answer) -> str | None:
    """Say where two answers part, or return None where they are equal."""
    if expected == got:
        return None
    pairs = zip(expected[0], got[0], strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected[0]), len(got[0])))
    a, b = (f"{tokens[at]}" if at < len(tokens) else f"the end ({reason})" for tokens, reason in (expected, got))
    return f"output token {at} is {b}, not {a}"


def check_equality(load: Load, dtype: str) -> dict[str, Any]:
    """Run all settings in one dtype, print a line for each and what differs, and return the counts."""
    print(f"\n{dtype}: answers equal to those of one request at a time without speculation or cache")
    (expected,) = answer(load, REFERENCE, dtype, num_passes=1)
    num_tokens = sum(len(tokens) for tokens, _ in expected)
    print(f"  reference: {len(expected)} prompts, {num_tokens} output tokens", flush=True)
    counts: dict[str, list[int]] = {}
    for setting in SETTINGS:
        start = time.perf_counter()
        passes = answer(load, setting, dtype, num_passes=2)
        differences = [
            [describe_difference(a, b) for a, b in zip(expected, answers, strict=True)] for answers in passes
        ]
        counts[str(setting)] = [sum(difference is None for difference in one) for one in differences]
        cold, warm = (f"{count}/{len(expected)}" for count in counts[str(setting)])
        print(f"  {setting!s:<42} cold {cold:>5}  warm {warm:>5}  {time.perf_counter() - start:6.1f} s", flush=True)
        for state, one in zip(("cold", "warm"), differences, strict=True):
            for index, difference in enumerate(one):
                if difference is not None:
                    print(f"      prompt {index}, {state} cache: {difference}")
    return {
        "identical": sum(map(sum, counts.values())),
        "answers": 2 * len(SETTINGS) * len(expected),
        "settings": counts,
    }


def compare_speed(load: Load, max_num_seqs: int) -> dict[str, Any]:
    """Measure tokens per second off and on, as benchmark_throughput.py does, print the table and return the figures."""
    options = {
        "--model": load.model,
        "--device": load.device,
        "--dtype": COUNTED_DTYPE,
        "--num-prompts": len(load.prompts),
        "--max-num-seqs": max_num_seqs,
        "--max-tokens": load.max_tokens,
    }
    args = bench._parser(prog=None).parse_args([str(word) for pair in options.items() for word in pair])
    prompts = bench.load_prompts(args)
    print(f"\n{COUNTED_DTYPE}, prefix_repetition, {max_num_seqs} at a time")
    off = bench.measure(args, prompts, None)
    figures = report([bench.measure(args, prompts, SPECULATIVE_CONFIG)], [off])
    print(format_table(figures))
    names = ("tokens_per_s", "tokens_per_s_no_spec", "ratio_on_off", "tokens_per_step", "identical_outputs")
    return {name: figures[name] for name in names}


def describe_device(device: str) -> dict[str, str]:
    """Return the device's name, memory and versions."""
    facts = describe_machine()
    if not device.startswith("cuda"):
        return facts
    properties = torch.cuda.get_device_properties(device)
    return facts | {
        "gpu": properties.name,
        "gpu_memory": f"{properties.total_memory >> 20} MiB",
        "cuda": str(torch.version.cuda),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),  # "highest": no TF32
    }


def exit_status(results: Mapping[str, Mapping[str, Any]]) -> int:
    """Return 0 if every float32 answer was equal, else 1."""
    exact = results[EXACT_DTYPE]
    return 0 if exact["identical"] == exact["answers"] else EXIT_DIFFERENT


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the settings of a run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu to try the script (default cuda)")
    parser.add_argument("--model", default=DEMO_MODEL, help=f"default {DEMO_MODEL}")
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=48, help="output tokens of a prompt, at most (default 48)")
    args = parser.parse_args(argv)
    if min(args.num_prompts, args.max_tokens) < 1:
        parser.error(f"--num-prompts ({args.num_prompts}) and --max-tokens ({args.max_tokens}) must be at least 1")
    if args.device != "cpu" and not args.device.startswith("cuda"):
        parser.error(f"--device must be cuda, cuda:N or cpu, got {args.device!r}")
    return args


def main() -> int:
    """Check, measure, print a last line of JSON and return the exit status."""
    args = parse_args()
    start = time.perf_counter()
    print(__doc__.splitlines()[0])
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        print(
            f"There is no CUDA device here (torch {torch.__version__} finds none), so nothing was checked. "
            "Run this where there is one, or try the script with --device cpu.",
            file=sys.stderr,
        )
        return EXIT_NO_DEVICE
    facts = describe_device(args.device)
    print(format_machine(facts), flush=True)
    conversations = [prompt.messages or [] for prompt in prefix_repetition(args.num_prompts, num_prefixes=3)]
    load = Load(args.model, args.device, conversations, args.max_tokens)
    results = {dtype: check_equality(load, dtype) for dtype in (EXACT_DTYPE, COUNTED_DTYPE)}
    speed = {f"{max_num_seqs}_at_a_time": compare_speed(load, max_num_seqs) for max_num_seqs in (1, 8)}

    status = exit_status(results)
    print()
    for dtype, result in results.items():
        print(f"{dtype}: {result['identical']} of {result['answers']} answers equal")
    if status:
        print(f"FAILED: in {EXACT_DTYPE} every answer must be equal; the differences are listed above")
    figures = {"device": args.device, "exact_float32": status == 0, **results, "throughput": speed}
    print(json.dumps(figures | {"seconds": round(time.perf_counter() - start, 1), "machine": facts}))
    return status


if __name__ == "__main__":
    sys.exit(main())
