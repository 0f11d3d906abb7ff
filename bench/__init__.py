"""Benchmarks. Each prints a table and writes one JSON record with machine, versions and command."""
