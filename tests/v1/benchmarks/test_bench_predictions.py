"""The edit workload in small: scripted outputs, predicted and not."""

import random
from types import SimpleNamespace

import pytest

from tests.checkpoints import byte_tokenizer


def test_a_predicted_edit_gives_five_tokens_per_step(script):
    """Two documents of 300 tokens with 12 of them changed, absent from the prompt: lookups find nothing."""
    rng = random.Random(0)
    edits = []
    for _ in range(2):
        original = [rng.randrange(2000) for _ in range(300)]
        edited = [*original[:150], *(rng.randrange(2000) for _ in range(12)), *original[160:]]
        edits.append(script.Edit([1, 2, 3], original, edited))
    hidden = [SimpleNamespace(prompt=edit.instruction, original=edit.original, edited=edit.edited) for edit in edits]
    config = {"method": "ngram", "num_speculative_tokens": 12, "adaptive": False}
    assert script.measure(hidden, config, 2000, predict=False)["tokens_per_step"] < 1.2
    fixed = script.measure(hidden, config, 2000, predict=True)
    assert fixed["tokens_per_step"] >= 5
    assert (fixed["accepted_prediction_tokens"], fixed["rejected_prediction_tokens"]) == (580, 20)
    assert script.measure(hidden, config | {"adaptive": True}, 2000, predict=True)["output_tokens"] == 604


def test_an_edit_changes_the_middle_sentence(script):
    """Texts of the wrong length are passed over; the first edit gets a fixed sentence, the next one the first's."""
    tokenizer = SimpleNamespace(backend=byte_tokenizer())
    texts = [" ".join(f"{name} sentence number {i} is here." for i in range(12)) for name in ("First", "Second")]
    first, second = script.make_edits(["Too short. A. B. C. D.", *texts], tokenizer, 2)
    assert bytes(first.original).decode() == texts[0]
    assert "First sentence number 6" not in bytes(first.edited).decode()
    assert bytes(second.edited).decode() == texts[1].replace(
        "Second sentence number 6 is here.", "First sentence number 6 is here."
    )
    with pytest.raises(ValueError, match="3 were asked for"):
        script.make_edits(texts, tokenizer, 3)
