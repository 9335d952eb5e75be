"""Makes the proposer that a configuration asks for: one place for the engine, the replay tool and benchmarks."""

from engine_v1.config import SpeculativeConfig
from engine_v1.core.token_table import TokenTable
from engine_v1.spec_decode.ngram_proposer import NgramProposer
from engine_v1.spec_decode.shared_memory import SharedMemory
from engine_v1.spec_decode.successors import SuccessorTable
from engine_v1.spec_decode.suffix_proposer import RECYCLED_ORDER, SuffixProposer


def make_proposer(
    config: SpeculativeConfig, token_table: TokenTable, corpus: SuccessorTable | None = None
) -> NgramProposer | SuffixProposer:
    """Return the proposer of ``config.method``.

    Args:
        config: checked settings.
        token_table: the running requests' tokens.
        corpus: successors in the reference texts that the configuration names.
    """
    if config.method == "ngram":
        return NgramProposer(
            token_table,
            num_speculative_tokens=config.num_speculative_tokens,
            prompt_lookup_min=config.prompt_lookup_min,
            prompt_lookup_max=config.prompt_lookup_max,
            prompt_lookup_tie=config.prompt_lookup_tie,
        )
    recycles = config.method in ("recycling", "auto")
    keeps_outputs = (
        config.method != "recycling" and config.suffix_cache_max_requests > 0 and config.suffix_cache_max_tokens > 0
    )
    memory = None
    if recycles or keeps_outputs:
        memory = SharedMemory(
            config.suffix_cache_max_requests if keeps_outputs else 0,
            config.suffix_cache_max_tokens if keeps_outputs else 0,
            min_order=RECYCLED_ORDER + 1 if recycles else 1,  # adjacencies tell of shorter contexts, and sooner
            recycles=recycles,
        )
    return SuffixProposer(
        token_table,
        num_speculative_tokens=config.num_speculative_tokens,
        min_prob=config.suffix_min_prob,
        memory=memory,
        recycles=recycles,
        corpus=corpus if config.method != "recycling" else None,
    )
