"""Tests of HuggingFace models."""
