"""Ray Serve's REST interface without Ray: applications start after a few looks, or fail."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from raw_answers import serving


@dataclass
class FakeServe:
    """Holds applications.

    Attributes:
        bad_models: Engines of these fail to start.
        refuse: Message with which every configuration is refused.
        looks: Times that somebody has to look before a change is done.
        history: Names of the applications after each configuration.
        started: Names of applications, once for each time that they were started or changed.
    """

    bad_models: set[str] = field(default_factory=set)
    refuse: str = ""
    looks: int = 2
    history: list[list[str]] = field(default_factory=list)
    started: list[str] = field(default_factory=list)
    _configs: dict[str, dict[str, Any]] = field(default_factory=dict)
    _gone: dict[str, dict[str, Any]] = field(default_factory=dict)
    _left: dict[str, int] = field(default_factory=dict)

    def put(self, config: dict[str, Any]) -> None:
        """As the controller does: start what is new or changed, end what is left out."""
        wanted = {app["name"]: app for app in config["applications"]}
        for name, app in wanted.items():
            if name not in self._configs or self._configs[name]["args"] != app["args"]:
                self.started.append(name)
                self._left[name] = self.looks
        for name in set(self._configs) - set(wanted):
            self._left[name] = self.looks
        self._gone = {n: c for n, c in self._configs.items() if n not in wanted}
        self._configs = wanted
        self.history.append(sorted(wanted))

    def details(self) -> dict[str, Any]:
        """Serve's answer."""
        shown = {}
        for name, config in [*self._configs.items(), *self._gone.items()]:
            left = self._left[name] = max(0, self._left.get(name, 0) - 1)
            if name in self._gone:
                if left:
                    shown[name] = {"status": "DELETING", "deployed_app_config": config}
                continue
            args = config["args"]
            is_bad = args["model"] in self.bad_models and args.get("front") == "none"
            status = "DEPLOYING" if left else "DEPLOY_FAILED" if is_bad else "RUNNING"
            shown[name] = {
                "status": status,
                "message": "Failed to update the deployments ['engine-0']." if is_bad else "",
                "deployed_app_config": config,
                "deployments": {"gateway": {"replicas": [{"node_ip": "127.0.0.1"}]}}
                if args.get("follows")
                else {"engine-0": {"message": "no such model" if is_bad else ""}},
            }
        return {"applications": shown}

    @property
    def engines(self) -> dict[str, dict[str, Any]]:
        """Arguments of the engines that there are, by application."""
        return {n: c["args"] for n, c in self._configs.items() if c["args"].get("front") == "none"}

    @property
    def configs(self) -> list[dict[str, Any]]:
        """Of all applications."""
        return list(self._configs.values())

    @property
    def names(self) -> list[str]:
        """Of all applications."""
        return sorted(self._configs)

    @contextmanager
    def running(self) -> Iterator[str]:
        """Serve it; the address."""
        serve = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(200, json.dumps(serve.details()))

            def do_PUT(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if serve.refuse:
                    self._answer(400, serve.refuse)
                    return
                serve.put(body)
                self._answer(200, "")

            def _answer(self, status: int, text: str) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: object) -> None:
                """Nothing."""

        with serving(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as address:
            yield address
