"""The gateway of the soak, which says what it holds; arguments of `sola_sched.serving`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from soak import census
from soak.paths import FOLDER

if __name__ == "__main__":
    from sola_sched.serving.__main__ import main

    census.start(Path(os.environ[FOLDER]), "gateway")
    main(sys.argv[1:])
