"""GenerateRequest to GenerateOptions: documented defaults, and bad input named by field, value and limit."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

import pytest
from outrider.v1 import inference_pb2 as pb

from services.router.clients.request import GenerateOptions, ModelLimits, parse_generate, parse_tokenize
from services.router.text.tokenizer import TextTokenizer
from shared.engine.tokenizer_fingerprint import load_tokenizer
from shared.rpc.errors import InvalidArgument
from shared.sampling.params import SamplingParams, SelfDraft
from tests.support.models import DEMO_TARGET

_LIMITS = ModelLimits(vocab_size=4096, max_context=512, eos_token_ids=frozenset({0, 7}), max_prompt_bytes=5000)
_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role not in ('user', 'assistant') %}{{ raise_exception('no role ' + m.role) }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return TextTokenizer.load(str(DEMO_TARGET))


@pytest.fixture(scope="module")
def chat_tokenizer() -> TextTokenizer:
    tokenizer = load_tokenizer(str(DEMO_TARGET))
    tokenizer.chat_template = _TEMPLATE
    return TextTokenizer(tokenizer)


def _request(ids: Sequence[int] = (1, 2, 3), **fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), **fields)  # type: ignore[arg-type]


def _chat(*messages: tuple[str, str]) -> pb.Chat:
    return pb.Chat(messages=[pb.ChatMessage(role=role, content=content) for role, content in messages])


def test_an_omitted_field_gets_its_documented_default(tokenizer: TextTokenizer) -> None:
    assert parse_generate(_request(), tokenizer, _LIMITS) == GenerateOptions(
        prompt_ids=(1, 2, 3),
        params=(
            SamplingParams(
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                min_p=0.0,
                repetition_penalty=1.0,
                presence_penalty=0.0,
                frequency_penalty=0.0,
                logit_bias={},
                seed=None,
                sequence_index=0,
                min_tokens=0,
                max_tokens=256,
                stop_token_ids=frozenset({0, 7}),
                logprobs=None,
                self_draft=SelfDraft(),
            ),
        ),
        stop_strings=(),
        speculation_enabled=True,
        num_draft_tokens=None,
        num_nodes=0,
        sources=(),
        include_usage=True,
        include_draft_tokens=False,
    )


def test_a_present_field_is_kept_also_where_it_is_zero(tokenizer: TextTokenizer) -> None:
    request = _request(
        max_tokens=1,
        min_tokens=1,
        temperature=0.0,
        top_k=5,
        top_p=0.5,
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        logit_bias={0: -100.0, 4095: 100.0},
        stop=["a", "\n\n"],
        stop_token_ids=[9, 9],
        seed=0,
        n=3,
        logprobs=0,
        speculation=pb.Speculation(enabled=False, num_draft_tokens=0),
        include_usage=False,
        include_draft_tokens=True,
    )
    options = parse_generate(request, tokenizer, _LIMITS)
    assert options.params[1] == SamplingParams(
        temperature=0.0,
        top_k=5,
        top_p=0.5,
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        logit_bias={0: -100.0, 4095: 100.0},
        seed=0,
        sequence_index=1,
        min_tokens=1,
        max_tokens=1,
        stop_token_ids=frozenset({0, 7, 9}),
        logprobs=0,
    )
    assert [params.sequence_index for params in options.params] == [0, 1, 2]
    assert options.stop_strings == ("a", "\n\n")
    assert not options.speculation_enabled
    assert options.num_draft_tokens == 0
    assert not options.include_usage
    assert options.include_draft_tokens


def test_limits_themselves_are_allowed(tokenizer: TextTokenizer) -> None:
    request = _request(
        ids=[4095] * 256,
        max_tokens=256,
        min_tokens=256,
        temperature=100.0,
        top_p=1.0,
        min_p=1.0,
        repetition_penalty=10.0,
        logit_bias=dict.fromkeys(range(1024), 0.0),
        stop=["x" * 256] * 16,
        stop_token_ids=range(64),
        seed=2**64 - 1,
        n=16,
        logprobs=20,
        speculation=pb.Speculation(num_draft_tokens=16),
    )
    options = parse_generate(request, tokenizer, _LIMITS)
    assert len(options.params) == 16
    assert options.params[15].seed == 2**64 - 1
    assert options.num_draft_tokens == 16
    assert options.speculation_enabled


def test_top_k_of_the_vocabulary_and_more_keeps_all(tokenizer: TextTokenizer) -> None:
    kept = [parse_generate(_request(top_k=k), tokenizer, _LIMITS).params[0].top_k for k in (4095, 4096, 2**32 - 1)]
    assert kept == [4095, 0, 0]


def test_max_tokens_defaults_to_what_the_context_leaves(tokenizer: TextTokenizer) -> None:
    lengths = [
        parse_generate(_request(ids=[1] * size), tokenizer, _LIMITS).params[0].max_tokens for size in (256, 257, 511)
    ]
    assert lengths == [256, 255, 1]


def test_ignore_eos_leaves_the_requests_own_stop_tokens(tokenizer: TextTokenizer) -> None:
    options = parse_generate(_request(ignore_eos=True, stop_token_ids=[7, 8]), tokenizer, _LIMITS)
    assert options.params[0].stop_token_ids == {7, 8}


def test_text_and_chat_are_tokenized_as_generate_users_would(chat_tokenizer: TextTokenizer) -> None:
    plain = load_tokenizer(str(DEMO_TARGET))
    text = "def f(x):\n    return 'é🎉'"
    options = parse_generate(pb.GenerateRequest(text=text), chat_tokenizer, _LIMITS)
    assert list(options.prompt_ids) == plain(text, add_special_tokens=True).input_ids
    plain.chat_template = _TEMPLATE
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": ""}]
    expected = plain.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    chat = _chat(("user", "hi"), ("assistant", ""))
    assert list(parse_generate(pb.GenerateRequest(chat=chat), chat_tokenizer, _LIMITS).prompt_ids) == expected
    token_ids = parse_tokenize(pb.TokenizeRequest(chat=chat), chat_tokenizer, _LIMITS)
    assert list(token_ids) == expected
    assert chat_tokenizer.decode(token_ids) == "<user>hi<assistant><assistant>"


def test_tokenize_answers_for_what_generate_would_refuse_as_a_prompt(tokenizer: TextTokenizer) -> None:
    assert parse_tokenize(pb.TokenizeRequest(text=""), tokenizer, _LIMITS) == ()
    assert len(parse_tokenize(pb.TokenizeRequest(text="a b " * 1000), tokenizer, _LIMITS)) > 512
    for request in (pb.TokenizeRequest(), pb.TokenizeRequest(text="x" * 5001), pb.TokenizeRequest(chat=pb.Chat())):
        with pytest.raises(InvalidArgument):
            parse_tokenize(request, tokenizer, _LIMITS)


def _prompt(text: str) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=text)


# Request, and what its error must say: field, value, limit.
_BAD: Mapping[str, tuple[pb.GenerateRequest, str, str, str]] = {
    "no prompt": (pb.GenerateRequest(), "prompt", "None", "text, token_ids, chat"),
    "empty text": (_prompt(""), "text", "0 tokens", "at least 1"),
    "empty ids": (_request(ids=[]), "token_ids", "0 tokens", "at least 1"),
    "unknown id": (_request(ids=[1, 4096]), "token_ids[1]", "4096", "below the vocabulary size, 4096"),
    "unknown large id": (_request(ids=[2**32 - 1]), "token_ids[0]", "4294967295", "4096"),
    "no template": (pb.GenerateRequest(chat=_chat(("user", "hi"))), "chat", "1 messages", "no chat template"),
    "no messages": (pb.GenerateRequest(chat=pb.Chat()), "chat.messages", "0 messages", "at least 1"),
    "no role": (pb.GenerateRequest(chat=_chat(("user", "a"), ("", "b"))), "chat.messages[1].role", "''", "1 char"),
    "long chat": (pb.GenerateRequest(chat=_chat(("user", "x" * 5001))), "chat", "bytes", "at most 5000 bytes"),
    "many messages": (pb.GenerateRequest(chat=_chat(*[("", "")] * 4000)), "chat", "bytes", "at most 5000 bytes"),
    "long text": (_prompt("x" * 5001), "text", "5001 characters", "at most 5000 bytes"),
    "long in bytes only": (_prompt("é" * 2501), "text", "2501 characters", "at most 5000 bytes"),
    "prompt fills context": (_request(ids=[1] * 512), "token_ids", "512 tokens", "at most 511"),
    "text fills context": (_prompt("a b " * 1000), "text", "tokens", "at most 511"),
    "prompt and output": (_request(max_tokens=510), "max_tokens", "510", "[1, 509]"),
    "no output": (_request(max_tokens=0), "max_tokens", "0", "[1, 509]"),
    "min above max": (_request(max_tokens=5, min_tokens=6), "min_tokens", "6", "at most max_tokens, 5"),
    "min above default": (_request(min_tokens=257), "min_tokens", "257", "at most max_tokens, 256"),
    "temperature -1": (_request(temperature=-1.0), "temperature", "-1.0", "[0, 100]"),
    "temperature 101": (_request(temperature=101.0), "temperature", "101.0", "[0, 100]"),
    "temperature nan": (_request(temperature=math.nan), "temperature", "nan", "[0, 100]"),
    "temperature inf": (_request(temperature=math.inf), "temperature", "inf", "[0, 100]"),
    "top_p 0": (_request(top_p=0.0), "top_p", "0.0", "(0, 1]"),
    "top_p 2": (_request(top_p=2.0), "top_p", "2.0", "(0, 1]"),
    "top_p nan": (_request(top_p=math.nan), "top_p", "nan", "(0, 1]"),
    "min_p -1": (_request(min_p=-1.0), "min_p", "-1.0", "[0, 1]"),
    "min_p 2": (_request(min_p=2.0), "min_p", "2.0", "[0, 1]"),
    "min_p nan": (_request(min_p=math.nan), "min_p", "nan", "[0, 1]"),
    "repetition 0": (_request(repetition_penalty=0.0), "repetition_penalty", "0.0", "(0, 10]"),
    "repetition 11": (_request(repetition_penalty=11.0), "repetition_penalty", "11.0", "(0, 10]"),
    "repetition nan": (_request(repetition_penalty=math.nan), "repetition_penalty", "nan", "(0, 10]"),
    "presence 3": (_request(presence_penalty=3.0), "presence_penalty", "3.0", "[-2, 2]"),
    "presence nan": (_request(presence_penalty=math.nan), "presence_penalty", "nan", "[-2, 2]"),
    "frequency -3": (_request(frequency_penalty=-3.0), "frequency_penalty", "-3.0", "[-2, 2]"),
    "frequency nan": (_request(frequency_penalty=math.nan), "frequency_penalty", "nan", "[-2, 2]"),
    "bias id": (_request(logit_bias={4096: 1.0}), "logit_bias key", "4096", "below the vocabulary size, 4096"),
    "bias nan": (_request(logit_bias={5: math.nan}), "logit_bias[5]", "nan", "[-100, 100]"),
    "bias -inf": (_request(logit_bias={5: -math.inf}), "logit_bias[5]", "-inf", "[-100, 100]"),
    "biases": (_request(logit_bias=dict.fromkeys(range(1025), 0.0)), "logit_bias", "1025 entries", "at most 1024"),
    "stops": (_request(stop=["x"] * 17), "stop", "17 strings", "at most 16"),
    "empty stop": (_request(stop=["x", ""]), "stop[1]", "''", "1 to 256 characters"),
    "long stop": (_request(stop=["x" * 257]), "stop[0]", "257 characters", "1 to 256 characters"),
    "stop ids": (_request(stop_token_ids=[1] * 65), "stop_token_ids", "65 ids", "at most 64"),
    "stop id": (_request(stop_token_ids=[1, 4096]), "stop_token_ids[1]", "4096", "below the vocabulary size, 4096"),
    "n 0": (_request(n=0), "n", "0", "[1, 16]"),
    "n 17": (_request(n=17), "n", "17", "[1, 16]"),
    "logprobs": (_request(logprobs=21), "logprobs", "21", "[0, 20]"),
    "draft tokens": (
        _request(speculation=pb.Speculation(num_draft_tokens=17)),
        "speculation.num_draft_tokens",
        "17",
        "[0, 16]",
    ),
}


@pytest.mark.parametrize("name", _BAD)
def test_bad_input_is_named_by_field_value_and_limit(tokenizer: TextTokenizer, name: str) -> None:
    request, field, value, limit = _BAD[name]
    with pytest.raises(InvalidArgument) as caught:
        parse_generate(pb.GenerateRequest.FromString(request.SerializeToString()), tokenizer, _LIMITS)
    assert caught.value.field == field
    message = str(caught.value)
    assert message.startswith(field + " is ")
    assert re.search(re.escape(value), message)
    assert limit in message
    assert len(message) < 300


def test_messages_that_the_template_refuses(chat_tokenizer: TextTokenizer) -> None:
    with pytest.raises(InvalidArgument, match=r"^chat\.messages is .*no role robot"):
        parse_generate(pb.GenerateRequest(chat=_chat(("robot", "beep"))), chat_tokenizer, _LIMITS)


def test_a_huge_prompt_is_refused_before_it_is_tokenized() -> None:
    class Untouchable(TextTokenizer):
        def __init__(self) -> None:
            pass

        def encode(self, text: str) -> tuple[int, ...]:
            raise AssertionError("tokenized")

    limits = ModelLimits(vocab_size=4096, max_context=512, eos_token_ids=frozenset())
    assert limits.max_prompt_bytes == 1024 * 1024
    with pytest.raises(InvalidArgument, match="at most 1048576 bytes"):
        parse_generate(_prompt("x" * 10_000_000), Untouchable(), limits)


def test_ids_that_only_the_tokenizer_knows(tokenizer: TextTokenizer) -> None:
    limits = ModelLimits(vocab_size=10, max_context=512, eos_token_ids=frozenset({0}))
    with pytest.raises(InvalidArgument, match=r"^text\[\d+\] is \d+: must be below the vocabulary size, 10"):
        parse_generate(_prompt("def main(): pass"), tokenizer, limits)


# Field 99, a varint.
_UNKNOWN = b"\x98\x06\x01"


@pytest.mark.parametrize(
    ("payload", "error"),
    [
        (_request().SerializeToString() + _UNKNOWN, "field number is 99"),
        (_request().SerializeToString() + b"\xa2\x01\x03" + _UNKNOWN, "speculation.field number is 99"),
        (b"\x1a\x0a" + b"\x0a\x03\x0a\x01u" + b"\x0a\x03" + _UNKNOWN, "chat.messages[1].field number is 99"),
        # min_tokens, as a string.
        (_request().SerializeToString() + b"\x2a\x01x", "field number is 5"),
    ],
)
def test_a_field_this_version_does_not_know(tokenizer: TextTokenizer, payload: bytes, error: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_generate(pb.GenerateRequest.FromString(payload), tokenizer, _LIMITS)
    assert str(caught.value).startswith(error)


def test_who_asks_for_trees_without_a_seed_gets_one(tokenizer: TextTokenizer) -> None:
    trees = pb.Speculation(num_draft_tokens=3, num_nodes=10)
    first, second = (parse_generate(_request(speculation=trees), tokenizer, _LIMITS) for _ in range(2))
    assert first.num_nodes == second.num_nodes == 10
    assert first.params[0].seed is not None
    assert first.params[0].seed != second.params[0].seed
    assert parse_generate(_request(speculation=trees, seed=7), tokenizer, _LIMITS).params[0].seed == 7
    assert parse_generate(_request(speculation=trees, temperature=0.0), tokenizer, _LIMITS).params[0].seed is None
    assert parse_generate(_request(), tokenizer, _LIMITS).params[0].seed is None


@pytest.mark.parametrize(
    ("speculation", "message"),
    [
        (pb.Speculation(num_nodes=10), "speculation.num_nodes is 10: must be absent, or num_draft_tokens given"),
        (pb.Speculation(num_draft_tokens=0, num_nodes=10), "speculation.num_nodes is 10: must be absent"),
        (pb.Speculation(num_draft_tokens=3, num_nodes=3), r"speculation.num_nodes is 3: must be in \[4, 64\]"),
        (pb.Speculation(num_draft_tokens=3, num_nodes=65), r"speculation.num_nodes is 65: must be in \[4, 64\]"),
    ],
)
def test_what_is_no_trees_size_is_refused(speculation: pb.Speculation, message: str, tokenizer: TextTokenizer) -> None:
    with pytest.raises(InvalidArgument, match=message):
        parse_generate(_request(speculation=speculation), tokenizer, _LIMITS)
