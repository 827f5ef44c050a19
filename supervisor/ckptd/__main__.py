"""`python -m ckptd` is the command `ckptd`."""

import sys

from ckptd.cli import main

sys.exit(main())
