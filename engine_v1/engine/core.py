"""The engine's step: propose, schedule, execute, update."""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from engine_v1.config import EngineConfig, SpeculativeConfig
from engine_v1.core.kv_cache_manager import KVCacheManager
from engine_v1.core.scheduler import Scheduler
from engine_v1.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from engine_v1.core.token_table import TokenTable
from engine_v1.kernels.parallel import ForkedProcessError
from engine_v1.models.config import DecoderConfig
from engine_v1.models.loader import computed_dtype, open_model
from engine_v1.platforms import Platform, get_platform
from engine_v1.request import Request, RequestStatus
from engine_v1.spec_decode.cost_model import CostModel
from engine_v1.spec_decode.factory import make_proposer
from engine_v1.spec_decode.grammar_proposer import GrammarProposer
from engine_v1.spec_decode.length_controller import AdaptiveLength, BatchSizeTable, LengthController
from engine_v1.spec_decode.prediction_proposer import PredictionProposer
from engine_v1.spec_decode.proposer import Proposer
from engine_v1.spec_decode.successors import SuccessorTable
from engine_v1.worker.calibration import measure_step_times
from engine_v1.worker.gpu_model_runner import GPUModelRunner

logger = logging.getLogger(__name__)


class EngineCore:
    """Runs requests to their end, a step at a time.

    Args:
        scheduler: holds the requests.
        runner: computes a step.
        proposer: drafts before each step; None to decode plainly.
        length_controllers: shorten what was drafted, one after the other.
        clock: seconds, by which the controllers learn what a step takes.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: GPUModelRunner,
        proposer: Proposer | None = None,
        length_controllers: Sequence[LengthController] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.proposer = proposer
        self.length_controllers = length_controllers
        self.clock = clock

    def add_request(self, request: Request) -> None:
        """Queue a request; see :meth:`Scheduler.add_request`."""
        self.scheduler.add_request(request)

    def abort_requests(self, request_ids: Iterable[str]) -> list[Request]:
        """End requests between two steps; ids that are unknown or have finished are passed over."""
        aborted = self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)
        self._tell_proposer(aborted)
        return aborted

    def has_unfinished_requests(self) -> bool:
        return self.scheduler.has_unfinished_requests()

    def step(self) -> list[Request]:
        """Compute one step and return the requests that gained tokens or ended."""
        if not self.has_unfinished_requests():
            return []
        if self.proposer is not None:
            self.proposer.propose(self.scheduler.running)
        for controller in self.length_controllers:
            controller.shorten(self.scheduler.running, self.scheduler.waiting)
        step = self.scheduler.schedule()
        assert step.scheduled, "a step with unfinished requests computes something"
        self._tell_proposer([self.scheduler.requests[request_id] for request_id in step.preempted_req_ids])
        started = self.clock()
        output = self._execute(step)
        seconds = self.clock() - started
        updated = self.scheduler.update_from_output(step, output)
        for controller in self.length_controllers:
            controller.observe(step, seconds)
        self._tell_proposer([request for request in updated if request.is_finished])
        return updated

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        """Forget cached prefixes; see :meth:`Scheduler.reset_prefix_cache`."""
        running = list(self.scheduler.running)
        was_reset = self.scheduler.reset_prefix_cache(reset_running_requests=reset_running_requests)
        self._tell_proposer([request for request in running if request.row < 0])
        return was_reset

    def _tell_proposer(self, requests: Iterable[Request]) -> None:
        """Let the proposer know of requests that have lost their rows, and of their end where they have ended."""
        if self.proposer is None:
            return
        for request in requests:
            self.proposer.released(request)
            if request.is_finished:
                self.proposer.finished(request)

    def _execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Run the model; if it fails, run each request by itself so that only those that fail alone end."""
        try:
            return self.runner.execute_model(step)
        except ForkedProcessError:
            raise  # no request's fault, and no request of this process will ever run
        except Exception as failure:  # whatever a model raises ends requests, never the engine
            logger.exception("a step of %d requests failed", len(step.scheduled))
            if len(step.scheduled) == 1:
                error = f"{type(failure).__name__}: {failure}"
                return ModelRunnerOutput(errors={step.scheduled[0].request_id: error})
        merged = ModelRunnerOutput()
        for part in step.split():
            output = self._execute(part)
            merged.sampled_token_ids |= output.sampled_token_ids
            merged.logprobs |= output.logprobs
            merged.prompt_logprobs |= output.prompt_logprobs
            merged.errors |= output.errors
        return merged


