"""Is speculation ever slower than no speculation?

For every number of requests at a time and every kind of prompt, two engines of one process, one that speculates and
one that does not, answer the same prompts, a step of one and a step of the other in turns, so that both halves of a
pair see the same machine. Shown is the ratio of their output tokens per second, over the time of their steps and over
decode time: the median of the pairs, and each pair. Below 1, speculation is slower. Decode time is what is left after
the time of the prompts, which is that of the same load with one token of output, measured without speculation in the
same pair: requests that end at different times decode while others' prompts are computed, so that neither can be told
from a request's own times. The ceiling is what the ratio would be if rows of drafts, lookups and decisions took no time
at all: decode time over tokens per step.

Every number of requests at a time has a process of its own: engines that were made and closed before leave memory in
pieces, and the next ones do not get large pages alike.

With --results every cell is appended to a file as it is done, and cells that the file has are not run again: a run that
was interrupted goes on where it stopped, and slices (--concurrency 16 --category rag) add up to the whole.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine_v1 import LLM
from engine_v1.entrypoints.arguments import DEFAULT_SPECULATIVE_CONFIG, json_object
from engine_v1.entrypoints.bench import generate_by_turns, warm_up
from engine_v1.entrypoints.bench_datasets import (
    SPEC_BENCH_CATEGORIES,
    BenchPrompt,
    random_tokens,
    read_jsonl,
    spec_bench,
)
from engine_v1.entrypoints.bench_machine import print_header
from engine_v1.entrypoints.bench_report import Run, count_identical, summarize
from engine_v1.models.hub import DEMO_MODEL
from engine_v1.sampling_params import SamplingParams

PROMPTS = {1: 10, 4: 16, 16: 64, 64: 64}  # requests at a time -> prompts of a cell
RANDOM = "random"


def num_prompts(concurrency: int) -> int:
    """Return how many prompts a cell has: those of the nearest number of requests at a time that is listed."""
    return PROMPTS[min(PROMPTS, key=lambda listed: abs(listed - concurrency))]


def load_prompts(args: argparse.Namespace, category: str, concurrency: int, vocab_size: int) -> list[BenchPrompt]:
    """Return a cell's prompts.

    Raises:
        ValueError: a category of Spec-Bench, and no file.
    """
    count = num_prompts(concurrency)
    if category == RANDOM:
        return random_tokens(count, input_len=args.input_len, vocab_size=vocab_size, seed=args.seed)
    if args.dataset_path is None:
        raise ValueError(f"category {category!r} is read from Spec-Bench's file; name it with --dataset-path.")
    return spec_bench(read_jsonl(args.dataset_path), count, category)


def cell_figures(
    concurrency: int, category: str, on: Sequence[Run], off: Sequence[Run], prompts: Sequence[Run]
) -> dict[str, Any]:
    """Return a cell's line: ratios of each pair and their medians, drafting, identity.

    Args:
        concurrency: requests at a time.
        category: of the prompts.
        on: runs with speculation.
        off: runs without, the other halves of the pairs.
        prompts: runs without that end after a token each.
    """
    pairs = [(summarize([a]), summarize([b])) for a, b in zip(on, off, strict=True)]
    ratios = [a.tokens_per_s / b.tokens_per_s for a, b in pairs]
    decode_ratios = [
        (b.wall_s - prompt.wall_s) / (a.wall_s - prompt.wall_s) for a, b, prompt in zip(on, off, prompts, strict=True)
    ]
    total, plain = summarize(on), summarize(off)
    seconds, seconds_no_spec, seconds_prompts = (
        round(statistics.median(run.wall_s for run in runs), 3) for runs in (on, off, prompts)
    )
    return {
        "concurrency": concurrency,
        "category": category,
        "ratio": round(statistics.median(ratios), 4),
        "decode_ratio": round(statistics.median(decode_ratios), 4),
        "seconds": seconds,
        "seconds_no_spec": seconds_no_spec,
        "seconds_prompts": seconds_prompts,
        "seconds_ceiling": round(seconds_prompts + (seconds_no_spec - seconds_prompts) / total.tokens_per_step, 3),
        "ratio_each": [round(ratio, 4) for ratio in ratios],
        "decode_ratio_each": [round(ratio, 4) for ratio in decode_ratios],
        "tokens_per_s": round(total.tokens_per_s, 2),
        "tokens_per_s_no_spec": round(plain.tokens_per_s, 2),
        "decode_share": round(1 - statistics.median(p.wall_s / b.wall_s for p, b in zip(prompts, off, strict=True)), 3),
        "tokens_per_step": round(total.tokens_per_step, 3),
        "draft_tokens_per_step": round(total.stats.num_draft_tokens / max(1, total.num_decode_steps), 3),
        "acceptance_rate": round(total.stats.draft_acceptance_rate, 3),
        "identical": count_identical([*on, *off]),
        "num_prompts": total.num_prompts,
    }


def format_table(cells: Sequence[dict[str, Any]]) -> str:
    """Lay the cells out, one a line."""
    header = f"{'at a time':>9}  {'category':<15}{'on/off':>8}{'ceiling':>9}{'decode':>8}{'decode share':>14}"
    lines = [f"{header}{'tok/step':>10}{'drafted/step':>14}{'accepted':>10}{'identical':>11}  pairs"]
    for cell in sorted(cells, key=lambda cell: cell["concurrency"]):
        each = " ".join(f"{ratio:.3f}" for ratio in cell["ratio_each"])
        ceiling = cell["seconds_no_spec"] / cell["seconds_ceiling"]
        lines.append(
            f"{cell['concurrency']:>9}  {cell['category']:<15}{cell['ratio']:>8.3f}{ceiling:>9.3f}"
            f"{cell['decode_ratio']:>8.3f}{cell['decode_share']:>14.0%}{cell['tokens_per_step']:>10.2f}"
            f"{cell['draft_tokens_per_step']:>14.2f}{cell['acceptance_rate']:>10.0%}"
            f"{cell['identical']:>8}/{cell['num_prompts']}  {each}"
        )
    return "\n".join(lines)


def headline(cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the worst ratios, in all and by requests at a time, and there those of all categories together."""
    by_concurrency: dict[str, dict[str, float]] = {}
    for concurrency in sorted({cell["concurrency"] for cell in cells}):
        chosen = [cell for cell in cells if cell["concurrency"] == concurrency]
        questions = [cell for cell in chosen if cell["category"] != RANDOM] or chosen
        on, off, prompts, ceiling = (
            sum(cell[name] for cell in questions)
            for name in ("seconds", "seconds_no_spec", "seconds_prompts", "seconds_ceiling")
        )
        by_concurrency[str(concurrency)] = {
            "worst_ratio": min(cell["ratio"] for cell in chosen),
            "worst_decode_ratio": min(cell["decode_ratio"] for cell in chosen),
            "overall_ratio": round(off / on, 4),
            "overall_decode_ratio": round((off - prompts) / (on - prompts), 4),
            "overall_ceiling": round(off / ceiling, 4),
        }
    return {
        "worst_ratio": min(cell["ratio"] for cell in cells),
        "worst_decode_ratio": min(cell["decode_ratio"] for cell in cells),
        "num_cells": len(cells),
        "by_concurrency": by_concurrency,
    }


