"""Converts examples to token ids and masks, once per run, in `data/` of the run directory.

`data/train.arrow` and `data/validation.arrow` hold one example per row: `tokens`, `trained` (which
tokens are trained), and `group` (a number that examples of the same task share).
`data/manifest.json` records their origin. The files are mapped into memory, not read, so that all
ranks of a host share them.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from rl.config.kinds import SftConfig
from rl.config.run import RLConfig
from rl.models.chat import Message, RendererError, Tool
from rl.models.folder import own_template, resolve_model, vocab_size
from rl.models.renderer import (
    REASONING,
    Renderer,
    conversation_ids,
    has_content,
    load_renderer,
    missing_text,
)
from rl.models.tokenizer import hide_torch, load_tokenizer, text_ids, without_row
from rl.run_dir.checksums import checksum, verify_files
from rl.run_dir.files import CorruptFileError, write_directory
from rl.run_dir.status import Phase, Status
from rl.system.errors import RunError
from rl.trainer.sft.rows import ChatExample, DataSource, files_of, read_examples, sources

PROGRESS_ROWS = 1000
"""Rows between two progress reports, and examples per write."""
SCHEMA = pa.schema(
    [("tokens", pa.list_(pa.int32())), ("trained", pa.list_(pa.bool_())), ("group", pa.int64())]
)
Tokens = tuple[list[int], list[bool]]
"""(ids of an example, which of them are trained)."""


class Tokenizer:
    """Renders examples for one model."""

    def __init__(self, model: Path, config: RLConfig):
        assert config.sft
        self.sft: SftConfig = config.sft
        self.max_length = config.model.max_model_len
        self.vocabulary = vocab_size(model)
        self.has_template = bool(own_template(model))
        self.chat = self.sft.style == "chat" or (self.sft.style == "auto" and self.has_template)
        trusted = config.model.trust_remote_code
        self.tokenizer = load_tokenizer(str(model), trust_remote_code=trusted)
        self.renderer: Renderer | None = None
        if self.has_template:
            self.renderer = load_renderer(str(model), config.renderer, trust_remote_code=trusted)
        self.warnings: set[str] = set()

    def samples(self, example: ChatExample, counts: Counter[str]) -> list[Tokens]:
        """Returns an example's sequences to train: one, several if the template rewrites earlier
        turns, none if nothing is left."""
        if example.text and not self.chat:
            samples = [self.plain_text(*example.text)] if example.text[1] else []
        else:
            samples = self.conversation(example)
        if not samples:
            counts["without an answer to train"] += 1
        for ids, _ in samples:
            if fault := without_row(self.tokenizer, ids, self.vocabulary):
                raise RunError(f"{example.where}: {fault}")
        return list(filter(None, (self.truncated(sample, counts) for sample in samples)))

    def plain_text(self, prompt: str, completion: str) -> Tokens:
        """Encodes prompt and completion without a chat template, and adds the end-of-text token.
        Without a prompt the first token is given.

        They are encoded separately, because the policy samples after the prompt's ids.
        """
        if self.tokenizer.eos_token_id is None:
            raise RunError(
                "the model's tokenizer has no end-of-text token (eos_token), so it could "
                "never learn to stop; set one"
            )
        if not prompt:
            ids = [*text_ids(self.tokenizer, completion), self.tokenizer.eos_token_id]
            return ids, [False] + [True] * (len(ids) - 1)
        context = text_ids(self.tokenizer, prompt)
        answer = self.tokenizer.encode(completion, add_special_tokens=False)
        answer = [*answer, self.tokenizer.eos_token_id]
        ids = context + answer  # a prompt may have no token, and the first one follows none
        return ids, [False] * max(1, len(context)) + [True] * (len(ids) - max(1, len(context)))

    def truncated(self, sample: Tokens, counts: Counter[str]) -> Tokens | None:
        """Returns the sample if it is not too long; otherwise cuts it or returns None, depending
        on sft.too_long."""
        ids, trained = sample
        if len(ids) <= self.max_length:
            return sample
        cut = ids[: self.max_length], trained[: self.max_length]
        fits = self.sft.too_long == "truncate" and any(cut[1])
        counts["cut to model.max_model_len" if fits else "longer than model.max_model_len"] += 1
        return cut if fits else None

    def conversation(self, example: ChatExample) -> list[Tokens]:
        """Returns a chat's turns to train, each after exactly the ids that would precede it in a
        rollout. Raises RunError."""
        if self.renderer is None:
            raise RunError(
                f"{example.where}: a list of messages needs a chat template, but the model's "
                "tokenizer has none; name one: "
                "--model.chat_template chatml, or a file (or give prompt and completion as text)"
            )
        if fault := self.renderer.fault:
            self.warnings.add(f"{fault}; give another (model.chat_template), or teach it this one")
        messages = example.messages
        if self.sft.drop_reasoning:
            messages = [
                {key: value for key, value in message.items() if key not in REASONING}
                for message in messages
            ]
        first = max(1, example.num_context)
        answers = [
            i for i, message in enumerate(messages) if message["role"] == "assistant" and i >= first
        ]
        wanted = set(answers if self.sft.train == "all" else answers[-1:]) - example.untrained
        try:
            return list(self.turns(messages, answers, wanted, example.tools))
        except RendererError as error:
            raise RunError(f"{example.where}: {error}") from None

    def turns(
        self,
        messages: list[Message],
        answers: list[int],
        wanted: set[int],
        tools: list[Tool] | None,
    ) -> Iterator[Tokens]:
        """Yields chains of turns in which each turn's ids continue those before it, as in
        rollouts, if they have anything to train."""
        renderer = self.renderer
        assert renderer
        if any(message.get("tool_calls") for message in messages) and not tools:
            self.warnings.add(
                "examples call tools, but have no tool definitions (sft.columns.tools): the "
                "model does not see the available tools"
            )
        ids, trained = [], []
        for i, continues, prompt, answer in conversation_ids(renderer, messages, answers, tools):
            if not continues:
                if any(trained):
                    yield ids, trained
                ids, trained = [], []
            is_trained = i in wanted and has_content(messages[i])
            if is_trained and (lost := missing_text(renderer, prompt, answer, messages[i], tools)):
                raise RendererError(lost)
            trained = trained + [False] * (len(prompt) - len(ids)) + [is_trained] * len(answer)
            ids = prompt + answer
        if any(trained):
            yield ids, trained


# The run's data/ ----------------------------------------------------------------------------------


def write_examples(path: Path, samples: Iterator[tuple[Tokens, int]]) -> dict[str, int]:
    """Writes pairs of (example, its task's number) to an Arrow file; returns the totals."""
    sizes = Counter(examples=0, tokens=0, trained_tokens=0)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, SCHEMA) as file:
        while rows := list(islice(samples, PROGRESS_ROWS)):
            ids, trained = ([tokens[column] for tokens, _ in rows] for column in (0, 1))
            columns = [ids, trained, [group for _, group in rows]]
            file.write_batch(pa.record_batch(columns, schema=SCHEMA))
            sizes["examples"] += len(rows)
            sizes["tokens"] += sum(map(len, ids))
            sizes["trained_tokens"] += sum(map(sum, trained))
    return dict(sizes)


