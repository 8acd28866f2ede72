"""A model's tokenizer and chat template without transformers, which costs a process seconds and hundreds of MB.

It is read from a folder that `tokenizer_files.py` writes once for each model: the same Rust tokenizer that transformers would use, and what
transformers adds to it in Python. Texts with their ids, as transformers gave them, lie beside it, and are compared wherever it is loaded.
"""

import json
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rl.models.chat import Message, Tool
from rl.system.errors import RunError

if TYPE_CHECKING:
    from jinja2 import Template

VOCABULARY, FACTS = "tokenizer.json", "facts.json"
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's thinking in templates, the first of them the standard one."""
CLEAN_UP = ((" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"))
CLEAN_UP += tuple((f" '{end}", f"'{end}") for end in ("m", "s", "ve", "re"))
"""Spaces that transformers takes out of the text of word-piece tokenizers, in its order."""


class Probe(msgspec.Struct):
    """A text with its ids, and what the ids are decoded to, with special tokens and without."""

    text: str
    ids: list[int]
    decoded: str
    plain: str


class Facts(msgspec.Struct):
    """What transformers knows of a tokenizer beside its tokenizer.json."""

    unfit: str = ""
    """Why only transformers can load the tokenizer; then the other fields are empty."""
    named: dict[str, str] = {}
    """bos_token, eos_token, ... as templates are given them."""
    special: list[str] = []
    """All special tokens."""
    template: str | dict[str, str] | None = None
    cleans_up: bool = False
    splits_special: bool = False
    """Whether special tokens in a text are encoded as text."""
    names_thinking: bool = False
    """Whether templates get a message's thinking under both names, as newer versions of transformers do."""
    probes: list[Probe] = []


class SlimTokenizer:
    """The part of transformers' interface of tokenizers that renderers use, with the same results."""

    def __init__(self, folder: Path, name_or_path: str):
        from tokenizers import Tokenizer

        self.name_or_path = name_or_path
        self.facts = msgspec.json.decode((folder / FACTS).read_bytes(), type=Facts)
        self.inner = Tokenizer.from_file(str(folder / VOCABULARY))
        self.inner.no_padding()
        self.inner.no_truncation()
        self.inner.encode_special_tokens = self.facts.splits_special
        self.chat_template = self.facts.template

    def disagreement(self) -> str:
        """The first text that it encodes or decodes otherwise than transformers did; empty when there is none."""
        for probe in self.facts.probes:
            found = Probe(probe.text, self.encode(probe.text, add_special_tokens=False), self.decode(probe.ids), "")
            found.plain = self.decode(probe.ids, skip_special_tokens=True)
            if found != probe:
                return f"{probe.text[:40]!r} has the ids {found.ids[:8]}..., transformers gives {probe.ids[:8]}..."
        return ""

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        return self.inner.get_added_tokens_decoder()

    @property
    def all_special_ids(self) -> list[int]:
        return self.convert_tokens_to_ids(self.facts.special)

    @property
    def eos_token_id(self) -> int | None:
        return self._named_id("eos_token")

    @property
    def unk_token_id(self) -> int | None:
        return self._named_id("unk_token")

    def _named_id(self, name: str) -> int | None:
        return self.inner.token_to_id(self.facts.named[name]) if name in self.facts.named else None

    def get_vocab(self) -> dict[str, int]:
        return self.inner.get_vocab(with_added_tokens=True)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        id = self.inner.token_to_id(tokens)
        return self.unk_token_id if id is None else id

    def convert_ids_to_tokens(self, id: int) -> str | None:
        return self.inner.id_to_token(id)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self.inner.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Any, skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool | None = None) -> str:
        text = self.inner.decode([ids] if isinstance(ids, int) else ids, skip_special_tokens=skip_special_tokens)
        if self.facts.cleans_up and clean_up_tokenization_spaces is not False:
            for spaced, joined in CLEAN_UP:
                text = text.replace(spaced, joined)
        return text

    def apply_chat_template(
        self,
        messages: list[Message],
        tools: list[Tool] | None = None,
        *,
        tokenize: bool = False,
        add_generation_prompt: bool = False,
        **switches: Any,
    ) -> Any:
        """The conversation as text, or as ids. Raises jinja2.TemplateError, and TypeError, for what the template cannot show."""
        template = self.chat_template
        if isinstance(template, dict):
            template = template["tool_use" if tools is not None and "tool_use" in template else "default"]
        text = compiled(template or "").render(
            messages=[with_reasoning(message) for message in messages] if self.facts.names_thinking else messages,
            tools=tools,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **self.facts.named | switches,
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text


def with_reasoning(message: Message) -> Message:
    """A message as templates get it: without empty fields, and with its thinking under both names that they read."""
    message = {key: value for key, value in message.items() if value is not None}
    thinking = next((message[name] for name in REASONING if name in message), None)
    return message if thinking is None else {"thinking": thinking, **message, "reasoning_content": thinking}


@cache
def compiled(template: str) -> "Template":
    """A chat template in the sandbox that transformers gives it: templates come with models, and are not trusted."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
    from jinja2.utils import Namespace

    class Generation(Extension):
        """`{% generation %}` marks what is an answer; here it is only shown."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)

    class PublicNamespace(Namespace):
        """Takes no names with an underscore in front, behind which are Python's internals."""

        def __init__(*args: Any, **given: Any) -> None:  # a namespace may have a member that is called self
            for name in dict(*args[1:], **given):
                check_public(name)
            Namespace.__init__(*args, **given)

        def __setitem__(self, name: Any, value: Any) -> None:
            check_public(name)
            super().__setitem__(name, value)

    def check_public(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace of a chat template cannot have a member {name}")

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
        """jinja2's own escapes what HTML would misread."""
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    sandbox.filters["tojson"] = tojson
    sandbox.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": lambda *args, **given: dict(*args, **given),  # the class itself would lead to Python's internals
        "namespace": PublicNamespace,
    }
    return sandbox.from_string(template)


def load_tokenizer(model_path: str, slim: str, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of the model folder `model_path`: from the folder `slim` if that is given, else by transformers. Raises RunError."""
    if slim:
        tokenizer = SlimTokenizer(Path(slim), model_path)
        if not (difference := tokenizer.disagreement()):
            return tokenizer
        reason = f"the tokenizers package of this interpreter differs from rl's own: {difference}"
    else:
        reason = ""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        reason = reason or "this model's tokenizer needs transformers, and this interpreter has none"
        raise RunError(f'{reason}; add it: orchestrator.environment.requirements = ["transformers"]') from None
    if reason:
        print(f"{reason}; transformers loads it instead", flush=True)
    return AutoTokenizer.from_pretrained(model_path, trust_remote_code=trust_remote_code)
