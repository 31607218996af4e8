"""The data and the rows that the adapters of the real model are trained on."""

import random
from pathlib import Path

import pytest
import torch
from tiny_adapters import lora_shapes, make_adapter_folder, tiny_config
from tiny_models import CHATML, make_model_folder

from personae.evals.demo.finetune import dialogs, extract, sql
from personae.evals.demo.finetune.encode import IGNORED, Batch, Encoder
from personae.evals.demo.finetune.pack import pack, packed
from personae.evals.demo.finetune.questions import Question, grade, held_out
from personae.evals.demo.finetune.scene import Scene
from personae.evals.demo.finetune.tasks import GENERATORS
from personae.evals.demo.finetune.train import Trainer
from personae.lora.peft import read_adapter


def scenes(task: str, *, test: bool, count: int = 150) -> list[Scene]:
    rng = random.Random(f"{task} {test}")
    return [GENERATORS[task](rng, test=test, turns=2) for _ in range(count)]


def bare(name: str) -> str:
    return name.replace("_", "").lower()


def test_training_shows_no_tool_that_is_held_out() -> None:
    train, test = (
        {bare(one["function"]["name"]) for scene in scenes("tools", test=test) for one in scene.tools}
        for test in (False, True)
    )
    assert len(train) > 100
    assert len(test) > 50
    assert not train & test


def test_training_shows_no_document_and_no_table_that_is_held_out() -> None:
    train, test = (
        {tuple(sorted(one.schema["properties"])) for one in scenes("extract", test=test) if one.schema}
        for test in (False, True)
    )
    assert not train & test
    train, test = (
        {scene.turns[0].user.partition(" (")[0] for scene in scenes("sql", test=test, count=40)}
        for test in (False, True)
    )
    assert not train & test


@pytest.mark.parametrize("task", GENERATORS)
def test_the_right_answer_is_graded_right_and_another_is_not(task: str) -> None:
    for question in held_out(task, 12):
        turn = question.turn
        assert grade(question, {"content": turn.answer})["right"] == 1.0
        assert grade(question, {"content": '{"a": 1}'})["right"] == (0.0 if turn.kind != "none" else 1.0)


def test_every_field_of_a_document_is_said_somewhere() -> None:
    for document in extract.written_documents():
        said = " ".join(way for group in document.groups for way in group)
        for name in document.fields:
            assert "{" + name + "}" in said or f"+{name} " in said, (document.name, name)


def test_a_query_that_never_ends_or_is_none_is_wrong() -> None:
    endless = "WITH RECURSIVE a(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM a) SELECT n FROM a WHERE n < 0"
    for query in ("SELEC", endless):
        assert sql.run([], query) is None


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_model_folder(folder, "llama")
    (folder / "chat_template.jinja").write_text(CHATML)
    return folder


def test_questions_that_share_a_row_are_as_good_as_alone(model: Path) -> None:
    encoder, trainer = Encoder(model), Trainer(model, 4, 1e-3, 10)
    trainer.peft.float()
    rng = random.Random(3)
    scene = GENERATORS["triage"](rng, test=False, turns=3)
    row = encoder.row(scene, 5000)
    assert row is not None
    assert max(row.branch) == 3
    alone = [encoder.row(Scene(scene.task, [], scene.system, [turn]), 5000) for turn in scene.turns]
    with torch.no_grad():
        together = trainer.loss(Batch.of([row], 3))
        apart = sum(trainer.loss(Batch.of([one], 3)) for one in alone if one is not None)
    assert float(together) == pytest.approx(float(apart), rel=1e-3)


def test_training_that_was_interrupted_is_training_that_was_not(model: Path, tmp_path: Path) -> None:
    encoder, rng = Encoder(model), random.Random(5)
    rows = [encoder.row(GENERATORS["verse"](rng, test=False, turns=2), 900) for _ in range(3)]
    steps = [[row] for row in rows if row is not None]
    whole = Trainer(model, 4, 1e-2, 3)
    losses = [whole.step(index, rows) for index, rows in enumerate(steps)]
    first = Trainer(model, 4, 1e-2, 3)
    first.step(0, steps[0])
    first.save(tmp_path, 1)
    second = Trainer(model, 4, 1e-2, 3)
    assert second.resume(tmp_path) == 1
    assert [second.step(index, steps[index]) for index in (1, 2)] == pytest.approx(losses[1:], rel=1e-4)


