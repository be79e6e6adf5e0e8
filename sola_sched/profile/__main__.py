import sys

from sola_sched.profile.measure import main

if __name__ == "__main__":
    sys.exit(main())
