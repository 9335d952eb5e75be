"""Hold a conversation of two turns; the second finds the first in the prefix cache."""

from engine_v1 import LLM, SamplingParams

MODEL = "smollm2-135m-instruct"

TURNS = ["Name three things to see in Rome. Answer with a short list.", "Which of them is the oldest?"]


def main() -> None:
    """Ask, answer, ask again."""
    params = SamplingParams(temperature=0, max_tokens=96)
    messages = [{"role": "system", "content": "You are a helpful guide."}]
    with LLM(MODEL, max_model_len=2048, speculative_config={"method": "ngram"}) as llm:
        for turn in TURNS:
            messages.append({"role": "user", "content": turn})
            [output] = llm.chat(messages, params, use_tqdm=False)
            completion = output.outputs[0]
            messages.append({"role": "assistant", "content": completion.text})
            metrics = completion.spec_decode_metrics
            assert metrics is not None  # there is one wherever the engine speculates
            print(f"> {turn}\n{completion.text}")
            print(
                f"[{output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens from the cache, "
                f"{len(completion.token_ids)} tokens in {metrics.num_steps} steps]\n"
            )


if __name__ == "__main__":
    main()
