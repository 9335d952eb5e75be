"""The asynchronous front on a tiny checkpoint: outputs as they come, aborts, slow readers, ends and failures."""

import asyncio
import gc
import threading
import time

import pytest

from engine_v1 import LLM, AsyncLLM, EngineDeadError, RequestOutputKind, SamplingParams
from engine_v1.config import UnknownOptionError
from engine_v1.engine.engine_thread import OutputStream
from tests.checkpoints import (
    CYCLE_PROMPT,
    PEPPER,
    byte_tokenizer,
    cycle_successor,
    letter_tokenizer,
    pepper_successor,
    write_successor_model,
)
from tests.factories import NGRAM_2_TO_4

OPTIONS = {"dtype": "float32", "device": "cpu", "max_num_seqs": 8, "kv_cache_memory_bytes": 1 << 24}
CYCLE_TEXT = "defghijabc" * 20


@pytest.fixture(scope="module")
def cycle_model(tmp_path_factory):
    return write_successor_model(tmp_path_factory.mktemp("cycle"), cycle_successor, letter_tokenizer())


@pytest.fixture(scope="module", params=[None, NGRAM_2_TO_4], ids=["plain", "ngram"])
def engine(cycle_model, request):
    with AsyncLLM(str(cycle_model), speculative_config=request.param, **OPTIONS) as engine:
        yield engine


def make_engine(model, **options):
    return AsyncLLM(str(model), **OPTIONS | {"speculative_config": NGRAM_2_TO_4} | options)


def greedy(**params):
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 12, **params})


async def collect(engine, request_id=None, prompt=CYCLE_PROMPT, **params):
    return [output async for output in engine.generate(prompt, greedy(**params), request_id)]


async def metrics_of(engine):
    return {metric.name: metric for metric in await engine.get_metrics()}


async def wait_for_running(engine, count):
    """Wait until that many requests run: metrics are read between two steps, so each try lets one pass."""
    for _ in range(100_000):
        if (await metrics_of(engine))["vllm:num_requests_running"].value == count:
            return
    raise AssertionError(f"there never were {count} requests running")


async def assert_idle(engine):
    metrics = await metrics_of(engine)
    assert metrics["vllm:num_requests_running"].value == 0
    assert metrics["vllm:kv_cache_usage_perc"].value == 0.0


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_outputs_are_of_the_kind_asked_for(engine, kind):
    """Deltas join to the final text, cumulative outputs grow to it, a final one comes alone; the id is the caller's."""
    outputs = asyncio.run(collect(engine, "mine", max_tokens=40, output_kind=kind, logprobs=0))
    assert {output.request_id for output in outputs} == {"mine"}
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    parts = [output.outputs[0] for output in outputs]
    if kind == RequestOutputKind.DELTA:
        assert "".join(part.text for part in parts) == CYCLE_TEXT[:40]
        assert len([entry for part in parts for entry in part.logprobs]) == 40
    else:
        assert all(CYCLE_TEXT.startswith(part.text) for part in parts)
        assert (parts[-1].text, len(parts[-1].logprobs)) == (CYCLE_TEXT[:40], 40)
    if kind == RequestOutputKind.FINAL_ONLY:
        assert len(parts) == 1


def test_many_requests_share_the_steps(engine):
    """Requests of several coroutines run side by side, each with its own outputs."""

    async def main():
        before = (await metrics_of(engine))["vllm:generation_tokens"].value
        outputs = await asyncio.gather(*(collect(engine, f"r{i}", [i % 10], max_tokens=20 + i) for i in range(20)))
        assert (await metrics_of(engine))["vllm:generation_tokens"].value - before == sum(range(20, 40))
        await assert_idle(engine)
        return outputs

    cycle = "abcdefghij" * 6
    for i, outputs in enumerate(asyncio.run(main())):
        first = i % 10 + 1
        assert outputs[-1].outputs[0].text == cycle[first : first + 20 + i]
        assert outputs[-1].request_id == f"r{i}"


