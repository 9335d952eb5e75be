"""The command line: engine-v1 generate, chat, demo, bench, replay and rehearse."""

import argparse
import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_v1 import __version__
from engine_v1.entrypoints.arguments import DEFAULT_SPECULATIVE_CONFIG, json_object
from engine_v1.sampling_params import SamplingParams

if TYPE_CHECKING:
    from engine_v1.entrypoints.llm import LLM
    from engine_v1.outputs import RequestOutput

DEFAULT_MODEL = "smollm2-135m-instruct"
EXIT_INTERRUPTED = 130  # what shells expect of a program that Ctrl-C ended

_EXAMPLES = """\
examples:
  engine-v1 demo
  engine-v1 generate --prompt "The capital of France is" --max-tokens 32
  engine-v1 generate --model ./my-model --prompt-file article.txt --temperature 0.8 --seed 1
  echo "Name three rivers." | engine-v1 generate --chat
  engine-v1 generate --prompt "a b c a b c a" --speculative-config '{"method": "ngram", "num_speculative_tokens": 8}'
  engine-v1 generate --prompt "Hello" --speculative-config null
  engine-v1 chat --system "Answer in one sentence."
  engine-v1 bench --dataset random --num-prompts 16 --compare-no-spec
  engine-v1 replay --outputs outputs.jsonl
  engine-v1 rehearse --output habits.txt
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code: 0, 1 for an error or a failed check, 130 after Ctrl-C."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _show_messages()
    try:
        if arguments[:1] == ["bench"]:
            from engine_v1.entrypoints.bench import main as bench  # has options of its own

            return bench(arguments[1:])
        if arguments[:1] == ["replay"]:
            from engine_v1.entrypoints.replay import main as replay

            return replay(arguments[1:])
        if arguments[:1] == ["rehearse"]:
            from engine_v1.entrypoints.rehearse import main as rehearse

            return rehearse(arguments[1:])
        args = _parser().parse_args(arguments)
        return int(args.run(args))
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has left (`| head`). What is still buffered must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError, RuntimeError) as error:
        print(f"engine-v1: error: {error}", file=sys.stderr)
        return 1


def _show_messages() -> None:
    """Let the engine's own messages (what computes, what is compiled) appear on standard error."""
    engine_logger = logging.getLogger("engine_v1")
    if not engine_logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("engine-v1: %(message)s"))
        engine_logger.addHandler(handler)
        engine_logger.setLevel(logging.INFO)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="engine-v1",
        description="Generate text with a language model whose scheduler speculates.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"engine-v1 {__version__}")
    names = "{generate,chat,demo,bench,replay,rehearse}"
    commands = parser.add_subparsers(title="commands", required=True, metavar=names)

    generate = commands.add_parser("generate", help="continue a prompt", description="Continue a prompt.")
    source = generate.add_mutually_exclusive_group()
    source.add_argument("--prompt", help="the prompt; without it and --prompt-file it is read from standard input")
    source.add_argument("--prompt-file", type=Path, help="a text file that is the prompt")
    generate.add_argument("--chat", action="store_true", help="put the prompt into the model's chat template")
    generate.add_argument("--quiet", action="store_true", help="print no line of statistics")
    generate.add_argument("--record", type=Path, help="append prompt and output to this file, for engine-v1 replay")
    _add_engine_options(generate)
    _add_sampling_options(generate)
    generate.set_defaults(run=_generate)

    chat = commands.add_parser(
        "chat",
        help="talk with a model",
        description="Talk with a model. /reset forgets the conversation, /exit or Ctrl-D leaves; Ctrl-C stops a reply.",
    )
    chat.add_argument("--system", help="the system message")
    chat.add_argument("--quiet", action="store_true", help="print no line of statistics")
    _add_engine_options(chat)
    _add_sampling_options(chat)
    chat.set_defaults(run=_chat)

    demo = commands.add_parser(
        "demo",
        help="compare speculation off and on over built-in prompts",
        description="Generate for built-in prompts with speculation off and on; accepted draft tokens are green. "
        "The exit code is 1 if a float32 output differs.",
    )
    demo.add_argument("--max-tokens", type=int, default=96, help="tokens per prompt, at most (96)")
    demo.add_argument("--num-prompts", type=int, default=8, help="how many of the eight prompts")
    demo.add_argument(
        "--dtypes",
        nargs="+",
        default=["float32", "bfloat16"],
        choices=["float32", "bfloat16"],
        help="both if not given",
    )
    _add_engine_options(demo, demo=True)
    demo.set_defaults(run=_demo)

    commands.add_parser("bench", help="measure throughput (engine-v1 bench --help)", add_help=False)
    commands.add_parser("replay", help="compare drafters on recorded outputs (--help)", add_help=False)
    commands.add_parser("rehearse", help="let a model write a corpus to draft from (--help)", add_help=False)
    return parser


