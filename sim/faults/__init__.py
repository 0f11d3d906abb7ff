"""Random operations and injected failures, with an independent oracle."""