def test_a_seeded_request_gives_what_llm_gives(cycle_model, engine):
    """The same parameters give the same tokens, text, logprobs and reasons as offline."""
    params = {"temperature": 1.5, "seed": 7, "max_tokens": 40, "logprobs": 2, "stop": ["ja"]}
    *_, last = asyncio.run(collect(engine, **params))
    with LLM(str(cycle_model), **OPTIONS) as llm:
        [output] = llm.generate(CYCLE_PROMPT, greedy(**params), use_tqdm=False)
    one, other = last.outputs[0], output.outputs[0]
    assert (one.token_ids, one.text, one.logprobs) == (other.token_ids, other.text, other.logprobs)
    assert (one.finish_reason, one.stop_reason) == (other.finish_reason, other.stop_reason)


@pytest.mark.parametrize("num_readers", [1, 3])
def test_deltas_never_show_half_a_character(tmp_path, num_readers):
    """Steps of several bytes give whole characters, whose deltas join to the text."""
    model = write_successor_model(tmp_path, pepper_successor, byte_tokenizer())

    async def main():
        with make_engine(model) as engine:
            ask = {"prompt": [*PEPPER] * 3, "max_tokens": 23, "output_kind": RequestOutputKind.DELTA}
            return await asyncio.gather(*(collect(engine, **ask) for _ in range(num_readers)))

    for outputs in asyncio.run(main()):
        texts = [output.outputs[0].text for output in outputs]
        assert "".join(texts) == "\U0001f336" * 5
        assert set("".join(texts)) == {"\U0001f336"}


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE])
def test_a_slow_reader_gets_everything_at_once(engine, kind):
    """The engine does not wait: what a reader left is in its next output, however many steps it came from."""

    async def main():
        texts = []
        async for output in engine.generate(CYCLE_PROMPT, greedy(max_tokens=200, output_kind=kind, logprobs=0)):
            texts.append(output.outputs[0].text)
            await wait_for_running(engine, 0)
        return texts, output

    texts, last = asyncio.run(main())
    assert len(texts) <= 3
    assert ("".join(texts) if kind == RequestOutputKind.DELTA else texts[-1]) == CYCLE_TEXT
    assert last.finished
    if kind == RequestOutputKind.CUMULATIVE:
        assert len(last.outputs[0].logprobs) == 200


def test_calls_between_steps_do_not_keep_requests_from_going_on(engine):
    """However quickly one call follows another, each lets a step pass: 100 tokens need no more than 101 of them."""

    async def main():
        [request] = engine._engine.make_requests([CYCLE_PROMPT], greedy(max_tokens=100))
        stream = OutputStream(request, asyncio.get_running_loop())
        engine._thread.add(stream)
        for _ in range(101):
            engine._thread.call(lambda: None)
            await engine.get_metrics()
        return await stream.get()

    assert asyncio.run(main()).finished


@pytest.mark.parametrize("as_list", [False, True])
def test_abort_by_id(engine, as_list):
    """The generator yields a last output with what there was, and ends; unknown ids are passed over."""

    async def main():
        outputs = []
        async for output in engine.generate([0], greedy(max_tokens=400), "victim"):
            outputs.append(output)
            if len(outputs) == 1:
                await engine.abort(["victim", "nobody"] if as_list else "victim")
        await engine.abort("victim")
        await assert_idle(engine)
        return outputs

    *_, last = asyncio.run(main())
    assert (last.finished, last.outputs[0].finish_reason) == (True, "abort")
    assert len(last.outputs[0].token_ids) < 400


def test_closing_the_generator_ends_the_request(engine):
    """Leaving the loop and closing gives the blocks back."""

    async def main():
        outputs = engine.generate([0], greedy(max_tokens=400))
        await anext(outputs)
        await outputs.aclose()
        await assert_idle(engine)

    asyncio.run(main())


