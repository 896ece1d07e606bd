"""Lets `python -m jaxcmle` run the command line."""

import sys

from jaxcmle.apps.cli import main

if __name__ == "__main__":
    sys.exit(main())
