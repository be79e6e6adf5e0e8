"""Step time from batch composition: predict, correct online, learn, save, load.

Source: SOLA (Hong et al., MLSys 2025), section 5.2. Eq. 3 for prefill, Eq. 4 for decode:

    C^p = a0 sum(l_has l_in) + b0 sum(l_in^2) + c0 sum(l_in) + d0
    C^d = a1 sum(1)          + b1 sum(l_has)  + c1

and Eq. 5 for the online correction, per kind of step:

    gamma_i = alpha t / C_0 + (1 - alpha) gamma_{i-1},    C_i = gamma_i C_0

Departures from the paper, and why:

- A mixed step costs C^p + C^d - overlap, not C^p + C^d: weights are read and kernels are launched
  once, so the constant that both phases share is counted once. ``paper_step_s`` is the plain sum.
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

from sola_sched.cost.file import Coefficients, read_profile, write_profile
from sola_sched.cost.fit import (
    DECODE,
    MIXED,
    NUM_FEATURES,
    PREFILL,
    PROMPT_FEATURES,
    StepMemory,
    StepShape,
    features_of,
    fit_coefficients,
    kind_of,
)
from sola_sched.cost.gamma import Correction, Gamma
from sola_sched.cost.review import ProfileReview
from sola_sched.errors import ProfileError

__all__ = ["MAX_TOKENS", "Coefficients", "CostModel", "Gamma", "StepShape"]

#: Largest answer of ``max_prefill_tokens``, also where prefill looks free.
MAX_TOKENS = 2.0**31

_ERROR_WEIGHT = 0.01
_FIRST_REFIT = 8
_REFIT_EVERY = 512
# A fit whose errors keep exceeding the usual one is renewed sooner.
_EARLY_REFIT_EVERY = 128
_USUAL_ERROR = 0.2
_MAX_SURPRISE = 3.0
_MEMORY_PER_KIND = 512
# After so many decode steps in a row, steps with prompts are forgotten if a short prompt would take
# so many times as long as the decodes.
_DOUBTED_STEPS, _DOUBTED_TOKENS, _DOUBTED_TIMES = 512, 128, 10.0
_REPLAYED_STEPS = 32
_MIN_STEPS = 16
_TINY_S = 1e-12
_MIN_STEPS_PER_PHASE = 4

_AnyArray = NDArray[Any]


class CostModel:
    """Predicts step times and follows measured ones.

    Every prediction is finite, >= 0 and monotone in each argument. Until the first fit of an
    empty model all predictions are 0; ask ``is_ready`` before relying on one.

    Args:
        alpha: Confidence in one measured step, in (0, 1] (Eq. 5).

    Attributes:
        meta: Where the coefficients come from, as stored in the profile.
        on_relearned: Called once, with a sentence that says why, when live steps take over from
            coefficients that were given.
    """

    def __init__(self, *, alpha: float = 0.1) -> None:
        self._memory = StepMemory(3, _MEMORY_PER_KIND)
        #: Of the coefficients that were given; None where live steps refit them.
        self._review: ProfileReview | None = None
        self._is_relearned = False
        self._num_steps = self._next_early_refit = 0
        self._next_refit = _FIRST_REFIT
        self._surprise = 0.0  # sum of errors above the usual one, >= 0
        self._num_decodes_alone = 0  # steps since the last one with a prompt
        self._is_ready = self._is_fitted = False
        self._num_errors = 0
        self._error = 0.0
        self._correction = Correction(alpha)
        self._gamma = self._correction.gamma
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
        model._review = ProfileReview()
        model._is_ready = model._is_fitted = True
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
        model._is_ready = has_prefill and has_decode
        return model

    @property
    def is_ready(self) -> bool:
        """True when predictions rest on enough steps with prefill and with decode."""
        return self._is_ready

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
        return Gamma(*self._gamma)

    @property
    def num_observed(self) -> int:
        """Live steps seen by ``observe``."""
        return self._num_steps

    @property
    def mean_abs_error(self) -> float:
        """Running mean of |predicted - measured| / measured over about the last 100 steps.

        Predictions are the ones made before the step moved gamma, once the model is ready; NaN
        before any.
        """
        return self._error if self._num_errors else math.nan

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
        return self._gamma[PREFILL] * (self._chunk(new_tokens, has_tokens) + self._d0)

    @overload
    def prefill_marginal_s(self, new_tokens: float, has_tokens: float = 0.0) -> float: ...
    @overload
    def prefill_marginal_s(
        self, new_tokens: _AnyArray, has_tokens: _AnyArray | float = 0.0
    ) -> _AnyArray: ...
    def prefill_marginal_s(self, new_tokens: Any, has_tokens: Any = 0.0) -> Any:
        """What a chunk adds to a mixed step that runs anyway: ``prefill_s`` without constant."""
        return self._gamma[MIXED] * self._chunk(new_tokens, has_tokens)

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
        return self._gamma[DECODE] * (self._a1 * num_decodes + self._b1 * ctx_tokens + self._c1)

    @property
    def chunk_overhead_s(self) -> float:
        """What a decode step costs more because it has a chunk at all, however short, seconds."""
        gamma = self._gamma
        return max(0.0, gamma[MIXED] * self._mixed_constant - gamma[DECODE] * self._c1)

    def step_s(self, shape: StepShape) -> float:
        """Predicted time of a step, seconds; 0 for an empty one.

        A mixed step costs at least what its decodes or its prefill would cost alone: that keeps
        the prediction monotone when the gammas of the kinds differ.
        """
        kind = kind_of(shape)
        return 0.0 if kind is None else self._predicted_s(kind, *self._bases_s(kind, shape))

    def paper_step_s(self, shape: StepShape) -> float:
        """Predicted time as published: C^p + C^d, each with its constant."""
        prefill = self._chunks(shape) + self._d0 if shape.prefill_tokens > 0 else 0.0
        decode = self._decodes(shape) + self._c1 if shape.num_decodes > 0 else 0.0
        kind = kind_of(shape)
        return 0.0 if kind is None else self._gamma[kind] * (prefill + decode)

    def max_prefill_tokens(
        self,
        budget_s: float,
        num_decodes: int,
        decode_ctx_tokens: float,
        has_tokens: float = 0.0,
    ) -> float:
        """Largest chunk whose step, with these decodes, is predicted to fit in a time budget.

        The root of b0 n^2 + (a0 has + c0) n + constant = budget, for one request's chunk.

        Args:
            budget_s: Time for the whole step, seconds.
            num_decodes: Decodes in the same step, >= 0.
            decode_ctx_tokens: Sum of their KV lengths.
            has_tokens: Tokens of the request already computed.

        Returns:
            Tokens as a real number in [0, ``MAX_TOKENS``]; 0 when even one token does not fit.
        """
        gamma = self._gamma
        # A gamma is > 0, so each bound of `step_s` on gamma (chunk + rest) gives the chunk's time.
        room_s = budget_s / gamma[PREFILL] - self._d0
        if num_decodes > 0:
            decodes = self._a1 * num_decodes + self._b1 * decode_ctx_tokens
            if gamma[DECODE] * (decodes + self._c1) > budget_s:
                return 0.0
            mixed_room_s = budget_s / gamma[MIXED] - decodes - self._mixed_constant
            room_s = min(room_s, mixed_room_s)
        # `not >` instead of `<=`: a NaN budget gives 0 as well.
        if not room_s > 0.0:
            return 0.0
        linear = self._a0 * has_tokens + self._c0
        divisor = linear + math.sqrt(linear * linear + 4.0 * self._b0 * room_s)
        if divisor * MAX_TOKENS <= 2.0 * room_s or math.isinf(room_s):
            return MAX_TOKENS
        return 2.0 * room_s / divisor

    def observe(self, shape: StepShape, measured_s: float) -> None:
        """Take in one measured step: gamma (Eq. 5), running error, and learning if it is on.

        Called once per step. A few microseconds; a refit (every 512 steps in the long run, sooner
        while errors exceed 20 %) adds about a millisecond, and so does a comparison of given
        coefficients with such a fit (ever more rarely while they stand it, none below an error of
        5 %). Empty steps and times that are not finite and > 0 are ignored.
        """
        kind = kind_of(shape)
        if kind is None or not 0.0 < measured_s < math.inf:
            return
        self._num_steps += 1
        is_review_due = False
        if self._is_fitted:
            bases_s = self._bases_s(kind, shape)
            if self._is_ready:
                self._num_errors += 1
                weight = max(1.0 / self._num_errors, _ERROR_WEIGHT)
                error = abs(self._predicted_s(kind, *bases_s) - measured_s) / measured_s
                self._error += weight * (error - self._error)
                self._surprise = max(0.0, self._surprise + min(error, 1.0) - _USUAL_ERROR)
                if self._review is not None:
                    is_review_due = self._review.add(kind, error)
            base_s = bases_s[kind]
            if base_s > 0.0:
                self._correction.update(kind, measured_s / base_s)
                if kind == MIXED:
                    self._hold_parts(bases_s, measured_s)
        self._memory.add(kind, (*features_of(shape), measured_s))
        self._num_decodes_alone = self._num_decodes_alone + 1 if kind == DECODE else 0
        if self._review is None and self._num_decodes_alone == _DOUBTED_STEPS:
            self._doubt_prompts(measured_s)
        if self._review is not None:
            if is_review_due and self._has_enough_steps():
                self._compare(self._review)
        elif (
            self._num_steps >= self._next_refit
            or (not self._is_ready and self._has_enough_steps())
            or (self._surprise > _MAX_SURPRISE and self._num_steps >= self._next_early_refit)
        ):
            self._refit()

    def save(self, path: str | os.PathLike[str], *, meta: Mapping[str, Any]) -> None:
        """Write the coefficients as readable JSON, atomically (gamma is not stored).

        Args:
            path: File to create or replace; its folder must exist.
            meta: Plain data on machine, model, versions, command and fit error.

        Raises:
            ProfileError: There is nothing to save yet.
        """
        if not self._is_fitted:
            raise ProfileError(
                "A cost model must have been fitted before it is saved "
                f"(got one that has seen {self._num_steps} steps)."
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

    def _set(self, coefficients: Coefficients) -> None:
        self._coefficients = coefficients
        self._a0, self._b0, self._c0 = coefficients.a0, coefficients.b0, coefficients.c0
        self._a1, self._b1 = coefficients.a1, coefficients.b1
        self._d0, self._c1 = coefficients.d0, coefficients.c1
        self._mixed_constant = coefficients.d0 + coefficients.c1 - coefficients.overlap

    def _chunk(self, new_tokens: Any, has_tokens: Any) -> Any:
        # Floats first: int32 token counts squared would overflow.
        return new_tokens * (self._a0 * has_tokens + self._b0 * new_tokens + self._c0)

    def _chunks(self, shape: StepShape) -> float:
        return (
            self._a0 * shape.prefill_ctx_tokens
            + self._b0 * shape.prefill_sq_tokens
            + self._c0 * shape.prefill_tokens
        )

    def _decodes(self, shape: StepShape) -> float:
        return self._a1 * shape.num_decodes + self._b1 * shape.decode_ctx_tokens

    def _bases_s(self, kind: int, shape: StepShape) -> tuple[float, float, float]:
        """C_0 of the prompts alone, of the decodes alone and of both: what the kind needs of it."""
        if kind == DECODE:
            return 0.0, self._decodes(shape) + self._c1, 0.0
        chunks = self._chunks(shape)
        if kind == PREFILL:
            return chunks + self._d0, 0.0, 0.0
        decodes = self._decodes(shape)
        return chunks + self._d0, decodes + self._c1, chunks + decodes + self._mixed_constant

    def _predicted_s(self, kind: int, prompts: float, decodes: float, together: float) -> float:
        """The time of a step of a kind, by its `_bases_s`."""
        gamma = self._gamma
        if kind == DECODE:
            return gamma[DECODE] * decodes
        if kind == PREFILL:
            return gamma[PREFILL] * prompts
        return max(gamma[MIXED] * together, gamma[DECODE] * decodes, gamma[PREFILL] * prompts)

    def _hold_parts(self, bases_s: tuple[float, float, float], measured_s: float) -> None:
        """A mixed step took no less than its decodes or its prefill would alone: see `step_s`."""
        for kind in (PREFILL, DECODE):
            if bases_s[kind] > 0.0:
                self._correction.at_most(kind, measured_s / bases_s[kind])

    def _has_enough_steps(self) -> bool:
        prefill, decode, mixed = self._memory.num_added
        return (
            self._num_steps >= _MIN_STEPS
            and prefill + mixed >= _MIN_STEPS_PER_PHASE
            and decode + mixed >= _MIN_STEPS_PER_PHASE
        )

    def _doubt_prompts(self, decode_s: float) -> None:
        """Learn the time of prompts anew where what is known keeps them from being let in.

        The first ones of an engine are often slow, and no others may have been seen. While too few
        new ones have, the model is not ready, and so keeps none from running.
        """
        tokens = _DOUBTED_TOKENS
        alone_s = self.step_s(StepShape(0, 0, tokens, float(tokens * tokens), 0.0))
        if not self._is_ready or alone_s <= _DOUBTED_TIMES * decode_s:
            return
        for kind in (PREFILL, MIXED):
            self._memory.forget(kind)
        self._row[list(PROMPT_FEATURES)] = 0.0
        self._refit()

    def _compare(self, review: ProfileReview) -> None:
        """Let live steps take over if the coefficients that were given have failed."""
        row = self._coefficients.as_fit() * self._gamma[MIXED]
        if not review.has_failed(self._memory, row):
            return
        self._review, self._is_relearned, self._row = None, True, row
        self._refit()
        if self.on_relearned is not None:
            self.on_relearned(
                f"the step times of the profile are off by {review.error:.1%}, those of "
                f"coefficients fitted to the same steps by {review.fitted_error:.1%}: the cost "
                "model is learned from live steps from now on; measure this engine again with "
                "`python -m sola_sched.profile`."
            )

    def _refit(self) -> None:
        memory = self._memory
        rows, times_s = memory.all_steps()
        # What was forgotten or never seen survives only in the coefficients of before.
        keeps = memory.has_forgotten or self._is_relearned
        self._row = fit_coefficients(rows, times_s, self._row if keeps else None)
        prefill, decode, mixed = memory.num_added
        self._set(
            Coefficients.from_fit(
                self._row, has_prefill=prefill + mixed > 0, has_decode=decode + mixed > 0
            )
        )
        self._is_fitted, self._is_ready = True, self._has_enough_steps()
        while self._next_refit <= self._num_steps:
            self._next_refit += min(self._next_refit, _REFIT_EVERY)
        self._next_early_refit = self._num_steps + min(_EARLY_REFIT_EVERY, self._num_steps // 4 + 8)
        self._surprise = 0.0
        self._correction.replay(
            (times_s / np.maximum(rows @ self._row, _TINY_S)).tolist()
            for rows, times_s in map(memory.last_steps, range(3), [_REPLAYED_STEPS] * 3)
        )
