"""Bytes become text: whole characters, exact stop strings, nothing lost and nothing leaked."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings

from server.engine.text import TextStream

CHARACTERS = ["é", "€", "日", "😀", "日本", "👩‍👧"]


def show(pieces: Sequence[bytes], stop: Sequence[str] = ()) -> list[str]:
    """What is shown after each token, up to the one that stops, and at the end."""
    stream = TextStream(stop)
    shown = []
    for piece in pieces:
        shown.append(stream.push(piece))
        if stream.stopped:
            break
    return [*shown, stream.finish()]


def single(text: str) -> list[bytes]:
    return [bytes([byte]) for byte in text.encode()]


def splits(raw: bytes) -> Iterator[list[bytes]]:
    """Every way to cut the bytes into pieces."""
    for n in range(len(raw)):
        for cuts in combinations(range(1, len(raw)), n):
            edges = [0, *cuts, len(raw)]
            yield [raw[a:b] for a, b in pairwise(edges)]


@pytest.mark.parametrize("text", CHARACTERS)
def test_a_character_is_shown_whole_however_its_bytes_are_cut(text: str) -> None:
    for pieces in splits(text.encode()):
        shown = show(pieces)
        assert "".join(shown) == text
        assert "\ufffd" not in "".join(shown)


@pytest.mark.parametrize("text", CHARACTERS)
def test_an_answer_that_ends_inside_a_character_ends_with_one_mark(text: str) -> None:
    raw = text.encode()
    for n in range(len(raw)):
        assert "".join(show([raw[:n]])) == raw[:n].decode("utf-8", "replace")


def test_every_token_of_a_vocabulary_has_its_text() -> None:
    words = "Es war einmal… 日本語 😀 naïve\n\t  ".encode()
    vocabulary = {words[a:b] for a in range(len(words)) for b in range(a + 1, a + 6)}
    for token in [*vocabulary, *(bytes([byte]) for byte in range(256))]:
        assert "".join(show([token])) == token.decode("utf-8", "replace")


@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [
        ("aaaaa", ["aaa"], ""),  # B039: not one "a" on the wire
        ("one END two", ["END"], "one "),
        ("one EN two", ["END"], "one EN two"),  # a false start is text
        ("one EN", ["END"], "one EN"),  # also at the end
        ("xababac", ["abac"], "xab"),  # the stop begins inside a false start
        ("xaab", ["aab", "ab"], "x"),  # both end here; the one that begins first
        ("xabcd", ["abcd", "bc"], "xa"),  # the one that is complete first
        ("a.b.*c", [".*"], "a.b"),  # no regular expression
        ("1 日本 2", ["日本"], "1 "),
        ("1 日月 2", ["日本"], "1 日月 2"),
        ("a😀b", ["😀"], "a"),
        ("no no stop15", [f"stop{i:02}" for i in range(16)], "no no "),
    ],
)
def test_text_ends_before_a_stop_string(text: str, stop: list[str], shown: str) -> None:
    assert "".join(show(single(text), stop)) == shown


def test_of_two_stops_in_one_token_the_first_in_the_text_counts() -> None:
    assert "".join(show([b"one two three"], ["three", "two"])) == "one "


def test_a_stop_of_half_a_character_is_found_at_the_end() -> None:
    assert "".join(show([b"a", b"\xf0\x9f"], ["\ufffd"])) == "a"


def test_only_what_may_become_a_stop_is_held_back() -> None:
    assert show(single("xabyab"), ["abc"]) == ["x", "", "", "aby", "", "", "ab"]


def test_the_prompt_is_shown_and_stops_nothing() -> None:
    stream = TextStream(["ab"])
    assert stream.echo(b"abab") == "abab"
    assert stream.push(b"b") == "b"  # not with the prompt's last letter either
    assert stream.offset == 5


def test_a_character_that_begins_in_the_prompt_is_shown_whole() -> None:
    stream = TextStream()
    assert [stream.echo(byte) for byte in single("😀")[:3]] == ["", "", ""]
    assert stream.push(single("😀")[3]) == "😀"


def test_offsets_are_characters_of_the_text() -> None:
    stream = TextStream(["xyz"])
    offsets = []
    for piece in [b"a", *single("日"), b"x", b"y", b"b"]:
        offsets.append(stream.offset)
        stream.push(piece)
    assert offsets == [0, 1, 1, 1, 2, 3, 4]


PIECES = st.lists(
    st.sampled_from(
        [b"", b"a", b"b", b"ab", b"ba", b"\xc3", b"\xa9", b"a\xe6\x97", b"\xa5", b"\xf0"]
    ),
    max_size=12,
)
STOPS = st.lists(st.text("abé日\ufffd", min_size=1, max_size=4), max_size=16)


@given(PIECES, STOPS)
@example([b"a", b"\xc3"], ["a\ufffd"])
@settings(deadline=None, max_examples=250)
def test_any_text_with_any_stops_equals_decoding_all_of_it_again(
    pieces: list[bytes], stops: list[str]
) -> None:
    """The oracle decodes everything anew after each token and looks for stops in the whole."""
    stream, shown = TextStream(stops), ""
    for n in range(1, len(pieces) + 1):
        shown += stream.push(pieces[n - 1])
        text, cut = so_far(pieces[:n], stops, final=False)
        assert stream.stopped == (cut is not None)
        if cut is not None:
            assert shown == text[:cut]
            assert stream.kept() == kept(pieces[:n], text, cut)
            assert stream.finish() == ""
            return
        held = max((k for s in stops for k in range(len(s)) if text.endswith(s[:k])), default=0)
        assert shown == text[: len(text) - held]
        assert stream.offset == len(text)
    text, cut = so_far(pieces, stops, final=True)
    assert shown + stream.finish() == text[:cut]
    if cut is not None:
        assert stream.kept() == kept(pieces, text, cut)


def so_far(pieces: Sequence[bytes], stops: Sequence[str], final: bool) -> tuple[str, int | None]:
    """The text, and where its earliest stop begins."""
    text, _ = codecs.utf_8_decode(b"".join(pieces), "replace", final)
    return text, min((text.find(stop) for stop in stops if stop in text), default=None)


def kept(pieces: Sequence[bytes], text: str, cut: int) -> tuple[int, str]:
    """The most tokens that are whole characters before the cut, and the text behind them."""
    for n in range(len(pieces), -1, -1):
        raw = b"".join(pieces[:n])
        whole, consumed = codecs.utf_8_decode(raw, "replace", False)
        if consumed == len(raw) and len(whole) <= cut:
            return n, text[len(whole) : cut]
    raise AssertionError("no tokens at all are always whole")
