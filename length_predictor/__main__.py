import sys

from sola_sched.config.program import main_of, run

if __name__ == "__main__":
    sys.exit(run(main_of("sola_sched.length_predictor.cli")))
