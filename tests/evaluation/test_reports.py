"""What text, CSV and HTML show; and that nothing a model writes is more than text on the page."""

import csv
import io
from html.parser import HTMLParser

import pytest
from evaluated import result

from megarl.evaluation.comparison import compare
from megarl.evaluation.estimators import metrics_of
from megarl.evaluation.html_report import BAR_WIDTH, MAX_CHARACTERS, html_report
from megarl.evaluation.text_report import csv_report, metric_names, text_report

HOSTILE = "</script></div></details><img src=http://x.example/a onerror=alert(1)><script>alert()</script>\"'{{ 7 }}&lt;"
VOID = {"meta", "rect", "path"}


class Page(HTMLParser):
    """Its elements with their attributes, the text in each kind of element, and that it is closed as it is opened."""

    def __init__(self, html):
        super().__init__()
        self.open, self.elements, self.texts = [], [], []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if data.strip():
            self.texts.append((self.open[-1] if self.open else None, data.strip()))

    def tagged(self, *tags):
        return [text for tag, text in self.texts if tag in tags]


def evaluated(*results, ks=(1, 2)):
    """(Metrics, comparisons)."""
    metrics = {result.name: metrics_of(result, ks, num_resamples=500) for result in results}
    return metrics, compare(list(results), num_resamples=500)


@pytest.fixture
def models():
    """A base model, and one that is better on two prompts of four, equal on one, and has no reward on one."""
    sft = result([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 0.0]], "sft", temperature=0.7)
    rl = result([[1.0, 1.0], [1.0, 1.0], [1.0, 1.0], [None, None]], "rl", temperature=0.7, seed=3)
    return sft, rl


def test_text_has_a_column_for_each_model_and_a_line_for_each_comparison(models):
    metrics, comparisons = evaluated(*models)
    lines = text_report(metrics, comparisons).splitlines()
    assert lines[0].split() == ["sft", "rl"]
    assert [line.split()[0] for line in lines[1:7]] == [*metrics["sft"]]
    column = lines[0].index("rl")
    assert all(line[column - 2 : column] == "  " and line[column] != " " for line in lines[1:7])
    low, high = metrics["sft"]["reward_mean"].low, metrics["sft"]["reward_mean"].high
    assert lines[1][:column].split(maxsplit=1) == ["reward_mean", f"0.375 [{low:.3f}, {high:.3f}]  "]
    assert lines[1][column:] == "1.000 [1.000, 1.000] of 3 prompts"
    assert lines[6].split() == ["errors", "0", "2"]
    assert lines[8].startswith("means over 4 prompts, with 95% intervals") and "whose reward failed" in lines[8]
    assert lines[9].startswith("rl against sft: win rate 0.833 (2 wins, 1 ties, 0 losses), reward_mean +0.500 [+0.0")
    assert lines[9].endswith("p = 0.5; 1 of 4 prompts left out, as one of the two has no reward")
    assert len(lines) == 10


def test_text_of_three_models_has_corrected_p_values():
    models = [result([[reward]] * 8, name) for reward, name in zip([0.0, 1.0, 1.0], "abc")]
    for line in text_report(*evaluated(*models, ks=())).splitlines()[-2:]:
        assert line.endswith("p = 0.0078, 0.016 for 2 comparisons (Holm)")


def test_a_metric_that_a_model_lacks_is_a_dash():
    sft, rl = result([[1.0, 0.0]], "sft"), result([[None, None]], "rl")
    metrics = {model.name: metrics_of(model, (2,)) for model in (rl, sft)}
    assert metric_names(metrics) == ["reward_mean", "pass@2", "length_mean", "truncated_ratio", "errors"]
    lines = text_report(metrics, []).splitlines()
    assert lines[1].split() == ["reward_mean", "-", "0.500"] and lines[5].split() == ["errors", "2", "0"]


def test_csv_reads_back_as_the_numbers_it_was_made_of(models):
    metrics, _ = evaluated(*models)
    metrics['a,"b"\n'] = metrics.pop("rl")
    rows = list(csv.DictReader(io.StringIO(csv_report(metrics), newline="")))
    assert len(rows) == 12 and rows[0].keys() == {"model", "metric", "value", "low", "high", "n"}
    for row in rows:
        estimate = metrics[row["model"]][row["metric"]]
        bounds = [float(row[name]) if row[name] else None for name in ("low", "high")]
        assert [float(row["value"]), *bounds, int(row["n"])] == [*vars(estimate).values()]


def test_the_page_shows_the_same_numbers_and_settings(models):
    metrics, comparisons = evaluated(*models)
    page = Page(html_report(list(models), metrics, comparisons))
    cells = page.tagged("td", "th")
    for line in text_report(metrics, []).splitlines()[1:7]:
        name, *numbers = [cell for cell in line.split("  ") if cell]
        place = cells.index(name)
        assert cells[place + 1 : place + 3] == [number.strip() for number in numbers]
    assert cells[: cells.index("reward_mean")] == ["sft", "rl", "temperature", "0.7", "0.7", "seed", "-", "3"]
    assert "Against sft" in page.tagged("h2") and "0.833" in cells and "p = 0.5" in " ".join(cells)


