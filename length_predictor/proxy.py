"""The baseline that ALISE compares with: a small encoder fine-tuned to predict the length.

Source: ALISE (Zhao and Wang, ICCAD 2024), section 4.3, after S^3 (DistilBERT, buckets) and SSJF
(BERT, regression). Here MiniLM, from the weights the retrieval predictor uses, all six layers
trained for a bounded time, mean pooling and a linear head of ten quantiles of log-length, so that
both are judged by the same loss. As in those papers it reads the whole prompt up to 512 tokens in
full precision. It does not learn from traffic.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sola_sched.length_predictor.corpus import Corpus
from sola_sched.length_predictor.embed import (
    DEFAULT_ENCODER,
    SentenceEncoder,
    hidden_states,
    quantized,
    recorded,
)
from sola_sched.prediction.length import LEVELS, NUM_LEVELS

FloatArray = NDArray[np.float64]

MAX_TOKENS = 512
_BATCH = 32
_LEARNING_RATE = 1e-4
_HEAD_RATE = 2e-3
_WARM_UP = 0.1


class ProxyModel:
    """A fine-tuned encoder; ``fit`` it first.

    Args:
        model: Where its weights start.
        num_threads: Threads of training and inference.
    """

    def __init__(self, model: str | Path = DEFAULT_ENCODER, *, num_threads: int = 1) -> None:
        import torch

        self._encoder = SentenceEncoder(
            model, precision="fp32", max_tokens=MAX_TOKENS, num_threads=num_threads
        )
        self._network = self._encoder.network
        self._recorded: Any = None
        torch.manual_seed(0)
        self._head = torch.nn.Linear(self._encoder.dim, NUM_LEVELS)
        self._center, self._spread = 0.0, 1.0
        self._num_threads = num_threads

    def fit(
        self,
        corpus: Corpus,
        *,
        seconds: float,
        num_epochs: int = 2,
        seed: int = 0,
        report: Callable[[str, int, int], None] = lambda *_: None,
    ) -> dict[str, float]:
        """Train until ``num_epochs`` are done or ``seconds`` are over.

        The learning rate falls to zero over whichever comes first.

        Returns:
            Epochs, steps and seconds of the training.
        """
        import torch

        torch.set_num_threads(self._num_threads)
        target = np.log(np.maximum(corpus.lengths.astype(np.float64), 1.0))
        self._center, self._spread = float(target.mean()), float(max(target.std(), 1e-3))
        truth = torch.from_numpy(((target - self._center) / self._spread).astype(np.float32))
        ids = [self._encoder.token_ids(prompt) for prompt in corpus.prompts]
        levels = torch.tensor(LEVELS, dtype=torch.float32)
        with torch.no_grad():
            start = torch.quantile(truth, levels)
            gaps = torch.log(torch.expm1(torch.clamp(start.diff(), min=1e-2)))
            self._head.weight.mul_(0.1)
            self._head.bias.copy_(torch.cat([start[:1], gaps]))
        optimizer = torch.optim.AdamW(
            [
                {"params": self._network.parameters(), "lr": _LEARNING_RATE},
                {"params": self._head.parameters(), "lr": _HEAD_RATE},
            ],
            weight_decay=0.01,
        )
        rates = [group["lr"] for group in optimizer.param_groups]
        rng = np.random.default_rng(seed)
        num_steps = num_epochs * -(-len(ids) // _BATCH)
        begin, step = time.monotonic(), 0
        self._network.train()
        for batch in self._batches(ids, num_epochs, rng):
            done = max(step / num_steps, (time.monotonic() - begin) / seconds)
            if done >= 1.0:
                break
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * min(done / _WARM_UP, (1.0 - done) / (1.0 - _WARM_UP))
            error = truth[batch][:, None] - self._forward([ids[i] for i in batch])
            loss = torch.maximum(levels * error, (levels - 1.0) * error).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            report("proxy", int(1000 * done), 1000)
        self._network.eval()
        return {
            "epochs": step * _BATCH / max(1, len(ids)),
            "steps": step,
            "seconds": time.monotonic() - begin,
        }

    @property
    def network(self) -> Any:
        """The encoder that is trained."""
        return self._network

    def save_encoder(self, folder: Path) -> Path:
        """Write the trained encoder, without its head, as `embed.SentenceEncoder` reads it."""
        folder.mkdir(parents=True, exist_ok=True)
        self._network.save_pretrained(str(folder))
        shutil.copy(self._encoder.folder / "tokenizer.json", folder / "tokenizer.json")
        pooling = folder / "1_Pooling"
        pooling.mkdir(exist_ok=True)
        (pooling / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
        return folder

    def quantize(self) -> None:
        """Turn its linear layers to INT8 and record it, which those papers do not do."""
        self._network = quantized(self._network)
        self._recorded = recorded(self._network, MAX_TOKENS)

    @property
    def num_bytes(self) -> int:
        """Memory of the weights."""
        return self._encoder.num_bytes

    def quantiles(self, texts: Sequence[str]) -> FloatArray:
        """Lengths at ``LEVELS`` [n, 10]."""
        import torch

        ids = [self._encoder.token_ids(text) for text in texts]
        order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
        result = np.empty((len(ids), NUM_LEVELS))
        with torch.inference_mode():
            for start in range(0, len(order), _BATCH):
                chosen = order[start : start + _BATCH]
                result[chosen] = self._forward([ids[i] for i in chosen]).numpy()
        return np.exp(np.clip(result * self._spread + self._center, 0.0, 12.0))

    def _batches(self, ids: list[list[int]], num_epochs: int, rng: np.random.Generator) -> Any:
        sizes = np.array([len(each) for each in ids])
        for _ in range(num_epochs):
            # Of about equal length, with noise so that batches differ between epochs.
            order = np.argsort(sizes * rng.uniform(0.8, 1.25, len(sizes)))
            pieces = [order[i : i + _BATCH] for i in range(0, len(order), _BATCH)]
            for piece in rng.permutation(len(pieces)):
                yield pieces[piece]

    def _forward(self, ids: list[list[int]]) -> Any:
        import torch

        width = max(map(len, ids))
        padded = torch.zeros(len(ids), width, dtype=torch.int64)
        mask = torch.zeros(len(ids), width, dtype=torch.int64)
        for row, each in enumerate(ids):
            padded[row, : len(each)] = torch.tensor(each)
            mask[row, : len(each)] = 1
        hidden = hidden_states(self._network, self._recorded, padded, mask)
        shares = mask.unsqueeze(-1).to(hidden.dtype)
        raw = self._head((hidden * shares).sum(1) / shares.sum(1))
        steps = torch.nn.functional.softplus(raw[:, 1:])
        return torch.cumsum(torch.cat([raw[:, :1], steps], dim=1), dim=1)
