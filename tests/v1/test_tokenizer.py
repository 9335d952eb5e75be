import json

import pytest
import transformers
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from engine_v1.tokenizer import Tokenizer

CORPUS = [
    "the quick brown fox jumps over the lazy dog, 12345 times",
    "a tokenizer cuts text into words and words into pieces",
    "naïve café — 你好 🌶",
]
TEXTS = [*CORPUS, "", " ", "\n\n  x\t", "<|begin|>the<|user|> fox<|end|>", "HE'S 1234567890 ½", "\u200d🌶\x00"]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}\n"
    "    {% if message.role == 'nobody' %}{{ raise_exception('nobody speaks') }}{% endif %}\n"
    "{{ '<|user|>' if message.role == 'user' else '' }}{% generation %}"
    "{{ message.content | trim }}{% endgeneration %}\n"
    "{%- if loop.last %}{% break %}{% endif %}\n"
    "{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}\n"
    "{% if add_generation_prompt %}<|end|>{{ mood }}{% endif %}"
)
MESSAGES = [{"role": "user", "content": " 1 < 2 & ü "}, {"role": "assistant", "content": "the fox"}]


def write_tokenizer(directory, *, adds_bos=False, template=TEMPLATE, **config):
    """A byte-level BPE in a model's directory."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|begin|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(["<|user|>"])
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<|begin|> $A", pair="<|begin|> $A $B", special_tokens=[("<|begin|>", 0)]
        )
    backend.enable_truncation(4)
    backend.enable_padding()
    full = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin|>", "eos_token": "<|end|>"} | config
    if template is not None:
        full["chat_template"] = template
    directory.mkdir(exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    write_config(directory, full)
    return directory


def write_config(directory, config):
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def change_config(directory, **changes):
    path = directory / "tokenizer_config.json"
    write_config(directory, json.loads(path.read_text()) | changes)


def theirs_without_truncation(directory):
    """The same tokenizer in transformers."""
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text()) | {"truncation": None, "padding": None}
    path.write_text(json.dumps(content))
    return transformers.AutoTokenizer.from_pretrained(directory)


@pytest.mark.parametrize(
    "adds_bos, config",
    [
        (False, {}),
        (True, {}),
        (False, {"add_bos_token": True}),
        (True, {"add_bos_token": False, "add_eos_token": True}),
        (False, {"eos_token": {"content": "<|end|>", "lstrip": False, "__type": "AddedToken"}}),
        (False, {"pad_token": "<|pad|>"}),
        (
            False,
            {
                "added_tokens_decoder": {
                    "321": {"content": "<|new|>", "special": False, "normalized": False},
                    "322": {"content": "<|newer|>", "special": True},
                }
            },
        ),
    ],
)
def test_ids_and_text_are_those_of_transformers(tmp_path, adds_bos, config):
    """Whatever tokenizer_config.json changes about tokenizer.json, ids and texts come out as in transformers."""
    ours = Tokenizer(write_tokenizer(tmp_path, adds_bos=adds_bos, **config))
    theirs = theirs_without_truncation(tmp_path)
    for text in [*TEXTS, "a<|new|>b<|newer|>c<|pad|>"]:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special), text
            assert ours.decode(ids, skip_special_tokens=special) == theirs.decode(ids, skip_special_tokens=special)
    assert ours.vocab_size == len(theirs)
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)


def test_truncation_and_padding_in_the_file_are_not_applied(tmp_path):
    """A prompt is never cut behind the user's back."""
    assert len(Tokenizer(write_tokenizer(tmp_path)).encode(CORPUS[0])) > 4


@pytest.mark.parametrize("tools", [None, [{"name": "ü<b>"}]])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_conversations_are_rendered_as_in_transformers(tmp_path, tools, add_generation_prompt):
    """Whitespace control, tojson, break, generation marks and further variables work as there."""
    ours = Tokenizer(write_tokenizer(tmp_path, adds_bos=True))
    theirs = theirs_without_truncation(tmp_path)
    options = {"tools": tools, "add_generation_prompt": add_generation_prompt, "mood": "calm"}
    text = ours.apply_chat_template(MESSAGES, tokenize=False, **options)
    assert text == theirs.apply_chat_template(MESSAGES, tokenize=False, **options)
    ids = ours.apply_chat_template(MESSAGES, **options)
    assert ids == theirs.apply_chat_template(MESSAGES, return_dict=False, **options)


