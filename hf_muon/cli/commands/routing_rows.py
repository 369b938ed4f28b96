# SPDX-License-Identifier: Apache-2.0
"""Fold the rows of equal layers into one, so that a routing table fits on a screen."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def fold_layers(parameters: Iterable[Mapping[str, Any]]) -> list[tuple[str, list[int], str, str]]:
    """Return (name, shape, algorithm, rule) rows; `layers.{0-35}` stands for 36 layers that agree.

    Rows are folded when their names differ in layer numbers alone and everything else is equal.
    """
    groups: dict[tuple[Any, ...], list[str]] = {}
    for row in parameters:
        key = (_NUMBER.sub("*", row["name"]), tuple(row["shape"]), row["algorithm"], row["rule"])
        groups.setdefault(key, []).append(row["name"])
    return [(_fold(names), list(key[1]), key[2], key[3]) for key, names in groups.items()]


def _fold(names: list[str]) -> str:
    if len(names) == 1:
        return names[0]
    columns = list(zip(*(map(int, _NUMBER.findall(name)) for name in names), strict=True))
    ranges = iter([_range(sorted(set(column))) for column in columns])
    return _NUMBER.sub(lambda _: next(ranges), names[0])


def _range(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    pieces: list[str] = []
    start = previous = numbers[0]
    for number in [*numbers[1:], None]:
        if number is not None and number == previous + 1:
            previous = number
            continue
        pieces.append(str(start) if start == previous else f"{start}-{previous}")
        if number is not None:
            start = previous = number
    return "{" + ",".join(pieces) + "}"
