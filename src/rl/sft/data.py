"""Examples to token ids and masks, once for a run: `data/` of the run directory.

`data/train/` and `data/validation/` hold the examples one behind the other: `tokens.bin` (int32), `trained.bin` (one byte a token),
`ends.npy` (where each example ends), `groups.npy` (examples of one task have one number). `data/manifest.json` says what they were
made of. They are mapped into memory, not read, so that all ranks of a host share them.
"""

import json
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rl.chat import THINK, THINK_END, Message, RendererError, Tool, arguments_object, arguments_text, wire
from rl.config import RLConfig
from rl.digests import checksum
from rl.files import CorruptFileError, write_directory
from rl.models import has_template
from rl.renderer import Renderer, load_renderer
from rl.sft.config import SftConfig
from rl.sft.rows import DataError, Example, read_examples, sources
from rl.status import Status

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys under which data sets keep what an assistant thought."""
SAY_EVERY = 1000
"""Rows between two words about progress."""
Tokens = tuple[list[int], list[bool]]
"""Ids of an example, and which of them are trained."""


@dataclass(frozen=True)
class Examples:
    """One data set as it is trained on. Arrays over tokens are mapped from files."""

    tokens: np.ndarray  # [tokens] int32
    trained: np.ndarray  # [tokens] uint8
    ends: np.ndarray  # [examples] int64: the first token that is no longer the example's
    groups: np.ndarray  # [examples] int64

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> Tokens:
        start = int(self.ends[index - 1]) if index else 0
        here = slice(start, int(self.ends[index]))
        return self.tokens[here].tolist(), self.trained[here].astype(bool).tolist()


class Tokenizer:
    """Renders examples for one model."""

    def __init__(self, model: Path, config: RLConfig):
        assert config.sft
        self.sft: SftConfig = config.sft
        self.max_length = config.model.max_model_len
        self.has_template = bool(config.model.chat_template) or has_template(model)
        self.chat = self.sft.style == "chat" or (self.sft.style == "auto" and self.has_template)
        self.renderer: Renderer | None = load_renderer(str(model), config.renderer) if self.has_template else None
        self.plain = PlainText(model)
        self.warnings: set[str] = set()

    def samples(self, example: Example, counts: Counter[str]) -> list[Tokens]:
        """What is trained of an example: one sequence, several if the template rewrites what was said, none if nothing is left."""
        if example.text and not self.chat:
            found = [self.plain.sample(*example.text)] if example.text[1] else []
        else:
            found = self.conversation(example)
        if not found:
            counts["without an answer to train"] += 1
        return [kept for sample in found if (kept := self.fitting(sample, counts))]

    def fitting(self, sample: Tokens, counts: Counter[str]) -> Tokens | None:
        """The sample if it is not too long, else what the setting makes of it."""
        ids, trained = sample
        if len(ids) <= self.max_length:
            return sample
        cut = ids[: self.max_length], trained[: self.max_length]
        fits = self.sft.too_long == "truncate" and any(cut[1])
        counts["cut to model.max_model_len" if fits else "longer than model.max_model_len"] += 1
        return cut if fits else None

    def conversation(self, example: Example) -> list[Tokens]:
        """The trained turns of a chat, each behind exactly the ids that it would be sampled after in a rollout. Raises DataError."""
        if self.renderer is None:
            raise DataError(
                f"{example.place}: a list of messages needs a chat template, and the model's tokenizer has none; name a file with one: "
                "--model.chat_template chatml.jinja (or give prompt and completion as text)"
            )
        messages = [without_reasoning(message) for message in example.messages] if self.sft.drop_reasoning else example.messages
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i >= example.num_context]
        wanted = set(answers if self.sft.train == "all" else answers[-1:])
        try:
            return list(self.turns(messages, answers, wanted, example.tools))
        except RendererError as error:
            raise DataError(f"{example.place}: {error}") from None

    def turns(self, messages: list[Message], answers: list[int], wanted: set[int], tools: list[Tool] | None) -> Iterator[Tokens]:
        """The chains of turns that continue each other id for id, as rollouts have them, as far as there is something to train."""
        renderer = self.renderer
        assert renderer
        if any(message.get("tool_calls") for message in messages) and not tools:
            self.warnings.add(
                "examples call tools, but have no tool definitions (sft.columns.tools): the model does not see which there are"
            )
        ids, trained, said = [], [], -1
        for i in answers:
            prompt = renderer.next_prompt_ids(ids, messages[:i], said + 1, tools) if ids else None
            if prompt is None:
                if any(trained):
                    yield ids, trained
                ids, trained = [], []
                prompt = renderer.prompt_ids(messages[:i], tools)
            answer = renderer.answer_ids(messages[: i + 1], tools)
            is_trained = i in wanted and says_something(messages[i])
            if is_trained and (lost := lost_text(renderer, prompt, answer, messages[i], tools)):
                raise RendererError(lost)
            trained = trained + [False] * (len(prompt) - len(ids)) + [is_trained] * len(answer)
            ids, said = prompt + answer, i
        if any(trained):
            yield ids, trained


class PlainText:
    """Prompts and completions without a chat template: one behind the other, then the end-of-text token."""

    def __init__(self, model: Path):
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(model)

    def sample(self, prompt: str, completion: str) -> Tokens:
        """Each is encoded on its own, because the policy samples behind the prompt's ids. Without a prompt the first token is given."""
        if self.tokenizer.eos_token_id is None:
            raise DataError("the model's tokenizer has no end-of-text token (eos_token), so it could never learn to stop; set one")
        asked = self.tokenizer.encode(prompt, add_special_tokens=False)
        said = [*self.tokenizer.encode(completion, add_special_tokens=False), self.tokenizer.eos_token_id]
        return asked + said, [False] * len(asked) + [bool(asked)] + [True] * (len(said) - 1)


