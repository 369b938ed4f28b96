# SPDX-License-Identifier: Apache-2.0
"""MBPP and MBPP+ rows in their public layouts, as programs with checks.

Layouts: google-research `mbpp.jsonl` (text, code, test_list, test_setup_code), its sanitized form and
`evalplus/mbppplus` (prompt, code, test_list, test_imports, test), and the files of evalplus (prompt, entry_point,
canonical_solution, base_input, plus_input, atol, assertion).
"""

from __future__ import annotations

import ast
from typing import Any

from .prompts import instruction_prompt, programming_question
from .rows import DataError, EvalRow, require_columns, text_field
from .sandbox.launcher import Program


def mbpp_row(place: str, row: dict[str, Any], *, plus: bool) -> EvalRow:
    """Return one task.

    Args:
        place: where the row stands, for messages.
        row: the parsed object.
        plus: test with the inputs of MBPP+ as well.

    Raises:
        DataError: a column is missing or of the wrong kind.
    """
    require_columns(place, list(row), ["task_id"])
    identity = row["task_id"]
    if isinstance(identity, bool) or not isinstance(identity, (int, str)):
        raise DataError(f"{place} must hold a number or text in 'task_id'; got {identity!r:.60}.")
    text = text_field(place, row, "text" if "text" in row else "prompt")
    if "entry_point" in row:
        program, example = _evalplus(place, row, plus)
    else:
        program, example = _listed(place, row, plus)
    return EvalRow(identity, instruction_prompt(programming_question(text, example)), program)


def _listed(place: str, row: dict[str, Any], plus: bool) -> tuple[Program, str]:
    tests = _lines(place, row, "test_list")
    if not tests:
        raise DataError(f"{place} must hold at least one assertion in 'test_list'; got none.")
    if plus:
        require_columns(place, list(row), ["test"])
    imports = "\n".join(_lines(place, row, "test_imports") if "test_imports" in row else [])
    # After the program: the set-up may use its classes, and its own imports must not hide those of the tests.
    before = text_field(place, row, "test_setup_code") if row.get("test_setup_code") else ""
    checks = [imports, before, *tests, *([text_field(place, row, "test")] if plus else [])]
    return Program(source="", setup=imports, checks=tuple(filter(None, checks))), tests[0]


def _lines(place: str, row: dict[str, Any], name: str) -> list[str]:
    require_columns(place, list(row), [name])
    lines = row[name]
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise DataError(f"{place} must hold a list of texts in {name!r}; got {lines!r:.60}.")
    return lines


def _evalplus(place: str, row: dict[str, Any], plus: bool) -> tuple[Program, str]:
    function = text_field(place, row, "entry_point")
    reference = text_field(place, row, "canonical_solution")
    assertion = row.get("assertion") or ""
    examples = _calls(assertion, function)
    inputs = []
    for name in ("base_input", "plus_input") if plus else ("base_input",):
        require_columns(place, list(row), [name])
        if not isinstance(row[name], list) or not all(isinstance(item, list) for item in row[name]):
            raise DataError(f"{place} must hold a list of argument lists in {name!r}; got {row[name]!r:.60}.")
        inputs += [_like(item, [arguments for arguments, _ in examples]) for item in row[name]]
    tolerance = row.get("atol", 0)
    if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)):
        raise DataError(f"{place} must hold a number in 'atol'; got {tolerance!r:.60}.")
    program = Program(
        source="", function=function, inputs=tuple(inputs), reference=reference, tolerance=float(tolerance)
    )
    return program, examples[0][1] if examples else f"The function is named {function}."


def _calls(assertion: str, function: str) -> list[tuple[list[Any], str]]:
    """Return the literal arguments of each call of `function` and the statement that holds it."""
    found = []
    try:
        statements = ast.parse(assertion).body
    except SyntaxError:
        return []
    for statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == function:
                try:
                    found.append(([ast.literal_eval(argument) for argument in node.args], ast.unparse(statement)))
                except ValueError:
                    continue
    return found


def _like(value: Any, examples: list[Any]) -> Any:
    """Give JSON back the tuples, sets and complex numbers that it cannot hold, as the task's own assertions show.

    A container becomes what the containers at the same place are in the examples, if they all agree.
    """
    if isinstance(value, dict):
        inner = [item for example in examples if isinstance(example, dict) for item in example.values()]
        return {key: _like(item, inner) for key, item in value.items()}
    if not isinstance(value, list):
        kinds = {type(example) for example in examples}
        return complex(value) if kinds == {complex} and isinstance(value, (str, int, float)) else value
    containers = [example for example in examples if isinstance(example, (list, tuple, set, frozenset))]
    kinds = {type(example) for example in containers}
    ordered = [example for example in containers if isinstance(example, (list, tuple))]
    same_length = bool(ordered) and all(len(example) == len(value) for example in ordered)
    items = []
    for position, item in enumerate(value):
        # Fixed shapes (argument lists, pairs) go by position, lists of any length by their items together.
        inner = [example[position] for example in ordered] if same_length else []
        inner = inner or [element for example in containers for element in example]
        items.append(_like(item, inner))
    kind = kinds.pop() if len(kinds) == 1 else list
    return kind(items)
