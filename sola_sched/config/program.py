"""How each command ends: by Ctrl-C, where nobody reads on, and where letters cannot be written."""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Callable

EXIT_INTERRUPTED = 130
#: As of a program that SIGPIPE ends.
EXIT_UNREAD = 141


def main_of(module: str) -> Callable[[], int | None]:
    """The `main` of a module, which is imported when it is called, for that takes a while."""

    def main() -> int | None:
        code: int | None = importlib.import_module(module).main()
        return code

    return main


def run(main: Callable[[], int | None]) -> int:
    """Run a command; return its exit code.

    Ctrl-C is one line and 130. A reader that leaves, as `head` does, ends it in silence. Letters
    that the terminal's encoding lacks are written as their numbers.

    Args:
        main: Reads the command line.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            code = main()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # at Python's own end nothing could be done about its errors
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # What is still to be written goes nowhere, so that Python's own end does not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_UNREAD
    return code or 0
