"""A client's request, checked and with its defaults filled in: nothing behind this meets bad input."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet
from outrider.v1 import inference_pb2

from services.router.text.tokenizer import ChatTemplateError, TextTokenizer
from shared.rpc.checks import check_count, check_range, check_token_ids
from shared.rpc.errors import InvalidArgument
from shared.sampling.params import SamplingParams, SelfDraft
from shared.worker.draft_sources import SOURCES
from shared.worker.sampling_limits import check_sampling

_DEFAULT_MAX_TOKENS = 256
_MAX_STOP_STRINGS = 16
_MAX_STOP_STRING_CHARS = 256
_MAX_STOP_TOKEN_IDS = 64
_MAX_CHAT_MESSAGES = 4096
_MAX_SEQUENCES = 16
_MAX_DRAFT_TOKENS = 16
_MAX_NODES = 64
_OF_TARGETS = ("suffix", "target")
_OF_DRAFT_WORKERS = (inference_pb2.DRAFT_SOURCE_MODEL, inference_pb2.DRAFT_SOURCE_SUFFIX)


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the served model and the settings allow.

    `max_context`: most prompt and output tokens together. `max_prompt_bytes`: most bytes of prompt text,
    checked before it is tokenized. `max_tokens`: most output tokens that the API key allows, if it says so.
    """

    vocab_size: int
    max_context: int
    eos_token_ids: frozenset[int]
    max_prompt_bytes: int = 1 << 20
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """A valid GenerateRequest. `params` has one entry per sequence, alike but for its `sequence_index`.

    `num_draft_tokens` None: adaptive; `num_nodes`: of the trees that so many steps find, 0 where chains are drafted.
    `sources`: of draft workers, who may draft; None: nobody there.
    """

    prompt_ids: tuple[int, ...]
    params: tuple[SamplingParams, ...]
    stop_strings: tuple[str, ...]
    speculation_enabled: bool
    num_draft_tokens: int | None
    num_nodes: int
    sources: tuple[inference_pb2.DraftSource, ...] | None
    include_usage: bool
    include_draft_tokens: bool


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A GenerateRequest with nothing left to check but the prompt's tokens. `params` lack what depends on them."""

    request: inference_pb2.GenerateRequest
    num_sequences: int
    params: SamplingParams
    stop_strings: tuple[str, ...]
    num_draft_tokens: int | None
    num_nodes: int
    sources: tuple[inference_pb2.DraftSource, ...]

    @property
    def speculates(self) -> bool:
        speculation = self.request.speculation
        return (speculation.enabled or not speculation.HasField("enabled")) and self.num_draft_tokens != 0

    def may_draft(self, source: inference_pb2.DraftSource) -> bool:
        return self.speculates and (not self.sources or source in self.sources)


def check_generate(
    request: inference_pb2.GenerateRequest, tokenizer: TextTokenizer, limits: ModelLimits
) -> CheckedRequest:
    """Checks all of a request that can be without tokenizing it; raises InvalidArgument.

    Takes a millisecond or two for the largest requests.
    """
    _check_prompt_size(request, limits)
    _reject_unknown_fields(request)
    num_sequences = request.n if request.HasField("n") else 1
    check_range("n", num_sequences, 1, _MAX_SEQUENCES)
    stop_strings = _stop_strings(request.stop)
    speculation = request.speculation
    num_draft_tokens = speculation.num_draft_tokens if speculation.HasField("num_draft_tokens") else None
    if num_draft_tokens is not None:
        check_range("speculation.num_draft_tokens", num_draft_tokens, 0, _MAX_DRAFT_TOKENS)
    num_nodes = _num_nodes(speculation, num_draft_tokens)
    sources = _sources(speculation)
    params = _sampling_params(request, limits)
    checked = CheckedRequest(request, num_sequences, params, stop_strings, num_draft_tokens, num_nodes, sources)
    if num_nodes and not params.coupled:
        # Trees are verified by the target's own draws, which a draft worker foresees by a seed.
        checked = replace(checked, params=replace(params, seed=secrets.randbits(64)))
    _check_prompt(request, tokenizer, limits)
    return checked


