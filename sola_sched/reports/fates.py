"""What became of requests, as it leaves the engine core and as people and programs read it."""

from __future__ import annotations

import base64
import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from sola_sched.core.fates import ENDS, FATE, Ended, printable, shown_id
from sola_sched.cost.model import CostModel

#: Of a fate, by the place of the shortage in `waited_s`.
WAITED = ("waited_for_slot_s", "waited_for_memory_s", "waited_for_time_s")
_END_BY_ITSELF = ("attained", "missed")
#: Characters of an id that are looked for in others: these keep so many, and vLLM's beginning.
_MOST_SOUGHT = 200
_NOT_LATE = ("attained", "aborted")
#: Times that step times tell; 0 while these are being learned.
_BY_STEP_TIMES = ("alone_s", "alone_step_s")


def to_report(ended: Ended) -> dict[str, Any]:
    """The form in which requests that have ended leave the engine core: a JSON object."""
    data = base64.b64encode(ended.records.tobytes()).decode()
    return {"ids": ended.req_ids, "classes": ended.slo_classes, "data": data}


def from_report(report: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The fates in a report that `to_report` made, each as in `fate_of`."""
    records = np.frombuffer(base64.b64decode(report["data"]), FATE)
    return fates_of(Ended(report["ids"], report["classes"], records))


def fates_of(ended: Ended) -> Iterator[dict[str, Any]]:
    """Requests that have ended, each as in `fate_of`."""
    for name, slo_class, record in zip(
        ended.req_ids, ended.slo_classes, ended.records, strict=True
    ):
        yield fate_of(name, slo_class, record)


def fate_of(req_id: str, slo_class: str, record: Any) -> dict[str, Any]:
    """One request as a JSON object: the fields of `FATE`, null for what there is not.

    Besides: `request_id`, `slo_class`, the `end` by name, `waited_s` by shortage (`WAITED`), and
    `missed`, the targets that were missed.
    """
    fate: dict[str, Any] = {"request_id": req_id, "slo_class": slo_class}
    for name in FATE.names or ():
        if name != "waited_s":
            value = record[name].item()
            is_known = math.isfinite(value) and (value > 0.0 or name not in _BY_STEP_TIMES)
            fate[name] = value if is_known else None
    fate["end"] = ENDS[fate["end"]]
    fate |= dict(zip(WAITED, record["waited_s"].tolist(), strict=True))
    fate["missed"] = missed(fate)
    return fate


#: Options of ours that mean nothing to the same requests in virtual time.
_OF_THIS_MACHINE = (
    "profile", "predictor", "predictor_path", "predictor_save_s", "predictor_encoder", "swap",
    "turns", "steer", "log_interval_s", "log_missed", "load_interval_s", "plan_limit_s",
)  # fmt: skip


def engine_facts(
    cost: CostModel, engine_args: Mapping[str, Any], options: Mapping[str, Any]
) -> dict[str, Any] | None:
    """What is needed to serve the requests of an engine again in virtual time.

    Args:
        cost: Its step times.
        engine_args: vLLM's engine arguments that a simulated engine takes.
        options: Those of `sola_sched`, as the operator gave them.

    Returns:
        A JSON object; None while the step times are being learned.
    """
    if not cost.is_ready:
        return None
    return {
        "coefficients": asdict(cost.coefficients),
        "gamma": cost.gamma._asdict(),
        "engine_args": dict(engine_args),
        "options": {k: v for k, v in options.items() if k not in _OF_THIS_MACHINE},
    }


def missed(fate: Mapping[str, Any]) -> list[str]:
    """Which targets a request missed: of "ttft", "tpot" and "e2e"."""
    names = []
    first_s, end_s = ttft_s(fate), fate["ended_s"] - fate["arrival_s"]
    is_whole = fate["end"] in _END_BY_ITSELF
    if fate["ttft_s"] is not None and (end_s if first_s is None else first_s) > fate["ttft_s"]:
        names.append("ttft")
    token_s = tpot_s(fate)
    if is_whole and fate["tpot_s"] is not None and token_s is not None and token_s > fate["tpot_s"]:
        names.append("tpot")
    if is_whole and fate["last_token_s"] is not None:
        end_s = fate["last_token_s"] - fate["arrival_s"]
    if fate["e2e_s"] is not None and end_s > fate["e2e_s"]:
        names.append("e2e")
    return names


def is_late(fate: Mapping[str, Any]) -> bool:
    """Whether a request did not get what it asked for: not met, refused or failed."""
    return fate["end"] not in _NOT_LATE


def ttft_s(fate: Mapping[str, Any]) -> float | None:
    """Its time to the first token; None if it had none."""
    if fate["first_token_s"] is None:
        return None
    return float(fate["first_token_s"] - fate["arrival_s"])


def tpot_s(fate: Mapping[str, Any]) -> float | None:
    """Its time per output token after the first; None with fewer than two."""
    if fate["num_output"] < 2 or fate["first_token_s"] is None or fate["last_token_s"] is None:
        return None
    return float((fate["last_token_s"] - fate["first_token_s"]) / (fate["num_output"] - 1))


def engine_of(fate: Mapping[str, Any]) -> int:
    """The rank of the data parallel engine that it ran on; 0 where there is one."""
    return int(fate.get("engine", 0))


class FateBook:
    """The requests that have ended last, by their ids.

    Args:
        most: So many are kept.

    Attributes:
        engines: On which they ran, as `engine_facts`, by rank; those alone of which it is known.
    """

    def __init__(self, most: int = 4096) -> None:
        self.engines: dict[int, Mapping[str, Any]] = {}
        self._most = most
        self._fates: OrderedDict[str, dict[str, Any]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._fates)

    def add(self, report: Mapping[str, Any], engine: int = 0) -> list[dict[str, Any]]:
        """Add those of a report; returns them, each as in `fate_of` and with its `engine`.

        Args:
            report: As `to_report` made it.
            engine: Rank of the engine that sent it.
        """
        added = list(from_report(report))
        for fate in added:
            fate["engine"] = engine
            self._fates.pop(fate["request_id"], None)
            self._fates[fate["request_id"]] = fate
        while len(self._fates) > self._most:
            self._fates.popitem(last=False)
        return added

    def find(self, req_id: str) -> list[dict[str, Any]]:
        """The request of this id, or all whose ids contain it.

        vLLM's ids are longer than those that a client sees: some random digits are added, and a
        number where one request asks for several answers. Of a long id the beginning is compared.
        """
        own = self._fates.get(shown_id(req_id))
        if own is not None:
            return [own]
        sought = printable(req_id[:_MOST_SOUGHT])
        return [fate for name, fate in self._fates.items() if sought in name]

    def latest(self, most: int, *, are_missed: bool = False) -> list[dict[str, Any]]:
        """The last ones to end, the newest first; of those that met their targets none if asked."""
        found: list[dict[str, Any]] = []
        for fate in reversed(self._fates.values()):
            if len(found) == most:
                break
            if not are_missed or is_late(fate):
                found.append(fate)
        return found
