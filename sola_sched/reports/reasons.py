"""Why a request was late, in plain sentences, from what became of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sola_sched.reports.fates import WAITED, tpot_s, ttft_s

#: Shares of a delay below which a part of it is not worth a sentence.
_SMALL = 0.05
_NOTHING_S = 1e-3
_SHORT_OF = ("a slot", "KV memory", "time in a step")
_OTHERWISE = "other reasons (a grammar, KV on its way, steps in vLLM's own order)"
#: What would have had to be otherwise, by the shortage.
_REMEDIES = (
    "a slot: more of them (`--max-num-seqs`), if memory and TPOT targets have room, or one more "
    "engine",
    "KV memory: more of it (`--gpu-memory-utilization`, `--kv-cache-dtype fp8`), swapping, or one "
    "more engine",
    "time in a step: fewer requests at once, one more engine, or looser TPOT targets of those that "
    "ran",
)

Fate = Mapping[str, Any]


def verdict(fate: Fate) -> str:
    """How it ended, and by how much each target was missed; one sentence."""
    first_s, token_s = ttft_s(fate), tpot_s(fate)
    if fate["end"] == "rejected":
        return "It was refused: it could not have met its targets."
    parts = []
    if "ttft" in fate["missed"]:
        target = f"its target was {_time(fate['ttft_s'])}"
        if first_s is None:
            parts.append(f"it ended before its first token ({target})")
        else:
            parts.append(f"its first token came {_time(first_s)} after its arrival ({target})")
    if "tpot" in fate["missed"] and token_s is not None:
        parts.append(f"it took {_time(token_s)} a token (its target was {_time(fate['tpot_s'])})")
    if "e2e" in fate["missed"]:
        whole_s = _end_s(fate) - fate["arrival_s"]
        parts.append(f"it took {_time(whole_s)} (its target was {_time(fate['e2e_s'])})")
    end = {
        "attained": "It met its targets",
        "missed": "It was late",
        "failed": "An error of the engine ended it",
        "aborted": "Its client left before it was late",
    }[fate["end"]]
    return f"{end}: {'; '.join(parts)}." if parts else f"{end}."


def story(fate: Fate) -> list[str]:
    """What happened to it, in order; a sentence each."""
    lines = [
        f"When it came, with a prompt of {_count(fate['num_prompt'], 'token')}, "
        f"{_count(fate['num_running'], 'request')} ran and {fate['num_before']:,} waited."
    ]
    waited = _waited(fate)
    total_s = sum(waited)
    if total_s > _NOTHING_S:
        parts = [
            f"{_time(seconds)} for {what}"
            for seconds, what in zip(waited, (*_SHORT_OF, _OTHERWISE), strict=True)
            if seconds > _SMALL * total_s
        ]
        lines.append(f"It waited {_time(total_s)}: {', '.join(parts)}.")
    if fate["num_overtook"]:
        lines.append(
            f"{_count(fate['num_overtook'], 'request')} that came later started before it."
        )
    if fate["lost_s"] is not None:
        after_s = fate["lost_s"] - fate["arrival_s"]
        line = f"It was given up {_time(after_s)} after its arrival"
        if fate["need_s"] is not None and fate["ttft_s"] is not None:
            left_s = fate["ttft_s"] - after_s
            line += (
                f": its first token needed at least {_time(fate['need_s'])}, and "
                f"{_time(max(0.0, left_s))} were left"
            )
        lines.append(f"{line}. From then on it got what others left over.")
    if fate["started_s"] is not None and fate["first_token_s"] is not None:
        took_s = fate["first_token_s"] - fate["started_s"]
        lines.append(
            f"Its prompt took {_time(took_s)}, in {_count(fate['num_chunks'], 'step')}; by itself "
            f"it takes {_time(fate['alone_s'])}."
        )
    token_s = tpot_s(fate)
    if token_s is not None:
        lines.append(
            f"Its {_count(fate['num_output'], 'output token')} took {_time(token_s)} each; by "
            f"itself a token takes {_time(fate['alone_step_s'])}."
        )
    if fate["num_held"]:
        lines.append(
            f"It sat out {_count(fate['num_held'], 'step')} for others, "
            f"{_time(fate['held_s'])} in all."
        )
    if fate["num_preemptions"]:
        lines.append(f"It lost its KV {_count(fate['num_preemptions'], 'time')}.")
    if fate["predicted"] >= 0:
        lines.append(
            f"Its output was predicted to have {_count(fate['predicted'], 'token')}; it had "
            f"{fate['num_output']:,}."
        )
    return lines


def remedies(fate: Fate) -> list[str]:
    """What would have had to be otherwise for the targets that it missed; a sentence each."""
    lines = []
    if "ttft" in fate["missed"]:
        if fate["alone_s"] > fate["ttft_s"]:
            lines.append(
                f"Its TTFT target of {_time(fate['ttft_s'])} is too short for its prompt on this "
                f"engine: by itself that takes {_time(fate['alone_s'])}."
            )
        else:
            lines += _for_first_token(fate)
    if "tpot" in fate["missed"]:
        if fate["alone_step_s"] > fate["tpot_s"]:
            lines.append(
                f"Its TPOT target of {_time(fate['tpot_s'])} is shorter than a step of this "
                f"engine, which takes {_time(fate['alone_step_s'])} with nobody else in it."
            )
        elif fate["num_held"] or fate["num_preemptions"]:
            lines.append(
                "It would have been faster had it not sat out steps or lost its KV: a class with "
                "a higher priority or weight does so last."
            )
        else:
            lines.append(
                "Its steps were too long: fewer slots (`--max-num-seqs`), or one more engine."
            )
    return lines


def _for_first_token(fate: Fate) -> list[str]:
    first_s = ttft_s(fate)
    late_s = (_end_s(fate) - fate["arrival_s"] if first_s is None else first_s) - fate["ttft_s"]
    waited = _waited(fate)
    place = max(range(len(_SHORT_OF)), key=waited.__getitem__)
    if waited[place] >= late_s:
        return [
            f"It was {_time(late_s)} late and waited {_time(waited[place])} for {_REMEDIES[place]}."
        ]
    if sum(waited) >= late_s:
        return [
            f"It was {_time(late_s)} late and waited {_time(sum(waited))} in all: one more engine, "
            "or fewer requests at once."
        ]
    return [
        f"It was {_time(late_s)} late and waited only {_time(sum(waited))}: most of the time went "
        "into its prompt, beside the decodes of others, whose TPOT targets bound its chunks."
    ]


def waited_otherwise_s(fate: Fate) -> float:
    """Seconds that it waited before its start for anything but a shortage."""
    started_s = fate["ended_s"] if fate["started_s"] is None else fate["started_s"]
    return float(max(0.0, started_s - fate["arrival_s"] - sum(fate[name] for name in WAITED)))


def _waited(fate: Fate) -> list[float]:
    """Seconds that it waited for each shortage, and for anything else."""
    return [*(fate[name] for name in WAITED), waited_otherwise_s(fate)]


def _end_s(fate: Fate) -> float:
    last_s = fate["last_token_s"]
    return float(fate["ended_s"] if last_s is None else last_s)


def _time(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 1.0 else f"{1e3 * seconds:.3g} ms"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"
