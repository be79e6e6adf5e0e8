"""The options of `benchmarks/run.py`: each is defined once, each experiment says which it takes."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sola_sched.config.flags import json_object, natural_int, positive_float, positive_int
from sola_sched.length_predictor.corpus import DATA_VARIABLE

_TWO_CLOCKS = ("cpu", "wall")
#: What `add_argument` takes of each, by destination.
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "data": {
        "type": Path,
        "metavar": "DIR",
        "help": f"folder of the data sets (default: ${DATA_VARIABLE}, else shared/data beside "
        "the repository; without one, lengths are made up)",
    },
    "results": {
        "type": Path,
        "metavar": "DIR",
        "help": "rows; tables too where it is not the default",
    },
    "seeds": {"type": natural_int, "nargs": "+", "help": "of requests and arrivals"},
    "workers": {"type": positive_int, "help": "runs beside each other"},
    "num_requests": {"type": positive_int, "help": "requests a run"},
    "minutes": {"type": positive_float, "help": "how long it goes on"},
    "quick": {"action": "store_true", "help": "few, small runs: does it work?"},
    "stored": {"action": "store_true", "help": "the table of the rows there are; runs nothing"},
    "only": {"nargs": "+", "metavar": "PART", "help": "these parts of the experiment alone"},
    "rerun": {
        "nargs": "+",
        "metavar": "SPEC",
        "help": "schedulers whose runs must be of this source; of all others the rows that are "
        "stored count, whatever source made them",
    },
    "plots": {"type": Path, "metavar": "DIR", "help": "draw the figure into this folder"},
    "scheduling_time": {
        "choices": ("none", "model"),
        "help": "what the scheduler's own calls take of the time: nothing, as in the rows that are "
        "stored, or what was measured of vLLM's and of ours",
    },
    "schedulers": {"nargs": "+", "metavar": "SPEC", "help": "as in `python -m sola_sched.bench`"},
    "clock": {"choices": _TWO_CLOCKS, "help": "cpu leaves out other work on the machine"},
    "save_profile": {
        "type": Path,
        "metavar": "FILE",
        "help": "write the fitted step times, for --backend sim --profile FILE",
    },
    "policies": {"nargs": "+", "choices": ("attain", "paper", "alise", "observe")},
    "kinds": {"nargs": "+", "choices": ("chat", "code", "long"), "help": "of traffic"},
    "modes": {"nargs": "+", "choices": ("sync", "async"), "help": "of scheduling"},
    "num_running": {"type": positive_int, "nargs": "+", "help": "requests in the engine"},
    "num_waiting": {"type": natural_int, "nargs": "+", "help": "requests that wait beside them"},
    "num_free_slots": {"type": natural_int, "nargs": "+", "help": "slots beyond those"},
    "situations": {
        "nargs": "+",
        "choices": ("plain", "memory", "swap", "prefixes", "priorities", "classes"),
        "help": "what there is beside plain traffic",
    },
    "num_steps": {"type": positive_int, "help": "steps measured"},
    "label": {"help": "kept in the rows, e.g. before"},
    "compare": {"nargs": "+", "metavar": "LABEL", "help": "labels side by side"},
    "predictors": {"nargs": "+", "choices": ("lexical", "retrieval")},
    "num_pairs": {"type": positive_int, "help": "pairs of blocks"},
    "block": {"type": positive_int, "help": "steps a block"},
    "ways": {"nargs": "+", "choices": ("served", "alone"), "help": "vllm serve, engine alone"},
    "num_rounds": {"type": positive_int, "help": "rounds of each start"},
    "output_len": {"type": positive_int, "help": "tokens of each answer"},
    "store": {
        "type": Path,
        "metavar": "FILE",
        "help": "retrieval predictor that `python -m sola_sched.length_predictor build` wrote",
    },
    "num_tokens": {"type": positive_int, "help": "of KV"},
    "sizes": {"type": positive_int, "nargs": "+", "help": "MiB of KV"},
    "request_rates": {"type": positive_float, "nargs": "+", "help": "requests per second"},
    "engine_args": {
        "type": json_object,
        "metavar": "JSON",
        "help": "of vLLM's engine, for every scheduler",
    },
    "request_rate": {
        "type": positive_float,
        "help": "requests per second (default: 0.85 of what can be borne)",
    },
}


def flag(name: str) -> str:
    """How an option is written."""
    return "--" + name.replace("_", "-")


class Refused(Exception):
    """The arguments cannot be used; the message says why."""


def parse(
    title: str, taken: Sequence[str], defaults: Mapping[str, Any], argv: Sequence[str]
) -> argparse.Namespace:
    """The values of the options that are taken.

    Args:
        title: Of the command: its name and, behind a colon, what it does.
        taken: Keys of `OPTIONS`.
        defaults: Values of options that are not given; None, or False for a switch, without one.
        argv: Arguments behind the name.

    Raises:
        Refused: An option is not taken, or there is none of that name.
    """
    name, _, summary = title.partition(": ")
    parser = argparse.ArgumentParser(
        prog=f"python benchmarks/run.py {name}", description=summary, allow_abbrev=False
    )
    for key in taken:
        about = dict(OPTIONS[key])
        if key in defaults:
            shown = defaults[key]
            shown = " ".join(map(str, shown)) if isinstance(shown, list | tuple) else shown
            about["help"] = f"{about.get('help', '')} (default: {shown})".strip()
        parser.add_argument(flag(key), **about)
    parser.set_defaults(**defaults)
    args, extra = parser.parse_known_args(argv)
    if extra:
        known = ", ".join(map(flag, taken)) or "no options"
        given = extra[0].partition("=")[0]
        is_other = given in map(flag, OPTIONS)
        why = f"has no use for {given}" if is_other else f"knows no {extra[0]!r}"
        raise Refused(f"{name!r} {why}; it takes {known}.")
    lists = {name: tuple(value) for name, value in vars(args).items() if isinstance(value, list)}
    return argparse.Namespace(**vars(args) | lists)
