"""Recorded outputs, one JSON object a line: what `--record` writes and `engine-v1 replay` reads."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from engine_v1.entrypoints.bench_datasets import read_jsonl
from engine_v1.outputs import RequestOutput


@dataclass(frozen=True)
class Record:
    """A request and what the model answered, in token ids."""

    prompt_token_ids: list[int]
    output_token_ids: list[int]
    category: str = "all"  # groups the results
    cache_salt: str | None = None  # which requests may draft from each other's outputs
    max_tokens: int | None = None  # what it might have generated; None for no more than it did

    @classmethod
    def from_output(cls, output: RequestOutput, max_tokens: int | None, category: str = "all") -> "Record":
        """Record a finished request."""
        return cls(output.prompt_token_ids, output.outputs[0].token_ids, category, max_tokens=max_tokens)


def write_records(path: Path, records: Sequence[Record], *, append: bool = False) -> None:
    """Write records, in the order in which they are to be replayed."""
    with path.open("a" if append else "w", encoding="utf-8") as file:
        file.writelines(json.dumps(asdict(record)) + "\n" for record in records)


def read_records(path: Path) -> list[Record]:
    """Read the records of a file.

    Raises:
        ValueError: there is no such file, or a line is no record.
    """
    records = []
    for number, row in enumerate(read_jsonl(path), 1):
        for key in ("prompt_token_ids", "output_token_ids"):
            ids = row.get(key)
            if not isinstance(ids, list) or not ids or not all(type(i) is int and 0 <= i < 2**31 for i in ids):
                raise ValueError(f"{path}, record {number}: {key!r} must be a list of token ids that is not empty.")
        max_tokens = row.get("max_tokens")
        if max_tokens is not None and (type(max_tokens) is not int or max_tokens < len(row["output_token_ids"])):
            raise ValueError(f"{path}, record {number}: 'max_tokens' is less than the output's length: {max_tokens!r}.")
        known = {name: row[name] for name in Record.__dataclass_fields__ if name in row}
        records.append(Record(**known))
    if not records:
        raise ValueError(f"{path} holds no record.")
    return records
