"""Trains the demo pair: a small target, and a smaller draft distilled from it.

Both are Llama-architecture causal language models over one byte-level BPE vocabulary, trained on the
Python standard library found on this machine, and written as ordinary Hugging Face checkpoints. Two
CPU cores take about 70 minutes for the defaults.

    python -m shared.models.demo.train --out demo --target-minutes 50 --draft-minutes 20
"""

from __future__ import annotations

import argparse
import math
import random
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

EOS = "<|endoftext|>"
SKIP = ("site-packages", "test", "lib2to3/tests", "idlelib/idle_test", "pydoc_data", "encodings")
CONTEXT = 2048
BATCH_ROWS = 8
BATCH_LENGTH = 512
HELD_OUT_TOKENS = 60_000


def corpus() -> list[str]:
    """The standard library's own modules, without tests and generated tables."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = (path.relative_to(root) for path in sorted(root.rglob("*.py")))
    kept = (path for path in files if not str(path).startswith(SKIP) and not {"test", "tests"} & set(path.parts))
    return [(root / path).read_text(encoding="utf-8", errors="ignore") for path in kept]


def shuffled_corpus(seed: int) -> list[str]:
    """The same in an order that `seed` gives: of the demo pair's, with seed 0, the first texts are held out."""
    texts = corpus()
    random.Random(seed).shuffle(texts)
    return texts


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE with end-of-text as token 0; four spaces of indentation are never merged with what follows."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" " * 4, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[EOS], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    core.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=core, eos_token=EOS, pad_token=EOS, model_max_length=CONTEXT
    )


def build(vocab: int, hidden: int, layers: int, heads: int, kv_heads: int, mlp: int) -> LlamaForCausalLM:
    """A Llama of this shape with random weights and tied embeddings."""
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def batches(tokens: torch.Tensor) -> Iterator[torch.Tensor]:
    """Random windows of `tokens` [num_tokens], without end: [BATCH_ROWS, BATCH_LENGTH + 1] each."""
    while True:
        starts = torch.randint(0, tokens.numel() - BATCH_LENGTH - 1, (BATCH_ROWS,))
        yield torch.stack([tokens[start : start + BATCH_LENGTH + 1] for start in starts.tolist()])


def loss_of(model: LlamaForCausalLM, batch: torch.Tensor, teacher: LlamaForCausalLM | None) -> torch.Tensor:
    """Cross-entropy (nats per token) to the text; with a teacher, nine tenths of it to the teacher's distribution."""
    x, y = batch[:, :-1], batch[:, 1:]
    with torch.autocast("cpu", torch.bfloat16):
        logits: torch.Tensor = model(input_ids=x, use_cache=False).logits.float()
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        if teacher is None:
            return loss
        with torch.no_grad():
            goal = teacher(input_ids=x, use_cache=False).logits.float().softmax(-1)
        distillation: torch.Tensor = -(goal * logits.log_softmax(-1)).sum(-1).mean()
        return 0.1 * loss + 0.9 * distillation


def train(
    model: LlamaForCausalLM,
    tokens: torch.Tensor,
    minutes: float,
    peak_rate: float,
    progress: Progress,
    name: str,
    teacher: LlamaForCausalLM | None = None,
) -> LlamaForCausalLM:
    """AdamW for `minutes`: 100 steps of warm-up, then a cosine down to a twentieth of `peak_rate`."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_rate, betas=(0.9, 0.95), weight_decay=0.05)
    bar = progress.add_task(name, total=1.0, loss=math.nan)
    start = time.monotonic()
    average: float | None = None
    for step, batch in enumerate(batches(tokens)):
        done = (time.monotonic() - start) / (60 * minutes)
        if done >= 1:
            break
        cosine = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done))
        for group in optimizer.param_groups:
            group["lr"] = peak_rate * min(1.0, (step + 1) / 100) * cosine
        loss = loss_of(model, batch, teacher)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        average = loss.item() if average is None else 0.98 * average + 0.02 * loss.item()
        progress.update(bar, completed=done, loss=average)
    progress.update(bar, completed=1.0)
    model.train(False)
    return model


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Writes a bf16 checkpoint; the model itself is rounded to bf16, and float32 again afterwards."""
    model.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    model.float()  # type: ignore[no-untyped-call]


@torch.no_grad()
def report(target: LlamaForCausalLM, draft: LlamaForCausalLM, held_out: torch.Tensor) -> str:
    """Target loss, acceptance at T = 1 (mean sum of min(p, q), Leviathan et al. 2023) and greedy agreement."""
    x = held_out[: 16 * BATCH_LENGTH].view(16, BATCH_LENGTH)
    p, q = (model(input_ids=x).logits.float() for model in (target, draft))
    acceptance = torch.minimum(p.softmax(-1), q.softmax(-1)).sum(-1).mean().item()
    agreement = (p.argmax(-1) == q.argmax(-1)).float().mean().item()
    loss = F.cross_entropy(p[:, :-1].flatten(0, 1), x[:, 1:].flatten()).item()
    return f"held out: target loss {loss:.3f}, acceptance at T=1 {acceptance:.3f}, greedy agreement {agreement:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for target/ and draft/")
    parser.add_argument("--target-minutes", type=float, default=50.0)
    parser.add_argument("--draft-minutes", type=float, default=20.0)
    parser.add_argument("--vocab", type=int, default=4096, help="tokens in the vocabulary")
    options = parser.parse_args()

    torch.manual_seed(0)
    console = Console()
    texts = shuffled_corpus(0)
    with console.status("tokenizing"):
        tokenizer = train_tokenizer(texts, options.vocab)
        tokens = torch.tensor([token for text in texts for token in [*tokenizer(text)["input_ids"], 0]])
    held_out, tokens = tokens[:HELD_OUT_TOKENS], tokens[HELD_OUT_TOKENS:]
    console.print(f"{len(texts)} files, {sum(map(len, texts)) / 1e6:.1f} MB, {tokens.numel() / 1e6:.2f}M tokens")

    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("loss {task.fields[loss]:.3f}"), console=console) as progress:
        target = build(options.vocab, hidden=256, layers=6, heads=4, kv_heads=2, mlp=704)
        train(target, tokens, options.target_minutes, 2e-3, progress, "target")
        save(target, tokenizer, options.out / "target")
        draft = build(options.vocab, hidden=128, layers=2, heads=2, kv_heads=1, mlp=352)
        train(draft, tokens, options.draft_minutes, 3e-3, progress, "draft", teacher=target)
        save(draft, tokenizer, options.out / "draft")
    console.print(report(target, draft, held_out))


if __name__ == "__main__":
    main()
