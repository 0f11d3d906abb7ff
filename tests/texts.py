"""Characters for hypothesis that need no table of what an encoding has.

`st.text()` and `st.characters(codec="utf-8")` read such a table. In a clean clone each process that
runs tests makes it first, which takes three seconds.
"""

from __future__ import annotations

from hypothesis import strategies as st

SURROGATES = range(0xD800, 0xE000)
"""Code points that UTF-8 does not have."""


def _outside_surrogates(index: int) -> str:
    return chr(index if index < SURROGATES.start else index + len(SURROGATES))


ANY_CHARACTER = st.one_of(
    st.integers(0, 127).map(chr),
    st.integers(0, 0x10FFFF - len(SURROGATES)).map(_outside_surrogates),
)
"""Any character that UTF-8 has. More than half are ASCII."""
