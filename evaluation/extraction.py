# SPDX-License-Identifier: Apache-2.0
"""What counts as the answer inside a completion, as published."""

from __future__ import annotations

import re

from .prompts import LETTERS

# A sign, an optional dollar, digits with thousands separators, an optional fraction.
_NUMBER = r"[-\u2212]?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
_MARKED = re.compile(rf"####\s*\$?({_NUMBER})")
_ANY = re.compile(_NUMBER)
# The marked number is complete once something follows that cannot continue it.
_MARKED_AND_OVER = re.compile(rf"####\s*\$?{_NUMBER}(?=[^\d.,]|[.,][^\d])")
_FENCE = re.compile(r"```(?:python|py)?[^\S\n]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)


def gsm8k_answer(completion: str) -> str | None:
    """Return the first number after `####`, else the last number of the text, normalised; None without any."""
    if marked := _MARKED.search(completion):
        return normalise_number(marked.group(1))
    numbers = _ANY.findall(completion)
    return normalise_number(numbers[-1]) if numbers else None


def gsm8k_is_decided(completion: str) -> bool:
    """Return whether more text can no longer change the answer."""
    return _MARKED_AND_OVER.search(completion) is not None


def normalise_number(text: str) -> str:
    """Return a number without thousands separators, currency sign and final period; compared as a string."""
    return text.strip().replace(",", "").replace("$", "").replace("\u2212", "-").rstrip(".")


def mmlu_letter(completion: str) -> str | None:
    """Return the first character that is A, B, C or D, wherever it stands: `Answer: B` reads as A."""
    return next((character for character in completion if character in LETTERS), None)


def program_text(completion: str) -> str:
    """Return the first fenced block of a completion, or all of it."""
    fenced = _FENCE.search(completion)
    return fenced.group(1) if fenced else completion


def cut_at_stops(completion: str, stops: tuple[str, ...]) -> str:
    """Return the text before the first stop."""
    ends = [position for stop in stops if (position := completion.find(stop)) >= 0]
    return completion[: min(ends)] if ends else completion
