"""`python -m millrace.cli` is `millrace`."""

import sys

from millrace.cli import main

sys.exit(main())
