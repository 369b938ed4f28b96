# SPDX-License-Identifier: Apache-2.0
"""The one place that hooks into transformers' attention interface.

transformers' models ask `AttentionInterface.get_interface(name, default)` for their attention function in every
forward. Registering another function would need a new name, under which masks, checks and the eager default are lost;
so the method itself is wrapped, once, and hands out the function it would have, behind an observer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

Observer = Callable[[str, Any, Any, Any, Any, dict[str, Any]], Any]
_observers: list[Observer] = []
_wrappers: dict[tuple[str, Callable[..., Any]], Callable[..., Any]] = {}  # one per attention function of transformers


def observe_attention(observer: Observer) -> Callable[[], None]:
    """Call `observer(name, module, query, key, mask, options)` before each attention of any transformers model.

    Args:
        observer: `name` is the attention implementation; query (B, H, L, d) and key (B, KV, S, d) carry their
            positions; `mask` is what the function gets; `options` are its keywords. What it returns, unless that is
            None, takes the place of `query`.

    Returns:
        A function that ends it.
    """
    _install()
    _observers.append(observer)
    return lambda: _observers.remove(observer) if observer in _observers else None


@functools.cache
def _install() -> None:
    from transformers.modeling_utils import AttentionInterface

    original = AttentionInterface.get_interface

    @functools.wraps(original)
    def get_interface(self: Any, attn_implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        function = original(self, attn_implementation, default)
        return _observed(attn_implementation, function) if _observers else function

    AttentionInterface.get_interface = get_interface


def _observed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same wrapper each time; not by a cache of functools, which torch.compile warns about."""
    key = (name, function)
    if key not in _wrappers:
        _wrappers[key] = _wrap(name, function)
    return _wrappers[key]


def _wrap(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def attention(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any, **options: Any
    ) -> Any:
        for observer in tuple(_observers):
            other = observer(name, module, query, key, attention_mask, options)
            query = query if other is None else other
        return function(module, query, key, value, attention_mask, *args, **options)

    return attention
