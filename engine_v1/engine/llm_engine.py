"""What the offline and the asynchronous front share: prompts to requests, steps, totals, and an end."""

import threading
from collections.abc import Iterable, Sequence

from engine_v1.engine.core import EngineCore
from engine_v1.engine.input_processor import InputProcessor, Prompt
from engine_v1.engine.metrics import EngineStats, Metric
from engine_v1.engine.output_processor import OutputProcessor
from engine_v1.engine.parent_request import ParentCursor, ParentRequest, make_output, next_output
from engine_v1.outputs import RequestOutput
from engine_v1.request import Request
from engine_v1.sampling_params import SamplingParams


class LLMEngine:
    """An engine core with what surrounds it. Several threads may call; one admission, step or abort runs at a time.

    Args:
        core: computes.
        input_processor: makes requests.
        output_processor: makes outputs of them.
        stats: counts what happens; None to keep no totals.
    """

    def __init__(
        self,
        core: EngineCore,
        input_processor: InputProcessor,
        output_processor: OutputProcessor,
        stats: EngineStats | None,
    ) -> None:
        self._core: EngineCore | None = core
        self._input_processor = input_processor
        self._input_lock = threading.Lock()  # not the step's, so that a prompt is read while a step runs
        self._lock = threading.RLock()
        self._output_processor = output_processor
        self._stats = stats
        self.num_ended = 0  # requests that ended in steps: whoever waits for some looks again when it has grown

    @property
    def core(self) -> EngineCore:
        """The engine core.

        Raises:
            RuntimeError: the engine is closed.
        """
        if self._core is None:
            raise RuntimeError("this LLM is closed; make a new one.")
        return self._core

    def make_requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[ParentRequest]:
        """Return checked requests, one per prompt, which nothing runs yet; see :meth:`InputProcessor.process`."""
        _ = self.core  # raises if closed
        with self._input_lock:
            return ParentRequest.group(self._input_processor.process(prompts, params))

    def add(self, parents: Iterable[ParentRequest]) -> None:
        """Queue requests.

        Raises:
            ValueError: an id is in use; none of them is queued then.
        """
        added: list[str] = []
        with self._lock:
            try:
                for parent in parents:
                    for request in parent.requests:
                        self.core.add_request(request)
                        added.append(request.request_id)
            except ValueError:
                self.core.abort_requests(added)
                raise

    def has_unfinished_requests(self) -> bool:
        """Whether a step would compute anything."""
        return self.core.has_unfinished_requests()

    def step(self) -> list[Request]:
        """Compute one step and return the requests that gained tokens or ended."""
        with self._lock:
            updated = self.core.step()
            self.num_ended += sum(request.is_finished for request in updated)
            if self._stats is not None:
                self._stats.observe(updated)
            return updated

    def abort(self, parents: Iterable[ParentRequest]) -> list[Request]:
        """End requests and return those that had not finished; after close() there are none."""
        with self._lock:
            if self._core is None:
                return []
            running = [r for parent in parents for r in parent.requests if not r.is_finished]
            aborted = self._core.abort_requests(request.request_id for request in running)
            if self._stats is not None:
                self._stats.observe(aborted)
            return aborted

    def make_output(self, parent: ParentRequest) -> RequestOutput:
        """Return all that a request has given so far."""
        with self._lock:
            return make_output(self._output_processor, parent)

    def next_output(self, parent: ParentRequest, cursor: ParentCursor) -> RequestOutput | None:
        """Return the next output for a reader; see :func:`engine_v1.engine.parent_request.next_output`."""
        with self._lock:
            return next_output(self._output_processor, parent, cursor)

    def get_metrics(self) -> list[Metric]:
        """Return the totals so far.

        Raises:
            RuntimeError: none are kept.
        """
        if self._stats is None:
            raise RuntimeError("no totals are kept with disable_log_stats=True; leave it False to call get_metrics().")
        with self._lock:
            return self._stats.snapshot(self.core.scheduler)

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        """Forget cached prefixes; see :meth:`Scheduler.reset_prefix_cache`."""
        with self._lock:
            return self.core.reset_prefix_cache(reset_running_requests=reset_running_requests)

    def close(self) -> None:
        """End what is running and let go of the engine. Every later call but this one and abort() raises."""
        with self._lock:
            if self._core is not None:
                self._core.abort_requests(list(self._core.scheduler.requests))
                self._core = None
