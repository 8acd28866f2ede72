"""A teacher for tests: the used subset of vLLM's OpenAI routes, with log-probabilities that are
easy to predict."""

import asyncio

from aiohttp import web

from tests.web import WebServer


def logprob(ids: list[int], t: int) -> float:
    """Returns a value that depends on the position, the token and the preceding token."""
    return -(t + 1) / 64 - ids[t] / 65536 - ids[t - 1] / 2**26


class StubTeacher(WebServer):
    """Answers /v1/models, /v1/completions, /detokenize and /tokenize. `requests` holds the ids of
    each scoring request.

    It finds a token of its first request `sense` nats more likely than in another order.
    """

    def __init__(
        self,
        *,
        max_model_len: int = 4096,
        tokenizer=None,
        key: str = "",
        sense: float = 3.0,
        shift: float = 0.0,
        rendered: list[int] | web.Response | None = None,
    ):
        routes = (
            web.get("/v1/models", self.models),
            web.post("/v1/completions", self.completions),
            web.post("/detokenize", self.detokenize),
            web.post("/tokenize", self.tokenize),
        )
        super().__init__(*routes, path="/v1")
        self.max_model_len = max_model_len
        self.tokenizer = tokenizer
        self.key = key
        self.sense = sense
        self.shift = shift
        """Nats added to every log-probability."""
        self.rendered = rendered
        """The answer to /tokenize; None: no such route."""
        self.tokenized: list[dict] = []
        self.requests: list[list[int]] = []
        self.answers: list[web.Response | None] = []
        """What the next scoring requests get instead of an answer; None: no answer for a long
        time."""

    async def models(self, request: web.Request) -> web.Response:
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": {"message": "wrong key"}}, status=401)
        return web.json_response({"data": [{"id": "big", "max_model_len": self.max_model_len}]})

    async def detokenize(self, request: web.Request) -> web.Response:
        if self.tokenizer is None:
            return web.Response(status=404)
        return web.json_response(
            {
                "prompt": self.tokenizer.decode(
                    (await request.json())["tokens"], skip_special_tokens=False
                )
            }
        )

    async def tokenize(self, request: web.Request) -> web.Response:
        self.tokenized.append(await request.json())
        if isinstance(self.rendered, list):
            return web.json_response({"tokens": self.rendered})
        return self.rendered or web.Response(status=404)

    async def completions(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert body["model"] == "big" and body["max_tokens"] == 1 and body["prompt_logprobs"] == 0
        if self.answers:
            answer = self.answers.pop(0)
            if answer is None:
                await asyncio.sleep(60)
            return answer
        ids = body["prompt"]
        self.requests.append(ids)
        first = self.requests[0]
        shuffled = ids != first and sorted(ids) == sorted(first)
        shift = self.shift - self.sense * shuffled
        entries = [
            None,
            *(
                {str(ids[t]): {"logprob": logprob(ids, t) + shift, "rank": 1, "decoded_token": "x"}}
                for t in range(1, len(ids))
            ),
        ]
        return web.json_response(
            {"choices": [{"index": 0, "text": "", "prompt_logprobs": entries}]}
        )