def prepare_data(config: RLConfig, base: str, report: Callable[[Phase, None, str], None]) -> None:
    """Makes the run's `data/` if it does not exist; a resumed run keeps the examples that it
    began with. Raises RunError."""
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

    def write(path: Path, source: DataSource) -> tuple[dict[str, Any], set[int]]:
        """Returns what the manifest says of a data set, and the hashes of its tasks."""
        counts, tasks, name = Counter[str](), dict[int, int](), source.dataset
        is_here = files_of(source) or Path(name).expanduser().exists()
        where = name if is_here else f"{name} from the Hugging Face hub"
        report(Phase.READING_DATA, None, where)

        def samples() -> Iterator[tuple[Tokens, int]]:
            for example in read_examples(source, sft, counts):
                if counts["rows"] % PROGRESS_ROWS == 0:
                    report(Phase.READING_DATA, None, f"{name}: {counts['rows']:,} rows")
                # a task without one must not be held out
                for sample in tokenizer.samples(example, counts):
                    yield sample, tasks.setdefault(hash(example.group), len(tasks))

        sizes = write_examples(path, samples())
        rows = counts.pop("rows", 0)
        if not sizes["examples"]:
            reasons = ", ".join(f"{number} {what}" for what, number in counts.items())
            raise RunError(
                f"{source.key} = {name!r}: nothing is left of {rows} rows: "
                f"{reasons or 'there are no rows'}"
            )
        return {"dataset": name, "rows": rows, **sizes, "left_out": dict(counts)}, {*tasks}

    def fill(folder: Path) -> None:
        manifest: dict[str, Any] = {"style": "chat" if tokenizer.chat else "completion"}
        trained = set[int]()
        for name, source in sources(sft).items():
            manifest[name], tasks = write(folder / f"{name}.arrow", source)
            if both := trained & tasks:
                tokenizer.warnings.add(
                    f"{len(both)} of {len(tasks)} prompts of {source.key} are trained on "
                    "too: hold out others"
                )
            trained = tasks
        manifest["warnings"] = sorted(tokenizer.warnings)
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        manifest["files"] = {str(path.relative_to(folder)): checksum(path) for path in paths}
        (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))

    write_directory(directory, fill)


def remedy(directory: Path) -> str:
    return f"delete {directory} to have it made again, from the same data and settings"


def verify_data(directory: Path) -> None:
    """Raises CorruptFileError unless all files of `data/` are as they were written."""
    files = read_manifest(directory)["files"]
    try:
        verify_files(directory, files)
    except CorruptFileError as error:
        raise CorruptFileError(f"{error}; {remedy(directory)}") from None


def read_manifest(directory: Path) -> dict[str, Any]:
    """Returns the manifest of `data/`. Raises CorruptFileError."""
    path = directory / "manifest.json"
    try:
        manifest = json.loads(path.read_bytes())
        return manifest | {"train": manifest["train"], "files": manifest["files"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptFileError(
            f"{path}: missing or damaged ({type(error).__name__}: {error}); {remedy(directory)}"
        ) from None


def open_examples(path: Path) -> pa.Table:
    """Maps the examples of `data/train.arrow` or `data/validation.arrow`, which are verified."""
    with pa.memory_map(str(path)) as file:
        return pa.ipc.open_file(file).read_all()


def main(config_file: Path) -> None:
    """Makes the data of a run in a separate process, which reports its progress in
    status/data.json."""
    from rl.config.command_line import from_toml

    config = from_toml(config_file)
    status = Status(config.run_dir.status("data"), "data")
    try:
        model = resolve_model(config.model, needs_template=False)
        if not config.model.trust_remote_code:
            hide_torch()
        prepare_data(config, model, status.enter)
    except (CorruptFileError, RunError) as error:
        raise SystemExit(str(error)) from None
    finally:
        status.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
