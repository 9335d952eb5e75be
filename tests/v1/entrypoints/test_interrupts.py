"""Ctrl-C waits for the end of a step."""

import os
import signal
import threading

import pytest

from engine_v1.entrypoints.interrupts import DeferredInterrupt


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def run_block(*actions):
    with DeferredInterrupt():
        for action in actions:
            action()


def test_interrupt_waits_for_the_end_of_the_block():
    """All of the block runs, then KeyboardInterrupt is raised."""
    done = []
    with pytest.raises(KeyboardInterrupt):
        run_block(interrupt, lambda: done.append("rest of the block"))
    assert done == ["rest of the block"]


def test_interrupt_is_delivered_once_where_the_block_allows_it():
    """A long block, such as one of many steps, need not be left for Ctrl-C to arrive."""
    seen = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with DeferredInterrupt() as deferred:
            deferred.deliver()
            interrupt()
            assert seen == []
            deferred.deliver()
            assert seen == [signal.SIGINT]
        assert seen == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_second_interrupt_comes_at_once():
    """Who presses Ctrl-C twice does not wait."""
    done = []
    with pytest.raises(KeyboardInterrupt):
        run_block(interrupt, interrupt, lambda: done.append("rest of the block"))
    assert done == []


def test_handler_is_put_back():
    """The handler of the program that uses the engine is its own again after each step."""
    before = signal.getsignal(signal.SIGINT)
    with DeferredInterrupt():
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) == before


def test_own_handler_of_a_program_is_called():
    """A program with a handler of its own gets the signal through it, after the block."""
    seen = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with DeferredInterrupt():
            interrupt()
            assert seen == []
        assert seen == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_failure_of_the_block_comes_first():
    """An error inside the block is not hidden by a pending interrupt."""
    with pytest.raises(ZeroDivisionError):
        run_block(interrupt, lambda: 1 / 0)


def test_other_threads_do_nothing():
    """Only the main thread may set handlers; a step in another thread runs as it is."""
    failures = []

    def run():
        try:
            with DeferredInterrupt():
                pass
        except ValueError as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert failures == []
