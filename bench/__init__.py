"""Benchmarks. Each prints a table and writes a JSON record with machine, versions and command."""

if __name__ != "forge.bench":
    raise ImportError("the benchmarks are the package forge.bench: import forge.bench, not bench")