def read_results(path: Path | None) -> list[dict[str, Any]]:
    """Return the cells that a results file has."""
    if path is None or not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def measure(args: argparse.Namespace, engines: tuple[LLM, LLM], category: str, concurrency: int) -> dict[str, Any]:
    """Run one cell's pairs and return its line."""
    off_llm, on_llm = engines
    assert on_llm.tokenizer is not None, "the tokenizer is loaded unless skip_tokenizer_init says otherwise"
    prompts = load_prompts(args, category, concurrency, on_llm.tokenizer.backend.get_vocab_size())
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens, ignore_eos=category == RANDOM)
    one_token = SamplingParams(temperature=0.0, max_tokens=1)
    on: list[Run] = []
    off: list[Run] = []
    prompt_runs: list[Run] = []
    for pair in range(args.pairs):
        # Each pair answers the same prompts anew: what it drafts from must not be another pair's outputs.
        halves = generate_by_turns((off_llm, on_llm), prompts, params, cache_salt=f"pair {pair}")
        off.append(halves[0])
        on.append(halves[1])
        prompt_runs += generate_by_turns((off_llm,), prompts, one_token)
    return cell_figures(concurrency, category, on, off, prompt_runs)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the settings of a run, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset-path", type=Path, help="Spec-Bench's question.jsonl; without it only random prompts")
    parser.add_argument("--concurrency", type=int, nargs="+", default=list(PROMPTS), help="requests at a time")
    parser.add_argument("--category", nargs="+", choices=[*SPEC_BENCH_CATEGORIES, RANDOM], help="default: all")
    parser.add_argument("--pairs", type=int, default=3, help="of runs, of which the median counts (default 3)")
    parser.add_argument("--max-tokens", type=int, default=64, help="of an output (default 64)")
    parser.add_argument("--input-len", type=int, default=256, help="tokens of a random prompt (default 256)")
    parser.add_argument("--model", default=DEMO_MODEL)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--speculative-config", type=json_object, default=DEFAULT_SPECULATIVE_CONFIG, metavar="JSON")
    parser.add_argument("--results", type=Path, help="JSON lines to continue and to append to")
    args = parser.parse_args(argv)
    if args.category is None:
        args.category = [*SPEC_BENCH_CATEGORIES, RANDOM] if args.dataset_path else [RANDOM]
    if args.pairs < 1 or min(args.concurrency) < 1:
        parser.error(f"--pairs ({args.pairs}) and --concurrency ({args.concurrency}) must be at least 1")
    if args.speculative_config is None:
        parser.error("--speculative-config is what is compared with none; leave it at its default")
    return args