def test_training_goes_on_from_a_packed_adapter(model: Path, tmp_path: Path) -> None:
    encoder = Encoder(model)
    row = encoder.row(GENERATORS["verse"](random.Random(5), test=False, turns=2), 900)
    assert row is not None
    first = Trainer(model, 4, 0.1, 20)
    losses = [first.step(index, [row]) for index in range(5)]
    first.save(tmp_path / "run", 5)
    pack(tmp_path / "run", tmp_path / "packed", 4)
    second = Trainer(model, 4, 0.1, 20)
    assert second.resume(tmp_path / "packed") == 0
    assert losses[0] - losses[4] > 0.1
    with torch.no_grad():
        before, after = (float(each.loss(Batch.of([row], 2))) for each in (first, second))
    assert after == pytest.approx(before, rel=0.01)


def test_bound_tools_are_closed_and_the_free_question_has_the_same_prompt(model: Path) -> None:
    encoder = Encoder(model)
    question: Question = next(iter(held_out("tools", 1)))
    free = question.body(bound=False)["messages"]
    assert encoder.render(free, []) == encoder.render(question.messages, question.tools)
    [function, *_] = [one["function"] for one in question.body(bound=True)["tools"]]
    assert function["strict"]
    assert function["parameters"]["additionalProperties"] is False


def test_a_conversation_is_trained_on_all_its_answers_and_on_nothing_else(model: Path) -> None:
    encoder, rng = Encoder(model), random.Random(5)
    for _ in range(5):
        scene = dialogs.scene(rng, test=False, turns=1)
        row = encoder.row(scene, 10_000)
        assert row is not None
        answers = [answer for _, answer in scene.rounds(scene.turns[0])]
        learned = [label for label in row.labels if label != IGNORED]
        assert learned == [id for answer in answers for id in encoder.ids(answer + "<|im_end|>")]
        said, last = [*scene.rounds(scene.turns[0])][-1]
        assert row.ids == encoder.ids(encoder.render(said, scene.tools)) + encoder.ids(last + "<|im_end|>")


def test_conversations_of_training_have_no_tool_that_is_held_out() -> None:
    train, test = (
        {
            bare(one["function"]["name"])
            for number in range(100)
            for one in dialogs.scene(random.Random(f"{number} {test}"), test=test, turns=1).tools
        }
        for test in (False, True)
    )
    assert len(train) > 60
    assert not train & test


def test_every_result_is_followed_by_an_answer_or_another_call() -> None:
    rng, kinds = random.Random(2), set()
    for _ in range(100):
        for turn in dialogs.scene(rng, test=False, turns=2).turns:
            before = turn.first
            for step in turn.steps:
                results = [one for one in step.messages if one["role"] == "tool"]
                assert len(results) == len(before.calls)
                assert step.calls or step.text
                kinds.add((bool(results), bool(step.calls)))
                before = step
    assert kinds == {(True, True), (True, False), (False, True), (False, False)}


def test_a_packed_adapter_is_small_and_almost_the_one_before(tmp_path: Path) -> None:
    make_adapter_folder(tmp_path / "poet", tiny_config(), rank=8, alpha=12, dtype=torch.bfloat16)
    lost = pack(tmp_path / "poet", tmp_path / "packed", 8)
    assert 0.01 < lost < 0.05
    before, after = (read_adapter(tmp_path / name, lora_shapes(tiny_config())) for name in ("poet", "packed"))
    for place, pair in before.pairs.items():
        whole, made = (
            (each.a.float().T @ each.b.float()) * each.scaling for each in (pair, after.pairs[place])
        )
        assert (made - whole).norm() < 0.05 * whole.norm()
    sizes = [(tmp_path / name / "adapter_model.safetensors").stat().st_size for name in ("poet", "packed")]
    assert sizes[1] < 0.7 * sizes[0]  # half, but for the header


def test_fewer_ranks_are_the_closest_of_that_rank() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(6, 40, generator=generator), torch.randn(30, 6, generator=generator)
    half_a, half_b = packed(a, b, 2.0, 3)
    values = torch.linalg.svdvals(2 * b @ a)
    best = float(values[3:].square().sum().sqrt())  # Eckart and Young
    found = float((half_b.float() @ half_a.float() / 3 - 2 * b @ a).norm())
    assert best * 0.99 < found < best * 1.02
