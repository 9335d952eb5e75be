"""Recorded outputs by the clock of a table: the replayed model says what was recorded, lengths follow its times."""

import argparse
import random

import pytest

from engine_v1.config import SpeculativeConfig
from engine_v1.entrypoints.records import Record


def make_records(count, *, copies):
    """Outputs that copy their prompts, or that have nothing to do with them."""
    rng = random.Random(0)
    records = []
    for _ in range(count):
        prompt = [rng.randrange(1000) for _ in range(60)]
        output = prompt[10:50] if copies else [rng.randrange(1000) for _ in range(40)]
        records.append(Record([*prompt, prompt[8], prompt[9]], output))
    return records


OPTIONS = argparse.Namespace(max_tokens=40, noise=0.05, seeds=2)


def test_copies_are_said_in_less_time(script):
    """One request at a time whose output stands in its prompt: more than twice as fast over decode time."""
    line = script.compare(make_records(2, copies=True), 1, SpeculativeConfig(), OPTIONS)
    assert line["decode_ratio"] > 2
    assert line["tokens_per_step"] > 4
    assert line["acceptance_rate"] > 0.9


@pytest.mark.parametrize("num_requests", [1, 16])
def test_lengths_that_follow_the_cost_lose_nothing_on_random_text(script, num_requests):
    """What has nothing to copy takes the same time within 1 %; at 16 requests so does text of chance repetitions."""
    line = script.compare(make_records(16, copies=False), num_requests, SpeculativeConfig(), OPTIONS)
    assert line["ratio"] > 0.99


def test_the_clock_is_that_of_the_table(script):
    """Without noise and drafts: 40 tokens in 40 steps, of which the first has the prompt's 62 rows."""
    times = script.replay(make_records(1, copies=False), 1, None, max_tokens=40, noise=0.0, seed=0)
    assert (times.num_tokens, times.num_steps, times.num_drafted) == (40, 40, 0)
    assert times.decode_s == pytest.approx(39 * 4.8e-3, rel=0.02)
    assert times.all_s - times.decode_s == pytest.approx(31.93e-3, rel=0.05)
