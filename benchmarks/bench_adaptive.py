"""What do adaptive draft lengths gain and lose, by a clock that has no neighbours?

Recorded outputs (`engine-v1 generate --record`) are replayed through the real scheduler, drafter and length controller;
only the model is replaced: it says what was recorded, and a step takes what a table of step times says, with noise of
its own if asked for. The controller sees noisy measurements of that table, as it would on a real machine. Times are
those without the steps' noise, so that a percent can be seen that no real run would show.

The step times are SmolLM2-135M's in bfloat16 on 2 cores of an AMD EPYC with quick memory (docs/limits.md).
"""

import argparse
import json
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_v1.config import SchedulerConfig, SpeculativeConfig
from engine_v1.core.kv_cache_manager import KVCacheManager
from engine_v1.core.scheduler import Scheduler
from engine_v1.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from engine_v1.core.token_table import TokenTable
from engine_v1.engine.core import EngineCore
from engine_v1.entrypoints.arguments import json_object
from engine_v1.entrypoints.records import Record, read_records
from engine_v1.request import Request
from engine_v1.sampling_params import SamplingParams
from engine_v1.spec_decode.cost_model import CostModel, RowCurve, StepTimes
from engine_v1.spec_decode.factory import make_proposer
from engine_v1.spec_decode.length_controller import AdaptiveLength

LAYERS = RowCurve({1: 3.9e-3, 6: 4.7e-3, 16: 8.6e-3, 64: 32.0e-3})
HEAD = RowCurve({1: 0.9e-3, 8: 1.1e-3, 64: 6.7e-3})  # output projection and sampling, of sampled rows
KEY_S, ROW_KEY_S = 0.45e-6, 0.15e-6
MEASURED_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 48, 64, 96)
PROMPTS = {1: 10, 4: 16, 16: 64, 64: 64}  # requests at a time -> records of a cell, as in bench_never_slower.py
MAX_MODEL_LEN = 4096
NUM_BATCHED_TOKENS = 4096


@dataclass
class Times:
    """What a replay took, by the clock of the table."""

    all_s: float = 0.0
    decode_s: float = 0.0  # of it, steps without prompt tokens
    num_steps: int = 0  # request-steps
    num_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0


