"""A model's tokenizer and chat template, without the seconds that importing transformers costs."""

import functools
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from engine_v1.models.loader import read_json

if TYPE_CHECKING:
    from jinja2 import Template
    from transformers import PreTrainedTokenizerBase

_SPECIAL_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """Turns text and conversations into token ids and back.

    Reads tokenizer.json and tokenizer_config.json as transformers does; whether a BOS is added is tokenizer.json's to
    say. A directory without tokenizer.json is loaded through transformers.

    Args:
        directory: a model's, in Hugging Face's layout.

    Raises:
        FileNotFoundError: if it holds no tokenizer.
        ValueError: if one of its files is damaged, or the tokenizer has no fast version.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config = read_json(directory / "tokenizer_config.json") or {}
        self.special_tokens = self._special_tokens()  # text by role: bos_token, eos_token ...
        self.backend = self._load_backend()
        self._chat_templates = self._read_chat_templates()

    @property
    def vocab_size(self) -> int:
        """How many tokens there are, added ones included; a model's own vocabulary may be padded beyond it."""
        return int(self.backend.get_vocab_size())

    @property
    def bos_token_id(self) -> int | None:
        return self._token_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._token_id("eos_token")

    @property
    def all_special_ids(self) -> frozenset[int]:
        """The ids that decode(skip_special_tokens=True) leaves out."""
        added = self.backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text, with the BOS or EOS that the tokenizer is set to add."""
        ids: list[int] = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of some ids."""
        text: str = self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        **variables: Any,
    ) -> list[int] | str:
        """Render a conversation with the model's chat template.

        The template writes the BOS where the model wants one, so the tokenizer adds none.

        Args:
            messages: dictionaries with "role" and "content".
            tokenize: return token ids, else the text.
            add_generation_prompt: open the assistant's turn after the last message.
            chat_template: a Jinja template, or the name of one of the model's, in place of its default.
            **variables: further variables of the template, such as `tools`.

        Raises:
            ValueError: if the model has no template, or the template refuses the messages.
        """
        from jinja2 import TemplateError

        source = self._chat_template(chat_template, uses_tools=bool(variables.get("tools")))
        names = {"tools": None, "documents": None} | self.special_tokens | variables
        try:
            text = _compile(source).render(
                messages=[dict(message) for message in messages], add_generation_prompt=add_generation_prompt, **names
            )
        except (TemplateError, TypeError) as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def to_transformers(self) -> "PreTrainedTokenizerBase":
        """Return this tokenizer as transformers has it.

        Cost: seconds, the first time a process imports transformers.
        """
        from transformers import AutoTokenizer

        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(self.directory)
        return tokenizer

    def _token_id(self, role: str) -> int | None:
        text = self.special_tokens.get(role)
        token_id: int | None = None if text is None else self.backend.token_to_id(text)
        return token_id

    def _special_tokens(self) -> dict[str, str]:
        """Return the special tokens' texts; older models have them in a file of their own."""
        given = (read_json(self.directory / "special_tokens_map.json") or {}) | {
            role: token for role, token in self.config.items() if token is not None
        }
        tokens = {role: given.get(role) for role in _SPECIAL_ROLES}
        return {
            role: token["content"] if isinstance(token, Mapping) else str(token)
            for role, token in tokens.items()
            if token is not None
        }

    def _load_backend(self) -> tokenizers.Tokenizer:
        path = self.directory / "tokenizer.json"
        if not path.is_file():
            return self._backend_of_transformers()
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more specific
            raise ValueError(f"{path} is damaged or no tokenizer ({error}); download it again") from error
        backend.no_truncation()
        backend.no_padding()
        self._add_missing_tokens(backend)
        return backend

    def _add_missing_tokens(self, backend: tokenizers.Tokenizer) -> None:
        """Add tokens that tokenizer_config.json knows and tokenizer.json does not, in the order of their ids."""
        known = {token.content for token in backend.get_added_tokens_decoder().values()}
        listed: Mapping[str, Any] = self.config.get("added_tokens_decoder") or {}
        for _, token in sorted(listed.items(), key=lambda item: int(item[0])):
            if token["content"] not in known:
                flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
                options = {flag: token[flag] for flag in flags if flag in token}
                backend.add_tokens([tokenizers.AddedToken(token["content"], **options)])
                known.add(token["content"])
        backend.add_special_tokens([text for text in self.special_tokens.values() if text not in known])

    def _backend_of_transformers(self) -> tokenizers.Tokenizer:
        files = ("tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "spiece.model")
        if not any((self.directory / name).is_file() for name in files):
            raise FileNotFoundError(f"{self.directory} holds no tokenizer: there is no tokenizer.json")
        try:
            tokenizer = self.to_transformers()
        except Exception as error:  # transformers raises whatever a conversion runs into
            raise ValueError(
                f"{self.directory} has no tokenizer.json, and transformers cannot make one ({error}); "
                "save the tokenizer with save_pretrained() and a fast tokenizer class"
            ) from error
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, tokenizers.Tokenizer):
            raise ValueError(
                f"{self.directory} has no tokenizer.json and its tokenizer ({type(tokenizer).__name__}) has no fast "
                "version; models with a fast tokenizer are supported"
            )
        return backend

    def _read_chat_templates(self) -> dict[str, str]:
        """Return the templates by name; the one without a name is "default"."""
        path = self.directory / "chat_template.jinja"
        if path.is_file():
            templates = {"default": path.read_text(encoding="utf-8")}
            others = self.directory / "additional_chat_templates"
            return templates | {p.stem: p.read_text(encoding="utf-8") for p in sorted(others.glob("*.jinja"))}
        given = self.config.get("chat_template")
        if given is None:
            given = (read_json(self.directory / "chat_template.json") or {}).get("chat_template")
        if isinstance(given, list):
            return {entry["name"]: entry["template"] for entry in given}
        return {} if given is None else {"default": given}

    def _chat_template(self, asked: str | None, *, uses_tools: bool) -> str:
        if asked is not None:
            return self._chat_templates.get(asked, asked)
        if uses_tools and "tool_use" in self._chat_templates:
            return self._chat_templates["tool_use"]
        if "default" not in self._chat_templates:
            named = f" by default, only {', '.join(sorted(self._chat_templates))}" if self._chat_templates else ""
            raise ValueError(f"{self.directory} has no chat template{named}; pass chat_template, or a prompt of text")
        return self._chat_templates["default"]


@functools.lru_cache(maxsize=16)
def _compile(source: str) -> "Template":
    """Compile a chat template, which is somebody else's code, in a sandbox, with what transformers offers templates."""
    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:  # noqa: FBT001, FBT002 Jinja's to name
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)  # Jinja's own escapes HTML

    def strftime_now(template: str) -> str:
        return datetime.now().strftime(template)  # noqa: DTZ005 the user's date is meant

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_generation_tag(), loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise ValueError(f"the chat template is not valid Jinja: {error}") from error


@functools.cache
def _generation_tag() -> type:
    """Return an extension for the `generation` tag: it marks the assistant's words for training, and is plain here."""
    from jinja2.ext import Extension

    class GenerationTag(Extension):
        tags = {"generation"}  # noqa: RUF012 Jinja's own declaration

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return GenerationTag
