"""What users may set is checked where it is made, with vLLM's wording where it has one."""

import re

import pytest

from engine_v1.config import (
    CacheConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    UnknownOptionError,
)


def make_scheduler_config(**changes):
    given = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 128, **changes}
    return SchedulerConfig(**given)


class TestSpeculativeConfig:
    def test_none_means_no_speculation(self):
        """Without a speculative_config there are no drafts."""
        assert SpeculativeConfig.from_dict(None) is None

    def test_method_alone_is_enough(self):
        """{"method": "ngram"} drafts 10 tokens by matches of 1 to 4, the latest first."""
        config = SpeculativeConfig.from_dict({"method": "ngram"})
        assert config == SpeculativeConfig("ngram", 10, 4, 1, "latest", adaptive=True)

    @pytest.mark.parametrize("method,longest", [("ngram", 10), ("suffix", 16), ("recycling", 16), ("auto", 16)])
    def test_the_longest_draft_depends_on_the_method(self, method, longest):
        """Methods whose drafts end by themselves may go further; what is given counts."""
        assert SpeculativeConfig.from_dict({"method": method}).num_speculative_tokens == longest
        assert SpeculativeConfig.from_dict({"method": method, "num_speculative_tokens": 3}).num_speculative_tokens == 3

    def test_a_corpus_is_a_list_of_texts(self):
        """It may be empty, and does not change later."""
        texts = ["a text", "a/file.txt"]
        config = SpeculativeConfig.from_dict({"method": "auto", "corpus": texts})
        texts.append("more")
        assert config.corpus == ("a text", "a/file.txt")

    @pytest.mark.parametrize("model", ["ngram", "[ngram]"])
    def test_method_follows_from_the_model_name(self, model):
        """As in vLLM, a model called ngram says the method."""
        assert SpeculativeConfig.from_dict({"model": model}).method == "ngram"

    @pytest.mark.parametrize(
        "given,expected",
        [
            ({"prompt_lookup_max": 7}, (1, 7)),
            ({"prompt_lookup_max": 1}, (1, 1)),
            ({"prompt_lookup_min": 3}, (3, 4)),
            ({"prompt_lookup_min": 6}, (6, 6)),
            ({"prompt_lookup_min": 2, "prompt_lookup_max": 3}, (2, 3)),
            ({"prompt-lookup-min": 2, "prompt_lookup_max": None}, (2, 4)),
        ],
    )
    def test_missing_lookup_bound_keeps_its_default(self, given, expected):
        """The bound not given keeps its default, moved just enough to keep min <= max."""
        config = SpeculativeConfig.from_dict({"method": "ngram", **given})
        assert (config.prompt_lookup_min, config.prompt_lookup_max) == expected

    @pytest.mark.parametrize(
        "given,message",
        [
            ({"num_speculative_tokens": 3}, "num_speculative_tokens was provided but without speculative model."),
            ({}, "needs a 'method'"),
            (
                {"method": "ngram", "prompt_lookup_min": 3, "prompt_lookup_max": 2},
                "prompt_lookup_min=3 must be <= prompt_lookup_max=2",
            ),
            (
                {"method": "ngram", "tensor_parallel_size": 1},
                "argument in the speculative_config. Please pass 'draft_tensor_parallel_size' instead.",
            ),
            ({"method": "eagle3"}, "method 'eagle3' is not supported; supported methods: ngram"),
            ({"model": "some/draft"}, "supported methods: ngram"),
            ({"method": "ngram", "model": "some/draft"}, "takes no draft model"),
            ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens must be at least 1, got 0"),
            ({"method": "ngram", "num_speculative_tokens": 129}, "must be at most 128, got 129"),
            ({"method": "ngram", "num_speculative_tokens": 2.5}, "must be an integer, got 2.5"),
            ({"method": "ngram", "num_speculative_tokens": True}, "must be an integer, got True"),
            ({"method": "ngram", "prompt_lookup_max": 0}, "prompt_lookup_max must be at least 1, got 0"),
            ({"method": "suffix", "suffix_min_prob": 0}, "suffix_min_prob must be in [0.001, 1], got 0"),
            ({"method": "suffix", "suffix_cache_max_requests": -1}, "suffix_cache_max_requests must be at least 0"),
            ({"method": "auto", "suffix_cache_max_tokens": 2**25}, "suffix_cache_max_tokens must be at most 16777216"),
            ({"method": "auto", "corpus": "one text"}, "corpus must be a list of texts"),
            ({"method": "auto", "corpus": [1]}, "corpus must be a list of texts"),
            ({"method": "ngram", "prompt_lookup_max": 33}, "are 33 lengths to look up, at most 32 are kept"),
            ({"method": "ngram", "prompt_lookup_min": -1}, "prompt_lookup_min must be at least 1, got -1"),
            ({"method": "ngram", "prompt_lookup_tie": "first"}, "one of 'latest', 'earliest', got 'first'"),
            ({"method": "ngram", "adaptive": "yes"}, "adaptive must be True or False"),
            ({"method": "ngram", "quantization": "int8"}, "quantization='int8' is not supported yet"),
            ({"method": "ngram", "prompt-lookup-max": 3, "prompt_lookup_max": 3}, "names an option twice"),
            ("ngram", "must be a dictionary"),
        ],
    )
    def test_bad_values_raise(self, given, message):
        """What cannot be honoured raises a ValueError that says what is wrong with it."""
        with pytest.raises(ValueError, match=re.escape(message)):
            SpeculativeConfig.from_dict(given)

    def test_unknown_key_raises_with_the_nearest_name(self):
        """A mistyped key is refused with the name it was probably meant to be."""
        with pytest.raises(UnknownOptionError, match="'prompt_lokup_max'; did you mean 'prompt_lookup_max'"):
            SpeculativeConfig.from_dict({"method": "ngram", "prompt_lokup_max": 3})

    def test_neutral_keys_of_vllm_are_accepted(self):
        """Keys that vLLM has for other methods are accepted as long as they ask for nothing."""
        given = {"method": "ngram", "draft_tensor_parallel_size": 1, "disable-padded-drafter-batch": False}
        assert SpeculativeConfig.from_dict(given) == SpeculativeConfig()

    @pytest.mark.parametrize("adaptive", [True, False])
    def test_adaptive_takes_both_values(self, adaptive):
        """Adaptive drafting can be asked for and declined."""
        assert SpeculativeConfig.from_dict({"method": "ngram", "adaptive": adaptive}).adaptive is adaptive


