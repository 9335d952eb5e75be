"""Turns the form that a request asks for into a grammar, once for all requests that ask for the same."""

import json
import logging
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from engine_v1.structured_output.grammar import Grammar
from engine_v1.structured_output.params import StructuredOutputsParams
from engine_v1.structured_output.vocabulary import GrammarVocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

logger = logging.getLogger(__name__)

_MAX_CACHED = 64  # grammars kept for requests to come; a compiled schema takes some hundred kilobytes

# The spacing of JSON where nothing is said of it: that of Python's json.dumps. A model that may write any whitespace
# sometimes writes nothing else until its length ends, and where it has a choice no token is forced.
_SPACING = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
_NO_SPACING = {"whitespace_flexible": False}


class GrammarCompiler:
    """Compiles grammars through llguidance, which is imported and given the vocabulary when the first is asked for.

    Args:
        tokenizer: the model's.
        vocab_size: columns of the logits.
        special_token_ids: tokens that are no text.
        eos_token_ids: what ends an output, the likeliest first; there may be none.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        *,
        special_token_ids: frozenset[int],
        eos_token_ids: Sequence[int],
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._special_token_ids = special_token_ids | frozenset(eos_token_ids)
        self._eos_token_ids = list(eos_token_ids)
        self._vocabulary: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()  # by source, the one used last at the end

    def compile(self, params: StructuredOutputsParams, stop_token_ids: Sequence[int] = ()) -> Grammar:
        """Return a grammar before its first token.

        Args:
            params: the form.
            stop_token_ids: ids that end this request beside EOS.

        Raises:
            ValueError: if the form cannot be compiled, or nothing could end the output.

        Cost: about a millisecond for a small schema, tens for a large one; microseconds for one compiled before. The
        first of an engine takes 0.2 s more.
        """
        end_token_ids = list(dict.fromkeys([*self._eos_token_ids, *stop_token_ids]))
        if not end_token_ids:
            raise ValueError(
                "structured_outputs need a token that ends the output; without an EOS give stop_token_ids."
            )
        source = _source(params)
        start = self._compiled.get(source)
        if start is None:
            start = self._compiled[source] = self._compile(source)
            if len(self._compiled) > _MAX_CACHED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(source)
        return Grammar(start, self._vocab_size, end_token_ids)

    def _compile(self, source: str) -> "LLMatcher":
        from llguidance import LLMatcher

        matcher = LLMatcher(self._llguidance_vocabulary(), source, log_level=0)
        if matcher.is_error():
            raise ValueError(f"structured_outputs do not compile: {matcher.get_error()}")
        for warning in matcher.get_grammar_warnings():
            logger.warning("structured_outputs: %s", warning)
        return matcher

    def _llguidance_vocabulary(self) -> "LLTokenizer":
        if self._vocabulary is None:
            from llguidance import LLTokenizer, TokenizerWrapper

            vocabulary = GrammarVocabulary(self._tokenizer, self._vocab_size, self._special_token_ids)
            self._vocabulary = LLTokenizer(TokenizerWrapper(vocabulary), n_vocab=self._vocab_size + 1)
        return self._vocabulary


def _source(params: StructuredOutputsParams) -> str:
    """Return a form as llguidance has it.

    Raises:
        ValueError: if it is not well formed.
    """
    try:
        from llguidance import LLMatcher, grammar_from
    except ImportError as error:
        raise ValueError("structured_outputs need the package llguidance; install it with pip") from error

    if params.regex is not None:
        return LLMatcher.grammar_from_regex(params.regex)
    if params.choice is not None:
        quoted = (json.dumps(one, ensure_ascii=False) for one in params.choice)
        return LLMatcher.grammar_from_lark("start: " + " | ".join(quoted))
    if params.grammar is not None:
        try:
            return grammar_from("grammar", params.grammar)
        except ValueError as error:
            raise ValueError(f"structured_outputs do not compile: {error}") from error
    schema = params.schema()
    if params.disable_additional_properties:
        schema = _without_additional_properties(schema)
    spacing: Any = _NO_SPACING if params.disable_any_whitespace else _SPACING
    if params.whitespace_pattern is not None:
        spacing = {"whitespace_pattern": params.whitespace_pattern}
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=spacing)


def _without_additional_properties(schema: Any) -> Any:
    """Return a schema whose objects have only the properties they list, unless it says what others are."""
    if isinstance(schema, list):
        return [_without_additional_properties(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _without_additional_properties(value) for key, value in schema.items()}
    if ("properties" in schema or "patternProperties" in schema) and isinstance(schema.get("properties", {}), dict):
        closed.setdefault("additionalProperties", False)
    return closed
