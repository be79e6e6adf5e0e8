"""Forms, which the paths of speech take: what a gateway reads and changes in them."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("aiohttp")

from gateway_clients import Echo
from gateway_clients import echoed as asked
from listeners import post, status_of

PATH = "/v1/completions"
FORM = "Content-Type: multipart/form-data; boundary=b"
SPOKEN = "/v1/audio/transcriptions"


def form(*values: tuple[str, str]) -> bytes:
    """A form."""
    parts = (f'--b\r\nContent-Disposition: form-data; name="{n}"\r\n\r\n{v}\r\n' for n, v in values)
    return ("".join(parts) + "--b--\r\n").encode()


def test_targets_of_headers_go_on_in_a_form_too() -> None:
    echo = Echo()
    lines = (FORM, "x-slo-ttft-ms: 200")

    asked(post(SPOKEN, form(("model", "m")), *lines),
          post(SPOKEN, form(("vllm_xargs", '{"ttft_slo_ms": 5, "a": 1}')), *lines),
          post(SPOKEN, form(("model", "m")), FORM), echo=echo)  # fmt: skip

    assert echo.bodies[0] == form(("vllm_xargs", '{"ttft_slo_ms": 200.0}'), ("model", "m"))
    assert echo.bodies[1] == form(("vllm_xargs", '{"ttft_slo_ms": 5, "a": 1}'))
    assert echo.bodies[2] == form(("model", "m"))


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        (SPOKEN, form(*[("a", "1")] * 300), "256 parts at most"),
        (SPOKEN, form(("vllm_xargs", "{}"), ("vllm_xargs", "{}")), "'vllm_xargs' once"),
        (SPOKEN, form(("vllm_xargs", "[" * 50_000)), "the body must be"),
        (SPOKEN, form(("vllm_xargs", "[1]")), "'vllm_xargs' must be an object"),
        (SPOKEN, form(("vllm_xargs", f'{{"a": "{"x" * 2**17}"}}')), "longer than"),
        (SPOKEN, form(('a"; name*0="b', "1")), "must have one name"),
        (PATH, form(("vllm_xargs", "{}")), "must be a JSON object"),
        ("/v1/chat/completions", form(*[("a", "1")] * 300), "must be a JSON object"),
    ],
)
def test_a_form_that_no_client_writes_is_refused_with_the_rule(
    path: str, body: bytes, told: str
) -> None:
    echo = Echo()

    (answer,) = asked(post(path, body, FORM), echo=echo)

    message = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
    assert (status_of(answer), echo.bodies) == (400, [])
    assert told in message
