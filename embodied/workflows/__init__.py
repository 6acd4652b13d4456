"""Declared workflows: components, edges, loop (docs/workflows.md)."""

from embodied.workflows.recipes import GRPO, PPO, RECIPES, Recipe, WorkflowComponent, passing, recipe_of

__all__ = ["GRPO", "PPO", "RECIPES", "Recipe", "WorkflowComponent", "passing", "recipe_of"]
