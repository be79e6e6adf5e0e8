"""`python -m sola_sched.length_predictor`."""

import sys

from sola_sched.config.program import run
from sola_sched.length_predictor.cli import main

sys.exit(run(main))
