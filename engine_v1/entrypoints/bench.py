"""Measure throughput, with speculation and without: `engine-v1 bench` and benchmarks/benchmark_throughput.py."""

import argparse
import gc
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_v1.entrypoints.arguments import DEFAULT_SPECULATIVE_CONFIG, json_object
from engine_v1.entrypoints.bench_datasets import (
    DATASETS,
    BenchPrompt,
    jsonl,
    prefix_repetition,
    random_tokens,
    read_jsonl,
    spec_bench,
)
from engine_v1.entrypoints.bench_report import (
    RequestResult,
    Run,
    describe_machine,
    format_machine,
    format_table,
    report,
)
from engine_v1.entrypoints.cli import DEFAULT_MODEL
from engine_v1.entrypoints.records import Record, write_records
from engine_v1.sampling_params import SamplingParams

if TYPE_CHECKING:
    from engine_v1.entrypoints.llm import LLM
    from engine_v1.outputs import RequestOutput

QUESTION = "How many tokens per second does this machine generate, and what does speculation add?"
WARMUP_TOKENS = 16
ENGINE_OPTIONS = (
    "model", "dtype", "quantization", "device", "seed", "max_model_len", "max_num_seqs", "max_num_batched_tokens",
)  # fmt: skip

EPILOG = """examples:
  engine-v1 bench --compare-no-spec
  engine-v1 bench --dataset spec_bench --dataset-path spec_bench.jsonl --max-num-seqs 1 --compare-no-spec
  engine-v1 bench --dataset random --num-prompts 16 --input-len 512 --compare-no-spec
  engine-v1 bench --speculative-config '{"method": "ngram", "num_speculative_tokens": 8}' --compare-no-spec

The last line printed is JSON. How to read the table: benchmarks/README.md.
"""


