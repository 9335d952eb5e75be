"""The table of parameters in docs/parameters.md is complete and true."""

import ast
import re
from dataclasses import fields
from pathlib import Path

import pytest

from engine_v1 import SamplingParams
from engine_v1.sampling_params import _NOT_BUILT
from tests.v1.e2e.test_parameter_cross import ENGINES, cases_of

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| `(\w+)` \| (.+?) \| (.+?) \| `(.+?)::(\w+)` \|$", re.MULTILINE)
ROWS = ROW.findall((ROOT / "docs/parameters.md").read_text(encoding="utf-8"))


def test_every_parameter_has_a_row():
    """The rows are the fields of SamplingParams, in their order."""
    assert [name for name, *_ in ROWS] == [field.name for field in fields(SamplingParams)]


@pytest.mark.parametrize("path, test", sorted({(path, test) for *_, path, test in ROWS}))
def test_every_named_test_exists(path, test):
    """A row's test is a function of its file."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    assert test in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_what_is_said_to_be_equal_is_compared():
    """A row says "yes" where the cross of parameters has the parameter, and "refused" where it is not built."""
    crossed = {name for engine in ENGINES for _, options in cases_of(engine) for name in options}
    assert {name for name, _, equal, *_ in ROWS if equal == "yes"} == crossed
    refused = {name for name, works, equal, *_ in ROWS if works == equal == "refused"}
    assert refused == set(_NOT_BUILT)
    assert len(refused) + len(crossed) == len(ROWS)
