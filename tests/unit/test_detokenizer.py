"""Incremental text against the tokenizer's own decoding of all tokens at once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, TypeVar

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from services.router.text.detokenizer import Detokenizer
from services.router.text.stop_strings import StopStrings
from services.router.text.tokenizer import TextTokenizer
from tests.support.models import DEMO_TARGET

_T = TypeVar("_T")

_TEXTS = [
    "def fibonacci(n: int) -> int:\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n",
    "naïve façade, Ærøskøbing, Łódź — “quoted” … 1 € = 100 ¢",
    "你好，世界。こんにちは、世界！ 안녕하세요 세계",
    "🎉🎊👩‍👩‍👧‍👦🏳️‍🌈 flags 🇳🇿🇩🇰 and 👍🏽 thumbs",
    "e\u0301 a\u0308\u0304 Z\u0351\u036b\u0343\u036a combining, नमस्ते, ผู้ใหญ่",
    "  leading,   inner    and trailing   \n\n\t\n ",
]


@pytest.fixture(scope="module")
def demo() -> TextTokenizer:
    return TextTokenizer.load(str(DEMO_TARGET))


@pytest.fixture(scope="module")
def sentencepiece_like() -> TextTokenizer:
    """Spaces as ▁, bytes as tokens of their own, one leading space dropped: the decoder of Llama 2 and Mistral."""
    pieces = ["<unk>", "</s>", "▁", "▁the", "▁a", "s", "▁▁▁", "▁cat", "at", "é", "."]
    vocabulary = {piece: id for id, piece in enumerate(pieces + [f"<0x{byte:02X}>" for byte in range(256)])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return TextTokenizer(
        PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")  # type: ignore[no-untyped-call]
    )


def _random_pieces(ids: Sequence[_T], rng: random.Random) -> list[Sequence[_T]]:
    pieces = []
    start = 0
    while start < len(ids):
        end = start + rng.randint(1, 6)
        pieces.append(ids[start:end])
        start = end
    return pieces


def _stream(detokenizer: Detokenizer, ids: Sequence[int], rng: random.Random) -> tuple[list[str], bool, int]:
    """The texts sent, whether a stop string ended them, and how many tokens were taken."""
    texts = []
    num_tokens = 0
    for piece in _random_pieces(ids, rng):
        delta = detokenizer.push(piece)
        texts.append(delta.text)
        num_tokens += delta.num_tokens
        if delta.stopped:
            return texts, True, num_tokens
        assert delta.num_tokens == len(piece)
    final = detokenizer.flush()
    return [*texts, final.text], final.stopped, num_tokens


def _cut_at_first_stop(text: str, stops: Sequence[str]) -> str | None:
    """The text before the stop string that ends first, the longest of several; None without any."""
    for end in range(1, len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return text[: end - max(lengths)]
    return None


@pytest.mark.parametrize("text", _TEXTS)
def test_pieces_join_to_the_text_and_hold_no_half_character(demo: TextTokenizer, text: str) -> None:
    ids = demo.encode(text)
    rng = random.Random(0)
    for _ in range(20):
        texts, stopped, num_tokens = _stream(Detokenizer(demo), ids, rng)
        assert "".join(texts) == text
        assert not any("\ufffd" in piece for piece in texts)
        assert not stopped
        assert num_tokens == len(ids)


@pytest.mark.parametrize("of", ["demo", "sentencepiece_like"])
def test_ids_decode_as_transformers_has_it(of: str, request: pytest.FixtureRequest) -> None:
    tokenizer, rng = request.getfixturevalue(of), random.Random(0)
    transformers_own = tokenizer._tokenizer
    for length in (0, 1, 3, 40):
        for _ in range(50):
            ids = [rng.randrange(len(transformers_own)) for _ in range(length)]
            expected = transformers_own.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            assert tokenizer.decode(ids) == expected


def test_a_tokenizer_that_decodes_otherwise_is_asked_itself() -> None:
    class Shouting(PreTrainedTokenizerFast):
        def _decode(self, *args: Any, **kwargs: Any) -> str:
            return str(super()._decode(*args, **kwargs)).upper()

    loaded = PreTrainedTokenizerFast.from_pretrained(DEMO_TARGET)
    shouting = TextTokenizer(Shouting(tokenizer_object=loaded.backend_tokenizer))  # type: ignore[no-untyped-call]
    assert shouting.decode(shouting.encode("def main")) == "DEF MAIN"


def test_a_character_is_sent_with_the_token_that_completes_it(demo: TextTokenizer) -> None:
    ids = demo.encode("x🎉y")
    assert len(ids) > 3
    detokenizer = Detokenizer(demo)
    texts = [detokenizer.push([id]).text for id in ids]
    assert [text for text in texts if text] == ["x", "🎉", "y"]
    assert texts[-2:] == ["🎉", "y"]


def test_any_ids_join_to_what_decode_makes_of_them(demo: TextTokenizer) -> None:
    """Bytes that are no UTF-8 included; `decode` of everything is the oracle."""
    rng = random.Random(1)
    # The single bytes, of which most sequences are no UTF-8, weigh as much as all other tokens.
    single_bytes = [id for id in sorted(demo.text_ids) if id < 257]
    anything = sorted(demo.text_ids)
    for _ in range(300):
        ids = [rng.choice(rng.choice((single_bytes, anything))) for _ in range(rng.randint(1, 60))]
        texts, _, _ = _stream(Detokenizer(demo), ids, rng)
        assert "".join(texts) == demo.decode(ids)


def test_characters_that_straddle_every_token_border() -> None:
    """No border between tokens is one between characters, for longer than half a character is waited for."""
    # 字 is the bytes E5 AD 97, in the byte-level alphabet å ŃĹ.
    backend = Tokenizer(models.BPE(vocab={"å": 0, "ŃĹå": 1, "ŃĹ": 2}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    straddling = TextTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))  # type: ignore[no-untyped-call]
    detokenizer = Detokenizer(straddling)
    texts = [detokenizer.push([id]).text for id in [0, *[1] * 40, 2]]
    assert "".join(texts) == "字" * 41
    assert max(len(text) for text in texts) < 10


def test_broken_bytes_do_not_hold_the_text_for_ever(demo: TextTokenizer) -> None:
    (lead, *_) = demo.encode("🎉")
    assert demo.decode([lead]) == "\ufffd"
    detokenizer = Detokenizer(demo)
    sent = "".join(detokenizer.push([lead]).text for _ in range(100))
    assert len(sent) > 80
    assert set(sent) == {"\ufffd"}
    assert sent + detokenizer.flush().text == demo.decode([lead] * 100)


def test_broken_byte_tokens_do_not_hold_the_text_for_ever(sentencepiece_like: TextTokenizer) -> None:
    detokenizer = Detokenizer(sentencepiece_like)
    sent = [detokenizer.push([11 + 0x80]).text for _ in range(100)]
    assert "".join(sent) + detokenizer.flush().text == "\ufffd" * 100
    assert len("".join(sent)) > 80


def test_half_a_character_at_the_end_is_flushed(demo: TextTokenizer) -> None:
    ids = demo.encode("ok🎉")[:-1]
    detokenizer = Detokenizer(demo)
    assert detokenizer.push(ids) == ("ok", False, len(ids))
    assert detokenizer.flush() == ("\ufffd", False, 0)
    assert detokenizer.flush() == ("", False, 0)


def test_special_and_unknown_ids_have_no_text(demo: TextTokenizer) -> None:
    a, b = demo.encode("a"), demo.encode(" b")
    detokenizer = Detokenizer(demo)
    assert detokenizer.push([*a, 0, 0, 1_000_000, *b]).text + detokenizer.flush().text == "a b"


def test_sentencepiece_spaces_and_byte_tokens(sentencepiece_like: TextTokenizer) -> None:
    rng = random.Random(3)
    words = [[2], [3], [4], [5], [6], [7], [8], [9], [10], [1]]
    characters = [[11 + byte for byte in character.encode()] for character in "é€🎉字"]
    for _ in range(300):
        ids = [id for _ in range(rng.randint(1, 30)) for id in rng.choice(words + characters)]
        texts, _, _ = _stream(Detokenizer(sentencepiece_like), ids, rng)
        assert "".join(texts) == sentencepiece_like.decode(ids)
        assert not any("\ufffd" in text for text in texts)


def test_the_prompt_decides_the_first_space(sentencepiece_like: TextTokenizer) -> None:
    the, cat = 3, 7
    assert Detokenizer(sentencepiece_like).push([cat]).text == "cat"
    assert Detokenizer(sentencepiece_like, prompt_ids=[the]).push([cat]).text == " cat"
    rng = random.Random(4)
    for _ in range(100):
        prompt_ids = [rng.randint(2, 10) for _ in range(rng.randint(1, 9))]
        ids = [rng.randint(2, 10) for _ in range(rng.randint(1, 20))]
        texts, _, _ = _stream(Detokenizer(sentencepiece_like, prompt_ids=prompt_ids), ids, rng)
        whole = sentencepiece_like.decode(prompt_ids + ids)
        assert "".join(texts) == whole.removeprefix(sentencepiece_like.decode(prompt_ids))


def test_random_stop_strings_against_the_whole_text(demo: TextTokenizer) -> None:
    rng = random.Random(5)
    num_stopped = 0
    for _ in range(600):
        text = rng.choice(_TEXTS)
        ids = demo.encode(text)
        stops = []
        for _ in range(rng.randint(1, 4)):
            start = rng.randrange(len(text))
            stop = text[start : start + rng.randint(1, 12)]
            stops.append(stop + rng.choice(["", "", "#"]))
        expected = _cut_at_first_stop(text, stops)
        texts, stopped, num_tokens = _stream(Detokenizer(demo, stops), ids, rng)
        assert "".join(texts) == (text if expected is None else expected)
        assert stopped == (expected is not None)
        if stopped:
            num_stopped += 1
            # The fewest tokens whose text holds a stop string.
            assert any(stop in demo.decode(ids[:num_tokens]) for stop in stops)
            assert not any(stop in demo.decode(ids[: num_tokens - 1]) for stop in stops)
    assert 200 < num_stopped < 600


def test_one_stop_string_agrees_with_find_in_every_cutting(demo: TextTokenizer) -> None:
    text = "aabaabaaabaabaac" * 3
    ids = demo.encode(text)
    rng = random.Random(6)
    for stop in ("aabaaa", "aabaabaac", "baac", "c", "aac" + "aab", "zz", text, text + "a"):
        texts, stopped, _ = _stream(Detokenizer(demo, [stop]), ids, rng)
        found = text.find(stop)
        assert stopped == (found >= 0)
        assert "".join(texts) == (text if found < 0 else text[:found])


def test_stop_strings_that_overlap_themselves_and_each_other() -> None:
    rng = random.Random(7)
    for _ in range(3000):
        # Few letters, one of them most often: many false starts.
        text = "".join(rng.choices("abc", weights=(6, 2, 1), k=60))
        starts = [rng.randrange(50) for _ in range(rng.randint(1, 3))]
        stops = [text[start : start + rng.randint(3, 10)] for start in starts]
        scanner = StopStrings(stops)
        scans = [scanner.push("".join(piece)) for piece in _random_pieces(list(text), rng)]
        expected = _cut_at_first_stop(text, stops)
        first = next((count for count, scan in enumerate(scans, start=1) if scan.stopped), None)
        sent = "".join(scan.text for scan in scans[:first])
        assert (first is None) == (expected is None)
        assert sent + (scanner.flush() if first is None else "") == (text if expected is None else expected)


def test_what_may_begin_a_stop_string_is_held_and_then_let_go(demo: TextTokenizer) -> None:
    detokenizer = Detokenizer(demo, ["STOP", "TOAST"])
    sent = [detokenizer.push(demo.encode(char)).text for char in "xSTOxTOAS"]
    assert sent == ["x", "", "", "", "STOx", "", "", "", ""]
    assert detokenizer.flush() == ("TOAS", False, 0)
