"""What the copy of whole blocks refuses; what it copies is in ``tests/kv_swap/test_packing.py``."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("triton", reason="needs Triton")

from sola_sched.kernels.pages import gather_pages, pages_of, scatter_pages  # noqa: E402


def make_caches(num_layers: int = 2) -> list[torch.Tensor]:
    """``[4 blocks, 8 tokens, 6 channels]`` fp16: 12 words a block."""
    return [torch.zeros(4, 8, 6, dtype=torch.float16) for _ in range(num_layers)]


@pytest.mark.parametrize(
    ("caches", "message"),
    [
        ([], "must hold a layer"),
        ([torch.zeros(4, 8, 12)[:, :, ::2]], "must have no gap in memory"),
        ([torch.zeros(4, 5, dtype=torch.float16)], "multiples of 8 bytes"),
        ([torch.zeros(4, 8, 6), torch.zeros(5, 8, 6)], "must have one shape"),
    ],
)
def test_blocks_that_are_no_equal_runs_of_words_are_refused(
    caches: list[torch.Tensor], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        pages_of(caches)


@pytest.mark.parametrize(
    ("table", "image", "error", "message"),
    [
        (torch.tensor([1.0, 2.0]), torch.zeros(2, 2, 12).long(), TypeError, "'block_table' must"),
        (torch.tensor([[1, 2]]), torch.zeros(2, 2, 12).long(), ValueError, "one contiguous row"),
        (torch.tensor([1, 2]), torch.zeros(2, 2, 12), ValueError, "the image must be int64"),
        (torch.tensor([1, 2]), torch.zeros(2, 3, 12).long(), ValueError, r"shape \[2, 2, 12\]"),
        (torch.tensor([1, 2]), torch.zeros(2, 2, 24).long()[:, :, ::2], ValueError, "contiguous"),
    ],
)
def test_tables_and_images_that_do_not_fit_are_refused(
    table: torch.Tensor, image: torch.Tensor, error: type[Exception], message: str
) -> None:
    pages = pages_of(make_caches())

    with pytest.raises(error, match=message):
        gather_pages(pages, table, image)
    with pytest.raises(error, match=message):
        scatter_pages(image, pages, table)
