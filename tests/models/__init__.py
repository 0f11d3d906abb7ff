"""Tests of models that need no torch."""
