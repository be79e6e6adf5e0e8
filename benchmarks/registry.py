"""The experiments of `benchmarks/run.py`: name, what it tells, function, options, where rows go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from harness.command import Experiment

_VIRTUAL = ("data", "workers", "num_requests", "quick", "scheduling_time")
_SWAP = ("data", "seeds", "workers", "num_requests", "quick")
#: Of `mechanisms`, unless others are asked for: those on which something has an effect.
_LOADS = ("little KV", "5 x", "short prompts", "chat, measured", "V100", "tight TPOT", "low load")
#: Of `published`: points near saturation, and the schedulers that are closest there.
_NEAR = (
    "azure-conv 5.5/s", "azure-conv 7/s", "azure-conv 8.5/s", "azure-conv 10/s",
    "three classes 7/s", "three classes 9/s", "azure-code 4/s", "sharegpt 4/s",
    "azure-conv 7/s, stalls", "azure-conv 7/s, drift", "three classes 8/s, stalls",
    "QoServe", "SLOs-Serve", "SCORPIO", "FairBatching", "SlidingServe",
)  # fmt: skip
_THREE, _TEN = (0, 1, 2), tuple(range(10))
#: Those whose tables a release makes anew: what users are told of the present policy.
_RELEASE = (
    "load", "models", "levels", "rivals", "mechanisms", "table4", "waits", "mixed",
    "published-near", "sessions", "saturation", "overhead", "serving-cost", "unused-swapping",
    "start", "predictor-latency", "colocation", "colocation-turns", "services", "services-engine",
    "sharing", "sharing-conditions", "sharing-real", "fidelity", "gateway", "hostile", "soak",
    "soak-virtual", "overload", "cluster-fast", "cluster-unequal", "cluster-deployment",
    "cluster-combined", "cluster-checked",
)  # fmt: skip


def _simulation(
    name: str,
    summary: str,
    duration: str,
    options: Sequence[str] = ("seeds",),
    figure: str = "draw_lines",
    **defaults: Any,
) -> Experiment:
    """Of `simulation/experiments.py`: on computed step times, rows shared by all of them."""
    common: dict[str, Any] = {"num_requests": 1000, "scheduling_time": "none"}
    some = {"seeds": (0,), "only": ()}
    common |= {option: value for option, value in some.items() if option in options}
    return Experiment(
        name, summary, duration, f"simulation.experiments:{name}", (*_VIRTUAL, *options),
        "runs.jsonl", common | defaults, figure and f"simulation.figures:{figure}",
        untold="they are of the policy of commit b5fd42f or older ones",
    )  # fmt: skip


def _headline(
    name: str,
    summary: str,
    duration: str,
    options: Sequence[str] = (),
    figure: str = "",
    **defaults: Any,
) -> Experiment:
    """Of `simulation/headline.py`: on measured step times, rows shared by all of them."""
    common: dict[str, Any] = {"num_requests": 500, "scheduling_time": "none", "rerun": ()}
    if "only" in options:
        common["only"] = ()
    return Experiment(
        name, summary, duration, f"simulation.headline:{name}", (*_VIRTUAL, "rerun", *options),
        "headline.jsonl", common | defaults, figure and f"simulation.figures:{figure}",
    )  # fmt: skip


def _alise(name: str, summary: str, duration: str, figure: str = "") -> Experiment:
    """Of `alise/`: latency in virtual time, rows shared by all of them."""
    return Experiment(
        f"alise-{name}", summary, duration, f"alise.latency:{name}",
        ("data", "workers", "quick", "only"), "alise/runs.jsonl", {"only": ()}, figure,
    )  # fmt: skip


def _published(name: str, summary: str, duration: str, **defaults: Any) -> Experiment:
    """Of `rivals/`: published schedulers beside ours."""
    return Experiment(
        name, summary, duration, "rivals.experiment:published",
        ("data", "seeds", "workers", "num_requests", "quick", "only"), f"{name}.jsonl",
        {"seeds": _THREE} | defaults,
    )  # fmt: skip


def _swap(name: str, summary: str, duration: str, **defaults: Any) -> Experiment:
    """Of `swap/`: what becomes of displaced KV, in virtual time."""
    return Experiment(
        f"swap-{name}", summary, duration, f"swap.experiments:{name}", _SWAP,
        f"swap/{name}.jsonl", {"num_requests": 1000, "seeds": (0,)} | defaults,
    )  # fmt: skip


def _cluster(
    name: str,
    summary: str,
    duration: str,
    function: str,
    figure: str = "",
    seeds: Sequence[int] = _THREE,
    has_parts: bool = True,
) -> Experiment:
    """Of `cluster/`: many engines in virtual time, rows shared by all of them."""
    parts: dict[str, Any] = {"only": ()} if has_parts else {}
    options = ("data", "workers", "quick", "seeds", *parts)
    defaults = {"seeds": seeds} | parts
    return Experiment(
        f"cluster-{name}", summary, duration, f"cluster.{function}", options,
        "cluster/runs.jsonl.gz", defaults, figure,
    )  # fmt: skip


_BOTH = ("seeds", "only")
_ALL = (
    _headline("load", "attainment over load: five data sets, targets of 10 x one request's",
              "25 min", ("seeds", "only"), "draw_lines", seeds=_THREE),
    _headline("models", "the same on other measured profiles, held out", "10 min",
              ("seeds", "only"), "draw_lines", seeds=_THREE),
    _headline("levels", "the rates at 90 and 99 %, bracketed closer", "40 min",
              ("seeds", "only"), seeds=_THREE),
    _headline("rivals", "each rule at each chunk size, and SOLA as published, at load 1.25",
              "10 min"),
    Experiment("mechanisms", "`attain` with one mechanism at a time left out", "1 h",
               "simulation.mechanisms:mechanisms",
               ("data", "workers", "num_requests", "quick", "seeds", "only"), "mechanisms.jsonl",
               {"num_requests": 200, "seeds": _THREE, "only": _LOADS}),
    _simulation("recorded", "`load` with the recorded arrivals of the traces", "20 min"),
    _simulation("fig7", "SOLA Fig. 7: the five models of Table 3, tight and loose targets",
                "40 min", _BOTH),
    _simulation("fig8", "SOLA Fig. 8: rates at 90 and 99 %, from the rows of `fig7`", "40 min",
                _BOTH),
    _simulation("fig10", "SOLA Fig. 10: targets of 5 x and 20 x", "20 min"),
    _simulation("slots", "256 and 512 slots, tight targets", "30 min", _BOTH),
    _simulation("table4", "SOLA Table 4: CPU time of the scheduler against serving time", "5 min",
                ("only",), num_requests=500, only=("Llama3-70B", "Llama3-8B")),
    _simulation("benefit", "SOLA 6.3.1: peak-memory prediction and policies apart", "1 h",
                seeds=_THREE),
    _simulation("cost", "SOLA 6.3.2: error of the predicted step times", "5 min", ("only",)),
    _simulation("bursts", "arrivals burstier than Poisson", "20 min"),
    _simulation("shift", "lengths of another data set from the middle on", "10 min"),
    _simulation("prediction", "what knowing output lengths is worth", "15 min"),
    _simulation("hindsight", "how much of the gap to the bound is knowledge of the future", "1 h"),
    _simulation("missed", "the same at the goals that `levels` misses", "20 min"),
    _simulation("shares", "a larger share for requests that are late anyway", "20 min"),
    _simulation("waits", "a bound on the wait of requests that are late anyway", "20 min",
                ("seeds", "only")),
    Experiment("mixed", "several kinds of request at once, FCFS and earliest deadline first beside",
               "15 min", "mixed.experiment:mixed",
               ("data", "seeds", "workers", "num_requests", "quick", "only"), "mixed.jsonl",
               {"seeds": _THREE, "num_requests": 300, "only": ()}),
    _published("published", "every published scheduler at its best setting; uneven machines too",
               "1 day", num_requests=1000, only=()),
    _published("published-near", "the same near saturation, beside the closest", "2 h",
               num_requests=500, only=_NEAR),
    Experiment("sessions", "shared prefixes: conversations that come back, recorded prefixes",
               "10 min", "sessions.experiment:sessions",
               ("data", "seeds", "workers", "num_requests", "quick", "only"), "sessions.jsonl",
               {"seeds": _THREE, "num_requests": 400, "only": ()}),
    _alise("rates", "latency under policy=alise over request rate, by predictor", "1 h",
           "alise.latency:draw"),
    _alise("seeds", "the same on three seeds, fewer schedulers", "3 h"),
    _alise("wrong", "predictions that are off", "30 min"),
    _alise("aging", "the aging threshold", "10 min"),
    Experiment("alise-waits", "estimated against real waits", "5 min", "alise.waits:waits",
               ("data",)),
    Experiment("alise-predictions", "predictions of held-out prompts, which alise-* replay",
               "5 min", "alise.record:predictions", ("data",), "alise"),
    _swap("fig8", "ALISE Fig. 8: swap displaced KV, compute it again, or displace nobody", "2 h",
          num_requests=500, seeds=_TEN),
    _swap("alone", "the same where prompts are computed in steps of their own", "1 h",
          num_requests=500, seeds=_TEN),
    _swap("host", "INT8 against raw at equal host memory and bandwidth", "5 min",
          num_requests=500),
    _swap("attain", "policy=attain with little KV memory, with and without swapping", "10 min",
          num_requests=600),
    _swap("third", "the loads of `load` with a third of the KV memory", "1 h", seeds=_THREE),
    Experiment("swap-engine", "swap-fig8 and attain by the clock on vLLM's engine on a CPU",
               "40 min", "swap.experiments:engine", ("seeds", "num_requests", "quick"),
               "swap/engine.jsonl", {"num_requests": 100, "seeds": (0, 1)}),
    Experiment("swap-transfer", "speed of copies on a GPU, and what they cost beside a model",
               "1 min", "swap.transfer:transfer"),
    Experiment("int8-accuracy", "what INT8 does to keys, values, attention and logits", "1 min",
               "int8.accuracy:accuracy", ("num_tokens", "seeds"),
               defaults={"num_tokens": 1024, "seeds": _THREE}),
    Experiment("int8-speed", "speed of the INT8 kernels against a copy, on a GPU", "2 min",
               "int8.speed:speed", ("sizes",), defaults={"sizes": (16, 64, 256)}),
    Experiment("saturation", "the real engine at and just below what it sustains", "30 min",
               "serving.saturation:saturation", ("seeds", "num_requests", "quick"),
               "saturation.jsonl", {"seeds": _THREE, "num_requests": 300}),
    Experiment("overhead", "what the scheduler adds to vLLM's own time per step", "30 min",
               "scheduler.bench_overhead:overhead",
               ("policies", "kinds", "modes", "num_running", "num_waiting", "num_free_slots",
                "situations", "num_steps", "seeds", "clock", "label", "compare"),
               "overhead.jsonl",
               {"policies": ("attain",), "kinds": ("chat", "code", "long"),
                "modes": ("sync", "async"), "num_running": (1, 16, 64, 256), "num_waiting": (0,),
                "num_free_slots": (0,), "situations": ("plain",), "num_steps": 1000,
                "seeds": (0,), "clock": "cpu", "label": ""}),
    Experiment("serving-cost", "what a token costs in `vllm serve`, beside stock vLLM", "30 min",
               "serving.cost:serving_cost",
               ("seeds", "num_rounds", "output_len", "ways", "only"), "serving-cost.jsonl",
               {"seeds": _THREE, "num_rounds": 12, "output_len": 400,
                "ways": ("served", "alone"), "only": ()}),
    Experiment("unused-swapping", "what unused swapping takes of a step, and telemetry",
               "1 min", "serving.unused_swapping:unused_swapping", ("seeds", "output_len"),
               "unused-swapping.jsonl", {"seeds": _THREE, "output_len": 400}),
    Experiment("start", "how long `vllm serve` takes until it answers, beside stock vLLM", "15 min",
               "serving.start:start", ("num_rounds",), "start.jsonl", {"num_rounds": 3}),
    Experiment("predictor-engine", "what a predictor process costs the engine loop", "10 min",
               "predictor.bench_engine:engine",
               ("predictors", "num_running", "num_pairs", "block", "seeds"),
               "predictor-engine.jsonl",
               {"predictors": ("lexical", "retrieval"), "num_running": (32,), "num_pairs": 24,
                "block": 100, "seeds": (0,)}),
    Experiment("predictor-floor", "how far apart two answers of one model to one prompt are",
               "1 min", "predictor.bench_floor:floor", ("data",)),
    Experiment("predictor-index", "which FAISS index: speed, recall, memory", "5 min",
               "predictor.bench_index:index", ("store",)),
    Experiment("predictor-latency", "time of one prediction, by part, and memory", "10 min",
               "predictor.bench_latency:latency", ("store", "data"), "predictor-latency.jsonl"),
    Experiment("colocation", "two engines on one core, with and without turns; a kill",
               "12 min", "colocation.experiments:colocation", ("seeds", "quick"),
               defaults={"seeds": _THREE}),
    Experiment("colocation-turns", "what a turn costs", "1 min", "colocation.experiments:turns",
               ("quick",)),
    Experiment("services", "three services on one engine under bursts: doubling, shares", "5 min",
               "services.virtual:services", ("seeds", "quick"), defaults={"seeds": _THREE}),
    Experiment("services-engine", "the same with three LoRA adapters on vLLM's engine on a CPU",
               "10 min", "services.engine:services_engine", ("seeds", "quick"),
               defaults={"seeds": _THREE}),
    Experiment("sharing-blocks", "SeaLLM Fig. 9: KV blocks of two models in one pool", "2 min",
               "colocation.blocks:sharing_blocks", ("seeds", "quick"),
               defaults={"seeds": _THREE}),
    Experiment("sharing", "SeaLLM Fig. 6 to 8: 16 services on 32 GPUs over the rate, six systems",
               "10 min", "sharing.experiments:rates", ("data", "seeds", "workers", "quick"),
               "sharing.jsonl", {"seeds": _THREE}),
    Experiment("sharing-sensitivity", "SeaLLM Fig. 10 to 13: SLO scale, density, skew, profiling",
               "20 min", "sharing.experiments:sensitivity",
               ("data", "seeds", "workers", "quick", "only"), "sharing.jsonl",
               {"seeds": _THREE, "only": ()}),
    Experiment("sharing-conditions", "what the gain of sharing hangs on: bursts, length, placement",
               "10 min", "sharing.conditions:conditions",
               ("data", "seeds", "workers", "quick", "only"), "sharing-conditions.jsonl",
               {"seeds": _THREE, "only": ()}),
    Experiment("sharing-search", "SeaLLM Fig. 14: time of the placement search, and its gap",
               "3 min", "sharing.experiments:placement_search",
               ("data", "seeds", "workers", "quick"), defaults={"seeds": _THREE, "workers": 2}),
    Experiment("sharing-targets", "turn rules where services have TTFT and TPOT targets", "1 min",
               "sharing.targets:targets", ("seeds", "quick"), defaults={"seeds": _THREE}),
    Experiment("sharing-real", "the fast model of shared GPUs beside the real schedulers", "8 min",
               "sharing.real:real", ("data", "seeds", "quick")),
    Experiment("sharing-replacement", "SeaLLM-A: placements that follow the load", "10 min",
               "sharing.experiments:replacement", ("data", "seeds", "quick"),
               defaults={"seeds": _THREE}),
    Experiment("fidelity", "how near virtual time comes to real engines", "15 min",
               "fidelity.experiment:fidelity",
               ("data", "seeds", "num_requests", "quick", "only", "schedulers", "clock",
                "save_profile"),
               "fidelity.json",
               {"seeds": (0,), "num_requests": 60, "schedulers": ("stock:512", "sola:2048"),
                "clock": "cpu", "only": ()}),
    Experiment("fidelity-gpu-steps", "profiles of measured kernels against single steps", "2 min",
               "fidelity.gpu_steps:gpu_steps", ("data",)),
    Experiment("fidelity-gpu-engines", "the simulator against whole engines measured by others",
               "5 min", "fidelity.gpu_engines:gpu_engines", ("data",)),
    Experiment("fidelity-gpu-live", "vLLM on this machine's GPU: stock and ours, every step kept",
               "1 min a run", "fidelity.live_gpu:live",
               ("data", "seeds", "num_requests", "quick", "schedulers", "request_rates",
                "engine_args"),
               "gpu-live.jsonl",
               {"seeds": (0,), "num_requests": 500, "request_rates": (24.6, 30.8),
                "schedulers": ("stock:2048", "stock:8192", "sola")}),
    Experiment("aiconfigurator", "GPUs wanted by the plan and by NVIDIA's aiconfigurator", "10 min",
               "cluster.against_aiconfigurator:against", ()),
    Experiment("gateway", "two unequal engines on Ray Serve: ways to them, a kill, cost per token",
               "25 min", "gateway.bench_gateway:gateway",
               ("seeds", "num_requests", "only", "quick", "request_rate"), "gateway.jsonl",
               {"seeds": (0, 1, 2, 3, 4), "num_requests": 100, "only": (), "request_rate": 2.5}),
    Experiment("hostile", "a hundred streams through a gateway beside each kind of hostile client",
               "5 min", "gateway.hostile:hostile", ("only",), "hostile.jsonl", {"only": ()}),
    Experiment("soak", "everything at once on the real engine behind the gateway: what grows?",
               "30 min", "soak.experiment:soak", ("seeds", "quick", "minutes"), "soak.jsonl",
               {"seeds": (0,), "minutes": 30.0}),
    Experiment("soak-virtual", "millions of requests in virtual time: memory, cost of a step",
               "30 min", "soak.virtual:virtual", ("num_requests",), "soak-virtual.jsonl",
               {"num_requests": 10_000_000}),
    Experiment("overload", "dashboard and `top` of a server past saturation, without planning "
               "and with it", "5 min", "monitoring.overload:overload", ("minutes",),
               "overload.jsonl", {"minutes": 2.0}, "monitoring.figure:draw"),
    _cluster("fast", "the fast engine model beside the real schedulers: error and speed", "5 min",
             "fast_model:error", seeds=(0,), has_parts=False),
    _cluster("aladdin", "Aladdin Fig. 9, 10: attainment on four GPUs, by placement", "10 min",
             "aladdin:fig9", "cluster.aladdin:draw", seeds=tuple(range(3, 15))),
    _cluster("gpus", "Aladdin Fig. 11: GPUs needed, prefill and decode together", "15 min",
             "aladdin:gpus"),
    _cluster("decode", "Aladdin Fig. 12: GPUs that a decode pool needs", "10 min",
             "aladdin:decode"),
    _cluster("deployment", "heterogeneous clusters, Fig. 4: the estimates and the simulator",
             "15 min", "unequal:deployment", has_parts=False),
    _cluster("unequal", "the same, Fig. 5, 6: throughput by router on unequal clusters", "1 h",
             "unequal:routers"),
    _cluster("combined", "the combined placement beside both papers' own, over load", "5 min",
             "combined:combined", seeds=tuple(range(3, 15))),
    _cluster("checked", "some of these points with real schedulers in the engines", "20 min",
             "combined:checked", seeds=tuple(range(30, 66)), has_parts=False),
    _cluster("predictions", "what knowing output lengths is worth to a router", "5 min",
             "combined:predictions", seeds=tuple(range(3, 15))),
    _cluster("day", "a day's rise and fall: scaling rules and a fixed number", "10 min",
             "day:day", has_parts=False),
    _cluster("many", "up to 256 instances in virtual time: cost of a request by router", "10 min",
             "many:many", has_parts=False),
    Experiment("cluster-gap", "best fit beside the optimum of HiGHS", "2 min",
               "cluster.placing:gap", ("quick",)),
    Experiment("cluster-placing", "Aladdin Fig. 13: time to place a second's requests", "1 min",
               "cluster.placing:rates", ("quick",)),
    Experiment("cluster-scale", "placing on up to 1,000 instances: time and memory", "1 min",
               "cluster.placing:scale", ("quick",)),
)  # fmt: skip
EXPERIMENTS = tuple(replace(each, in_release=each.name in _RELEASE) for each in _ALL)
"""In the order of the list."""
