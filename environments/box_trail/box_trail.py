"""Follow notes from box to box: an agent loop of the openai-agents package, which asks the policy
over HTTP as it asks any endpoint.

What is particular to an agent is all in `TrailHarness`: where it asks, its tools, and how it
shortens its own history.
"""

import random
import string
from typing import Any, Literal

import openai
import verifiers.v1 as vf
from agents import (
    Agent,
    AgentsException,
    OpenAIChatCompletionsModel,
    RunConfig,
    Runner,
    function_tool,
)
from agents.run import CallModelData, ModelInputData
from pydantic import Field

INSTRUCTIONS = (
    "Open the box that you are told to with the tool open_box, then the box that its note names, "
    "and so on. Answer with the number."
)
REMINDER = "Open the next box with open_box, or answer with the number alone."
MOST_TURNS = 1000
"""For the agent's own loop; args.agent.max_turns is the limit that is meant."""


class TrailData(vf.TaskData):
    """A trail of boxes and the number in the last one."""

    trail: list[str]
    number: str


class TrailTask(vf.Task[TrailData, vf.State, vf.TaskConfig]):
    """Scores how far the trail was walked, and the number."""

    def steps_of(self, trace: vf.Trace) -> int:
        """Boxes of the trail that were opened in their order."""
        steps = 0
        for name in trace.info.get("opened", []):
            if steps < len(self.data.trail) and name == self.data.trail[steps]:
                steps += 1
        return steps

    @vf.reward(weight=0.5)
    async def walked(self, trace: vf.Trace) -> float:
        return self.steps_of(trace) / len(self.data.trail)

    @vf.reward(weight=0.5)
    async def answered(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == self.data.number)

    @vf.metric
    async def steps(self, trace: vf.Trace) -> float:
        return float(self.steps_of(trace))

    @vf.metric
    async def compactions(self, trace: vf.Trace) -> float:
        return float(trace.info.get("compactions", 0))


class TrailConfig(vf.TasksetConfig):
    """What the arguments may set."""

    split: Literal["train", "eval"] = "train"
    length: int = Field(3, ge=1, le=26)
    """Boxes on a trail."""
    count: int = 200
    eval_count: int = 40
    seed: int = 0


class BoxTrail(vf.Taskset[TrailTask, TrailConfig]):
    """Trails of boxes; those of the two splits are drawn with different seeds."""

    def load(self) -> list[TrailTask]:
        own = self.config
        source = random.Random(f"{own.split} {own.seed}")
        count = own.eval_count if own.split == "eval" else own.count
        return [
            self.task(
                i, source.sample(string.ascii_uppercase, own.length), str(source.randrange(10))
            )
            for i in range(count)
        ]

    def task(self, index: int, trail: list[str], number: str) -> TrailTask:
        data = TrailData(
            idx=index,
            system_prompt=INSTRUCTIONS,
            prompt=f"Open box {trail[0]}.",
            trail=trail,
            number=number,
        )
        return TrailTask(data, self.config.task)


class TrailHarnessConfig(vf.HarnessConfig):
    """What `args.agent.harness` may set."""

    id: str = "box-trail"
    patience: int = Field(2, ge=0)
    """Times that an answer without a number is followed by a reminder."""
    keep: int = Field(0, ge=0)
    """Messages after which what was seen is told in one sentence instead; 0: never."""


class TrailHarness(vf.Harness[TrailHarnessConfig]):
    """An agent of openai-agents. Every call that it makes is a turn of the policy; where it
    rewrites its history a new sample begins."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: vf.Trace,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """One rollout. A call that is refused, for a limit, ends it; verifiers knows the reason."""
        assert isinstance(data, TrailData)
        told = [
            *(f"The next box is {name}." for name in data.trail[1:]),
            f"The number is {data.number}.",
        ]
        notes = dict(zip(data.trail, told, strict=True))
        trace.info |= {"opened": [], "compactions": 0}

        @function_tool
        def open_box(letter: str) -> str:
            """Open a box and read the note in it.

            Args:
                letter: that of the box.
            """
            trace.info["opened"].append(letter)
            return notes.get(letter, "There is no such box.")

        def compacted(call: CallModelData[Any]) -> ModelInputData:
            """The history as the model sees it: once it is long, what the last note said and
            nothing before that."""
            told = call.model_data
            if not self.config.keep or len(told.input) <= self.config.keep:
                return told
            trace.info["compactions"] += 1
            opened, text = trace.info["opened"], str(data.prompt)
            if opened:
                text = (
                    f"You have opened {len(opened)} boxes. In box {opened[-1]} was: "
                    f"{notes.get(opened[-1], 'nothing')}"
                )
            return ModelInputData(
                input=[{"role": "user", "content": text}], instructions=told.instructions
            )

        async with openai.AsyncOpenAI(
            base_url=endpoint, api_key=secret, max_retries=0, timeout=None
        ) as client:
            model = OpenAIChatCompletionsModel(ctx.model, client)
            agent = Agent(
                name="walker", instructions=data.system_prompt, model=model, tools=[open_box]
            )
            settings = RunConfig(
                tracing_disabled=True,
                call_model_input_filter=compacted,
                tool_not_found_behavior="return_error_to_model",
            )
            said: list[Any] = [{"role": "user", "content": data.prompt}]
            try:
                for _ in range(self.config.patience + 1):
                    result = await Runner.run(
                        agent, said, max_turns=MOST_TURNS, run_config=settings
                    )
                    if str(result.final_output).strip().isdigit():
                        break
                    said = [*result.to_input_list(), {"role": "user", "content": REMINDER}]
            except (openai.OpenAIError, AgentsException) as error:
                return vf.ProgramResult(
                    exit_code=1, stdout="", stderr=f"{type(error).__name__}: {error}"
                )
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["BoxTrail", "TrailHarness"]
