"""What one request may ask of sampling, stopping and its output, with vLLM's names and defaults."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any, Self

from engine_v1.config import check_bool, check_float, check_int, refuse_unless_neutral, reject_unknown_options
from engine_v1.structured_output.params import StructuredOutputsParams

# Below this temperature sampling is arg-max, as in vLLM.
GREEDY_EPS = 1e-5
# A bias beyond this could make a logit infinite.
_LARGEST_BIAS = 1e30


class RequestOutputKind(Enum):
    """Which outputs of a request are returned while it runs."""

    CUMULATIVE = 0  # everything generated so far
    DELTA = 1  # what is new since the last output
    FINAL_ONLY = 2  # one output, when the request has finished


# What is not built yet, with the values that ask for nothing. A feature that gets built leaves this table.
_NOT_BUILT: dict[str, tuple[Any, ...]] = {
    "prompt_logprob_token_ids": (None,),
    "prompt_logprob_start": (None, 0),
    "logprob_token_ids": (None,),
    "flat_logprobs": (False,),
    "extra_args": (None, {}),
    "thinking_token_budget": (None,),
    "repetition_detection": (None,),
    "watermarking": (None,),
    "routed_experts_prompt_start": (None, 0),
    "trace_decode_token_ids": (None, False),
}


@dataclass(kw_only=True)
class SamplingParams:
    """What one request asks for. Checked when made, and once more when a request is made of it.

    Every field of vLLM's offline API is here with its default. A value that asks for nothing is always
    accepted; one that asks for something not built yet raises, so that nothing is ever ignored.

    Raises:
        ValueError: if a value is out of its bounds or asks for something not built yet.
        UnknownOptionError: if a name does not exist (a ValueError and a TypeError).
    """

    n: int = 1  # outputs per prompt, sampled independently of each other
    presence_penalty: float = 0.0  # taken once from the logit of a token that is in the output
    frequency_penalty: float = 0.0  # taken from it for each time it is
    repetition_penalty: float = 1.0  # divides the logit of a token of prompt or output, or multiplies a negative one
    temperature: float = 1.0  # below 1e-5: greedy, and top_p, top_k, min_p are reset
    top_p: float = 1.0
    top_k: int = 0  # 0 (or -1): all tokens
    min_p: float = 0.0  # keep tokens at least this likely, the likeliest being 1
    seed: int | None = None  # None (or -1): derived from the engine's seed and the request's arrival number
    stop: str | list[str] | None = None  # strings that end the output; a list after construction
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16  # None: as far as the model's length and the KV cache go
    min_tokens: int = 0  # no EOS or stop id is chosen before that many
    logprobs: int | None = None  # log probabilities of the chosen token and of this many best ones; -1: of all
    prompt_logprobs: int | None = None  # the same for each prompt token but the first
    prompt_logprob_token_ids: list[int] | None = None
    prompt_logprob_start: int | None = None
    logprob_token_ids: list[int] | None = None
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    # Fast tokenizers, the only ones used here, put no spaces between special tokens: both values give the
    # same text.
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False  # keep the stop string, or the EOS or stop token's text
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE  # of AsyncLLM; generate() and stream() have their own
    stream_interval: int | None = None  # tokens a streamed output waits for, but the first and the last; None: 1
    skip_clone: bool = False  # vLLM's permission not to copy these parameters; they are copied all the same
    # The form of the output; a dictionary is one of StructuredOutputsParams' fields, and becomes that.
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None
    logit_bias: dict[int, float] | None = None  # token id -> what is added to its logit
    allowed_token_ids: list[int] | None = None  # nothing else may be chosen
    extra_args: dict[str, Any] | None = None
    bad_words: list[str] | None = None  # texts whose last token is not chosen after the others
    # Compute the whole prompt; None: True with prompt_logprobs, whose positions must be computed.
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: int | None = None
    repetition_detection: Any = None
    watermarking: Any = None
    routed_experts_prompt_start: int | None = 0
    trace_decode_token_ids: Any = None
    # Pure functions of (output token ids, row of logits), or with the prompt's ids before these, to a row; called at
    # every position that is verified, drafts counting as output.
    logits_processors: Sequence[Callable[..., Any]] | None = None
    num_speculative_tokens: int | None = (
        None  # most draft tokens of a step; 0: no drafts; None: as many as the engine's
    )

    def __new__(cls, **given: Any) -> Self:
        """Refuse names that do not exist, before Python does so without saying which is nearest."""
        reject_unknown_options(given, [f.name for f in fields(cls)], cls.__name__)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        self._normalise()
        self._check_numbers()
        self._check_stopping()
        self._check_tokens()
        if self.greedy:
            if self.n > 1:
                raise ValueError(f"n must be 1 when using greedy sampling, got {self.n}.")
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0
        refuse_unless_neutral(vars(self), _NOT_BUILT, type(self).__name__)

    @property
    def greedy(self) -> bool:
        """Whether each token is the arg-max of its logits."""
        return self.temperature < GREEDY_EPS

    @property
    def stop_strings(self) -> list[str]:
        """The stop strings as a list, whatever was given."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    def clone(self) -> "SamplingParams":
        """Return an independent copy, checked anew (fields may have been assigned since these were made)."""
        copies: dict[str, Any] = {n: v.copy() for n, v in vars(self).items() if isinstance(v, list | dict)}
        return replace(self, **copies)

    def _normalise(self) -> None:
        """Bring the several ways of saying one thing to one form."""
        self.stop = self.stop_strings
        self.stop_token_ids = list(self.stop_token_ids or ())
        if self.structured_outputs is not None:
            self.structured_outputs = StructuredOutputsParams.of(self.structured_outputs)
        if isinstance(self.bad_words, str):
            raise ValueError(f"bad_words must be a list of strings, got {self.bad_words!r}.")
        if self.seed == -1:
            self.seed = None
        if self.top_k == -1:
            self.top_k = 0
        # True asks for the least there is, as in vLLM and in OpenAI's older API.
        if isinstance(self.logprobs, bool) and self.logprobs:
            self.logprobs = 1
        if isinstance(self.prompt_logprobs, bool) and self.prompt_logprobs:
            self.prompt_logprobs = 1
        if self.skip_reading_prefix_cache is None and self.prompt_logprobs is not None:
            self.skip_reading_prefix_cache = True

    def _check_numbers(self) -> None:
        check_int("n", self.n, 1)
        tiny = math.ulp(0.0)  # the least float above 0
        for name, bounds, low, high in (
            ("temperature", "[0, 2]", 0.0, 2.0),
            ("top_p", "(0, 1]", tiny, 1.0),
            ("min_p", "[0, 1]", 0.0, 1.0),
            ("presence_penalty", "[-2, 2]", -2.0, 2.0),
            ("frequency_penalty", "[-2, 2]", -2.0, 2.0),
            ("repetition_penalty", "(0, 2]", tiny, 2.0),
        ):
            setattr(self, name, check_float(name, getattr(self, name), bounds, low, high))
        if check_int("top_k", self.top_k, -(2**63)) < 0:
            raise ValueError(f"top_k must be 0 (disable), or at least 1, got {self.top_k}.")
        if self.seed is not None:
            check_int("seed", self.seed, -(2**63), 2**64 - 1)
        if self.num_speculative_tokens is not None:
            check_int("num_speculative_tokens", self.num_speculative_tokens, 0)
        if self.logprobs is not None:
            _check_logprobs("logprobs", self.logprobs)
        if self.prompt_logprobs is not None:
            _check_logprobs("prompt_logprobs", self.prompt_logprobs)
        if self.skip_reading_prefix_cache is not None:
            check_bool("skip_reading_prefix_cache", self.skip_reading_prefix_cache)
            if self.prompt_logprobs is not None and not self.skip_reading_prefix_cache:
                raise ValueError(
                    "prompt_logprobs are computed with the prompt, which cached prefixes are not: "
                    "skip_reading_prefix_cache must be True or None with it, got False."
                )

    def _check_stopping(self) -> None:
        for name in ("ignore_eos", "detokenize", "skip_special_tokens"):
            check_bool(name, getattr(self, name))
        for name in ("spaces_between_special_tokens", "include_stop_str_in_output"):
            check_bool(name, getattr(self, name))
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, 1)
        if check_int("min_tokens", self.min_tokens, -(2**63)) < 0:
            raise ValueError(f"min_tokens must be greater than or equal to 0, got {self.min_tokens}.")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must be less than or equal to max_tokens={self.max_tokens}, got {self.min_tokens}."
            )
        if not isinstance(self.output_kind, RequestOutputKind):
            raise ValueError(f"output_kind must be a RequestOutputKind such as DELTA, got {self.output_kind!r}.")
        if self.stream_interval is not None:
            check_int("stream_interval", self.stream_interval, 1)
        for stop in self.stop_strings:
            if not isinstance(stop, str):
                raise ValueError(f"stop must be a string or a list of strings, got {self.stop!r}.")
            if not stop:
                raise ValueError("stop cannot contain an empty string.")
        if self.stop_strings and not self.detokenize:
            raise ValueError(
                "stop strings are only supported when detokenize is True. Set detokenize=True to use stop."
            )
        for token_id in self.stop_token_ids or ():
            check_int("stop_token_ids", token_id, 0)

    def _check_tokens(self) -> None:
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                raise ValueError("allowed_token_ids is not None and empty!")
            for token_id in self.allowed_token_ids:
                check_int("allowed_token_ids", token_id, 0)
        for token_id, bias in (self.logit_bias or {}).items():
            check_int("logit_bias: a token id", token_id, 0)
            check_float("logit_bias", bias, f"[-{_LARGEST_BIAS:g}, {_LARGEST_BIAS:g}]", -_LARGEST_BIAS, _LARGEST_BIAS)
        for word in self.bad_words or ():
            if not isinstance(word, str):
                raise ValueError(f"bad_words must be a list of strings, got {self.bad_words!r}.")
            if not word:
                raise ValueError("bad_words cannot contain an empty string.")
            if not word.strip():
                raise ValueError(
                    f"bad_words: {word!r} is only whitespace, which is no word; "
                    "leave its token ids out of allowed_token_ids, or lower them with logit_bias."
                )
        for processor in self.logits_processors or ():
            if not callable(processor):
                raise ValueError(f"logits_processors must be functions, got {processor!r}.")


def _check_logprobs(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < -1:
        raise ValueError(f"{name} must be non-negative or -1, got {value!r}.")
