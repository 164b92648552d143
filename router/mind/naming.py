"""Readable names for domains that nobody declared, from their own terms."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

import numpy as np
from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS, CountVectorizer

from router.mind.instruction import views

_TERM = r"(?u)\b[^\W\d_]{3,}\b"
_SAME_STEM = 4
_LEAST_SHARE = 0.2
_STOP_WORDS = [*ENGLISH_STOP_WORDS, "did", "does", "doing", "don", "please", "want"]
_FALLBACK = "topic"


def characteristic_terms(texts: Sequence[str], others: Sequence[Sequence[str]], count: int = 5) -> list[str]:
    """The terms that set ``texts`` apart from the other groups of texts, best first.

    Class-based TF-IDF (Grootendorst, BERTopic, arXiv 2203.05794, section 3.3): each group is one
    document; a term's frequency in ``texts`` times log(1 + A / f), f its frequency in all groups and
    A the mean number of terms a group. Weighted by the root of the share of texts that hold the
    term, so that one odd prompt names nothing. Of a long prompt only its instruction counts. Of terms
    with one stem only the best is kept.
    """
    groups = [[views(text)[-1] for text in group] for group in (texts, *others) if group]
    counter = CountVectorizer(lowercase=True, stop_words=_STOP_WORDS, token_pattern=_TERM)
    try:
        table = counter.fit_transform([text for group in groups for text in group])
    except ValueError:
        return []
    terms = counter.get_feature_names_out()
    ends = np.cumsum([len(group) for group in groups])
    totals = np.stack(
        [
            np.asarray(table[end - len(g) : end].sum(axis=0)).ravel()
            for g, end in zip(groups, ends, strict=True)
        ]
    )
    own = totals[0] / max(totals[0].sum(), 1)
    rarity = np.log1p(totals.sum(axis=1).mean() / np.maximum(totals.sum(axis=0), 1))
    share = np.asarray((table[: len(texts)] > 0).mean(axis=0)).ravel()
    scores = np.where(share >= _LEAST_SHARE, own * rarity * np.sqrt(share), 0.0)
    found: list[str] = []
    for index in np.argsort(-scores, kind="stable"):
        if scores[index] <= 0 or len(found) == count:
            break
        term = str(terms[index])
        if all(term[:_SAME_STEM] != other[:_SAME_STEM] for other in found):
            found.append(term)
    return found


def domain_name(terms: Sequence[str], taken: Collection[str]) -> str:
    """A valid, unused domain name from the two best terms, such as ``recipe-cook``."""
    stem = re.sub(r"[^a-z0-9]+", "-", "-".join(terms[:2]).lower()).strip("-")[:48].strip("-") or _FALLBACK
    if stem not in taken:
        return stem
    number = 2
    while f"{stem}-{number}" in taken:
        number += 1
    return f"{stem}-{number}"
