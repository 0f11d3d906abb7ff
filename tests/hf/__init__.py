"""Tests of Hugging Face models."""
