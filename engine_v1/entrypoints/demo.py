"""The demo: the same prompts with speculation off and on, what was drafted in colour, and whether anything differs."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from engine_v1.engine.detokenizer import IncrementalDetokenizer
from engine_v1.outputs import CompletionOutput, RequestOutput
from engine_v1.sampling_params import SamplingParams

if TYPE_CHECKING:
    from engine_v1.entrypoints.llm import LLM

_NOTES = """\
The harbour master's log for Tuesday. At 06:10 the ferry Marigold left pier four with 112 passengers. At 07:45 \
the trawler Sea Otter reported a broken winch and asked for a tow. At 08:20 the tug Bantam reached the Sea Otter \
and brought her to pier two. At 11:05 the ferry Marigold came back with 98 passengers. At 15:30 fog closed the \
outer channel, and it was opened again at 17:15."""

_CODE = """\
def average_temperature(readings):
    total = 0
    for reading in readings:
        total = total + reading.temperature
    return total / len(readings)

def highest_temperature(readings):
    highest = readings[0].temperature
    for reading in readings:
        if reading.temperature > highest:
            highest = reading.temperature
    return highest"""

_LIST = """\
- Mill Street Bakery, open from 6 to 14, closed on Monday
- Green Lane Bookshop, open from 10 to 18, closed on Sunday
- Old Bridge Cafe, open from 8 to 20, closed on Tuesday
- North Gate Pharmacy, open from 9 to 19, closed on Sunday
- River Road Bicycle Repair, open from 9 to 17, closed on Monday"""

_PASSAGES = """\
[1] The Lyrebird Valley railway was opened in 1884 to carry slate from the Penwood quarry to the coast. It is 23 \
kilometres long and has eleven stations.
[2] Passenger trains on the Lyrebird Valley railway ended in 1961. Volunteers reopened the line between Penwood and \
Ashford Bridge in 1978 as a museum railway.
[3] The oldest locomotive of the Lyrebird Valley railway is the Duchess, built in 1886. It was restored in 2004 and \
still pulls the train on Sundays."""

_LETTER = """\
Dear Mr Hollis, thank you for your leter of 3 March. We are sory that the parcel with the two lamps arived late and \
that one of the lamps was broken. We will send you a new lamp this week, and you need not send the broken lamp back. \
Please write to us again if the new lamp does not arive by 20 March. Yours sincerely, Anna Berg, Berg Lamps."""

# Title, and what the user asks. All are grounded in their input: the answer repeats much of it, so drafts find matches.
DEMO_PROMPTS = (
    ("Summary with quotes", f"Summarise the text in three sentences and quote those you rely on.\n\n{_NOTES}"),
    ("Extraction", f"Copy the sentences about the ferry Marigold from this log:\n\n{_NOTES}"),
    ("Code edit", f"Write the same code again, with the parameter readings renamed to samples.\n\n{_CODE}"),
    ("Rewriting a list", f"Rewrite this list as a numbered list.\n\n{_LIST}"),
    ("Question", f"Answer from the passages: what is the oldest locomotive, and when was it built?\n\n{_PASSAGES}"),
    ("Proofreading", f"Correct the spelling and return the whole text.\n\n{_LETTER}"),
    ("Table", f"Turn this list into a table with the columns name, hours and closed.\n\n{_LIST}"),
    (
        "Facts in words of the source",
        f"When did passenger trains end, and when was the line reopened? Use the words of the passages.\n\n{_PASSAGES}",
    ),
)