class TestSchedulerConfig:
    @pytest.mark.parametrize(
        "changes,message",
        [
            ({"max_num_seqs": 0}, "max_num_seqs must be at least 1, got 0"),
            (
                {"max_num_batched_tokens": 3},
                "max_num_batched_tokens (3) must be greater than or equal to max_num_seqs (4)",
            ),
            ({"max_model_len": 1}, "max_model_len must be at least 2"),
            ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold must be at least 0"),
            ({"long_prefill_token_threshold": 129}, "cannot be greater than the max_model_len (128)"),
            ({"enable_chunked_prefill": False}, "max_num_batched_tokens (64) is smaller than max_model_len (128)"),
        ],
    )
    def test_bad_values_raise(self, changes, message):
        """A step that could not hold what it must is refused."""
        with pytest.raises(ValueError, match=re.escape(message)):
            make_scheduler_config(**changes)

    @pytest.mark.parametrize(
        "device,given,expected",
        [
            ("cpu", {}, (256, 4096)),
            ("cuda", {}, (256, 8192)),
            ("cuda:1", {}, (256, 8192)),
            ("cpu", {"max_num_batched_tokens": 16}, (16, 16)),
            ("cpu", {"max_num_seqs": 5000}, (5000, 5000)),
            ("cpu", {"max_num_seqs": 8, "max_num_batched_tokens": 32}, (8, 32)),
            ("cpu", {"enable_chunked_prefill": False}, (256, 9000)),
        ],
    )
    def test_defaults_are_those_of_vllm_and_never_contradict_what_is_given(self, device, given, expected):
        """The bound left open follows the one that was given."""
        config = SchedulerConfig.with_defaults(device=device, max_model_len=9000, **given)
        assert (config.max_num_seqs, config.max_num_batched_tokens) == expected