def _add_engine_options(parser: argparse.ArgumentParser, *, demo: bool = False) -> None:
    """Add what the LLM class takes; an option that is not given leaves its default there."""
    group = parser.add_argument_group("engine")
    model_help = f"directory, .gguf file, alias or name on the Hugging Face hub ({DEFAULT_MODEL})"
    group.add_argument("--model", default=DEFAULT_MODEL, help=model_help)
    group.add_argument(
        "--speculative-config",
        "-sc",
        type=json_object,
        default=DEFAULT_SPECULATIVE_CONFIG,
        metavar="JSON",
        help=f"how drafts are made, null for none ({DEFAULT_SPECULATIVE_CONFIG})",
    )
    group.add_argument(
        "--disable-logprobs-during-spec-decoding",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="answer requests without the log probabilities they ask for (the speculative config's disable_logprobs)",
    )
    options: list[tuple[str, dict[str, Any]]] = [
        ("--tokenizer", {"help": "where the tokenizer lies, if not with the model"}),
        ("--quantization", {"help": "of the weights on the CPU: int8, or gguf for a GGUF file's own blocks"}),
        ("--device", {"help": "auto, cpu, cuda or cuda:N"}),
        ("--seed", {"type": int, "help": "of requests without one of their own"}),
        ("--revision", {"help": "branch, tag or commit of a model on the hub"}),
        ("--max-model-len", {"type": int, "help": "prompt plus output tokens"}),
        ("--max-num-batched-tokens", {"type": int, "help": "rows of a step"}),
        ("--block-size", {"type": int, "help": "tokens per KV block"}),
        ("--num-gpu-blocks-override", {"type": int, "help": "KV blocks in all"}),
        ("--kv-cache-memory-bytes", {"type": int, "help": "memory of the KV cache"}),
    ]
    if not demo:  # the demo compares dtypes, with the prefix cache off
        options += [
            ("--dtype", {"help": "auto, float32, bfloat16 or float16"}),
            ("--enable-prefix-caching", {"action": argparse.BooleanOptionalAction, "help": "share KV of prefixes"}),
        ]
    for name, how in options:
        group.add_argument(name, default=argparse.SUPPRESS, **how)
    parser.set_defaults(engine_options=[name.removeprefix("--").replace("-", "_") for name, _ in options])


def _add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Add what SamplingParams takes; an option that is not given leaves the model's default."""
    group = parser.add_argument_group("sampling")
    options: list[tuple[str, dict[str, Any]]] = [
        ("--max-tokens", {"type": int, "help": "most tokens to generate (as far as the model goes)"}),
        ("--temperature", {"type": float, "help": "0 is greedy"}),
        ("--top-p", {"type": float, "help": "keep the most likely tokens that hold this share"}),
        ("--top-k", {"type": int, "help": "keep this many of the most likely tokens"}),
        ("--stop", {"action": "append", "help": "end where this string appears; may be repeated"}),
        ("--ignore-eos", {"action": "store_true", "help": "go on after the model's end-of-text token"}),
    ]
    for name, how in options:
        group.add_argument(name, default=argparse.SUPPRESS, **how)
    group.add_argument("--sampling-seed", type=int, default=None, help="seed of this request")
    parser.set_defaults(sampling_options=[name.removeprefix("--").replace("-", "_") for name, _ in options])


def _load(args: argparse.Namespace) -> "LLM":
    options = {name: getattr(args, name) for name in args.engine_options if hasattr(args, name)}
    # Imported here, so that --help and a mistyped option answer at once.
    from engine_v1.entrypoints.llm import LLM

    return LLM(args.model, speculative_config=_speculative_config(args), **options)


def _speculative_config(args: argparse.Namespace) -> dict[str, Any] | None:
    """Return the speculative config with what an option of its own says in it.

    Raises:
        ValueError: the option and the config disagree, or there is no speculation to speak of.
    """
    config: dict[str, Any] | None = args.speculative_config
    flag = args.disable_logprobs_during_spec_decoding
    if flag is None:
        return config
    if config is None:
        raise ValueError(
            "--disable-logprobs-during-spec-decoding needs speculation; leave it out with --speculative-config null."
        )
    if config.get("disable_logprobs") not in (None, flag):
        raise ValueError(
            "--disable-logprobs-during-spec-decoding and --speculative-config['disable_logprobs'] disagree; "
            "give one of them."
        )
    return {**config, "disable_logprobs": flag}


def _sampling_params(args: argparse.Namespace, defaults: SamplingParams) -> SamplingParams:
    given = {name: getattr(args, name) for name in args.sampling_options if hasattr(args, name)}
    given = {"max_tokens": None, "seed": args.sampling_seed, **given}
    return SamplingParams(**{**vars(defaults), **given})


