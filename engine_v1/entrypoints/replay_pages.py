"""What a replay shows: a plot of acceptance, and a page of one generation with its drafts."""

import html
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine_v1.entrypoints.records import Record
from engine_v1.spec_decode.replay import Replay, ReplayStep

COLOURS = {
    "ngram": "#bfe3c0",
    "suffix": "#bfe3c0",
    "memory": "#bcd7f5",
    "recycling": "#f7e3a1",
    "corpus": "#e0c8f0",
    "oracle": "#dddddd",
}

_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Drafts by {method}</title><style>
body {{ font: 16px/1.7 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; color: #222; }}
pre {{ white-space: pre-wrap; font: inherit; }}
.prompt {{ color: #777; }} .draft {{ border-radius: 3px; padding: 1px 0; }}
.own {{ border-bottom: 2px solid #444; }} del {{ color: #b33; font-size: 75%; opacity: .75; }}
#plain:checked ~ pre del {{ display: none; }} {colours}
</style></head><body>
<h1>Drafts by {method}</h1>
<p>{summary}</p>
<p>Coloured: drafted and accepted, by source: {legend}. Underlined: the model's own token, one a step.
<del>Struck out</del>: drafted and rejected.</p>
<input type="checkbox" id="plain"><label for="plain"> hide rejected drafts</label>
<pre><span class="prompt">{prompt}</span>{output}</pre>
</body></html>
"""


def html_page(record: Record, steps: Sequence[ReplayStep], method: str, texts: Callable[[list[int]], list[str]]) -> str:
    """Return a page, complete in itself, of one output with its accepted and rejected drafts.

    Args:
        record: the request.
        steps: what was drafted for it.
        method: by whom.
        texts: the text of each of some token ids.
    """
    shown = [_token(texts(record.output_token_ids[:1])[0], "own", "given with the prompt")]
    position = 1
    for number, step in enumerate(steps, 1):
        title = f"step {number}: {step.num_accepted} of {len(step.draft)} drafts accepted"
        if step.draft:
            title += f", from {step.source}, match of {step.match_length}"
        committed = texts(record.output_token_ids[position : position + step.num_committed])
        accepted, own = committed[: step.num_accepted], committed[step.num_accepted :]
        shown += [_token(text, f"draft from-{html.escape(step.source)}", title) for text in accepted]
        rejected = "".join(texts(step.draft[step.num_accepted :]))
        if rejected:
            shown.append(f"<del>{html.escape(rejected)}</del>")
        shown += [_token(text, "own", title) for text in own]
        position += step.num_committed
    sources = sorted({step.source for step in steps if step.draft})
    one = Replay([list(steps)])
    return _PAGE.format(
        method=html.escape(method),
        colours=" ".join(f".from-{source} {{ background: {COLOURS.get(source, '#ddd')}; }}" for source in sources),
        summary=f"{len(record.output_token_ids)} tokens in {one.num_steps + 1} steps, {one.tokens_per_step:.2f} tokens "
        f"per step after the first; {one.num_accepted} of {one.num_drafted} draft tokens accepted.",
        legend=", ".join(f'<span class="draft from-{source}">{source}</span>' for source in sources) or "none",
        prompt=html.escape("".join(texts(record.prompt_token_ids))),
        output="".join(shown),
    )


def save_plot(path: Path, figures: Mapping[str, Any], replays: Mapping[str, Replay]) -> None:
    """Draw acceptance against match length, and tokens per step by category, as a PNG.

    Args:
        path: of the image.
        figures: by method, with "per_category".
        replays: by method.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("a plot needs matplotlib: pip install 'engine-v1[plot]', or leave --plot out.") from None
    figure = Figure(figsize=(13, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, one in replays.items():
        points = {length: counts for length, counts in one.acceptance_by_match_length().items() if length > 0}
        if points:
            rates = [accepted / drafted for drafted, accepted in points.values()]
            left.plot(list(points), rates, marker="o", label=name)
    left.set(xlabel="tokens matched", ylabel="share of first draft tokens accepted", ylim=(0, 1))
    left.legend()
    categories = list(next(iter(figures.values()))["per_category"])
    width = 0.8 / len(figures)
    for index, (name, one) in enumerate(figures.items()):
        places = [place + (index - (len(figures) - 1) / 2) * width for place in range(len(categories))]
        right.bar(places, list(one["per_category"].values()), width, label=name)
    right.set(ylabel="tokens per step", xticks=range(len(categories)), xticklabels=categories)
    right.axhline(1.0, color="black", linewidth=0.8)
    right.legend()
    figure.savefig(path, dpi=120)


def _token(text: str, kind: str, title: str) -> str:
    return f'<span class="{kind}" title="{html.escape(title)}">{html.escape(text)}</span>'
