"""Trainings: what is learnt is what will be served, goes on where it was, and ends when nothing improves."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from shared.engine.model import CausalLM
from shared.self_drafting.loader import load_head
from shared.settings import StartupError
from shared.training import samples as samples_module
from shared.training import trainer as trainer_module
from shared.training.corpus import Corpus, corpus_of, read_texts
from shared.training.draft_student import DraftStudent
from shared.training.eagle_student import EagleStudent, published
from shared.training.kept import Kept, claim, forget
from shared.training.medusa_student import MedusaStudent
from shared.training.pruning import measure_importance, prune
from shared.training.samples import Sampling, Writing
from shared.training.session import Text, WantedDraft, WantedHead, acceptance, distill, train_head
from shared.training.student import Student, agreement, loss_of
from shared.training.teacher import Lesson, Teacher
from shared.training.trainer import Lessons, Progress, Trainer
from tests.support.dense_heads import eagle3_logits, load_reference
from tests.support.families import tiny_checkpoint
from tests.support.models import tiny_llama

LENGTH = 32
LESSONS = Lessons(minutes=10.0, num_rows=4, length=LENGTH, check_seconds=0.0, patience=1000)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("target"), num_layers=6)


@pytest.fixture(scope="module")
def teacher(target: Path) -> Teacher:
    return Teacher(str(target))


@pytest.fixture(scope="module")
def corpus(teacher: Teacher, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """What the target writes: it agrees with itself, and is learnt fast."""
    return samples_of(teacher, tmp_path_factory.mktemp("samples"))


def samples_of(teacher: Teacher, folder: Path, seen: Callable[[Writing], None] = lambda _: None) -> Corpus:
    return Sampling(6000, LENGTH, 0, folder, "a target's").corpus(teacher.model, teacher.tokenizer, seen)


def test_unrolled_in_training_an_eagle_guesses_as_in_service(target: Path) -> None:
    torch.manual_seed(0)
    teacher = Teacher(str(target))
    student = EagleStudent(teacher, 3)
    for parameter in student.module.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter) * parameter.std().nan_to_num(1.0)
    weights = {name: each.detach() for name, each in published(student.module).items()}
    weights["d2t"] = torch.zeros(teacher.config.vocab_size, dtype=torch.int64)
    tokens = torch.randint(1, 257, (2, 24))
    with torch.no_grad():
        predictions = student.predictions(teacher.teach(tokens))
    model = load_reference(target)
    for depth, position, row in itertools.product(range(3), (0, 5, 20 - 3), range(2)):
        committed = tokens[row, : position + 2].tolist()
        drafted = tokens[row, position + 2 : position + 2 + depth].tolist()
        dense = eagle3_logits(weights, model, committed, drafted, states=[2, 3, 3], layer="layers.0.")
        torch.testing.assert_close(predictions[depth][row, position], dense, rtol=1e-4, atol=1e-4)


def test_a_medusa_begins_as_the_targets_own_head(target: Path) -> None:
    teacher = Teacher(str(target))
    student = MedusaStudent(teacher, 2)
    lesson = teacher.teach(torch.randint(1, 257, (1, 10)))
    for depth, logits in enumerate(student.predictions(lesson)):
        torch.testing.assert_close(logits, lesson.logits[:, : -(depth + 1)], rtol=1e-4, atol=1e-4)


def stop_after(num_steps: int) -> Any:
    def on_progress(progress: Progress) -> None:
        if progress.step >= num_steps:
            raise KeyboardInterrupt

    return on_progress


@pytest.mark.parametrize("kind", ["medusa", "eagle3", "draft"])
def test_it_learns_goes_on_and_can_be_loaded(kind: str, target: Path, corpus: Corpus, tmp_path: Path) -> None:
    def begin() -> tuple[Teacher, Student]:
        torch.manual_seed(1)
        teacher = Teacher(str(target))
        if kind == "medusa":
            return teacher, MedusaStudent(teacher, 2)
        if kind == "eagle3":
            return teacher, EagleStudent(teacher, 2)
        importance = measure_importance(teacher, itertools.islice(corpus.batches(4, LENGTH, 0), 2))
        return teacher, DraftStudent(teacher, prune(teacher, importance, 2, 0.5))

    teacher, student = begin()
    rows = corpus.held_out[: 4 * LENGTH].view(4, LENGTH)
    before = loss_of(student, teacher.teach(rows), 0.8).item()
    with pytest.raises(KeyboardInterrupt):
        Trainer(teacher, student, corpus, tmp_path, LESSONS, kind).run(stop_after(30))
    teacher, student = begin()
    seen: list[Progress] = []
    again = Trainer(teacher, student, corpus, tmp_path, LESSONS, kind)

    def on_progress(progress: Progress) -> None:
        seen.append(progress)
        stop_after(60)(progress)

    with pytest.raises(KeyboardInterrupt):
        again.run(on_progress)
    assert seen[0].step in (29, 30, 31)
    other = MedusaStudent(Teacher(str(target)), 3)  # of another kind, or with more heads
    with pytest.raises(StartupError, match=r"training.pt cannot be gone on from"):
        Trainer(teacher, other, corpus, tmp_path, LESSONS, "another")
    assert [each.name for each in tmp_path.iterdir()] == ["training.pt"]
    quick = Lessons(minutes=1e-6, num_rows=4, length=LENGTH)
    teacher, student = begin()
    agreements = Trainer(teacher, student, corpus, tmp_path, quick, kind).run(lambda _: None)
    # A Medusa begins as the target's own head, of which there is little to be learnt so soon.
    least = 1.0 if kind == "medusa" else 0.97
    assert loss_of(student, teacher.teach(rows), 0.8).item() < least * before
    assert len(agreements) == len(agreement(student, teacher.teach(rows)))
    # Broken off now, it would not begin anew.
    teacher, student = begin()
    steps: list[int] = []
    trainer = Trainer(teacher, student, corpus, tmp_path, LESSONS, kind)
    assert trainer.run(lambda progress: steps.append(progress.step)) == agreements
    assert len(set(steps)) == 1
    forget(tmp_path)
    assert not list(tmp_path.glob("training.pt*"))
    if kind == "draft":
        draft: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert draft.config.vocab_size == teacher.config.vocab_size
        assert len(AutoTokenizer.from_pretrained(tmp_path)) == 257
    else:
        assert callable(load_head(str(tmp_path), CausalLM.load(str(target), device="cpu")))


def test_interrupted_it_goes_on_from_there_and_a_model_is_not_overwritten(
    teacher: Teacher, corpus: Corpus, tmp_path: Path
) -> None:
    rarely = replace(LESSONS, check_seconds=1e9)

    def trainer(lessons: Lessons) -> Trainer:
        return Trainer(teacher, MedusaStudent(teacher, 1), corpus, tmp_path, lessons, "medusa")

    with pytest.raises(KeyboardInterrupt):
        trainer(rarely).run(stop_after(20))
    seen: list[Progress] = []
    again = trainer(rarely)
    assert again.share > 0

    def on_progress(progress: Progress) -> None:
        seen.append(progress)
        stop_after(40)(progress)

    with pytest.raises(KeyboardInterrupt):
        again.run(on_progress)
    assert seen[0].step in (20, 21)
    trainer(replace(rarely, minutes=1e-6)).run(lambda _: None)
    made = {path.name: path.read_bytes() for path in tmp_path.iterdir() if not path.name.startswith("training.pt")}
    forget(tmp_path)
    with pytest.raises(StartupError, match="is not empty, and nothing was begun there"):
        trainer(LESSONS)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == made


def test_interrupted_while_it_is_looked_at_last_it_is_looked_at_again(
    teacher: Teacher, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trainer() -> Trainer:
        return Trainer(teacher, MedusaStudent(teacher, 1), corpus, tmp_path, quick, "medusa")

    def interrupt(student: Student, lesson: Lesson) -> list[float]:
        raise KeyboardInterrupt

    quick = replace(LESSONS, minutes=1e-6)
    with monkeypatch.context() as patched:
        patched.setattr(trainer_module, "agreement", interrupt)
        with pytest.raises(KeyboardInterrupt):
            trainer().run(lambda _: None)
    assert len(trainer().run(lambda _: None)) == 1
    assert (tmp_path / "medusa_lm_head.safetensors").is_file()


def test_what_improves_no_more_ends_early(teacher: Teacher, corpus: Corpus, tmp_path: Path) -> None:
    class Stubborn:
        """Says the same whatever it is taught."""

        kind, first_ahead = "stubborn", 0

        def __init__(self) -> None:
            self.module = torch.nn.Linear(1, 1)
            self.num_written = 0

        def predictions(self, lesson: Any) -> list[Tensor]:
            return [torch.zeros_like(lesson.logits) + 0 * self.module.weight.sum()]

        def write(self, folder: Path) -> None:
            self.num_written += 1

    student = Stubborn()
    steps: list[int] = []
    impatient = replace(LESSONS, patience=4)
    Trainer(teacher, student, corpus, tmp_path, impatient, "stubborn").run(lambda progress: steps.append(progress.step))
    assert max(steps) < 12
    assert student.num_written == 1


@pytest.mark.parametrize("tied", [False, True])
def test_what_does_nothing_is_what_is_cut_out(tied: bool, target: Path, tmp_path: Path) -> None:
    """A target half of whose channels, neurons and KV groups are nothing: without them it is the same."""
    model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    hidden, dim = model.config.hidden_size, model.config.hidden_size // model.config.num_attention_heads
    channels = torch.arange(hidden) % 2 == 0
    with torch.no_grad():
        if tied:
            model.config.tie_word_embeddings = True
            model.tie_weights()
        for weight in (model.model.embed_tokens.weight, model.lm_head.weight):
            weight[:, ~channels] = 0
        for layer in model.model.layers:
            layer.mlp.down_proj.weight[~channels] = 0
            layer.self_attn.o_proj.weight[~channels] = 0
            layer.mlp.up_proj.weight[1::2] = 0
            groups = model.config.num_attention_heads // model.config.num_key_value_heads * dim
            layer.self_attn.v_proj.weight[dim:] = 0  # all groups but the first
            layer.self_attn.o_proj.weight[:, groups:] = 0
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(target).save_pretrained(tmp_path)
    teacher = Teacher(str(tmp_path))
    tokens = torch.randint(1, 257, (3, 20), generator=torch.Generator().manual_seed(2))
    importance = measure_importance(teacher, [tokens])
    width = 1 / model.config.num_key_value_heads
    whole = prune(teacher, importance, len(teacher.layers), 1.0)
    torch.testing.assert_close(whole(tokens).logits, teacher.model(tokens).logits, rtol=1e-4, atol=1e-4)
    assert width == 0.5
    half = prune(teacher, importance, len(teacher.layers), width)
    assert half.num_parameters() < 0.55 * whole.num_parameters()
    # Norms are means over channels: with half of them, sums of squares are of as many as count.
    with torch.no_grad():
        for norm in [half.model.norm, *(each.input_layernorm for each in half.model.layers)]:
            norm.weight *= 2**0.5
        for layer in half.model.layers:
            layer.post_attention_layernorm.weight *= 2**0.5
    torch.testing.assert_close(half(tokens).logits, teacher.model(tokens).logits, rtol=1e-3, atol=1e-3)


def test_layers_that_turn_nothing_go_first(target: Path, tmp_path: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    with torch.no_grad():
        for index in (1, 4):
            model.model.layers[index].mlp.down_proj.weight.zero_()
            model.model.layers[index].self_attn.o_proj.weight.zero_()
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(target).save_pretrained(tmp_path)
    teacher = Teacher(str(tmp_path))
    tokens = torch.randint(1, 257, (3, 20), generator=torch.Generator().manual_seed(2))
    four = prune(teacher, measure_importance(teacher, [tokens]), 4, 1.0)
    torch.testing.assert_close(four(tokens).logits, teacher.model(tokens).logits, rtol=1e-4, atol=1e-4)
    for wrong in (0, 7):
        with pytest.raises(StartupError, match=f"layers is {wrong}"):
            prune(teacher, measure_importance(teacher, [tokens]), wrong, 1.0)


def test_acceptance_is_what_two_distributions_share(teacher: Teacher) -> None:
    rows = torch.randint(1, 257, (2, 12))
    assert acceptance(DraftStudent(teacher, teacher.model), teacher, rows) == pytest.approx(1.0, abs=1e-5)


def test_text_is_split_and_drawn_the_same_for_a_seed(teacher: Teacher, tmp_path: Path) -> None:
    for index in range(12):
        (tmp_path / f"{index}.txt").write_text(f"text {index} " * 40)
    (tmp_path / "other.md").write_text("no")
    texts = read_texts(tmp_path, "*.txt", seed=1)
    assert len(texts) == 12
    assert texts == read_texts(tmp_path, "*.txt", seed=1) != read_texts(tmp_path, "*.txt", seed=2)
    corpus = corpus_of(texts, teacher.tokenizer, LENGTH)
    whole = [token for text in texts for token in [*teacher.tokenizer(text)["input_ids"], 0]]
    assert [*corpus.held_out.tolist(), *corpus.train.tolist()] == whole
    batches = list(itertools.islice(corpus.batches(2, LENGTH, 5), 4))
    later = list(itertools.islice(corpus.batches(2, LENGTH, 5, first=2), 2))
    assert all(torch.equal(one, other) for one, other in zip(batches[2:], later, strict=True))
    with pytest.raises(StartupError, match="the text to train on has"):
        corpus_of(["too short"], teacher.tokenizer, LENGTH)


def test_from_text_to_card(target: Path, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for index in range(30):
        (text / f"{index}.txt").write_text(f"def f{index}(x):\n    return x + {index}\n" * 8)
    stages: list[str] = []
    made = train_head(
        str(target), WantedHead("eagle3", 2), Text(text), 0.02, tmp_path / "head", stages.append, lambda _: None
    )
    assert len(made.agreements) == len(made.trial.by_depth) == 2
    assert made.trial.tokens_per_step >= 1.0
    draft = distill(
        str(target), WantedDraft(1, 0.5), Text(text), 0.02, tmp_path / "draft", stages.append, lambda _: None
    )
    assert 0 <= draft.agreement <= 1
    assert 0 < draft.acceptance < 1
    assert len([stage for stage in stages if "tokens to train on" in stage]) == 2
    with pytest.raises(StartupError, match="is not empty, and nothing was begun there"):
        train_head(str(target), WantedHead("medusa", 2), Text(text), 1, tmp_path, stages.append, lambda _: None)
    assert "tokens" not in stages[-1], "before anything is read"
    with pytest.raises(StartupError, match="there is no model folder"):
        train_head("./nowhere", WantedHead("medusa", 2), Text(), 1, tmp_path, stages.append, lambda _: None)


@pytest.mark.parametrize("family", ["gpt2", "gpt_oss"])
def test_what_nothing_can_be_cut_out_of_is_refused_at_once(family: str, corpus: Corpus, tmp_path: Path) -> None:
    teacher = Teacher(str(tiny_checkpoint(family, tmp_path)))
    with pytest.raises(StartupError, match="a draft is cut out of"):
        measure_importance(teacher, corpus.batches(1, LENGTH, 0))


def test_a_head_for_what_is_no_llama_begins_from_nothing(tmp_path: Path) -> None:
    teacher = Teacher(str(tiny_checkpoint("gpt2", tmp_path)))
    student = EagleStudent(teacher, 2)
    assert [each.shape for each in student.predictions(teacher.teach(torch.ones(1, 9, dtype=torch.int64)))] == [
        (1, 8, 257),
        (1, 7, 257),
    ]


@pytest.mark.parametrize("width", [0.1, 0.34, 0.9])
def test_any_width_can_be_written(width: float, target: Path, tmp_path: Path) -> None:
    teacher = Teacher(str(target))
    importance = measure_importance(teacher, [torch.ones(1, 9, dtype=torch.int64)])
    DraftStudent(teacher, prune(teacher, importance, 1, width)).write(tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.num_hidden_layers == 1


def test_another_kind_of_head_takes_the_place_of_the_first(target: Path, tmp_path: Path) -> None:
    teacher = Teacher(str(target))
    MedusaStudent(teacher, 1).write(tmp_path)
    both = (tmp_path / "medusa_lm_head.safetensors").read_bytes()
    EagleStudent(Teacher(str(target)), 1).write(tmp_path)
    assert callable(load_head(str(tmp_path), CausalLM.load(str(target), device="cpu")))
    assert not (tmp_path / "medusa_lm_head.safetensors").exists()
    (tmp_path / "medusa_lm_head.safetensors").write_bytes(both)
    with pytest.raises(StartupError, match="weights of two heads"):
        load_head(str(tmp_path), CausalLM.load(str(target), device="cpu"))


def test_a_folder_that_cannot_be_written_to_is_found_at_once(target: Path, corpus: Corpus, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here")
    teacher = Teacher(str(target))
    with pytest.raises(StartupError, match="cannot be written to"):
        Trainer(teacher, MedusaStudent(teacher, 1), corpus, tmp_path / "file", LESSONS, "medusa")
    (tmp_path / "begun" / "training.pt.new").mkdir(parents=True)
    (tmp_path / "begun" / "training.pt").write_bytes(b"a training")
    with pytest.raises(StartupError, match="cannot be written to"):
        Trainer(teacher, MedusaStudent(teacher, 1), corpus, tmp_path / "begun", LESSONS, "medusa")
    with pytest.raises(StartupError, match="matches no names"):
        read_texts(tmp_path, "/x*", 0)
    with pytest.raises(StartupError, match="is no folder"):
        read_texts(tmp_path / "file", "*", 0)
    for minutes in (float("nan"), float("inf"), 0.0):
        with pytest.raises(StartupError, match="minutes is"):
            train_head(str(target), WantedHead("medusa", 1), Text(), minutes, tmp_path, lambda _: None, lambda _: None)


def test_samples_are_kept_for_whoever_is_broken_off(
    teacher: Teacher, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By Ctrl-C from there, by anything else from what was kept last; what is of another training is not taken."""

    def stop_behind(num_batches: int) -> list[int]:
        seen: list[int] = []

        def on_progress(writing: Writing) -> None:
            seen.append(writing.num_tokens)
            if len(seen) > num_batches:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            samples_of(teacher, tmp_path, on_progress)
        return seen

    first = stop_behind(2)
    assert first[0] == 0
    claim(tmp_path)  # what it holds is a training that was begun
    monkeypatch.setattr(samples_module, "_KEEP_SECONDS", 0.0)
    monkeypatch.setattr(Kept, "write", kept_but_at_the_end(Kept.write, 3))
    second = stop_behind(4)
    assert second[0] == first[-1] > 0
    monkeypatch.undo()
    seen: list[int] = []
    again = samples_of(teacher, tmp_path, lambda writing: seen.append(writing.num_tokens))
    assert seen[0] == second[3]
    assert torch.equal(again.train, corpus.train)
    assert torch.equal(again.held_out, corpus.held_out)
    seen.clear()
    assert torch.equal(
        samples_of(teacher, tmp_path, lambda writing: seen.append(writing.num_tokens)).train, again.train
    )
    assert len(seen) == 1, "nothing is written once more"
    with pytest.raises(StartupError, match=r"samples.pt cannot be gone on from .*it is of a target's, 32 at a time"):
        Sampling(6000, LENGTH, 0, tmp_path, "another's").corpus(teacher.model, teacher.tokenizer, lambda _: None)
    forget(tmp_path)
    assert not list(tmp_path.iterdir())


def kept_but_at_the_end(write: Any, times: int) -> Any:
    """What is killed keeps nothing at its end."""
    written: list[int] = []

    def kept(self: Kept, state: Any) -> None:
        written.append(1)
        if len(written) <= times:
            write(self, state)

    return kept


def test_samples_end_where_texts_do(teacher: Teacher, tmp_path: Path) -> None:
    """Half of what this target writes next is the end: texts are short, and nothing fills them up."""

    class Ending:
        device = torch.device("cpu")

        def generate(self, start: Tensor, **_: Any) -> Tensor:
            rows = torch.randint(1, 257, (len(start), 30))
            ends = torch.arange(30) >= torch.randint(1, 30, (len(start), 1))
            return torch.cat([start, rows.masked_fill(ends, 0)], 1)

    corpus = Sampling(4000, LENGTH, 0, tmp_path, "").corpus(Ending(), teacher.tokenizer, lambda _: None)
    tokens = [*corpus.held_out.tolist(), *corpus.train.tolist()]
    assert all(pair != (0, 0) for pair in itertools.pairwise(tokens))
