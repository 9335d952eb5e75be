"""Outputs that follow a form: valid, ended by EOS, and equal with speculation on and off."""

import json
import re

import pytest

from engine_v1 import LLM, SamplingParams
from tests.checkpoints import write_random_llama, write_successor_model
from tests.factories import NGRAM
from tests.v1.engine.toy_tokenizers import EOS, byte_tokenizer_with_eos

PROMPTS = [list(b'{"name": "ab", "kind": "alpha"} ' * 2), list(b"0123-4567 select alpha from beta ")]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{1,6}$"},
        "kind": {"enum": ["alpha", "albert"]},
        "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "kind", "tags"],
    "additionalProperties": False,
}
FORMS = {
    "json": {"json": PERSON},
    "json as text": {"json": json.dumps(PERSON)},
    "dense json": {"json": PERSON, "disable_any_whitespace": True},
    "regex": {"regex": r"[0-9]{4}(-[0-9]{4}){1,3}"},
    "choice": {"choice": ["yes, of course", "yes, of course not", "no"]},
    "grammar": {"grammar": 'root ::= "select " column " from " column\ncolumn ::= "alpha" | "beta"'},
}


def is_valid(name, text):
    """Whether a text has the form of that name."""
    if "json" in name:
        person = json.loads(text)
        return (
            list(person) == ["name", "kind", "tags"]
            and re.fullmatch("[a-z]{1,6}", person["name"]) is not None
            and person["kind"] in ("alpha", "albert")
            and 1 <= len(person["tags"]) <= 3
        )
    if name == "choice":
        return text in FORMS[name]["choice"]
    pattern = FORMS[name].get("regex", "select (alpha|beta) from (alpha|beta)")
    return re.fullmatch(pattern, text) is not None


@pytest.fixture(scope="module")
def byte_model(tmp_path_factory):
    """A random Llama whose tokens are bytes, and an EOS."""
    directory = tmp_path_factory.mktemp("bytes")
    return write_random_llama(directory, vocab_size=EOS + 1, tokenizer=byte_tokenizer_with_eos(), eos_token_id=EOS)


def generate(model, params, speculative_config, prompts=PROMPTS, **options):
    defaults = {"dtype": "float32", "max_num_seqs": 16, "kv_cache_memory_bytes": 1 << 24}
    with LLM(str(model), speculative_config=speculative_config, **(defaults | options)) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        metrics = {metric.name: metric for metric in llm.get_metrics()}
    return outputs, metrics


def seen(output):
    """What must not depend on speculation."""
    one = output.outputs[0]
    return one.token_ids, one.text, one.finish_reason, one.stop_reason, one.logprobs, output.num_cached_tokens


def both(model, params, prompts=PROMPTS, **options):
    """The outputs with speculation on, after checking that they equal those without."""
    on, _ = generate(model, params, NGRAM, prompts, **options)
    off, _ = generate(model, params, None, prompts, **options)
    assert [seen(output) for output in on] == [seen(output) for output in off]
    return on


def every_form(**params):
    """Prompts with each form, and the names of the forms."""
    names = [name for name in FORMS for _ in PROMPTS]
    listed = [
        SamplingParams(**({"temperature": 0.0, "max_tokens": 120, "seed": i} | params), structured_outputs=FORMS[name])
        for i, name in enumerate(names)
    ]
    return PROMPTS * len(FORMS), listed, names


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.9}, {"temperature": 1.5, "top_p": 0.8, "logprobs": 2}], ids=str
)
def test_outputs_have_their_form(byte_model, options):
    """Every form, in one batch, is valid and ends by EOS, greedy and sampled; logprobs are the same, too."""
    prompts, params, names = every_form(**options)
    for name, output in zip(names, both(byte_model, params, prompts), strict=True):
        assert output.outputs[0].finish_reason == "stop", name
        assert is_valid(name, output.outputs[0].text), name
        assert output.outputs[0].spec_decode_metrics.num_accepted_draft_tokens > 0, name


