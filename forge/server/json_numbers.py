"""Numbers of JSON as numbers of Python, which are bounded while those of JSON are not.

Owns the nearest number. Knows no field.

    4e744                   1.7976931348623157e+308
    - and 5,000 digits     -1.7976931348623157e+308
"""

from __future__ import annotations

import sys


def parse_float(text: str) -> float:
    """Return the finite float that is nearest to the number."""
    largest = sys.float_info.max
    return min(max(float(text), -largest), largest)


def parse_int(text: str) -> int | float:
    """Return the integer, or the nearest float where it has too many digits for Python."""
    try:
        return int(text)
    except ValueError:
        return parse_float(text)
