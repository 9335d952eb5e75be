"""Makes requests, schedulers and runner outputs with defaults for all that a test is not about."""

from collections.abc import Sequence
from typing import Any

from engine_v1.config import SchedulerConfig
from engine_v1.core.kv_cache_manager import KVCacheManager
from engine_v1.core.scheduler import Scheduler
from engine_v1.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from engine_v1.core.token_table import TokenTable
from engine_v1.request import Request
from engine_v1.sampling_params import SamplingParams

EOS = 50256
# Drafts of a fixed length, for tests that count steps or want every draft verified.
NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "adaptive": False}
NGRAM_2_TO_4 = NGRAM | {"prompt_lookup_min": 2, "prompt_lookup_max": 4}


def make_request(
    request_id: str = "r0",
    prompt: Sequence[int] | int = 10,
    *,
    max_tokens: int = 16,
    eos_token_id: int | None = EOS,
    stop_token_ids: Sequence[int] = (),
    cache_salt: str | None = None,
    detokenizer: Any = None,
    prediction_token_ids: list[int] | None = None,
    **params: Any,
) -> Request:
    """A request whose prompt is given, or is that many tokens, all of them the request's number."""
    if isinstance(prompt, int):
        prompt = [int(request_id[1:]) if request_id[1:].isdigit() else 0] * prompt
    return Request(
        request_id,
        list(prompt),
        SamplingParams(temperature=0.0, max_tokens=max_tokens, **params),
        max_tokens=max_tokens,
        eos_token_id=eos_token_id,
        stop_token_ids=frozenset(stop_token_ids),
        cache_salt=cache_salt,
        detokenizer=detokenizer,
        prediction_token_ids=prediction_token_ids,
    )


def make_scheduler(
    *,
    max_num_seqs: int = 16,
    max_num_batched_tokens: int = 8192,
    max_model_len: int = 8192,
    num_blocks: int = 10000,
    block_size: int = 16,
    enable_prefix_caching: bool = True,
    num_speculative_tokens: int = 3,
    **config: Any,
) -> Scheduler:
    """A scheduler; block 0 of ``num_blocks`` is the null block."""
    return Scheduler(
        SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            **config,
        ),
        KVCacheManager(num_blocks=num_blocks, block_size=block_size, enable_caching=enable_prefix_caching),
        TokenTable(max_num_seqs, max_model_len),
        num_speculative_tokens=num_speculative_tokens,
    )


def sampled(tokens: dict[str, list[int]], errors: dict[str, str] | None = None) -> ModelRunnerOutput:
    """What the runner returns when it sampled these tokens."""
    return ModelRunnerOutput(sampled_token_ids=tokens, errors=errors or {})


def run_step(scheduler: Scheduler, tokens: dict[str, list[int]] | int = 0) -> SchedulerOutput:
    """Schedule a step and feed it back; an int is sampled by every request that samples, after its drafts."""
    step = scheduler.schedule()
    if isinstance(tokens, int):
        tokens = {s.request_id: [*s.spec_token_ids, tokens] for s in step.scheduled if s.samples}
    scheduler.update_from_output(step, sampled(tokens))
    scheduler.check_integrity()
    return step


def scheduled_tokens(step: SchedulerOutput) -> list[int]:
    """How many tokens each request was given, in the order of the step."""
    return [s.num_scheduled_tokens for s in step.scheduled]
