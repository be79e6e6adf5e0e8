import sys

from sola_sched.plan.cli import main

if __name__ == "__main__":
    sys.exit(main())
