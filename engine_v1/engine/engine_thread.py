"""Runs an engine in a thread of its own and hands each request's outputs to an event loop."""

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

from engine_v1.engine.llm_engine import LLMEngine
from engine_v1.engine.parent_request import ParentCursor, ParentRequest
from engine_v1.outputs import CompletionOutput, RequestOutput
from engine_v1.request import Request
from engine_v1.sampling_params import RequestOutputKind

logger = logging.getLogger(__name__)

T = TypeVar("T")


class EngineDeadError(RuntimeError):
    """The engine has stopped, by a failure or because it was shut down; no request will be answered."""


class OutputStream:
    """One request's outputs on their way from the engine's thread to a coroutine.

    Holds one output at most, so a slow reader holds up neither the engine nor memory: what it has not fetched is merged
    with what comes, deltas joined, of others the newest kept.

    Args:
        request: whose outputs they are.
        loop: the event loop that the reader runs in.
    """

    def __init__(self, request: ParentRequest, loop: asyncio.AbstractEventLoop) -> None:
        self.request = request
        self.cursor = ParentCursor(request)
        self._loop = loop
        self._lock = threading.Lock()
        self._pending: RequestOutput | EngineDeadError | None = None
        self._has_pending = asyncio.Event()

    def put(self, item: RequestOutput | EngineDeadError) -> None:
        """Give an output, or the reason that no more will come; called by the engine's thread."""
        with self._lock:
            earlier, is_delta = self._pending, self.cursor.output_kind == RequestOutputKind.DELTA
            if is_delta and isinstance(earlier, RequestOutput) and isinstance(item, RequestOutput):
                item = join_deltas(earlier, item)
            self._pending = item
        if earlier is None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody reads
                self._loop.call_soon_threadsafe(self._has_pending.set)

    async def get(self) -> RequestOutput:
        """Wait for the next output; called in the event loop, by one reader.

        Raises:
            EngineDeadError: no more will come.
        """
        while True:
            with self._lock:
                item, self._pending = self._pending, None
                self._has_pending.clear()
            if isinstance(item, EngineDeadError):
                raise EngineDeadError(*item.args) from item.__cause__  # others raise it too
            if item is not None:
                return item
            await self._has_pending.wait()


def join_deltas(earlier: RequestOutput, later: RequestOutput) -> RequestOutput:
    """Return what both deltas say; `earlier` is used up."""
    completions = {completion.index: completion for completion in earlier.outputs}
    for new in later.outputs:
        old = completions.get(new.index)
        completions[new.index] = new if old is None else _join_completions(old, new)
    later.outputs = [completions[index] for index in sorted(completions)]
    if later.prompt_logprobs is None:
        later.prompt_logprobs = earlier.prompt_logprobs
    return later


def _join_completions(old: CompletionOutput, new: CompletionOutput) -> CompletionOutput:
    old.token_ids += new.token_ids
    if old.logprobs is not None and new.logprobs is not None:
        old.logprobs += new.logprobs
    new.text, new.token_ids, new.logprobs = old.text + new.text, old.token_ids, old.logprobs
    return new


class EngineThread:
    """Steps an engine while it has requests; everything that changes the engine runs in this thread, between steps.

    Args:
        engine: is closed when the thread ends; nothing else may step it.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._streams: dict[str, OutputStream] = {}  # of unfinished requests; the thread's own
        self._commands: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # of the two below
        self._is_accepting = True
        self.error: EngineDeadError | None = None  # why the thread has ended
        self._thread = threading.Thread(target=self._run, name="engine_v1", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], T]) -> "Future[T]":
        """Have a function run between two steps; what it raises is its caller's and ends nothing.

        Raises:
            EngineDeadError: the thread has ended.
        """
        future: Future[T] = Future()
        with self._lock:
            if not self._is_accepting:
                raise self.error or EngineDeadError("the engine is shutting down.")
            self._commands.put((function, future))
        return future

    def add(self, stream: OutputStream) -> "Future[None]":
        """Queue a stream's request.

        Raises (the future):
            ValueError: its id is in use.
        """

        def add() -> None:
            self._engine.add([stream.request])
            self._streams[stream.request.request_id] = stream

        return self.call(add)

    def abort(self, request_ids: Iterable[str]) -> "Future[None]":
        """End requests by their ids; each stream gets a last output, with finish_reason "abort"."""
        ids = list(request_ids)
        return self.call(lambda: self._abort([self._streams[i] for i in ids if i in self._streams]))

    def discard(self, stream: OutputStream) -> None:
        """End a request that nobody waits for any more, if it was ever added and still runs."""

        def discard() -> None:
            if self._streams.get(stream.request.request_id) is stream:
                self._abort([stream])

        with contextlib.suppress(EngineDeadError):
            self.call(discard)

    def stop(self) -> None:
        """End the thread after the step it is in, and what runs with it."""
        with self._lock:
            self._is_accepting = False
            self._commands.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # ---- in the thread ----

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            while self._run_commands():
                if self._streams:
                    self._deliver(self._engine.step())
        except BaseException as error:  # whoever waits for the engine must hear of its end
            logger.exception("the engine has stopped")
            failure = error
        self._end(failure)

    def _run_commands(self) -> bool:
        """Run what callers have asked for, waiting for it while there is nothing to step; False: stop.

        What they ask for meanwhile waits for a step, so that no flood of calls keeps requests from going on.
        """
        for _ in range(self._commands.qsize() or (0 if self._streams else 1)):
            command = self._commands.get()
            if command is None:
                return False
            _run_command(*command)
        return True

    def _deliver(self, updated: list[Request]) -> None:
        for request_id in dict.fromkeys(request.parent_id for request in updated):
            stream = self._streams[request_id]
            output = self._engine.next_output(stream.request, stream.cursor)
            if output is not None:
                stream.put(output)
            if stream.request.is_finished:
                del self._streams[request_id]

    def _abort(self, streams: list[OutputStream]) -> None:
        self._deliver(self._engine.abort([stream.request for stream in streams]))

    def _end(self, failure: BaseException | None) -> None:
        reason = "the engine was shut down." if failure is None else f"the engine has stopped: {failure!r}."
        with self._lock:
            self._is_accepting = False
            self.error = EngineDeadError(reason)
            self.error.__cause__ = failure
        for stream in self._streams.values():
            stream.put(self.error)
        self._streams.clear()
        while not self._commands.empty():
            command = self._commands.get()
            if command is not None and command[1].set_running_or_notify_cancel():
                command[1].set_exception(self.error)
        with contextlib.suppress(Exception):  # a broken engine need not be able to abort requests
            self._engine.close()


def _run_command(function: Callable[[], Any], future: "Future[Any]") -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(function())
        except Exception as error:  # it is the caller's
            future.set_exception(error)
