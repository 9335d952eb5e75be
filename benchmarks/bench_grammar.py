"""What does following a grammar cost a row, beside the time of a step?

Walks JSON outputs through their schema, as a request with speculation does: drafts, masks, then the committed tokens.
"""

import argparse
import json
import platform
import statistics
import sys
import time

import numpy as np

from engine_v1.models.hub import resolve_model
from engine_v1.structured_output.compiler import GrammarCompiler
from engine_v1.structured_output.params import StructuredOutputsParams
from engine_v1.tokenizer import Tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 40},
        "minutes": {"type": "integer", "minimum": 1, "maximum": 240},
        "difficulty": {"enum": ["easy", "medium", "hard"]},
        "ingredients": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 4},
    },
    "required": ["title", "minutes", "difficulty", "ingredients"],
}
OUTPUT = '{"title": "Tomato soup", "minutes": 35, "difficulty": "easy", "ingredients": ["tomatoes", "onions", "basil"]}'


def main() -> None:
    """Print the time of a compilation, of a mask by how many tokens it allows, and of looking for drafts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}; {' '.join(sys.argv)}")

    tokenizer = Tokenizer(resolve_model(args.model, tokenizer_only=True))
    eos = tokenizer.eos_token_id
    assert eos is not None, "the output must be able to end"
    compiler = GrammarCompiler(
        tokenizer.backend,
        tokenizer.vocab_size,
        special_token_ids=tokenizer.all_special_ids,
        eos_token_ids=[eos],
    )
    times: dict[str, list[float]] = {}

    def timed(name: str, start: float) -> None:
        times.setdefault(name, []).append((time.perf_counter() - start) * 1e6)

    start = time.perf_counter()
    compiler.compile(StructuredOutputsParams(regex="a"))
    timed("the first grammar of an engine", start)
    token_ids = [*tokenizer.encode(OUTPUT, add_special_tokens=False), eos]
    for repeat in range(args.repeats):
        form = StructuredOutputsParams(json=SCHEMA | {"title": str(repeat)})  # another schema each time
        start = time.perf_counter()
        compiler.compile(form)
        timed("compile this schema", start)
        start = time.perf_counter()
        grammar = compiler.compile(form)
        timed("take it from those compiled", start)
        for token_id in token_ids:
            start = time.perf_counter()
            grammar.draft([], 5)
            timed("look for forced drafts", start)
            start = time.perf_counter()
            masks = grammar.masks([])
            stop = time.perf_counter()
            allowed = int(np.bitwise_count(masks).sum())
            kind = "one token" if allowed == 1 else "up to 1000 tokens" if allowed <= 1000 else "more tokens"
            times.setdefault(f"mask of a row that allows {kind}", []).append((stop - start) * 1e6)
            start = time.perf_counter()
            grammar.advance(token_id)
            timed("take in a committed token", start)
    for name, values in times.items():
        print(f"{name:40} {statistics.median(values):9.1f} us, at most {max(values):9.1f}  ({len(values)} times)")
    print(json.dumps({name: round(statistics.median(values), 2) for name, values in times.items()}))


if __name__ == "__main__":
    main()
