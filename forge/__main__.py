"""Run the command line: `python -m forge` is `forge`."""

from __future__ import annotations

import sys

from forge_llm_engine import main

sys.exit(main())
