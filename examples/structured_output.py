"""Get JSON, a choice and a pattern out of a small model, and see what the form itself drafts."""

import json

from engine_v1 import LLM, SamplingParams

MODEL = "smollm2-135m-instruct"

RECIPE = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 40},
        "minutes": {"type": "integer", "minimum": 1, "maximum": 240},
        "ingredients": {"type": "array", "items": {"type": "string", "maxLength": 20}, "minItems": 2, "maxItems": 4},
    },
    "required": ["title", "minutes", "ingredients"],
    "additionalProperties": False,
}

REQUESTS = [
    ("Describe a recipe for pancakes as JSON.", {"json": RECIPE}),
    ("Is a tomato a fruit?", {"choice": ["Yes, it is.", "No, it is not."]}),
    ("Give me a phone number.", {"regex": r"\+[0-9]{2} [0-9]{3} [0-9]{4}"}),
    ("Write an SQL query for the names of all users.", {"grammar": 'root ::= "SELECT " ("name" | "*") " FROM users;"'}),
]


def main() -> None:
    """Answer each question in its form, and print how many steps its tokens took."""
    with LLM(MODEL, max_model_len=1024, speculative_config={"method": "ngram"}) as llm:
        messages = [[{"role": "user", "content": question}] for question, _ in REQUESTS]
        params = [SamplingParams(temperature=0, max_tokens=120, structured_outputs=form) for _, form in REQUESTS]
        outputs = llm.chat(messages, params, use_tqdm=False)
    for (question, _), output in zip(REQUESTS, outputs, strict=True):
        one = output.outputs[0]
        metrics = one.spec_decode_metrics
        assert metrics is not None  # there is one wherever the engine speculates
        print(f"{question}\n    {one.text}")
        print(
            f"    {len(one.token_ids)} tokens in {metrics.num_steps} steps, {metrics.num_accepted_draft_tokens} of "
            f"{metrics.num_draft_tokens} draft tokens accepted"
        )
    recipe = json.loads(outputs[0].outputs[0].text)
    print(f"{recipe['title']} takes {recipe['minutes']} minutes.")


if __name__ == "__main__":
    main()
