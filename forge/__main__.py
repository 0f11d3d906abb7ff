"""`python -m forge` is `forge`."""

from __future__ import annotations

import sys

from forge.cli import main

sys.exit(main())
