# SPDX-License-Identifier: Apache-2.0
"""Recipes: the schema of their YAML, where they are found, and how overrides are applied."""

from .loading import find_recipe, list_recipes, load_recipe
from .schema import Recipe

__all__ = ["Recipe", "find_recipe", "list_recipes", "load_recipe"]