@pytest.fixture(scope="module")
def sampled_answers(byte_model):
    """Every form, sampled, by a roomy engine without speculation."""
    prompts, params, _ = every_form(temperature=0.9, logprobs=1)
    return generate(byte_model, params, None, prompts)[0]


@pytest.mark.parametrize(
    "engine, k",
    [
        ({"max_num_batched_tokens": 16}, 5),
        ({"block_size": 4, "num_gpu_blocks_override": 70}, 12),
        ({"max_num_seqs": 2, "block_size": 5}, 12),
        ({"enable_prefix_caching": False, "long_prefill_token_threshold": 7}, 1),
    ],
    ids=str,
)
def test_chunks_preemption_and_batches_change_nothing(byte_model, sampled_answers, engine, k):
    """With chunked prefill, in a pool too small for all, or two by two, outputs are those of a roomy engine."""
    prompts, params, _ = every_form(temperature=0.9, logprobs=1)
    for speculation in (NGRAM | {"num_speculative_tokens": k}, None):
        outputs, metrics = generate(byte_model, params, speculation, prompts, **engine)
        assert [seen(output)[:-1] for output in outputs] == [seen(output)[:-1] for output in sampled_answers]
        if "num_gpu_blocks_override" in engine:
            assert metrics["vllm:num_preemptions"].value > 0


def test_a_request_without_a_form_is_untouched_by_its_neighbours(byte_model):
    """In a mixed batch it gives what it gives alone, and may draft what no grammar would allow."""
    free = SamplingParams(temperature=0.9, seed=5, max_tokens=40, ignore_eos=True)
    formed = SamplingParams(temperature=0.9, seed=6, max_tokens=80, structured_outputs=FORMS["json"])
    outputs = both(byte_model, [free, formed, free], [PROMPTS[0], PROMPTS[0], PROMPTS[1]])
    (alone, _) = generate(byte_model, free, None, [PROMPTS[0]])
    assert outputs[0].outputs[0].token_ids == alone[0].outputs[0].token_ids
    assert is_valid("json", outputs[1].outputs[0].text)


def test_forced_tokens_are_accepted_drafts(byte_model):
    """A text without a choice takes the first token, then steps of five drafts and one, EOS too; none is rejected."""
    text = "no choice at all"
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=50, structured_outputs={"choice": [text]})
    (output,) = both(byte_model, params, [list(b"xyz")])
    one = output.outputs[0]
    assert (one.text, one.token_ids, one.finish_reason) == (text, [*text.encode(), EOS], "stop")
    assert one.spec_decode_metrics.per_step_drafted == one.spec_decode_metrics.per_step_accepted == [0, 5, 5, 4]


def test_every_draft_that_is_forced_is_accepted(byte_model):
    """Where the n-gram rule finds nothing (its suffixes are too long), all drafts are forced ones, none is rejected."""
    prompts, params, _ = every_form(temperature=0.9)
    speculation = NGRAM | {"prompt_lookup_min": 120, "prompt_lookup_max": 120}
    outputs, _ = generate(byte_model, params, speculation, prompts)
    for output in outputs:
        metrics = output.outputs[0].spec_decode_metrics
        assert metrics.num_accepted_draft_tokens == metrics.num_draft_tokens > 0


def test_an_eos_that_does_not_end_is_followed_by_eos_alone(byte_model):
    """With ignore_eos a complete output goes on with EOS to its length; the text is the form."""
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, structured_outputs={"choice": ["abc"]})
    (output,) = both(byte_model, params, [PROMPTS[0]])
    assert output.outputs[0].token_ids == [*b"abc", *[EOS] * 21]
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("abc", "length")


def test_a_stop_id_may_end_a_complete_output(byte_model):
    """Stop ids are allowed where EOS is, nowhere earlier."""
    params = SamplingParams(
        temperature=0.0,
        max_tokens=24,
        stop_token_ids=[0],
        ignore_eos=True,
        allowed_token_ids=[0, *b"abc"],
        structured_outputs={"choice": ["abc"]},
    )
    (output,) = both(byte_model, params, [PROMPTS[0]])
    assert (output.outputs[0].token_ids, output.outputs[0].stop_reason) == ([*b"abc", 0], 0)


