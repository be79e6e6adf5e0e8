"""`python -m sola_sched.serving`; what it does is in `cli`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from sola_sched.config.program import run


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line, which is imported only now, for that takes a while."""
    from sola_sched.serving import cli

    cli.main(argv)


if __name__ == "__main__":
    sys.exit(run(main))
