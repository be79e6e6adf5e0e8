"""Names that the processes of a soak share."""

from __future__ import annotations

#: Variables of the environment: where processes write what they hold, and their name there.
FOLDER, ROLE = "SOAK_FOLDER", "SOAK_ROLE"
#: Paths of `middleware.Driven`.
START, SESSION, PAUSE, RESET = "/soak/start", "/soak/session", "/soak/pause", "/soak/reset"
#: What has the stream of a request cut, see `tests/helpers/cutting.py`.
CUT_HEADER = "x-cut-after"
