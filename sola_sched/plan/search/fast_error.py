"""How far off the fast model was where the real schedulers ran too: for plans without a check."""

from __future__ import annotations

#: Attainment of the fast model less that of the real schedulers, one model; as the heads of
#: docs/results/cluster-*.md have it, of runs on clusters below and past saturation.
OF_ONE_MODEL = (
    "vLLM +0.3 points on average, 16.7 at most (297 runs); "
    "`sola_sched` +2.8 points on average, 11.2 at most (297 runs)"
)
#: The same where services share a GPU by least slack (docs/results/sharing-real.md).
OF_SERVICES = "+4.4 points (from -1.4 to +23.5)"


def unchecked(error: str) -> str:
    """A sentence for a result that no real scheduler has confirmed.

    Args:
        error: One of the above.
    """
    return (
        "Not checked with the real schedulers: this rests on the fast model. Where both were run, "
        f"its attainment was off by: {error}."
    )
