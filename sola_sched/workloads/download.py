"""Where the public data sets live, and how they are fetched once into the user's cache."""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from sola_sched.config.cache_dir import user_cache_dir
from sola_sched.config.progress_bar import tqdm_class
from sola_sched.errors import DatasetError

_CONNECT_TIMEOUT_S = 15.0
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class PublicFile:
    """A file that can be downloaded without an account."""

    url: str
    name: str


PUBLIC_FILES = {
    "sharegpt": PublicFile(
        "https://huggingface.co/datasets/anon8231489123/ShareGPT_Vicuna_unfiltered/resolve/main/"
        "ShareGPT_V3_unfiltered_cleaned_split.json",
        "ShareGPT_V3_unfiltered_cleaned_split.json",
    ),
    "longbench": PublicFile(
        "https://huggingface.co/datasets/THUDM/LongBench/resolve/main/data.zip", "longbench.zip"
    ),
    "alpaca": PublicFile(
        "https://raw.githubusercontent.com/tatsu-lab/stanford_alpaca/main/alpaca_data.json",
        "alpaca_data.json",
    ),
    "azure": PublicFile(
        "https://raw.githubusercontent.com/Azure/AzurePublicDataset/master/data/"
        "AzureLLMInferenceTrace_conv.csv",
        "AzureLLMInferenceTrace_conv.csv",
    ),
    "burstgpt": PublicFile(
        "https://github.com/HPMLL/BurstGPT/releases/download/v1.1/BurstGPT_without_fails_2.csv",
        "BurstGPT_without_fails_2.csv",
    ),
    "mooncake": PublicFile(
        "https://raw.githubusercontent.com/kvcache-ai/Mooncake/main/FAST25-release/traces/"
        "conversation_trace.jsonl",
        "mooncake_conversation_trace.jsonl",
    ),
}


def fetch(dataset_name: str, *, cache_dir: Path | None = None, quiet: bool = False) -> Path:
    """Return the local copy of a public data set, downloaded on first use.

    Raises:
        DatasetError: It cannot be downloaded; the message names the file and where to get it.
    """
    public = PUBLIC_FILES[dataset_name]
    path = (cache_dir or user_cache_dir()) / "datasets" / public.name
    if path.exists():
        return path
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    tqdm = tqdm_class()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with urllib.request.urlopen(public.url, timeout=_CONNECT_TIMEOUT_S) as reply:
            total = int(reply.headers.get("Content-Length") or 0) or None
            with (
                partial.open("wb") as out,
                tqdm(
                    total=total, unit="B", unit_scale=True, desc=public.name, disable=quiet
                ) as bar,
            ):
                num_bytes = 0
                while piece := reply.read(_PIECE_BYTES):
                    out.write(piece)
                    num_bytes += len(piece)
                    bar.update(len(piece))
                if total is not None and num_bytes < total:
                    raise OSError(f"connection closed after {num_bytes} of {total} bytes")
        os.replace(partial, path)
    except (OSError, urllib.error.URLError) as error:
        partial.unlink(missing_ok=True)
        raise DatasetError(
            f"'--dataset-name {dataset_name}' needs the file {public.name}, which could not be "
            f"downloaded ({error}). Get it from {public.url} and pass it with --dataset-path; "
            "'--dataset-name sharegpt-like' needs no file."
        ) from error
    return path
