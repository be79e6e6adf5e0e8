"""What a server's `/metrics` says at one moment."""

from __future__ import annotations

import http.client
import math
import re
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sola_sched.errors import ConfigError

_TIMEOUT_S = 5.0
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)(?: \d+)?$", re.M)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(r"\\(.)")

Labels = Mapping[str, str]


@dataclass(frozen=True)
class Metrics:
    """Samples by name.

    Attributes:
        samples: Labels and value of each.
    """

    samples: Mapping[str, list[tuple[Labels, float]]]

    @classmethod
    def of(cls, text: str) -> Metrics:
        """Those of ours and of vLLM in Prometheus' text form; what cannot be read is left out."""
        samples: dict[str, list[tuple[Labels, float]]] = defaultdict(list)
        for name, labels, value in _SAMPLE.findall(text):
            if name.startswith(("sola_", "vllm:")):
                try:
                    number = float(value)
                except ValueError:
                    continue
                if not math.isfinite(number):  # as of a gauge that nothing has set
                    continue
                pairs = {key: _ESCAPE.sub(_unescaped, each) for key, each in _LABEL.findall(labels)}
                samples[name].append((pairs, number))
        return cls(dict(samples))

    def _matching(self, name: str, labels: Labels) -> Iterator[tuple[Labels, float]]:
        for found, value in self.samples.get(name, ()):
            if all(found.get(key) == wanted for key, wanted in labels.items()):
                yield found, value

    def total(self, name: str, **labels: str) -> float:
        """Sum of the samples with these labels; 0 without any."""
        return sum(value for _, value in self._matching(name, labels))

    def most(self, name: str, **labels: str) -> float:
        """The largest of them; 0 without any."""
        return max((value for _, value in self._matching(name, labels)), default=0.0)

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Sums by the values of a label."""
        sums: dict[str, float] = defaultdict(float)
        for found, value in self._matching(name, labels):
            sums[found.get(label, "")] += value
        return dict(sums)


def _unescaped(found: re.Match[str]) -> str:
    return "\n" if found[1] == "n" else found[1]


def fetch(url: str) -> Metrics:
    """What a server says now.

    Raises:
        ConfigError: It cannot be reached, or has no metrics of ours.
    """
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=_TIMEOUT_S) as response:
            metrics = Metrics.of(response.read().decode("utf-8", "replace"))
    except urllib.error.HTTPError as error:
        raise ConfigError(f"/metrics is answered with HTTP {error.code}") from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise ConfigError(f"cannot be reached ({reason})") from error
    if "sola_steps_planned_total" not in metrics.samples:
        raise ConfigError("has no metrics of sola_sched")
    return metrics
