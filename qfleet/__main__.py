"""`python -m qfleet`."""

import sys

from qfleet.cli import main

sys.exit(main())
