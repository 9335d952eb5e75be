"""The prompts of a benchmark: which, in which order, always the same."""

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_v1.entrypoints.cli import DEFAULT_MODEL

DATASETS = ("spec_bench", "random", "prefix_repetition", "jsonl")

# What Spec-Bench groups its 480 questions into; MT-Bench's conversations have eight categories of their own.
MT_BENCH_CATEGORIES = frozenset(
    ["writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"]
)
SPEC_BENCH_CATEGORIES = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")
PROMPTS_PER_CATEGORY = 10  # where all categories are asked for


@dataclass(frozen=True)
class BenchPrompt:
    """One prompt and the group in which its speed is reported. Exactly one of the three forms is set."""

    category: str
    messages: list[dict[str, str]] | None = None  # a conversation, for the model's chat template
    text: str | None = None
    token_ids: list[int] | None = None


def spec_bench(rows: Sequence[dict[str, Any]], num_prompts: int, category: str | None = None) -> list[BenchPrompt]:
    """Choose prompts of Spec-Bench, the same number of each category, first turns only.

    Of each category every (len // 10)-th question is taken, at most ten, and of those the first
    ``num_prompts / 6``. A category named alone may give more: its questions then lie len // num_prompts
    apart.

    Args:
        rows: the dataset's lines, with "category" and "turns".
        num_prompts: over all categories, or of the one named.
        category: one of ``SPEC_BENCH_CATEGORIES``, or None for all.

    Raises:
        ValueError: if the category does not exist or has not so many prompts.
    """
    if category is not None and category not in SPEC_BENCH_CATEGORIES:
        raise ValueError(f"category must be one of {', '.join(SPEC_BENCH_CATEGORIES)}, got {category!r}.")
    categories = SPEC_BENCH_CATEGORIES if category is None else (category,)
    per_category, rest = divmod(num_prompts, len(categories))
    if category is None and (rest or not 1 <= per_category <= PROMPTS_PER_CATEGORY):
        raise ValueError(
            f"spec_bench takes as many prompts of each category: num_prompts must be a multiple of "
            f"{len(categories)} up to {PROMPTS_PER_CATEGORY * len(categories)}, got {num_prompts}; "
            "name a category to take more of it."
        )
    chosen = []
    for name in categories:
        of_category = [row for row in rows if _spec_bench_group(row["category"]) == name]
        stride = max(1, len(of_category) // max(PROMPTS_PER_CATEGORY, per_category))
        taken = of_category[::stride][:per_category]
        if len(taken) < per_category:
            raise ValueError(
                f"category {name!r} has {len(of_category)} prompts, {per_category} were asked for; lower num_prompts."
            )
        chosen += [BenchPrompt(name, messages=[_user(row["turns"][0])]) for row in taken]
    return chosen


def random_tokens(num_prompts: int, *, input_len: int, vocab_size: int, seed: int = 0) -> list[BenchPrompt]:
    """Return prompts of random tokens: what speculation costs where there is nothing to copy."""
    rng = random.Random(seed)
    return [
        BenchPrompt("random", token_ids=[rng.randrange(vocab_size) for _ in range(input_len)])
        for _ in range(num_prompts)
    ]


_NAMES = (
    "Ada",
    "Bruno",
    "Carla",
    "David",
    "Elena",
    "Farid",
    "Greta",
    "Hugo",
    "Ines",
    "Jonas",
    "Keiko",
    "Liam",
)
_COLOURS = ("red", "blue", "green", "black", "white", "yellow", "silver", "brown")
_THINGS = ("microscope", "ladder", "violin", "printer", "telescope", "kettle", "lamp", "bicycle", "camera")
_PLACES = ("the library", "the workshop", "the cellar", "room twelve", "the north hall", "the garden house")
_TASKS = (
    "Repeat the inventory word for word.",
    "Repeat the inventory, and change nothing but the word 'keeps' to 'stores'.",
    "Write the inventory again, one sentence per line.",
    "List who keeps what, in the order of the inventory.",
)


def prefix_repetition(
    num_prompts: int, *, num_prefixes: int = 5, prefix_len: int = 150, seed: int = 0
) -> list[BenchPrompt]:
    """Return prompts that share long prefixes and ask for much of them back.

    Every prefix is an inventory of about ``prefix_len`` words. The prompts go round the prefixes, with
    another task each time. vLLM's dataset of this name is random tokens; this one is English, so that a model
    has something to repeat.
    """
    rng = random.Random(seed)
    prefixes = []
    for _ in range(num_prefixes):
        words = ["Inventory:"]
        while len(words) < prefix_len:
            words += (
                f"{rng.choice(_NAMES)} keeps the {rng.choice(_COLOURS)} {rng.choice(_THINGS)} "
                f"number {rng.randrange(10, 100)} in {rng.choice(_PLACES)}."
            ).split()
        prefixes.append(" ".join(words))
    return [
        # 5 prefixes, prompts 0..6 -> prefix 0 1 2 3 4 0 1, task 0 0 0 0 0 1 1
        BenchPrompt(
            "prefix_repetition",
            messages=[_user(f"{prefixes[i % num_prefixes]}\n\n{_TASKS[i // num_prefixes % len(_TASKS)]}")],
        )
        for i in range(num_prompts)
    ]


def jsonl(rows: Sequence[dict[str, Any]], num_prompts: int, category: str | None = None) -> list[BenchPrompt]:
    """Return the first prompts of a user's own file.

    Args:
        rows: objects with one of "messages" (a conversation), "turns" (the first is the user's message),
            "prompt" (text as it is) or "prompt_token_ids"; "category" groups the results.
        num_prompts: how many at most.
        category: take those of this category only.

    Raises:
        ValueError: if a row holds no prompt, or no row is of that category.
    """
    prompts: list[BenchPrompt] = []
    for number, row in enumerate(rows, 1):
        name = str(row.get("category", "jsonl"))
        if len(prompts) == num_prompts:
            break
        if category is not None and name != category:
            continue
        if row.get("messages"):
            prompts.append(BenchPrompt(name, messages=row["messages"]))
        elif row.get("turns"):
            prompts.append(BenchPrompt(name, messages=[_user(row["turns"][0])]))
        elif row.get("prompt_token_ids"):
            prompts.append(BenchPrompt(name, token_ids=row["prompt_token_ids"]))
        elif row.get("prompt"):
            prompts.append(BenchPrompt(name, text=row["prompt"]))
        else:
            raise ValueError(
                f"row {number} must have one of 'messages', 'turns', 'prompt', 'prompt_token_ids', has {sorted(row)}."
            )
    if not prompts:
        raise ValueError("the file holds no prompt" + (f" of category {category!r}." if category else "."))
    return prompts


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read a file of one JSON object per line; empty lines are left out.

    Raises:
        ValueError: if there is no such file or a line is not a JSON object.
    """
    if not path.is_file():
        raise ValueError(f"there is no file {str(path)!r}; --dataset-path names the dataset's file.")
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is not JSON: {error}.") from None
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number} must be a JSON object, got {type(row).__name__}.")
        rows.append(row)
    return rows


def add_conversation_options(parser: argparse.ArgumentParser, *, num_prompts: int, max_tokens: int) -> None:
    """Add the options of what is answered; the numbers are defaults. :func:`load_conversations` reads them."""
    parser.add_argument("--model", default=DEFAULT_MODEL, help=f"directory, file or name ({DEFAULT_MODEL})")
    parser.add_argument("--dataset-path", type=Path, help="Spec-Bench's question.jsonl; built-in prompts without it")
    parser.add_argument("--num-prompts", type=int, default=num_prompts, help=f"prompts ({num_prompts})")
    parser.add_argument("--max-tokens", type=int, default=max_tokens, help=f"output tokens a prompt ({max_tokens})")


def load_conversations(args: argparse.Namespace) -> list[list[dict[str, str]]]:
    """Return the conversations that options ask for: Spec-Bench's where its file is named, else prefix_repetition's.

    Raises:
        ValueError: if the file does not exist or has not so many.
    """
    if args.dataset_path is None:
        prompts = prefix_repetition(args.num_prompts)
    else:
        prompts = spec_bench(read_jsonl(args.dataset_path), args.num_prompts)
    return [prompt.messages or [] for prompt in prompts]


def _spec_bench_group(category: str) -> str:
    return "mt_bench" if category in MT_BENCH_CATEGORIES else category


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}
