"""Imports the scripts that are tested."""

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def script(request):
    """The script that the test file is named after, imported as Python runs it: with its own directory on the path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield importlib.import_module(request.module.__name__.rpartition(".")[2].removeprefix("test_"))
