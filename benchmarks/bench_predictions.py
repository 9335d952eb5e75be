"""How many tokens per step does a predicted output give where a text is returned with one sentence changed?

Documents are texts of Spec-Bench; the output is the document with a sentence in its middle replaced by one of another
document. The target says exactly that: it is a model class of the benchmark's own whose next token is read from a
script, so that what is measured is the drafting and not a small model's ability to follow instructions. For the same
reason there is no speed here: tokens per step are what a model would gain as long as a step costs the same.
"""

import argparse
import json
import re
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine_v1 import LLM, SamplingParams
from engine_v1.attention.metadata import Attention
from engine_v1.entrypoints.bench_datasets import read_jsonl
from engine_v1.entrypoints.bench_report import describe_machine, format_machine
from engine_v1.models.config import DecoderConfig
from engine_v1.models.hub import DEMO_MODEL, resolve_model
from engine_v1.models.registry import register_model
from engine_v1.outputs import SpecDecodeMetrics
from engine_v1.tokenizer import Tokenizer

ARCHITECTURE = "ScriptedForCausalLM"
MIN_TOKENS, MAX_TOKENS = 300, 800
CATEGORIES = ("summarization", "rag")  # those with long texts
INSTRUCTION = "Return this text with one sentence changed:\n\n"


@dataclass(frozen=True)
class Edit:
    """A document and what it becomes, as token ids."""

    instruction: list[int]
    original: list[int]
    edited: list[int]

    @property
    def prompt(self) -> list[int]:
        """What the model is given."""
        return self.instruction + self.original


