"""What does drafting cost a request and step, by method, context length and batch size?

Every step looks up every running request, so a lookup must be small beside a step (milliseconds). Measured is
the whole of `propose`: the eligibility checks and lists in Python, and the kernel, which first takes in the
tokens that the last step committed. The tokens are spread as words are (few frequent ones, many rare ones), so
some contexts match and drafts go on.

"first" is a request's first lookup, which reads its whole context. The steps after it commit two tokens each.
"warm" steps follow each other; before each "cold" one a buffer larger than the caches is read, as a model's
weights are between two steps, which evicts the tables and also the interpreter itself. An engine lies between
the two.
"""

import argparse
import json
import time

import numpy as np
import numpy.typing as npt

from engine_v1.config import SPECULATIVE_METHODS, SpeculativeConfig
from engine_v1.core.token_table import TokenTable
from engine_v1.entrypoints.bench_report import describe_machine, format_machine, format_rows
from engine_v1.request import Request
from engine_v1.sampling_params import SamplingParams
from engine_v1.spec_decode.factory import make_proposer
from engine_v1.spec_decode.proposer import Proposer

VOCAB_SIZE = 49152
SPREAD = 1.2  # exponent of the tokens' frequencies
TOKENS_PER_STEP = 2
FLUSH_BYTES = 128 << 20
NUM_WARMUPS = 3
STATES = ("warm", "cold")


class Load:
    """Running requests and their proposer.

    Args:
        method: of the proposer, with its defaults.
        num_requests: all of the same length.
        length: known tokens at the start.
        num_steps: for which the requests have room.
    """

    def __init__(self, method: str, num_requests: int, length: int, num_steps: int) -> None:
        config = SpeculativeConfig.from_dict({"method": method})
        assert config is not None, "a method is given"
        max_tokens = TOKENS_PER_STEP * num_steps + config.num_speculative_tokens + 2
        self.table = TokenTable(num_requests, length + max_tokens)
        self.proposer: Proposer = make_proposer(config, self.table)
        self.rng = np.random.default_rng(0)
        self.requests = []
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        for index in range(num_requests):
            request = Request(f"r{index}", self.tokens(length), params, max_tokens=max_tokens)
            request.row = self.table.acquire(request.prompt_token_ids)
            request.num_computed_tokens = length - 1
            self.requests.append(request)

    def tokens(self, num_tokens: int) -> list[int]:
        """Return tokens of which few are frequent."""
        drawn: list[int] = (self.rng.zipf(SPREAD, num_tokens) % VOCAB_SIZE).tolist()
        return drawn

    def time_us(self) -> float:
        """Return the microseconds per request of one lookup."""
        start = time.perf_counter()
        self.proposer.propose(self.requests)
        return (time.perf_counter() - start) / len(self.requests) * 1e6

    def commit(self) -> None:
        """Give every request the tokens of a step."""
        for request in self.requests:
            for token in self.tokens(TOKENS_PER_STEP):
                self.table.token_ids[request.row, request.num_tokens] = token
                request.append_output_token(token)
            request.num_computed_tokens = request.num_tokens - 1


def main() -> None:
    """Measure, print a table for each state and a last line of JSON."""
    args = parse_args()
    machine = describe_machine()
    buffer = np.ones(FLUSH_BYTES // 4, np.int32)
    print(__doc__.splitlines()[0])
    print(format_machine(machine))
    print(f"{args.repeats} steps a cell after {NUM_WARMUPS} to warm up")

    results: dict[str, dict[str, float]] = {}
    for batch in args.batches:
        rows = [["method", "context", "first ms", *(f"{state}: median us (10 %, 90 %)" for state in STATES)]]
        for method in args.methods:
            for length in args.contexts:
                first_us, times_us = measure(method, batch, length, args.repeats, buffer)
                row = [method, str(length), f"{first_us / 1000:.2f}"]
                cell = {"first_us": round(first_us, 1)}
                for state in STATES:
                    low, median, high = np.percentile(times_us[state], [10, 50, 90])
                    cell[f"{state}_us"] = round(float(median), 2)
                    row.append(f"{median:.2f} ({low:.2f}, {high:.2f})")
                rows.append(row)
                results[f"{method}, context {length}, batch {batch}"] = cell
        print(f"\nper request and step, {batch} requests at a time\n{format_rows(rows)}", flush=True)
    print()
    print(json.dumps({"per_request": results, "machine": machine}))


def parse_args() -> argparse.Namespace:
    """Return the settings of a run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=SPECULATIVE_METHODS, default=list(SPECULATIVE_METHODS))
    parser.add_argument("--contexts", type=int, nargs="+", default=[1 << 10, 1 << 14, 1 << 17], help="known tokens")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64], help="requests at a time")
    parser.add_argument("--repeats", type=int, default=50, help="steps a cell (default 50)")
    return parser.parse_args()


def measure(
    method: str, batch: int, length: int, num_steps: int, buffer: npt.NDArray[np.int32]
) -> tuple[float, dict[str, list[float]]]:
    """Return microseconds per request of the first lookup, and of each step by state."""
    load = Load(method, batch, length, len(STATES) * (NUM_WARMUPS + num_steps))
    first_us = load.time_us()
    times_us: dict[str, list[float]] = {}
    for state in STATES:
        times_us[state] = []
        for _ in range(NUM_WARMUPS + num_steps):
            load.commit()
            if state == "cold":
                buffer.max()
            times_us[state].append(load.time_us())
        del times_us[state][:NUM_WARMUPS]
    return first_us, times_us


if __name__ == "__main__":
    main()