def build_engine_core(
    config: EngineConfig, model_directory: Path, decoder_config: DecoderConfig, corpus: SuccessorTable | None = None
) -> EngineCore:
    """Load the model and put an engine together.

    Args:
        config: checked settings.
        model_directory: weights in Hugging Face's layout.
        decoder_config: what the model looks like.
        corpus: what follows what in the reference texts that drafts may come from.

    Raises:
        ValueError: the KV cache would have fewer than two usable blocks.
    """
    platform = get_platform(config.model.device)
    dtype = computed_dtype(model_directory, config.model.dtype, platform.device)
    with platform.compiling_ahead(decoder_config.architecture, dtype):
        return _build(platform, config, model_directory, decoder_config, corpus)


def _build(
    platform: Platform,
    config: EngineConfig,
    model_directory: Path,
    decoder_config: DecoderConfig,
    corpus: SuccessorTable | None,
) -> EngineCore:
    loaded = open_model(model_directory, decoder_config, dtype=config.model.dtype, device=platform.device)
    block_size, scheduler_config = config.cache.block_size, config.scheduler
    bytes_per_block = (
        2  # keys and values
        * decoder_config.num_hidden_layers
        * decoder_config.num_key_value_heads
        * platform.cached_head_dim(decoder_config.head_dim)
        * loaded.dtype.itemsize
        * block_size
    )
    num_blocks = _num_blocks(
        config, bytes_per_block, platform.kv_cache_memory_bytes(config.cache.gpu_memory_utilization)
    )
    token_table = TokenTable(scheduler_config.max_num_seqs, scheduler_config.max_model_len)
    kv_cache = KVCacheManager(
        num_blocks=num_blocks, block_size=block_size, enable_caching=config.cache.enable_prefix_caching
    )
    speculative = config.speculative
    scheduler = Scheduler(
        scheduler_config,
        kv_cache,
        token_table,
        num_speculative_tokens=speculative.num_speculative_tokens if speculative else 0,
    )
    proposer = None
    if speculative is not None:
        num_speculative_tokens = speculative.num_speculative_tokens
        drafter = make_proposer(speculative, token_table, corpus)
        predicting = PredictionProposer(drafter, num_speculative_tokens=num_speculative_tokens)
        proposer = GrammarProposer(predicting, num_speculative_tokens=num_speculative_tokens)
    backend = platform.make_backend(loaded, config, num_blocks=num_blocks)
    logger.info("computing through %s", backend.describe())
    runner = GPUModelRunner(backend, token_table, block_size=block_size, vocab_size=decoder_config.vocab_size)
    return EngineCore(scheduler, runner, proposer, _length_controllers(speculative, scheduler, runner))


def _length_controllers(
    speculative: SpeculativeConfig | None, scheduler: Scheduler, runner: GPUModelRunner
) -> list[LengthController]:
    """Return what bounds drafts: the user's table, then what step times say. The model is timed for the latter."""
    controllers: list[LengthController] = []
    if speculative is None:
        return controllers
    if speculative.num_speculative_tokens_per_batch_size is not None:
        controllers.append(BatchSizeTable(speculative.num_speculative_tokens_per_batch_size))
    if speculative.adaptive:
        config, pool = scheduler.config, scheduler.kv_cache.block_pool
        # Slots, not what a request may grow to: the last token of one that ends needs none.
        max_context = min(config.max_model_len, pool.num_usable_blocks * scheduler.kv_cache.block_size)
        try:
            times = measure_step_times(runner, max_rows=config.max_num_batched_tokens, max_context=max_context)
        except Exception:  # whatever a model raises is a matter of the requests that it will raise for
            logger.exception("the model could not be timed; drafts keep their full length")
            return controllers
        controllers.append(
            AdaptiveLength(
                CostModel(times),
                num_rows=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
            )
        )
    return controllers


def _num_blocks(config: EngineConfig, bytes_per_block: int, default_bytes: int) -> int:
    """Return the pool's size, the null block included."""
    if config.cache.num_gpu_blocks_override is not None:
        num_blocks = config.cache.num_gpu_blocks_override
    else:
        memory_bytes = config.cache.kv_cache_memory_bytes or default_bytes
        most_needed = config.scheduler.max_num_seqs * -(-config.scheduler.max_model_len // config.cache.block_size) + 1
        num_blocks = min(memory_bytes // bytes_per_block, most_needed)
    if num_blocks < 3:
        raise ValueError(
            f"the KV cache has {num_blocks} blocks of {config.cache.block_size} tokens ({bytes_per_block} bytes each); "
            "it needs at least 3, one of them reserved; raise num_gpu_blocks_override or kv_cache_memory_bytes"
        )
    return num_blocks
