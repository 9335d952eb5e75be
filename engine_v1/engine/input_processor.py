"""Turns what users pass to generate() into checked requests."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokenizers import Tokenizer

from engine_v1.config import UnknownOptionError, check_int, check_name, refuse_unless_neutral, reject_unknown_options
from engine_v1.engine.detokenizer import IncrementalDetokenizer
from engine_v1.request import Request
from engine_v1.sample.logits_rules import LogitsRules
from engine_v1.sample.rng import derive_seed
from engine_v1.sampling_params import SamplingParams
from engine_v1.structured_output.compiler import GrammarCompiler
from engine_v1.structured_output.grammar import Grammar
from engine_v1.structured_output.params import StructuredOutputsParams

logger = logging.getLogger(__name__)

# A text, token ids, or a dictionary with one of them and perhaps a cache salt and a predicted output.
Prompt = str | Sequence[int] | Mapping[str, Any]

_PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt", "prediction")
_PREDICTION_KEYS = ("type", "content")
# Keys of vLLM's prompt dictionaries that ask for nothing at these values and are not built at others.
_NEUTRAL_PROMPT_KEYS: dict[str, tuple[Any, ...]] = {
    "multi_modal_data": (None, {}),
    "multi_modal_uuids": (None, {}),
    "mm_processor_kwargs": (None, {}),
    "prompt_embeds": (None,),
    "encoder_prompt": (None,),
}

# Keys of generation_config.json that vLLM takes as default sampling parameters, and our names for them.
_DEFAULT_PARAM_KEYS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


@dataclass(frozen=True)
class TokenIds:
    """What the tokens of a model mean beyond their text."""

    vocab_size: int  # rows of the model's output; a prompt holds ids below it
    eos_token_id: int | None = None  # ends a request, without a stop_reason
    extra_eos_token_ids: frozenset[int] = frozenset()  # end it too, as its stop_reason
    special_token_ids: frozenset[int] = frozenset()  # what skip_special_tokens hides


def eos_ids(generation_config: Mapping[str, Any], tokenizer_eos: int | None) -> tuple[int | None, frozenset[int]]:
    """Return the EOS id of a model and further ids that end its output.

    `generation_config` may name one id or a list. The tokenizer's own EOS is the first among them where it is
    one of them, so that it ends a request without a stop_reason; else the list's first is.
    """
    given = generation_config.get("eos_token_id")
    if given is None:
        return tokenizer_eos, frozenset()
    ids = [int(i) for i in given] if isinstance(given, list | tuple) else [int(given)]
    if not ids:
        return tokenizer_eos, frozenset()
    first = tokenizer_eos if tokenizer_eos in ids else ids[0]
    return first, frozenset(ids) - {first}


def default_sampling_params(generation_config: Mapping[str, Any]) -> SamplingParams:
    """Return the sampling parameters a model's generation_config.json recommends, vLLM's defaults elsewhere.

    A recommendation out of bounds is left out with a warning.
    """
    params = SamplingParams()
    for key, name in _DEFAULT_PARAM_KEYS.items():
        value = generation_config.get(key)
        if value is None:
            continue
        try:
            params = SamplingParams(**{**vars(params), name: value})
        except ValueError as error:
            logger.warning("generation_config.json: %s=%r is left out of the defaults: %s", key, value, error)
    return params


class InputProcessor:
    """Makes requests of prompts and parameters. All of a call are checked before any request exists.

    Args:
        tokenizer: for text prompts and output text; None: token ids in, token ids out.
        token_ids: the vocabulary's bounds and its EOS ids.
        max_model_len: prompt plus output tokens of a request.
        max_total_tokens: the same, where the KV cache may hold less; bounds max_tokens=None.
        check_fits: raises ValueError for a request that could never run.
        default_params: for calls without parameters.
        seed: the engine's, from which requests without one derive theirs.
        max_logprobs: the most log probabilities per position a request may ask for; -1: the vocabulary.
        disable_logprobs: make requests without the log probabilities of output tokens that they ask for.
        speculates: whether the engine drafts; without, predictions are refused.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        token_ids: TokenIds,
        *,
        max_model_len: int,
        max_total_tokens: int,
        check_fits: Callable[[Request], None],
        default_params: SamplingParams,
        seed: int = 0,
        max_logprobs: int = 20,
        disable_logprobs: bool = False,
        speculates: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._token_ids = token_ids
        self._max_model_len = max_model_len
        self._max_total_tokens = max_total_tokens
        self._check_fits = check_fits
        self._default_params = default_params
        self._seed = seed
        self._max_logprobs = token_ids.vocab_size if max_logprobs == -1 else max_logprobs
        self._disable_logprobs = disable_logprobs
        self._speculates = speculates
        self._grammar_compiler = None if tokenizer is None else _grammar_compiler(tokenizer, token_ids)
        self._num_arrived = 0  # requests made so far: the arrival number of the next

    def process(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_special_tokens: bool = True,
    ) -> list[Request]:
        """Return the requests of each prompt, one for each of its n samples, in the caller's order.

        Args:
            prompts: a text, a list of token ids, a dictionary with "prompt" or "prompt_token_ids" and perhaps
                "cache_salt" and "prediction", or a list of these.
            params: one for all prompts, or one each; None: the model's defaults.
            add_special_tokens: let the tokenizer put its BOS before texts; False where they contain it.

        Raises:
            ValueError: naming the first bad prompt by its index; no request was made of any.
        """
        listed = list_prompts(prompts)
        params_per_prompt = self._params_per_prompt(params, len(listed))
        arrival_time = time.time()
        requests: list[Request] = []
        for index, (prompt, one) in enumerate(zip(listed, params_per_prompt, strict=True)):
            try:
                arrival_number = self._num_arrived + index
                requests += self._requests(
                    prompt, one, arrival_number, arrival_time, add_special_tokens=add_special_tokens
                )
            except UnknownOptionError as error:
                raise UnknownOptionError(f"prompt {index}: {error}") from error
            except ValueError as error:
                raise ValueError(f"prompt {index}: {error}") from error
        self._num_arrived += len(listed)
        return requests

    def _params_per_prompt(
        self, params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
    ) -> list[SamplingParams]:
        if params is None:
            params = self._default_params
        if isinstance(params, SamplingParams):
            return [params] * num_prompts
        params = list(params)
        for one in params:
            if type(one) is not SamplingParams:
                raise ValueError(f"sampling_params must be one SamplingParams, a list of them or None, got {one!r}.")
        if len(params) != num_prompts:
            raise ValueError(
                f"The lengths of prompts and params must be the same, got {num_prompts} prompts and "
                f"{len(params)} params."
            )
        return params

    def _requests(
        self,
        prompt: Prompt,
        params: SamplingParams,
        arrival_number: int,
        arrival_time: float,
        *,
        add_special_tokens: bool,
    ) -> list[Request]:
        text, token_ids, cache_salt = self._read_prompt(prompt, add_special_tokens=add_special_tokens)
        prediction = prompt.get("prediction") if isinstance(prompt, Mapping) else None
        predicted_ids = None if prediction is None else self._read_prediction(prediction)
        self._check_prompt(token_ids)
        params = params.clone()
        self._check_params(params)
        seed = derive_seed(self._seed, arrival_number) if params.seed is None else params.seed % 2**64
        stop_token_ids = frozenset(params.stop_token_ids or ())
        if not params.ignore_eos:
            stop_token_ids |= self._token_ids.extra_eos_token_ids
        rules = self._logits_rules(params)
        requests = []
        for sample_index in range(params.n):
            if sample_index == 1 and params.prompt_logprobs is not None:  # the first sample gives them
                params = replace(params, prompt_logprobs=None, skip_reading_prefix_cache=None)
            detokenizer = None
            if self._tokenizer is not None and params.detokenize:
                special = self._token_ids.special_token_ids
                detokenizer = IncrementalDetokenizer(self._tokenizer, token_ids, params, special)
            request = Request(
                str(arrival_number),
                token_ids,
                params,
                max_tokens=self._max_tokens(params, len(token_ids)),
                eos_token_id=None if params.ignore_eos else self._token_ids.eos_token_id,
                stop_token_ids=stop_token_ids,
                seed=seed,
                sample_index=sample_index,
                logits_rules=rules,
                cache_salt=cache_salt,
                prompt=text,
                detokenizer=detokenizer,
                grammar=self._grammar(params),
                prediction_token_ids=predicted_ids,
                arrival_time=arrival_time,
            )
            requests.append(request)
        self._check_fits(requests[0])
        return requests

    def _grammar(self, params: SamplingParams) -> Grammar | None:
        """Return the grammar that an output is to follow, where one is asked for."""
        form = params.structured_outputs
        if not isinstance(form, StructuredOutputsParams):
            return None
        if self._grammar_compiler is None:
            raise ValueError("structured_outputs need a tokenizer; load the model with one.")
        return self._grammar_compiler.compile(form, params.stop_token_ids or ())

    def _read_prompt(self, prompt: Prompt, *, add_special_tokens: bool) -> tuple[str | None, list[int], str | None]:
        """Return a prompt's text (where it has one), its token ids and its cache salt."""
        if isinstance(prompt, str):
            return prompt, self._encode(prompt, add_special_tokens=add_special_tokens), None
        if not isinstance(prompt, Mapping):
            return None, [check_int("a token id", i, 0) for i in prompt], None
        reject_unknown_options(prompt, [*_PROMPT_KEYS, *_NEUTRAL_PROMPT_KEYS], "a prompt dictionary")
        refuse_unless_neutral(prompt, _NEUTRAL_PROMPT_KEYS, "prompt dictionaries")
        text, given_ids, salt = (prompt.get(key) for key in _PROMPT_KEYS[:3])
        if salt is not None:
            check_name("cache_salt", salt)
        if text is not None and not isinstance(text, str):
            raise ValueError(f"'prompt' must be a string, got {text!r}.")
        if given_ids is not None:
            if isinstance(given_ids, str | Mapping) or not hasattr(given_ids, "__iter__"):
                raise ValueError(f"'prompt_token_ids' must be a list of token ids, got {given_ids!r}.")
            return text, [check_int("a token id", i, 0) for i in given_ids], salt
        if text is None:
            raise ValueError("a prompt dictionary needs 'prompt' or 'prompt_token_ids'.")
        return text, self._encode(text, add_special_tokens=add_special_tokens), salt

    def _read_prediction(self, prediction: object) -> list[int]:
        """Return the token ids of a prompt's "prediction", in OpenAI's form or with token ids as its content."""
        form = "{'type': 'content', 'content': a text or a list of token ids}"
        if not isinstance(prediction, Mapping):
            raise ValueError(f"'prediction' must be {form}, got {prediction!r}.")
        reject_unknown_options(prediction, _PREDICTION_KEYS, "a prediction")
        kind, content = (prediction.get(key) for key in _PREDICTION_KEYS)
        if kind != "content":
            raise ValueError(f"the 'type' of a prediction must be 'content', got {kind!r}.")
        if not self._speculates:
            raise ValueError(
                "a prediction needs speculation; pass speculative_config={'method': 'ngram'} to LLM, or leave the "
                "prediction out."
            )
        if isinstance(content, list | tuple) and content and all(map(_is_text_part, content)):
            content = "".join(part["text"] for part in content)
        if isinstance(content, str):
            return self._encode(content, add_special_tokens=False, what="prediction")
        if content is None or isinstance(content, Mapping) or not hasattr(content, "__iter__"):
            raise ValueError(f"the 'content' of a prediction must be a text or a list of token ids, got {content!r}.")
        token_ids = [check_int("a token id of the prediction", i, 0) for i in content]
        if not token_ids:
            raise ValueError("the prediction is empty; give at least one token id, or leave it out.")
        self._check_token_ids(token_ids)
        return token_ids

    def _encode(self, text: str, *, add_special_tokens: bool, what: str = "prompt") -> list[int]:
        if self._tokenizer is None:
            raise ValueError(f"a text {what} needs a tokenizer; pass token ids, or load the model with one.")
        if not text:
            raise ValueError(f"the {what} is empty; give at least one character or token id.")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"the {what} is no valid Unicode text: {error}.") from error
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return token_ids

    def _check_prompt(self, token_ids: list[int]) -> None:
        if not token_ids:
            raise ValueError("the prompt is empty; give at least one character or token id.")
        if len(token_ids) >= self._max_model_len:
            raise ValueError(
                f"the prompt has {len(token_ids)} tokens and max_model_len is {self._max_model_len}, which must leave "
                "room for one more; shorten the prompt or raise max_model_len."
            )
        self._check_token_ids(token_ids)

    def _check_token_ids(self, token_ids: list[int]) -> None:
        largest = max(token_ids)
        if largest >= self._token_ids.vocab_size:
            raise ValueError(
                f"token id {largest} is outside the vocabulary; ids go from 0 to {self._token_ids.vocab_size - 1}."
            )

    def _check_params(self, params: SamplingParams) -> None:
        """Check what parameters ask of this model."""
        vocab_size = self._token_ids.vocab_size
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token_id in getattr(params, name) or ():
                if token_id >= vocab_size:
                    raise ValueError(
                        f"{name}: {token_id} is outside the vocabulary; ids go from 0 to {vocab_size - 1}."
                    )
        self._resolve_logprobs(params)
        if params.stop_strings and self._tokenizer is None:
            raise ValueError("stop strings need a tokenizer; use stop_token_ids, or load the model with one.")
        if params.bad_words and self._tokenizer is None:
            raise ValueError("bad_words need a tokenizer; use allowed_token_ids or logit_bias, or load one.")

    def _logits_rules(self, params: SamplingParams) -> LogitsRules:
        """Resolve what parameters ask of logits to token ids."""
        ids = self._token_ids
        words = bad_word_token_ids(self._tokenizer, params.bad_words) if params.bad_words and self._tokenizer else ()
        for word in words:
            if max(word) >= ids.vocab_size:
                raise ValueError(
                    f"bad_words: token id {max(word)} of one is outside the vocabulary; "
                    f"the model's ids go from 0 to {ids.vocab_size - 1}."
                )
        # EOS ids are banned with ignore_eos too: min_tokens says when they may be generated, not what they do.
        ends = {*(params.stop_token_ids or ()), *ids.extra_eos_token_ids, ids.eos_token_id}
        return LogitsRules(
            bad_words=words,
            min_tokens=params.min_tokens,
            stop_token_ids=tuple(sorted(i for i in ends if i is not None and i < ids.vocab_size)),
            logit_bias=dict(params.logit_bias or {}),
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            logits_processors=tuple(params.logits_processors or ()),
        )

    def _resolve_logprobs(self, params: SamplingParams) -> None:
        """Bring the numbers of log probabilities to what is computed: -1 to the vocabulary's size, say."""
        vocab_size = self._token_ids.vocab_size
        for name in ("logprobs", "prompt_logprobs"):
            asked = getattr(params, name)
            if asked is None:
                continue
            count = vocab_size if asked == -1 else asked
            if count > self._max_logprobs:
                shown = f"{asked} (the vocabulary's {vocab_size})" if asked == -1 else f"{asked}"
                raise ValueError(
                    f"{name}={shown} is greater than max_logprobs={self._max_logprobs}; ask for fewer or load the "
                    "model with a larger max_logprobs (-1: no bound)."
                )
            setattr(params, name, min(count, vocab_size))
        if self._disable_logprobs:
            params.logprobs = None

    def _max_tokens(self, params: SamplingParams, num_prompt_tokens: int) -> int:
        """Return how many tokens a request may generate.

        None goes as far as the model's length and the KV cache allow. A number is cut at the model's length
        only, as in vLLM; whether the KV cache holds it is checked after.
        """
        if params.max_tokens is None:
            # At least one, for check_fits to explain what does not fit.
            return max(1, self._max_total_tokens - num_prompt_tokens)
        return min(params.max_tokens, self._max_model_len - num_prompt_tokens)


