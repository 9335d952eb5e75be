"""Let a model ask and answer questions of its own, so that drafts know its habits: `engine-v1 rehearse`.

Source: Magpie (arXiv 2406.08464): a model that was taught to chat writes a user's message when it is shown a
conversation that ends where that message begins.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from engine_v1.sampling_params import SamplingParams

if TYPE_CHECKING:
    from engine_v1.entrypoints.llm import LLM

DEFAULT_MODEL = "smollm2-135m-instruct"
ENGINE_OPTIONS = ("model", "dtype", "quantization", "device", "seed", "max_num_seqs", "max_model_len")
QUESTION_TOKENS = 64  # of a question, at most; one that is cut off is a question too
BATCH = 256  # questions that are asked, answered and written at a time
PLACE = "QUESTION"  # where a question stands in the chat template

DESCRIPTION = """Let a model ask itself questions and answer them, greedily, and write the answers to a text file.

As a corpus the file tells drafts what the model tends to say. Nothing of yours is in it.
"""
EPILOG = """examples:
  engine-v1 rehearse --output habits.txt
  engine-v1 rehearse --output habits.txt --model ./my-model --num-questions 500
  engine-v1 chat --speculative-config '{"method": "suffix", "corpus": ["habits.txt"]}'

What was written when Ctrl-C ends it is a corpus too.
"""


def main(argv: Sequence[str]) -> int:
    """Parse the options, write the file and print how to use it; return the exit status.

    Args:
        argv: what follows `engine-v1 rehearse`.

    Raises:
        ValueError: if an option cannot be used, or the model has no chat template with a place for a question.
    """
    args = _parser().parse_args(argv)
    if args.num_questions < 1 or args.max_tokens < 1:
        raise ValueError(
            f"num_questions and max_tokens must be at least 1, got {args.num_questions} and {args.max_tokens}."
        )
    from engine_v1.entrypoints.llm import LLM  # imported here, so that --help and a mistyped option answer at once

    options = {name: getattr(args, name) for name in ENGINE_OPTIONS if getattr(args, name) is not None}
    started, num_tokens = time.perf_counter(), 0
    with LLM(**options) as llm, args.output.open("w", encoding="utf-8") as file:
        for done, (text, length) in enumerate(answers(llm, args.num_questions, args.max_tokens), 1):
            file.write(text + "\n")
            num_tokens += length
            if done % BATCH == 0 or done == args.num_questions:
                file.flush()
                seconds = time.perf_counter() - started
                print(f"{done} answers, {num_tokens} tokens, {seconds:.0f} s", file=sys.stderr, flush=True)
    print(json.dumps({"method": "suffix", "corpus": [str(args.output)]}))
    return 0


def answers(llm: "LLM", num_questions: int, max_tokens: int) -> Iterator[tuple[str, int]]:
    """Yield what the model answers to questions that it asked itself, and how many tokens each answer has.

    Args:
        llm: an engine whose model has a chat template.
        num_questions: how many.
        max_tokens: of an answer, at most.

    Raises:
        ValueError: the chat template does not show where the user's message begins.
    """
    opening = question_opening(llm)
    asking = SamplingParams(temperature=1.0, top_p=0.95, max_tokens=QUESTION_TOKENS)
    greedy = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    for first in range(0, num_questions, BATCH):
        prompts = [{"prompt_token_ids": opening}] * min(BATCH, num_questions - first)
        questions = llm.generate(prompts, asking, use_tqdm=False)
        conversations = [[{"role": "user", "content": question.outputs[0].text.strip()}] for question in questions]
        for answer in llm.chat(conversations, greedy, use_tqdm=False):
            yield answer.outputs[0].text, len(answer.outputs[0].token_ids)


def question_opening(llm: "LLM") -> list[int]:
    """Return the tokens of a conversation up to where the user's message begins.

    Raises:
        ValueError: there is no chat template, or none that shows the message behind something else.
    """
    [prompt] = llm.preprocess_chat([{"role": "user", "content": PLACE}])
    opening, found, _ = prompt["prompt"].partition(PLACE)
    if not found or not opening:
        raise ValueError("the chat template shows nothing before the user's message; this model cannot ask questions.")
    assert llm.tokenizer is not None, "a conversation was rendered with it"
    return llm.tokenizer.encode(opening, add_special_tokens=False)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="engine-v1 rehearse",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, required=True, help="the text file to write")
    parser.add_argument("--num-questions", type=int, default=2000, help="questions, each with its answer (2000)")
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens of an answer, at most (128)")
    engine = parser.add_argument_group("engine")
    engine.add_argument("--model", default=DEFAULT_MODEL)
    engine.add_argument("--dtype")
    engine.add_argument("--quantization", help="of the weights on the CPU: int8, or gguf")
    engine.add_argument("--device")
    engine.add_argument("--seed", type=int, default=0, help="other questions with another")
    engine.add_argument("--max-num-seqs", type=int, default=64, help="requests at a time (64)")
    engine.add_argument("--max-model-len", type=int)
    return parser
