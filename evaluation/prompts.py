# SPDX-License-Identifier: Apache-2.0
"""The prompt that the recipes train on and the evaluation asks with: one place, so that the two cannot differ."""

from __future__ import annotations

from collections.abc import Sequence

LETTERS = "ABCD"


def instruction_prompt(question: str, given: str = "") -> str:
    """Return the published prompt; the answer follows it directly.

    Args:
        question: the instruction.
        given: input that the instruction talks about; its section is left out where it is empty.
    """
    middle = f"### Input:\n{given}\n\n" if given else ""
    return f"### Instruction:\n{question}\n\n{middle}### Response:\n"


def multiple_choice_question(question: str, choices: Sequence[str]) -> str:
    """Return an MMLU question with its lettered choices and the request for one letter."""
    lines = [f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=True)]
    return "\n".join([question, *lines, "Answer with the letter of the correct choice."])


def programming_question(text: str, example: str = "") -> str:
    """Return an MBPP problem: its text, and one assertion that shows the function's name and arguments."""
    text = text.strip()
    for quotes in ("'''", '"""'):  # the layouts of MBPP+ wrap the text as a docstring
        if text.startswith(quotes) and text.endswith(quotes) and len(text) >= 6:
            text = text[3:-3].strip()
    return f"{text}\n{example.strip()}" if example.strip() and example.strip() not in text else text