def _generate(args: argparse.Namespace) -> int:
    if args.prompt is not None:
        prompt = args.prompt
    elif args.prompt_file is not None:
        prompt = args.prompt_file.read_text()
    else:
        prompt = sys.stdin.read()
    if not prompt:
        raise ValueError("the prompt is empty; give --prompt, --prompt-file or text on standard input.")
    _sampling_params(args, SamplingParams())  # a bad value is found before the model is loaded
    with _load(args) as llm:
        params = _sampling_params(args, llm.get_default_sampling_params())
        if args.chat:
            [prompt] = llm.preprocess_chat([{"role": "user", "content": prompt}])
        _stream(llm, prompt, params, quiet=args.quiet, record=args.record)
    return 0


def _stream(llm: "LLM", prompt: Any, params: SamplingParams, *, quiet: bool, record: Path | None = None) -> str:
    """Print text as it is committed, then one line of statistics on standard error; return the text.

    Raises:
        RuntimeError: the request ended with an error.
    """
    started, text, last = time.perf_counter(), "", None
    token_ids: list[int] = []
    for last in llm.stream(prompt, params):
        [completion] = last.outputs
        text += completion.text
        token_ids += completion.token_ids
        print(completion.text, end="", flush=True)
    print(flush=True)
    assert last is not None, "a stream ends with the output that says why"
    if last.outputs[0].finish_reason == "error":
        raise RuntimeError(f"the request failed: {last.outputs[0].stop_reason}")
    if record is not None:
        from engine_v1.entrypoints.records import Record, write_records

        one = Record(last.prompt_token_ids, token_ids, max_tokens=params.max_tokens)
        write_records(record, [one], append=True)
    if not quiet:
        print(_statistics(last, len(token_ids), time.perf_counter() - started), file=sys.stderr)
    return text


def _statistics(last: "RequestOutput", num_tokens: int, seconds: float) -> str:
    completion = last.outputs[0]
    line = f"[{num_tokens} tokens in {seconds:.2f} s, {num_tokens / seconds:.1f} tokens/s"
    metrics = completion.spec_decode_metrics
    if metrics is not None:
        line += f", {metrics.tokens_per_step:.2f} tokens per step, "
        line += f"{metrics.num_accepted_draft_tokens} of {metrics.num_draft_tokens} draft tokens accepted"
    return f"{line}; finished by {completion.finish_reason}]"


def _chat(args: argparse.Namespace) -> int:
    _sampling_params(args, SamplingParams())
    opening = [{"role": "system", "content": args.system}] if args.system else []
    with _load(args) as llm:
        params = _sampling_params(args, llm.get_default_sampling_params())
        messages = list(opening)
        while True:
            try:
                line = input("> " if sys.stdin.isatty() else "").strip()
            except EOFError:
                return 0
            if line == "/exit":
                return 0
            if line == "/reset":
                messages = list(opening)
            elif line:
                messages.append({"role": "user", "content": line})
                messages = _reply(llm, messages, params, quiet=args.quiet)


def _reply(llm: "LLM", messages: list[dict[str, str]], params: SamplingParams, *, quiet: bool) -> list[dict[str, str]]:
    """Stream the answer to the last message; return the conversation with it, or without the question if it failed."""
    try:
        text = _stream(llm, llm.preprocess_chat(messages), params, quiet=quiet)
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
        print("\n[stopped]", file=sys.stderr)
        return messages[:-1]
    except ValueError as error:  # the conversation has grown too long, say
        print(f"[{error}]", file=sys.stderr)
        return messages[:-1]
    return [*messages, {"role": "assistant", "content": text}]


def _demo(args: argparse.Namespace) -> int:
    from rich.console import Console

    from engine_v1.entrypoints.demo import DEMO_PROMPTS, run_demo

    speculative_config = _speculative_config(args)
    if speculative_config is None:
        raise ValueError(
            "the demo compares speculation off and on; --speculative-config null leaves nothing to compare."
        )
    if not 1 <= args.num_prompts <= len(DEMO_PROMPTS):
        raise ValueError(f"--num-prompts must be from 1 to {len(DEMO_PROMPTS)}, got {args.num_prompts}.")
    is_exact = run_demo(
        model=args.model,
        speculative_config=speculative_config,
        dtypes=args.dtypes,
        max_tokens=args.max_tokens,
        num_prompts=args.num_prompts,
        console=Console(highlight=False),
        **{name: getattr(args, name) for name in args.engine_options if hasattr(args, name)},
    )
    return 0 if is_exact else 1


if __name__ == "__main__":
    sys.exit(main())