def test_bars_are_as_long_as_the_chances(models):
    metrics, comparisons = evaluated(*models)
    page = Page(html_report(list(models), metrics, comparisons))
    lengths = [float(attributes["width"]) for tag, attributes in page.elements if tag == "rect"][1::2]
    estimates = [metrics[model][metric] for metric in ("pass@1", "pass@2") for model in ("sft", "rl")]
    assert lengths == pytest.approx([BAR_WIDTH * estimate.value for estimate in estimates], abs=0.1)
    lines = [attributes["d"] for tag, attributes in page.elements if tag == "path"]
    starts = [float(line[1:].split()[0]) for line in lines]
    assert starts == pytest.approx([BAR_WIDTH * estimate.low for estimate in estimates], abs=0.1)


def test_prompts_on_which_models_differ_most_come_first_and_the_page_says_how_many_are_shown(models):
    metrics, comparisons = evaluated(*models)
    page = Page(html_report(list(models), metrics, comparisons, max_prompts=3, max_responses=1))
    summaries = [" ".join(text.split()) for text in page.tagged("summary")]
    assert summaries == [
        "test.jsonl:1: sft 0.000, rl 1.000",
        "test.jsonl:2: sft 0.500, rl 1.000",
        "test.jsonl:4: sft 0.000, rl no reward",
    ]
    text = " ".join(" ".join(page.tagged("p")).split())
    assert "3 of 4 prompts are shown, first those on which the models' mean rewards differ most; at most 1 resp" in text
    about = [text for text in page.tagged("div") if text.startswith("1 of 2:")]
    assert len(about) == 6 and "no reward: raised ValueError: no number" in about[-1]
    alone = Page(html_report([models[0]], {"sft": metrics["sft"]}, []))
    assert [text.split(":")[1] for text in alone.tagged("summary")] == ["1", "4", "2", "3"]
    assert not any("Against" in text for text in alone.tagged("h2"))


def test_whatever_models_write_is_text_and_nothing_is_loaded_or_run():
    """In each place where text of a model, of the data or of the user stands."""
    names = [HOSTILE + "1", HOSTILE + "2"]
    models = [result([[0.0], [1.0], [None]], name, answers_PG=[[HOSTILE]] * 3, **{HOSTILE: HOSTILE}) for name in names]
    for place, prompt in enumerate(prompt for model in models for prompt in model.prompts):
        prompt.source = f"{HOSTILE}{place % 3}"
        prompt.answer = HOSTILE
        prompt.messages = [{"role": HOSTILE, "content": HOSTILE, "tool_calls": [{"name": HOSTILE}]}]
        prompt.responses[0].text = HOSTILE
        prompt.responses[0].reward_parts = {HOSTILE: 1.0}
        prompt.responses[0].error = HOSTILE if prompt.responses[0].reward is None else None
    metrics, comparisons = evaluated(*models, ks=(1,))
    html = html_report(models, metrics, comparisons)
    page = Page(html)
    clean = result([[0.0], [1.0], [None]], "1"), result([[0.0], [1.0], [None]], "2")
    expected = Page(html_report(list(clean), *evaluated(*clean, ks=(1,))))
    assert {tag for tag, _ in page.elements} == {tag for tag, _ in expected.elements}
    attributes = {name for _, attributes in page.elements for name in attributes}
    assert attributes == {name for _, attributes in expected.elements for name in attributes}
    assert not {"script", "img", "link", "iframe", "a"} & {tag for tag, _ in page.elements}
    assert not {"src", "href", "style", "onerror", "onclick"} & attributes
    policy = {"http-equiv": "Content-Security-Policy", "content": "default-src 'none'; style-src 'unsafe-inline'"}
    assert ("meta", policy) in page.elements
    assert "http" not in html.replace("http-equiv", "").replace("http://x.example", "") and "url(" not in html
    assert page.tagged("div").count(HOSTILE) == 3 * (1 + 1 + 2) and HOSTILE in page.tagged("th")[0]


def test_long_texts_lose_their_middle_and_odd_ones_can_be_written(tmp_path):
    model = result([[0.0], [0.0]])
    long, odd = (prompt.responses[0] for prompt in model.prompts)
    long.text = "start" + "x" * MAX_CHARACTERS + "#### 18"
    odd.text = "half a pair \ud83d, zero \x00, a mark \u202e"
    html = html_report([model], *evaluated(model, ks=()))
    (tmp_path / "report.html").write_text(html, encoding="utf-8")
    texts = Page(html).tagged("div")
    (shown,) = [text for text in texts if text.startswith("start")]
    assert shown.endswith("#### 18") and "[... 12 characters are left out ...]" in shown
    assert shown.count("x") == MAX_CHARACTERS - len("start#### 18")
    assert any("half a pair \\ud83d, zero" in text for text in texts)
