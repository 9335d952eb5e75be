"""What a user may set, as frozen dataclasses that check every value when they are made."""

import difflib
import itertools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

MAX_NUM_SPECULATIVE_TOKENS = 128
MAX_SUFFIX_CACHE_TOKENS = 1 << 24  # up to 576 bytes each
MAX_PROMPT_LOOKUP_SPAN = 32  # values of n: each has a table per request
SPECULATIVE_METHODS = ("ngram", "suffix", "recycling", "auto")
PROMPT_LOOKUP_TIES = ("latest", "earliest")
DTYPES = ("auto", "float32", "bfloat16", "float16")
LOGPROBS_MODES = ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")
QUANTIZATIONS = ("int8", "gguf")

# Token budget of a step and requests at a time where the user names none: the defaults of vLLM's LLM class.
DEFAULT_MAX_NUM_SEQS = 256
DEFAULT_MAX_NUM_BATCHED_TOKENS = {"cpu": 4096, "cuda": 8192}

_DTYPE_ALIASES = {"float": "float32", "half": "float16"}
_DEFAULT_LOOKUP_MAX = 4
_DEFAULT_SPECULATIVE_TOKENS = {"ngram": 10}  # by method; drafts of the others end by themselves
_LONGEST_SPECULATIVE_TOKENS = 16
_DEFAULT_LOOKUP_MIN = 1


class UnknownOptionError(TypeError, ValueError):
    """An option that does not exist: a TypeError as Python raises, a ValueError as for any other bad option."""


def reject_unknown_options(given: Iterable[str], valid: Iterable[str], where: str) -> None:
    """Raise for the first name that is not a valid one, naming the nearest that is.

    Args:
        given: the names the user wrote.
        valid: the names that exist.
        where: what takes these names, for the message.

    Raises:
        UnknownOptionError: if a given name is not valid.
    """
    valid = list(valid)
    for name in given:
        if name in valid:
            continue
        near = difflib.get_close_matches(str(name), valid, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"valid names are {', '.join(sorted(valid))}."
        raise UnknownOptionError(f"{where} has no option {name!r}; {hint}")


def refuse_unless_neutral(values: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]], where: str) -> None:
    """Raise for the first option that exists in vLLM, does nothing here, and is asked to do something.

    Args:
        values: the options given.
        neutral: for each option that is not built, the values that ask for nothing.
        where: what takes these options, for the message.

    Raises:
        ValueError: if an option that is not built has a value other than its neutral ones.
    """
    for name, accepted in neutral.items():
        if name not in values:
            continue
        value = values[name]
        # type() too, so that 0 == False and 1 == True do not pass for each other.
        if any(value is a or (type(value) is type(a) and value == a) for a in accepted):
            continue
        if type(value) is int and any(type(a) is float and value == a for a in accepted):
            continue
        shown = " or ".join(repr(a) for a in accepted)
        raise ValueError(f"{name}={value!r} is not supported yet by {where}; leave it at {shown}.")


def check_int(name: str, value: object, low: int, high: int | None = None) -> int:
    """Return value as an int when it is a whole number within [low, high].

    Raises:
        ValueError: if it is not an integer (a bool is none) or outside the bounds.
    """
    index = getattr(value, "__index__", None)  # takes numpy's integers, not floats
    if isinstance(value, bool) or index is None:
        raise ValueError(f"{name} must be an integer, got {value!r}.")
    number = int(index())
    if number < low:
        raise ValueError(f"{name} must be at least {low}, got {number}.")
    if high is not None and number > high:
        raise ValueError(f"{name} must be at most {high}, got {number}.")
    return number


def check_float(name: str, value: object, bounds: str, low: float, high: float) -> float:
    """Return value as a float when it is a number within [low, high].

    Args:
        name: of the option.
        value: what was given.
        bounds: the interval as the message shows it, such as "(0, 1]".
        low: the least value.
        high: the greatest.

    Raises:
        ValueError: if it is no number, or outside the bounds (NaN always is).
    """
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        raise ValueError(f"{name} must be a number, got {value!r}.")
    number = float(value)
    if not low <= number <= high:
        raise ValueError(f"{name} must be in {bounds}, got {value!r}.")
    return number


