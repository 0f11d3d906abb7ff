"""Measure an engine and fit a cost table to it."""
