"""The offline API: a class that loads a model and generates, with vLLM's names."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from tqdm.auto import tqdm  # type: ignore[import-untyped]

from engine_v1.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    check_bool,
    refuse_unless_neutral,
    reject_unknown_options,
)
from engine_v1.engine.core import EngineCore, build_engine_core
from engine_v1.engine.input_processor import InputProcessor, Prompt, TokenIds, default_sampling_params, eos_ids
from engine_v1.engine.llm_engine import LLMEngine
from engine_v1.engine.metrics import EngineStats, Metric
from engine_v1.engine.output_processor import OutputProcessor
from engine_v1.engine.parent_request import ParentCursor, ParentRequest
from engine_v1.entrypoints.interrupts import DeferredInterrupt
from engine_v1.models.config import DecoderConfig
from engine_v1.models.hub import resolve_model
from engine_v1.models.loader import load_config, load_generation_config
from engine_v1.outputs import RequestOutput
from engine_v1.platforms import get_platform
from engine_v1.sampling_params import RequestOutputKind, SamplingParams
from engine_v1.spec_decode.corpus import load_corpus
from engine_v1.tokenizer import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]

# Keywords of vLLM's LLM that ask for nothing at these values and are not built at others.
_NEUTRAL_OPTIONS: dict[str, tuple[Any, ...]] = {
    "runner": ("auto", "generate"),
    "convert": ("auto", "none"),
    "task": ("auto", "generate"),
    "tokenizer_mode": ("auto",),
    "tokenizer_revision": (None,),
    "allowed_local_media_path": ("",),
    "allowed_media_domains": (None,),
    "tensor_parallel_size": (1,),
    "pipeline_parallel_size": (1,),
    "data_parallel_size": (1,),
    "distributed_executor_backend": (None,),
    "cpu_offload_gb": (0.0,),
    "swap_space": (0.0, 4.0),
    "hf_token": (None,),
    "hf_overrides": (None, {}),
    "generation_config": ("auto",),
    "override_generation_config": (None, {}),
    "load_format": ("auto",),
    "kv_cache_dtype": ("auto",),
    "enforce_eager": (False, True),  # steps are never captured in graphs
    "compilation_config": (None, {}),
    "logits_processors": (None, []),
    "spec_method": (None,),
    "spec_model": (None,),
    "spec_tokens": (None,),
    "async_scheduling": (None, False),
    "scheduling_policy": ("fcfs",),
    "enable_lora": (False,),
    "limit_mm_per_prompt": (None, {}),
    "disable_sliding_window": (False,),
}

# Keywords of vLLM's generate() and chat(), likewise.
_NEUTRAL_CALL_OPTIONS: dict[str, tuple[Any, ...]] = {
    "lora_request": (None,),
    "priority": (None,),
    "tokenization_kwargs": (None, {}),
    "mm_processor_kwargs": (None, {}),
    "chat_template_content_format": ("auto", "string"),
    "continue_final_message": (False,),
}


class LLM:
    """Loads a model and generates from prompts.

    The names are vLLM's. Keywords of vLLM that cost nothing here are accepted (`enforce_eager`,
    `tensor_parallel_size=1`, ...); at values that ask for something not built they raise.

    One LLM may be used from several threads: their requests share its steps.

    Args:
        model: a local directory, a .gguf file, an alias of the demo model, or a name on the Hugging Face hub.
        tokenizer: where the tokenizer lies, if not with the model.
        dtype: of weights and KV cache; "auto" is the checkpoint's own, bfloat16 for GGUF.
        quantization: of the weights, in the CPU kernels: "int8" (any model), or "gguf" (a GGUF file's own blocks);
            other outputs than without, and as exact under speculation.
        device: "auto" (CUDA where there is one), "cpu", "cuda" or "cuda:N".
        seed: from which requests without a seed derive theirs.
        max_model_len: prompt plus output tokens of a request; None: what the model was trained for.
        max_num_seqs: requests running at a time (256).
        max_num_batched_tokens: rows of a step (4096 on the CPU, 8192 on CUDA).
        enable_chunked_prefill: let a prompt span several steps.
        long_prefill_token_threshold: most prompt tokens one request may take of a step; 0: no such bound.
        enable_prefix_caching: let requests share the KV cache of common prefixes.
        block_size: tokens per KV block, any from 1 up.
        num_gpu_blocks_override: KV blocks in all, on the CPU too.
        kv_cache_memory_bytes: memory of the KV cache.
        gpu_memory_utilization: share of the GPU's memory to fill; without effect on the CPU.
        speculative_config: `{"method": "ngram"}` and its keys (see SpeculativeConfig); None: no drafts.
        max_logprobs: the most log probabilities per position a request may ask for; -1: the whole vocabulary.
        logprobs_mode: what outputs' logprobs hold: "raw_logprobs", the model's own; "processed_logprobs", those that
            the token was chosen by, after penalties, temperature and cuts; "raw_logits" or "processed_logits".
        disable_log_stats: keep no totals; get_metrics() then refuses.
        trust_remote_code: must be False.
        revision: of a model on the hub.
        skip_tokenizer_init: load no tokenizer; token ids in, token ids out.
        chat_template: a Jinja template for chat(), in place of the model's.
        **vllm_options: other keywords of vLLM at the values that ask for nothing.

    Raises:
        ValueError: on a bad value, a model that is not supported, or too little room for the KV cache.
        UnknownOptionError: on a keyword that does not exist, naming the nearest (a ValueError and a TypeError).
        OSError: on files that are missing or cannot be read.
    """

    def __init__(
        self,
        model: str,
        *,
        tokenizer: str | None = None,
        dtype: str = "auto",
        quantization: str | None = None,
        device: str = "auto",
        seed: int = 0,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        enable_chunked_prefill: bool = True,
        long_prefill_token_threshold: int = 0,
        enable_prefix_caching: bool = True,
        block_size: int = 16,
        num_gpu_blocks_override: int | None = None,
        kv_cache_memory_bytes: int | None = None,
        gpu_memory_utilization: float = 0.92,
        speculative_config: Mapping[str, Any] | None = None,
        max_logprobs: int = 20,
        logprobs_mode: str = "raw_logprobs",
        disable_log_stats: bool = False,
        trust_remote_code: bool = False,
        revision: str | None = None,
        skip_tokenizer_init: bool = False,
        chat_template: str | None = None,
        **vllm_options: Any,
    ) -> None:
        _check_vllm_options(vllm_options, _NEUTRAL_OPTIONS, type(self))
        # Everything that can be checked is, before anything is loaded.
        model_config = ModelConfig(
            model=model,
            tokenizer=tokenizer,
            dtype=dtype,
            quantization=quantization,
            device=device,
            seed=seed,
            max_model_len=max_model_len,
            revision=revision,
            trust_remote_code=trust_remote_code,
            max_logprobs=max_logprobs,
            logprobs_mode=logprobs_mode,
        )
        cache_config = CacheConfig(
            block_size=block_size,
            enable_prefix_caching=enable_prefix_caching,
            num_gpu_blocks_override=num_gpu_blocks_override,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            gpu_memory_utilization=gpu_memory_utilization,
        )
        speculative = SpeculativeConfig.from_dict(speculative_config)
        directory = resolve_model(model, revision=revision)
        decoder_config = load_config(directory)
        scheduler_config = SchedulerConfig.with_defaults(
            device=get_platform(device).device.type,
            max_model_len=_model_len(max_model_len, decoder_config.max_position_embeddings),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_chunked_prefill=enable_chunked_prefill,
            long_prefill_token_threshold=long_prefill_token_threshold,
        )
        self.config = EngineConfig(model_config, cache_config, scheduler_config, speculative, disable_log_stats)
        self.tokenizer: Tokenizer | None = None
        if not check_bool("skip_tokenizer_init", skip_tokenizer_init):
            self.tokenizer = Tokenizer(resolve_model(tokenizer, tokenizer_only=True) if tokenizer else directory)
        self._chat_template = chat_template
        self._default_params = default_sampling_params(load_generation_config(directory))
        self.llm_engine = self._load_engine(directory, decoder_config)

    def _load_engine(self, directory: Path, decoder_config: DecoderConfig) -> LLMEngine:
        """Load the weights into an engine core and put input and output processing around it."""
        speculative = self.config.speculative
        corpus = None if speculative is None else load_corpus(speculative.corpus, self.tokenizer)
        core = build_engine_core(self.config, directory, decoder_config, corpus)
        backend, tokenizer_eos, special = None, None, frozenset[int]()
        if self.tokenizer is not None:
            backend = self.tokenizer.backend
            tokenizer_eos, special = self.tokenizer.eos_token_id, self.tokenizer.all_special_ids
        eos_token_id, extra_eos_token_ids = eos_ids(load_generation_config(directory), tokenizer_eos)
        input_processor = InputProcessor(
            backend,
            TokenIds(decoder_config.vocab_size, eos_token_id, extra_eos_token_ids, special),
            max_model_len=self.config.scheduler.max_model_len,
            max_total_tokens=core.scheduler.max_total_tokens,
            check_fits=core.scheduler.check_fits,
            default_params=self._default_params,
            seed=self.config.model.seed,
            max_logprobs=self.config.model.max_logprobs,
            disable_logprobs=speculative is not None and speculative.disable_logprobs,
            speculates=speculative is not None,
        )
        output_processor = OutputProcessor(backend, speculative.num_speculative_tokens if speculative else None)
        stats = None if self.config.disable_log_stats else EngineStats()
        return LLMEngine(core, input_processor, output_processor, stats)

    @property
    def _engine(self) -> EngineCore:
        return self.llm_engine.core

    # ---- generate ----

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        **vllm_options: Any,
    ) -> list[RequestOutput]:
        """Generate for each prompt and return the outputs in the prompts' order.

        Ctrl-C (or any failure) ends this call's requests and leaves the engine usable; a request that fails by itself
        comes back with finish_reason "error", its message as stop_reason, and disturbs no other.

        Args:
            prompts: a text, a list of token ids, a dictionary with "prompt" or "prompt_token_ids" and perhaps
                "cache_salt" and "prediction" (what the output is expected to be), or a list of these.
            sampling_params: one for all prompts, or one each; None: what the model recommends.
            use_tqdm: show progress; or a function that makes the bar, as tqdm does.
            **vllm_options: other keywords of vLLM at the values that ask for nothing.

        Raises:
            ValueError: naming the first bad prompt by its index; nothing of the call has run then.
        """
        _check_vllm_options(vllm_options, _NEUTRAL_CALL_OPTIONS, self.generate)
        return self._run(self.llm_engine.make_requests(prompts, sampling_params), use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **vllm_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several, and return the outputs in their order.

        Args:
            messages: dictionaries with "role" and "content", or a list of such lists.
            sampling_params: one for all conversations, or one each; None: what the model recommends.
            use_tqdm: as in generate().
            chat_template: a Jinja template in place of the model's.
            add_generation_prompt: open the assistant's turn after the last message.
            tools: descriptions of functions, for templates that present them to the model.
            chat_template_kwargs: further variables of the template.
            **vllm_options: other keywords of vLLM at the values that ask for nothing.

        Raises:
            ValueError: on messages without role or content, or a model without a chat template.
        """
        _check_vllm_options(vllm_options, _NEUTRAL_CALL_OPTIONS, self.chat)
        prompts = self.preprocess_chat(
            messages,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self._run(self.llm_engine.make_requests(prompts, sampling_params), use_tqdm=use_tqdm)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        output_kind: RequestOutputKind = RequestOutputKind.DELTA,
    ) -> Iterator[RequestOutput]:
        """Generate, and yield what is new of a request after each step that gave it tokens or ended it.

        A delta holds the new text, token ids and logprobs alone; the texts of a request's deltas join to its final
        text. Its `request_id` tells several requests apart, in ascending order of their prompts. With a
        `stream_interval` an output waits for that many tokens, the first and the last do not. Leaving the iteration
        early ends its requests.

        Args:
            prompts: as in generate().
            sampling_params: as in generate().
            output_kind: DELTA; CUMULATIVE for everything so far; FINAL_ONLY for one output per request, when it ends.
                It takes the place of the parameters' own output_kind.

        Raises:
            ValueError: naming the first bad prompt by its index, at once and not with the first output.
        """
        return self._stream(self.llm_engine.make_requests(prompts, sampling_params), output_kind)

    def preprocess_chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[dict[str, Any]]:
        """Return the prompt of one conversation, or of each of several, for generate() or stream().

        The template writes the BOS where the model wants one; the tokenizer adds no second.

        Args:
            messages: as in chat().
            chat_template: as in chat().
            add_generation_prompt: as in chat().
            tools: as in chat().
            chat_template_kwargs: as in chat().

        Returns:
            Dictionaries with "prompt" and "prompt_token_ids".

        Raises:
            ValueError: as in chat().
        """
        if self.tokenizer is None:
            raise ValueError("a conversation needs a tokenizer; load the model with one.")
        prompts = []
        for conversation in _conversations(messages):
            text = self.tokenizer.apply_chat_template(
                conversation,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                chat_template=chat_template or self._chat_template,
                **({"tools": tools} if tools else {}),
                **(chat_template_kwargs or {}),
            )
            assert isinstance(text, str), "a template that is not tokenized is a text"
            token_ids = self.tokenizer.encode(text, add_special_tokens=False)
            prompts.append({"prompt": text, "prompt_token_ids": token_ids})
        return prompts

    # ---- everything else ----

    def get_tokenizer(self) -> "PreTrainedTokenizerBase":
        """Return the model's tokenizer as transformers has it (importing it takes seconds the first time)."""
        if self.tokenizer is None:
            raise ValueError("this LLM was loaded without a tokenizer (skip_tokenizer_init=True).")
        return self.tokenizer.to_transformers()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of calls that give none: what the model recommends, else vLLM's defaults."""
        return self._default_params.clone()

    def get_metrics(self) -> list[Metric]:
        """Return the totals since this LLM was made, by vLLM's names.

        Raises:
            RuntimeError: with disable_log_stats=True.
        """
        return self.llm_engine.get_metrics()

    def reset_prefix_cache(self, *, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget all cached prefixes; return whether it was done.

        Args:
            reset_running_requests: recompute requests that are running; without it they keep the cache from being
            reset.
            reset_connector: must be False.
        """
        refuse_unless_neutral({"reset_connector": reset_connector}, {"reset_connector": (False,)}, "reset_prefix_cache")
        return self.llm_engine.reset_prefix_cache(reset_running_requests=reset_running_requests)

    def close(self) -> None:
        """End what is running and give the memory back. Every later call but this one raises."""
        self.llm_engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # ---- running requests ----

    def _admit(self, requests: list[ParentRequest]) -> None:
        with DeferredInterrupt():
            self.llm_engine.add(requests)

    def _step(self) -> None:
        """Compute one step. Ctrl-C waits for its end."""
        with DeferredInterrupt():
            self.llm_engine.step()

    def _abort(self, requests: list[ParentRequest]) -> None:
        with DeferredInterrupt():
            self.llm_engine.abort(requests)

    def _run(self, requests: list[ParentRequest], *, use_tqdm: bool | Callable[..., Any]) -> list[RequestOutput]:
        """Run requests to their end. Ctrl-C waits for the end of a step."""
        progress = _Progress(len(requests), use_tqdm if callable(use_tqdm) else tqdm) if use_tqdm else None
        try:
            with DeferredInterrupt() as interrupt:
                self.llm_engine.add(requests)
                unfinished, num_ended = requests, -1
                while unfinished:
                    interrupt.deliver()
                    moved, finished = self.llm_engine.step(), []
                    # Thousands may wait: looked through only when some request, perhaps another caller's, has ended.
                    if self.llm_engine.num_ended != num_ended or not moved:
                        num_ended = self.llm_engine.num_ended
                        finished = [request for request in unfinished if request.is_finished]
                        unfinished = [request for request in unfinished if not request.is_finished]
                    if progress is not None:
                        progress.update(finished)
        except BaseException:
            self._abort(requests)
            raise
        finally:
            if progress is not None:
                progress.close()
        return [self.llm_engine.make_output(request) for request in requests]

    def _stream(self, requests: list[ParentRequest], output_kind: RequestOutputKind) -> Iterator[RequestOutput]:
        try:
            self._admit(requests)
            readers = [(request, ParentCursor(request, output_kind)) for request in requests]
            while readers:
                # Another caller's step may have moved these requests: look before stepping.
                has_news = False
                for request, cursor in readers:
                    output = self.llm_engine.next_output(request, cursor)
                    if output is not None:
                        has_news = True
                        yield output
                if has_news:
                    readers = [reader for reader in readers if not reader[1].is_done]
                else:
                    self._step()
        finally:
            self._abort(requests)


class _Progress:
    """A bar of finished prompts, with tokens per second and per step."""

    def __init__(self, num_requests: int, make_bar: Callable[..., Any]) -> None:
        self._bar = make_bar(total=num_requests, desc="Processed prompts", dynamic_ncols=True)
        self._num_tokens = self._num_steps = 0

    def update(self, finished: list[ParentRequest]) -> None:
        """Count requests that have just finished."""
        if not finished:
            self._bar.update(0)  # keeps the clock going
            return
        samples = [request for parent in finished for request in parent.requests]
        self._num_tokens += sum(request.num_output_tokens for request in samples)
        self._num_steps += sum(len(request.step_drafted) for request in samples)
        seconds = self._bar.format_dict["elapsed"]
        speed = self._num_tokens / max(seconds, 1e-9)
        self._bar.postfix = f"{speed:.1f} tokens/s, {self._num_tokens / max(1, self._num_steps):.2f} tokens per step"
        self._bar.update(len(finished))

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.close()


def _check_vllm_options(
    options: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]], called: Callable[..., Any]
) -> None:
    """Refuse those of a call's further keywords that vLLM has not, or that ask for something not built.

    Raises:
        UnknownOptionError: on the first.
        ValueError: on the second.
    """
    own = [name for name in inspect.signature(called).parameters if name != "vllm_options"]
    reject_unknown_options(options, [*own, *neutral], called.__name__)
    refuse_unless_neutral(options, neutral, called.__name__)


def _model_len(asked: int | None, trained: int) -> int:
    """Return the length to serve: what was asked for, at most what the model was trained for."""
    if asked is None:
        return trained
    if asked > trained:
        raise ValueError(
            f"max_model_len ({asked}) is greater than the {trained} positions the model was trained for "
            f"(max_position_embeddings); use {trained} or less."
        )
    return asked


def _conversations(messages: Any) -> list[list[dict[str, Any]]]:
    """Return conversations of plain messages: one is a list of messages, several a list of such lists.

    Raises:
        ValueError: if something is no message.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ValueError(f"messages must be a list of dictionaries with 'role' and 'content', got {messages!r}.")
    several = messages if isinstance(messages[0], Sequence) and not isinstance(messages[0], str) else [messages]
    return [[_plain_message(message) for message in conversation] for conversation in several]


def _plain_message(message: Any) -> dict[str, Any]:
    """Return a message with its content as one text."""
    if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
        raise ValueError(f"a message needs 'role' and 'content', got {message!r}.")
    content = message["content"]
    if isinstance(content, Sequence) and not isinstance(content, str):
        parts = [part for part in content if not (isinstance(part, Mapping) and part.get("type") == "text")]
        if parts:
            raise ValueError(f"a message's content may hold parts of type 'text' only, got {parts[0]!r}.")
        content = "\n".join(part["text"] for part in content)
    if content is not None and not isinstance(content, str):
        raise ValueError(f"a message's content must be a text, got {content!r}.")
    return {**message, "content": content}