def says_something(message: Message) -> bool:
    return any(message.get(key) for key in ("content", "tool_calls", *REASONING))


def without_reasoning(message: Message) -> Message:
    return {key: value for key, value in message.items() if key not in REASONING}


def squeezed(text: str) -> str:
    """Text without white space and thinking tags, which templates set as they like."""
    return "".join(text.replace(THINK, "").replace(THINK_END, "").split())


def lost_text(renderer: Renderer, prompt: list[int], answer: list[int], message: Message, tools: list[Tool] | None) -> str | None:
    """What of a message is not in the ids of its answer, and what to do about it; None if all of it is there."""
    written = squeezed(renderer.decode(answer))
    content = wire([message])[0]["content"]
    for key in REASONING:
        if (text := message.get(key)) and squeezed(str(text)) not in written:
            return (
                f"the chat template leaves out the {key} of an answer; use one that shows it (model.chat_template), write it into the "
                "content, or leave it out with sft.drop_reasoning = true"
            )
    calls = [
        (call["function"]["name"], arguments_text(call["function"].get("arguments") or "{}")) for call in message.get("tool_calls") or []
    ]
    read = renderer.parse(answer, tools or [{"type": "function", "function": {"name": name}} for name, _ in calls], prompt).tool_calls
    if calls and [(name, arguments_object(text)) for name, text in calls] != [(c.name, arguments_object(c.arguments)) for c in read]:
        return "an answer's tool calls are not read back from what the template makes of them; see renderer.name and model.chat_template"
    if squeezed(content) not in written:
        return "the chat template leaves out a part of an answer's content, or the content has the template's own special tokens: change it"
    return None


# The run's data/ ---------------------------------------------------------------------------------------------------------


def write_examples(folder: Path, samples: Iterator[tuple[Tokens, int]]) -> dict[str, int]:
    """Writes (example, number of its task) one after another; returns the sizes."""
    folder.mkdir()
    ends, groups, num_trained, end = array("q"), array("q"), 0, 0
    with (folder / "tokens.bin").open("wb") as tokens_file, (folder / "trained.bin").open("wb") as trained_file:
        for (ids, trained), group in samples:
            tokens_file.write(np.asarray(ids, np.int32).tobytes())
            trained_file.write(np.asarray(trained, np.uint8).tobytes())
            end, num_trained = end + len(ids), num_trained + sum(trained)
            ends.append(end)
            groups.append(group)
    np.save(folder / "ends.npy", np.frombuffer(ends, np.int64) if ends else np.zeros(0, np.int64))
    np.save(folder / "groups.npy", np.frombuffer(groups, np.int64) if groups else np.zeros(0, np.int64))
    return {"examples": len(ends), "tokens": end, "trained_tokens": num_trained}


