"""Checks: one module for each exercise, named as its stub. Each has `check(module, seed)`."""
