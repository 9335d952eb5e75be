"""Decides what each step computes, and records what it gave."""

import time
from collections import deque
from collections.abc import Iterable

from engine_v1.config import SchedulerConfig
from engine_v1.core.kv_cache_manager import KVCacheManager
from engine_v1.core.scheduler_output import (
    ModelRunnerOutput,
    NewRequestData,
    ScheduledRequest,
    SchedulerOutput,
    TokenLogprobs,
)
from engine_v1.core.token_table import TokenTable
from engine_v1.request import Request, RequestStatus
from engine_v1.spec_decode.metrics import SpecDecodingStats


class Scheduler:
    """Shares a step's token budget and the KV blocks among the requests.

    There is no prefill or decode phase: a request has pending tokens, known ones and drafts, and a step computes some
    of them. The budget goes to the known tokens of running requests, then to waiting requests in order of arrival, and
    what is left to drafts; so speculation delays nobody. Where blocks run out, the newest running request is preempted
    and recomputed later; drafts never preempt anyone.

    Invariants, between steps: ``running`` is in order of admission and each of its requests holds a row and at least
    one block; requests in ``waiting`` hold neither; ``requests`` has exactly those two kinds.

    Args:
        config: bounds of a step.
        kv_cache: the blocks.
        token_table: the rows; ``config.max_num_seqs`` of them.
        num_speculative_tokens: the longest draft, 0 without speculation.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache: KVCacheManager,
        token_table: TokenTable,
        *,
        num_speculative_tokens: int = 0,
    ) -> None:
        self.config = config
        self.kv_cache = kv_cache
        self.token_table = token_table
        self.requests: dict[str, Request] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.spec_stats = SpecDecodingStats.new(num_speculative_tokens)
        self.num_preemptions = 0

    @property
    def max_total_tokens(self) -> int:
        """The most tokens, prompt and output, that one request can reach."""
        return min(self.config.max_model_len, self.kv_cache.max_request_tokens)

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def check_fits(self, request: Request) -> None:
        """Refuse a request that could not finish even if it had the engine to itself.

        Raises:
            ValueError: it needs more than the context length or the block pool holds.
        """
        total = request.num_prompt_tokens + request.max_tokens
        if total > self.config.max_model_len:
            raise ValueError(
                f"{request.num_prompt_tokens} prompt tokens and max_tokens={request.max_tokens} exceed "
                f"max_model_len={self.config.max_model_len}; shorten the prompt or lower max_tokens"
            )
        if total > self.kv_cache.max_request_tokens:
            raise ValueError(
                f"{request.num_prompt_tokens} prompt tokens and max_tokens={request.max_tokens} can never fit into "
                f"the KV cache of {self.kv_cache.block_pool.num_usable_blocks} blocks of "
                f"{self.kv_cache.block_size} tokens; "
                "raise num_gpu_blocks_override or kv_cache_memory_bytes, or lower max_tokens"
            )

    def add_request(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: its id is in use, or it can never fit; nothing has changed.
        """
        if request.request_id in self.requests:
            raise ValueError(
                f"request_id {request.request_id!r} is in use; ids must be unique until a request finishes"
            )
        self.check_fits(request)
        self.kv_cache.extend_hashes(request)
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def finish_requests(self, request_ids: Iterable[str], status: RequestStatus) -> list[Request]:
        """End requests from outside (an abort, an error), between steps; unknown and finished ids are passed over."""
        ended = []
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is None:
                continue
            if request.status == RequestStatus.RUNNING:
                self.running.remove(request)
            else:
                self.waiting.remove(request)
            self._finish(request, status)
            ended.append(request)
        return ended

    # ---- schedule ----

    def schedule(self) -> SchedulerOutput:
        """Choose the next step's work, take the blocks it needs, and trim drafts to what is granted."""
        step = SchedulerOutput()
        budget = self._schedule_running(step, self.config.max_num_batched_tokens)
        if not step.preempted_req_ids:
            budget = self._schedule_waiting(step, budget)
        self._schedule_drafts(step, budget)
        self._mask_by_grammar(step)
        return step

    def _schedule_running(self, step: SchedulerOutput, budget: int) -> int:
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            num_tokens = min(self._chunk(request.num_pending_tokens), budget)
            block_offset = len(self.kv_cache.blocks[request.request_id])
            new_blocks = self._allocate_or_preempt(step, request, request.num_computed_tokens + num_tokens)
            if new_blocks is None:
                break
            self._add(step, request, num_tokens, block_offset, new_blocks)
            budget -= num_tokens
            index += 1
        return budget

    def _allocate_or_preempt(self, step: SchedulerOutput, request: Request, num_tokens: int) -> list[int] | None:
        """Take blocks for a running request, preempting the newest as needed; None if that was the request itself."""
        while (new_blocks := self.kv_cache.allocate_slots(request, num_tokens)) is None:
            newest = self.running.pop()
            self._preempt(newest)
            step.preempted_req_ids.append(newest.request_id)
            if newest is request:
                return None
        return new_blocks

    def _schedule_waiting(self, step: SchedulerOutput, budget: int) -> int:
        being_computed = self._hashes_being_computed(step)
        deferred: list[Request] = []  # each keeps its place in the queue and a seat
        while self.waiting and budget > 0 and len(self.running) + len(deferred) < self.config.max_num_seqs:
            request = self.waiting[0]
            computed_blocks = self.kv_cache.get_computed_blocks(request)
            if self._next_block_hash(request, len(computed_blocks)) in being_computed:
                deferred.append(self.waiting.popleft())  # one step later it hits that block instead of computing it
                continue
            num_computed = len(computed_blocks) * self.kv_cache.block_size
            num_tokens = self._chunk(request.num_tokens - num_computed)
            if num_tokens > budget and not self.config.enable_chunked_prefill:
                break
            num_tokens = min(num_tokens, budget)
            # Admit only what has room for all its known tokens, or a long prompt would be preempted half-way.
            if not self.kv_cache.can_allocate(request.num_tokens, computed_blocks):
                break
            new_blocks = self.kv_cache.allocate_slots(request, num_computed + num_tokens, computed_blocks)
            assert new_blocks is not None, "room was checked"
            self.waiting.popleft()
            self._admit(step, request, num_computed)
            self._add(step, request, num_tokens, 0, new_blocks)
            being_computed |= self._hashes_of(request, step.scheduled[-1])
            budget -= num_tokens
        self.waiting.extendleft(reversed(deferred))
        return budget

    def _schedule_drafts(self, step: SchedulerOutput, budget: int) -> None:
        """Give drafts what budget and free blocks remain, in order of admission; the rest of a draft is dropped.

        Only requests that had a single known token pending are given any, so no prompt chunk carries drafts.
        """
        drafted = [request for request in self.running if request._spec_token_ids]
        if not drafted:
            return
        scheduled = {s.request_id: s for s in step.scheduled if s.samples and s.num_scheduled_tokens == 1}
        for request in drafted:
            granted = 0
            share = scheduled.get(request.request_id)
            if share is not None:
                room = self.kv_cache.num_tokens_without_preemption(request) - request.num_tokens
                granted = max(0, min(len(request._spec_token_ids), budget, room))
            del request._spec_token_ids[granted:]
            if share is not None and granted:
                new_blocks = self.kv_cache.allocate_slots(request, request.num_tokens + granted)
                assert new_blocks is not None, "drafts were trimmed to the free blocks"
                share.spec_token_ids = list(request._spec_token_ids)
                share.num_scheduled_tokens += granted
                share.new_block_ids = share.new_block_ids + new_blocks
                budget -= granted

    def _mask_by_grammar(self, step: SchedulerOutput) -> None:
        """Say for every sampled row of a request with a grammar what it allows there."""
        for share in step.scheduled:
            grammar = self.requests[share.request_id].grammar
            if grammar is not None and share.samples:
                share.grammar_masks = grammar.masks(share.spec_token_ids)

    def _chunk(self, num_pending: int) -> int:
        threshold = self.config.long_prefill_token_threshold
        return min(num_pending, threshold) if threshold > 0 else num_pending

    def _admit(self, step: SchedulerOutput, request: Request, num_computed_tokens: int) -> None:
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = num_computed_tokens
            request.first_scheduled_time = time.time()
            if self.kv_cache.enable_caching:
                self.kv_cache.stats.observe(1, request.num_tokens, num_computed_tokens)
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_computed_tokens
        request.row = self.token_table.acquire(request.all_token_ids)
        self.running.append(request)
        step.new_requests.append(
            NewRequestData(
                request.row,
                request.sampling_params,
                request.num_prompt_tokens,
                request.seed,
                request.sample_index,
                request.logits_rules,
            )
        )

    def _add(
        self,
        step: SchedulerOutput,
        request: Request,
        num_tokens: int,
        block_offset: int,
        new_blocks: list[int],
    ) -> None:
        positions = range(0)
        if request.sampling_params.prompt_logprobs is not None:
            # Each prompt token but the first, at the position before it, and once: not again after a preemption.
            first = max(request.num_computed_tokens, len(request.prompt_logprobs))
            positions = range(first, min(request.num_computed_tokens + num_tokens, request.num_prompt_tokens - 1))
        step.scheduled.append(
            ScheduledRequest(
                request_id=request.request_id,
                row=request.row,
                num_computed_tokens=request.num_computed_tokens,
                num_scheduled_tokens=num_tokens,
                samples=num_tokens == request.num_pending_tokens,
                block_offset=block_offset,
                new_block_ids=new_blocks,
                prompt_logprob_positions=positions,
            )
        )

    def _hashes_of(self, request: Request, share: ScheduledRequest) -> set[bytes]:
        """Return the hashes of the blocks that a share will make full of known tokens."""
        size = self.kv_cache.block_size
        first = share.num_computed_tokens // size
        return set(request.block_hashes[first : (share.num_computed_tokens + share.num_scheduled_tokens) // size])

    def _hashes_being_computed(self, step: SchedulerOutput) -> set[bytes]:
        hashes: set[bytes] = set()
        if self.waiting:
            for share in step.scheduled:
                hashes |= self._hashes_of(self.requests[share.request_id], share)
        return hashes

    def _next_block_hash(self, request: Request, num_hit_blocks: int) -> bytes | None:
        """Return the hash of the first block that missed, or None where no hit is possible or wanted."""
        if request.sampling_params.skip_reading_prefix_cache:
            return None
        if num_hit_blocks >= (request.num_tokens - 1) // self.kv_cache.block_size:
            return None
        return request.block_hashes[num_hit_blocks] if request.block_hashes else None

    def _preempt(self, request: Request) -> None:
        """Take everything from a request (already out of ``running``) and queue it first, to be recomputed."""
        self._release(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(request)

    # ---- update ----

    def update_from_output(self, step: SchedulerOutput, output: ModelRunnerOutput) -> list[Request]:
        """Commit a step's tokens one by one, stop where a request ends, and roll rejected drafts back.

        Returns:
            The requests that gained tokens or ended.
        """
        updated = []
        now = time.time()
        for share in step.scheduled:
            request = self.requests[share.request_id]
            sampled = output.sampled_token_ids.get(share.request_id, [])
            error = output.errors.get(share.request_id)
            request.prompt_logprobs += output.prompt_logprobs.get(share.request_id, [])
            num_committed = self._commit(request, sampled, output.logprobs.get(share.request_id))
            # 4 computed, 3 drafts, 1 accepted: 4 + (1 + 3) - 2 = 6 computed of 7 known
            num_rejected = len(share.spec_token_ids) + 1 - len(sampled) if share.samples else 0
            request.num_computed_tokens += share.num_scheduled_tokens - num_rejected
            request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
            request._spec_token_ids = []
            if error is not None and not request.is_finished:
                request.status = RequestStatus.FINISHED_ERROR
                request.stop_reason = error
            if error is None:
                self.kv_cache.cache_blocks(request)
            if sampled:
                self._record_step(request, share, num_committed, len(sampled), now)
            finished = request.is_finished
            if finished:
                self.running.remove(request)
                self._finish(request, request.status)
            elif share.spec_token_ids:
                self.kv_cache.trim(request)
            if sampled or finished:
                updated.append(request)
        return updated

    def _commit(self, request: Request, token_ids: list[int], logprobs: list[TokenLogprobs] | None) -> int:
        """Append tokens up to the first that stops the request; return how many. The others leave no trace."""
        for count, token_id in enumerate(token_ids, start=1):
            self.token_table.token_ids[request.row, request.num_tokens] = token_id
            request.append_output_token(token_id)
            if request.grammar is not None:
                request.grammar.advance(token_id)
            if logprobs is not None:
                request.logprobs.append(logprobs[count - 1])
            status = self._stop_status(request, token_id)
            if status is not None:
                request.status = status
                return count
        return len(token_ids)

    def _stop_status(self, request: Request, token_id: int) -> RequestStatus | None:
        """Return the final status if this newest token ends the request, feeding its text to the detokenizer.

        The order is EOS, stop ids, stop strings, length: when the last allowed token completes a stop string, the
        string is the reason, so that no text ever shows one.
        """
        status = None
        if token_id == request.eos_token_id:
            status = RequestStatus.FINISHED_STOPPED
        elif token_id in request.stop_token_ids:
            status = RequestStatus.FINISHED_STOPPED
            request.stop_reason = token_id
        if request.detokenizer is not None and (status is None or request.sampling_params.include_stop_str_in_output):
            stop_string = request.detokenizer.append(token_id, search=status is None)
            if stop_string is not None:
                status = RequestStatus.FINISHED_STOPPED
                request.stop_reason = stop_string
        if status is None and request.num_output_tokens >= request.max_tokens:
            status = RequestStatus.FINISHED_LENGTH_CAPPED
        return status

    def _record_step(
        self, request: Request, share: ScheduledRequest, num_committed: int, num_sampled: int, now: float
    ) -> None:
        if request.first_token_time is None:
            request.first_token_time = now
        num_drafts = len(share.spec_token_ids)
        # The last sampled token is the target's own; a stop may have cut it and some accepted drafts off.
        num_accepted = min(num_committed, num_sampled - 1, num_drafts)
        request.step_drafted.append(num_drafts)
        request.step_accepted.append(num_accepted)
        if num_drafts:
            self.spec_stats.observe_draft(num_drafts, num_accepted)

    def _finish(self, request: Request, status: RequestStatus) -> None:
        """Give everything back; the request is already out of ``running`` and ``waiting``."""
        self._release(request)
        request.status = status
        request.finished_time = time.time()
        del self.requests[request.request_id]

    def _release(self, request: Request) -> None:
        self.kv_cache.free(request)
        request._spec_token_ids = []
        if request.row >= 0:
            self.token_table.release(request.row)
            request.row = -1

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        """Forget the prefix cache.

        Args:
            reset_running_requests: preempt what is running first; it is recomputed, in the same order.

        Returns:
            Whether it was reset: without ``reset_running_requests`` it is not while a request holds blocks.
        """
        if reset_running_requests:
            while self.running:
                self._preempt(self.running.pop())
        return self.kv_cache.reset_prefix_cache()

    def check_integrity(self) -> None:
        """Assert the invariants of scheduler, rows and blocks: for tests, between steps."""
        self.kv_cache.check_integrity()
        assert len(self.running) <= self.config.max_num_seqs, "more requests run than max_num_seqs"
        assert set(self.requests) == {r.request_id for r in (*self.running, *self.waiting)}, "a request is lost"
        assert len(self.requests) == len(self.running) + len(self.waiting), "a request is queued twice"
        rows = [request.row for request in self.running]
        assert len(set(rows)) == len(rows), "two requests share a row"
        assert self.token_table.num_free_rows + len(rows) == self.token_table.token_ids.shape[0], "a row is lost"
        for request in self.running:
            assert request.status == RequestStatus.RUNNING, f"{request} is in running"
            assert 0 <= request.num_computed_tokens < request.num_tokens, f"{request}: progress out of bounds"
            known = self.token_table.token_ids[request.row, : request.num_tokens]
            assert known.tolist() == request.all_token_ids, f"{request}: its row differs from its tokens"
            num_blocks = len(self.kv_cache.blocks[request.request_id])
            assert self.kv_cache.num_blocks_for(request.num_computed_tokens) <= num_blocks, f"{request}: blocks missing"
            assert num_blocks <= self.kv_cache.num_blocks_for(request.num_tokens), f"{request}: holds draft-only blocks"
        for request in self.waiting:
            assert request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED), f"{request} is in waiting"
            assert (request.row, request.num_computed_tokens) == (-1, 0), f"{request} holds something while waiting"
            assert request.request_id not in self.kv_cache.blocks, f"{request} holds blocks while waiting"
            assert not request._spec_token_ids, f"{request} holds drafts while waiting"
