"""A stand-in for NeMo Gym's model server."""

import yaml
from aiohttp import web

from rl.envs.nemo_gym.serving import agent_entry
from tests.web import WebServer


class ModelServer(WebServer):
    """Head server and model server in one; `says(body)` gives an answer's message. An answer's
    tokens are its number in this server."""

    def __init__(self, says, agent: str = "env", tokens: bool = True):
        super().__init__(
            web.get("/global_config_dict_yaml", self.config),
            web.post("/v1/chat/completions", self.complete),
        )
        self.says, self.agent, self.tokens = says, agent, tokens
        self.asked: list[dict] = []
        self.cookies: list[str | None] = []

    async def config(self, _: web.Request) -> web.Response:
        model = {
            "policy_model": {
                "responses_api_models": {"vllm_model": {"host": "127.0.0.1", "port": self.port}}
            }
        }
        return web.json_response(yaml.safe_dump(model | agent_entry(self.agent, 9)))

    async def complete(self, request: web.Request) -> web.Response:
        self.asked.append(body := await request.json())
        self.cookies.append(request.cookies.get("session"))
        number, said = len(self.asked), self.says(body)
        if said is None:  # so NeMo Gym's vllm_model says that the prompt is too long
            return web.json_response(
                {
                    "choices": [
                        {
                            "message": {"role": "assistant", "content": None},
                            "finish_reason": "length",
                        }
                    ]
                }
            )
        tokens = {
            "prompt_token_ids": [1, *range(2, number + 1)],
            "generation_token_ids": [number + 1],
            "generation_log_probs": [-0.5],
            "routed_experts": None,
        }
        message = {"role": "assistant", "content": None, **said, **(tokens if self.tokens else {})}
        answer = web.json_response(
            {
                "choices": [{"message": message, "finish_reason": "stop"}],
                "usage": {"total_tokens": 2},
            }
        )
        answer.set_cookie("session", request.cookies.get("session") or f"s{number}")
        return answer
