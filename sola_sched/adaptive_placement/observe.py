"""What has come of each service's requests: counts of its engines, by their `/metrics`."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

#: For the whole of an answer: nobody holds the controller by sending it bit by bit.
LIMIT_S = 5.0
#: Counters of an engine, by what they are called here.
_SAMPLES = {
    "vllm:request_prompt_tokens_count": "requests",
    "vllm:request_prompt_tokens_sum": "prompt_tokens",
    "vllm:request_generation_tokens_sum": "output_tokens",
}


@dataclass(frozen=True)
class Observed:
    """One service between two readings.

    Attributes:
        num_requests: That ended.
        num_met, num_judged: That met their targets, of those that were not aborted.
        mean_prompt, mean_output: Tokens; 0 without requests.
        span_s: Seconds in which that was; None where no reading is known before.
    """

    num_requests: float = 0.0
    num_met: float = 0.0
    num_judged: float = 0.0
    mean_prompt: float = 0.0
    mean_output: float = 0.0
    span_s: float | None = None


def fetch(url: str) -> str:
    """The text at a URL.

    Raises:
        OSError: It is not to be had.
    """
    try:
        return asyncio.run(_get(url))
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise OSError(f"no text is to be had at {url} ({error!r})") from error


async def _get(url: str) -> str:
    timeout = aiohttp.ClientTimeout(total=LIMIT_S)
    async with (
        aiohttp.ClientSession(timeout=timeout, raise_for_status=True) as session,
        session.get(url) as answer,
    ):
        return await answer.text()


class Observer:
    """Reads the counters of all engines; an interval is the difference of two readings.

    An engine's counters begin at 0 when it starts. So the whole count of a new engine belongs to
    the interval in which it is first read. This does not hold for a service that was there already
    at the first look but did not answer: nobody knows over which time its engines have counted, so
    its first reading is only what the next one is compared with. What an engine counts between the
    last reading and its end is lost.

    A service is read as a whole: if one of its engines does not answer, this reading is dropped,
    and the next one gives the difference to the last whole reading, over all the time between them.

    Args:
        fetch: Gets a text.
        clock: Seconds.
    """

    def __init__(
        self, fetch: Callable[[str], str] = fetch, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._fetch, self._clock = fetch, clock
        #: By URL.
        self._last: dict[str, dict[str, float]] = {}
        #: When each service was read last, or began.
        self._since_s: dict[str, float] = {}
        #: Services that were there at the first look and have not been read yet.
        self._silent: set[str] = set()

    def begin(self, services: Iterable[str]) -> None:
        """From now on there are these services; those that are new are counted from now on."""
        names = set(services)
        now_s = self._clock()
        for gone in set(self._since_s) - names:
            del self._since_s[gone]
        for name in names:
            self._since_s.setdefault(name, now_s)

    def since_last(self, gateways: Mapping[str, str]) -> dict[str, Observed]:
        """Each service since the reading of it before.

        Args:
            gateways: URLs of the services' gateways.

        Returns:
            By service; one whose gateway or one of whose engines does not answer is left out:
            what is known of it would look like less load. So is one of whose engines nothing is
            known to compare with.
        """
        found: dict[str, Observed] = {}
        for service, gateway in gateways.items():
            now_s = self._clock()
            readings = self._readings(gateway)
            if readings is None:
                if service not in self._since_s:
                    self._silent.add(service)
                continue
            total: dict[str, float] = {}
            is_known = True
            for url, now in readings.items():
                is_known = is_known and (url in self._last or service not in self._silent)
                before = self._last.get(url, {})
                self._last[url] = now
                for name, value in now.items():
                    known = before.get(name, 0.0)
                    # A counter that has fallen is that of an engine that has started anew.
                    new = value - known if value >= known else value
                    total[name] = total.get(name, 0.0) + new
            since_s = self._since_s.get(service)
            self._since_s[service] = now_s
            self._silent.discard(service)
            if is_known:
                found[service] = _observed(total, None if since_s is None else now_s - since_s)
        return found

    def _readings(self, gateway: str) -> dict[str, dict[str, float]] | None:
        """Counters of each engine behind a gateway; None if that or one of them does not answer."""
        try:
            urls = _urls(self._fetch(f"{gateway}/replicas"))
            return {url: counts(self._fetch(f"{url}/metrics")) for url in urls}
        except (OSError, ValueError):
            return None


def counts(text: str) -> dict[str, float]:
    """Counters of one engine from the text of its `/metrics`.

    Raises:
        ValueError: It is no such text, or a counter has no value that one can have.
    """
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if (name := _SAMPLES.get(sample.name)) is not None:
                found[name] = found.get(name, 0.0) + sample.value
            elif sample.name == "sola_requests_total" and "outcome" in sample.labels:
                outcome = sample.labels["outcome"]
                found[outcome] = found.get(outcome, 0.0) + sample.value
    if not all(0.0 <= value < math.inf for value in found.values()):
        raise ValueError(f"counters must be finite numbers >= 0 (got {found})")
    return found


def _urls(text: str) -> list[str]:
    """URLs of the engines from the text of a gateway's `/replicas`.

    Raises:
        ValueError: It is no such text.
    """
    try:
        return [str(one["url"]) for one in json.loads(text)]
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"replicas must be a list of objects with 'url' ({error!r})") from error


def _observed(total: Mapping[str, float], span_s: float | None) -> Observed:
    num = total.get("requests", 0.0)
    met = total.get("attained", 0.0)
    return Observed(
        num_requests=num,
        num_met=met,
        num_judged=met + total.get("missed", 0.0) + total.get("rejected", 0.0),
        mean_prompt=total.get("prompt_tokens", 0.0) / num if num else 0.0,
        mean_output=total.get("output_tokens", 0.0) / num if num else 0.0,
        span_s=span_s,
    )
