import json

import pytest

from tests.environments.playing import check_splits, load, on_path, play, prompts_of

TRAIN = [
    ("What is half of 36?", "36 / 2 = <<36/2=18>>18\n#### 18"),
    ("How much are 4 houses?", "4 x 250 = 1000\n#### $1,000"),
]
TEST = [(f"What is {n} and one half?", f"So it is {n}.5.\n#### {n}.5") for n in range(8)]


@pytest.fixture
def folder(tmp_path):
    """The data set as a folder."""
    for split, problems in (("train", TRAIN), ("test", TEST)):
        lines = [json.dumps({"question": asked, "answer": said}) + "\n" for asked, said in problems]
        (tmp_path / f"{split}.jsonl").write_text("".join(lines))
    return tmp_path


def test_the_number_in_the_last_box_is_rewarded(folder):
    env = load("gsm8k", dataset=str(folder), eval_count=3)
    row = env.get_dataset().to_list()[1]
    assert row["answer"] == "$1,000"
    for reply, reward, has_answer in [
        (r"4 x 250 = 1000, so it is \boxed{1000}.", 1.0, 1.0),
        (r"\boxed{\$1,000.00}", 1.0, 1.0),
        (r"\[ \boxed{ 1{,}000 } \]", 1.0, 1.0),
        (r"\boxed{999}, no: \boxed{1000}", 1.0, 1.0),
        (r"\boxed{1000}, no: \boxed{999}", 0.0, 1.0),
        (r"\boxed{1000}, that is \boxed{many}", 0.0, 0.0),
        (r"\boxed{-1000}", 0.0, 1.0),
        (r"\boxed{1000 or 999}", 0.0, 0.0),
        (r"\boxed{NaN}", 0.0, 0.0),
        (r"\boxed{1000", 0.0, 0.0),
        ("#### 1000", 0.0, 0.0),
        ("", 0.0, 0.0),
    ]:
        output, _ = play(env, row, reply)
        assert (output["reward"], output["metrics"]["has_answer"]) == (reward, has_answer), reply


def test_splits(folder):
    check_splits("gsm8k", dataset=str(folder), eval_count=3)
    env = load("gsm8k", dataset=str(folder), eval_count=8)
    system, question = env.get_dataset().to_list()[0]["prompt"]
    assert system["role"] == "system" and r"\boxed{}" in system["content"]
    assert question["content"] == TRAIN[0][0]
    assert {*prompts_of(env.get_eval_dataset().to_list())} == {*dict(TEST)}
    with pytest.raises(RuntimeError, match=r"eval_count = 9; the test split of .* has 8 problems"):
        load("gsm8k", dataset=str(folder), eval_count=9)


def test_a_data_set_that_cannot_be_had(folder, monkeypatch):
    on_path("gsm8k")
    import gsm8k

    def offline(*args, **kwargs):
        raise ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub")

    monkeypatch.setattr(gsm8k, "load_dataset", offline)
    with pytest.raises(
        RuntimeError,
        match=r"Couldn't reach .* without a network give a folder with train.jsonl and test.jsonl",
    ):
        load("gsm8k")
    needs = (
        r"train: needs a `question`, and an `answer` with its number behind ####, not .*half of 36"
    )
    for text, said in (
        ('{"question": "What is half of 36?", "answer": "18"}\n', needs),
        ("{\n", r"train: Expecting property name .* give a folder"),
        (None, r"No such file or directory: .*train.jsonl"),
    ):
        (folder / "train.jsonl").unlink() if text is None else (folder / "train.jsonl").write_text(
            text
        )
        with pytest.raises(RuntimeError, match=said):
            load("gsm8k", dataset=str(folder), eval_count=3)
