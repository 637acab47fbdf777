"""Texts that are nearly the same: MinHash finds the candidates, their Jaccard similarity decides."""

import functools
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
    limit: str = ""  # why these are not all


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

    Beyond MAX_TEXTS or MAX_CHARACTERS a part drawn by a fixed seed is searched; after MAX_COMPARISONS, which texts of
    one template reach, the search ends.
    """
    index, matches = _Index(texts), []
    chosen, limit = _draw(texts)
    for num_searched, i in enumerate(chosen):
        if index.num_comparisons >= MAX_COMPARISONS:
            return Search(matches, num_searched, f"{MAX_COMPARISONS:,} comparisons")
        sketch = _sketch(texts[i])
        found = index.find(i, texts[i], sketch)
        if found is None:
            index.add(i, sketch)
        else:
            matches.append(found)
    return Search(matches, len(chosen), limit)


def search_between(texts: list[str], others: list[str]) -> Search:
    """The same for each of `texts` among `others`; Match.other is an index of `others`."""
    index, matches = _Index(others), []
    chosen_others, other_limit = _draw(others)
    for i in chosen_others:
        index.add(i, _sketch(others[i]))
    chosen, limit = _draw(texts)
    if other_limit:
        limit = f"{len(chosen_others):,} of the {len(others):,} others"
    for num_searched, i in enumerate(chosen):
        if index.num_comparisons >= MAX_COMPARISONS:
            return Search(matches, num_searched, f"{MAX_COMPARISONS:,} comparisons")
        found = index.find(i, texts[i], _sketch(texts[i]))
        if found is not None:
            matches.append(found)
    return Search(matches, len(chosen), limit)


def _draw(texts: list[str]) -> tuple[list[int], str]:
    """Indices to search in ascending order, and the limit that leaves some out."""
    if len(texts) <= MAX_TEXTS and sum(map(len, texts)) <= MAX_CHARACTERS:
        return list(range(len(texts))), ""
    order = random.Random(SEED).sample(range(len(texts)), min(len(texts), MAX_TEXTS))
    num_characters, drawn = 0, []
    for i in order:
        num_characters += len(texts[i])
        if num_characters > MAX_CHARACTERS:
            break
        drawn.append(i)
    return sorted(drawn), f"{MAX_TEXTS:,} texts of {MAX_CHARACTERS:,} characters, drawn at random"


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
