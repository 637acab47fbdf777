"""Models side by side as one HTML page that needs nothing else and runs nothing.

Models write whatever they like: all text is escaped by jinja2, and the page forbids scripts and whatever is elsewhere.
"""

import json
import math
from dataclasses import dataclass
from typing import Any

import jinja2

from megarl.evaluation.comparison import Comparison
from megarl.evaluation.estimators import Estimate
from megarl.evaluation.results import ModelResult, PromptResult
from megarl.evaluation.text_report import (
    left_out,
    metric_names,
    note,
    shown,
    shown_estimate,
    shown_metric,
    shown_p_value,
)

MAX_CHARACTERS = 4000  # of a text on the page
BAR_WIDTH = 300
COLORS = ("#4878a8", "#d8803c", "#5a9e5a", "#b85c5c", "#8a70b0")  # of models, in turn


@dataclass
class Bar:
    """Of a chance between 0 and 1; lengths in pixels."""

    metric: str
    model: str
    color: str
    text: str
    value: float
    low: float | None
    high: float | None


def html_report(
    results: list[ModelResult],
    metrics: dict[str, dict[str, Estimate]],
    comparisons: list[Comparison],
    max_prompts: int = 50,
    max_responses: int = 4,
) -> str:
    """`metrics` and `comparisons`: what `metrics_of` returns for each model by its name, and `compare` for all.

    Responses are shown to at most `max_prompts` prompts, those first on which the models differ most, and of each model
    the first `max_responses`. All models must have the same prompts.
    """
    by_source = [{prompt.source: prompt for prompt in result.prompts} for result in results]
    rows = sorted(([prompts[source] for prompts in by_source] for source in by_source[0]), key=order_of)
    settings = dict.fromkeys(name for result in results for name in result.settings)
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    functions = (left_out, message_text, shortened, shown, shown_estimate, shown_p_value)
    environment.globals |= {function.__name__: function for function in functions}
    page = environment.from_string(PAGE).render(
        names=[result.name for result in results],
        settings=[(name, [result.settings.get(name, "-") for result in results]) for name in settings],
        metrics=[(name, [shown_metric(of, name) for of in metrics.values()]) for name in metric_names(metrics)],
        note=note(metrics),
        bars=bars_of(metrics),
        bar_width=BAR_WIDTH,
        comparisons=comparisons,
        rows=rows[:max_prompts],
        num_prompts=len(rows),
        max_responses=max_responses,
        max_characters=MAX_CHARACTERS,
    )
    return page.encode(errors="backslashreplace").decode()  # half a surrogate pair cannot be written to a file


def order_of(row: list[PromptResult]) -> tuple[float, float]:
    """A prompt with what each model made of it. Larger differences between models come first, then lower means; prompts
    without any reward come last."""
    means = [prompt.mean_reward for prompt in row if prompt.scored]
    return (min(means) - max(means), min(means)) if means else (0.0, math.inf)


def bars_of(metrics: dict[str, dict[str, Estimate]]) -> list[Bar]:
    """Of each pass@k and maj@k, the models' bars together."""
    bars = []
    for name in metric_names(metrics):
        if not name.startswith(("pass@", "maj@")):
            continue
        for index, (model, of_model) in enumerate(metrics.items()):
            if name in of_model:
                estimate, color = of_model[name], COLORS[index % len(COLORS)]
                lengths = [
                    None if number is None else round(BAR_WIDTH * number, 1)
                    for number in (estimate.value, estimate.low, estimate.high)
                ]
                bars.append(Bar(name, model, color, shown_metric(of_model, name), *lengths))
    return bars


def message_text(message: dict[str, Any]) -> str:
    calls = message.get("tool_calls")
    return message["content"] + (f"\n{json.dumps(calls, ensure_ascii=False)}" if calls else "")


def shortened(text: str) -> str:
    """Its beginning and its end, where the answer is."""
    if len(text) <= MAX_CHARACTERS:
        return text
    half = MAX_CHARACTERS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters are left out ...]\n{text[-half:]}"


PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>Evaluation of {{ names|join(", ") }}</title>
<style>
body { font: 15px/1.4 sans-serif; margin: 2em; color: #222; background: #fff; }
table { border-collapse: collapse; margin: 0.5em 0 1em; }
th, td { border: 1px solid #ccc; padding: 0.3em 0.7em; text-align: left; vertical-align: top; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: isolate; font: 13px/1.4 monospace; }
.about { color: #666; font-size: 13px; }
.models { display: flex; gap: 1em; }
.models > div { flex: 1; min-width: 0; }
.response { border-top: 1px solid #ccc; margin: 0.7em 0; }
details { border: 1px solid #ccc; padding: 0.4em 0.7em; margin: 0.4em 0; }
summary { cursor: pointer; overflow-wrap: anywhere; }
</style>
</head>
<body>
<h1>Evaluation</h1>
<table>
<tr><th></th>{% for name in names %}<th>{{ name }}</th>{% endfor %}</tr>
{% for name, cells in settings %}
<tr class="about"><td>{{ name }}</td>{% for cell in cells %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
{% for name, cells in metrics %}
<tr><th>{{ name }}</th>{% for cell in cells %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</table>
<p class="about">{{ note }}</p>
{% if bars %}
<h2>How often a prompt is solved</h2>
<table>
{% for bar in bars %}
<tr><td>{{ bar.metric }}</td><td>{{ bar.model }}</td><td><svg width="{{ bar_width }}" height="16">
<rect width="{{ bar_width }}" height="16" fill="#eee"/>
<rect width="{{ bar.value }}" height="16" fill="{{ bar.color }}"/>
{% if bar.low is not none %}
<path d="M{{ bar.low }} 8 H{{ bar.high }} M{{ bar.low }} 4 v8 M{{ bar.high }} 4 v8" stroke="#222"/>
{% endif %}
</svg></td><td>{{ bar.text }}</td></tr>
{% endfor %}
</table>
{% endif %}
{% if comparisons %}
<h2>Against {{ comparisons[0].baseline }}</h2>
<table>
<tr><th></th><th>win rate</th><th>wins</th><th>ties</th><th>losses</th><th>reward_mean</th><th>significance</th></tr>
{% for comparison in comparisons %}
<tr><th>{{ comparison.model }}</th><td>{{ shown(comparison.win_rate) }}</td>
<td>{{ comparison.wins }}</td><td>{{ comparison.ties }}</td><td>{{ comparison.losses }}</td>
<td>{{ shown_estimate(comparison.difference, "+") }}</td>
<td>{{ shown_p_value(comparison) }}{{ left_out(comparison) }}</td></tr>
{% endfor %}
</table>
<p class="about">By the mean reward of each prompt. A tie is half a win. Paired permutation test, two-sided.</p>
{% endif %}
<h2>Prompts</h2>
<p class="about">{{ rows|length }} of {{ num_prompts }} prompts are shown, first those
{{ "on which the models' mean rewards differ most" if names|length > 1 else "with the lowest mean reward" }}; at most
{{ max_responses }} responses of each model; of a text of more than {{ max_characters }} characters its two ends.</p>
{% for row in rows %}
<details>
<summary>{{ row[0].source }}:
{% for prompt in row %}
{{ names[loop.index0] }} {{ shown(prompt.mean_reward) if prompt.scored else "no reward" }}{{ "" if loop.last else "," }}
{% endfor %}
</summary>
{% for message in row[0].messages %}
<div class="about">{{ message.role }}</div>
<div class="text">{{ shortened(message_text(message)) }}</div>
{% endfor %}
{% if row[0].answer is not none %}
<div class="about">reference answer</div>
<div class="text">{{ shortened(row[0].answer) }}</div>
{% endif %}
<div class="models">
{% for prompt in row %}
<div><b>{{ names[loop.index0] }}</b>
{% for response in prompt.responses[:max_responses] %}
<div class="response">
<div class="about">{{ loop.index }} of {{ prompt.responses|length }}:
{{ "no reward: " + response.error if response.reward is none else "reward " + shown(response.reward) }},
{{ response.num_tokens }} tokens{{ ", truncated" if response.truncated else "" }}
{%- if response.answer is not none %}, answer {{ shortened(response.answer) }}{% endif %}
</div>
<div class="text">{{ shortened(response.text) }}</div>
</div>
{% endfor %}
</div>
{% endfor %}
</div>
</details>
{% endfor %}
</body>
</html>
"""
