"""What form a request may ask its output to have, with vLLM's names."""

import json as json_module
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

from engine_v1.config import check_bool, refuse_unless_neutral, reject_unknown_options

KINDS = ("json", "regex", "choice", "grammar", "json_object")

_NOT_BUILT: dict[str, tuple[Any, ...]] = {"structural_tag": (None,)}


@dataclass(frozen=True)
class StructuredOutputsParams:
    """The form that an output must have: exactly one of the first five.

    Raises:
        ValueError: if none or several are given, or one of them is of the wrong type.
        UnknownOptionError: if a name does not exist.
    """

    json: str | dict[str, Any] | None = None  # a JSON schema
    regex: str | None = None  # what the whole output matches; Rust's syntax, without look-around
    choice: list[str] | None = None  # the output is one of these
    grammar: str | None = None  # in Lark's syntax, or in GBNF (`root ::= ...`)
    json_object: bool | None = None  # True: any JSON object
    disable_any_whitespace: bool = False  # JSON without whitespace outside of strings
    disable_additional_properties: bool = False  # JSON objects have only the properties that the schema lists
    whitespace_pattern: str | None = None  # between the tokens of JSON; None: a space after each comma and colon
    structural_tag: str | None = None

    def __new__(cls, *_: Any, **given: Any) -> Self:
        """Refuse names that do not exist, before Python does so without saying which is nearest."""
        reject_unknown_options(given, [f.name for f in fields(cls)], cls.__name__)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        refuse_unless_neutral(vars(self), _NOT_BUILT, type(self).__name__)
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise ValueError(
                f"structured_outputs takes exactly one of {', '.join(KINDS)}; got {' and '.join(given) or 'none'}."
            )
        self._check_kind(given[0], getattr(self, given[0]))
        check_bool("disable_any_whitespace", self.disable_any_whitespace)
        check_bool("disable_additional_properties", self.disable_additional_properties)
        pattern: Any = self.whitespace_pattern
        if pattern is not None and not (isinstance(pattern, str) and pattern):
            raise ValueError(f"whitespace_pattern must be a regular expression, got {pattern!r}.")
        if pattern is not None and self.disable_any_whitespace:
            raise ValueError(f"whitespace_pattern={pattern!r} and disable_any_whitespace=True exclude each other.")

    @classmethod
    def of(cls, given: Any) -> "StructuredOutputsParams":
        """Return a form that is one already, or a dictionary of its fields."""
        if isinstance(given, cls):
            return given
        if isinstance(given, Mapping):
            return cls(**given)
        raise ValueError(f"structured_outputs must be a StructuredOutputsParams or a dictionary, got {given!r}.")

    @staticmethod
    def _check_kind(kind: str, value: Any) -> None:
        name = f"structured_outputs[{kind!r}]"
        if kind == "choice":
            listed = isinstance(value, Sequence) and not isinstance(value, str)
            if not listed or not value or not all(isinstance(one, str) and one for one in value):
                raise ValueError(f"{name} must be a list of non-empty strings, got {value!r}.")
        elif kind == "json_object":
            check_bool("structured_outputs['json_object']", value)
        elif kind == "json":
            if not isinstance(value, str | Mapping):
                raise ValueError(f"{name} must be a JSON schema, as a dictionary or as text, got {value!r}.")
        elif not isinstance(value, str) or not value.strip():
            raise ValueError(f"{name} must be a text that is not empty, got {value!r}.")

    def schema(self) -> Any:
        """Return the JSON schema that `json` or `json_object` stands for, as Python has it.

        Raises:
            ValueError: if it is given as text and that is no JSON.
        """
        if self.json_object:
            return {"type": "object"}
        if isinstance(self.json, str):
            try:
                return json_module.loads(self.json)
            except ValueError as error:
                raise ValueError(f"structured_outputs['json'] is no JSON: {error}.") from error
        return self.json
