"""Prompts with images, as far as a scheduler sees them; needs vLLM."""

from __future__ import annotations

from collections.abc import Iterator

from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from sola_sched.simulator import VirtualRequest

#: Tokens of an image.
IMAGE = 64


def images(request: VirtualRequest) -> Iterator[MultiModalFeatureSpec]:
    """One for every 200 tokens of the prompt."""
    for offset in range(0, request.num_prompt_tokens - IMAGE, 200):
        name = f"{request.req_id}-{offset}"
        place = PlaceholderRange(offset=offset, length=IMAGE)
        yield MultiModalFeatureSpec(None, "image", name, place)
