"""The arithmetic of a throughput benchmark, and the table it prints."""

import importlib.metadata
import os
import platform
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_v1.outputs import RequestOutput
from engine_v1.spec_decode.metrics import SpecDecodingStats


@dataclass(frozen=True)
class RequestResult:
    """What one request of one run gave, and how long it took."""

    category: str
    num_prompt_tokens: int
    token_ids: tuple[int, ...]
    finish_reason: str | None
    prefill_s: float  # from the first step that held it to its first token
    decode_s: float  # from its first token to its end
    step_drafted: tuple[int, ...]  # draft rows verified, of every step that gave tokens
    step_accepted: tuple[int, ...]  # draft tokens committed, of the same steps

    @classmethod
    def from_output(cls, category: str, output: RequestOutput) -> "RequestResult":
        """Read a finished request; one that ended with an error is one too.

        Raises:
            RuntimeError: if the request failed, since its speed would mean nothing.
        """
        completion, times = output.outputs[0], output.metrics
        if completion.finish_reason == "error":
            raise RuntimeError(f"request {output.request_id} failed: {completion.stop_reason}")
        assert times is not None, "a finished request has its times"
        started, first, finished = times.first_scheduled_time, times.first_token_time, times.finished_time
        assert started is not None and first is not None and finished is not None, "it ran and ended"  # noqa: PT018
        spec = completion.spec_decode_metrics
        plain = [0] * len(completion.token_ids)  # without speculation every token is a step
        return cls(
            category=category,
            num_prompt_tokens=len(output.prompt_token_ids),
            token_ids=tuple(completion.token_ids),
            finish_reason=completion.finish_reason,
            prefill_s=first - started,
            decode_s=finished - first,
            step_drafted=tuple(plain if spec is None else spec.per_step_drafted),
            step_accepted=tuple(plain if spec is None else spec.per_step_accepted),
        )

    @property
    def busy_s(self) -> float:
        """Seconds it was in the engine, waiting excluded."""
        return self.prefill_s + self.decode_s


@dataclass(frozen=True)
class Run:
    """All requests of one pass over the prompts, in the prompts' order."""

    results: tuple[RequestResult, ...]
    wall_s: float
    start_s: float  # seconds to make the engine


@dataclass(frozen=True)
class Summary:
    """Speed and drafting of a group of requests.

    Requests overlap, so a group's time is its share of the wall clock: the busy seconds of its requests over
    those of all, and likewise for prefill and decode. One request at a time, these are the seconds
    themselves.
    """

    num_prompts: int
    num_prompt_tokens: int
    num_output_tokens: int
    wall_s: float
    prefill_s: float
    decode_s: float
    num_decode_steps: int  # request-steps, but those that ended a prompt
    stats: SpecDecodingStats

    @property
    def tokens_per_s(self) -> float:
        """Output tokens over the group's wall time, prefill included."""
        return _ratio(self.num_output_tokens, self.wall_s)

    @property
    def decode_tokens_per_s(self) -> float:
        """Output tokens after each request's first, over decode time."""
        return _ratio(self.num_output_tokens - self.num_prompts, self.decode_s)

    @property
    def tokens_per_step(self) -> float:
        """Tokens per decode step, drafted or not; 1 without speculation."""
        return _ratio(self.num_output_tokens - self.num_prompts, self.num_decode_steps) or 1.0

    @property
    def tokens_per_drafted_step(self) -> float:
        """1 + accepted tokens per step that carried a draft."""
        return self.stats.mean_acceptance_length

    def to_json(self) -> dict[str, Any]:
        """Return the figures under the names that benchmarks print."""
        return {
            "num_prompts": self.num_prompts,
            "prompt_tokens": self.num_prompt_tokens,
            "output_tokens": self.num_output_tokens,
            "wall_s": round(self.wall_s, 3),
            "prefill_s": round(self.prefill_s, 3),
            "decode_s": round(self.decode_s, 3),
            "tokens_per_s": round(self.tokens_per_s, 2),
            "decode_tokens_per_s": round(self.decode_tokens_per_s, 2),
            "tokens_per_step": round(self.tokens_per_step, 4),
            "tokens_per_drafted_step": round(self.tokens_per_drafted_step, 4),
            "acceptance_rate": round(self.stats.draft_acceptance_rate, 4),
            "acceptance_per_position": [round(rate, 4) for rate in self.stats.acceptance_rate_per_pos],
            "draft_tokens": self.stats.num_draft_tokens,
            "accepted_tokens": self.stats.num_accepted_tokens,
        }


def summarize(runs: Sequence[Run], category: str | None = None) -> Summary:
    """Sum up one category, or all requests, over runs of the same prompts.

    Times are medians over the runs; tokens and drafts are those of the first, since the others repeat it.
    """
    times = [_times(run, category) for run in runs]
    wall_s, prefill_s, decode_s = (statistics.median(values) for values in zip(*times, strict=True))
    chosen = _of(runs[0], category)
    stats = SpecDecodingStats.new(max((max(r.step_drafted, default=0) for r in chosen), default=0))
    for result in chosen:
        for num_drafted, num_accepted in zip(result.step_drafted, result.step_accepted, strict=True):
            stats.observe_draft(num_drafted, num_accepted)
    return Summary(
        num_prompts=len(chosen),
        num_prompt_tokens=sum(r.num_prompt_tokens for r in chosen),
        num_output_tokens=sum(len(r.token_ids) for r in chosen),
        wall_s=wall_s,
        prefill_s=prefill_s,
        decode_s=decode_s,
        num_decode_steps=sum(len(r.step_drafted) - 1 for r in chosen),
        stats=stats,
    )


