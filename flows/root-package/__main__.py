"""Run the command line with `python -m rheostat`."""

import sys

from rheostat.flows.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
