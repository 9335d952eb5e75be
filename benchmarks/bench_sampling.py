"""What does sampling cost a step, beside greedy decoding?

The same prompts are answered by one engine without speculation, greedily and with ever more asked: temperature and
top_p, then a repetition penalty, then a log probability. A round runs every case once, so that all of a round see the
same machine; a step is timed from its schedule to its update, and only steps that decode every request count. Shown are
medians over a round's steps and, as the ratio to plain greedy of the same round, the median over rounds.

A second engine speculates. There steps differ in rows, so what is shown is the time of the sampler and of log
probabilities alone, per row that was verified.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine_v1 import LLM, SamplingParams
from engine_v1.entrypoints.bench_datasets import add_conversation_options, load_conversations
from engine_v1.entrypoints.bench_machine import print_header

BOUND = 1 / 0.85  # of the last case over the first
GREEDY = {"temperature": 0.0}
DRAWN = {"temperature": 0.8, "top_p": 0.95, "seed": 1}
CASES: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "temperature, top_p": DRAWN,
    "and repetition_penalty": DRAWN | {"repetition_penalty": 1.1},
    "and logprobs": DRAWN | {"repetition_penalty": 1.1, "logprobs": 1},
}
FIRST, LAST = next(iter(CASES)), list(CASES)[-1]


@dataclass
class Steps:
    """A round's decode steps of one case."""

    seconds: list[float] = field(default_factory=list)
    sampling_s: float = 0.0  # of which in the sampler and for log probabilities
    num_rows: int = 0  # verified: drafts and the tokens before them

    @property
    def step_ms(self) -> float:
        return statistics.median(self.seconds) * 1e3

    @property
    def sampling_us_per_row(self) -> float:
        return self.sampling_s / max(1, self.num_rows) * 1e6


class SamplingClock:
    """Sums up the time that a backend spends on sampling and log probabilities."""

    def __init__(self, llm: LLM) -> None:
        self.seconds = 0.0
        backend: Any = llm.llm_engine.core.runner.backend
        backend.sampler.sample = self._timed(backend.sampler.sample)
        backend.logprobs = self._timed(backend.logprobs)

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start

        return timed


def run(llm: LLM, clock: SamplingClock, prompts: Sequence[Any], params: SamplingParams, at_a_time: int) -> Steps:
    """Answer prompts in groups of one size, at most `at_a_time`; return the steps in which a whole group decoded."""
    engine, steps = llm.llm_engine, Steps()
    size = -(-len(prompts) // -(-len(prompts) // at_a_time))  # 30 prompts, 16 at a time: 15 and 15
    for first in range(0, len(prompts), size):
        parents = engine.make_requests(prompts[first : first + size], params)
        requests = [request for parent in parents for request in parent.requests]
        engine.add(parents)
        while engine.has_unfinished_requests():
            is_decoding = all(request.num_output_tokens and not request.is_finished for request in requests)
            before, sampling_before = sum(request.num_output_tokens for request in requests), clock.seconds
            drafted_before = sum(sum(request.step_drafted) for request in requests)
            start = time.perf_counter()
            engine.step()
            seconds = time.perf_counter() - start
            assert sum(request.num_output_tokens for request in requests) >= before, "tokens are never taken back"
            if is_decoding:
                steps.seconds.append(seconds)
                steps.sampling_s += clock.seconds - sampling_before
                steps.num_rows += len(requests) + sum(sum(r.step_drafted) for r in requests) - drafted_before
    return steps


def measure(args: argparse.Namespace, prompts: Sequence[Any], speculation: dict[str, Any] | None) -> dict[str, Any]:
    """Return the figures of one engine, by requests at a time and case."""
    figures: dict[str, Any] = {}
    with LLM(args.model, speculative_config=speculation) as llm:  # prompts are cached: only decode steps are timed
        clock = SamplingClock(llm)
        tokens = llm.preprocess_chat(prompts)
        params = {
            name: SamplingParams(**case, max_tokens=args.max_tokens, ignore_eos=True) for name, case in CASES.items()
        }
        for at_a_time in args.at_a_time:
            for one in params.values():
                run(llm, clock, tokens[:at_a_time], one, at_a_time)
            rounds = [
                {name: run(llm, clock, tokens, one, at_a_time) for name, one in params.items()}
                for _ in range(args.rounds)
            ]
            figures[str(at_a_time)] = {name: _figures(rounds, name) for name in CASES}
    return figures


def _figures(rounds: Sequence[dict[str, Steps]], name: str) -> dict[str, float]:
    return {
        "step_ms": round(statistics.median(one[name].step_ms for one in rounds), 3),
        "ratio": round(statistics.median(one[name].step_ms / one[FIRST].step_ms for one in rounds), 3),
        "rows_per_step": round(sum(r[name].num_rows for r in rounds) / sum(len(r[name].seconds) for r in rounds), 2),
        "sampling_us_per_row": round(statistics.median(one[name].sampling_us_per_row for one in rounds), 1),
    }


def format_table(figures: dict[str, Any]) -> str:
    """Return one engine's figures as a table."""
    lines = [f"{'at a time':>9}  {'case':<24}{'ms/step':>9}{'ratio':>8}{'rows/step':>11}{'sampling us/row':>17}"]
    for at_a_time, cases in figures.items():
        for name, one in cases.items():
            lines.append(
                f"{at_a_time:>9}  {name:<24}{one['step_ms']:>9.2f}{one['ratio']:>8.3f}{one['rows_per_step']:>11.2f}"
                f"{one['sampling_us_per_row']:>17.1f}"
            )
    return "\n".join(lines)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the settings of a run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_conversation_options(parser, num_prompts=30, max_tokens=64)
    parser.add_argument("--at-a-time", type=int, nargs="+", default=[1, 16], help="requests at a time (1 16)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of every case (3)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print a table for each engine and a last line of JSON; return what it says."""
    args = parse_args(argv)
    machine = print_header(__doc__.splitlines()[0])
    conversations = load_conversations(args)
    result: dict[str, Any] = {"bound": round(BOUND, 3)}
    for name, speculation in (("off", None), ("on", {"method": "ngram"})):
        result[name] = measure(args, conversations, speculation)
        print(f"\nspeculation {name}\n{format_table(result[name])}")
    ratios = [cases[LAST]["ratio"] for cases in result["off"].values()]
    result["worst_ratio"] = max(ratios)
    print(f"\nall of it over greedy, speculation off: at most {max(ratios):.3f}; the bound is {BOUND:.3f}")
    print(json.dumps({**result, "machine": machine}))
    return result


if __name__ == "__main__":
    main()
