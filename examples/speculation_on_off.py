"""Run the same prompts with speculation off and on, and compare what comes out and how many steps it took."""

from typing import Any

from engine_v1 import LLM, RequestOutput, SamplingParams

MODEL = "smollm2-135m-instruct"

QUESTIONS = [
    "Rewrite this list as a numbered list.\n- red apple\n- green pear\n- yellow banana\n- blue plum",
    "Repeat the sentence three times: The quick brown fox jumps over the lazy dog near the river bank.",
    "Copy this list and add one item: red apple, green pear, yellow banana, red apple, green pear, yellow banana.",
]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=64),
    SamplingParams(temperature=0, max_tokens=64),
    SamplingParams(temperature=0.7, seed=3, max_tokens=64),  # sampled, and equal all the same
]


def answer(speculative_config: dict[str, Any] | None) -> list[RequestOutput]:
    """Answer all questions in one batch, on an engine of its own."""
    with LLM(MODEL, max_model_len=2048, speculative_config=speculative_config) as llm:
        return llm.chat([[{"role": "user", "content": question}] for question in QUESTIONS], PARAMS, use_tqdm=False)


def main() -> None:
    """Print, for each question, steps with and without drafts, and whether the outputs are the same."""
    off = answer(None)
    on = answer({"method": "ngram", "num_speculative_tokens": 5})
    num_identical = 0
    for without, drafted in zip(off, on, strict=True):
        a, b = without.outputs[0], drafted.outputs[0]
        identical = (a.token_ids, a.text, a.finish_reason) == (b.token_ids, b.text, b.finish_reason)
        num_identical += identical
        metrics = b.spec_decode_metrics
        assert metrics is not None  # there is one wherever the engine speculates
        print(
            f"{len(a.token_ids)} tokens: {len(a.token_ids)} steps without drafts, {metrics.num_steps} with, "
            f"{metrics.num_accepted_draft_tokens} of {metrics.num_draft_tokens} draft tokens accepted, "
            f"{'identical' if identical else 'DIFFERENT'}"
        )
    print(f"{num_identical} of {len(on)} outputs identical")


if __name__ == "__main__":
    main()
