"""Tests of imports, packages and images."""