@dataclass
class DemoRun:
    """What one engine did with the demo's prompts, one at a time."""

    outputs: list[RequestOutput] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Tokens generated."""
        return sum(len(output.outputs[0].token_ids) for output in self.outputs)

    @property
    def tokens_per_s(self) -> float:
        """Tokens generated per second, prompts included in the time."""
        return self.num_tokens / self.seconds


def run_demo(
    *,
    model: str,
    speculative_config: dict[str, Any],
    dtypes: Sequence[str],
    max_tokens: int,
    num_prompts: int,
    console: Console,
    **engine_options: Any,
) -> bool:
    """Generate with speculation off and on in each dtype, and print text, speed and equality.

    Returns:
        Whether every float32 output is the same with speculation on and off.
    """
    from engine_v1.entrypoints.llm import LLM

    prompts, is_exact = DEMO_PROMPTS[:num_prompts], True
    for index, dtype in enumerate(dtypes):
        options = {"dtype": dtype, "max_num_seqs": 1, "enable_prefix_caching": False, **engine_options}
        console.print(f"\n[bold]{escape(model)}, {dtype}[/bold]: greedy, one request at a time, prefix caching off")
        with console.status("loading"):
            plain, drafting = LLM(model, **options), LLM(model, speculative_config=speculative_config, **options)
        with plain, drafting:
            # The texts of the other dtypes are the same or nearly so: once is enough.
            if index == 0:
                console.print("accepted draft tokens are [green]green[/green]")
            off, on = _generate(plain, drafting, prompts, max_tokens, console, show_texts=index == 0)
        num_identical = _report(prompts, off, on, dtype, console)
        if dtype == "float32" and num_identical < len(prompts):
            is_exact = False
    return is_exact


def _generate(
    plain: "LLM",
    drafting: "LLM",
    prompts: Sequence[tuple[str, str]],
    max_tokens: int,
    console: Console,
    *,
    show_texts: bool,
) -> tuple[DemoRun, DemoRun]:
    """Run each prompt through both engines in turn, so that what else the machine does meets both."""
    off, on = DemoRun(), DemoRun()
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    for llm in (plain, drafting):  # a first request pays for what is loaded late
        llm.chat([{"role": "user", "content": "Say yes."}], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    for title, text in prompts:
        for llm, run, word in ((plain, off, "off"), (drafting, on, "on")):
            with console.status(f"{title}, speculation {word}"):
                started = time.perf_counter()
                run.outputs += llm.chat([{"role": "user", "content": text}], params, use_tqdm=False)
                run.seconds += time.perf_counter() - started
        if show_texts:
            assert drafting.tokenizer is not None, "an LLM loads one unless told not to"
            console.print(f"\n[bold]{title}[/bold] [dim]{_first_line(text)}[/dim]")
            console.print(coloured_text(on.outputs[-1], drafting.tokenizer.backend))
    return off, on


def _first_line(text: str) -> str:
    """Return the start of a prompt, safe to print among markup."""
    return escape(text.splitlines()[0][:100])


def coloured_text(output: RequestOutput, tokenizer: Any) -> Text:
    """Return the generated text with accepted draft tokens in green.

    A character or space belongs to the token that completed it.
    """
    completion = output.outputs[0]
    metrics = completion.spec_decode_metrics
    mask = metrics.accepted_draft_mask if metrics else [False] * len(completion.token_ids)
    detokenizer = IncrementalDetokenizer(tokenizer, output.prompt_token_ids, SamplingParams())
    text, shown = Text(), 0
    for token_id, is_draft in zip(completion.token_ids, mask, strict=True):
        detokenizer.append(token_id)
        new, shown = detokenizer.text[shown:], len(detokenizer.text)
        text.append(new, style="green" if is_draft else None)
    return text[: len(completion.text)]


def is_identical(a: CompletionOutput, b: CompletionOutput) -> bool:
    """Whether two outputs have the same tokens, text and end."""
    ends = (a.finish_reason, a.stop_reason) == (b.finish_reason, b.stop_reason)
    return ends and a.token_ids == b.token_ids and a.text == b.text


def _report(prompts: Sequence[tuple[str, str]], off: DemoRun, on: DemoRun, dtype: str, console: Console) -> int:
    """Print a table over the prompts; return how many outputs are identical."""
    table = Table("prompt", "tokens", "steps", "per step", "drafts accepted", "off = on")
    for column in table.columns[1:]:
        column.justify = "right"
    num_identical = num_steps = num_drafted = num_accepted = 0
    for (title, _), without, drafted in zip(prompts, off.outputs, on.outputs, strict=True):
        a, b = without.outputs[0], drafted.outputs[0]
        metrics = b.spec_decode_metrics
        assert metrics is not None, "an engine with speculation reports it"
        same = is_identical(a, b)
        num_identical += same
        num_steps += metrics.num_steps
        num_drafted += metrics.num_draft_tokens
        num_accepted += metrics.num_accepted_draft_tokens
        table.add_row(
            title,
            str(len(b.token_ids)),
            str(metrics.num_steps),
            f"{metrics.tokens_per_step:.2f}",
            f"{metrics.num_accepted_draft_tokens} of {metrics.num_draft_tokens}",
            "identical" if same else "[red]different[/red]",
        )
    console.print()
    console.print(table)
    console.print(
        f"{dtype}: speculation off {off.tokens_per_s:.1f} tokens/s, on {on.tokens_per_s:.1f} tokens/s "
        f"({on.tokens_per_s / off.tokens_per_s:.2f}x), {on.num_tokens / num_steps:.2f} tokens per step, "
        f"{num_accepted} of {num_drafted} draft tokens accepted",
        soft_wrap=True,
    )
    verdict = "IDENTICAL for every prompt" if num_identical == len(prompts) else "identical"
    console.print(
        f"{dtype}: {num_identical} of {len(prompts)} outputs {verdict}, speculation off and on", soft_wrap=True
    )
    return num_identical
