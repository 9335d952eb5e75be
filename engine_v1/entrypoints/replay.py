"""Compare drafters on recorded outputs, without a model: `engine-v1 replay`."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine_v1.config import SpeculativeConfig
from engine_v1.core.token_table import TokenTable
from engine_v1.entrypoints.arguments import json_object
from engine_v1.entrypoints.bench_report import format_rows
from engine_v1.entrypoints.records import Record, read_records
from engine_v1.entrypoints.replay_pages import html_page, save_plot
from engine_v1.request import Request
from engine_v1.sampling_params import SamplingParams
from engine_v1.spec_decode.corpus import load_corpus
from engine_v1.spec_decode.factory import make_proposer
from engine_v1.spec_decode.proposer import Proposer
from engine_v1.spec_decode.replay import OracleProposer, Replay, replay

# What the methods' names stand for; with --k and --min-prob in place of their own.
METHODS: dict[str, dict[str, Any]] = {
    "ngram-vllm": {
        "method": "ngram",
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 4,
        "prompt_lookup_tie": "earliest",
    },
    "ngram": {"method": "ngram"},
    "suffix-own": {"method": "suffix", "suffix_cache_max_requests": 0},
    "suffix": {"method": "suffix"},
    "recycling": {"method": "recycling"},
    "auto": {"method": "auto"},
}
ORACLE = "oracle"
MARGIN = 128  # rows of the token table are longer than the longest request by the longest draft

EPILOG = """examples:
  engine-v1 bench --dataset spec_bench --dataset-path spec_bench.jsonl --num-prompts 60 --record outputs.jsonl
  engine-v1 replay --outputs outputs.jsonl
  engine-v1 replay --outputs outputs.jsonl --method auto --min-prob 0.4 0.2 0.1 0.05 0.02
  engine-v1 replay --outputs outputs.jsonl --speculative-config '{"method": "ngram", "prompt_lookup_max": 8}'
  engine-v1 replay --outputs outputs.jsonl --method auto --html page.html --request 3 --model smollm2-135m-instruct

