"""TRL's GRPOTrainer on a task of ours, in an environment of its own: prints a JSON line a step.

    uv run --no-project --python 3.11 --with "trl==1.16.0" --with "torch==2.13.0" \\
        scripts/benchmarks/trl_grpo.py MODEL TASKS.jsonl --reward last_number --steps 20

MODEL is the folder that `python -m rl.models.folder` prints; TASKS is what `rl env ID --export`
writes. The same model, prompts, batch (groups x group size), number of new tokens, optimizer,
learning rate and loss as configs/quickstart.toml; generation by transformers with its cache,
because TRL's vLLM mode needs a GPU. Weights are float32 and products bfloat16, as ours; with
`--weights bfloat16` the optimizer rounds to bfloat16, too, and with `--products float32` nothing
does. Tasks are asked in the order of the file.
"""

import argparse
import json
import re
import tempfile
import time

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def last_number(text, answer):
    """As in environments/single_digit_addition: the last number is right."""
    numbers = re.findall(r"\d+", text)
    return bool(numbers) and numbers[-1] == answer


def one_word(text, answer):
    """As in environments/pick_word_v1: the reply is the word alone."""
    return re.findall(r"[a-z]+", text.lower()) == [answer]


REWARDS = {"last_number": last_number, "one_word": one_word}


class Lines(TrainerCallback):
    """Prints what each step took."""

    def __init__(self, samples: int):
        self.samples, self.last = samples, time.monotonic()

    def on_log(self, args, state, control, logs=None, **_):
        if logs and "reward" in logs:
            now = time.monotonic()
            done = state.global_step
            line = {
                "step": done,
                "samples": done * self.samples,
                "reward": logs["reward"],
                "seconds": now - self.last,
                "time": time.time(),
            }
            self.last = now
            print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("tasks")
    parser.add_argument("--reward", choices=REWARDS, default="last_number")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--weights", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--products", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument(
        "--micro-batch", type=int, default=64, help="sequences of one forward and backward pass"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.groups * args.group_size % args.micro_batch:
        parser.error(
            f"--micro-batch {args.micro_batch} does not divide a batch of "
            f"{args.groups * args.group_size}, which would be smaller"
        )
    if (args.weights, args.products) == ("bfloat16", "float32"):
        parser.error(
            "--products float32 needs --weights float32: products of bfloat16 weights are bfloat16"
        )
    with open(args.tasks) as file:
        rows = [json.loads(line) for line in file]
    data = Dataset.from_list([{"prompt": row["prompt"], "answer": row["answer"]} for row in rows])
    size, right = args.groups * args.group_size, REWARDS[args.reward]
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=args.micro_batch,
        gradient_accumulation_steps=size // args.micro_batch,
        num_generations=args.group_size,
        max_completion_length=args.max_tokens,
        max_steps=args.steps,
        learning_rate=args.lr,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        beta=0.0,
        temperature=1.0,
        loss_type="dapo",
        shuffle_dataset=False,
        scale_rewards=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        gradient_checkpointing=False,  # as in the quickstart
        use_cpu=True,
        bf16=(args.weights, args.products) == ("float32", "bfloat16"),
        seed=args.seed,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.weights)),
        reward_funcs=lambda completions, answer, **_: [
            float(right(completion[0]["content"], one))
            for completion, one in zip(completions, answer, strict=True)
        ],
        args=config,
        train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(args.model),
        callbacks=[Lines(size)],
    )
    trainer.train()


if __name__ == "__main__":
    main()