def test_stop_strings_and_lengths_end_a_form_early(byte_model):
    """A form does not keep a request from its stop string or its max_tokens."""
    form = {"choice": ["one two three four"]}
    params = [
        SamplingParams(temperature=0.0, max_tokens=50, stop=["thr"], structured_outputs=form),
        SamplingParams(temperature=0.0, max_tokens=6, structured_outputs=form),
    ]
    first, second = both(byte_model, params, PROMPTS[:2])
    assert (first.outputs[0].text, first.outputs[0].stop_reason) == ("one two ", "thr")
    assert (second.outputs[0].text, second.outputs[0].finish_reason) == ("one tw", "length")


@pytest.mark.parametrize(
    "form, allowed, kept",
    [({"choice": ["abc", "abd"]}, [*b"ab"], b"ab"), ({"regex": "b*"}, [*b"a"], b"")],
    ids=["after drafts", "at once"],
)
def test_where_no_token_is_left_the_request_says_so(byte_model, form, allowed, kept):
    """Allowed ids that the grammar has no use for end the request with an error, after what came before."""
    params = SamplingParams(temperature=0.0, max_tokens=9, allowed_token_ids=allowed, structured_outputs=form)
    good = SamplingParams(temperature=0.0, max_tokens=9, structured_outputs={"choice": ["fine"]})
    output, other = both(byte_model, [params, good], PROMPTS[:2])
    assert bytes(output.outputs[0].token_ids) == kept
    assert output.outputs[0].finish_reason == "error"
    assert "allowed_token_ids, structured_outputs" in output.outputs[0].stop_reason
    assert other.outputs[0].text == "fine"


def test_an_end_below_min_tokens_leaves_no_token(byte_model):
    """A grammar that allows nothing but EOS before min_tokens ends its request with an error that names both."""
    params = SamplingParams(temperature=0.0, max_tokens=9, min_tokens=5, structured_outputs={"choice": ["abc"]})
    enough = SamplingParams(temperature=0.0, max_tokens=9, min_tokens=3, structured_outputs={"choice": ["abc"]})
    output, other = both(byte_model, [params, enough], PROMPTS[:2])
    assert (bytes(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (b"abc", "error")
    assert "structured_outputs, min_tokens" in output.outputs[0].stop_reason
    assert (other.outputs[0].text, other.outputs[0].finish_reason) == ("abc", "stop")


def test_a_logits_processor_cannot_leave_the_form(byte_model):
    """What it says of tokens that the form excludes changes nothing."""

    def insists(output, logits):
        logits[ord("z") if len(output) == 2 else ord("a")] = 1000.0
        return logits

    params = SamplingParams(
        temperature=0.0, max_tokens=9, logits_processors=[insists], structured_outputs={"regex": "(a|b)*"}
    )
    (output,) = both(byte_model, [params], PROMPTS[:1])
    assert re.fullmatch("aa[ab]a{6}", output.outputs[0].text)


def test_samples_of_one_prompt_follow_the_form_each_for_itself(byte_model):
    """All four outputs are valid, and not all equal."""
    params = SamplingParams(temperature=1.5, n=4, seed=3, max_tokens=100, structured_outputs=FORMS["json"])
    (on,), _ = generate(byte_model, params, NGRAM, PROMPTS[:1])
    (off,), _ = generate(byte_model, params, None, PROMPTS[:1])
    texts = [one.text for one in on.outputs]
    assert texts == [one.text for one in off.outputs]
    assert all(is_valid("json", text) for text in texts)
    assert len(set(texts)) > 1


def test_a_bad_form_is_refused_and_nothing_else_is_lost(byte_model):
    """The error names the prompt; a request that runs meanwhile ends as it would have."""
    good = SamplingParams(temperature=0.0, max_tokens=60, structured_outputs=FORMS["json"])
    bad = SamplingParams(structured_outputs={"json": {"type": "strin"}})
    (expected,), _ = generate(byte_model, good, NGRAM, PROMPTS[:1])
    with LLM(str(byte_model), dtype="float32", speculative_config=NGRAM) as llm:
        stream = llm.stream({"prompt_token_ids": PROMPTS[0]}, good)
        text = next(stream).outputs[0].text
        with pytest.raises(ValueError, match="prompt 1: structured_outputs do not compile: Invalid type: strin"):
            llm.generate([{"prompt_token_ids": [1]}] * 2, [good, bad], use_tqdm=False)
        text += "".join(output.outputs[0].text for output in stream)
    assert text == expected.outputs[0].text


def test_a_form_needs_a_tokenizer_and_an_end(byte_model, tmp_path):
    """Token ids alone say nothing of text; a model without EOS needs stop ids."""
    params = SamplingParams(structured_outputs={"regex": "a"})
    endless_model = write_successor_model(tmp_path, lambda token: token, byte_tokenizer_with_eos())
    for model, options, message in (
        (byte_model, {"skip_tokenizer_init": True}, "structured_outputs need a tokenizer"),
        (endless_model, {}, "give stop_token_ids"),
    ):
        with LLM(str(model), dtype="float32", **options) as llm, pytest.raises(ValueError, match=message):
            llm.generate({"prompt_token_ids": [1]}, params, use_tqdm=False)


RECIPE = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 40},
        "minutes": {"type": "integer", "minimum": 1, "maximum": 240},
        "difficulty": {"enum": ["easy", "medium", "hard"]},
        "ingredients": {"type": "array", "items": {"type": "string", "maxLength": 20}, "minItems": 1, "maxItems": 4},
        "vegetarian": {"type": "boolean"},
    },
    "required": ["title", "minutes", "difficulty", "ingredients", "vegetarian"],
    "additionalProperties": False,
}
DISHES = ["tomato soup", "pancakes", "fried rice", "apple pie", "lentil curry", "omelette", "green salad", "pizza"]
DISHES += ["noodles", "bread", "hummus", "tacos", "risotto", "chili", "porridge", "dumplings", "ramen", "stew"]
DISHES += ["a cheese sandwich", "grilled fish"]


