"""`python -m strata_pa` is the command `strata-pa`."""

import sys

from .cli import main

sys.exit(main())
