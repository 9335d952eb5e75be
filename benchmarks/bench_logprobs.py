"""What do log probabilities cost a step, and a token, that asks for 0, 1, 5 or all of them?

The same prompts are answered one at a time without log probabilities and with each number of them, in turns, by one
engine with n-gram speculation and one without. A step is timed from a request's first token to its end: forward pass,
sampling, the log probabilities of every committed row, bookkeeping. Apart from it stands what the outputs' dictionaries
cost, which are made when a call returns.

The ceiling of a step is the time to read the logits of its committed rows once more, at the bandwidth measured in the
run; that of the dictionaries is to make as many Logprob objects from lists. The last rows are of sampling with a
penalty and log probabilities, the load of an API: what all of it together costs a step.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine_v1 import LLM, Logprob, RequestOutput, SamplingParams
from engine_v1.entrypoints.bench_datasets import add_conversation_options, load_conversations
from engine_v1.entrypoints.bench_machine import ReadBandwidth, print_header

COUNTS: dict[str, int | None] = {"none": None, "0": 0, "1": 1, "5": 5, "all": -1}
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "seed": 1}
ALL_TOKENS = 4  # output tokens of a request for the whole vocabulary, whose dictionaries are large
ENGINES: dict[str, dict[str, Any] | None] = {"off": None, "on": {"method": "ngram"}}


@dataclass
class Samples:
    """What a cell's rounds took."""

    step_ms: list[float] = field(default_factory=list)  # per step after the first
    output_us: list[float] = field(default_factory=list)  # per token, to make the outputs
    num_steps: int = 0
    num_tokens: int = 0
    num_rows: int = 0  # verified: drafts and the tokens before them


def cells(max_tokens: int) -> dict[str, SamplingParams]:
    """Return what is asked in each cell."""
    greedy = {"temperature": 0.0, "ignore_eos": True}
    asked = {
        name: SamplingParams(**greedy, logprobs=count, max_tokens=ALL_TOKENS if count == -1 else max_tokens)
        for name, count in COUNTS.items()
    }
    sampled = {**SAMPLED, "ignore_eos": True, "max_tokens": max_tokens}
    asked["sampled"] = SamplingParams(**sampled)
    asked["sampled, penalty, 1"] = SamplingParams(**sampled, repetition_penalty=1.1, logprobs=1)
    return asked


def measure(llm: LLM, prompts: Sequence[Any], params: SamplingParams, samples: Samples) -> None:
    """Answer the prompts once and add what it took."""
    outputs = llm.generate(prompts, params, use_tqdm=False)
    done = time.time()
    decode_s, num_steps = 0.0, 0
    for output in outputs:
        completion = output.outputs[0]
        metrics = completion.spec_decode_metrics
        decode_s += _finished_time(output) - _first_token_time(output)
        num_steps += (metrics.num_steps if metrics else len(completion.token_ids)) - 1
        samples.num_rows += (metrics.num_draft_tokens if metrics else 0) + len(completion.token_ids)
        samples.num_tokens += len(completion.token_ids)
    samples.num_steps += num_steps
    samples.step_ms.append(decode_s / max(1, num_steps) * 1e3)
    made_s = done - max(_finished_time(output) for output in outputs)
    samples.output_us.append(made_s / sum(len(output.outputs[0].token_ids) for output in outputs) * 1e6)


def _finished_time(output: RequestOutput) -> float:
    assert output.metrics is not None, "every output says when things happened"
    return output.metrics.finished_time or 0.0


def _first_token_time(output: RequestOutput) -> float:
    assert output.metrics is not None, "every output says when things happened"
    return output.metrics.first_token_time or 0.0


