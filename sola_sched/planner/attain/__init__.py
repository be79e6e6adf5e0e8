"""`policy="attain"`: as many requests as possible meet all of their SLOs.

SOLA (Hong et al., MLSys 2025) minimizes the worst latency. Under overload "worst first" spends the
accelerator on requests that are lost already, and loses others with them. This planner keeps SOLA's
means - order, chunk size, peak memory, a cost model corrected online - and maximizes the number of
requests that meet all their targets, each counted as what it is worth. One plan is a pipeline of
modules:

    lost         who is lost?
    pace         how long may the step be, and which prefills are on time?
    held         which decodes sit the step out for them?
    admission    who gets in: chunk, slots, memory
    best_effort  what do the lost get?
    course       all of it, and the plan put together
    planner      from a `StepState` to the records (`records`) and back to a `StepPlan`

Numba compiles them. Each function takes the step (`Step`), reads what those before it have found
there, and writes down what it finds.

Glossary:

- *bare* step: of decodes alone. Later steps are expected to be longer: prefills come in between.
- *bank* of a decode: time until its next token is due. Token j after the first is due at
  ``first + j * TPOT``, so steps that were faster than the target have put time in the bank.
- *lost*: it missed a target, or cannot meet one any more. *Alive*: not lost.
- *held*: it keeps slot and KV, and sits the step out: one that is far ahead, or lost, or whose
  tokens a prompt of a higher class takes.
- *rank*: by priority and by what is owed to a service; a smaller one goes first, strictly.
- *slack*: the longest step that keeps all alive decodes on course (the smallest bank, as a rule).
- *lent*: later time of decodes for a longer step now, where else somebody were late.
- *sustained*: the longest mean step with which a decode meets TPOT at its predicted end.
- *feasible* prefill: one that could end before its deadline if nobody else were there.
- *job*: a feasible prefill that is not refused. *On time*: the jobs that end before their deadlines
  together, by Moore-Hodgson.
- *lead*: those on time are to be so a step early, where a step could hold several of them.
- *chunk*: the prompt tokens of a step. *Served*: whose tokens these are.
- *offered*: may start beyond the chunk, if prefix-cache hits leave tokens over.
- *credit*: engine time that the lost have earned while they waited, and not yet got.
- *blocked*: the oldest lost request has credit and finds no room; nobody else starts.
- *row*: of the table of requests. *Place*: in the step's list of decodes, or of prefills.
- *settled*: decodes alone, all within their targets, nothing to decide: no pipeline is run.

One step in numbers: TTFT 1 s, TPOT 100 ms; a step takes 10 ms + 1 ms a decode + 0.1 ms a prompt
token; the last one took 100 ms, and 5 % of the time is promised to the lost (the default is 2 %).

1. Decode A has 3 tokens, the first 0.1 s ago: the next one is due 0.3 s after the first, 200 ms are
   in its bank. B has 6, the first 0.5 s ago: 100 ms. C got its first token after 5 s: lost. The two
   alive take 12 ms a step.
2. The slack is 100 ms, which leaves 88 % of such steps for prefills. Three prompts wait: P (600
   tokens, 150 ms left), Q (1,000, 200 ms) and R (500, 220 ms). P takes 60 ms, and has 88 % of what
   its deadline leaves beside the decodes' 12 ms: of 138, 121 ms. With Q it is 160 of 165 ms. With R
   it would be 210 of 183 ms: the costliest, Q, is given up. P and R are on time, in this order.
3. All three want more time than the step has. A is due a TPOT after its end, so it is held, which
   saves 1 ms.
4. What is left of 100 ms holds 880 tokens (1 ms more is too little for the next multiple): all of
   P, 280 of R. Slots and memory are enough for both, and for Q, which is offered.
5. R has tokens left to compute, so nothing is left over for C. It has earned 5 ms, and costs 1.
6. B and C run, P and R start, Q may; the budget is 880 + 2 tokens.
"""

from sola_sched.planner.attain.planner import AttainPlanner
from sola_sched.planner.attain.tuning import AttainTuning

__all__ = ["AttainPlanner", "AttainTuning"]
