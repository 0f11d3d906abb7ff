"""Text that is held back while it may begin a marker. Knows no format."""

from __future__ import annotations


def partial_length(text: str, marker: str) -> int:
    """Return the length of the longest end of the text that the marker may continue."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
