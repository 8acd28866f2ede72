"""Examples to token ids and masks, once for a run: `data/` of the run directory.

`data/train/` and `data/validation/` hold the examples one behind the other: `tokens.bin` (int32), `trained.bin` (one byte a token),
`ends.npy` (where each example ends), `groups.npy` (examples of one task have one number). `data/manifest.json` says what they were
made of. They are mapped into memory, not read, so that all ranks of a host share them.
"""

import json
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rl.config.run import RLConfig
from rl.config.sft import SftConfig
from rl.models.chat import THINK, THINK_END, Message, RendererError, Tool, arguments_object, arguments_text, wire
from rl.models.folder import has_template, resolve_model
from rl.models.renderer import load_renderer
from rl.models.template import Renderer
from rl.run_dir.checksums import checksum, verify_files
from rl.run_dir.files import CorruptFileError, write_directory
from rl.run_dir.status import Phase, Status
from rl.system.errors import RunError
from rl.trainer.sft.rows import Example, files_of, read_examples, sources

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys under which data sets keep what an assistant thought."""
PROGRESS_ROWS = 1000
"""Rows between two reports of progress."""
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
        from transformers import AutoTokenizer

        assert config.sft
        self.sft: SftConfig = config.sft
        self.max_length = config.model.max_model_len
        self.has_template = bool(config.model.chat_template) or has_template(model)
        self.chat = self.sft.style == "chat" or (self.sft.style == "auto" and self.has_template)
        trusted = config.model.trust_remote_code
        self.tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=trusted)
        self.renderer: Renderer | None = None
        if self.has_template:
            self.renderer = load_renderer(str(model), config.renderer, trust_remote_code=trusted)
        self.warnings: set[str] = set()

    def samples(self, example: Example, counts: Counter[str]) -> list[Tokens]:
        """The sequences of an example that are trained: one, several if the template rewrites earlier turns, none if nothing is left."""
        if example.doubt:
            self.warnings.add(example.doubt)
        if example.text and not self.chat:
            found = [self.plain_text(*example.text)] if example.text[1] else []
        else:
            found = self.conversation(example)
        if not found:
            counts["without an answer to train"] += 1
        return [kept for sample in found if (kept := self.fitting(sample, counts))]

    def plain_text(self, prompt: str, completion: str) -> Tokens:
        """Prompt and completion without a chat template, then the end-of-text token. Without a prompt the first token is given.

        They are encoded apart, because the policy samples after the prompt's ids.
        """
        if self.tokenizer.eos_token_id is None:
            raise RunError("the model's tokenizer has no end-of-text token (eos_token), so it could never learn to stop; set one")
        given = self.tokenizer.encode(prompt, add_special_tokens=False)
        sampled = [*self.tokenizer.encode(completion, add_special_tokens=False), self.tokenizer.eos_token_id]
        return given + sampled, [False] * len(given) + [bool(given)] + [True] * (len(sampled) - 1)

    def fitting(self, sample: Tokens, counts: Counter[str]) -> Tokens | None:
        """The sample if it is not too long; else cut or None, as sft.too_long has it."""
        ids, trained = sample
        if len(ids) <= self.max_length:
            return sample
        cut = ids[: self.max_length], trained[: self.max_length]
        fits = self.sft.too_long == "truncate" and any(cut[1])
        counts["cut to model.max_model_len" if fits else "longer than model.max_model_len"] += 1
        return cut if fits else None

    def conversation(self, example: Example) -> list[Tokens]:
        """The trained turns of a chat, each behind exactly the ids that it would be sampled after in a rollout. Raises RunError."""
        if self.renderer is None:
            raise RunError(
                f"{example.place}: a list of messages needs a chat template, and the model's tokenizer has none; name one: "
                "--model.chat_template chatml, or a file (or give prompt and completion as text)"
            )
        messages = [without_reasoning(message) for message in example.messages] if self.sft.drop_reasoning else example.messages
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i >= example.num_context]
        wanted = set(answers if self.sft.train == "all" else answers[-1:])
        try:
            return list(self.turns(messages, answers, wanted, example.tools))
        except RendererError as error:
            raise RunError(f"{example.place}: {error}") from None

    def turns(self, messages: list[Message], answers: list[int], wanted: set[int], tools: list[Tool] | None) -> Iterator[Tokens]:
        """The chains of turns that continue each other id for id, as rollouts have them, as far as there is something to train."""
        renderer = self.renderer
        assert renderer
        if any(message.get("tool_calls") for message in messages) and not tools:
            self.warnings.add(
                "examples call tools, but have no tool definitions (sft.columns.tools): the model does not see which there are"
            )
        ids, trained, last = [], [], -1
        for i in answers:
            prompt = renderer.next_prompt_ids(ids, messages[:i], last + 1, tools) if ids else None
            if prompt is None:
                if any(trained):
                    yield ids, trained
                ids, trained = [], []
                prompt = renderer.prompt_ids(messages[:i], tools)
            answer = renderer.answer_ids(messages[: i + 1], tools)
            is_trained = i in wanted and has_content(messages[i])
            if is_trained and (lost := missing_text(renderer, prompt, answer, messages[i], tools)):
                raise RendererError(lost)
            trained = trained + [False] * (len(prompt) - len(ids)) + [is_trained] * len(answer)
            ids, last = prompt + answer, i
        if any(trained):
            yield ids, trained


def has_content(message: Message) -> bool:
    return any(message.get(key) for key in ("content", "tool_calls", *REASONING))


def without_reasoning(message: Message) -> Message:
    return {key: value for key, value in message.items() if key not in REASONING}


def letters_of(text: str) -> str:
    """Text without white space and thinking tags, which templates set as they like."""
    return "".join(text.replace(THINK, "").replace(THINK_END, "").split())


def missing_text(renderer: Renderer, prompt: list[int], answer: list[int], message: Message, tools: list[Tool] | None) -> str | None:
    """Names the part of a message that the ids of its answer lack, with the remedy; None if they have all of it."""
    written = letters_of(renderer.decode(answer))
    content = wire([message])[0]["content"]
    for key in REASONING:
        if (text := message.get(key)) and letters_of(str(text)) not in written:
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
    if letters_of(content) not in written:
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
    np.save(folder / "ends.npy", np.array(ends, np.int64))
    np.save(folder / "groups.npy", np.array(groups, np.int64))
    return {"examples": len(ends), "tokens": end, "trained_tokens": num_trained}


def prepare_data(config: RLConfig, base: str, report: Callable[[Phase, None, str], None]) -> None:
    """Makes `data/` of the run if it is not there: a resumed run goes on with the examples that it began with. Raises RunError."""
    sft, directory = config.sft, config.run_dir.data
    assert sft
    if (directory / "manifest.json").is_file():
        report(Phase.VERIFYING_DATA, None, "")
        return verify_data(directory)
    report(Phase.LOADING_TOKENIZER, None, "")
    try:
        tokenizer = Tokenizer(Path(base), config)
    except RendererError as error:
        raise RunError(str(error)) from None

    def fill(folder: Path) -> None:
        manifest: dict[str, Any] = {"style": "chat" if tokenizer.chat else "completion"}
        for name, source in sources(sft).items():
            counts, tasks = Counter[str](), dict[str, int]()
            there = files_of(source) or Path(source.dataset).expanduser().exists()
            report(Phase.READING_DATA, None, source.dataset if there else f"{source.dataset} from the Hugging Face hub")

            def samples(source=source, counts=counts, tasks=tasks) -> Iterator[tuple[Tokens, int]]:
                for example in read_examples(source, sft, counts):
                    if counts["rows"] % PROGRESS_ROWS == 0:
                        report(Phase.READING_DATA, None, f"{source.dataset}: {counts['rows']:,} rows")
                    group = tasks.setdefault(example.task, len(tasks))
                    yield from ((sample, group) for sample in tokenizer.samples(example, counts))

            sizes = write_examples(folder / name, samples())
            rows = counts.pop("rows", 0)
            if not sizes["examples"]:
                why = ", ".join(f"{number} {what}" for what, number in counts.items()) or "there are no rows"
                raise RunError(f"{source.key} = {source.dataset!r}: nothing is left of {rows} rows: {why}")
            manifest[name] = {"dataset": source.dataset, "rows": rows, **sizes, "left_out": dict(counts)}
        manifest["warnings"] = sorted(tokenizer.warnings)
        manifest["files"] = {str(path.relative_to(folder)): checksum(path) for path in sorted(folder.rglob("*")) if path.is_file()}
        (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))

    write_directory(directory, fill)


def remedy(directory: Path) -> str:
    return f"delete {directory} to have it made anew, from the same data and settings"


def verify_data(directory: Path) -> None:
    """Raises CorruptFileError unless all files of `data/` are what was written."""
    files = read_manifest(directory)["files"]
    try:
        verify_files(directory, files)
    except CorruptFileError as error:
        raise CorruptFileError(f"{error}; {remedy(directory)}") from None


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of `data/`. Raises CorruptFileError."""
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


def main(config_file: Path) -> None:
    """Makes the data of a run in a process of its own, which reports its progress in status/data.json."""
    from rl.config.command_line import from_toml

    config = from_toml(config_file)
    status = Status(config.run_dir.status("data"), "data")
    try:
        prepare_data(config, resolve_model(config.model, needs_template=False), status.enter)
    except (CorruptFileError, RunError) as error:
        raise SystemExit(str(error)) from None
    finally:
        status.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
