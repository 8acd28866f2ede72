"""tinker-cookbook's own RL trainer on sums of one-digit numbers, against the server at
TINKER_BASE_URL (docs/tinker.md).

Runs where tinker and tinker-cookbook are installed, not in this project's environment. The problems
are those of the cookbook's recipe `math_rl` with `env=arithmetic`, with numbers from 0 to 9 and
without a worked example in the prompt.
"""

import argparse
import asyncio
from functools import partial

import chz
from tinker_cookbook.recipes.math_rl.arithmetic_env import (
    ArithmeticDataset,
    ArithmeticDatasetBuilder,
    ArithmeticEnv,
)
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.rl import train
from tinker_cookbook.rl.problem_env import ProblemGroupBuilder
from tinker_cookbook.tokenizer_utils import get_tokenizer


class OneDigitSums(ArithmeticDataset):
    """Tasks of the recipe with smaller numbers."""

    def _make_env_group_builder(self, rng):
        task = partial(ArithmeticEnv, *rng.randint(0, 10, 2).tolist(), renderer=self.renderer)
        return ProblemGroupBuilder(env_thunk=task, num_envs=self.group_size)


@chz.chz
class OneDigitSumsBuilder(ArithmeticDatasetBuilder):
    """What the cookbook's trainer makes its tasks with."""

    async def __call__(self):
        renderer = get_renderer(
            self.renderer_name, tokenizer=get_tokenizer(self.model_name_for_tokenizer)
        )
        return OneDigitSums(
            self.batch_size, renderer, self.group_size, self.n_batches, include_fewshot=False
        ), None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="meta-llama/Llama-3.2-1B", help="serve.alias of the server"
    )
    parser.add_argument(
        "--renderer",
        default="qwen3_instruct",
        help="the cookbook's name of the chat format; SmolLM2's is that of Qwen",
    )
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--groups", type=int, default=8, help="tasks a step")
    parser.add_argument("--group-size", type=int, default=8, help="answers a task")
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument(
        "--log",
        default="outputs/tinker-sums",
        help="folder of the cookbook's logs; the rewards are in metrics.jsonl",
    )
    args = parser.parse_args()
    tasks = OneDigitSumsBuilder(
        batch_size=args.groups,
        model_name_for_tokenizer=args.model,
        renderer_name=args.renderer,
        n_batches=args.steps,
        group_size=args.group_size,
    )
    config = train.Config(
        learning_rate=args.lr,
        dataset_builder=tasks,
        model_name=args.model,
        renderer_name=args.renderer,
        recipe_name="one_digit_sums",
        max_tokens=16,
        log_path=args.log,
        eval_every=0,
        save_every=0,
    )
    asyncio.run(train.main(config))


if __name__ == "__main__":
    main()
