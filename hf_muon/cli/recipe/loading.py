# SPDX-License-Identifier: Apache-2.0
"""Find a recipe, read its YAML strictly, apply `--tiny` and dotted overrides."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from ...config import nearest
from ..errors import UsageError
from ..resources import recipes_dir
from . import schema
from .schema import Recipe


class _Loader(yaml.SafeLoader):
    """YAML whose floats include `1e-3`, as people write them."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$"),
    list("-+0123456789."),
)


def list_recipes() -> list[Recipe]:
    """Return the shipped recipes, by name, `demo` first."""
    found = [load_recipe(path) for path in sorted(recipes_dir().glob("*.yaml"))]
    return sorted(found, key=lambda recipe: (recipe.name != "demo", recipe.name))


def find_recipe(name: str) -> Path:
    """Return the path of a recipe given by name or as a path to a YAML file.

    Raises:
        UsageError: there is no such recipe; the nearest name stands in the message.
    """
    shipped = {path.stem: path for path in recipes_dir().glob("*.yaml")}
    if name in shipped:
        return shipped[name]
    path = Path(name)
    if path.suffix in (".yaml", ".yml") or "/" in name:
        if path.is_file():
            return path
        raise UsageError(
            f"{name} is not a file. Give the path of a recipe YAML, or one of: {', '.join(sorted(shipped))}."
        )
    raise UsageError(f"{name!r} is not a recipe.{nearest(name, sorted(shipped))} `hf-muon recipes` lists them.")


def load_recipe(path: Path, overrides: Iterable[str] = (), *, tiny: bool = False) -> Recipe:
    """Read a recipe, apply its `tiny` block when asked, then the overrides, and check the result.

    Args:
        path: the YAML file.
        overrides: `block.key=value` strings; the value is read as YAML.
        tiny: apply the recipe's own `tiny:` block first.

    Raises:
        UsageError: the file is no recipe, or a block, key or value is unknown or out of range.
    """
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = (str(getattr(error, "problem", None) or error).splitlines() or [type(error).__name__])[0]
        raise UsageError(f"{path} must be a readable YAML file; got: {reason}.") from None
    if not isinstance(data, dict):
        raise UsageError(f"{path} must hold the blocks of a recipe; got {type(data).__name__}.")
    recipe = _build(Recipe, data, "")
    recipe.name = recipe.name or path.stem
    words = [_split(text) for text in overrides]
    _apply_variant(recipe, words)
    if tiny:
        if not recipe.tiny:
            raise UsageError(f"recipe {recipe.name!r} has no tiny: block, so --tiny does not apply. Leave it out.")
        for key, value in recipe.tiny.items():
            _assign(recipe, key, value)
    for key, value in words:
        if key != "variant":
            _assign(recipe, key, _parse(key, value))
    recipe.check()
    return recipe


def _split(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"an override must read block.key=value; got {text!r}.")
    return key.strip(), value


def _apply_variant(recipe: Recipe, words: list[tuple[str, str]]) -> None:
    """Apply the dotted overrides of `variant=NAME`; the name stays in the resolved recipe."""
    for name in (value for key, value in words if key == "variant"):
        if name not in recipe.variants:
            known = sorted(recipe.variants)
            listed = f"one of {', '.join(known)}" if known else f"left out, recipe {recipe.name!r} has none"
            raise UsageError(f"variant must be {listed}; got {name!r}.{nearest(name, known)}")
        if not isinstance(recipe.variants[name], dict):
            raise UsageError(f"variants.{name} must be a block of dotted keys; got {recipe.variants[name]!r}.")
        for key, value in recipe.variants[name].items():
            _assign(recipe, key, value)
        recipe.variant = name


def write_recipe(recipe: Recipe, path: Path) -> None:
    """Write the resolved recipe; `hf-muon run <path>` repeats the run."""
    header = (
        f"# The resolved recipe of a run of hf-muon; `hf-muon run {path.name}` in this folder repeats it.\n"
        f"# {recipe.title}\n"
    )
    body = yaml.safe_dump(recipe.to_dict(), sort_keys=False, allow_unicode=True, width=100)
    path.write_text(header + body, encoding="utf-8")


def _parse(key: str, value: str) -> Any:
    try:
        return yaml.load(value, Loader=_Loader)
    except (ValueError, RecursionError, yaml.YAMLError):
        raise UsageError(f"{key} must be a YAML value such as 3, 1e-3, true or [1, 2]; got {value!r}.") from None


def _assign(recipe: Recipe, key: str, value: Any) -> None:
    blocks = [f.name for f in dataclasses.fields(Recipe) if f.name not in ("tiny", "name", "variants", "variant")]
    if not isinstance(key, str):
        raise UsageError(f"a key of tiny or of a variant must read block.key; got {key!r}.")
    block, dot, inner = key.partition(".")
    if block not in blocks:
        raise UsageError(f"{block!r} is not a block of a recipe.{nearest(block, blocks)}")
    if block == "optimizer" and dot:
        recipe.optimizer = {**recipe.optimizer, inner: value}
        return
    target = getattr(recipe, block)
    if not dataclasses.is_dataclass(target):
        if dot:
            raise UsageError(f"{key!r} is not a key of a recipe: {block} holds no keys.")
        setattr(recipe, block, _coerce(_hints(Recipe)[block], value, key))
        return
    keys = [f.name for f in dataclasses.fields(target)]
    if inner not in keys:
        raise UsageError(f"{key!r} is not a key of a recipe.{nearest(key, [f'{block}.{name}' for name in keys])}")
    setattr(target, inner, _coerce(_hints(type(target))[inner], value, key))


def _build(cls: type, data: Mapping[str, Any], prefix: str) -> Any:
    known = [f.name for f in dataclasses.fields(cls)]
    values = {}
    for key, value in data.items():
        full = f"{prefix}{key}"
        if key not in known:
            kind = "key" if prefix else "block"
            raise UsageError(f"{full!r} is not a {kind} of a recipe.{nearest(key, known)}")
        hint = _hints(cls)[key]
        if dataclasses.is_dataclass(hint):
            if not isinstance(value, dict):
                raise UsageError(f"{full} must be a block of keys; got {value!r}.")
            values[key] = _build(typing.cast(type, hint), value, f"{full}.")
        else:
            values[key] = _coerce(hint, value, full)
    return cls(**values)


def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls, vars(schema))


_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def _coerce(hint: Any, value: Any, key: str) -> Any:
    """Check one value against its type; whole numbers are numbers, nothing else is converted."""
    origin = typing.get_origin(hint) or hint
    if origin is list:
        (item,) = typing.get_args(hint)
        if not isinstance(value, list):
            raise UsageError(f"{key} must be a list such as [1, 2]; got {value!r}.")
        return [_coerce(item, entry, key) for entry in value]
    if origin is dict:
        if not isinstance(value, dict):
            raise UsageError(f"{key} must be a block of keys; got {value!r}.")
        return dict(value)
    if origin is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise UsageError(
                f"{key} must be a number that fits a float; got one of {len(str(value))} digits."
            ) from None
    if not isinstance(value, origin) or (isinstance(value, bool) and origin is not bool):
        raise UsageError(f"{key} must be {_WORDS[origin]}; got {value!r}.")
    return value
