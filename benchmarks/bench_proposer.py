"""What does an n-gram lookup cost a request, against context length and batch size?

Every step looks up every running request, so a lookup must be small beside a step (milliseconds). Measured is
the whole of `NgramProposer.propose`: the eligibility checks and lists in Python, and the kernel. The tokens
are random: almost nothing matches and every row is read to its start, the worst case.

"warm" calls follow each other; before each "cold" call a buffer larger than the caches is read, as a model's
weights are between two steps, which evicts the tokens and also the interpreter itself. An engine lies between
the two. The ceiling is the time to read the tokens once, at the bandwidth with which one thread reads a large
array.
"""

import argparse
import json
import statistics
import time

import numpy as np
import numpy.typing as npt

from engine_v1.core.token_table import TokenTable
from engine_v1.entrypoints.bench_report import describe_machine, format_machine
from engine_v1.request import Request
from engine_v1.sampling_params import SamplingParams
from engine_v1.spec_decode.ngram_proposer import NgramProposer

VOCAB_SIZE = 49152
NUM_SPECULATIVE_TOKENS = 5
PROMPT_LOOKUP_MIN = 1
PROMPT_LOOKUP_MAX = 4
FLUSH_BYTES = 128 << 20
NUM_WARMUPS = 3
STATES = ("warm", "cold")

Medians = dict[str, dict[int, dict[int, float]]]  # state -> context -> batch -> microseconds per request


def main() -> None:
    """Measure, print a table for each state and a last line of JSON."""
    args = parse_args()
    machine = describe_machine()
    buffer = np.ones(FLUSH_BYTES // 4, np.int32)
    bytes_per_s = read_bandwidth(buffer)
    print(__doc__.splitlines()[0])
    print(format_machine(machine))
    print(f"one thread reads {bytes_per_s / 1e9:.1f} GB/s; {args.repeats} calls a cell after {NUM_WARMUPS} to warm up")

    medians: Medians = {}
    for state in STATES:
        medians[state] = {}
        print(f"\n{state}: us per request and step, median (10th .. 90th percentile)")
        print("".join([f"{'context':>8}{'ceiling':>9}", *(f"{f'batch {batch}':>27}" for batch in args.batches)]))
        for length in args.contexts:
            medians[state][length] = {}
            proposer, requests = make_requests(max(args.batches), length, args.tie)
            line = f"{length:>8}{length * 4 / bytes_per_s * 1e6:>9.2f}"
            for batch in args.batches:
                flush = buffer if state == "cold" else None
                times_us = measure(proposer, requests[:batch], args.repeats, flush)
                low, median, high = np.percentile(times_us, [10, 50, 90])
                medians[state][length][batch] = round(float(median), 3)
                line += f"{median:.2f} ({low:.2f} .. {high:.2f})".rjust(27)
            print(line, flush=True)
    print()
    print(json.dumps(figures(medians, bytes_per_s) | {"machine": machine}))


def parse_args() -> argparse.Namespace:
    """Return the settings of a run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    contexts = [1024 << n for n in range(8)]  # 1k .. 128k
    parser.add_argument("--contexts", type=int, nargs="+", default=contexts, help="known tokens of each request")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64, 256], help="requests a call")
    parser.add_argument("--repeats", type=int, default=50, help="calls a cell (default 50)")
    parser.add_argument("--tie", choices=["latest", "earliest"], default="latest", help="which match is taken")
    return parser.parse_args()


def make_requests(num_requests: int, length: int, tie: str) -> tuple[NgramProposer, list[Request]]:
    """Return running requests of `length` random tokens each, and their proposer."""
    table = TokenTable(num_requests, length + NUM_SPECULATIVE_TOKENS)
    proposer = NgramProposer(
        table,
        num_speculative_tokens=NUM_SPECULATIVE_TOKENS,
        prompt_lookup_min=PROMPT_LOOKUP_MIN,
        prompt_lookup_max=PROMPT_LOOKUP_MAX,
        prompt_lookup_tie=tie,
    )
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=0.0, max_tokens=1024)
    requests = []
    for index in range(num_requests):
        request = Request(f"r{index}", [0] * length, params, max_tokens=1024)  # only its length is read
        request.num_computed_tokens = length - 1
        request.row = table.acquire([0] * length)
        table.token_ids[request.row, :length] = rng.integers(0, VOCAB_SIZE, length)
        requests.append(request)
    return proposer, requests


def measure(
    proposer: NgramProposer, requests: list[Request], num_calls: int, flush: npt.NDArray[np.int32] | None
) -> list[float]:
    """Return microseconds per request of each call, after a few that do not count."""
    times_us = []
    for _ in range(NUM_WARMUPS + num_calls):
        if flush is not None:
            flush.max()
        start = time.perf_counter()
        proposer.propose(requests)
        times_us.append((time.perf_counter() - start) / len(requests) * 1e6)
    return times_us[NUM_WARMUPS:]


def read_bandwidth(array: npt.NDArray[np.int32]) -> float:
    """Return the bytes per second at which one thread reads an array, the median of several passes."""
    rates = []
    for _ in range(9):
        start = time.perf_counter()
        array.max()
        rates.append(array.nbytes / (time.perf_counter() - start))
    return statistics.median(rates)


def figures(medians: Medians, bytes_per_s: float) -> dict[str, object]:
    """Return what the last line says, for the smallest batch; `growth` is the longest context over the shortest."""
    short, long = min(medians["warm"]), max(medians["warm"])
    batch = min(medians["warm"][short])
    result: dict[str, object] = {}
    for state in STATES:
        suffix = "" if state == "warm" else "_cold"
        first, last = medians[state][short][batch], medians[state][long][batch]
        result[f"us_per_request_{short // 1024}k{suffix}"] = first
        result[f"us_per_request_{long // 1024}k{suffix}"] = last
        result[f"growth{suffix}"] = round(last / first, 2)
        result[f"ns_per_token{suffix}"] = round((last - first) / max(1, long - short) * 1000, 4)
    return result | {"read_gb_per_s": round(bytes_per_s / 1e9, 2), "us_per_request": medians}


if __name__ == "__main__":
    main()
