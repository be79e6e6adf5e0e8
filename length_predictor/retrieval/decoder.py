"""The all-MLP decoder: from a sentence vector to quantiles of the output length.

Source: ALISE (Zhao and Wang, ICCAD 2024), section 3.1, Figure 4 and Algorithm 1 line 6, `MLP_Dec`.
The paper regresses one number and gives neither sizes nor loss. Here the network sees the vector
and eight counts of the prompt, and predicts ten ascending log-quantiles: it minimizes the mean
pinball loss at `LEVELS`, sum over levels of max(p (y - q_p), (p - 1)(y - q_p)). torch trains it;
numpy runs it, at about 0.1 ms a prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sola_sched.prediction.length import LEVELS, NUM_LEVELS

FloatArray = NDArray[np.float64]

_HIDDEN = (512, 256)
_DROPOUT = 0.3
_MAX_INPUT = 6.0
# Of the counts, which are logarithms: less than a tenth of a factor of e is no difference.
_MIN_SCALE = 0.1
_BATCH = 256
_LEARNING_RATE = 2e-3
_WEIGHT_DECAY = 1e-4
#: Passes over the data; small sets get more, up to this many steps of optimization.
NUM_EPOCHS = 6
_MIN_STEPS = 400


class Decoder:
    """Log-quantiles [n, 10] from vectors [n, dim] and counts [n, 8].

    Args:
        layers: Weight [in, out] and bias [out] of each layer.
        mean, scale: Of the inputs, so that each has mean 0 and deviation 1.
        center, spread: Of the log-lengths, likewise.
    """

    def __init__(
        self,
        layers: list[tuple[NDArray[np.float32], NDArray[np.float32]]],
        mean: NDArray[np.float32],
        scale: NDArray[np.float32],
        center: float,
        spread: float,
    ) -> None:
        self._layers = layers
        self._mean, self._scale = mean, scale
        self._center, self._spread = center, spread

    @property
    def num_inputs(self) -> int:
        """Width of vector and counts together."""
        return len(self._mean)

    def quantiles(self, vectors: NDArray[Any], counts: NDArray[Any]) -> FloatArray:
        """Logarithms of the quantiles at ``LEVELS`` [n, 10], ascending."""
        hidden = (np.hstack([vectors, counts]) - self._mean) / self._scale
        # Prompts unlike any it was trained on are not extrapolated to.
        hidden = np.clip(hidden, -_MAX_INPUT, _MAX_INPUT)
        for weight, bias in self._layers[:-1]:
            hidden = np.maximum(hidden @ weight + bias, 0.0)
        weight, bias = self._layers[-1]
        raw = (hidden @ weight + bias).astype(np.float64)
        # The first output is the lowest quantile, the others are what each adds.
        raw[:, 1:] = np.logaddexp(0.0, raw[:, 1:])
        return self._center + self._spread * np.cumsum(raw, axis=1)

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Everything that ``from_arrays`` needs."""
        arrays: dict[str, NDArray[Any]] = {
            "mean": self._mean,
            "scale": self._scale,
            "target": np.array([self._center, self._spread]),
        }
        for number, (weight, bias) in enumerate(self._layers):
            arrays[f"weight{number}"], arrays[f"bias{number}"] = weight, bias
        return arrays

    @classmethod
    def from_arrays(cls, arrays: dict[str, NDArray[Any]]) -> Decoder:
        """Inverse of ``to_arrays``."""
        count = sum(name.startswith("weight") for name in arrays)
        layers = [(arrays[f"weight{i}"], arrays[f"bias{i}"]) for i in range(count)]
        center, spread = arrays["target"].tolist()
        return cls(layers, arrays["mean"], arrays["scale"], center, spread)


def train_decoder(
    vectors: NDArray[Any],
    counts: NDArray[Any],
    lengths: NDArray[Any],
    *,
    num_epochs: int = NUM_EPOCHS,
    seed: int = 0,
    on_epoch: Callable[[int, float], None] | None = None,
) -> Decoder:
    """Train a decoder on one thread; about 10 s for 40,000 prompts.

    Args:
        vectors: Sentence vectors [n, dim], n >= 1.
        counts: Counts of the same prompts [n, 8].
        lengths: Output tokens [n].
        num_epochs: Passes over the data, >= 1; more if they are few steps.
        seed: Of the initial weights, the order and the dropout.
        on_epoch: Called after each pass with its number and mean loss.
    """
    import torch

    if len(lengths) < 1:
        raise ValueError("'lengths' must hold at least one request to train on (got none).")
    inputs = np.hstack([vectors, counts]).astype(np.float32)
    mean = inputs.mean(axis=0)
    # Vectors share one scale: their small directions are noise, not signal.
    scale = np.full(inputs.shape[1], 1.0 / max(1, vectors.shape[1]) ** 0.5, dtype=np.float32)
    scale[vectors.shape[1] :] = np.maximum(inputs[:, vectors.shape[1] :].std(axis=0), _MIN_SCALE)
    target = np.log(np.maximum(np.asarray(lengths, dtype=np.float64), 1.0))
    center, spread = float(target.mean()), float(max(target.std(), 1e-3))
    batch = min(_BATCH, len(target))
    per_epoch = len(target) // batch
    num_epochs = max(num_epochs, -(-_MIN_STEPS // per_epoch))

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = _network(torch, inputs.shape[1])
        with torch.no_grad():
            start = np.quantile((target - center) / spread, LEVELS)
            gaps = np.log(np.expm1(np.maximum(np.diff(start), 1e-2)))
            network[-1].weight.mul_(0.1)
            network[-1].bias.copy_(torch.tensor([start[0], *gaps], dtype=torch.float32))
        data = torch.from_numpy((inputs - mean) / scale)
        truth = torch.from_numpy(((target - center) / spread).astype(np.float32))
        levels = torch.tensor(LEVELS, dtype=torch.float32)
        optimizer = torch.optim.AdamW(
            network.parameters(), lr=_LEARNING_RATE, weight_decay=_WEIGHT_DECAY
        )
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, _LEARNING_RATE, total_steps=num_epochs * per_epoch
        )
        network.train()
        for epoch in range(num_epochs):
            total = 0.0
            for chosen in torch.randperm(len(truth))[: per_epoch * batch].view(-1, batch):
                raw = network(data[chosen])
                steps = torch.nn.functional.softplus(raw[:, 1:])
                predicted = torch.cumsum(torch.cat([raw[:, :1], steps], dim=1), dim=1)
                error = truth[chosen][:, None] - predicted
                loss = torch.maximum(levels * error, (levels - 1.0) * error).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                total += float(loss.detach())
            if on_epoch is not None:
                on_epoch(epoch, total / per_epoch)
    layers = [
        (layer.weight.detach().numpy().T.copy(), layer.bias.detach().numpy().copy())
        for layer in network
        if isinstance(layer, torch.nn.Linear)
    ]
    return Decoder(layers, mean, scale, center, spread)


def _network(torch: Any, num_inputs: int) -> Any:
    layers: list[Any] = []
    for width in _HIDDEN:
        layers += [torch.nn.Linear(num_inputs, width), torch.nn.ReLU(), torch.nn.Dropout(_DROPOUT)]
        num_inputs = width
    return torch.nn.Sequential(*layers, torch.nn.Linear(num_inputs, NUM_LEVELS))
