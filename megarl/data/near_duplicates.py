"""Texts that are nearly the same: MinHash finds the candidates, their Jaccard similarity decides."""

import functools
import itertools
import random
import re
import zlib
from dataclasses import dataclass

from datasketch import MinHash, MinHashLSH

from megarl.data.odd_text import normalise

MIN_JACCARD = 0.8  # of two sets of shingles
SHINGLE_WORDS = 3
NUM_BANDS, BAND_ROWS = 18, 7  # texts of that similarity share a band with probability 1 - (1 - 0.8**7)**18 = 0.986
SEED = 1
MAX_TEXTS = 100_000
MAX_CHARACTERS = 50_000_000  # of these texts together
MAX_COMPARISONS = 10_000_000

# Thai to Lao, Myanmar, Khmer, kana and Chinese characters are written without spaces: each is a word of its own.
UNSPACED = (
    r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
WORD = re.compile(rf"[{UNSPACED}]|[^\W{UNSPACED}]+|[^\w\s{UNSPACED}]")


@dataclass(frozen=True)
class Match:
    """Text `index` is nearly the same as text `other`."""

    index: int
    other: int
    jaccard: float


@dataclass(frozen=True)
class Search:
    matches: list[Match]
    num_searched: int
    limits: tuple[str, ...]  # why not all were searched


def shingles(text: str) -> frozenset[str]:
    """The runs of three words of a text, or the whole of a shorter one; a punctuation mark is a word."""
    words = WORD.findall(normalise(text))
    num_shingles = max(len(words) - SHINGLE_WORDS + 1, 1)
    return frozenset(" ".join(words[i : i + SHINGLE_WORDS]) for i in range(num_shingles))


def jaccard(first: frozenset[str], second: frozenset[str]) -> float:
    num_shared = len(first & second)
    return num_shared / (len(first) + len(second) - num_shared)


def search_within(texts: list[str]) -> Search:
    """Each text with a Jaccard similarity of at least 0.8 to an earlier one that has no match itself.

    Of more than MAX_TEXTS or MAX_CHARACTERS a part drawn by a fixed seed is searched; after MAX_COMPARISONS, which
    texts of one template reach, the search ends.
    """
    return _search(texts, _Index(texts), (), is_growing=True)


def search_between(texts: list[str], others: list[str]) -> Search:
    """The same for each of `texts` among `others`; Match.other is an index of `others`."""
    index = _Index(others)
    chosen = _draw(others)
    for i in chosen:
        index.add(i, _sketch(others[i]))
    limits = (f"among {len(chosen):,} of {len(others):,}",) if len(chosen) < len(others) else ()
    return _search(texts, index, limits, is_growing=False)


def _search(texts: list[str], index: "_Index", limits: tuple[str, ...], is_growing: bool) -> Search:
    """`is_growing`: the index is of `texts`, and those without a match are added to it."""
    matches = []
    chosen = _draw(texts)
    if len(chosen) < len(texts):
        limits += (f"at most {MAX_TEXTS:,} texts and {MAX_CHARACTERS:,} characters, drawn at random",)
    for num_searched, i in enumerate(chosen):
        if index.num_comparisons >= MAX_COMPARISONS:
            return Search(matches, num_searched, (*limits, f"at most {MAX_COMPARISONS:,} comparisons"))
        sketch = _sketch(texts[i])
        found = index.find(i, texts[i], sketch)
        if found is not None:
            matches.append(found)
        elif is_growing:
            index.add(i, sketch)
    return Search(matches, len(chosen), limits)


def _draw(texts: list[str]) -> list[int]:
    """Indices to search in ascending order: all of them if the limits allow it."""
    if len(texts) <= MAX_TEXTS and sum(map(len, texts)) <= MAX_CHARACTERS:
        return list(range(len(texts)))
    order = random.Random(SEED).sample(range(len(texts)), min(len(texts), MAX_TEXTS))
    num_characters = itertools.accumulate(len(texts[i]) for i in order)
    return sorted(i for i, n in zip(order, num_characters) if n <= MAX_CHARACTERS)


def _sketch(text: str) -> MinHash:
    sketch = _empty_sketch().copy()
    sketch.update_batch([shingle.encode() for shingle in shingles(text)])
    return sketch


@functools.cache
def _empty_sketch() -> MinHash:
    return MinHash(num_perm=NUM_BANDS * BAND_ROWS, seed=SEED, hashfunc=zlib.crc32)


class _Index:
    """Those of `texts` that were added."""

    def __init__(self, texts: list[str]):
        self.num_comparisons = 0
        self._lsh = MinHashLSH(num_perm=NUM_BANDS * BAND_ROWS, params=(NUM_BANDS, BAND_ROWS))
        self._shingles = functools.lru_cache(maxsize=10_000)(lambda i: shingles(texts[i]))

    def add(self, i: int, sketch: MinHash) -> None:
        self._lsh.insert(i, sketch, check_duplication=False)

    def find(self, i: int, text: str, sketch: MinHash) -> Match | None:
        """The match of `text`, which has index i, with the first text that was added and is similar enough."""
        candidates = sorted(self._lsh.query(sketch))
        own = shingles(text) if candidates else frozenset()
        for other in candidates:
            self.num_comparisons += 1
            if (similarity := jaccard(own, self._shingles(other))) >= MIN_JACCARD:
                return Match(i, other, similarity)
        return None