def run(args: argparse.Namespace) -> int:
    """Run the benchmark that the options ask for; print the table and a last line of JSON.

    Raises:
        ValueError: if the options contradict each other or the dataset.
    """
    if args.repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {args.repeats}.")
    if args.compare_no_spec and args.speculative_config is None:
        raise ValueError("--compare-no-spec needs a speculative_config to compare with; leave it at its default.")
    prompts = load_prompts(args)
    machine = describe_machine()
    print(QUESTION)
    print(format_machine(machine), flush=True)

    on: list[Run] = []
    off: list[Run] = []
    for _ in range(args.repeats):
        if args.compare_no_spec:
            off.append(measure(args, prompts, None))
        on.append(measure(args, prompts, args.speculative_config))

    figures = report(on, off)
    print(f"\n{_describe_load(args)}\n")
    print(format_table(figures))
    if off:
        ratio, decode_ratio = figures["ratio_on_off"], figures["decode_ratio_on_off"]
        print(f"\nspeculation on / off: {ratio:.3f} of all, {decode_ratio:.3f} of decoding")
        print(f"identical outputs: {figures['identical_outputs']} of {figures['num_prompts']}")
    options = {name: getattr(args, name) for name in (*ENGINE_OPTIONS, "dataset", "max_tokens", "speculative_config")}
    line = json.dumps(figures | options | {"machine": machine})
    if args.output_json:
        args.output_json.write_text(line + "\n", encoding="utf-8")
    print(f"\n{line}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the options and run; return the exit status.

    Args:
        argv: what follows `engine-v1 bench`; None for a script's own arguments.
    """
    parser = _parser(prog=None if argv is None else "engine-v1 bench")
    args = parser.parse_args(argv)
    try:
        return run(args)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _parser(prog: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog, description=QUESTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    load = parser.add_argument_group("load")
    load.add_argument("--dataset", choices=DATASETS, default="prefix_repetition")
    load.add_argument("--dataset-path", type=Path, help="the file of spec_bench or jsonl")
    load.add_argument("--num-prompts", type=int, default=30)
    load.add_argument("--category", help="take prompts of this category only")
    load.add_argument("--max-tokens", type=int, default=128, help="output tokens of a prompt, at most")
    load.add_argument("--ignore-eos", action="store_true", help="generate max-tokens always; random does so anyway")
    load.add_argument("--input-len", type=int, default=256, help="random: tokens of a prompt")
    load.add_argument("--num-prefixes", type=int, default=5, help="prefix_repetition: different prefixes")
    load.add_argument("--prefix-len", type=int, default=150, help="prefix_repetition: words of a prefix, about")
    load.add_argument("--sampling-params", type=json_object, default={}, metavar="JSON", help="beyond greedy")
    engine = parser.add_argument_group("engine (prefix caching is off)")
    engine.add_argument("--model", default=DEFAULT_MODEL)
    engine.add_argument("--dtype", default="auto")
    engine.add_argument("--quantization", help="of the weights on the CPU: int8, or gguf")
    engine.add_argument("--device", default="auto")
    engine.add_argument("--seed", type=int, default=0)
    engine.add_argument("--max-model-len", type=int)
    engine.add_argument("--max-num-seqs", type=int, default=16, help="requests at a time (default 16)")
    engine.add_argument("--max-num-batched-tokens", type=int)
    engine.add_argument(
        "--speculative-config",
        type=json_object,
        default=DEFAULT_SPECULATIVE_CONFIG,
        metavar="JSON",
        help=f"default {DEFAULT_SPECULATIVE_CONFIG}; null for none",
    )
    run = parser.add_argument_group("measurement")
    run.add_argument("--compare-no-spec", action="store_true", help="run without speculation too, on fresh engines")
    run.add_argument("--repeats", type=int, default=1, help="runs (pairs, if compared) of which to take the median")
    run.add_argument("--record", type=Path, help="write prompts and outputs to this file, for engine-v1 replay")
    run.add_argument("--output-json", type=Path, help="write the figures to this file too")
    return parser


def load_prompts(args: argparse.Namespace) -> list[BenchPrompt]:
    """Return the prompts the options ask for, except random ones, which need the model's vocabulary.

    Raises:
        ValueError: if the dataset needs a file and none is named, or does not hold what is asked for.
    """
    if args.num_prompts < 1:
        raise ValueError(f"num_prompts must be at least 1, got {args.num_prompts}.")
    if args.dataset in ("random", "prefix_repetition"):
        if args.category is not None:
            raise ValueError(f"dataset {args.dataset!r} has no categories; leave --category out.")
        if args.dataset == "random":
            return []
        return prefix_repetition(
            args.num_prompts, num_prefixes=args.num_prefixes, prefix_len=args.prefix_len, seed=args.seed
        )
    if args.dataset_path is None:
        raise ValueError(f"dataset {args.dataset!r} is read from a file; name it with --dataset-path.")
    rows = read_jsonl(args.dataset_path)
    choose = spec_bench if args.dataset == "spec_bench" else jsonl
    return choose(rows, args.num_prompts, args.category)


def measure(args: argparse.Namespace, prompts: Sequence[BenchPrompt], speculative_config: dict[str, Any] | None) -> Run:
    """Make an engine, warm it up, generate for all prompts and throw it away."""
    # Imported here, so that --help and a mistyped option answer at once.
    from engine_v1.entrypoints.llm import LLM

    started = time.perf_counter()
    options = {name: getattr(args, name) for name in ENGINE_OPTIONS if getattr(args, name) is not None}
    with LLM(**options, enable_prefix_caching=False, speculative_config=speculative_config) as llm:
        start_s = time.perf_counter() - started
        if args.dataset == "random":
            assert llm.tokenizer is not None, "the tokenizer is loaded unless skip_tokenizer_init says otherwise"
            vocab_size = llm.tokenizer.backend.get_vocab_size()
            prompts = random_tokens(args.num_prompts, input_len=args.input_len, vocab_size=vocab_size, seed=args.seed)
        ignore_eos = args.ignore_eos or args.dataset == "random"
        options = {"temperature": 0.0, "max_tokens": args.max_tokens, "ignore_eos": ignore_eos}
        warm_up(llm, args.max_num_seqs, prompts)
        params = SamplingParams(**options | args.sampling_params)
        run = generate(llm, prompts, params, start_s=start_s, record=args.record)
    name = "without speculation" if speculative_config is None else f"with {json.dumps(speculative_config)}"
    print(f"{name}: {run.wall_s:.2f} s, engine made in {start_s:.2f} s", flush=True)
    del llm
    gc.collect()  # the next engine is to have this one's memory
    return run


def warm_up(llm: "LLM", max_num_seqs: int, prompts: Sequence[BenchPrompt] = ()) -> None:
    """Generate a few tokens for as many requests as run at a time, under a cache_salt that no other request has.

    Args:
        llm: the engine.
        max_num_seqs: requests that run at a time.
        prompts: whose first ones are used; none: a short text.
    """
    some = prompts[:max_num_seqs] or [BenchPrompt("warm-up", text="Once upon a time")] * max_num_seqs
    # What is generated here must not be drafted for the requests that are measured.
    inputs = [_to_input(llm, prompt, "warm-up") for prompt in some]
    params = SamplingParams(temperature=0.0, max_tokens=WARMUP_TOKENS, ignore_eos=True)
    llm.generate(inputs, params, use_tqdm=False)


def generate(
    llm: "LLM",
    prompts: Sequence[BenchPrompt],
    params: SamplingParams,
    *,
    cache_salt: str | None = None,
    start_s: float = 0.0,
    record: Path | None = None,
) -> Run:
    """Generate for all prompts; the clock starts with rendered prompts in hand and stops with the last output.

    Args:
        llm: the engine.
        prompts: what to answer.
        params: for all of them.
        cache_salt: of all of them: drafts use earlier outputs of the same one only.
        start_s: seconds in which the engine was made, for the record.
        record: write prompts and outputs to this file.
    """
    inputs = [_to_input(llm, prompt, cache_salt) for prompt in prompts]
    before = time.perf_counter()
    outputs = llm.generate(inputs, params, use_tqdm=False)
    wall_s = time.perf_counter() - before
    if record is not None:
        pairs = zip(outputs, prompts, strict=True)
        write_records(record, [Record.from_output(o, params.max_tokens, p.category) for o, p in pairs])
    return _to_run(prompts, outputs, wall_s=wall_s, start_s=start_s)


def generate_by_turns(
    llms: Sequence["LLM"], prompts: Sequence[BenchPrompt], params: SamplingParams, *, cache_salt: str | None = None
) -> list[Run]:
    """Generate for all prompts with several engines at once, and return their runs; each one's time is its steps'.

    It is always the turn of the engine that is the fewest tokens on, for a step. So a moment in which the machine is
    slow falls on all of them alike: two runs of one load after the other differ by a tenth where a neighbour is busy,
    by turns they differ by a fiftieth.

    Args:
        llms: the engines.
        prompts: what to answer.
        params: for all of them.
        cache_salt: as in :func:`generate`.
    """
    requests = [
        llm.llm_engine.make_requests([_to_input(llm, prompt, cache_salt) for prompt in prompts], params) for llm in llms
    ]
    for llm, own in zip(llms, requests, strict=True):
        llm.llm_engine.add(own)
    seconds = [0.0] * len(llms)
    num_tokens = [0] * len(llms)
    running = list(range(len(llms)))
    while running:
        index = min(running, key=num_tokens.__getitem__)
        engine = llms[index].llm_engine
        before = time.perf_counter()
        engine.step()
        seconds[index] += time.perf_counter() - before
        num_tokens[index] = sum(len(request.output_token_ids) for one in requests[index] for request in one.requests)
        running = [index for index in running if llms[index].llm_engine.has_unfinished_requests()]
    return [
        _to_run(prompts, [llm.llm_engine.make_output(request) for request in own], wall_s=wall_s)
        for llm, own, wall_s in zip(llms, requests, seconds, strict=True)
    ]


def _to_run(
    prompts: Sequence[BenchPrompt], outputs: Sequence["RequestOutput"], *, wall_s: float, start_s: float = 0.0
) -> Run:
    results = (RequestResult.from_output(p.category, o) for p, o in zip(prompts, outputs, strict=True))
    return Run(tuple(results), wall_s=wall_s, start_s=start_s)


def _to_input(llm: "LLM", prompt: BenchPrompt, cache_salt: str | None = None) -> Any:
    """Return a prompt as `LLM.generate` takes it; a conversation goes through the chat template."""
    if prompt.messages is not None:
        rendered: dict[str, Any] = llm.preprocess_chat(prompt.messages)[0]
    elif prompt.text is not None:
        rendered = {"prompt": prompt.text}
    else:
        rendered = {"prompt_token_ids": prompt.token_ids}
    return rendered if cache_salt is None else rendered | {"cache_salt": cache_salt}


def _describe_load(args: argparse.Namespace) -> str:
    """Return one line on what was run."""
    quantization = f", weights {args.quantization}" if args.quantization else ""
    return (
        f"{args.model}, dtype {args.dtype}{quantization}, {args.dataset}, {args.num_prompts} prompts, "
        f"at most {args.max_tokens} tokens each, {args.max_num_seqs} at a time, prefix caching off, "
        f"median of {args.repeats} run(s)"
    )