The proposers are the engine's own. What a model would answer after a rejected draft is not recorded and not used. The
oracle chooses the right one of all tokens that were ever seen after the last one: a ceiling for all who draft such.
"""


def main(argv: Sequence[str]) -> int:
    """Parse the options, replay and print a table and a last line of JSON; return the exit status.

    Args:
        argv: what follows `engine-v1 replay`.

    Raises:
        ValueError: if the options or the file cannot be used.
    """
    args = _parser().parse_args(argv)
    records = read_records(args.outputs)
    if args.max_num_seqs < 1:
        raise ValueError(f"max_num_seqs must be at least 1, got {args.max_num_seqs}.")
    if not 0 <= args.request < len(records):
        raise ValueError(f"--request must be from 0 to {len(records) - 1}, got {args.request}.")
    replays: dict[str, Replay] = {}
    for name, config in _configs(args).items():
        replays[name] = _replay(records, config, args)
    chosen = range(len(records))[{"all": slice(None), "even": slice(0, None, 2), "odd": slice(1, None, 2)}[args.part]]
    categories = list(dict.fromkeys(records[i].category for i in chosen))
    figures = {name: _figures(one.of(chosen)) for name, one in replays.items()}
    for name, one in replays.items():
        figures[name]["per_category"] = {
            category: round(one.of([i for i in chosen if records[i].category == category]).tokens_per_step, 4)
            for category in categories
        }
    print(f"{len(chosen)} of {len(records)} records, {args.max_num_seqs} at a time\n")
    print(_table(figures, categories))
    last = list(replays)[-1]
    if args.plot:
        save_plot(args.plot, figures, {name: one.of(chosen) for name, one in replays.items()})
    if args.html:
        record, steps = records[args.request], replays[last].steps[args.request]
        args.html.write_text(html_page(record, steps, last, _decoder(args.model)), encoding="utf-8")
    print(f"\n{json.dumps(figures)}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="engine-v1 replay",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--outputs", type=Path, required=True, help="a file that --record wrote")
    parser.add_argument("--method", nargs="+", choices=[*METHODS, ORACLE], help="which to compare (all)")
    parser.add_argument(
        "--speculative-config", "-sc", type=json_object, action="append", default=[], metavar="JSON",
        help="compare this too; may be repeated",
    )  # fmt: skip
    parser.add_argument("--k", type=int, help="longest draft of the methods (ngram 5, others 16)")
    parser.add_argument("--min-prob", type=float, nargs="+", help="suffix_min_prob, one line for each (0.05)")
    parser.add_argument("--max-num-seqs", type=int, default=1, help="requests at a time (1)")
    parser.add_argument("--part", choices=["all", "even", "odd"], default="all", help="records that the figures are of")
    parser.add_argument("--plot", type=Path, help="write a PNG (needs matplotlib)")
    parser.add_argument("--html", type=Path, help="write a page of one request's drafts, by the last method")
    parser.add_argument("--request", type=int, default=0, help="which request the page shows (0)")
    parser.add_argument(
        "--model",
        help="whose tokenizer reads a corpus and gives the page its text; without it the page shows token ids",
    )
    return parser


def _configs(args: argparse.Namespace) -> dict[str, dict[str, Any] | None]:
    """Return what to compare by name; None is the oracle."""
    given = [one for one in args.speculative_config if one is not None]
    names = args.method or ([] if given else [*METHODS, ORACLE])
    configs: dict[str, dict[str, Any] | None] = {}
    k = {} if args.k is None else {"num_speculative_tokens": args.k}
    for name in names:
        if name == ORACLE:
            configs[name] = None
        elif args.min_prob and METHODS[name]["method"] != "ngram":
            for min_prob in args.min_prob:
                configs[f"{name} {min_prob:g}"] = METHODS[name] | k | {"suffix_min_prob": min_prob}
        else:
            configs[name] = METHODS[name] | k
    return configs | {json.dumps(one): one for one in given}


def _replay(records: Sequence[Record], config: dict[str, Any] | None, args: argparse.Namespace) -> Replay:
    requests = []
    for i, record in enumerate(records):
        max_tokens = record.max_tokens or len(record.output_token_ids)
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        requests.append(
            Request(str(i), record.prompt_token_ids, params, max_tokens=max_tokens, cache_salt=record.cache_salt)
        )
    longest = max(len(record.prompt_token_ids) + len(record.output_token_ids) for record in records)
    table = TokenTable(min(args.max_num_seqs, len(records)), longest + MARGIN)
    outputs = [record.output_token_ids for record in records]
    proposer: Proposer
    if config is None:
        by_id = {request.request_id: output for request, output in zip(requests, outputs, strict=True)}
        proposer = OracleProposer(by_id, num_speculative_tokens=args.k or 16)
    else:
        speculative = SpeculativeConfig.from_dict(config)
        assert speculative is not None, "only the oracle has no configuration"
        corpus = load_corpus(speculative.corpus, _tokenizer(args.model) if speculative.corpus else None)
        proposer = make_proposer(speculative, table, corpus)
    return replay(requests, outputs, proposer, table, max_num_seqs=min(args.max_num_seqs, len(records)))


def _figures(one: Replay) -> dict[str, Any]:
    return {
        "tokens_per_step": round(one.tokens_per_step, 4),
        "drafted_per_step": round(one.drafted_per_step, 4),
        "acceptance": round(one.acceptance, 4),
        "us_per_request_step": round(one.us_per_request_step, 2),
    }


def _table(figures: dict[str, Any], categories: Sequence[str]) -> str:
    columns = categories if len(categories) > 1 else []
    rows = [["method", "tok/step", "drafted", "accepted", "us/step", *columns]]
    for name, one in figures.items():
        row = [name, f"{one['tokens_per_step']:.3f}", f"{one['drafted_per_step']:.2f}", f"{one['acceptance']:.0%}"]
        row += [f"{one['us_per_request_step']:.1f}", *(f"{one['per_category'][name]:.2f}" for name in columns)]
        rows.append(row)
    return format_rows(rows)


def _tokenizer(model: str | None) -> Any:
    if model is None:
        return None
    from engine_v1.models.hub import resolve_model
    from engine_v1.tokenizer import Tokenizer

    return Tokenizer(resolve_model(model, tokenizer_only=True))


def _decoder(model: str | None) -> Any:
    """Return a function from token ids to the text of each."""
    tokenizer = _tokenizer(model)
    if tokenizer is None:
        return lambda token_ids: [f"{token_id} " for token_id in token_ids]
    backend = tokenizer.backend

    def texts(token_ids: list[int]) -> list[str]:
        # A decoder strips the first token's space, so each is decoded behind another.
        anchor = backend.encode("a", add_special_tokens=False).ids
        skip = len(backend.decode(anchor, skip_special_tokens=False))
        return [backend.decode([*anchor, one], skip_special_tokens=False)[skip:] for one in token_ids]

    return texts


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
