"""`python -m nsa.testing.report`."""

import sys

from nsa.testing.report.pages import main

sys.exit(main())
