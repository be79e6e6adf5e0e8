"""Option errors where they are found first: before the model loads, in one line.

vLLM asks nobody about ``--additional-config`` before a scheduler is built, which is after the
weights have been loaded. `EngineArgs` knows options and scheduler together; there they are read,
and the files that they name.
"""

from __future__ import annotations

import sys
from functools import wraps
from pathlib import Path
from typing import Any

from sola_sched.config.live_options import LiveOptions
from sola_sched.config.sola_config import SolaConfig
from sola_sched.cost.file import read_profile
from sola_sched.errors import ConfigError, EncoderError, PredictorFileError, ProfileError

_MARK = "_sola_sched_is_plain"


def read_options(additional_config: Any) -> SolaConfig:
    """The options of an engine, the files that they name read once.

    Raises:
        ConfigError, ProfileError, PredictorFileError, EncoderError: The engine would not start with
            these, or without what they ask for.
    """
    config = LiveOptions(additional_config).config
    if config.profile is not None:
        read_profile(config.profile)
    if config.predictor_path is not None:
        from sola_sched.length_predictor.storage import check_file

        check_file(
            Path(config.predictor_path), config.predictor, is_written=config.predictor_save_s > 0
        )
    if config.predictor == "retrieval":
        from sola_sched.length_predictor.retrieval.embed import DEFAULT_ENCODER, find_encoder

        folder = find_encoder(config.predictor_encoder or DEFAULT_ENCODER)
        if config.predictor_path is not None and Path(config.predictor_path).exists():
            from sola_sched.length_predictor.storage import check_encoder

            check_encoder(Path(config.predictor_path), folder)
    return config


def print_option_errors_plainly() -> None:
    """An option error that ends the process is its message alone, as those of the command line."""
    original = sys.excepthook
    if getattr(original, _MARK, False):
        return

    @wraps(original)
    def hook(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        if isinstance(error, ConfigError | ProfileError | PredictorFileError | EncoderError):
            print(f"sola_sched: error: {error}", file=sys.stderr)
        else:
            original(kind, error, traceback)

    setattr(hook, _MARK, True)
    sys.excepthook = hook