def tokenize_generate(checked: CheckedRequest, tokenizer: TextTokenizer, limits: ModelLimits) -> GenerateOptions:
    """The rest of a request: its prompt's tokens, and what depends on them. Raises InvalidArgument.

    For a long prompt it takes long.
    """
    request = checked.request
    prompt_ids = _prompt_ids(request, tokenizer, limits)
    of_target = tuple(name for name in _OF_TARGETS if checked.may_draft(SOURCES[name]))
    own = None
    if of_target:
        own = SelfDraft(checked.num_draft_tokens, checked.num_nodes, of_target if checked.sources else ())
    max_tokens = _max_tokens(request, len(prompt_ids), limits)
    params = replace(checked.params, max_tokens=max_tokens, min_tokens=request.min_tokens, self_draft=own)
    of_workers = tuple(source for source in checked.sources if source in _OF_DRAFT_WORKERS)
    return GenerateOptions(
        prompt_ids=prompt_ids,
        params=(params, *(replace(params, sequence_index=index) for index in range(1, checked.num_sequences))),
        stop_strings=checked.stop_strings,
        speculation_enabled=checked.speculates,
        num_draft_tokens=checked.num_draft_tokens,
        num_nodes=checked.num_nodes,
        sources=of_workers if of_workers or not checked.sources else None,
        include_usage=request.include_usage if request.HasField("include_usage") else True,
        include_draft_tokens=request.include_draft_tokens,
    )


def parse_generate(
    request: inference_pb2.GenerateRequest, tokenizer: TextTokenizer, limits: ModelLimits
) -> GenerateOptions:
    """Checks a request against the limits that inference.proto documents, and tokenizes it; raises InvalidArgument."""
    return tokenize_generate(check_generate(request, tokenizer, limits), tokenizer, limits)


def check_tokenize(request: inference_pb2.TokenizeRequest, tokenizer: TextTokenizer, limits: ModelLimits) -> None:
    """Checks all of a request that can be without tokenizing it; raises InvalidArgument as `check_generate` would."""
    _check_prompt_size(request, limits)
    _reject_unknown_fields(request)
    _check_prompt(request, tokenizer, limits)


def parse_tokenize(
    request: inference_pb2.TokenizeRequest, tokenizer: TextTokenizer, limits: ModelLimits
) -> tuple[int, ...]:
    """Token ids of a request's text or chat; raises InvalidArgument as `parse_generate` would, but for length.

    An empty text has no tokens, which is an answer here.
    """
    check_tokenize(request, tokenizer, limits)
    return _tokenize(request, tokenizer)


def _num_nodes(speculation: inference_pb2.Speculation, num_draft_tokens: int | None) -> int:
    """Of each tree; 0: none are asked for."""
    if not speculation.HasField("num_nodes"):
        return 0
    if not num_draft_tokens:
        raise InvalidArgument(
            "speculation.num_nodes",
            speculation.num_nodes,
            "absent, or num_draft_tokens given: the steps it is found in",
        )
    check_range("speculation.num_nodes", speculation.num_nodes, num_draft_tokens + 1, _MAX_NODES)
    return speculation.num_nodes


def _sources(speculation: inference_pb2.Speculation) -> tuple[inference_pb2.DraftSource, ...]:
    known = inference_pb2.DraftSource.values()
    for index, source in enumerate(speculation.sources):
        if source == inference_pb2.DRAFT_SOURCE_UNSPECIFIED or source not in known:
            raise InvalidArgument(f"speculation.sources[{index}]", source, f"one of {known[1:]}")
        if source in speculation.sources[:index]:
            raise InvalidArgument(f"speculation.sources[{index}]", source, "given once")
    return tuple(speculation.sources)


def _check_prompt_size(
    request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest, limits: ModelLimits
) -> None:
    """What a prompt is made of, before anything walks over it."""
    kind = request.WhichOneof("prompt")
    if kind == "chat":
        check_count("chat.messages", request.chat.messages, _MAX_CHAT_MESSAGES, "messages")
        num_bytes = request.chat.ByteSize()
        if num_bytes > limits.max_prompt_bytes:
            raise InvalidArgument("chat", f"{num_bytes} bytes", f"at most {limits.max_prompt_bytes} bytes")
    elif kind == "text":
        # UTF-8 has at least as many bytes as characters, so most giants need not be encoded to be measured.
        text = request.text
        if len(text) > limits.max_prompt_bytes or len(text.encode()) > limits.max_prompt_bytes:
            raise InvalidArgument("text", text, f"at most {limits.max_prompt_bytes} bytes of UTF-8")


def _check_prompt(
    request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest,
    tokenizer: TextTokenizer,
    limits: ModelLimits,
) -> None:
    kind = request.WhichOneof("prompt")
    if kind is None:
        names = [field.name for field in request.DESCRIPTOR.oneofs_by_name["prompt"].fields]
        raise InvalidArgument("prompt", None, f"given, as one of {', '.join(names)}")
    if isinstance(request, inference_pb2.GenerateRequest) and kind == "token_ids":
        _check_num_tokens("token_ids", len(request.token_ids.ids), limits)
    if kind == "chat":
        messages = request.chat.messages
        if not messages:
            raise InvalidArgument("chat.messages", "0 messages", "at least 1 message")
        for index, message in enumerate(messages):
            if not message.role:
                raise InvalidArgument(f"chat.messages[{index}].role", message.role, "at least 1 character")
        if not tokenizer.has_chat_template:
            raise InvalidArgument(
                "chat", f"{len(messages)} messages", "text or token_ids: this model has no chat template"
            )


