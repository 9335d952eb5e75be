"""The asynchronous front: requests from coroutines, one engine in a background thread, with vLLM's names."""

import asyncio
import weakref
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from engine_v1.config import check_name
from engine_v1.engine.engine_thread import EngineDeadError, EngineThread, OutputStream
from engine_v1.engine.input_processor import Prompt
from engine_v1.engine.metrics import Metric
from engine_v1.entrypoints.llm import LLM, Message
from engine_v1.outputs import RequestOutput
from engine_v1.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from engine_v1.tokenizer import Tokenizer


class AsyncLLM:
    """Loads a model and generates for any number of coroutines at once, in the event loop of each.

    All requests share the steps of one engine, which runs in a thread of its own. Prompts are read in the caller's
    thread; everything else happens between two steps, so nothing here waits for a step but through `await`.

    A reader that is slower than the engine finds everything since its last output in its next one: the engine never
    waits, and no queue grows.

    Use it as `with AsyncLLM(...) as engine:` or `async with`, or call shutdown().

    Args:
        model: as of :class:`LLM`.
        **options: the keywords of :class:`LLM`.

    Raises:
        ValueError, UnknownOptionError, OSError: as :class:`LLM` does.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self._llm = LLM(model, **options)
        self._engine = self._llm.llm_engine
        self._thread = EngineThread(self._engine)
        # Ends the thread also where nobody calls shutdown(): it must not run on into the interpreter's end.
        self._stop = weakref.finalize(self, self._thread.stop)

    @classmethod
    def from_engine_args(cls, engine_args: Mapping[str, Any]) -> Self:
        """Make one from a mapping of arguments, `model` among them."""
        return cls(**engine_args)

    # ---- requests ----

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate for a prompt and yield outputs as they come, of the kind `sampling_params.output_kind` asks for.

        Closing the generator or cancelling the task that reads it ends the request. A request that fails by itself ends
        with finish_reason "error", its message as stop_reason.

        Args:
            prompt: a text, a list of token ids or a dictionary, as in LLM.generate().
            sampling_params: None: what the model recommends.
            request_id: unique among the unfinished; None: a number that no other request had.

        Raises:
            ValueError: on a bad prompt, parameter or id; other requests do not notice.
            EngineDeadError: the engine has stopped or was shut down.
        """
        self.check_health()
        [request] = self._engine.make_requests([prompt], sampling_params)
        if request_id is not None:
            request.request_id = check_name("request_id", request_id)
        stream = OutputStream(request, asyncio.get_running_loop())
        is_done = False
        try:
            await asyncio.wrap_future(self._thread.add(stream))
            while not is_done:
                output = await stream.get()
                is_done = output.finished
                yield output
        finally:
            if not is_done:
                self._thread.discard(stream)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests by id; each generator yields a last output, with finish_reason "abort".

        Ids that are unknown or have finished are passed over.
        """
        ids = [request_id] if isinstance(request_id, str) else request_id
        await asyncio.wrap_future(self._thread.abort(ids))

    # ---- the engine ----

    @property
    def tokenizer(self) -> "Tokenizer | None":
        """The model's tokenizer; None with skip_tokenizer_init."""
        return self._llm.tokenizer

    def get_tokenizer(self) -> "PreTrainedTokenizerBase":
        """Return the tokenizer as transformers has it; see :meth:`LLM.get_tokenizer`."""
        return self._llm.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of requests that give none."""
        return self._llm.get_default_sampling_params()

    def preprocess_chat(
        self, messages: Sequence[Message] | Sequence[Sequence[Message]], **options: Any
    ) -> list[dict[str, Any]]:
        """Return the prompts of conversations; see :meth:`LLM.preprocess_chat`."""
        return self._llm.preprocess_chat(messages, **options)

    async def get_metrics(self) -> list[Metric]:
        """Return the totals since the start; see :meth:`LLM.get_metrics`."""
        return await asyncio.wrap_future(self._thread.call(self._engine.get_metrics))

    async def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        """Forget cached prefixes; see :meth:`LLM.reset_prefix_cache`."""
        reset = self._engine.reset_prefix_cache
        return await asyncio.wrap_future(
            self._thread.call(lambda: reset(reset_running_requests=reset_running_requests))
        )

    @property
    def is_running(self) -> bool:
        """Whether requests are still answered."""
        return self._thread.error is None

    @property
    def errored(self) -> bool:
        """Whether the engine has stopped by a failure."""
        return self._thread.error is not None and self._thread.error.__cause__ is not None

    def check_health(self) -> None:
        """Do nothing while requests are answered.

        Raises:
            EngineDeadError: they no longer are, and why.
        """
        if self._thread.error is not None:
            raise EngineDeadError(*self._thread.error.args) from self._thread.error.__cause__

    def shutdown(self) -> None:
        """End the engine after the step it is in and give its memory back; waiting generators raise EngineDeadError."""
        self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.shutdown)  # a step may be long, and the loop has others to serve