def check_name(name: str, value: object) -> str:
    """Return value when it is a string that is not empty.

    Raises:
        ValueError: if it is not.
    """
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} must be a non-empty string, got {value!r}.")
    return value


def check_bool(name: str, value: object) -> bool:
    """Return value when it is True or False.

    Raises:
        ValueError: if it is anything else.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}.")
    return value


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> str:
    """Return value when it is one of the choices.

    Raises:
        ValueError: if it is not.
    """
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}.")
    return str(value)


# Keys of vLLM's speculative_config that ask for nothing at these values and are not built at others.
_NEUTRAL_SPECULATIVE_KEYS: dict[str, tuple[Any, ...]] = {
    "rejection_sample_method": ("standard",),
    "synthetic_acceptance_rates": (None,),
    "synthetic_acceptance_length": (None,),
    "draft_sample_method": ("greedy",),
    "disable_padded_drafter_batch": (False,),
    "disable_eagle_block_drop": (False,),
    "use_local_argmax_reduction": (False,),
    "use_heterogeneous_vocab": (False,),
    "parallel_drafting": (False,),
    "enable_adaptive_verification": (False,),
    "max_model_len": (None,),
    "draft_tensor_parallel_size": (None, 1),
    "quantization": (None,),
    "revision": (None,),
    "code_revision": (None,),
    "enforce_eager": (None, False),
    "draft_load_config": (None,),
    "moe_backend": (None,),
    "attention_backend": (None,),
    "kv_cache_dtype": (None,),
    "suffix_decoding_max_tree_depth": (24,),
    "suffix_decoding_max_cached_requests": (10000,),
    "suffix_decoding_max_spec_factor": (1.0,),
    "suffix_decoding_min_token_prob": (0.1,),
}


@dataclass(frozen=True)
class SpeculativeConfig:
    """How drafts are made. Nothing here changes what is generated, only the number of steps.

    "ngram": the longest n in [prompt_lookup_min, prompt_lookup_max] for which the last n tokens of a request occur
    earlier in it; the draft is what followed there. "suffix": what followed most often after the last tokens, in the
    request, in outputs of earlier requests and in a corpus. "recycling": in the request and in all that is generated.
    "auto": in all of these.
    """

    method: str = "ngram"
    num_speculative_tokens: int = _DEFAULT_SPECULATIVE_TOKENS["ngram"]  # draft tokens per request and step, at most
    prompt_lookup_max: int = _DEFAULT_LOOKUP_MAX
    prompt_lookup_min: int = _DEFAULT_LOOKUP_MIN
    prompt_lookup_tie: str = "latest"  # which of several earlier occurrences: "latest" or "earliest"
    suffix_min_prob: float = 0.05  # all methods but ngram: a draft goes on while it is so likely to be right
    suffix_cache_max_requests: int = 1000  # suffix and auto: outputs of earlier requests that are kept; 0 for none
    suffix_cache_max_tokens: int = 65536  # and their tokens in all
    corpus: tuple[str, ...] = ()  # suffix and auto: reference texts, or paths of files that hold them
    disable_logprobs: bool = False  # answer requests without the log probabilities they ask for
    adaptive: bool = True  # verify as much of a draft as pays by measured step times; False: all of it
    # (first, last, k): drafts of at most k tokens while first..last requests run; the one before holds between entries
    # and after the last.
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] | None = None

    def __post_init__(self) -> None:
        check_choice("method", self.method, SPECULATIVE_METHODS)
        check_int("num_speculative_tokens", self.num_speculative_tokens, 1, MAX_NUM_SPECULATIVE_TOKENS)
        check_int("prompt_lookup_max", self.prompt_lookup_max, 1)
        check_int("prompt_lookup_min", self.prompt_lookup_min, 1)
        if self.prompt_lookup_min > self.prompt_lookup_max:
            bounds = (
                f"prompt_lookup_min={self.prompt_lookup_min}",
                f"prompt_lookup_max={self.prompt_lookup_max}",
            )
            raise ValueError(" must be <= ".join(bounds))
        span = self.prompt_lookup_max - self.prompt_lookup_min + 1
        if span > MAX_PROMPT_LOOKUP_SPAN:
            raise ValueError(
                f"prompt_lookup_min={self.prompt_lookup_min} to prompt_lookup_max={self.prompt_lookup_max} are {span} "
                f"lengths to look up, at most {MAX_PROMPT_LOOKUP_SPAN} are kept; raise the one or lower the other."
            )
        check_choice("prompt_lookup_tie", self.prompt_lookup_tie, PROMPT_LOOKUP_TIES)
        check_float("suffix_min_prob", self.suffix_min_prob, "[0.001, 1]", 0.001, 1.0)
        check_int("suffix_cache_max_requests", self.suffix_cache_max_requests, 0)
        check_int("suffix_cache_max_tokens", self.suffix_cache_max_tokens, 0, MAX_SUFFIX_CACHE_TOKENS)
        object.__setattr__(self, "corpus", _check_corpus(self.corpus))
        check_bool("disable_logprobs", self.disable_logprobs)
        check_bool("adaptive", self.adaptive)
        if self.num_speculative_tokens_per_batch_size is not None:
            table = _batch_size_table(self.num_speculative_tokens_per_batch_size, self.num_speculative_tokens)
            object.__setattr__(self, "num_speculative_tokens_per_batch_size", table)

    @classmethod
    def from_dict(cls, given: Mapping[str, Any] | None) -> "SpeculativeConfig | None":
        """Read a `speculative_config` dictionary; None stays None (no speculation).

        `{"method": "ngram"}` is enough; `{"model": "ngram"}` says the same. "-" in a key counts as "_". Without
        num_speculative_tokens a draft has at most 10 tokens with ngram and 16 with the other methods. Where only one
        of prompt_lookup_min and prompt_lookup_max is given, the other keeps its default, moved just enough to keep
        min <= max. Keys that vLLM has and no method here uses are accepted at their defaults.

        Raises:
            ValueError: on an unknown key, a value out of bounds, or a method that does not exist here.
        """
        if given is None:
            return None
        if not isinstance(given, Mapping):
            raise ValueError(f'speculative_config must be a dictionary such as {{"method": "ngram"}}, got {given!r}.')
        options = {str(key).replace("-", "_"): value for key, value in given.items()}
        if len(options) != len(given):
            raise ValueError(f"speculative_config names an option twice, once with '-' and once with '_': {given!r}.")
        if "tensor_parallel_size" in options:
            raise ValueError(
                "'tensor_parallel_size' is not a valid argument in the speculative_config. "
                "Please pass 'draft_tensor_parallel_size' instead."
            )
        own = [field.name for field in fields(cls)]
        reject_unknown_options(options, [*own, "model", *_NEUTRAL_SPECULATIVE_KEYS], "speculative_config")
        refuse_unless_neutral(options, _NEUTRAL_SPECULATIVE_KEYS, "speculative_config")
        # None asks for the default of any key, as it does in vLLM.
        chosen = {name: options[name] for name in own if options.get(name) is not None}
        method = chosen["method"] = _speculative_method(options)
        longest = _DEFAULT_SPECULATIVE_TOKENS.get(method, _LONGEST_SPECULATIVE_TOKENS)
        chosen.setdefault("num_speculative_tokens", longest)
        _complete_lookup_bounds(chosen)
        return cls(**chosen)


def _check_corpus(value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(text, str) and text for text in value):
        raise ValueError(f"corpus must be a list of texts or of paths of text files, got {value!r}.")
    return tuple(value)


def _speculative_method(options: Mapping[str, Any]) -> str:
    """Return the drafting method, inferred from `model` where only that is given."""
    method, model = options.get("method"), options.get("model")
    names_ngram = model in ("ngram", "[ngram]")
    if method is None and names_ngram:
        return "ngram"
    supported = ", ".join(SPECULATIVE_METHODS)
    if method is None and model is None:
        if options.get("num_speculative_tokens") is not None:
            raise ValueError("num_speculative_tokens was provided but without speculative model.")
        raise ValueError(f"speculative_config needs a 'method'; supported methods: {supported}.")
    if method not in SPECULATIVE_METHODS:
        shown = f"method {method!r}" if method is not None else f"a draft model ({model!r})"
        raise ValueError(f"speculative_config: {shown} is not supported; supported methods: {supported}.")
    if model is not None and not names_ngram:
        raise ValueError(f"speculative_config: method {method!r} takes no draft model, got model={model!r}.")
    return str(method)


def _batch_size_table(given: object, num_speculative_tokens: int) -> tuple[tuple[int, int, int], ...]:
    """Return the entries of `num_speculative_tokens_per_batch_size`, sorted, checked by vLLM's rules.

    Raises:
        ValueError: if they are not [first, last, tokens], overlap, or leave batch size 1 out.
    """
    name = "num_speculative_tokens_per_batch_size"
    entries = list(given) if isinstance(given, list | tuple) else []
    if not entries or not all(isinstance(entry, list | tuple) and len(entry) == 3 for entry in entries):
        raise ValueError(
            f"{name} must be a list of [first, last, num_speculative_tokens], such as [[1, 4, 5], [5, 32, 2]], "
            f"got {given!r}."
        )
    table = []
    for first, last, num_tokens in entries:
        low = check_int(f"{name}: the first batch size of an entry", first, 1)
        high = check_int(f"{name}: the last batch size of an entry", last, low)
        most = check_int(f"{name}: the tokens of an entry", num_tokens, 0, num_speculative_tokens)
        table.append((low, high, most))
    table.sort()
    if table[0][0] != 1:
        raise ValueError(f"{name} must start at batch size 1, its first entry starts at {table[0][0]}.")
    for (_, high, _), (low, _, _) in itertools.pairwise(table):
        if low <= high:
            raise ValueError(f"{name}: batch size {low} is in two entries of {given!r}; entries must not overlap.")
    return tuple(table)


def _complete_lookup_bounds(chosen: dict[str, Any]) -> None:
    """Give the missing one of the two lookup bounds its default, moved just enough to keep min <= max."""
    for name in ("prompt_lookup_min", "prompt_lookup_max"):
        if name in chosen:
            check_int(name, chosen[name], 1)
    if "prompt_lookup_min" in chosen and "prompt_lookup_max" not in chosen:
        chosen["prompt_lookup_max"] = max(_DEFAULT_LOOKUP_MAX, chosen["prompt_lookup_min"])
    elif "prompt_lookup_max" in chosen and "prompt_lookup_min" not in chosen:
        chosen["prompt_lookup_min"] = min(_DEFAULT_LOOKUP_MIN, chosen["prompt_lookup_max"])


@dataclass(frozen=True)
class ModelConfig:
    """Which model, where it runs, and in which arithmetic."""

    model: str  # local directory, .gguf file, alias of the demo model, or a name on the Hugging Face hub
    tokenizer: str | None = None  # where the tokenizer lies if not with the model
    dtype: str = "auto"  # of weights and KV cache
    device: str = "auto"  # "cpu", "cuda", "cuda:N", or "auto": CUDA where torch finds it
    seed: int = 0  # from which requests without a seed of their own derive one
    max_model_len: int | None = None  # prompt plus output tokens; None: what the model was trained for
    quantization: str | None = None  # of weights in the CPU kernels: "int8", or "gguf" for a GGUF's own blocks
    revision: str | None = None  # branch, tag or commit on the hub
    trust_remote_code: bool = False
    max_logprobs: int = 20  # the most log probabilities per position a request may ask for; -1: the vocabulary
    logprobs_mode: str = "raw_logprobs"  # what an output's logprobs hold

    def __post_init__(self) -> None:
        check_name("model", self.model)
        if self.tokenizer is not None:
            check_name("tokenizer", self.tokenizer)
        dtype = str(self.dtype).removeprefix("torch.")  # torch.bfloat16 says the same as "bfloat16"
        object.__setattr__(self, "dtype", check_choice("dtype", _DTYPE_ALIASES.get(dtype, dtype), DTYPES))
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", str(self.device)):
            raise ValueError(f"device must be 'auto', 'cpu', 'cuda' or 'cuda:N', got {self.device!r}.")
        check_int("seed", self.seed, -(2**63), 2**64 - 1)
        if self.max_model_len is not None:
            check_int("max_model_len", self.max_model_len, 2)  # a prompt token and one to generate
        if self.quantization is not None:
            check_choice("quantization", self.quantization, QUANTIZATIONS)
        if self.revision is not None:
            check_name("revision", self.revision)
        check_int("max_logprobs", self.max_logprobs, -1)
        check_choice("logprobs_mode", self.logprobs_mode, LOGPROBS_MODES)
        if check_bool("trust_remote_code", self.trust_remote_code):
            raise ValueError(
                "trust_remote_code=True is not supported: models run in the engine's own code; leave it False."
            )


@dataclass(frozen=True)
class CacheConfig:
    """How much room the paged KV cache has, and whether requests share it."""

    block_size: int = 16  # tokens per block
    enable_prefix_caching: bool = True
    num_gpu_blocks_override: int | None = None  # blocks in all, the null block included; on the CPU too
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.92  # share of the GPU's memory to fill; on the CPU it has no effect

    def __post_init__(self) -> None:
        check_int("block_size", self.block_size, 1)
        check_bool("enable_prefix_caching", self.enable_prefix_caching)
        if self.num_gpu_blocks_override is not None:
            # One block is the null block, never handed out; two usable ones are the least that makes
            # progress.
            check_int("num_gpu_blocks_override", self.num_gpu_blocks_override, 3)
        if self.kv_cache_memory_bytes is not None:
            check_int("kv_cache_memory_bytes", self.kv_cache_memory_bytes, 1)
        check_float("gpu_memory_utilization", self.gpu_memory_utilization, "(0, 1]", math.ulp(0.0), 1.0)


@dataclass(frozen=True)
class SchedulerConfig:
    """How much one step may hold."""

    max_num_seqs: int  # requests running at a time
    max_num_batched_tokens: int  # rows of one step: prompt, decode and draft tokens together
    max_model_len: int  # prompt plus output tokens of a request
    enable_chunked_prefill: bool = True  # let a prompt span several steps
    long_prefill_token_threshold: int = 0  # most prompt tokens one request may take of a step; 0: no such bound

    def __post_init__(self) -> None:
        check_int("max_num_seqs", self.max_num_seqs, 1)
        check_int("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        check_int("max_model_len", self.max_model_len, 2)
        check_bool("enable_chunked_prefill", self.enable_chunked_prefill)
        check_int("long_prefill_token_threshold", self.long_prefill_token_threshold, 0)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be greater than or equal to "
                f"max_num_seqs ({self.max_num_seqs})."
            )
        if self.long_prefill_token_threshold > self.max_model_len:
            raise ValueError(
                f"long_prefill_token_threshold ({self.long_prefill_token_threshold}) cannot be greater than "
                f"the max_model_len ({self.max_model_len})."
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is smaller than max_model_len "
                f"({self.max_model_len}), and without chunked prefill a step must hold a whole prompt. "
                "Increase max_num_batched_tokens, decrease max_model_len or set enable_chunked_prefill=True."
            )
        if not self.enable_chunked_prefill and self.long_prefill_token_threshold:
            raise ValueError(
                f"long_prefill_token_threshold={self.long_prefill_token_threshold} needs enable_chunked_prefill=True."
            )

    @classmethod
    def with_defaults(
        cls,
        *,
        device: str,
        max_model_len: int,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        enable_chunked_prefill: bool = True,
        long_prefill_token_threshold: int = 0,
    ) -> "SchedulerConfig":
        """Fill in what the user left open, for a device ("cpu" or "cuda") and a model's length.

        The open one of max_num_seqs and max_num_batched_tokens follows the other where the default would
        contradict it.
        """
        budget = max_num_batched_tokens
        if budget is None:
            budget = DEFAULT_MAX_NUM_BATCHED_TOKENS[device.partition(":")[0]]
            budget = max(budget, check_int("max_num_seqs", max_num_seqs or 1, 1))
            if not enable_chunked_prefill:
                budget = max(budget, max_model_len)
        if max_num_seqs is None:
            max_num_seqs = min(DEFAULT_MAX_NUM_SEQS, check_int("max_num_batched_tokens", budget, 1))
        return cls(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
            enable_chunked_prefill=enable_chunked_prefill,
            long_prefill_token_threshold=long_prefill_token_threshold,
        )


@dataclass(frozen=True)
class EngineConfig:
    """Everything an engine is built from."""

    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    speculative: SpeculativeConfig | None = None  # None: no drafts
    disable_log_stats: bool = False  # no totals are kept, get_metrics() refuses

    def __post_init__(self) -> None:
        check_bool("disable_log_stats", self.disable_log_stats)
