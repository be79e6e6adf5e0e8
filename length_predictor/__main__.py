"""`python -m sola_sched.length_predictor`."""

import sys

from sola_sched.length_predictor.cli import main

sys.exit(main())
