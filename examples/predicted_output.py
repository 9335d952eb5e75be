"""Edit a piece of code, with the code as it was as the predicted output."""

from engine_v1 import LLM, SamplingParams

CODE = """class Counter:
    def __init__(self):
        self.count = 0

    def increment(self):
        self.count += 1
        return self.count

    def reset(self):
        self.count = 0
        return self.count
"""
QUESTION = f"Change the name of the class to Meter. Return the whole code and nothing else.\n\n```python\n{CODE}```"


def main() -> None:
    """Ask with the prediction and without, and print what each took."""
    # Long drafts suit predictions: where they hold, they hold for many tokens.
    speculation = {"method": "ngram", "num_speculative_tokens": 12}
    with LLM("smollm2-135m-instruct", max_model_len=2048, speculative_config=speculation) as llm:
        (prompt,) = llm.preprocess_chat([{"role": "user", "content": QUESTION}])
        predicted = prompt | {"prediction": {"type": "content", "content": f"```python\n{CODE}```"}}
        params = SamplingParams(temperature=0, max_tokens=128)
        plain, fast = (llm.generate([one], params, use_tqdm=False)[0].outputs[0] for one in (prompt, predicted))
    print(fast.text)
    for name, output in (("without the prediction", plain), ("with it", fast)):
        metrics = output.spec_decode_metrics
        assert metrics is not None  # there is one wherever the engine speculates
        print(f"{name}: {len(output.token_ids)} tokens in {metrics.num_steps} steps")
        print(
            f"  predicted tokens that came true: {metrics.accepted_prediction_tokens}, "
            f"that did not: {metrics.rejected_prediction_tokens}"
        )
    print("the same text" if plain.token_ids == fast.token_ids else "DIFFERENT")


if __name__ == "__main__":
    main()