def count_identical(runs: Sequence[Run], category: str | None = None) -> int:
    """Count the prompts that got the same tokens and the same finish reason in every run."""
    columns = zip(*(_of(run, category) for run in runs), strict=True)
    return sum(len({(r.token_ids, r.finish_reason) for r in column}) == 1 for column in columns)


def categories(run: Run) -> list[str]:
    """Return the categories of a run in the order in which they come."""
    return list(dict.fromkeys(result.category for result in run.results))


def report(on: Sequence[Run], off: Sequence[Run] = ()) -> dict[str, Any]:
    """Return all figures of a benchmark.

    Args:
        on: runs of the configuration asked for.
        off: runs without speculation, as many, or none.
    """
    total = summarize(on)
    figures = total.to_json() | {"start_s": round(statistics.median(run.start_s for run in on), 2)}
    figures["per_category"] = {name: summarize(on, name).to_json() for name in categories(on[0])}
    if not off:
        return figures
    plain = summarize(off)
    pairs = zip(on, off, strict=True)
    ratios = [_ratio(summarize([a]).tokens_per_s, summarize([b]).tokens_per_s) for a, b in pairs]
    figures |= {
        "tokens_per_s_no_spec": round(plain.tokens_per_s, 2),
        "decode_tokens_per_s_no_spec": round(plain.decode_tokens_per_s, 2),
        "ratio_on_off": round(_ratio(total.tokens_per_s, plain.tokens_per_s), 4),
        "decode_ratio_on_off": round(_ratio(total.decode_tokens_per_s, plain.decode_tokens_per_s), 4),
        "ratio_on_off_each": [round(ratio, 4) for ratio in ratios],
        "identical_outputs": count_identical([*on, *off]),
    }
    for name, group in figures["per_category"].items():
        plain = summarize(off, name)
        group["tokens_per_s_no_spec"] = round(plain.tokens_per_s, 2)
        group["ratio_on_off"] = round(_ratio(group["tokens_per_s"], plain.tokens_per_s), 4)
        group["identical_outputs"] = count_identical([*on, *off], name)
    return figures


def format_table(figures: Mapping[str, Any]) -> str:
    """Lay the figures of ``report`` out as a table, one line per category and one for all."""
    compared = "ratio_on_off" in figures
    header = ["category", "prompts", "prompt tok", "output tok", "tok/s"]
    header += ["no spec", "on/off", "identical"] if compared else []
    header += ["tok/step", "tok/drafted", "accepted", "prefill s", "decode s", "by position"]
    lines = [header]
    groups = list(figures["per_category"].items())
    for name, group in [*groups, ("all", figures)] if len(groups) > 1 else groups:
        line = [name, group["num_prompts"], group["prompt_tokens"], group["output_tokens"]]
        line.append(f"{group['tokens_per_s']:.1f}")
        if compared:
            line += [f"{group['tokens_per_s_no_spec']:.1f}", f"{group['ratio_on_off']:.2f}"]
            line.append(f"{group['identical_outputs']}/{group['num_prompts']}")
        line += [f"{group['tokens_per_step']:.2f}", f"{group['tokens_per_drafted_step']:.2f}"]
        line += [f"{group['acceptance_rate']:.0%}", f"{group['prefill_s']:.2f}", f"{group['decode_s']:.2f}"]
        line.append(" ".join(f"{rate:.2f}" for rate in group["acceptance_per_position"]) or "-")
        lines.append([str(cell) for cell in line])
    return format_rows(lines)


def format_rows(rows: Sequence[Sequence[str]]) -> str:
    """Lay rows of cells out in columns, the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(_format_line(row, widths) for row in rows)


def describe_machine() -> dict[str, str]:
    """Return processor, memory and versions, without importing any of the libraries."""
    facts = {
        "cpu": _first_value(Path("/proc/cpuinfo"), "model name") or platform.processor() or platform.machine(),
        "threads": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "memory": _first_value(Path("/proc/meminfo"), "MemTotal") or "unknown",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }
    for package in ("engine-v1", "torch", "numba", "numpy"):
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            facts[package] = "not installed"
    return facts


def format_machine(facts: Mapping[str, str]) -> str:
    """Lay out ``describe_machine`` and the command as two lines."""
    shown = ", ".join(f"{name} {value}" for name, value in facts.items())
    return f"machine: {shown}\ncommand: {' '.join(sys.argv)}"


def _of(run: Run, category: str | None) -> list[RequestResult]:
    return [r for r in run.results if category in (None, r.category)]


def _times(run: Run, category: str | None) -> tuple[float, float, float]:
    """Return a category's shares of the wall clock: all of it, prefill, decode."""
    busy_s = sum(r.busy_s for r in run.results)
    chosen = _of(run, category)
    prefill_s, decode_s = sum(r.prefill_s for r in chosen), sum(r.decode_s for r in chosen)
    per_busy = _ratio(run.wall_s, busy_s)
    return (prefill_s + decode_s) * per_busy, prefill_s * per_busy, decode_s * per_busy


def _ratio(value: float, by: float) -> float:
    """Return value / by, and 0 where there is nothing to divide by."""
    return value / by if by else 0.0


def _format_line(cells: Iterable[str], widths: Iterable[int]) -> str:
    first, *rest = (
        cell.ljust(width) if index == 0 else cell.rjust(width)
        for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join([first, *rest]).rstrip()


def _first_value(path: Path, key: str) -> str | None:
    """Return the value of the first "key : value" line of a file in /proc."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(key)), None)
