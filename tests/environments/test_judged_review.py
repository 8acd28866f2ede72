"""The judge is a server of the test, which knows one word."""

import json
import math
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from tests.environments.playing import load, on_path, play

on_path("judged_review")

from judged_review import TELLING, one_sentence, probability, words_agree  # noqa: E402

ARGS = {"judge_url": "http://127.0.0.1:1/v1", "judge_model": "m"}


def said(text):
    return [{"role": "assistant", "content": text}]


@pytest.fixture
def judge():
    """A judge that finds reviews with `cold` negative at 3 to 1, and others positive. Returns
    its address and what it was asked."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.path, self.headers["Authorization"], body))
            moods = [" positive", " negative"]
            if "cold" not in body["prompt"].rpartition("Review:")[2]:
                moods.reverse()
            shares = zip([*moods, " mixed"], map(math.log, (0.2, 0.6, 0.1)), strict=True)
            logprobs = {"tokens": [moods[1]], "top_logprobs": [dict(shares)]}
            choice = {"index": 0, "text": moods[1], "finish_reason": "length", "logprobs": logprobs}
            about = {"id": "", "object": "text_completion", "created": 0, "model": "m"}
            encoded = json.dumps(about | {"choices": [choice]}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(encoded)))
            self.end_headers()
            self.wfile.write(encoded)

        def log_message(self, *_args): ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1", asked
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(("mood", "reward"), [("unhappy", 0.75), ("happy", 0.25)])
def test_the_reward_is_the_judges_probability(judge, mood, reward):
    env = load("judged-review", judge_url=judge[0], judge_model="m", judge_key="the-key")
    row = next(row for row in env.get_dataset().to_list() if row["answer"] == mood)
    output, client = play(env, row, "The soup\nwas cold.")
    assert output["reward"] == output["metrics"]["judged"] == pytest.approx(reward)
    assert output["metrics"]["words_agree"] == (mood == "unhappy")
    path, key, body = judge[1][0]
    assert (path, key, len(judge[1])) == ("/v1/completions", "Bearer the-key", 1)
    assert body["prompt"].endswith("\n\nReview: The soup was cold.\nSentiment:")
    assert (body["max_tokens"], body["logprobs"]) == (1, 20)
    assert "guest would. One short sentence." in client.prompts[0][-1]["content"]
    assert len(client.prompts[0]) == 5


def test_a_verdict_that_is_not_among_the_likeliest_words():
    assert probability(
        {" negative": math.log(0.6), " the": math.log(0.2)}, "positive"
    ) == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("text", "happy", "unhappy", "sentence"),
    [
        ("What a lovely place!", 1, 0, 1),
        ("The soup was cold.", 0, 1, 1),
        ("Good but slow.", 0, 0, 1),
        ("We went there.", 0, 0, 1),
        ("Terrible.", 0, 1, 0),
        ("It was bad. Very bad.", 0, 1, 0),
        ("I am unhappy with", 0, 1, 0),
        ("", 0, 0, 0),
    ],
)
def test_what_asks_no_model(text, happy, unhappy, sentence):
    moods = [words_agree(said(text), mood) for mood in ("happy", "unhappy")]
    assert (*moods, one_sentence(said(text))) == (happy, unhappy, sentence)


def test_places_are_held_out_with_both_moods():
    env = load("judged-review", **ARGS)
    train, held_out = env.get_dataset().to_list(), env.get_eval_dataset().to_list()
    assert (len(train), len(held_out)) == (64, 16)
    assert not {row["question"] for row in train} & {row["question"] for row in held_out}
    assert [row["answer"] for row in held_out].count("happy") == 8
    assert {*TELLING.values()} == {"happy", "unhappy"}
