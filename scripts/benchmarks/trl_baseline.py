"""TRL's GRPOTrainer on the quickstart's task, in an environment of its own: prints a JSON line a step.

    uv run --no-project --python 3.11 --with "trl==1.16.0" --with "torch==2.13.0" \\
        scripts/benchmarks/trl_baseline.py MODEL TASKS.jsonl --steps 20

MODEL is the folder that `python -m rl.models.folder` prints; TASKS has a line {"question", "answer"} a task: `rl env ID --export`.
The same model, prompts, batch (groups x group size), number of new tokens, optimizer, learning rate and loss as
configs/quickstart.toml; generation by transformers with its cache, because TRL's vLLM mode needs a GPU. --dtype bfloat16 and all cores
were its fastest settings here.
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


def reward(completions, answer, **_):
    """1 if the last number in the answer is right, as in environments/single_digit_addition."""
    texts = [completion[0]["content"] if isinstance(completion, list) else completion for completion in completions]
    numbers = [re.findall(r"\d+", text) for text in texts]
    return [float(bool(found) and found[-1] == str(right)) for found, right in zip(numbers, answer, strict=True)]


class Lines(TrainerCallback):
    """Prints what each step took."""

    def __init__(self, samples: int):
        self.samples, self.last = samples, time.monotonic()

    def on_log(self, args, state, control, logs=None, **_):
        if logs and "reward" in logs:
            now = time.monotonic()
            done = state.global_step
            line = {"step": done, "samples": done * self.samples, "reward": logs["reward"], "seconds": now - self.last}
            self.last = now
            print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("tasks")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--micro-batch", type=int, default=64, help="sequences of one forward and backward pass")
    args = parser.parse_args()
    with open(args.tasks) as file:
        rows = [json.loads(line) for line in file]
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": row["question"]}], "answer": row["answer"]} for row in rows])
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype))
    size = args.groups * args.group_size
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
        loss_type="dr_grpo",
        scale_rewards=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        seed=0,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(args.model),
        callbacks=[Lines(size)],
    )
    trainer.train()


if __name__ == "__main__":
    main()