class ScriptedModel:
    """Says the script, token by token, whatever it is asked: after position p the token script[p + 1]."""

    script = torch.empty(0, dtype=torch.long)

    def __init__(self, config: DecoderConfig, *, dtype: torch.dtype, device: torch.device) -> None:  # noqa: ARG002
        self.config = config

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Read the checkpoint, which has nothing of use."""
        list(weights)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, attention: Attention) -> torch.Tensor:  # noqa: ARG002
        """Return each row's position."""
        return positions[:, None].float()

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits that leave no doubt."""
        logits = torch.zeros(len(hidden), self.config.vocab_size)
        next_ids = self.script[hidden[:, 0].long().clamp(max=len(self.script) - 2) + 1]
        return logits.scatter_(1, next_ids[:, None], 10.0)


def write_checkpoint(directory: Path, vocab_size: int) -> None:
    """Write a checkpoint that the engine runs with :class:`ScriptedModel`."""
    config = {
        "architectures": [ARCHITECTURE],
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "max_position_embeddings": 4096,
        "dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config))
    save_file({"unused": torch.zeros(1)}, directory / "model.safetensors")
    register_model(ARCHITECTURE, ScriptedModel)


def make_edits(texts: Sequence[str], tokenizer: Tokenizer, count: int) -> list[Edit]:
    """Return edits of the first texts that have the right length.

    Raises:
        ValueError: there are not enough of them.
    """

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.backend.encode(text, add_special_tokens=False).ids
        return ids

    instruction, edits = encode(INSTRUCTION), []
    other = "Nothing of the kind had been reported in that town before the second of May."
    for text in texts:
        sentences = re.split(r"(?<=[.!?]) ", text)
        original = encode(text)
        if len(sentences) < 5 or not MIN_TOKENS <= len(original) <= MAX_TOKENS:
            continue
        middle = len(sentences) // 2
        edited = encode(" ".join([*sentences[:middle], other, *sentences[middle + 1 :]]))
        other = sentences[middle]
        edits.append(Edit(instruction, original, edited))
        if len(edits) == count:
            return edits
    raise ValueError(f"{len(edits)} texts have {MIN_TOKENS} to {MAX_TOKENS} tokens, {count} were asked for.")


def run_edit(llm: LLM, edit: Edit, *, predict: bool) -> SpecDecodeMetrics:
    """Let the scripted model say an edit and return how it was drafted.

    Raises:
        RuntimeError: the output is not the script.
    """
    ScriptedModel.script = torch.tensor(edit.prompt + edit.edited)
    prompt: dict[str, Any] = {"prompt_token_ids": edit.prompt}
    if predict:
        prompt["prediction"] = {"type": "content", "content": edit.original}
    params = SamplingParams(temperature=0.0, max_tokens=len(edit.edited), ignore_eos=True)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    if output.outputs[0].token_ids != edit.edited:
        raise RuntimeError("the output is not what the model was to say")
    metrics = output.outputs[0].spec_decode_metrics
    assert metrics is not None, "the engine speculates"
    return metrics


def measure(edits: Sequence[Edit], speculative_config: dict[str, Any], vocab_size: int, *, predict: bool) -> Any:
    """Return the figures of all edits through one engine."""
    with tempfile.TemporaryDirectory() as name:
        write_checkpoint(Path(name), vocab_size)
        options: dict[str, Any] = {"max_num_seqs": 1, "kv_cache_memory_bytes": 1 << 26, "device": "cpu"}
        with LLM(name, skip_tokenizer_init=True, speculative_config=speculative_config, **options) as llm:
            of_each = [run_edit(llm, edit, predict=predict) for edit in edits]
    num_tokens, num_steps = sum(m.num_output_tokens for m in of_each), sum(m.num_steps for m in of_each)
    drafted = sum(m.num_draft_tokens for m in of_each)
    return {
        "output_tokens": num_tokens,
        "tokens_per_step": round(num_tokens / num_steps, 3),
        "tokens_per_step_min": round(min(m.tokens_per_step for m in of_each), 3),
        "draft_tokens_per_step": round(drafted / num_steps, 3),
        "acceptance_rate": round(sum(m.num_accepted_draft_tokens for m in of_each) / max(1, drafted), 3),
        "accepted_prediction_tokens": sum(m.accepted_prediction_tokens for m in of_each),
        "rejected_prediction_tokens": sum(m.rejected_prediction_tokens for m in of_each),
    }


def main() -> None:
    """Measure, print the table and a last line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset-path", type=Path, required=True, help="Spec-Bench's question.jsonl")
    parser.add_argument("--num-documents", type=int, default=20)
    parser.add_argument("--num-speculative-tokens", type=int, default=16)
    parser.add_argument("--tokenizer", default=DEMO_MODEL)
    args = parser.parse_args()
    machine = describe_machine()
    print(__doc__.splitlines()[0])
    print(format_machine(machine))
    tokenizer = Tokenizer(resolve_model(args.tokenizer, tokenizer_only=True))
    texts = [row["turns"][0] for row in read_jsonl(args.dataset_path) if row["category"] in CATEGORIES]
    edits = make_edits(texts, tokenizer, args.num_documents)
    vocab_size = tokenizer.backend.get_vocab_size()
    figures: dict[str, Any] = {}
    print(f"{len(edits)} documents of {MIN_TOKENS} to {MAX_TOKENS} tokens, drafts of {args.num_speculative_tokens}\n")
    print(f"{'':<38}{'tok/step':>9}{'least':>7}{'drafted/step':>14}{'accepted':>10}{'predicted, came true':>22}")
    for name, adaptive, predict in (
        ("n-gram", False, False),
        ("n-gram and prediction", False, True),
        ("n-gram and prediction, adaptive", True, True),
    ):
        config = {"method": "ngram", "num_speculative_tokens": args.num_speculative_tokens, "adaptive": adaptive}
        line = figures[name] = measure(edits, config, vocab_size, predict=predict)
        all_predicted = line["accepted_prediction_tokens"] + line["rejected_prediction_tokens"]
        print(
            f"{name:<38}{line['tokens_per_step']:>9.2f}{line['tokens_per_step_min']:>7.2f}"
            f"{line['draft_tokens_per_step']:>14.2f}{line['acceptance_rate']:>10.0%}"
            + (f"{line['accepted_prediction_tokens']:>13} of {all_predicted}" if predict else f"{'-':>22}")
        )
    print(f"\n{json.dumps(figures | {'machine': machine})}")


if __name__ == "__main__":
    main()
