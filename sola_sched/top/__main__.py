import sys

from sola_sched.config.program import run


def main() -> int:
    """Import what the command needs, which takes a while, and run it."""
    from sola_sched.top.cli import main

    return main()


if __name__ == "__main__":
    sys.exit(run(main))
