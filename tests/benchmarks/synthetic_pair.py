"""A target and a draft of real size and chosen agreement, without training.

The target is a random Llama; its layers after the first `shared_layers` are scaled by `epsilon` where
they write to the residual stream, and the draft is those first layers alone. So the draft costs what its
share of the layers costs, the target costs its full size, and epsilon sets how often they agree: 0.1
gives greedy agreement 0.65 and a mean Σ min(p, q) of 0.77 at the default shape. The text is
meaningless; the cost of serving it is real.

    python -m tests.benchmarks.synthetic_pair --epsilon 0.1
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

EOS = "<|endoftext|>"
PAIR = Path(__file__).parent / "pair"
"""Where the pair is made unless told otherwise: target/, draft/ and shape.json."""


@dataclass(frozen=True, slots=True)
class PairShape:
    """Shape of the target, how many of its first layers the draft has, and how much the others matter."""

    epsilon: float = 0.1
    layers: int = 24
    shared_layers: int = 2
    hidden: int = 1024
    mlp: int = 2816
    heads: int = 16
    kv_heads: int = 4
    vocab: int = 8192
    context: int = 8192
    seed: int = 0


def make_pair(out: Path = PAIR, shape: PairShape | None = None) -> tuple[Path, Path]:
    """Writes the pair as bf16 checkpoints below `out`, unless one of this shape is there; returns target and draft."""
    shape = shape or PairShape()
    target_path, draft_path, shape_path = out / "target", out / "draft", out / "shape.json"
    wanted = json.dumps(asdict(shape), indent=2)
    if shape_path.exists() and shape_path.read_text() == wanted:
        return target_path, draft_path
    shape_path.unlink(missing_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(shape.seed)
        target = make_target(shape)
        draft = _first_layers(target, shape.shared_layers)
    tokenizer = _train_tokenizer(shape.vocab)
    for model, path in ((target, target_path), (draft, draft_path)):
        model.bfloat16().save_pretrained(path)
        tokenizer.save_pretrained(path)
    shape_path.write_text(wanted)  # last: it says that the rest is whole
    return target_path, draft_path


@torch.no_grad()
def make_target(shape: PairShape) -> LlamaForCausalLM:
    """The target alone, in float32."""
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.context,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        initializer_range=0.03,
    )
    target = LlamaForCausalLM(config)
    # Next-token distributions that are peaked, but not one-hot.
    target.lm_head.weight.normal_(0, 5.0 / shape.hidden**0.5)
    target.model.embed_tokens.weight.normal_(0, 1)
    for i, layer in enumerate(target.model.layers):
        scale = 2.0 if i < shape.shared_layers else shape.epsilon
        layer.self_attn.o_proj.weight.mul_(scale)
        layer.mlp.down_proj.weight.mul_(scale)
    return target


def _first_layers(target: LlamaForCausalLM, count: int) -> LlamaForCausalLM:
    """The model that the target would be with its first `count` layers alone."""
    draft = LlamaForCausalLM(LlamaConfig(**{**target.config.to_dict(), "num_hidden_layers": count}))
    wanted = draft.state_dict().keys()
    draft.load_state_dict({name: weight for name, weight in target.state_dict().items() if name in wanted})
    return draft


def _train_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE over part of the standard library, so that text in and out works."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train(sorted(str(path) for path in Path(sysconfig.get_paths()["stdlib"]).glob("*.py")), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=EOS, pad_token=EOS)  # type: ignore[no-untyped-call]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=PAIR)
    for field in fields(PairShape):
        kind = float if field.name == "epsilon" else int
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=field.default)
    options = vars(parser.parse_args())
    for path in make_pair(options.pop("out"), PairShape(**options)):
        print(path)


if __name__ == "__main__":
    main()
