"""Heads in every published layout: what they guess, paged and in trees, against dense forwards; and what is refused."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from services.target.settings import TargetSettings
from shared.engine.engine import Engine
from shared.engine.model import CausalLM
from shared.engine.sequence import Sequence as EngineSequence
from shared.policy.self_drafting import SelfDraftingPolicy
from shared.policy.ways import Way
from shared.sampling.params import SamplingParams, SelfDraft
from shared.sampling.proposal import Proposal
from shared.sampling.verifier import verify
from shared.self_drafting.drafter import Growing, SelfDrafter
from shared.self_drafting.loader import load_head
from shared.self_drafting.rounds import SelfDrafting
from shared.settings import StartupError
from tests.support.dense_heads import eagle3_logits, eagle_logits, load_reference, medusa_logits, seen_by
from tests.support.heads import (
    Weights,
    config_of,
    eagle3_weights,
    eagle_weights,
    layer_config,
    medusa_weights,
    speculators_config,
    write_head,
    write_medusa,
)
from tests.support.models import tiny_llama

NUM_LAYERS = 6
NUM_TOKENS = 12
# Of all guesses so many are checked.
NUM_CHECKED = 24
Reference = Callable[[Any, Sequence[int], Sequence[int]], Tensor]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("target"), num_layers=NUM_LAYERS)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(4)


class Recording:
    """A drafter, and what it guessed: the committed tokens, the draft tokens behind them, and its logits."""

    def __init__(self, drafter: SelfDrafter) -> None:
        self._drafter = drafter
        self.source, self.most_steps, self.uses_kv = drafter.source, drafter.most_steps, drafter.uses_kv
        self.observe, self.follow, self.ready = drafter.observe, drafter.follow, drafter.ready
        self.num_lacking, self.keeps_up = drafter.num_lacking, drafter.keeps_up
        self.guesses: list[tuple[list[int], list[int], Tensor]] = []

    def begin(self, sequences: Sequence[EngineSequence]) -> Tensor:
        logits = self._drafter.begin(sequences)
        self.guesses += [(list(each.token_ids), [], row) for each, row in zip(sequences, logits, strict=True)]
        return logits

    def extend(self, growing: Sequence[Growing]) -> Tensor:
        logits = self._drafter.extend(growing)
        rows = iter(logits)
        for each in growing:
            for row in range(each.first_row, len(each.proposal) + 1):
                drafted = [each.proposal.token_ids[i] for i in each.proposal.lineage(row)]
                self.guesses.append((list(each.sequence.token_ids), drafted, next(rows)))
        return logits


def engine_with(target: Path, head: Path, native: Any = "off") -> tuple[Engine, Recording]:
    model = CausalLM.load(str(target), device="cpu", dtype="float32", native=native)
    make = load_head(str(head), model)
    # A prompt comes in several chunks.
    settings = TargetSettings(model=str(target), num_blocks=64, max_batch_tokens=48)
    engine = Engine(model, settings, verify)
    engine.warm_up()
    recording = Recording(make(engine))
    engine.draft_by(SelfDrafting.of(engine, recording))
    return engine, recording


def write_texts(engine: Engine, wanted: SelfDraft) -> None:
    """Three texts of different lengths, one of them longer than a step, together and then one of them again."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(1, 257, (length,), generator=generator).tolist() for length in (70, 5, 33)]
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, self_draft=wanted)
    for batch in (prompts, prompts[:1]):
        for prompt in batch:
            engine.scheduler.add(EngineSequence(prompt, len(prompt), params, bytes(32), num_steps=1000))
        while engine.step() is not None:
            pass
        engine.scheduler.check()
        assert engine.scheduler.is_empty


