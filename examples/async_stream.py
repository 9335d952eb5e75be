"""Answer three questions at once from coroutines and print what each gains as it comes."""

import asyncio

from engine_v1 import AsyncLLM, RequestOutputKind, SamplingParams

MODEL = "smollm2-135m-instruct"

QUESTIONS = [
    "Name three rivers of Europe. Answer with a short list.",
    "Repeat this word for word: to be, or not to be, that is the question.",
    "What is the capital of France?",
]


async def answer(engine: AsyncLLM, name: str, question: str) -> str:
    """Print the deltas of one answer; return the whole of it."""
    [prompt] = engine.preprocess_chat([{"role": "user", "content": question}])
    params = SamplingParams(temperature=0, max_tokens=64, output_kind=RequestOutputKind.DELTA, stream_interval=8)
    text = ""
    async for output in engine.generate(prompt, params, name):
        text += output.outputs[0].text
        print(f"{name}: {output.outputs[0].text!r}")
    return text


async def main() -> None:
    """Ask all questions at the same time; they share the engine's steps."""
    async with AsyncLLM(MODEL, max_model_len=2048, speculative_config={"method": "ngram"}) as engine:
        answers = await asyncio.gather(*(answer(engine, f"question {i}", q) for i, q in enumerate(QUESTIONS)))
    for question, text in zip(QUESTIONS, answers, strict=True):
        print(f"\n> {question}\n{text}")


if __name__ == "__main__":
    asyncio.run(main())