def test_cancelling_the_task_ends_the_request(engine):
    """A cancelled reader's request ends, and its neighbour does not notice."""

    async def main():
        started = asyncio.Event()

        async def read():
            async for _ in engine.generate([0], greedy(max_tokens=400)):
                started.set()

        task = asyncio.create_task(read())
        neighbour = asyncio.create_task(collect(engine, max_tokens=100))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        outputs = await neighbour
        await assert_idle(engine)
        return outputs

    assert asyncio.run(main())[-1].outputs[0].text == CYCLE_TEXT[:100]


def test_errors_go_to_the_request_that_caused_them(engine):
    """A bad prompt, parameter or id raises in its own generator; the others go on."""

    async def main():
        neighbour = asyncio.create_task(collect(engine, "taken", max_tokens=300))
        await wait_for_running(engine, 1)
        for prompt, params, request_id, message in (
            ([], {}, None, "the prompt is empty"),
            ([99], {}, None, "token id 99 is outside the vocabulary"),
            ([1], {"logprobs": 21}, None, "greater than max_logprobs=20"),
            ([1], {}, "taken", "request_id 'taken' is in use"),
            ([1], {}, "", "request_id must be a non-empty string"),
        ):
            with pytest.raises(ValueError, match=message):
                await collect(engine, request_id, prompt, **params)
        return await neighbour

    assert len(asyncio.run(main())[-1].outputs[0].token_ids) == 300


def test_a_failing_request_ends_alone(cycle_model, monkeypatch):
    """What the model raises for one request is its error; the engine lives."""
    with make_engine(cycle_model, enable_prefix_caching=False) as engine:
        runner = engine._engine.core.runner
        execute = runner.execute_model

        def fail_on_long_prompt(step):
            if any(share.num_scheduled_tokens > 100 for share in step.scheduled):
                raise ArithmeticError("no such luck")
            return execute(step)

        monkeypatch.setattr(runner, "execute_model", fail_on_long_prompt)

        async def main():
            return await asyncio.gather(collect(engine, prompt=[1] * 120), collect(engine))

        bad, good = asyncio.run(main())
        assert bad[-1].outputs[0].finish_reason == "error"
        assert "no such luck" in bad[-1].outputs[0].stop_reason
        assert good[-1].outputs[0].text == CYCLE_TEXT[:12]
        assert engine.is_running


def test_a_dead_engine_is_reported_to_all(cycle_model, monkeypatch):
    """If the step itself breaks, every waiting generator raises with the cause, and so does every later call."""
    with make_engine(cycle_model) as engine:
        scheduler = engine._engine.core.scheduler

        def break_down(*_):
            raise MemoryError("out of luck")

        async def main():
            await collect(engine)
            engine.check_health()
            monkeypatch.setattr(scheduler, "update_from_output", break_down)
            results = await asyncio.gather(*(collect(engine) for _ in range(3)), return_exceptions=True)
            later = await asyncio.gather(
                collect(engine), engine.abort("x"), engine.get_metrics(), return_exceptions=True
            )
            return results + later

        for result in asyncio.run(main()):
            assert isinstance(result, EngineDeadError)
            assert "out of luck" in str(result)
            assert isinstance(result.__cause__, MemoryError)
        assert (engine.is_running, engine.errored) == (False, True)
        with pytest.raises(EngineDeadError, match="out of luck"):
            engine.check_health()


def test_shutdown_ends_waiting_generators(cycle_model):
    """Generators that wait raise, later calls too, the thread is gone, and a second shutdown is no error."""

    async def main():
        async with make_engine(cycle_model) as engine:
            task = asyncio.create_task(collect(engine, prompt=[0], max_tokens=450))
            await wait_for_running(engine, 1)
            await asyncio.to_thread(engine.shutdown)
            with pytest.raises(EngineDeadError, match="the engine was shut down"):
                await task
            with pytest.raises(EngineDeadError, match="the engine was shut down"):
                await collect(engine)
        engine.shutdown()
        assert not engine.errored
        return engine._thread._thread

    assert not asyncio.run(main()).is_alive()