def check_guesses(recording: Recording, model: Any, reference: Reference) -> None:
    assert len(recording.guesses) > NUM_CHECKED
    assert any(drafted for _, drafted, _ in recording.guesses)
    for tokens, drafted, logits in recording.guesses[:: -(-len(recording.guesses) // NUM_CHECKED) | 1]:
        expected = reference(model, tokens, drafted)
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)


LAYOUTS = ["original", "prefixed", "vllm"]


@pytest.mark.parametrize("native", ["off", "auto"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_blocks", [1, 2])
def test_a_medusa_guesses_what_its_paper_says(
    target: Path, layout: str, num_blocks: int, native: str, tmp_path: Path
) -> None:
    weights = medusa_weights(config_of(target), 3, num_blocks, layout)
    engine, recording = engine_with(target, write_medusa(tmp_path, weights, pickled=layout == "original"), native)
    assert recording.most_steps == 3  # whatever its config says
    write_texts(engine, SelfDraft(3, 8))
    plain = medusa_weights(config_of(target), 3, num_blocks)
    for (_, tensor), name in zip(weights.items(), plain, strict=True) if layout != "vllm" else ():
        plain[name] = tensor
    if layout == "vllm":
        for head in range(3):
            for block in range(num_blocks):
                plain[f"{head}.{block}.linear.weight"] = weights[f"blocks.{head}.layers.{block}.weight"]
                plain[f"{head}.{block}.linear.bias"] = torch.zeros(64)
            plain[f"{head}.{num_blocks}.weight"] = weights[f"lm_heads.{head}.weight"]

    def reference(model: Any, tokens: Sequence[int], drafted: Sequence[int]) -> Tensor:
        return medusa_logits(plain, seen_by(model, tokens[:-1])[-1][-1], len(drafted), num_blocks)

    check_guesses(recording, load_reference(target), reference)


def test_a_medusa_drafts_for_one_beside_others_that_a_router_drafts_for(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of as many as there are in the step drafts would not be expected, but of this one alone they are."""
    weights = medusa_weights(config_of(target), 3, 1, "original")
    engine, recording = engine_with(target, write_medusa(tmp_path, weights))
    monkeypatch.setattr(SelfDraftingPolicy, "follows", lambda _, load: load <= 1)
    monkeypatch.setattr(SelfDraftingPolicy, "way", lambda *_: Way.TREE)

    def begin(prompt: list[int], wanted: SelfDraft | None) -> EngineSequence:
        params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, self_draft=wanted)
        sequence = EngineSequence(prompt, len(prompt), params, bytes(32), num_steps=1000)
        engine.scheduler.add(sequence)
        return sequence

    others = [begin([i, 1, 2], None) for i in range(1, 4)]
    assert engine.step() is not None
    text = begin([1, 2, 3], SelfDraft())
    for step in range(6):
        for other in others:
            other.proposal = Proposal((7,))
        before = len(recording.guesses)
        assert engine.step() is not None
        assert recording.ready(text) == (step > 0)
        assert (len(recording.guesses) > before) == (step > 1)


def test_a_medusa_keeps_what_it_has_of_one_that_waits(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others' steps, in which nothing is expected of it, are nothing to one that waits to be allowed another."""
    weights = medusa_weights(config_of(target), 3, 1, "original")
    engine, recording = engine_with(target, write_medusa(tmp_path, weights))
    monkeypatch.setattr(SelfDraftingPolicy, "follows", lambda *_: False)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, self_draft=SelfDraft(3))
    waiting = EngineSequence([1, 2, 3], 3, params, bytes(32), num_steps=2)
    engine.scheduler.add(waiting)
    while engine.step() is not None:
        pass
    plain = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    engine.scheduler.add(EngineSequence([4, 5, 6], 3, plain, bytes(32), num_steps=3))
    while engine.step() is not None:
        pass
    before = len(recording.guesses)
    waiting.num_steps = 1
    assert engine.step() is not None
    assert len(recording.guesses) > before


def test_a_medusa_that_rested_guesses_right_again(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While nothing is expected of it, it keeps nothing: least of all what the target saw before."""
    weights = medusa_weights(config_of(target), 3, 1, "original")
    engine, recording = engine_with(target, write_medusa(tmp_path, weights))
    expected = True
    monkeypatch.setattr(SelfDraftingPolicy, "follows", lambda *_: expected)
    monkeypatch.setattr(SelfDraftingPolicy, "way", lambda *_: Way.TREE)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, self_draft=SelfDraft())
    text = EngineSequence([1, 2, 3], 3, params, bytes(32), num_steps=1000)
    engine.scheduler.add(text)
    for expected in (True, False, True):
        before = len(recording.guesses)
        for _ in range(3):
            assert engine.step() is not None
        assert recording.ready(text) == expected
        assert (len(recording.guesses) > before) == expected
    plain = dict(zip(medusa_weights(config_of(target), 3, 1), weights.values(), strict=True))
    model = load_reference(target)
    for tokens, drafted, logits in recording.guesses:
        wanted = medusa_logits(plain, seen_by(model, tokens[:-1])[-1][-1], len(drafted), 1)
        torch.testing.assert_close(logits, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("native", ["off", "auto"])
@pytest.mark.parametrize(("bias", "embedding"), [(True, False), (False, True)])
@pytest.mark.parametrize("wanted", [SelfDraft(3), SelfDraft(4, 12)], ids=str)
def test_an_eagle_guesses_what_its_paper_says(
    target: Path, bias: bool, embedding: bool, wanted: SelfDraft, native: str, tmp_path: Path
) -> None:
    weights = eagle_weights(config_of(target), bias=bias, embedding=embedding)
    head = write_head(tmp_path, weights, layer_config(config_of(target)), pickled=bias)
    engine, recording = engine_with(target, head, native)
    write_texts(engine, wanted)
    check_guesses(
        recording, load_reference(target), lambda model, tokens, drafted: eagle_logits(weights, model, tokens, drafted)
    )


@pytest.mark.parametrize("native", ["off", "auto"])
@pytest.mark.parametrize("layout", ["authors", "speculators", "speculators, four states"])
@pytest.mark.parametrize("wanted", [SelfDraft(3), SelfDraft(4, 12)], ids=str)
def test_an_eagle3_guesses_what_its_paper_says(
    target: Path, layout: str, wanted: SelfDraft, native: str, tmp_path: Path
) -> None:
    config = config_of(target)
    states = [1, 3, 5, 6] if "four" in layout else [2, NUM_LAYERS // 2, NUM_LAYERS - 3]
    layer = "midlayer." if layout == "authors" else "layers.0."
    weights = eagle3_weights(config, 128, len(states), layer)
    if layout == "authors":
        said = layer_config(config) | {"draft_vocab_size": 128}
    else:
        ids = {"eagle_aux_hidden_state_layer_ids": states} if "four" in layout else {}
        said = speculators_config(config, "eagle3", norm_before_residual=True, draft_vocab_size=128, **ids)
    engine, recording = engine_with(target, write_head(tmp_path, weights, said), native)
    write_texts(engine, wanted)

    def reference(model: Any, tokens: Sequence[int], drafted: Sequence[int]) -> Tensor:
        return eagle3_logits(
            weights, model, tokens, drafted, states=states, layer=layer, norm_before_residual=layout != "authors"
        )

    check_guesses(recording, load_reference(target), reference)


def test_the_speculators_eagle_is_the_same_by_other_names(target: Path, tmp_path: Path) -> None:
    weights = eagle_weights(config_of(target))
    renamed = {
        name.replace("fc.", "fusion_fc.").replace("layers.0.", "transformer."): each for name, each in weights.items()
    }
    head = write_head(tmp_path, renamed, speculators_config(config_of(target), "eagle", fusion_bias=True))
    engine, recording = engine_with(target, head)
    write_texts(engine, SelfDraft(2))
    check_guesses(
        recording, load_reference(target), lambda model, tokens, drafted: eagle_logits(weights, model, tokens, drafted)
    )


class Touch:
    """Runs when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._path),)


def without(weights: Weights, *names: str) -> Weights:
    return {name: each for name, each in weights.items() if name not in names}


def refused(target: Path, head: Path, match: str) -> None:
    model = CausalLM.load(str(target), device="cpu", native="off")
    with pytest.raises(StartupError, match=match) as error:
        load_head(str(head), model)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(("head ", "there is no"))


def test_a_pickle_with_code_in_it_is_refused_and_not_run(target: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    head = tmp_path / "head"
    head.mkdir()
    torch.save({"0.1.weight": Touch(ran)}, head / "medusa_lm_head.pt")
    refused(target, head, "cannot be loaded")
    assert not ran.exists()


def test_what_is_no_head_is_refused(target: Path, tmp_path: Path) -> None:
    refused(target, tmp_path / "nowhere", "there is no model folder")
    refused(target, tmp_path, "it has none of medusa_lm_head")
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    refused(target, tmp_path, "cannot be loaded")
    refused(target, target, "is neither a Medusa nor an EAGLE")


def test_a_medusa_of_another_model_or_not_whole_is_refused(target: Path, tmp_path: Path) -> None:
    other = tiny_llama(tmp_path / "other", vocab_size=300, hidden_size=32)
    config = config_of(target)
    refused(target, write_medusa(tmp_path / "a", medusa_weights(config_of(other), 2)), "has logits of 300 tokens")
    weights = medusa_weights(config, 3)
    refused(target, write_medusa(tmp_path / "b", without(weights, "1.1.weight")), "lacks heads: of 3 it has 2 whole")
    refused(target, write_medusa(tmp_path / "c", without(weights, "2.1.weight")), "lacks heads")
    narrow = weights | {"1.0.linear.weight": torch.zeros(8, 8)}
    refused(target, write_medusa(tmp_path / "d", narrow), "has a head 1 of other shapes")
    flat = weights | {"0.1.weight": torch.tensor(1.0)}
    refused(target, write_medusa(tmp_path / "f", flat), "cannot be made sense of")
    refused(target, write_medusa(tmp_path / "e", weights | {"stranger": torch.zeros(1)}), "weights of no Medusa")


def test_an_eagle_of_another_model_or_not_whole_is_refused(target: Path, tmp_path: Path) -> None:
    config = config_of(target)
    said, weights = layer_config(config), eagle3_weights(config, 128)
    narrow = copy.deepcopy(config)
    narrow.hidden_size, narrow.head_dim = 32, said["head_dim"]
    other_size = without(eagle3_weights(narrow, 128), "fc.weight") | {"fc.weight": torch.zeros(32, 3 * 64)}
    one_head = weights | {
        "midlayer.self_attn.q_proj.weight": torch.zeros(said["head_dim"], 2 * config.hidden_size),
        "midlayer.self_attn.o_proj.weight": torch.zeros(config.hidden_size, said["head_dim"]),
    }
    cases: list[tuple[str, Weights, dict[str, Any], str]] = [
        ("states", weights, said | {"eagle_aux_hidden_state_layer_ids": [1, 9, 3]}, "sees layers"),
        ("negative", weights, said | {"eagle_aux_hidden_state_layer_ids": [-1, 2, 3]}, "sees layers"),
        ("fewer", weights, said | {"eagle_aux_hidden_state_layer_ids": [1, 2]}, "is given 192 numbers"),
        ("layers", weights, said | {"num_hidden_layers": 2}, "has 2 layers"),
        ("kv", weights, said | {"num_key_value_heads": 1}, "has 1 KV heads"),
        ("option", weights, said | {"fc_norm": True}, "fc_norm set, which is not supported"),
        ("gap", without(weights, "midlayer.mlp.up_proj.weight"), said, "lacks layer.mlp.up_proj.weight"),
        ("more", weights | {"stranger": torch.zeros(1)}, said, "weights of no EAGLE: stranger"),
        ("no d2t", without(weights, "d2t"), said, "no d2t"),
        ("d2t of ids", weights | {"d2t": torch.arange(128) * 2}, said, "it holds offsets"),
        ("short d2t", weights | {"d2t": torch.zeros(100, dtype=torch.int64)}, said, r"a d2t of shape \[100\]"),
        ("tall d2t", weights | {"d2t": torch.zeros(128, 1, dtype=torch.int64)}, said, r"a d2t of shape \[128, 1\]"),
        ("fewer heads than KV", one_head, said | {"num_attention_heads": 1}, "has 1 attention heads"),
        ("another size", other_size, said | {"hidden_size": 32}, "no embed_tokens, and another hidden size"),
        ("half rotated", weights, said | {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ("wide", weights | {"midlayer.self_attn.q_proj.weight": torch.zeros(64, 64)}, said, "Sizes of tensors|fit"),
        ("vocabulary", weights | {"embed_tokens.weight": torch.zeros(100, 64)}, said, "embeds 100 tokens"),
    ]
    layered = speculators_config(config, "eagle3", draft_vocab_size=128)
    spoilt_configs: dict[str, dict[str, Any]] = {
        "ids": {"eagle_aux_hidden_state_layer_ids": "012"}, "ids of text": {"eagle_aux_hidden_state_layer_ids": ["a"]},
        "no ids": {"eagle_aux_hidden_state_layer_ids": 3}, "heads": {"num_attention_heads": 0},
        "odd heads": {"num_attention_heads": 3}, "dim": {"head_dim": 15}, "eps": {"rms_norm_eps": None},
        "hidden": {"hidden_size": -64}, "theta": {"rope_theta": "x"}, "no theta": {"rope_theta": 0},
        "scaling": {"rope_scaling": {"rope_type": "nonsense"}}, "act": {"hidden_act": "gelu"},
        "flag": {"norm_before_residual": "false"}, "biases": {"mlp_bias": True},
    }  # fmt: skip
    for name, spoilt in spoilt_configs.items():
        cases.append((name, weights, said | spoilt, "head"))
    cases += [
        ("layer", weights, layered | {"transformer_layer_config": None}, "head"),
        ("layers of text", weights, layered | {"transformer_layer_config": "x"}, "head"),
        ("flat", weights | {"fc.weight": torch.zeros(192)}, said, "head"),
        ("number", weights | {"lm_head.weight": torch.tensor(1.0)}, said, "head"),
        ("deep d2t", weights | {"d2t": torch.zeros(2, 64, dtype=torch.int64)}, said, "head"),
    ]
    for name, its, config_said, match in cases:
        refused(target, write_head(tmp_path / name, its, config_said), match)


def test_what_a_heads_config_says_of_other_things_is_left(target: Path, tmp_path: Path) -> None:
    """transformers makes a name for each of so many labels, which took all memory there is."""
    config = config_of(target)
    head = write_head(tmp_path, eagle3_weights(config, 128), layer_config(config) | {"num_labels": 10**12})
    load_head(str(head), CausalLM.load(str(target), device="cpu", native="off"))


def test_a_tensor_that_repeats_what_its_file_holds_is_refused(target: Path, tmp_path: Path) -> None:
    """A file of some bytes would take as much memory as it says."""
    config = config_of(target)
    weights = eagle3_weights(config, 128)
    head = write_head(tmp_path, weights, layer_config(config), pickled=True)
    load_head(str(head), CausalLM.load(str(target), device="cpu", native="off"))
    torch.save(weights | {"embed_tokens.weight": torch.zeros(1).expand(1 << 40, 64)}, head / "pytorch_model.bin")
    refused(target, head, "holds less of embed_tokens.weight than its shape")


def test_a_config_that_is_no_json_is_refused(target: Path, tmp_path: Path) -> None:
    head = write_head(tmp_path, eagle3_weights(config_of(target), 128), layer_config(config_of(target)))
    (head / "config.json").write_text("{")
    refused(target, head, "cannot be loaded")
    (head / "config.json").write_text(json.dumps(["a list"]))
    refused(target, head, "cannot be loaded|neither")
