"""Options that change while a server runs: those of a file, instead of those at its start.

The file (option ``options_file``) is a JSON object of options. Each replaces the option of the
command line; without the file, those hold. What is read is checked as a whole: a file with anything
wrong in it changes nothing. All processes of a server read the same file, so each has the same
options in force without being told. Only where an engine cannot go on with what the rules allow,
as its policy refuses it, the others are told (`LiveOptions.refusal`) and follow.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sola_sched.config import rules
from sola_sched.config.sola_config import CONFIG_KEY, SolaConfig
from sola_sched.errors import ConfigError

#: Options that the file may hold. All others are read once, when the engine or the server starts.
CHANGEABLE = (
    "ttft_s", "tpot_s", "e2e_s", "classes", "max_wait_s", "best_effort_share", "safety", "steer",
    "log_missed", "plan_limit_s",
)  # fmt: skip
_FILE = "options_file"


class LiveOptions:
    """The options in force.

    Args:
        additional: The whole of ``--additional-config``.

    Attributes:
        config: The options.
        options: The same as an operator would write them.
        path: Of the file; None without the option.
        problem: Why the present content of the file does not hold; None if it does.

    Raises:
        ConfigError: They break a rule at start.
    """

    def __init__(self, additional: Any) -> None:
        self.config = SolaConfig.from_additional(additional)
        given = additional.get(CONFIG_KEY) if isinstance(additional, Mapping) else None
        self._given = {key: value for key, value in (given or {}).items() if key != _FILE}
        self.options: Mapping[str, Any] = self._given
        self.path = None if self.config.options_file is None else Path(self.config.options_file)
        self.problem: str | None = None
        self._stamp: tuple[int, ...] | None = None
        if self.path is not None:
            self._stamp = _stamp(self.path)
            self.options, self.config = self._read(self.path)

    def look(self, try_out: Callable[[SolaConfig], object] | None = None) -> str | None:
        """Take over what the file says, if it has changed.

        Args:
            try_out: Called with the options before they hold; they do not if it raises, except
                for a rollback, which has to hold at once.

        Returns:
            What has happened, for the log; None if the file has not changed.
        """
        path = self.path
        if path is None or (stamp := _stamp(path)) == self._stamp:
            return None
        self._stamp = stamp
        but = ""
        try:
            options, config = self._read(path)
            if try_out is not None and config != self.config:
                but = self._try(try_out, options, config)
        except Exception as error:  # whatever is wrong with it, it changes nothing
            self.problem = str(error) if isinstance(error, ConfigError) else repr(error)
            return f"options stay as they were: {self.problem}"
        before, self.options, self.config, self.problem = self.config, options, config, None
        if changes := _changes(before, config):
            return f"options changed ({path}): {changes}{but}"
        return f"options unchanged ({path})"

    def refusal(self) -> dict[str, Any] | None:
        """What other processes have to know, as JSON: that the file does not hold, and what does.

        None while the file holds.
        """
        if self.problem is None:
            return None
        return {"file": self._stamp, "problem": self.problem, "options": dict(self.options)}

    def follow(self, refusal: Mapping[str, Any]) -> None:
        """Go on with the options of a process that refuses the file, if this one has read the same.

        Args:
            refusal: Its `refusal`, as it has arrived.
        """
        stamp = refusal["file"]
        if self.path is None or (None if stamp is None else tuple(stamp)) != self._stamp:
            return
        options = refusal["options"]
        self.config = SolaConfig.from_mapping({**options, _FILE: str(self.path)})
        self.options, self.problem = options, refusal["problem"]

    def _try(
        self,
        try_out: Callable[[SolaConfig], object],
        options: Mapping[str, Any],
        config: SolaConfig,
    ) -> str:
        """Try options out; gives what is to be said of those that hold all the same."""
        try:
            try_out(config)
        except Exception as error:
            if not self._is_rollback(options):
                raise
            return f"; the policy could not be made anew: {error!r}"
        return ""

    def _is_rollback(self, options: Mapping[str, Any]) -> bool:
        """Whether steering ends, and all else is as it is or as on the command line."""
        return options in ({**self.options, "steer": False}, {**self._given, "steer": False})

    def _read(self, path: Path) -> tuple[Mapping[str, Any], SolaConfig]:
        changes = _content(path)
        try:
            names = rules.option_names(SolaConfig)
            may_have = f"it may have: {', '.join(CHANGEABLE)}"
            rules.known_names(names, changes, "the file", may_have)
            for name in changes:
                if name not in CHANGEABLE:
                    raise ConfigError(
                        f"'{name}' cannot change while the server runs; these can: "
                        f"{', '.join(CHANGEABLE)}. Set it in --additional-config and restart."
                    )
            options = {**self._given, **changes}
            return options, SolaConfig.from_mapping({**options, _FILE: str(path)})
        except ConfigError as error:
            raise ConfigError(f"{error} (In '{_FILE}' {path}.)") from error


def _content(path: Path) -> dict[str, Any]:
    """The JSON object in the file; empty if there is no file."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"'{_FILE}' must be a file that can be read (got {path}: {error})."
        ) from error
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"'{_FILE}' must be a JSON object of options (got {path}: {error})."
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(
            f"'{_FILE}' must be a JSON object of options (got {path}: {rules.shown(content)})."
        )
    return content


def _stamp(path: Path) -> tuple[int, ...] | None:
    """What changes whenever the file does; None if it cannot be found."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _changes(before: SolaConfig, after: SolaConfig) -> str:
    """The options that differ, as in "'ttft_s' 2.0 -> 0.5"."""
    parts = []
    for name in (*CHANGEABLE, "shares"):
        old, new = getattr(before, name), getattr(after, name)
        if old != new:
            parts.append(f"'{name}' {_shown(old)} -> {_shown(new)}")
    return ", ".join(parts)


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + "; ".join(f"{name}: {each}" for name, each in value.items()) + "}"
    return str(value)
