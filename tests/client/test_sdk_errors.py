"""Answers as errors of the one tree."""

import json
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forkd import errors
from forkd.client.failures import BY_CODE, error_of_answer, error_of_transport
from forkd.client.retry import Fate, fate_of

URL = "http://localhost/v1/x"


def answered(status: int, body: Any) -> errors.ForkdError:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return error_of_answer(httpx.Response(status, content=raw, request=httpx.Request("GET", URL)))


@pytest.mark.parametrize("code", sorted(BY_CODE.keys() - {"unauthorized"}))
def test_every_code_of_the_tree_comes_back_as_its_class(code: str) -> None:
    body = {"error": "It failed", "code": code, "hint": "Do this", "details": "line"}
    error = answered(418, body)
    assert type(error) is BY_CODE[code] and error.code == code
    assert (error.message, error.hint, error.details) == ("It failed", "Do this", "line")
    assert (error.status, error.body, error.url) == (418, body, URL)


def test_a_code_nobody_knows_is_kept() -> None:
    error = answered(403, {"error": "No", "code": "odd", "hint": None})
    assert type(error) is errors.ForkdError and error.code == "odd" and errors.ForkdError.code == "internal"


@pytest.mark.parametrize(
    ("code", "kind", "exit_code"),
    [("denied", errors.AgentError, 15), ("not_dir", errors.AgentError, 15), ("no_space", errors.GuestFull, 15)],
)
def test_what_a_guest_refuses_is_not_taken_for_a_fault_of_forkd(
    code: str, kind: type[errors.ForkdError], exit_code: int
) -> None:
    error = answered(409, {"error": "No", "code": code, "hint": None})
    assert (type(error), error.code, error.exit_code) == (kind, code, exit_code)


def test_a_token_that_is_refused_comes_with_what_to_do() -> None:
    error = answered(401, {"error": "Unauthorized", "code": "unauthorized", "hint": "Send a header"})
    assert isinstance(error, errors.Unauthorized) and "FORKD_TOKEN" in (error.hint or "")


def test_a_hint_for_those_who_write_http_is_replaced() -> None:
    error = answered(400, {"error": "n: wrong", "code": "invalid_input", "hint": "See /openapi.json for what it takes"})
    assert isinstance(error, errors.InvalidInput) and error.hint == "Correct the value that is named"


def test_a_hint_is_a_note_and_can_be_changed() -> None:
    error = errors.NotFound("No", hint="Do this")
    assert error.__notes__ == ["Hint: Do this"]
    error.hint = "Do that"
    assert error.__notes__ == ["Hint: Do that"] and error.hint == "Do that"
    error.hint = None
    assert error.__notes__ == []


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, errors.InvalidInput),
        (404, errors.NotFound),
        (409, errors.Conflict),
        (501, errors.Unsupported),
        (500, errors.ForkdError),
    ],
)
def test_without_a_code_the_status_decides(status: int, kind: type[errors.ForkdError]) -> None:
    assert type(answered(status, {"error": "snapshot not found"})) is kind
    plain = answered(status, b"<html>\n  what?</html>")
    assert type(plain) is kind and plain.body == "<html>\n  what?</html>" and "<html> what?</html>" in str(plain)


@given(st.integers(300, 599), st.binary(max_size=200))
def test_any_answer_becomes_an_error(status: int, body: bytes) -> None:
    assert answered(status, body).status == status


@given(
    st.dictionaries(
        st.sampled_from(["error", "code", "hint", "details"]), st.one_of(st.none(), st.integers(), st.text())
    )
)
def test_fields_of_wrong_types_are_not_there(body: dict[str, Any]) -> None:
    error = answered(500, body)
    assert error.hint is None or isinstance(error.hint, str)


@pytest.mark.parametrize(
    ("error", "fate"),
    [
        (httpx.ConnectError("refused"), Fate.UNSENT),
        (httpx.ConnectTimeout("slow"), Fate.UNSENT),
        (httpx.PoolTimeout("full"), Fate.UNSENT),
        (httpx.ReadTimeout("slow"), Fate.SLOW),
        (httpx.WriteTimeout("slow"), Fate.SLOW),
        (httpx.ReadError("reset"), Fate.LOST),
        (httpx.WriteError("reset"), Fate.LOST),
        (httpx.RemoteProtocolError("closed"), Fate.LOST),
    ],
)
def test_what_is_known_of_a_broken_connection(error: httpx.HTTPError, fate: Fate) -> None:
    assert fate_of(error) is fate
    said = error_of_transport(error, name="unix:///x", url=URL)
    assert ("nothing was sent" in said.message) is (fate is Fate.UNSENT)
    assert ("unknown" in said.message) is (fate is not Fate.UNSENT)


def test_a_certificate_nobody_trusts_is_told_from_a_daemon_that_is_not_there() -> None:
    error = httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] unable to get local issuer certificate")
    assert "SSL_CERT_FILE" in (error_of_transport(error, name="https://h", url=URL).hint or "")
