"""A program that uses the tinker SDK, run in an environment of its own by test_sdk.py: trains,
samples, and tells what it got."""

import json
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

import tinker
from tinker import types
from tinker.lib.public_interfaces.admin_client import AdminClient

TOKENS = [[7 * i + 3 * j + 5 for i in range(9)] for j in range(4)]


def datum(tokens: list[int]) -> types.Datum:
    inputs = {"target_tokens": tokens[1:], "weights": [0.0, 0.0] + [1.0] * (len(tokens) - 3)}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def tell(**what: object) -> None:
    print(json.dumps(what), flush=True)


def error_of(function) -> str:
    try:
        function()
    except tinker.TinkerError as error:
        return type(error).__name__
    return "none"


def names() -> dict[str, list[str]]:
    """The public names of each client, without those that only say the same for coroutines."""
    clients = (
        tinker.ServiceClient,
        tinker.TrainingClient,
        tinker.SamplingClient,
        tinker.RestClient,
        AdminClient,
    )
    public = {
        client.__name__: [name for name in dir(client) if not name.startswith("_")]
        for client in clients
    }
    return {
        client: [
            name
            for name in found
            if name.removesuffix("_async") not in found or not name.endswith("_async")
        ]
        for client, found in public.items()
    }


def main(steps: int) -> None:
    service = tinker.ServiceClient()
    training = service.create_lora_training_client(base_model="tiny", rank=4, seed=1).result()
    data, prompt = [datum(tokens) for tokens in TOKENS], types.ModelInput.from_ints(TOKENS[0][:4])
    params = types.SamplingParams(max_tokens=5, temperature=1.0, seed=3)
    for step in range(steps):
        loss, norm = (
            training.forward_backward(data, "cross_entropy"),
            training.optim_step(types.AdamParams(learning_rate=1e-2)),
        )
        found = {
            "loss": loss.result().metrics["loss:sum"],
            "norm": norm.result().metrics["unclipped_grad_l2:mean"],
        }
        sampled = (
            training.save_weights_and_get_sampling_client()
            .result()
            .sample(prompt, 2, params)
            .result()
            .sequences
        )
        tell(step=step, **found, tokens=[one.tokens for one in sampled])
    ids = TOKENS[0][:4] + sampled[0].tokens
    scored = training.forward(
        [
            types.Datum(
                model_input=types.ModelInput.from_ints(ids[:-1]),
                loss_fn_inputs={"target_tokens": ids[1:]},
            )
        ],
        "cross_entropy",
    )
    ours = scored.result().loss_fn_outputs[0]["logprobs"].data[3:]
    tell(mismatch=max(abs(a - b) for a, b in zip(ours, sampled[0].logprobs, strict=True)))
    theirs = (
        training.save_weights_and_get_sampling_client()
        .result()
        .compute_logprobs(types.ModelInput.from_ints(ids))
        .result()
    )
    both = zip(scored.result().loss_fn_outputs[0]["logprobs"].data, theirs[1:], strict=True)
    tell(prompt_mismatch=max(abs(a - b) for a, b in both) if theirs[0] is None else None)
    path = training.save_state("named", ttl_seconds=3600).result().path
    again = service.create_training_client_from_state_with_optimizer(path).result()
    tell(
        same=again.forward(data, "cross_entropy").result().metrics["loss:sum"]
        == training.forward(data, "cross_entropy").result().metrics["loss:sum"]
    )
    tell(names=names())
    rest = tinker.RestClient()
    tell(
        listed=[one.tinker_path for one in rest.list_user_checkpoints().result().checkpoints]
        == [path]
    )
    external = training.save_weights_external("given").result().path
    given = {
        name: urllib.request.urlopen(url).read()
        for name, url in rest.get_external_weights_urls(external).result().urls.items()
    }
    rest.delete_checkpoint_from_tinker_path(external).result()
    # the SDK's own command, for what `save_state` made
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [
                sys.executable,
                "-m",
                "tinker.cli",
                "checkpoint",
                "download",
                path,
                "--output",
                folder,
            ],
            check=True,
            stdout=2,
        )
        downloaded = {file.name: file.read_bytes() for file in Path(folder).rglob("adapter_*")}
    tell(downloaded=sorted(given) if given == downloaded else [sorted(given), sorted(downloaded)])
    tell(
        refused={
            "path": error_of(
                lambda: service.create_sampling_client(
                    model_path="tinker://x:train:0/sampler_weights/a"
                ).result()
            ),
            "key": error_of(
                lambda: (
                    tinker.ServiceClient(api_key="tml-wrong-wrong-wrong")
                    .create_lora_training_client(base_model="tiny")
                    .result()
                )
            ),
        }
    )


main(int(sys.argv[1]))