def dictionary_us(num_entries: int) -> float:
    """Return the microseconds to make one position's dictionary from lists: the ceiling of an output."""
    ids, values, ranks = list(range(num_entries)), [-1.0] * num_entries, list(range(1, num_entries + 1))
    texts = dict.fromkeys(ids, "text")
    repeats = max(3, 20_000 // num_entries)
    start = time.perf_counter()
    for _ in range(repeats):
        made = {i: Logprob(value, rank, texts[i]) for i, value, rank in zip(ids, values, ranks, strict=True)}
    assert len(made) == num_entries
    return (time.perf_counter() - start) / repeats * 1e6


def figures(samples: Samples, plain: Samples, vocab_size: int, bytes_per_s: float, num_entries: int) -> dict[str, Any]:
    """Return what a cell shows: medians over rounds, as ratios to the same engine's cell without log probabilities."""
    step_ms = statistics.median(samples.step_ms)
    ratios = sorted(ms / base for ms, base in zip(samples.step_ms, plain.step_ms, strict=True))
    rows_per_step = samples.num_rows / (samples.num_steps or 1)
    committed = samples.num_tokens / (samples.num_steps or 1)
    extra_ms = step_ms - statistics.median(plain.step_ms)
    return {
        "step_ms": round(step_ms, 3),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_range": [round(ratios[0], 3), round(ratios[-1], 3)],
        "rows_per_step": round(rows_per_step, 2),
        "extra_us_per_row": round(extra_ms / rows_per_step * 1e3, 1),
        "ceiling_us_per_step": round(committed * vocab_size * 4 / bytes_per_s * 1e6, 1) if num_entries else 0.0,
        "output_us_per_token": round(statistics.median(samples.output_us), 1),
        "output_ceiling_us_per_token": round(dictionary_us(num_entries), 1) if num_entries else 0.0,
    }


def format_table(lines: dict[str, dict[str, Any]]) -> str:
    """Return one engine's cells as a table."""
    head = f"{'logprobs':>20}{'ms/step':>9}{'ratio':>7}{'(range)':>15}{'rows/step':>11}{'us/row more':>13}"
    text = [f"{head}{'ceiling':>9}{'us/token output':>17}{'ceiling':>9}"]
    for name, line in lines.items():
        low, high = line["ratio_range"]
        text.append(
            f"{name:>20}{line['step_ms']:>9.2f}{line['ratio']:>7.2f}{f'({low:.2f} .. {high:.2f})':>15}"
            f"{line['rows_per_step']:>11.2f}{line['extra_us_per_row']:>13.0f}{line['ceiling_us_per_step']:>9.0f}"
            f"{line['output_us_per_token']:>17.1f}{line['output_ceiling_us_per_token']:>9.1f}"
        )
    return "\n".join(text)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the settings of a run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_conversation_options(parser, num_prompts=6, max_tokens=48)
    parser.add_argument("--dtype", default="auto", help="of weights and KV cache (auto)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of every cell (3)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print a table for each engine and a last line of JSON; return what it says."""
    args = parse_args(argv)
    machine = print_header(__doc__.splitlines()[0])
    conversations = load_conversations(args)
    bandwidth = ReadBandwidth()
    result: dict[str, Any] = {"machine": machine, "num_prompts": args.num_prompts, "max_tokens": args.max_tokens}
    for engine, speculative_config in ENGINES.items():
        options = {"dtype": args.dtype, "max_num_seqs": 1, "max_logprobs": -1, "enable_prefix_caching": False}
        with LLM(args.model, speculative_config=speculative_config, **options) as llm:
            inputs = llm.preprocess_chat(conversations)
            vocab_size = llm.llm_engine.core.runner.input_batch.vocab_size
            asked = cells(args.max_tokens)
            measured = {name: Samples() for name in asked}
            llm.generate(inputs[:1], asked["5"], use_tqdm=False)
            for _ in range(args.rounds):
                bandwidth.measure(1)
                for name, params in asked.items():
                    measure(llm, inputs, params, measured[name])
        lines = {}
        for name, samples in measured.items():
            count = asked[name].logprobs
            num_entries = 0 if count is None else vocab_size if count == -1 else count + 1
            lines[name] = figures(samples, measured["none"], vocab_size, bandwidth.best, num_entries)
        print(f"\nspeculation {engine}, {args.model}, {args.num_prompts} prompts one at a time\n{format_table(lines)}")
        result[engine] = lines
    print()
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
