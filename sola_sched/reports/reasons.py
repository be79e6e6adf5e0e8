"""Why a request was late, in plain sentences, from what became of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from sola_sched.reports.fates import WAITED, tpot_s, ttft_s

#: Parts of a wait below this share are not worth a sentence, nor waits below this share of the
#: time to the first token.
_SMALL = 0.05
#: From this share of their TPOT target on, requests are taken to have kept steps short.
_NEAR_TPOT = 0.5
#: A prompt that takes this many times what it would alone is slow.
_SLOW = 2.0
#: What is left to compute, in seconds, below which nothing is said of it.
_NOTHING_S = 1e-3
#: What a request waits for, by the shortage.
SHORT_OF = ("a free slot", "KV memory", "compute time")
_OTHERWISE = "other reasons (compiling a grammar, loading KV, steps in vLLM's own order)"
#: What would have helped, by the shortage.
_REMEDIES = (
    "More slots (`--max-num-seqs`) would have helped if memory and TPOT targets allow more, or one "
    "more engine.",
    "More KV memory (`--gpu-memory-utilization`, `--kv-cache-dtype fp8`), swapping, or one more "
    "engine would have helped.",
    "Fewer requests at once or one more engine would have helped.",
)
_SLOW_ENGINE = (
    "so the engine itself was slow: another program may have used the same processor, or the model "
    "had just been started"
)
_LOOSER_TPOT = (
    "Fewer requests at once, one more engine, or looser TPOT targets of the requests that were "
    "running would have helped."
)

#: As `fates.fate_of` has it; files of older releases have 0 where `alone_s` is not known.
Fate = Mapping[str, Any]


def percent(share: float) -> str:
    """A share above 0 as text: one that is small is not nothing."""
    return "under 1 %" if share < 0.01 else f"{100 * share:.0f} %"


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


def preferred_to(fate: Fate, known: Sequence[Fate]) -> list[Fate]:
    """Requests that arrived later than this one and got a slot before it did, by their starts.

    Args:
        known: Requests of the same engine.
    """
    until_s = fate["ended_s"] if fate["started_s"] is None else fate["started_s"]
    found = [
        each
        for each in known
        if each["started_s"] is not None
        and each["arrival_s"] > fate["arrival_s"]
        and each["started_s"] < until_s
    ]
    return sorted(found, key=lambda each: float(each["started_s"]))


def why(fate: Fate) -> str:
    """`verdict` and `story` in one line."""
    return " ".join([verdict(fate), *story(fate)])


def story(fate: Fate, known: Sequence[Fate] = ()) -> list[str]:
    """What happened to it, in order.

    Args:
        known: Requests of the same engine; with them it is said of which classes others were.
    """
    lines = [_arrival(fate, known), *_waits(fate, known)]
    if fate["lost_s"] is not None:
        lines.append(_lost(fate))
    if fate["started_s"] is not None and fate["first_token_s"] is not None:
        took_s = fate["first_token_s"] - fate["started_s"]
        line = f"Its prompt took {_time(took_s)}, in {_count(fate['num_chunks'], 'step')}."
        if fate["alone_s"]:
            line += f" On an idle engine it would take {_time(fate['alone_s'])}."
        lines.append(line)
        if _was_slow_alone(fate, known):
            lines.append(
                "No other request is known to have been computed meanwhile: the steps themselves "
                "took longer than predicted."
            )
    token_s = tpot_s(fate)
    if token_s is not None:
        line = (
            f"Its {_count(fate['num_output'], 'output token')} took {_time(token_s)} each on "
            "average."
        )
        if fate["alone_step_s"]:
            line += f" On an idle engine a token takes {_time(fate['alone_step_s'])}."
        lines.append(line)
    if fate["num_held"]:
        lines.append(
            f"It was left out of {_count(fate['num_held'], 'step')} so that others could be in "
            f"time. That cost it {_time(fate['held_s'])}."
        )
    if fate["num_preemptions"]:
        lines.append(
            f"It was preempted {_count(fate['num_preemptions'], 'time')}: its slot and its KV "
            "memory went to others."
        )
    if fate["predicted"] >= 0:
        lines.append(
            f"Its output was predicted to be {_count(fate['predicted'], 'token')} long. It was "
            f"{fate['num_output']:,}."
        )
    return lines


def _arrival(fate: Fate, known: Sequence[Fate]) -> str:
    running = "no request" if not fate["num_running"] else _count(fate["num_running"], "request")
    waiting = "none" if not fate["num_before"] else f"{fate['num_before']:,}"
    return (
        f"It arrived with a prompt of {_count(fate['num_prompt'], 'token')}, when "
        f"{running} {_was(fate['num_running'])} running and {waiting} "
        f"{_was(fate['num_before'])} waiting"
        f"{_by_class(fate, _waiting_before(fate, known), fate['num_before'])}."
    )


def _waiting_before(fate: Fate, known: Sequence[Fate]) -> list[Fate]:
    """Those that waited when it arrived."""
    return [
        each
        for each in known
        if each["arrival_s"] < fate["arrival_s"] < each["ended_s"]
        and (each["started_s"] is None or each["started_s"] > fate["arrival_s"])
    ]


def _waits(fate: Fate, known: Sequence[Fate]) -> list[str]:
    lines = []
    waited, first_s = _waited(fate), ttft_s(fate)
    total_s = sum(waited)
    if total_s > _SMALL * (fate["ended_s"] - fate["arrival_s"] if first_s is None else first_s):
        parts = [
            (seconds, what)
            for seconds, what in zip(waited, (*SHORT_OF, _OTHERWISE), strict=True)
            if seconds > _SMALL * total_s
        ]
        if len(parts) == 1:
            lines.append(f"It waited {_time(parts[0][0])} for {parts[0][1]}.")
        else:
            each = ", ".join(f"{_time(seconds)} for {what}" for seconds, what in parts)
            lines.append(f"It waited {_time(total_s)} in all: {each}.")
    if fate["num_overtook"]:
        verb = _was(fate["num_overtook"])
        lines.append(
            f"{_count(fate['num_overtook'], 'request')} that arrived later {verb} started before "
            f"it{_by_class(fate, preferred_to(fate, known), fate['num_overtook'])}."
        )
    return lines


def _by_class(fate: Fate, others: Sequence[Fate], number: int) -> str:
    """Of which classes others were, where not all are of its own.

    Args:
        others: Those that are known, perhaps more or fewer than there were.
        number: So many there were.
    """
    counts = Counter(each["slo_class"] for each in others)
    if not number or not set(counts) - {fate["slo_class"]}:
        return ""
    if len(counts) == 1:
        return f" ({'all ' if number > 1 else ''}of class {next(iter(counts))})"
    known = len(others)
    parts = [
        f"{f'{count:,}' if known == number else percent(count / known)} of class {name}"
        for name, count in counts.most_common()
    ]
    return f" ({', '.join(parts)})"


def _was_slow_alone(fate: Fate, known: Sequence[Fate]) -> bool:
    """Whether its prompt took long, and no other request is known that the engine had meanwhile."""
    begin_s, end_s = fate["started_s"], fate["first_token_s"]
    if not known or begin_s is None or end_s is None or fate["num_running"]:
        return False
    if not fate["alone_s"]:
        return False
    if end_s - begin_s < _SLOW * fate["alone_s"]:
        return False
    return not any(
        each["request_id"] != fate["request_id"] and _was_there(each, begin_s, end_s)
        for each in known
    )


def _was_there(fate: Fate, begin_s: float, end_s: float) -> bool:
    """Whether it had started, and not ended, at some time between."""
    started_s = fate["started_s"]
    return started_s is not None and started_s < end_s and fate["ended_s"] > begin_s


def _lost(fate: Fate) -> str:
    """When the scheduler found that it would be late, and by what reckoning."""
    after_s = fate["lost_s"] - fate["arrival_s"]
    line = f"The scheduler gave it up {_time(after_s)} after its arrival"
    step_s, tpot_s = fate["alone_step_s"] or 0.0, fate["tpot_s"]
    if fate["need_s"] is None and tpot_s is not None and step_s > tpot_s:
        line += (
            f": a token takes {_time(step_s)} even on an idle engine, longer than its TPOT target "
            f"of {_time(tpot_s)}"
        )
    elif fate["need_s"] is not None and fate["ttft_s"] is not None:
        left_s = fate["ttft_s"] - after_s
        due = f"due in {_time(left_s)}" if left_s > 0.0 else "overdue"
        line += f": its first token was {due}"
        if fate["need_s"] >= _NOTHING_S:
            line += (
                " and, by the step times predicted then, still needed at least "
                f"{_time(fate['need_s'])}"
            )
    return f"{line}. From then on it was served only with time that others did not need."


def remedies(fate: Fate, known: Sequence[Fate] = ()) -> list[str]:
    """What would have helped it to meet the targets that it missed; `known` as in `story`."""
    lines = []
    if "ttft" in fate["missed"]:
        if (fate["alone_s"] or 0.0) > fate["ttft_s"]:
            lines.append(
                f"Its prompt takes {_time(fate['alone_s'])} even on an idle engine, longer than "
                f"its TTFT target of {_time(fate['ttft_s'])}: no order of requests can help. It "
                "needs a longer target, perhaps by a class of its own, or a faster engine."
            )
            if _was_slow_alone(fate, known):
                lines.append(f"Besides, it was alone, {_SLOW_ENGINE}.")
        else:
            lines += [*_for_first_token(fate, known), *_against_others(fate, known)]
    if "tpot" in fate["missed"]:
        if (fate["alone_step_s"] or 0.0) > fate["tpot_s"]:
            lines.append(
                f"A token takes {_time(fate['alone_step_s'])} even on an idle engine, longer than "
                f"its TPOT target of {_time(fate['tpot_s'])}: no order of requests can help."
            )
        elif fate["num_held"] or fate["num_preemptions"]:
            lines.append(
                "Its tokens would have come faster had it not been left out or preempted. That "
                "happens last to classes with a higher priority or weight."
            )
        else:
            lines.append(
                "Its steps were too long because too many requests shared them. Fewer slots "
                "(`--max-num-seqs`) or one more engine would have helped."
            )
    return lines


def _against_others(fate: Fate, known: Sequence[Fate]) -> list[str]:
    """That most of those it waited behind were of one other class."""
    others = [*_waiting_before(fate, known), *preferred_to(fate, known)]
    if not others:
        return []
    ((name, count),) = Counter(each["slo_class"] for each in others).most_common(1)
    if name == fate["slo_class"] or 2 * count <= len(others):
        return []
    before = "that waited before it or were preferred to it"
    said = f"Of {len(others):,} requests {before} {count:,} {_was(count)}"
    if count == len(others):
        said = f"All {count:,} requests {before} were" if count > 1 else f"The request {before} was"
    return [
        f"{said} of class {name}. A higher weight or a `share` for class {fate['slo_class']} would "
        "have protected it."
    ]


def _for_first_token(fate: Fate, known: Sequence[Fate]) -> list[str]:
    first_s = ttft_s(fate)
    late_s = (_end_s(fate) - fate["arrival_s"] if first_s is None else first_s) - fate["ttft_s"]
    waited = _waited(fate)
    place = max(range(len(SHORT_OF)), key=waited.__getitem__)
    remedy = _REMEDIES[place]
    if SHORT_OF[place] == "compute time" and _kept_steps_short(fate, known):
        remedy = _LOOSER_TPOT
    if waited[place] >= late_s:
        return [
            f"It was {_time(late_s)} late and had waited {_time(waited[place])} for "
            f"{SHORT_OF[place]}. {remedy}"
        ]
    if sum(waited) >= late_s:
        said = f"It was {_time(late_s)} late and had waited {_time(sum(waited))}"
        if 2.0 * waited[place] > sum(waited):
            return [f"{said}, most of it for {SHORT_OF[place]}. {remedy}"]
        return [f"{said} in all. One more engine or fewer requests at once would have helped."]
    late = f"It was {_time(late_s)} late, of which waiting explains only {_time(sum(waited))}."
    if _was_slow_alone(fate, known):
        return [f"{late} It was alone, {_SLOW_ENGINE}."]
    if fate["lost_s"] is not None or fate["num_preemptions"]:
        return [
            f"{late} For most of the rest its prompt had been started, and others were computed "
            "that could still be in time. One more engine or fewer requests at once would have "
            "helped."
        ]
    return [
        f"{late} Its prompt was computed in small pieces: the steps had to stay short for the TPOT "
        "targets of the requests that were running. Looser TPOT targets of these, or one more "
        "engine, would have helped."
    ]


def _kept_steps_short(fate: Fate, known: Sequence[Fate]) -> bool:
    """Whether requests that were computed before it started came near their TPOT targets."""
    until_s = fate["ended_s"] if fate["started_s"] is None else fate["started_s"]
    return any(
        each["tpot_s"] is not None
        and _was_there(each, fate["arrival_s"], until_s)
        and (tpot_s(each) or 0.0) > _NEAR_TPOT * each["tpot_s"]
        for each in known
    )


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


def _was(number: int) -> str:
    return "was" if number < 2 else "were"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"
