"""The HTTP routes that we add to vLLM's app: /generate, /load_weights, /versions, /status."""

import asyncio
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import Struct
from vllm.entrypoints.serve.utils.api_utils import listen_for_disconnect
from vllm.exceptions import VLLMClientError
from vllm.sampling_params import RequestOutputKind, SamplingParams

from rl.inference.chat import Answers
from rl.inference.draw import MAX_KEPT
from rl.inference.engine import CutOffError, VersionedEngine
from rl.inference.weight_files import WeightsGoneError
from rl.run_dir.files import UNREADABLE
from rl.system.errors import RunError
from rl.wire.inference_client import PROTOCOL
from rl.wire.messages import GenerateRequest, LoadWeightsRequest, Sampling
from rl.wire.serving import refusal


class AnswersRequest(Struct, forbid_unknown_fields=True):
    """Body of `/versions`."""

    answers: list[str]
    """See rl.wire.turns.answer_digest."""


def reply(content: Any) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")


def to_sampling_params(sampling: Sampling, vocab_size: int) -> SamplingParams:
    """Returns vLLM's parameters: one final output, and text only if stop strings need it.
    `logprobs=0` asks for the log-probability of the sampled token, without alternatives."""
    fields = msgspec.structs.asdict(sampling)
    of_prompt = fields.pop("prompt_logprobs")
    routes = {"routed_experts_prompt_start": 0} if fields.pop("routes") else {}
    max_kept = fields.pop("max_kept") * sampling.truncates(vocab_size)
    return SamplingParams(
        **fields,
        prompt_logprobs=0 if of_prompt else None,
        **routes,
        logprobs=0,
        flat_logprobs=True,
        detokenize=bool(sampling.stop),
        skip_special_tokens=False,  # they may be stop strings
        extra_args={MAX_KEPT: max_kept} if max_kept else None,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


async def unless_disconnected(request: Request, work: Any) -> Any:
    """The result of `work`; None if the client disconnects, which cancels it. The body must have
    been read before."""
    task, gone = asyncio.create_task(work), asyncio.create_task(listen_for_disconnect(request))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        gone.cancel()


def make_router(engine: VersionedEngine, served_model_name: str, answers: Answers) -> APIRouter:
    router = APIRouter()
    max_model_len = engine.model_config.max_model_len

    @router.post("/generate")
    async def generate(request: Request) -> Response:
        """Tokens in, a Turn in msgpack out."""
        try:
            body = msgspec.json.decode(await request.body(), type=GenerateRequest)
            sizes = {"num_tokens": len(body.token_ids), "max_model_len": max_model_len}
            if len(body.token_ids) >= max_model_len:
                message = (
                    f"the prompt has {len(body.token_ids)} tokens; model.max_model_len = "
                    f"{max_model_len} must hold prompt and answer together"
                )
                return refusal(400, "prompt_too_long", message, **sizes)
            params = to_sampling_params(body.sampling, engine.vocab_size)
            answer = engine.sample(body.token_ids, params, body.session, body.sampling.routes)
            sampled = await unless_disconnected(request, answer)
        except (*UNREADABLE, VLLMClientError, ValueError) as error:
            return refusal(400, "bad_request", str(error))
        except CutOffError as error:
            return refusal(503, "stopping", str(error))
        except asyncio.CancelledError:
            message = "the server is stopping; repeat the request elsewhere or later"
            return refusal(503, "stopping", message)
        return Response(msgspec.msgpack.encode(sampled), media_type="application/msgpack")

    @router.post("/load_weights")
    async def load_weights(request: Request) -> Response:
        """Replaces the policy version that is served; finishes even if the client disconnects.

        422: the files are damaged or do not fit; 404: they do not exist (any more). Both leave the
        old version in place.
        """
        try:
            body = msgspec.json.decode(await request.body(), type=LoadWeightsRequest)
            held = await asyncio.shield(
                engine.load_weights(body.policy_version, body.path, body.memory, body.content)
            )
        except UNREADABLE as error:
            return refusal(400, "bad_request", str(error))
        except RunError as error:
            code, kind = 422, "bad_weights"
            if isinstance(error, WeightsGoneError):
                code, kind = 404, "weights_gone"
            elif engine.broken:  # the server is about to end, and the weights are not to blame
                code, kind = 503, "stopping"
            return refusal(code, kind, str(error), policy_version=engine.policy_version)
        return reply(held)

    @router.post("/versions")
    async def versions(request: Request) -> Response:
        """The policy versions of chat completions, by the digests of their tokens; null for
        those that are not known any more."""
        try:
            asked = msgspec.json.decode(await request.body(), type=AnswersRequest)
        except UNREADABLE as error:
            return refusal(400, "bad_request", str(error))
        return reply([answers.versions(digest) for digest in asked.answers])

    @router.get("/status")
    async def status() -> Response:
        return reply(
            {
                "protocol": PROTOCOL,
                "policy_version": engine.policy_version,
                "content": engine.content,
                "served_model": served_model_name,
                "max_model_len": max_model_len,
                "num_running": engine.get_num_unfinished_requests(),
            }
        )

    return router
