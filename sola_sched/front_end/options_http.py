"""The options in force, on vLLM's own server: `GET /sola/options`.

The answer is a JSON object: the `options`, the `options_file` that can change them (null without
that option), and the `problem`, why the present content of the file does not hold (null if it
does). The front end reads the file by itself, so the answer is there while the engine is busy. What
only the engine refuses, as a planner of its own does, is in force here until the engine's next
report says so. So is the first form of a file that changes twice before the engine's next step, the
second time to a wrong one.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from sola_sched.config.live_options import LiveOptions
from sola_sched.config.policies import is_built_in, policy_class
from sola_sched.config.sola_config import SolaConfig
from sola_sched.front_end import server_args
from sola_sched.front_end.json_answers import Send, send_json

PATH = "/sola/options"
MIDDLEWARE = "sola_sched.front_end.options_http.OptionsMiddleware"

#: Of the engines of this process, by what their command lines say; the last is the server's.
_in_force: dict[str, LiveOptions] = {}


def options_in_force(additional: Any) -> LiveOptions:
    """The options of an engine, as its file says by now.

    Args:
        additional: The whole of its ``--additional-config``.

    Raises:
        ConfigError: They break a rule, the first time that they are asked for.
    """
    key = repr(additional)
    options = _in_force.get(key)
    if options is None:
        options = _in_force[key] = LiveOptions(additional)
    else:
        look(options)
    return options


def look(options: LiveOptions) -> None:
    """Take over what the file says, if it has changed and no policy of others refuses it."""
    options.look(_try_out)


def _try_out(config: SolaConfig) -> None:
    """Make a policy of others, which may refuse options.

    Policies of this package refuse none that the rules allow. They are not made here, since
    `attain` would be compiled in the process that answers requests.
    """
    if not is_built_in(config.policy):
        policy_class(config.policy)(config)


class OptionsMiddleware:
    """Answers this path.

    Args:
        app: The ASGI application.
    """

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        """Answer one connection."""
        is_ours = scope["type"] == "http" and scope["path"] == PATH and scope["method"] == "GET"
        if is_ours and _in_force:
            await send_json(send, HTTPStatus.OK, answer([*_in_force.values()][-1]))
        else:
            await self.app(scope, receive, send)


def answer(options: LiveOptions) -> dict[str, Any]:
    """The body of an answer."""
    look(options)
    path = options.path
    return {
        "options": options.options,
        "options_file": None if path is None else str(path),
        "problem": options.problem,
    }


def add_middleware(args: Any) -> None:
    """Add this path to a server whose engine has a scheduler of this package.

    Args:
        args: The server's arguments.
    """
    server_args.add_middleware(args, MIDDLEWARE)
