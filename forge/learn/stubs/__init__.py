"""Stubs: what a learner begins with. Each is copied as it is, and its docstring is the task."""
