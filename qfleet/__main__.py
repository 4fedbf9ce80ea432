"""`python -m qfleet`."""

import os
import sys

# Python has put the current folder first: a file there would stand in for a module of the same name. Environments that
# the user names are found by their own path.
if not sys.flags.safe_path and sys.path and sys.path[0] in ("", os.getcwd()):
    del sys.path[0]

from qfleet.cli import main

sys.exit(main())
