"""The gateway's end of a replica's load feed: reports are pushed, a line each.

A server that is told `load_interval_s` answers `GET /sola/load` with a stream that does not end: a
line for each report of its scheduler, and an empty one each second, so that silence means
something. One that has no such path is routed to by what was sent to it alone; whether it computes
is seen from its answers, and where these take long from whether vLLM's own metrics change.
"""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus

import aiohttp

from sola_sched.cluster.unknown import ANY_STEPS
from sola_sched.cluster.view import InstanceView
from sola_sched.errors import ReportError
from sola_sched.reports.load_text import from_json
from sola_sched.serving.replicas import Replica, Replicas

logger = logging.getLogger(__name__)

LOAD_PATH = "/sola/load"
#: A feed that says nothing for so long has stopped; it speaks each second.
SILENT_S = 3.0
#: Pauses before it is asked again: one that cannot be reached, one that has no feed.
_AGAIN_S, _WITHOUT_S = 0.25, 10.0
#: The same for one whose feed ends before its first line: it is about to end.
_ENDING_S = 1.0
#: So often within `stall_s` the metrics of one that has shown nothing else are looked at.
_LOOKS = 4
#: vLLM's own metrics begin so; others change although its engine stands still.
_OF_ENGINE = b"vllm:"
_LONGEST_LINE = 2**24


async def follow(
    replica: Replica,
    replicas: Replicas,
    session: aiohttp.ClientSession,
    stall_s: float | None = None,
) -> None:
    """Take in a replica's reports, or see whether it computes, until cancelled.

    Args:
        replica: The one.
        replicas: Are told.
        session: Connections to it.
        stall_s: How long it may compute nothing; None where nobody looks for that.
    """
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=SILENT_S, sock_read=SILENT_S)
    while True:
        pause_s = _AGAIN_S
        try:
            async with session.get(
                replica.url + LOAD_PATH, timeout=timeout, read_bufsize=_LONGEST_LINE
            ) as reply:
                replica.has_feed = reply.status == HTTPStatus.OK
                replicas.found(replica)
                if replica.has_feed:
                    if not await _read(reply, replica, replicas):
                        replicas.began_anew(replica)
                        pause_s = _ENDING_S
                    # A server ends its feed as soon as it is told to end.
                    replicas.failed(replica, SILENT_S)
                else:
                    replicas.began_anew(replica)
                    pause_s = 0.0
            if not replica.has_feed:
                if stall_s is None:
                    pause_s = _WITHOUT_S
                else:
                    await _watch(replica, replicas, session, stall_s)
        except aiohttp.ClientConnectorError:
            if not replica.is_gone:
                logger.warning("replica %s is not to be reached at %s", replica.name, replica.url)
                replicas.lost(replica)
        except TimeoutError as error:
            logger.warning("replica %s does not answer: %r", replica.name, error)
            replicas.silent(replica)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            # It may be its end, or only the feed's: what runs there goes on until it fails.
            logger.warning("replica %s: the feed has stopped: %r", replica.name, error)
            replicas.failed(replica, SILENT_S)
        await asyncio.sleep(pause_s)


async def _watch(
    replica: Replica, replicas: Replicas, session: aiohttp.ClientSession, stall_s: float
) -> None:
    """For a while, look whether a replica without a feed computes what it has."""
    until_s = replicas.clock() + _WITHOUT_S
    look_s = stall_s / _LOOKS
    while (left_s := until_s - replicas.clock()) > 0.0:
        await asyncio.sleep(min(look_s, left_s))
        if not replica.attempts or replicas.clock() - replica.alive_s < look_s:
            continue
        counted = await _metrics(replica, session)
        if counted and replica.counted and counted != replica.counted:
            replicas.progressed(replica)
        replica.counted = counted


async def _metrics(replica: Replica, session: aiohttp.ClientSession) -> bytes:
    """What a replica's engine counts; empty where it does not tell."""
    replica.must_show = True  # if it does not answer either
    timeout = aiohttp.ClientTimeout(total=SILENT_S)
    async with session.get(replica.url + "/metrics", timeout=timeout) as reply:
        lines = (await reply.read()).splitlines()
    found = b"\n".join(line for line in lines if line.startswith(_OF_ENGINE))
    replica.must_show = bool(found)
    return found


async def _read(reply: aiohttp.ClientResponse, replica: Replica, replicas: Replicas) -> bool:
    """Take in a feed until it ends; whether a line has come."""
    is_first = True
    async for line in reply.content:
        if is_first and not line.strip():  # the last report comes first, where there is one
            replicas.began_anew(replica)
        is_first = False
        if line.strip() == b"!":  # it works, and its scheduler does not know with what
            replicas.progressed(replica)
            continue
        try:
            view = read_line(line, replicas.clock())
        except ReportError as error:
            replicas.ignore(replica, error)
            continue
        if view is not None:
            replicas.reported(replica, view)
    return not is_first


def read_line(line: bytes, now_s: float) -> InstanceView | None:
    """The view that a line of a feed describes; None for a sign of life.

    A line is the report's age in seconds, a space, and the load as JSON; or empty.

    Raises:
        ReportError: It is no line of a feed.
    """
    age, _, text = line.strip().partition(b" ")
    if not age:
        return None
    try:
        age_s = float(age)
    except ValueError:
        raise ReportError(
            f"a line of a feed must begin with the report's age, seconds (got {line[:80]!r})."
        ) from None
    load = from_json(text)
    load["model"] = load["model"] or ANY_STEPS
    return InstanceView(reported_s=now_s - age_s, **load)