def test_a_forgotten_engine_leaves_no_thread(cycle_model):
    """Without shutdown() the thread ends with its last reference."""
    engine = make_engine(cycle_model)
    asyncio.run(collect(engine))
    thread = engine._thread._thread
    del engine
    gc.collect()
    thread.join(timeout=10)
    assert not thread.is_alive()


def test_a_closed_event_loop_harms_nobody(engine):
    """A loop that ends in the middle of a request takes nothing else with it."""

    async def leave():
        await anext(engine.generate([0], greedy(max_tokens=400)))

    asyncio.run(leave())
    assert asyncio.run(collect(engine))[-1].outputs[0].text == CYCLE_TEXT[:12]
    asyncio.run(assert_idle(engine))


def test_options_are_those_of_llm(cycle_model):
    """The constructor and from_engine_args take LLM's keywords and refuse others as it does."""
    with pytest.raises(UnknownOptionError, match="did you mean 'max_num_seqs'"):
        make_engine(cycle_model, max_num_sequences=3)
    with AsyncLLM.from_engine_args({"model": str(cycle_model), **OPTIONS, "max_num_seqs": 2}) as engine:
        assert asyncio.run(collect(engine))[-1].outputs[0].spec_decode_metrics is None
        assert engine.get_default_sampling_params() == SamplingParams()
        assert engine.tokenizer is not None


def test_the_prefix_cache_is_shared_and_reset(engine):
    """A prompt asked again is found in the cache until it is reset."""

    async def main():
        prompt = [*range(10)] * 4
        assert await engine.reset_prefix_cache()
        cached = [(await collect(engine, prompt=prompt))[-1].num_cached_tokens for _ in range(2)]
        assert await engine.reset_prefix_cache()
        return [*cached, (await collect(engine, prompt=prompt))[-1].num_cached_tokens]

    assert asyncio.run(main()) == [0, 32, 0]


def test_engines_in_several_threads_do_not_disturb_each_other(cycle_model):
    """Kernels entered from the threads of two engines and of offline calls give what they give alone."""
    texts = []

    def offline():
        with LLM(str(cycle_model), **OPTIONS) as llm:
            for first in range(5):
                [output] = llm.generate([[first]], greedy(max_tokens=30), use_tqdm=False)
                texts.append((first, output.outputs[0].text))

    def in_a_loop():
        with make_engine(cycle_model) as engine:
            for first in range(5):
                *_, last = asyncio.run(collect(engine, prompt=[first], max_tokens=30))
                texts.append((first, last.outputs[0].text))

    threads = [threading.Thread(target=target) for target in (offline, in_a_loop, in_a_loop)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 60
    for thread in threads:
        thread.join(timeout=max(0.0, deadline - time.monotonic()))
    assert len(texts) == 15
    assert all(text == ("abcdefghij" * 5)[first + 1 : first + 31] for first, text in texts)


def test_n_samples_are_one_request_to_the_caller(engine):
    """Deltas of both samples come under the caller's id and join to what each is; the last says that all are done."""

    async def read():
        params = SamplingParams(n=2, temperature=1.0, seed=1, max_tokens=30, output_kind=RequestOutputKind.DELTA)
        return [output async for output in engine.generate(CYCLE_PROMPT, params, "mine")]

    outputs = asyncio.run(read())
    assert {output.request_id for output in outputs} == {"mine"}
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    tokens = {0: [], 1: []}
    for output in outputs:
        for completion in output.outputs:
            tokens[completion.index] += completion.token_ids
    assert {len(ids) for ids in tokens.values()} == {30}
    asyncio.run(assert_idle(engine))


def test_an_abort_ends_every_sample(engine):
    """One id ends both samples, and the last output says so of each."""

    async def read_and_abort():
        params = SamplingParams(n=2, temperature=1.0, seed=1, max_tokens=400)
        async for output in engine.generate(CYCLE_PROMPT, params, "mine"):
            last = output
            if not output.finished:
                await engine.abort("mine")
        return last

    last = asyncio.run(read_and_abort())
    assert last.finished
    assert [completion.finish_reason for completion in last.outputs] == ["abort", "abort"]
    asyncio.run(assert_idle(engine))