def _prompt_ids(
    request: inference_pb2.GenerateRequest, tokenizer: TextTokenizer, limits: ModelLimits
) -> tuple[int, ...]:
    """The prompt's token ids: at least one, all known, and fewer than the context."""
    field = request.WhichOneof("prompt") or "prompt"
    prompt_ids = tuple(request.token_ids.ids) if field == "token_ids" else _tokenize(request, tokenizer)
    _check_num_tokens(field, len(prompt_ids), limits)
    check_token_ids(field, prompt_ids, limits.vocab_size)
    return prompt_ids


def _check_num_tokens(field: str, num_tokens: int, limits: ModelLimits) -> None:
    if num_tokens == 0:
        raise InvalidArgument(field, "0 tokens", "a prompt of at least 1 token")
    if num_tokens >= limits.max_context:
        raise InvalidArgument(
            field,
            f"{num_tokens} tokens",
            f"at most {limits.max_context - 1} tokens, to leave room for output in a context of {limits.max_context}",
        )


def _tokenize(
    request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest, tokenizer: TextTokenizer
) -> tuple[int, ...]:
    if request.WhichOneof("prompt") == "text":
        return tokenizer.encode(request.text)
    messages = request.chat.messages
    try:
        return tokenizer.encode_chat([{"role": message.role, "content": message.content} for message in messages])
    except ChatTemplateError as error:
        raise InvalidArgument(
            "chat.messages", f"{len(messages)} messages", f"what the model's chat template accepts ({error})"
        ) from error


def _sampling_params(request: inference_pb2.GenerateRequest, limits: ModelLimits) -> SamplingParams:
    """All but the lengths, which depend on the prompt's."""
    check_count("stop_token_ids", request.stop_token_ids, _MAX_STOP_TOKEN_IDS, "ids")
    check_token_ids("stop_token_ids", request.stop_token_ids, limits.vocab_size)
    model_stop_ids = frozenset() if request.ignore_eos else limits.eos_token_ids
    params = SamplingParams(
        temperature=request.temperature if request.HasField("temperature") else 1.0,
        top_k=request.top_k if request.top_k < limits.vocab_size else 0,
        top_p=request.top_p if request.HasField("top_p") else 1.0,
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty if request.HasField("repetition_penalty") else 1.0,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        logit_bias=dict(request.logit_bias),
        seed=request.seed if request.HasField("seed") else None,
        stop_token_ids=model_stop_ids | frozenset(request.stop_token_ids),
        logprobs=request.logprobs if request.HasField("logprobs") else None,
    )
    check_sampling(params, limits.vocab_size)
    return params


def _max_tokens(request: inference_pb2.GenerateRequest, num_prompt_tokens: int, limits: ModelLimits) -> int:
    """Most tokens of output, which those that there are to be at least do not exceed."""
    room = limits.max_context - num_prompt_tokens
    allowed = room if limits.max_tokens is None else limits.max_tokens
    max_tokens = request.max_tokens if request.HasField("max_tokens") else min(_DEFAULT_MAX_TOKENS, room, allowed)
    if not 1 <= max_tokens <= room:
        raise InvalidArgument(
            "max_tokens",
            max_tokens,
            f"in [1, {room}], what a prompt of {num_prompt_tokens} tokens leaves of a context of {limits.max_context}",
        )
    if max_tokens > allowed:
        raise InvalidArgument("max_tokens", max_tokens, f"at most {allowed} with this API key")
    if request.min_tokens > max_tokens:
        raise InvalidArgument("min_tokens", request.min_tokens, f"at most max_tokens, {max_tokens}")
    return max_tokens


def _stop_strings(stop: Sequence[str]) -> tuple[str, ...]:
    check_count("stop", stop, _MAX_STOP_STRINGS, "strings")
    for index, string in enumerate(stop):
        if not 1 <= len(string) <= _MAX_STOP_STRING_CHARS:
            raise InvalidArgument(f"stop[{index}]", string, f"of 1 to {_MAX_STOP_STRING_CHARS} characters")
    return tuple(stop)


def _reject_unknown_fields(message: Message, path: str = "") -> None:
    """Refuses fields this version does not know: ignoring a wish in silence would answer another request.

    A known field that came with another type on the wire is unknown as well.
    """
    name = message.DESCRIPTOR.full_name
    unknown_fields = UnknownFieldSet(message)
    if len(unknown_fields):
        raise InvalidArgument(f"{path}field number", unknown_fields[0].field_number, f"one of {name}, with its type")
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        if field.is_repeated:
            for index, entry in enumerate(value):
                _reject_unknown_fields(entry, f"{path}{field.name}[{index}].")
        else:
            _reject_unknown_fields(value, f"{path}{field.name}.")
