"""The checks of the data's quality: rows in, a verdict each out. Nothing here reads or prints."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from megarl.data.findings import (
    Check,
    Limits,
    Verdict,
    by_share,
    distribution,
    fences,
    first_of,
    histogram,
    percent,
    quote,
)
from megarl.data.near_duplicates import MIN_JACCARD, Search, search_between, search_within
from megarl.data.odd_text import (
    HALF_WIDTH_LETTER,
    answer_fault,
    comparable_answer,
    final_answer,
    full_width_place,
    normalise,
    odd_character,
)
from megarl.data.row_errors import NUM_SHOWN_ERRORS
from megarl.rewards.gsm8k import parse_number

NUMERIC_SHARE = 0.9  # of the answers, above which the others are odd


@dataclass(frozen=True)
class Record:
    """One row, as far as the checks look at it. What the file has no column for is None, or no response."""

    source: str  # file:line
    prompt: str
    num_prompt: int  # tokens after templating, or characters
    answer: str | None = None  # "": the row has none
    responses: tuple[str, ...] = ()  # one, or the chosen and the rejected one
    reward: float | None = None


def check_file(
    records: list[Record], unit: str, prompt_limit: tuple[int, str] | None, is_overlong_refused: bool
) -> Iterator[Check]:
    """All checks that the rows of one file have columns for. `unit` of the prompts' lengths; `prompt_limit` is the
    longest allowed and what says so."""
    yield duplicates(records)
    yield near_duplicates(records)
    yield prompt_lengths(records, unit)
    if prompt_limit is not None:
        yield overlong_prompts(records, unit, *prompt_limit, is_overlong_refused)
    if any(record.answer is not None for record in records):
        yield contradictions(records)
        yield empty_answers(records)
        yield odd_answers(records)
    if any(record.responses for record in records):
        yield empty_responses(records)
        yield response_lengths(records)
    if any(len(record.responses) == 2 for record in records):
        yield equal_pairs(records)
    if any(record.reward is not None for record in records):
        yield reward_spread(records)
        yield from reward_groups(records)
    yield widths(records)
    yield odd_characters(records)


def rows(num_rows: int, errors: list[str]) -> Check:
    """Rows that cannot be read, or whose columns hold what they may not, have been left out of all other checks."""
    finding = f"{num_rows:,} rows read, {len(errors):,} errors"
    verdict: Verdict = "bad" if errors or not num_rows else "ok"
    return Check("rows", verdict, finding, "bad if none or with errors", first_of(errors, NUM_SHOWN_ERRORS))


def duplicates(records: list[Record]) -> Check:
    """Rows equal in everything that is looked at, but for case, white space, width and the form of a number."""
    first: dict[tuple, Record] = {}
    examples = []
    for record in records:
        answer = record.answer and comparable_answer(record.answer)
        key = (normalise(record.prompt), answer, *map(normalise, record.responses))
        if first.setdefault(key, record) is not record:
            examples.append(f"{record.source} = {first[key].source}: {quote(record.prompt)}")
    # A policy that has converged samples the same response many times.
    is_sampled = any(record.reward is not None for record in records)
    limits = Limits(0.1) if is_sampled else Limits(0, 0.1)
    return by_share("duplicates", "rows repeat an earlier one", examples, len(records), limits)


def contradictions(records: list[Record]) -> Check:
    """Equal prompts with different answers: at most one of them can be right."""
    answers: dict[str, dict[str, Record]] = defaultdict(dict)
    for record in records:
        if record.answer:
            answers[normalise(record.prompt)].setdefault(comparable_answer(record.answer), record)
    examples = []
    for found in answers.values():
        if len(found) > 1:
            first, second, *_ = found.values()
            given = " against ".join(f"{r.source} {quote(final_answer(r.answer))}" for r in (second, first))
            examples.append(f"{given}: {quote(first.prompt)}")
    return by_share("contradictions", "prompts have different answers", examples, len(answers), Limits(bad=0))


def near_duplicates(records: list[Record]) -> Check:
    """Different prompts with nearly the same words."""
    distinct = list(_by_prompt(records).values())
    search = search_within(_prompts(distinct))
    return _near("near-duplicates", "nearly repeat an earlier one", search, distinct, distinct)


def leaks(held_out: list[Record], train: list[Record]) -> Iterator[Check]:
    """Held-out prompts that are trained on: what validation then measures is memory."""
    distinct, trained = _by_prompt(held_out), _by_prompt(train)
    examples = [
        f"{record.source} = {trained[key].source}: {quote(record.prompt)}"
        for key, record in distinct.items()
        if key in trained
    ]
    yield by_share("leaks", "prompts are trained on", examples, len(distinct), Limits(bad=0))
    others = [record for key, record in distinct.items() if key not in trained]
    search = search_between(_prompts(others), _prompts(trained.values()))
    yield _near("near-leaks", "nearly repeat a trained one", search, others, list(trained.values()))


def _near(name: str, what: str, search: Search, records: list[Record], others: list[Record]) -> Check:
    examples = []
    for match in search.matches:
        record, other = records[match.index], others[match.other]
        examples.append(f"{record.source} ~ {other.source} ({match.jaccard:.2f}): {quote(record.prompt)}")
    details = ()
    if search.limits:
        details = (f"searched {search.num_searched:,} of {len(records):,}: {', '.join(search.limits)}",)
    check = by_share(name, f"prompts {what}", examples, search.num_searched, Limits(0.01), details)
    return replace(check, limits=f"{check.limits}, Jaccard >= {MIN_JACCARD:g}")


def _by_prompt(records: Iterable[Record]) -> dict[str, Record]:
    """Normalised prompt -> the first record with it."""
    first: dict[str, Record] = {}
    for record in records:
        first.setdefault(normalise(record.prompt), record)
    return first


def _prompts(records: Iterable[Record]) -> list[str]:
    return [record.prompt for record in records]


def prompt_lengths(records: list[Record], unit: str) -> Check:
    lengths = [record.num_prompt for record in records]
    low, high = fences(lengths)
    outside = [record for record in records if not low <= record.num_prompt <= high]
    examples = [f"{record.source}: {record.num_prompt:,} {unit}: {quote(record.prompt)}" for record in outside]
    what = f"prompts outside {low:,} to {high:,} {unit}"
    return by_share("prompt length", what, examples, len(records), Limits(0.01), distribution(lengths, unit))


def overlong_prompts(records: list[Record], unit: str, limit: int, named: str, is_refused: bool) -> Check:
    """What is refused may not be there at all; what is dropped or cut may be a few."""
    overlong = [record for record in records if record.num_prompt > limit]
    examples = [f"{record.source}: {record.num_prompt:,} {unit}: {quote(record.prompt)}" for record in overlong]
    limits = Limits(bad=0) if is_refused else Limits(0.01, 0.2)
    return by_share("overlong prompts", f"prompts > {named}", examples, len(records), limits)


def empty_answers(records: list[Record]) -> Check:
    examples = [f"{r.source}: {quote(r.prompt)}" for r in records if not (r.answer or "").strip()]
    return by_share("empty answers", "answers are empty", examples, len(records), Limits(bad=0))


def odd_answers(records: list[Record]) -> Check:
    given = [(record, record.answer) for record in records if record.answer and record.answer.strip()]
    num_numbers = sum(parse_number(final_answer(answer)) is not None for _, answer in given)
    is_number_expected = num_numbers >= NUMERIC_SHARE * len(given)
    _, high = fences([len(answer) for _, answer in given])
    kinds: Counter[str] = Counter()
    examples = []
    for record, answer in given:
        fault = answer_fault(answer, is_number_expected)
        if fault is None and len(answer) > high:
            fault = "far longer than the others"
        if fault is not None:
            kinds[fault] += 1
            examples.append(f"{record.source}: {fault}: {quote(answer)}")
    details = (f"{num_numbers:,} of {len(given):,} are numbers", *(f"{n:,}: {kind}" for kind, n in kinds.items()))
    return by_share("odd answers", "answers are odd", examples, len(given), Limits(0, 0.05), details)


def empty_responses(records: list[Record]) -> Check:
    examples = [f"{r.source}: {quote(r.prompt)}" for r in records if not all(x.strip() for x in r.responses)]
    return by_share("empty responses", "rows with an empty response", examples, len(records), Limits(bad=0))


def equal_pairs(records: list[Record]) -> Check:
    same = [r for r in records if len(r.responses) == 2 and normalise(r.responses[0]) == normalise(r.responses[1])]
    examples = [f"{record.source}: {quote(record.responses[0])}" for record in same if record.responses[0].strip()]
    return by_share("equal pairs", "pairs are of one text", examples, len(records), Limits(bad=0))


def response_lengths(records: list[Record]) -> Check:
    responses = [(record, text) for record in records for text in record.responses if text.strip()]
    lengths = [len(text) for _, text in responses]
    low, high = fences(lengths)
    examples = [
        f"{record.source}: {len(text):,} characters: {quote(text)}"
        for record, text in responses
        if not low <= len(text) <= high
    ]
    what = f"responses outside {low:,} to {high:,} characters"
    details = distribution(lengths, "characters")
    return by_share("response length", what, examples, len(responses), Limits(0.01), details)


def reward_spread(records: list[Record]) -> Check:
    """Whether the rewards tell good from bad; rows without one are counted."""
    scored = [record for record in records if record.reward is not None]
    rewards = np.array([record.reward for record in scored])
    low, high = rewards.min(), rewards.max()
    at_ends = [np.isclose(rewards, end, rtol=0, atol=1e-9).mean() for end in (low, high)]
    limits = Limits(look=0.95)
    verdict: Verdict = "bad" if low == high else limits.judge(max(at_ends))
    finding = f"from {low:g} to {high:g}, mean {rewards.mean():.3g}"
    if low < high:
        finding += f"; {percent(at_ends[0])} at the lowest, {percent(at_ends[1])} at the highest"
    details = (f"{len(records) - len(scored):,} rows without a reward",) if len(scored) < len(records) else ()
    details += histogram(rewards.tolist())
    return Check("rewards", verdict, finding, f"bad if equal, at one end {limits}", details)


def reward_groups(records: list[Record]) -> Iterator[Check]:
    """Where prompts repeat: groups of one prompt whose rewards are all equal, which teach nothing."""
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        if record.reward is not None:
            groups[normalise(record.prompt)].append(record)
    repeated = [group for group in groups.values() if len(group) > 1]
    constant = [group for group in repeated if len({record.reward for record in group}) == 1]
    if repeated:
        examples = [f"{g[0].source}: {len(g)} times {g[0].reward:g}: {quote(g[0].prompt)}" for g in constant]
        what = "groups of one prompt without spread"
        yield by_share("reward groups", what, examples, len(repeated), Limits(0.5, 0.9))


def widths(records: list[Record]) -> Check:
    """Columns with texts of full width in some rows and of half width in others: ５０ is not 50."""
    full: dict[str, list[str]] = defaultdict(list)
    half: Counter[str] = Counter()
    for record, column, text in _texts(records):
        if (place := full_width_place(text)) is not None:
            full[column].append(f"{record.source}: {column}: {quote(text, place)}")
        half[column] += HALF_WIDTH_LETTER.search(text) is not None
    details = tuple(f"{column}: {len(full[column]):,} of full width, {half[column]:,} of half" for column in full)
    examples = [example for column, found in full.items() if half[column] for example in found]
    what = "texts of full width amid half"
    return by_share("character width", what, examples, len(_texts(records)), Limits(0), details)


def odd_characters(records: list[Record]) -> Check:
    kinds: Counter[str] = Counter()
    examples = []
    for record, column, text in _texts(records):
        if (found := odd_character(text)) is not None:
            place, kind = found
            kinds[kind] += 1
            examples.append(f"{record.source}: {column}: {kind}: {quote(text, place)}")
    details = tuple(f"{n:,}: {kind}" for kind, n in kinds.items())
    limits = Limits(0, 0.01)
    return by_share("odd characters", "texts with odd characters", examples, len(_texts(records)), limits, details)


def _texts(records: list[Record]) -> list[tuple[Record, str, str]]:
    """(row, what it holds, text) of all texts that are not empty."""
    texts = []
    for record in records:
        names = ("response",) if len(record.responses) == 1 else ("chosen", "rejected")
        of_row = [("prompt", record.prompt), ("answer", record.answer), *zip(names, record.responses)]
        texts += [(record, name, text) for name, text in of_row if text]
    return texts
