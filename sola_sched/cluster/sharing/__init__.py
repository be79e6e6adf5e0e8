"""Several services on one set of GPUs: SeaLLM (Zhao et al.), its placement and its turns.

A *service* is a model with its own requests and targets; a *sharing group* is a set of services
whose engines take turns on the same GPUs, one step at a time. Placement says who shares with whom
and on how many GPUs, and when to place anew; turn rules say whose step is next.
"""

from __future__ import annotations

from sola_sched.cluster.sharing.allocation import allocate, least_degree, partition
from sola_sched.cluster.sharing.exhaustive import search_exhaustively
from sola_sched.cluster.sharing.placement import Cluster, Group, Placement, check, gpus_of
from sola_sched.cluster.sharing.search import Found, Problem, search
from sola_sched.cluster.sharing.services import Service, by_name
from sola_sched.cluster.sharing.unserved import Score, ServiceOutcome, score, unserved_index

__all__ = [
    "Cluster",
    "Found",
    "Group",
    "Placement",
    "Problem",
    "Score",
    "Service",
    "ServiceOutcome",
    "allocate",
    "by_name",
    "check",
    "gpus_of",
    "least_degree",
    "partition",
    "score",
    "search",
    "search_exhaustively",
    "unserved_index",
]
