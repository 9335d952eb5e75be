"""Lets Ctrl-C wait for the end of a step, so that it never leaves the engine half-way through one."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self


class DeferredInterrupt:
    """Delivers a SIGINT that arrives inside the `with` block at its end or by :meth:`deliver`; a second one at once.

    Only the main thread receives signals; elsewhere, and where SIGINT is ignored, it does nothing.
    """

    def __init__(self) -> None:
        self._previous: Any = None
        self._frame: FrameType | None = None
        self._is_pending = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread() and callable(signal.getsignal(signal.SIGINT)):
            self._previous = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._previous is None:
            return
        signal.signal(signal.SIGINT, self._previous)
        # A failure of the block itself is what its caller must see.
        if error is None:
            self.deliver()

    def deliver(self) -> None:
        """Deliver what has arrived, at a place within the block where it does no harm."""
        if self._is_pending:
            self._is_pending = False
            self._previous(signal.SIGINT, self._frame)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._is_pending:
            self._is_pending = False
            self._previous(number, frame)
        self._is_pending, self._frame = True, frame
