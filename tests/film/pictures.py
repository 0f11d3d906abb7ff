"""Write the pictures of wiki/Film.md, which are screenshots of its presets.

python -m tests.film.pictures          into wiki/, with Chromium
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from tests.docs.pages import ROOT
from tests.film.chromium import find_chromium, take_screenshot
from tests.film.presets import film_page

DARK = "--blink-settings=preferredColorScheme=0"
SETTLED = "--virtual-time-budget=2000"


class Picture(NamedTuple):
    """A screenshot of a film at an address, of this width and height."""

    file: str
    film: str
    fragment: str
    size: tuple[int, int]
    flags: tuple[str, ...] = ()


PICTURES = (
    Picture("film.png", "thrash", "at=491&seq=15", (1100, 1200)),
    Picture("film-two.png", "two", "at=13&seq=1", (700, 1060), (DARK,)),
    Picture("film-versus.png", "budget", "at=48&seq=4", (1100, 1250)),
)


def main() -> int:
    """Write the pictures. Returns 1 without Chromium."""
    chromium = find_chromium()
    if chromium is None:
        print("there is no Chromium: apt-get install chromium, or set FORGE_CHROMIUM")
        return 1
    with TemporaryDirectory() as folder:
        for picture in PICTURES:
            page = Path(folder, f"{picture.film}.html")
            page.write_text(film_page(picture.film), encoding="utf-8")
            target = ROOT / "wiki" / picture.file
            address = f"{page.as_uri()}#{picture.fragment}"
            profile = Path(folder, "profile")
            take_screenshot(
                chromium, address, target, profile, picture.size, SETTLED, *picture.flags
            )
            print(f"{target.relative_to(ROOT)}  {target.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
