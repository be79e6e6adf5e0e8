"""The network of a sentence encoder in INT8, as one graph, inside sentence-transformers.

That library's own INT8 needs packages that do not go with vLLM: optimum-onnx asks for transformers
before 4.58, optimum-intel for one before 5.6, vLLM 0.32 for 5.16.1. What is left is its torch
backend, which takes 1.8 to 2.9 times as long a prompt (`benchmarks/predictor/README.md`, "The
encoder"): INT8 makes the difference, and one graph without Python between its operations.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch

from sola_sched.errors import EncoderError

logger = logging.getLogger("vllm.sola_sched.length_predictor")


class Int8Network(torch.nn.Module):
    """Takes the place of a network of transformers inside a `SentenceTransformer`.

    Args:
        network: On the CPU; left as it is.
        max_tokens: Of the longest text.

    Raises:
        EncoderError: This torch has no INT8 kernels.
    """

    def __init__(self, network: Any, max_tokens: int) -> None:
        super().__init__()
        self.config = network.config
        linear = (each for each in network.modules() if isinstance(each, torch.nn.Linear))
        #: Memory of the weights; of a linear layer's four bytes each, one is left.
        self.num_bytes = (
            sum(each.nbytes for each in network.parameters())
            - 3 * sum(each.weight.nbytes for each in linear) // 4
        )
        states = _States(_quantized(network.eval())).eval()
        self.graph = _recorded(states, self.config.vocab_size, max_tokens)

    def forward(self, input_ids: Any, attention_mask: Any, **_: Any) -> dict[str, Any]:
        """States [n, m, dim] of token ids and mask [n, m], under the name transformers uses."""
        return {"last_hidden_state": self.graph(input_ids, attention_mask)}


class _States(torch.nn.Module):
    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, ids: Any, mask: Any) -> Any:
        return self.network(input_ids=ids, attention_mask=mask, return_dict=False)[0]


def _quantized(network: Any) -> Any:
    """A copy with INT8 linear layers."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch announces a successor in another package
            # A scale per output channel costs nothing here and halves the error of the vectors.
            scheme = torch.ao.quantization.per_channel_dynamic_qconfig
            return torch.ao.quantization.quantize_dynamic(network, {torch.nn.Linear: scheme})
    except (AttributeError, ImportError, RuntimeError) as error:
        raise EncoderError(
            f"torch {torch.__version__} must have INT8 kernels for this CPU ({error}); "
            "use precision fp32."
        ) from error


def _recorded(states: _States, vocab_size: int, max_tokens: int) -> Any:
    """The network as one graph; itself if a record is not true to it.

    A record holds for other shapes only if the model's own code does not look at them, so a few
    are tried.
    """

    def some_texts(num_texts: int, length: int) -> tuple[Any, Any]:
        ids = (torch.arange(num_texts * length) * 7919 % vocab_size).view(num_texts, length)
        mask = torch.ones_like(ids)
        mask[1:, (length + 1) // 2 :] = 0  # all but the first are padded
        return ids, mask

    try:
        with warnings.catch_warnings(), torch.inference_mode():
            warnings.simplefilter("ignore")  # branches on shapes are what is tried below
            graph = torch.jit.freeze(torch.jit.trace(states, some_texts(2, 16)))
            for shape in ((1, 1), (1, 5), (3, max_tokens // 2), (1, max_tokens)):
                ids, mask = some_texts(*shape)
                is_token = mask.bool()
                torch.testing.assert_close(
                    graph(ids, mask)[is_token], states(ids, mask)[is_token], rtol=1e-4, atol=1e-4
                )
    except Exception as error:  # whatever a model's code may raise
        logger.info("sola_sched: the encoder runs unrecorded: %s", str(error).split("\n", 1)[0])
        return states
    return graph
