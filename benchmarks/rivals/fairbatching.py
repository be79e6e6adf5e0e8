"""FairBatching."""

from __future__ import annotations

import numpy as np

from rivals.base import Rival, Step, by


class FairBatching(Rival, margin=1.2, clock="actual", hopeless_last=True):
    """Decodes that are ahead of their deadlines let prompts go before them.

    Source: FairBatching, arXiv 2510.14392, from its abstract and a write-up. The step takes at
    most b = max(least slack of the decodes, shortest TPOT of these). Decodes with a slack below
    b + that TPOT come first, then prompts, then the other decodes, each by slack.

    Departures: with ``hopeless_last`` prompts that would be late even alone come behind the
    others, on which the sources say nothing. `margin` is a factor on predicted times. ``clock``
    says when token j is due: ``published``, at A + F + j * P; or ``actual``, after the first token.
    Without decodes the engine's largest step is the limit.
    """

    def fill(self, step: Step) -> None:
        decodes, prompts = step.decodes, step.prompts
        start_s = step.table.due_s[decodes] if self.set.clock == "published" else None
        slack_s = step.token_due_s(decodes, start_s) - step.now_s
        tpot_s = step.shortest_tpot_s(decodes)
        budget_s = max(float(slack_s.min(initial=np.inf)), tpot_s)
        limit_s = budget_s / self.set.margin
        is_urgent = slack_s < budget_s + tpot_s
        urgent, others = decodes[is_urgent], decodes[~is_urgent]
        due_s = step.due_s(prompts)
        alone_s = np.array([step.alone_s(row) for row in prompts.tolist()])
        is_hopeless = self.set.hopeless_last & (step.now_s + alone_s > due_s)
        order = np.lexsort((due_s, is_hopeless))
        count = step.take_decodes(by(slack_s[is_urgent], urgent), limit_s)
        if count < len(urgent):
            return
        step.take_prompts(prompts[order].tolist(), limit_s)
        step.take_decodes(by(slack_s[~is_urgent], others), limit_s)