class TestCacheConfig:
    @pytest.mark.parametrize("block_size", [1, 3, 16, 1000])
    def test_any_block_size_from_one_up(self, block_size):
        """Blocks may have any size."""
        assert CacheConfig(block_size=block_size).block_size == block_size

    @pytest.mark.parametrize(
        "changes,message",
        [
            ({"block_size": 0}, "block_size must be at least 1, got 0"),
            ({"num_gpu_blocks_override": 2}, "num_gpu_blocks_override must be at least 3, got 2"),
            ({"kv_cache_memory_bytes": 0}, "kv_cache_memory_bytes must be at least 1"),
            ({"gpu_memory_utilization": 0}, "gpu_memory_utilization must be in (0, 1], got 0"),
            ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization must be in (0, 1], got 1.5"),
            ({"enable_prefix_caching": 1}, "enable_prefix_caching must be True or False"),
        ],
    )
    def test_bad_values_raise(self, changes, message):
        """Room for fewer than two usable blocks, and other impossible caches, are refused."""
        with pytest.raises(ValueError, match=re.escape(message)):
            CacheConfig(**changes)


class TestModelConfig:
    @pytest.mark.parametrize(
        "dtype,expected",
        [("auto", "auto"), ("float", "float32"), ("half", "float16"), ("bfloat16", "bfloat16")],
    )
    def test_dtype_has_one_form(self, dtype, expected):
        """Short names of a dtype mean what they mean in vLLM."""
        assert ModelConfig("m", dtype=dtype).dtype == expected

    def test_torch_dtype_is_taken(self):
        """A torch dtype says the same as its name."""
        torch = pytest.importorskip("torch")
        assert ModelConfig("m", dtype=torch.bfloat16).dtype == "bfloat16"

    @pytest.mark.parametrize(
        "changes,message",
        [
            ({"model": ""}, "model must be a non-empty string"),
            ({"dtype": "int3"}, "dtype must be one of"),
            ({"device": "tpu"}, "device must be 'auto', 'cpu', 'cuda' or 'cuda:N', got 'tpu'"),
            ({"max_model_len": 1}, "max_model_len must be at least 2"),
            ({"seed": 1.5}, "seed must be an integer"),
            ({"trust_remote_code": True}, "trust_remote_code=True is not supported"),
            ({"revision": 3}, "revision must be a non-empty string"),
        ],
    )
    def test_bad_values_raise(self, changes, message):
        """What cannot be honoured raises with the value and the bound."""
        with pytest.raises(ValueError, match=re.escape(message)):
            ModelConfig(**{"model": "m", **changes})


class TestBatchSizeTable:
    def test_entries_are_kept_in_order(self):
        """Lists or tuples, in any order, become sorted tuples; there may be gaps, and 0 switches drafting off."""
        config = SpeculativeConfig.from_dict(
            {"method": "ngram", "num_speculative_tokens_per_batch_size": [[9, 32, 0], (1, 4, 5)]}
        )
        assert config.num_speculative_tokens_per_batch_size == ((1, 4, 5), (9, 32, 0))

    @pytest.mark.parametrize(
        "table,message",
        [
            ([], "must be a list of"),
            (5, "must be a list of"),
            ([1, 4, 5], "must be a list of"),
            ([[1, 4]], "must be a list of"),
            ([[2, 4, 5]], "must start at batch size 1"),
            ([[1, 4, 5], [4, 8, 2]], "batch size 4 is in two entries"),
            ([[1, 4, 11]], "must be at most 10, got 11"),
            ([[1, 0, 5]], "must be at least 1, got 0"),
            ([[1, "4", 5]], "must be an integer, got '4'"),
        ],
    )
    def test_a_table_that_is_none_is_refused(self, table, message):
        """As in vLLM: ranges of batch sizes from 1 on, without overlap, of at most num_speculative_tokens each."""
        with pytest.raises(ValueError, match=message):
            SpeculativeConfig.from_dict({"method": "ngram", "num_speculative_tokens_per_batch_size": table})
