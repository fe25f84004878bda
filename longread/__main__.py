"""`python -m longread`: the same program as the console script."""

from __future__ import annotations

import sys

from longread.cli import main

sys.exit(main())
