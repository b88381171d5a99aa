"""`python -m nsa.testing.compile`."""

import sys

from nsa.testing.compile.matrix import main

sys.exit(main())