def _grammar_compiler(tokenizer: Tokenizer, token_ids: TokenIds) -> GrammarCompiler:
    first = [] if token_ids.eos_token_id is None else [token_ids.eos_token_id]
    return GrammarCompiler(
        tokenizer,
        token_ids.vocab_size,
        special_token_ids=token_ids.special_token_ids,
        eos_token_ids=[*first, *sorted(token_ids.extra_eos_token_ids)],
    )


def bad_word_token_ids(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences that spell words, at the start of a text and behind a space.

    The second is left out where the space becomes a token of its own: what follows it is then the first again. So does
    vLLM, whose outputs these rules should reproduce.
    """
    sequences: list[tuple[int, ...]] = []
    for word in words:
        plain, spaced = (
            tuple(tokenizer.encode(space + word.lstrip(), add_special_tokens=False).ids) for space in ("", " ")
        )
        if not plain:
            raise ValueError(f"bad_words: the tokenizer makes no token of {word!r}; leave it out.")
        sequences.append(plain)
        if spaced and spaced[0] != plain[0] and len(spaced) == len(plain):
            sequences.append(spaced)
    return tuple(sequences)


def list_prompts(prompts: Any) -> list[Prompt]:
    """Return prompts as a list: one text, dictionary or list of token ids is a prompt by itself.

    Raises:
        ValueError: if something is no prompt.
    """
    if isinstance(prompts, str | Mapping):
        return [prompts]
    kinds = "a text, a list of token ids or a dictionary with 'prompt' or 'prompt_token_ids'"
    if not hasattr(prompts, "__iter__") or isinstance(prompts, bytes):
        raise ValueError(f"a prompt is {kinds}, got {prompts!r}.")
    items = list(prompts)
    if items and all(_is_token_id(item) for item in items):
        return [items]
    for index, item in enumerate(items):
        if not hasattr(item, "__iter__") or isinstance(item, bytes):
            raise ValueError(f"prompt {index}: a prompt is {kinds}, got {item!r}.")
    return items


def _is_text_part(part: object) -> bool:
    """Whether this is a part of a message in OpenAI's form, such as {"type": "text", "text": "Hello"}."""
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _is_token_id(item: object) -> bool:
    return hasattr(item, "__index__") and not hasattr(item, "__iter__")