class ReplayedModel:
    """Says what was recorded and takes the time that the table says.

    Args:
        outputs: request id -> its record.
        noise: what a step's time is stretched by: its spread, and one step in 33 up to three times as long; 0 for none.
        rng: of the noise.
    """

    def __init__(self, outputs: dict[str, Record], noise: float, rng: random.Random) -> None:
        self._outputs = outputs
        self._noise = noise
        self._rng = rng
        self.now = 0.0
        self.times = Times()

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Return the recorded tokens as far as drafts agree with them, and move the clock."""
        output = ModelRunnerOutput()
        num_rows = num_sampled = num_keys = num_draft_keys = 0
        is_decode = True
        for share in step.scheduled:
            num_drafts = len(share.spec_token_ids)
            num_rows += share.num_scheduled_tokens
            num_keys += share.num_computed_tokens
            num_draft_keys += num_drafts * share.num_computed_tokens
            is_decode &= share.samples and share.num_scheduled_tokens == 1 + num_drafts
            if not share.samples:
                continue
            num_sampled += 1 + num_drafts
            record = self._outputs[share.request_id]
            end = share.num_computed_tokens + share.num_scheduled_tokens - num_drafts
            coming = record.output_token_ids[end - len(record.prompt_token_ids) :]
            num_right = 0
            while num_right < num_drafts and share.spec_token_ids[num_right] == coming[num_right]:
                num_right += 1
            output.sampled_token_ids[share.request_id] = coming[: num_right + 1]
        seconds = LAYERS.seconds(num_rows) + HEAD.seconds(num_sampled) + KEY_S * num_keys + ROW_KEY_S * num_draft_keys
        self.times.all_s += seconds
        self.times.decode_s += seconds if is_decode else 0.0
        stretch = 1.0
        if self._noise:
            stretch += abs(self._rng.gauss(0.0, self._noise))
            stretch += 2.0 * self._rng.random() if self._rng.random() < 0.03 else 0.0
        self.now += seconds * stretch
        return output


def measured(noise: float, rng: random.Random) -> StepTimes:
    """Return the table as a calibration finds it: at other sizes, each the better of two noisy measurements."""

    def stretch() -> float:
        return 1.0 + min(abs(rng.gauss(0.0, noise)) for _ in range(2))

    return StepTimes(
        rows={rows: (LAYERS.seconds(rows) + HEAD.seconds(rows)) * stretch() for rows in MEASURED_ROWS},
        key_s=KEY_S * stretch(),
        row_key_s=ROW_KEY_S * stretch(),
    )


def replay(
    records: Sequence[Record],
    num_requests: int,
    config: SpeculativeConfig | None,
    max_tokens: int,
    noise: float,
    seed: int,
) -> Times:
    """Replay records with so many requests at a time and return what it took."""
    rng = random.Random(seed)
    num_drafts = config.num_speculative_tokens if config else 0
    outputs = {str(index): record for index, record in enumerate(records)}
    model = ReplayedModel(outputs, noise, rng)
    table = TokenTable(num_requests, MAX_MODEL_LEN)
    pool = KVCacheManager(num_blocks=1 + num_requests * MAX_MODEL_LEN // 16, block_size=16, enable_caching=False)
    limits = SchedulerConfig(num_requests, NUM_BATCHED_TOKENS, MAX_MODEL_LEN)
    scheduler = Scheduler(limits, pool, table, num_speculative_tokens=num_drafts)
    controllers = []
    if config is not None and config.adaptive:
        cost = CostModel(measured(noise, rng))
        controllers.append(AdaptiveLength(cost, num_rows=num_requests, max_num_batched_tokens=NUM_BATCHED_TOKENS))
    proposer = None if config is None else make_proposer(config, table)
    core = EngineCore(scheduler, model, proposer, controllers, lambda: model.now)  # type: ignore[arg-type]
    for request_id, record in outputs.items():
        num_tokens = min(max_tokens, len(record.output_token_ids))
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens)
        core.add_request(Request(request_id, record.prompt_token_ids, params, max_tokens=num_tokens))
    requests = list(scheduler.requests.values())
    while core.has_unfinished_requests():
        core.step()
    times = model.times
    times.num_steps = sum(len(request.step_drafted) for request in requests)
    times.num_tokens = sum(request.num_output_tokens for request in requests)
    times.num_drafted = sum(sum(request.step_drafted) for request in requests)
    times.num_accepted = sum(sum(request.step_accepted) for request in requests)
    return times


def compare(records: Sequence[Record], num_requests: int, config: SpeculativeConfig, args: argparse.Namespace) -> Any:
    """Return the ratios of one group of records, the median over seeds."""
    options = (args.max_tokens, args.noise)
    plain = replay(records, num_requests, None, *options, seed=0)
    runs = [replay(records, num_requests, config, *options, seed=seed) for seed in range(args.seeds)]
    first = runs[0]
    return {
        "ratio": round(statistics.median(plain.all_s / run.all_s for run in runs), 4),
        "decode_ratio": round(statistics.median(plain.decode_s / run.decode_s for run in runs), 4),
        "tokens_per_step": round(first.num_tokens / first.num_steps, 3),
        "draft_tokens_per_step": round(first.num_drafted / first.num_steps, 3),
        "acceptance_rate": round(first.num_accepted / max(1, first.num_drafted), 3),
    }


def main() -> None:
    """Replay, print the table and a last line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--outputs", type=Path, required=True, help="recorded outputs, JSON lines")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16, 64], help="requests at a time")
    parser.add_argument("--speculative-config", type=json_object, default={"method": "ngram"}, metavar="JSON")
    parser.add_argument("--max-tokens", type=int, default=64, help="of an output")
    parser.add_argument("--noise", type=float, default=0.05, help="spread of step times (default 0.05)")
    parser.add_argument("--seeds", type=int, default=3, help="of the noise, of which the median counts")
    args = parser.parse_args()
    print(__doc__.splitlines()[0])
    config = SpeculativeConfig.from_dict(args.speculative_config)
    if config is None:
        parser.error("--speculative-config is what is compared with none; leave it at its default")
    records = read_records(args.outputs)
    figures: dict[str, dict[str, Any]] = {}
    print(
        f"\n{'at a time':>9}  {'category':<16}{'on/off':>8}{'decode':>8}{'tok/step':>10}{'drafted/step':>14}"
        f"{'accepted':>10}"
    )
    for num_requests in args.concurrency:
        for category in dict.fromkeys(record.category for record in records):
            chosen = [record for record in records if record.category == category]
            count = PROMPTS.get(num_requests, 4 * num_requests)  # again and again where there are not so many
            chosen = (chosen * -(-count // len(chosen)))[:count]
            line = compare(chosen, num_requests, config, args)
            figures.setdefault(str(num_requests), {})[category] = line
            print(
                f"{num_requests:>9}  {category:<16}{line['ratio']:>8.3f}{line['decode_ratio']:>8.3f}"
                f"{line['tokens_per_step']:>10.2f}{line['draft_tokens_per_step']:>14.2f}{line['acceptance_rate']:>10.0%}",
                flush=True,
            )
    worst = min(line["ratio"] for group in figures.values() for line in group.values())
    print(f"\n{json.dumps({'worst_ratio': worst, 'speculative_config': args.speculative_config} | figures)}")


if __name__ == "__main__":
    main()
