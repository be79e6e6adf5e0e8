"""`policy="attain"`: as many requests as possible meet all of their SLOs.

SOLA (Hong et al., MLSys 2025) minimizes the worst latency. Under overload "worst first" spends the
accelerator on requests that are lost already, and loses others with them. This planner keeps SOLA's
means - order, chunk size, peak memory, a cost model corrected online - and maximizes the number of
requests that meet all their targets, each counted as what it is worth. One plan is a pipeline of
modules:

    lost         who is lost?
    pace         how long may the step be, and which prefills are on time?
    entry        who gets in: chunk, slots, memory
    held         which decodes sit the step out for them?
    best_effort  what do the lost get?
    course       all of it, and the plan put together
    planner      from a `StepState` to the records (`records`) and back to a `StepPlan`

Numba compiles them. Each function takes the step (`Step`), reads what those before it have found
there, and writes down what it finds.

Glossary:

- *bank* of a decode: time until its next token is due. Token j after the first is due at
  ``first + j * TPOT``, so steps that were faster than the target have put time in the bank.
- *lost*: it missed a target, or cannot meet one any more. *Alive*: not lost.
- *held*: it keeps slot and KV, and sits the step out: a lost decode, or one that is far ahead.
- *slack*: the longest step that keeps all alive decodes on course (the smallest bank, as a rule).
- *lent*: later time of decodes for a longer step now, where else somebody were late.
- *sustained*: the longest mean step with which a decode meets TPOT at its predicted end.
- *feasible* prefill: one that could end before its deadline if nobody else were there.
- *on time*: feasible prefills that end before their deadlines together, by Moore-Hodgson.
- *lead*: those on time are to be so a step early, where a step could hold several of them.
- *chunk*: the prompt tokens of a step. *Served*: whose tokens these are.
- *offered*: may start beyond the chunk, if prefix-cache hits leave tokens over.
- *credit*: engine time that the lost have earned while they waited, and not yet got.
- *blocked*: the oldest lost request has credit and finds no room; nobody else starts.
- *settled*: decodes alone, all within their targets, nothing to decide: no pipeline is run.

One step in numbers: TTFT 1 s, TPOT 100 ms; a step takes 10 ms + 1 ms a decode + 0.1 ms a prompt
token; the last one took 100 ms, and 5 % of the time is the lost's.

1. Decode A has 3 tokens, the first 0.1 s ago: the next one is due 0.3 s after the first, 200 ms are
   in its bank. B has 6, the first 0.5 s ago: 100 ms. C got its first token after 5 s: lost. The two
   alive take 12 ms a step.
2. The slack is 100 ms, which leaves 88 % of such steps for prefills. Three prompts wait: P (600
   tokens, 150 ms left), Q (1,000, 200 ms) and R (500, 220 ms). P takes 60 ms, until its deadline
   less the decodes' 12 ms there are 88 % of 138. With Q it is 160 of 165 ms; with R 210 of 183:
   the costliest, Q, is given up. P and R are on time, in this order.
3. 88 ms hold 880 tokens: all of P, 280 of R. Slots and memory are enough for both, and for Q, which
   is offered. R wants more time, and A is due a TPOT after the step: it sits out. That is 1 ms, too
   little for the next multiple of tokens.
4. R has tokens left to compute, so nothing is left over for C. It has earned 5 ms, and costs 1.
5. B and C run, P and R start, Q may; the budget is 880 + 2 tokens.
"""

from sola_sched.planner.attain.planner import AttainPlanner
from sola_sched.planner.attain.tuning import AttainTuning

__all__ = ["AttainPlanner", "AttainTuning"]