def check_recipes(dishes, temperatures):
    """Valid JSON for every dish, ended by EOS, equal with speculation on and off, in fewer steps."""
    messages = [[{"role": "user", "content": f"Describe a recipe for {dish} as JSON."}] for dish in dishes]
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=200, structured_outputs={"json": RECIPE})
        for i, temperature in enumerate(temperatures)
    ]
    answers = []
    for speculation in (None, NGRAM):  # lengths that follow the clock would leave the number of steps to it
        with LLM("smollm2-135m-instruct", max_model_len=512, speculative_config=speculation) as llm:
            answers.append(llm.chat(messages, params, use_tqdm=False))
    off, on = answers
    assert [seen(output) for output in on] == [seen(output) for output in off]
    for output in on:
        one = output.outputs[0]
        assert one.finish_reason == "stop"
        recipe = json.loads(one.text)
        assert list(recipe) == RECIPE["required"]
        assert len(recipe["title"]) <= 40
        assert 1 <= recipe["minutes"] <= 240
        assert recipe["difficulty"] in ("easy", "medium", "hard")
        assert 1 <= len(recipe["ingredients"]) <= 4
        assert recipe["vegetarian"] in (True, False)
    ones = [output.outputs[0] for output in on]
    assert sum(one.spec_decode_metrics.num_steps for one in ones) < 0.7 * sum(len(one.token_ids) for one in ones)


def test_json_of_the_demo_model(demo_model_path):
    """JSON with bounded strings is valid, ends with "stop", and costs a fraction of the steps."""
    check_recipes(DISHES[:4], [0.0, 0.0, 0.8, 0.8])


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_json_of_the_demo_model_for_twenty_prompts(demo_model_path, temperature):
    """The same for twenty prompts."""
    check_recipes(DISHES, [temperature] * len(DISHES))
