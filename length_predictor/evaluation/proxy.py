"""The baseline that ALISE compares with: a small encoder fine-tuned to predict the length.

Source: ALISE (Zhao and Wang, ICCAD 2024), section 4.3, after S^3 (DistilBERT, buckets) and SSJF
(BERT, regression). Here MiniLM, from the weights the retrieval predictor uses, all six layers
trained for a bounded time, mean pooling and a linear head of ten quantiles of log-length, so that
both are judged by the same loss. As in those papers it reads the whole prompt up to 512 tokens in
full precision. It does not learn from traffic.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sola_sched.length_predictor.corpus import Corpus
from sola_sched.length_predictor.retrieval.embed import DEFAULT_ENCODER, find_encoder, load_model
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

        self._model = load_model(find_encoder(model), MAX_TOKENS)
        torch.manual_seed(0)
        self._head = torch.nn.Linear(self._model.get_embedding_dimension(), NUM_LEVELS)
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
        levels = torch.tensor(LEVELS, dtype=torch.float32)
        with torch.no_grad():
            start = torch.quantile(truth, levels)
            gaps = torch.log(torch.expm1(torch.clamp(start.diff(), min=1e-2)))
            self._head.weight.mul_(0.1)
            self._head.bias.copy_(torch.cat([start[:1], gaps]))
        optimizer = torch.optim.AdamW(
            [
                {"params": self.network.parameters(), "lr": _LEARNING_RATE},
                {"params": self._head.parameters(), "lr": _HEAD_RATE},
            ],
            weight_decay=0.01,
        )
        rates = [group["lr"] for group in optimizer.param_groups]
        rng = np.random.default_rng(seed)
        num_steps = num_epochs * -(-len(corpus) // _BATCH)
        begin, step = time.monotonic(), 0
        self.network.train()
        for batch in self._batches(corpus.prompts, num_epochs, rng):
            done = max(step / num_steps, (time.monotonic() - begin) / seconds)
            if done >= 1.0:
                break
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * min(done / _WARM_UP, (1.0 - done) / (1.0 - _WARM_UP))
            error = truth[batch][:, None] - self._forward([corpus.prompts[i] for i in batch])
            loss = torch.maximum(levels * error, (levels - 1.0) * error).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            report("proxy", int(1000 * done), 1000)
        self.network.eval()
        return {
            "epochs": step * _BATCH / max(1, len(corpus)),
            "steps": step,
            "seconds": time.monotonic() - begin,
        }

    @property
    def network(self) -> Any:
        """The encoder's network, which is trained."""
        return self._model[0].model

    def save_encoder(self, folder: Path) -> Path:
        """Write the trained encoder, without its head, as sentence-transformers does."""
        self._model.save_pretrained(str(folder), create_model_card=False)
        return folder

    def quantize(self) -> None:
        """Turn the network to INT8 and one graph, which those papers do not do."""
        from sola_sched.length_predictor.retrieval.int8 import Int8Network

        self._model[0].model = Int8Network(self.network, MAX_TOKENS)

    @property
    def num_bytes(self) -> int:
        """Memory of the weights."""
        return sum(each.nbytes for each in self.network.parameters())

    def quantiles(self, texts: Sequence[str]) -> FloatArray:
        """Lengths at ``LEVELS`` [n, 10]."""
        import torch

        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        result = np.empty((len(texts), NUM_LEVELS))
        with torch.inference_mode():
            for start in range(0, len(order), _BATCH):
                chosen = order[start : start + _BATCH]
                result[chosen] = self._forward([texts[i] for i in chosen]).numpy()
        return np.exp(np.clip(result * self._spread + self._center, 0.0, 12.0))

    def _batches(self, texts: Sequence[str], num_epochs: int, rng: np.random.Generator) -> Any:
        sizes = np.array([len(each) for each in texts])
        for _ in range(num_epochs):
            # Of about equal length, with noise so that batches differ between epochs.
            order = np.argsort(sizes * rng.uniform(0.8, 1.25, len(sizes)))
            pieces = [order[i : i + _BATCH] for i in range(0, len(order), _BATCH)]
            for piece in rng.permutation(len(pieces)):
                yield pieces[piece]

    def _forward(self, texts: Sequence[str]) -> Any:
        import torch

        network, pooling = self._model[0], self._model[1]
        # Not normalized: the length of a mean of states is a feature like any other.
        pooled = pooling(network(self._model.preprocess(texts)))["sentence_embedding"]
        raw = self._head(pooled)
        steps = torch.nn.functional.softplus(raw[:, 1:])
        return torch.cumsum(torch.cat([raw[:, :1], steps], dim=1), dim=1)
