import json

from hypothesis import given
from hypothesis import strategies as st

from forkd.wire.json_pieces import PIECE_BYTES, render_pieces


@given(st.dictionaries(st.text(max_size=5), st.one_of(st.binary(max_size=100), st.integers(), st.none(), st.text())))
def test_pieces_are_the_json_of_the_whole(value: dict[str, object]) -> None:
    expected = {key: each.decode(errors="replace") if isinstance(each, bytes) else each for key, each in value.items()}
    assert b"".join(render_pieces(value, end=b"\n")) == json.dumps(expected).encode() + b"\n"


def test_a_character_or_an_error_across_two_pieces_is_one() -> None:
    output = "é€😀".encode() * 50_000 + b"\xff\xe2\x82" * 50_000 + b"\xf0\x9f"
    pieces = list(render_pieces({"stdout": output}))
    assert json.loads(b"".join(pieces)) == {"stdout": output.decode("utf-8", "replace")}
    assert len(pieces) > 5


def test_no_piece_is_large_whatever_the_output_is() -> None:
    assert max(map(len, render_pieces({"stdout": bytes(5_000_000), "stderr": b"\xff" * 5_000_000}))) < 3 * PIECE_BYTES


def test_a_small_object_is_one_piece() -> None:
    assert list(render_pieces({"stdout": b"hello", "exit_code": 0})) == [b'{"stdout": "hello", "exit_code": 0}']
    assert list(render_pieces({})) == [b"{}"]