def run_apart(args: argparse.Namespace, argv: Sequence[str]) -> None:
    """Run each number of requests at a time by itself, in a process that appends to the results file."""
    for concurrency in args.concurrency:
        command = [sys.executable, __file__, *argv, "--concurrency", str(concurrency), "--results", str(args.results)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def run_cells(args: argparse.Namespace, missing: Sequence[str], concurrency: int) -> list[dict[str, Any]]:
    """Measure categories with so many requests at a time, append them to the results file and return them."""
    options = {"dtype": args.dtype, "device": args.device, "seed": args.seed, "max_num_seqs": concurrency}
    options |= {"enable_prefix_caching": False}
    cells = []
    with (
        LLM(args.model, **options) as off,
        LLM(args.model, speculative_config=args.speculative_config, **options) as on,
    ):
        for llm in (off, on):
            warm_up(llm, concurrency)
        for category in missing:
            cells.append(measure(args, (off, on), category, concurrency))
            print(format_table(cells).splitlines()[-1], file=sys.stderr, flush=True)
            if args.results is not None:
                with args.results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(cells[-1]) + "\n")
    return cells


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the cells asked for, print the table of all there are and a last line of JSON."""
    args = parse_args(argv)
    machine = print_header(__doc__.splitlines()[0])
    cells = read_results(args.results)
    if len(args.concurrency) == 1:
        done = {cell["category"] for cell in cells if cell["concurrency"] == args.concurrency[0]}
        missing = [category for category in args.category if category not in done]
        cells += run_cells(args, missing, args.concurrency[0]) if missing else []
    else:
        with tempfile.TemporaryDirectory() as directory:
            args.results = args.results or Path(directory) / "cells.jsonl"
            run_apart(args, sys.argv[1:] if argv is None else argv)
            cells = read_results(args.results)
    ratios = headline(cells)
    print(f"\n{format_table(cells)}\n")
    for concurrency, together in ratios["by_concurrency"].items():
        print(
            f"{concurrency} at a time, all categories but random: {together['overall_ratio']:.3f} on/off "
            f"(ceiling {together['overall_ceiling']:.3f}), {together['overall_decode_ratio']:.3f} decode"
        )
    print(json.dumps(ratios | {"cells": cells, "machine": machine}))


if __name__ == "__main__":
    main()
