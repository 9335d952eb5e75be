"""Generate from a few prompts: greedy, sampled with a seed, stopped at a string, and streamed."""

from engine_v1 import LLM, SamplingParams

MODEL = "smollm2-135m-instruct"

PROMPTS = ["The capital of France is", "Three rivers of Europe are"]


def main() -> None:
    """Load the demo model once and use it in three ways."""
    with LLM(MODEL, max_model_len=2048, speculative_config={"method": "ngram"}) as llm:
        print("== greedy, with the log probability of each token")
        for output in llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=12, logprobs=1), use_tqdm=False):
            completion = output.outputs[0]
            print(f"{output.prompt!r} -> {completion.text!r} ({completion.finish_reason})")
            assert completion.logprobs is not None
            chosen = [next(iter(position.values())) for position in completion.logprobs]  # the chosen token is first
            print("   ", " ".join(f"{token.decoded_token!r}:{token.logprob:.2f}" for token in chosen))

        print("== one set of parameters per prompt, results in the prompts' order")
        params = [
            SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_tokens=24),
            SamplingParams(temperature=0, stop=["\n", "."], max_tokens=48),
        ]
        for output in llm.generate(PROMPTS, params, use_tqdm=False):
            completion = output.outputs[0]
            print(f"{completion.text!r} ({completion.finish_reason}, {completion.stop_reason!r})")

        print("== streamed")
        for output in llm.stream("Once upon a time", SamplingParams(temperature=0, max_tokens=40)):
            print(output.outputs[0].text, end="", flush=True)  # what is new since the last one
        print()


if __name__ == "__main__":
    main()
