"""Ray Serve's REST interface, as far as it is needed: what is deployed, and deploying."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Sequence
from typing import Any

from sola_sched.errors import DeploymentError
from sola_sched.plan.outputs.deploy import Application, serve_config

_PATH = "/api/serve/applications/"
#: Most that a part of an answer may take.
_LIMIT_S = 30.0
_POLL_S = 0.5
#: Bytes of an answer that is not Serve's in the message.
_SHOWN = 200
_FAILED = ("DEPLOY_FAILED", "UNHEALTHY")


class ServeApi:
    """Serve's own state is the only one: a controller that starts anew goes on from it.

    Args:
        address: Of Ray's dashboard, e.g. ``http://127.0.0.1:8265``.
        clock, sleep: For tests.
    """

    def __init__(
        self,
        address: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._address = address.rstrip("/")
        self._clock, self._sleep = clock, sleep

    def details(self) -> dict[str, dict[str, Any]]:
        """Serve's details of each application, by name.

        Raises:
            DeploymentError: Serve is not to be reached, or it is not Serve that answers.
        """
        text = self._ask("GET")
        try:
            return _applications(json.loads(text))
        except (ValueError, RecursionError) as error:
            begin = " ".join(text[:_SHOWN].decode(errors="replace").split())
            raise DeploymentError(
                f"what answers at {self._address} must be Ray's dashboard (got {begin!r}: {error})"
                "; correct '--address'."
            ) from error

    def deployed(self) -> list[Application]:
        """Configurations of all applications that were deployed by one, others' included."""
        return [
            {**config, "name": name}  # Serve shows only what was given, which a name need not be
            for name, each in self.details().items()
            if (config := each.get("deployed_app_config")) is not None
            and each.get("status") != "DELETING"
        ]

    def deploy(self, applications: Sequence[Application]) -> None:
        """Make these the applications that there are; unchanged ones are left alone.

        Raises:
            DeploymentError: Serve refuses them, or is not to be reached.
        """
        self._ask("PUT", serve_config(applications))

    def wait(self, running: Collection[str], gone: Collection[str], limit_s: float) -> None:
        """Until applications run, and others are gone.

        Raises:
            DeploymentError: One has failed, or it has taken too long.
        """
        end_s = self._clock() + limit_s
        while True:
            details = self.details()
            states = {name: details.get(name, {}) for name in running}
            failed = {n: each for n, each in states.items() if each.get("status") in _FAILED}
            if failed:
                name, each = next(iter(failed.items()))
                raise DeploymentError(
                    f"application {name!r} must start (Serve says {each['status']}: "
                    f"{_reason(each)}).",
                    failed,
                )
            late = [name for name, each in states.items() if each.get("status") != "RUNNING"]
            late += [name for name in gone if name in details]
            if not late:
                return
            if self._clock() >= end_s:
                raise DeploymentError(
                    f"applications must be started or stopped within {limit_s:g} s (got "
                    f"{', '.join(sorted(late))} that are not).",
                    set(late) & set(running),
                )
            self._sleep(_POLL_S)

    def _ask(self, method: str, body: Any = None) -> bytes:
        """What is answered.

        Raises:
            DeploymentError: With an error, or nothing.
        """
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(
                self._address + _PATH, data, {"Content-Type": "application/json"}, method=method
            )
            with urllib.request.urlopen(request, timeout=_LIMIT_S) as answer:
                text: bytes = answer.read()
        except urllib.error.HTTPError as error:
            must = "tell what is deployed" if body is None else "accept the configuration"
            raise DeploymentError(
                f"Serve at {self._address} must {must} (HTTP {error.code}: {_said(error)})."
            ) from error
        except (OSError, http.client.HTTPException, ValueError) as error:  # last: a bad address
            raise DeploymentError(
                f"Serve must be reached at {self._address} (got {error}); is Ray's dashboard there?"
            ) from error
        return text


def _applications(said: Any) -> dict[str, dict[str, Any]]:
    """Serve's details of each application.

    Raises:
        ValueError: What is read of them is of another form.
    """
    found = _object(_object(said, "it").get("applications"), "'applications'")
    for name, each in found.items():
        _object(each, f"application {name!r}")
        if each.get("deployed_app_config") is not None:
            _object(each["deployed_app_config"], "'deployed_app_config'")
        for part, deployment in _object(each.get("deployments", {}), "'deployments'").items():
            replicas = _object(deployment, f"deployment {part!r}").get("replicas", [])
            if not isinstance(replicas, list) or not all(isinstance(r, dict) for r in replicas):
                raise ValueError("'replicas' must be a list of objects")
    return found


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} must be an object")
    return value


def _said(error: urllib.error.HTTPError) -> str:
    try:
        return _short(error.read().decode(errors="replace"))
    except (OSError, http.client.HTTPException) as broken:
        return f"its text has not come, {broken!r}"


def _reason(application: dict[str, Any]) -> str:
    """Why it has failed: a deployment's message tells more than the application's."""
    deployments = application.get("deployments", {}).values()
    messages = [each.get("message") for each in deployments]
    return _short(str(next(filter(None, [*messages, application.get("message")]), "")))


def _short(text: str) -> str:
    return " ".join(text.split())[-400:]