def test_a_conversation_has_one_bos(tmp_path):
    """Where the template writes the BOS, the tokenizer adds no second."""
    tokenizer = Tokenizer(write_tokenizer(tmp_path, adds_bos=True))
    assert tokenizer.encode("x")[0] == tokenizer.bos_token_id
    assert tokenizer.apply_chat_template(MESSAGES).count(tokenizer.bos_token_id) == 1


def test_templates_may_lie_in_files_and_have_names(tmp_path):
    """chat_template.jinja wins over the configuration; lists of named templates are read; a call may bring its own."""
    directory = write_tokenizer(tmp_path, template=None)
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    change_config(directory, chat_template=named)
    tokenizer = Tokenizer(directory)
    assert tokenizer.apply_chat_template([], tokenize=False) == "plain"
    assert tokenizer.apply_chat_template([], tokenize=False, tools=[{}]) == "tools"
    assert tokenizer.apply_chat_template([], tokenize=False, chat_template="tool_use") == "tools"
    assert tokenizer.apply_chat_template([], tokenize=False, chat_template="my {{ 1 + 1 }}") == "my 2"
    (directory / "chat_template.jinja").write_text("from a file")
    assert Tokenizer(directory).apply_chat_template([], tokenize=False) == "from a file"


@pytest.mark.parametrize(
    "template, messages, words",
    [
        (None, MESSAGES, "has no chat template"),
        ("{% if %}", MESSAGES, "not valid Jinja"),
        (TEMPLATE, [{"role": "nobody", "content": ""}], "nobody speaks"),
        ("{{ 'a' + messages[0].content }}", [{"role": "user", "content": None}], "refuses these messages"),
        ("{{ messages.__class__.__mro__ }}", MESSAGES, "refuses these messages"),
    ],
)
def test_what_a_template_cannot_render_is_an_error(tmp_path, template, messages, words):
    """A missing or broken template, messages it refuses, and reaching out of the sandbox."""
    tokenizer = Tokenizer(write_tokenizer(tmp_path, template=template))
    with pytest.raises(ValueError, match=words):
        tokenizer.apply_chat_template(messages)


def test_special_tokens_may_lie_in_a_file_of_their_own(tmp_path):
    """Older models name BOS and EOS in special_tokens_map.json."""
    directory = write_tokenizer(tmp_path)
    write_config(directory, {"tokenizer_class": "PreTrainedTokenizerFast"})
    special = {"bos_token": "<|begin|>", "eos_token": {"content": "<|end|>", "lstrip": False}}
    (directory / "special_tokens_map.json").write_text(json.dumps(special))
    tokenizer = Tokenizer(directory)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer.all_special_ids == {0, 1}


def test_a_directory_without_tokenizer_json_goes_through_transformers(tmp_path):
    """A vocabulary and merges alone are enough for transformers, and so for us."""
    directory = write_tokenizer(tmp_path / "whole")
    model = json.loads((directory / "tokenizer.json").read_text())["model"]
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "vocab.json").write_text(json.dumps(model["vocab"]))
    lines = ["#version: 0.2", *(" ".join(pair) for pair in model["merges"])]
    (tmp_path / "parts" / "merges.txt").write_text("\n".join(lines))
    write_config(tmp_path / "parts", {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|end|>", "unk_token": None})
    parts, whole = Tokenizer(tmp_path / "parts"), Tokenizer(directory)
    assert [parts.encode(text) for text in CORPUS] == [whole.encode(text) for text in CORPUS]
    assert parts.eos_token_id == 1


def test_a_missing_or_damaged_tokenizer_is_named(tmp_path):
    """The error names the directory or the file."""
    with pytest.raises(FileNotFoundError, match="holds no tokenizer"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer.json is damaged"):
        Tokenizer(tmp_path)


def test_the_demo_model_tokenizes_as_published(demo_model_path):
    """Digits one by one, the default system prompt, and the generation prompt: as SmolLM2's tokenizer.json has it."""
    tokenizer = Tokenizer(demo_model_path)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "What is 12 x 345?"}], tokenize=False)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is 12 x 345?<|im_end|>\n<|im_start|>assistant\n"
    )
    backend = tokenizer.backend
    pieces = [backend.id_to_token(i) for i in tokenizer.encode("What is 12 x 345?")]
    assert pieces == ["What", "Ġis", "Ġ", "1", "2", "Ġx", "Ġ", "3", "4", "5", "?"]
    assert tokenizer.vocab_size == 49152
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    theirs = transformers.AutoTokenizer.from_pretrained(demo_model_path)
    for sample in TEXTS:
        assert tokenizer.encode(sample) == theirs.encode(sample)
