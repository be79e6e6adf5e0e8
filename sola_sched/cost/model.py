"""Step time from batch composition: predict, correct online, learn, save, load.

Source: SOLA (Hong et al., MLSys 2025), section 5.2. Eq. 3 for prefill, Eq. 4 for decode:

    C^p = a0 sum(l_has l_in) + b0 sum(l_in^2) + c0 sum(l_in) + d0
    C^d = a1 sum(1)          + b1 sum(l_has)  + c1

and Eq. 5 for the online correction, per kind of step:

    gamma_i = alpha t / C_0 + (1 - alpha) gamma_{i-1},    C_i = gamma_i C_0

Departures from the paper, and why:

- A mixed step costs C^p + C^d - overlap, not C^p + C^d: weights are read and kernels are launched
  once, so the constant that both phases share is counted once.
- gamma is kept for prefill-only, decode-only and mixed steps, not for two phases: a mixed step's
  time cannot be attributed to its phases. A kind that was hardly seen yet leans on the others.
- One step moves gamma by at most a factor 1 + alpha: idle gaps, garbage collection and
  compilation are no news about the model. Eight in a row of a kind that are off by half to the
  same side are, and gamma is their median at once.
- Without a profile the coefficients are learned from live steps; with one, as soon as a fit to
  live steps is clearly better than the profile (`sola_sched.cost.review`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from sola_sched.compiled.functions import Record, as_it_stands
from sola_sched.cost import online, times
from sola_sched.cost.file import Coefficients, read_profile, write_profile
from sola_sched.cost.fit import (
    MIXED,
    NUM_FEATURES,
    PREFILL,
    PROMPT_FEATURES,
    StepShape,
    features_of,
    fit_coefficients,
)
from sola_sched.cost.gamma import Gamma
from sola_sched.cost.memory import NUM_KINDS, all_steps, has_forgotten, last_steps, new_memory
from sola_sched.cost.review import ProfileReview
from sola_sched.cost.times import MAX_TOKENS, Times
from sola_sched.errors import ProfileError

__all__ = ["MAX_TOKENS", "Coefficients", "CostModel", "Gamma", "StepShape"]

# Most steps between two fits, in the long run and while errors exceed the usual one.
_REFIT_EVERY, _EARLY_REFIT_EVERY = 512, 128
_MEMORY_PER_KIND = 512
_REPLAYED_STEPS = 32
_TINY_S = 1e-12

_AnyArray = NDArray[Any]


class CostModel:
    """Predicts step times and follows measured ones.

    Every prediction is finite, >= 0 and monotone in each argument. Until the first fit of an
    empty model all predictions are 0; ask ``is_ready`` before relying on one.

    Args:
        alpha: Confidence in one measured step, in (0, 1] (Eq. 5).

    Attributes:
        model, memory: What changes at each step, for compiled functions: one `online.MODEL`, and
            the steps that are remembered.
        meta: Where the coefficients come from, as stored in the profile.
        on_relearned: Called once, with a sentence that says why, when live steps take over from
            coefficients that were given.
    """

    def __init__(self, *, alpha: float = 0.1) -> None:
        self.model = online.new_model(alpha)
        self.memory = new_memory(_MEMORY_PER_KIND)
        #: Of the coefficients that were given; None where live steps refit them.
        self._review: ProfileReview | None = None
        self._is_relearned = False
        self._row = np.zeros(NUM_FEATURES)
        self.meta: dict[str, Any] = {}
        self.on_relearned: Callable[[str], None] | None = None
        self._set(Coefficients(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0))

    @classmethod
    def from_coefficients(
        cls,
        coefficients: Coefficients,
        *,
        alpha: float = 0.1,
        meta: Mapping[str, Any] | None = None,
    ) -> CostModel:
        """A ready model with known coefficients; live steps move gamma, as long as they hold."""
        model = cls(alpha=alpha)
        model._review, at = ProfileReview(), model._at
        at.is_given = at.is_fitted = at.is_ready = True
        model.meta = dict(meta or {})
        model._set(coefficients)
        return model

    @classmethod
    def fit(cls, steps: Sequence[tuple[StepShape, float]], *, alpha: float = 0.1) -> CostModel:
        """Fit the coefficients to measured steps; live steps then move gamma, as long as they hold.

        Args:
            steps: Shapes and times in seconds; times that are not finite and > 0 are left out.
            alpha: Confidence in one measured step.

        Returns:
            A model that is ready if prefill and decode both occur in the steps.

        Raises:
            ProfileError: No usable step was given.
        """
        usable = [
            (*features_of(shape), time_s)
            for shape, time_s in steps
            if 0.0 < time_s < math.inf and (shape.prefill_tokens > 0 or shape.num_decodes > 0)
        ]
        if not usable:
            raise ProfileError(
                f"A fit needs measured steps with a time > 0 (got {len(steps)} steps, 0 usable)."
            )
        table = np.array(usable, dtype=np.float64)
        has_prefill, has_decode = bool(table[:, 6].any()), bool(table[:, 7].any())
        coefficients = Coefficients.from_fit(
            fit_coefficients(table[:, :-1], table[:, -1]),
            has_prefill=has_prefill,
            has_decode=has_decode,
        )
        model = cls.from_coefficients(coefficients, alpha=alpha)
        model._at.is_ready = has_prefill and has_decode
        return model

    @property
    def is_ready(self) -> bool:
        """Whether predictions rest on enough steps; see `online.has_enough_steps`."""
        return bool(self.model["is_ready"][0])

    @property
    def is_learning(self) -> bool:
        """True when live steps refit the coefficients, False when they move only gamma."""
        return self._review is None

    @property
    def is_relearned(self) -> bool:
        """True when live steps have taken over from coefficients that were given."""
        return self._is_relearned

    @property
    def coefficients(self) -> Coefficients:
        """The coefficients of C_0, without gamma."""
        return self._coefficients

    @property
    def gamma(self) -> Gamma:
        """The correction factors in force."""
        return Gamma(*self.model["gamma"][0].tolist())

    @property
    def num_observed(self) -> int:
        """Live steps seen by ``observe``."""
        return int(self._at.num_steps)

    @property
    def mean_abs_error(self) -> float:
        """Running mean of |predicted - measured| / measured over about the last 100 steps.

        Predictions are the ones made before the step moved gamma, once the model is ready; NaN
        before any.
        """
        at = self._at
        return float(at.error) if at.num_errors else math.nan

    @overload
    def prefill_s(self, new_tokens: float, has_tokens: float = 0.0) -> float: ...
    @overload
    def prefill_s(
        self, new_tokens: _AnyArray, has_tokens: _AnyArray | float = 0.0
    ) -> _AnyArray: ...
    def prefill_s(self, new_tokens: Any, has_tokens: Any = 0.0) -> Any:
        """Time of a prefill-only step with one chunk (Eq. 3 with gamma), elementwise.

        Args:
            new_tokens: Chunk lengths, >= 0.
            has_tokens: Tokens already computed, >= 0.

        Returns:
            Seconds, one value per request; each includes the constant d0.
        """
        # Floats first: int32 token counts squared would overflow.
        return as_it_stands(times.chunk_alone_s)(self._times, new_tokens, has_tokens)

    @overload
    def prefill_marginal_s(self, new_tokens: float, has_tokens: float = 0.0) -> float: ...
    @overload
    def prefill_marginal_s(
        self, new_tokens: _AnyArray, has_tokens: _AnyArray | float = 0.0
    ) -> _AnyArray: ...
    def prefill_marginal_s(self, new_tokens: Any, has_tokens: Any = 0.0) -> Any:
        """What a chunk adds to a mixed step that runs anyway: ``prefill_s`` without constant."""
        return as_it_stands(times.chunk_s)(self._times, new_tokens, has_tokens)

    @overload
    def decode_s(self, num_decodes: float, ctx_tokens: float) -> float: ...
    @overload
    def decode_s(self, num_decodes: _AnyArray, ctx_tokens: _AnyArray | float) -> _AnyArray: ...
    @overload
    def decode_s(self, num_decodes: float, ctx_tokens: _AnyArray) -> _AnyArray: ...
    def decode_s(self, num_decodes: Any, ctx_tokens: Any) -> Any:
        """Time of a decode-only step (Eq. 4 with gamma), elementwise.

        Args:
            num_decodes: Requests in the step, >= 0.
            ctx_tokens: Sum of their KV lengths, >= 0.

        Returns:
            Seconds.
        """
        return as_it_stands(times.decode_s)(self._times, num_decodes, ctx_tokens)

    @property
    def chunk_overhead_s(self) -> float:
        """What a decode step costs more because it has a chunk at all, however short, seconds."""
        return float(as_it_stands(times.chunk_overhead_s)(self._times))

    def step_s(self, shape: StepShape) -> float:
        """Predicted time of a step, seconds; 0 for an empty one.

        A mixed step costs at least what its decodes or its prefill would cost alone: that keeps
        the prediction monotone when the gammas of the kinds differ.
        """
        return float(online.step_s(self.model, *map(float, shape)))

    def max_prefill_tokens(
        self,
        budget_s: float,
        num_decodes: int,
        decode_ctx_tokens: float,
        has_tokens: float = 0.0,
    ) -> float:
        """Largest chunk whose step, with these decodes, is predicted to fit in a time budget.

        Args:
            budget_s: Time for the whole step, seconds.
            num_decodes: Decodes in the same step, >= 0.
            decode_ctx_tokens: Sum of their KV lengths.
            has_tokens: Tokens of the request already computed.

        Returns:
            Tokens as a real number in [0, ``MAX_TOKENS``]; 0 when even one token does not fit.
        """
        return float(
            as_it_stands(times.most_tokens)(
                self._times, budget_s, num_decodes, decode_ctx_tokens, has_tokens
            )
        )

    def observe(self, shape: StepShape, measured_s: float) -> None:
        """Take in one measured step: gamma (Eq. 5), running error, and learning if it is on.

        Called once per step. A few microseconds; a refit (every 512 steps in the long run, sooner
        while errors exceed 20 %) adds about a millisecond, and so does a comparison of given
        coefficients with such a fit (ever more rarely while they stand it, none below an error of
        5 %). Empty steps and times that are not finite and > 0 are ignored.
        """
        sums = map(float, (*shape, measured_s))
        due = online.observe(self.model, self.memory, *sums)
        if due != online.NOTHING:
            self.renew(due)

    def renew(self, due: int) -> None:
        """Do what is due after a step, as `online.observe` has said."""
        if due == online.DOUBT:
            self._forget_prompts()
            due = as_it_stands(online.what_is_due)(self._at, False)
        if due == online.COMPARE and self._review is not None:
            self._compare(self._review)
        elif due == online.REFIT:
            self._refit()

    def save(self, path: str | os.PathLike[str], *, meta: Mapping[str, Any]) -> None:
        """Write the coefficients as readable JSON, atomically (gamma is not stored).

        Args:
            path: File to create or replace; its folder must exist.
            meta: Plain data on machine, model, versions, command and fit error.

        Raises:
            ProfileError: There is nothing to save yet.
        """
        if not self._at.is_fitted:
            raise ProfileError(
                "A cost model must have been fitted before it is saved "
                f"(got one that has seen {self.num_observed} steps)."
            )
        write_profile(path, self._coefficients, meta)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, alpha: float = 0.1) -> CostModel:
        """Read a profile written by ``save``; the model is ready.

        Raises:
            ProfileError: The file is unreadable, damaged, foreign, of an unknown version or
                physically impossible.
        """
        coefficients, meta = read_profile(path)
        return cls.from_coefficients(coefficients, alpha=alpha, meta=meta)

    @property
    def _at(self) -> Record:
        """The record of `model`, by attributes."""
        return self.model.view(np.recarray)[0]

    @property
    def _times(self) -> Times:
        """The coefficients and factors in force."""
        return Times._make((*self._linear, self.model["gamma"][0].tolist()))

    def _set(self, coefficients: Coefficients) -> None:
        self._coefficients = coefficients
        self._linear = times.linear_of(coefficients)
        for name, value in zip(times.LINEAR, self._linear, strict=True):
            self.model[name] = value

    def _forget_prompts(self) -> None:
        """Learn the time of prompts anew where what is known keeps them from being let in.

        The first ones of an engine are often slow, and no others may have been seen. While too few
        new ones have, the model is not ready, and so keeps none from running.
        """
        self._at.num_added[[PREFILL, MIXED]] = 0
        self._row[list(PROMPT_FEATURES)] = 0.0
        self._refit()

    def _compare(self, review: ProfileReview) -> None:
        """Let live steps take over if the coefficients that were given have failed."""
        row = self._coefficients.as_fit() * self._times.gamma[MIXED]
        if not review.has_failed(self._at, self.memory, row):
            return
        self._review, self._is_relearned, self._row = None, True, row
        self._at.is_given = False
        self._refit()
        if self.on_relearned is not None:
            self.on_relearned(
                f"the step times of the profile are off by {review.error:.1%}, those of "
                f"coefficients fitted to the same steps by {review.fitted_error:.1%}: the cost "
                "model is learned from live steps from now on; measure this engine again with "
                "`python -m sola_sched.profile`."
            )

    def _refit(self) -> None:
        at, num_added = self._at, self._at.num_added
        rows, times_s = all_steps(self.memory, num_added)
        # What was forgotten or never seen survives only in the coefficients of before.
        keeps = has_forgotten(self.memory, num_added) or self._is_relearned
        self._row = fit_coefficients(rows, times_s, self._row if keeps else None)
        prefill, decode, mixed = num_added.tolist()
        self._set(
            Coefficients.from_fit(
                self._row, has_prefill=prefill + mixed > 0, has_decode=decode + mixed > 0
            )
        )
        at.is_fitted, at.is_ready = True, as_it_stands(online.has_enough_steps)(at)
        while at.next_refit <= at.num_steps:
            at.next_refit += min(at.next_refit, _REFIT_EVERY)
        at.next_early_refit = at.num_steps + min(_EARLY_REFIT_EVERY, at.num_steps // 4 + 8)
        at.surprise = 0.0
        self._replay()

    def _replay(self) -> None:
        """Let the newest steps correct coefficients that are new."""
        ratios, counts = np.zeros((NUM_KINDS, _REPLAYED_STEPS)), np.zeros(NUM_KINDS, dtype=np.int64)
        for kind in range(NUM_KINDS):
            rows, times_s = last_steps(self.memory, self._at.num_added, kind, _REPLAYED_STEPS)
            counts[kind] = len(times_s)
            ratios[kind, : len(times_s)] = times_s / np.maximum(rows @ self._row, _TINY_S)
        online.replay(self.model, ratios, counts)