def prepare_data(config: RLConfig, base: str, say: Callable[[str], None]) -> None:
    """Makes `data/` of the run if it is not there: a resumed run goes on with the examples that it began with. Raises DataError."""
    sft, directory = config.sft, config.run_dir.data
    assert sft
    if (directory / "manifest.json").is_file():
        say("verifying the examples")
        return verify_data(directory)
    say("loading the tokenizer")
    try:
        tokenizer = Tokenizer(Path(base), config)
    except RendererError as error:
        raise DataError(str(error)) from None

    def fill(folder: Path) -> None:
        manifest: dict[str, Any] = {"style": "chat" if tokenizer.chat else "completion"}
        for name, source in sources(sft).items():
            counts, tasks = Counter[str](), dict[str, int]()

            def samples(source=source, counts=counts, tasks=tasks) -> Iterator[tuple[Tokens, int]]:
                for example in read_examples(source, sft, counts):
                    if counts["rows"] % SAY_EVERY == 0:
                        say(f"reading {source.dataset}: {counts['rows']:,} rows")
                    group = tasks.setdefault(example.task, len(tasks))
                    yield from ((sample, group) for sample in tokenizer.samples(example, counts))

            sizes = write_examples(folder / name, samples())
            rows = counts.pop("rows", 0)
            if not sizes["examples"]:
                why = ", ".join(f"{number} {what}" for what, number in counts.items()) or "there are no rows"
                raise DataError(f"{source.key} = {source.dataset!r}: nothing is left of {rows} rows: {why}")
            manifest[name] = {"dataset": source.dataset, "rows": rows, **sizes, "left_out": dict(counts)}
        manifest["warnings"] = sorted(tokenizer.warnings)
        manifest["files"] = {str(path.relative_to(folder)): checksum(path) for path in sorted(folder.rglob("*")) if path.is_file()}
        (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))

    write_directory(directory, fill)


def remedy(directory: Path) -> str:
    return f"delete {directory} to have it made anew, from the same data and settings"


def verify_data(directory: Path) -> None:
    """Raises CorruptFileError unless all files of `data/` are what was written."""
    for name, expected in read_manifest(directory)["files"].items():
        file = directory / name
        if not file.is_file() or checksum(file) != expected:
            raise CorruptFileError(f"{file}: {'damaged' if file.is_file() else 'missing'}; {remedy(directory)}")


def prepare_with_status(config: RLConfig, base: str) -> None:
    """The same in a process of its own, which says how far it is in status/data.json."""
    status = Status(config.run_dir.status("data"), "data")
    prepare_data(config, base, status.doing)
    status.close()


def read_manifest(directory: Path) -> dict[str, Any]:
    """What `data/` was made of."""
    path = directory / "manifest.json"
    try:
        manifest = json.loads(path.read_bytes())
        return manifest | {"train": manifest["train"], "files": manifest["files"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptFileError(f"{path}: missing or damaged ({type(error).__name__}: {error}); {remedy(directory)}") from None


def open_examples(folder: Path, sizes: dict[str, Any]) -> Examples:
    """Maps the examples of `data/train` or `data/validation`. Raises CorruptFileError if they are not as the manifest says."""
    try:
        ends, groups = np.load(folder / "ends.npy"), np.load(folder / "groups.npy")
        tokens = np.memmap(folder / "tokens.bin", np.int32, "r")
        trained = np.memmap(folder / "trained.bin", np.uint8, "r")
    except (OSError, ValueError) as error:
        raise CorruptFileError(f"{folder}: missing or damaged ({error}); {remedy(folder.parent)}") from None
    if not (len(ends) == len(groups) == sizes["examples"] and len(tokens) == len(trained) == sizes["tokens"] == ends[-1]):
        raise CorruptFileError(f"{folder}: damaged: its files differ in length; {remedy(folder.parent)}")
    return Examples(tokens, trained, ends, groups)


def manifest_lines(manifest: dict[str, Any]) -> list[str]:
    """The data in words."""
    lines = []
    for name in ("train", "validation"):
        if part := manifest.get(name):
            sizes = f"{part['rows']:,} rows -> {part['examples']:,} examples, {part['tokens']:,} tokens, {part['trained_tokens']:,} trained"
            left_out = "".join(f"; {number:,} {what}" for what, number in part["left_out"].items())
            lines.append(f"data      {part['dataset']}{' (validation)' if name == 'validation' else ''}: {sizes}{left_out}")
    return lines + [f"warning: {text}" for text in manifest["warnings"]]
