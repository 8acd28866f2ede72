"""Writes what follows from the code: settings.md, metrics.md and migrating.md in docs/, and the
types of the page of `rl view`.

`uv run scripts/reference.py`

With --check it writes nothing, and ends with 1 if a page is not what it would write.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rl.config.fields import default_text, models_in, tags, type_name
from rl.config.foreign import FOREIGN
from rl.config.help import description, in_order, variants
from rl.config.run import RLConfig
from rl.launch.prepare import MAY_CHANGE
from rl.run_dir.metrics import COST as COST_METRICS
from rl.run_dir.metrics import SECTIONS
from rl.view.server import PAGE, ROUTES

DOCS = Path(__file__).resolve().parents[1] / "docs"
MADE = "<!-- made by `uv run scripts/reference.py`; do not edit -->\n"

SETTINGS = """# Settings

Every key, with its type and default. A key is a flag (`--trainer.optim.lr 3e-6`), a line of a TOML
file, or an environment variable (`RL__TRAINER__OPTIM__LR=3e-6`); a key without a default need not
be set, unless it says "required". `rl --help SECTION` prints the same, `rl --schema` as JSON.
Run-wide keys may also stand in a section (`--trainer.max_steps`). `inf` switches a bound off.

Also understood: `--steps` (max_steps), `--learning_rate` (trainer.optim.lr), `--trainer-gpus`,
`--inference-gpus`, `--trainer-cpus`, `--inference-cpus`, `--strict-parity`; a text for `--model`
(its name), `--orchestrator.environment` and `--orchestrator.eval` (the id), `--trainer.loss` and
`--orchestrator.credit` (the type); lists and pairs with commas (`--trainer.optim.betas 0.9,0.99`).
"""

RESUME = """## What a resume may change

These settings, and all keys of these sections: how long, where and how fast, but not what is
learned. `*` is any text. A difference in any other is refused with the settings that differ; `rl
branch` begins a new run with them.
"""

METRICS = """# Metrics

Every number of a run, under the names of `metrics.jsonl`, which W&B and the console have, too. A
line of the file is
`{"step": N, "time": ..., "source": "trainer", NAME: value, ...}`; sources are `trainer`, `orchestrator`, `eval` and `rl`. Of two lines with the
same step and source the later one counts, so a resume never doubles a curve. `<env>` is an
environment's name.

## Prometheus

`--prometheus` serves the newest value of each metric of a live run at `http://127.0.0.1:8412/metrics` (`prometheus.host`
and `prometheus.port` change that; on a cluster it is the leader's machine). A scraper shows the run's token:

```
scrape_configs:
  - job_name: rl
    authorization: {credentials_file: outputs/NAME/status/token}
    static_configs: [{targets: ["127.0.0.1:8412"]}]
```

`reward/<env>/mean` is `rl_reward_env_mean{run="...", source="orchestrator", env="..."}` there, a gauge like all; words in angle brackets
are labels. Metrics that are not on this page are `rl_other{name="..."}`, and so is the newest `step` of each source. A value of the trainer
or of an evaluation that not every line has stays until there is a newer one; of the orchestrator's metrics there are those of the newest
batch. So a scraper sees values of single steps: what each step had is in `metrics.jsonl`. vLLM's own numbers are at
`/metrics` of the inference server.
"""
COST = """`tokens/...` are numbers of one line, and their sum over all lines is that of the run; the last lines of a run and `rl compare` have it. The
batch that settles a rollout counts it. So each is counted once, whatever was killed and resumed, and of `tokens/sampled` each token is
trained or dropped, but for a batch in quarantine; dropped as `kept_overflow` are single tokens, too. What `why` means: [environments.md](environments.md#when-things-go-wrong).
Not counted are

* what was lost or cancelled before it finished: with a killed server or worker, with a cancelled group, with an example of an
  evaluation that was played again;
* rollouts that no batch has settled at the end of the run, and steps that `--resume STEP` has removed;
* what is computed again: by vLLM after new weights or for lack of memory, by the trainer after a crash;
* log-probabilities of a teacher, and calls of judges, which environments make by themselves.

NeMo Gym and the service of `trainer.backend = "tinker"` do not tell what was cached; all of their prompts count as prefilled.

`cost/...` are totals so far. `rl` writes them after each step and at its end. A machine counts while `rl` has the run, in all of its
starts, with all of its GPUs; one of a cluster while it gives signs of life to the leader. A kill of `rl` loses what passed since the last
step, `--resume STEP` what passed after that one. Servers that were started by hand do not count, nor do runs
without `rl`, nor `rl serve`. A branch begins at 0.
`cost.per_hour` and the prices of tokens ([settings](settings.md#cost)) make money of them, at the prices of the newest start.
"""

MIGRATING = """# Coming from prime-rl, verl, TRL or OpenRLHF

What settings are called there and here. `rl` knows these names, too: whoever types one is told the
key. A name is known by its last parts, in any section: `actor_rollout_ref.rollout.n` as
`rollout.n`.
"""
SCALARS = {
    "string": "string",
    "integer": "number",
    "number": "number",
    "boolean": "boolean",
    "null": "null",
}
HEAD = """// Types of what the server answers, made from src/rl/view/responses.py by `uv run scripts/reference.py`.

"""


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def row(key: str, info: FieldInfo, kinds: list[str]) -> str:
    """A line of a table of keys."""
    default = (
        "required"
        if info.is_required()
        else f"`{text}`"
        if (text := default_text(info.default))
        else ""
    )
    of_kinds = f" ({', '.join(kinds)})" if kinds else ""
    return (
        f"| `{key}` | `{cell(type_name(info.annotation))}` | {cell(default)}{of_kinds} | "
        f"{cell(description(info))} |"
    )


def table(rows: list[str]) -> str:
    return (
        "\n".join(["| key | type | default | |", "|---|---|---|---|", *rows]) + "\n" if rows else ""
    )


def rows_of(model: type[BaseModel], section: str) -> list[str]:
    """The lines of a class's keys, without its sections."""
    rows = []
    for name, info in model.model_fields.items():
        if not models_in(info.annotation):
            key = f"{section}.{name}".lstrip(".")
            rows += [row(key, own, kinds) for kinds, own in variants(key)] or [row(key, info, [])]
    return rows


def section_parts(section: str, info: FieldInfo) -> Iterator[str]:
    """The text of a section, and of all that lie in it."""
    models = models_in(info.annotation)
    yield f"## {section}\n\n{description(info)}\n"
    if len(models) == 1:
        yield table(rows_of(models[0], section))
        for name, inner in in_order(models[0]):
            if models_in(inner.annotation):
                yield from section_parts(f"{section}.{name}", inner)
        return
    shared = models[0].__base__
    assert shared and issubclass(shared, BaseModel)
    yield table(rows_of(shared, section))
    for model in models:
        yield f'`{section}.type = "{tags(model)[0]}"`: {" ".join((model.__doc__ or "").split())}\n'
        own = ("type", *shared.model_fields)
        yield table(
            [
                row(f"{section}.{name}", field, [])
                for name, field in model.model_fields.items()
                if name not in own
            ]
        )


def settings_page() -> str:
    parts = [MADE + SETTINGS, "## Run-wide\n", table(rows_of(RLConfig, ""))]
    for name, info in RLConfig.model_fields.items():
        if models_in(info.annotation):
            parts += section_parts(name, info)
    parts += [RESUME, ", ".join(f"`{key}`" for key in MAY_CHANGE) + "\n"]
    return "\n".join(filter(None, parts))


def metrics_page() -> str:
    parts = [MADE + METRICS]
    for title, metrics in SECTIONS.items():
        parts.append(f"## {title}\n")
        if metrics is COST_METRICS:
            parts.append(COST)
        parts.append(
            "\n".join(
                [
                    "| metric | |",
                    "|---|---|",
                    *(f"| `{name}` | {what} |" for name, what in metrics.items()),
                ]
            )
            + "\n"
        )
    return "\n".join(parts)


def migrating_page() -> str:
    lines = ["| there | here | |", "|---|---|---|"]
    for foreign in FOREIGN:
        names = ", ".join(f"`{name}`" for name in foreign.names.split())
        here = (
            " and ".join(f"`{key}`" for key in foreign.here.split(" and ")) if foreign.here else "-"
        )
        lines.append(f"| {names} | {here} | {cell(foreign.note)} |")
    return MADE + MIGRATING + "\n" + "\n".join(lines) + "\n"


def script_types() -> str:
    """The content of page/types.d.ts: an interface for each type, and `Answers` from the name of
    a route to its type."""
    lines = [HEAD.rstrip("\n"), ""]
    components = msgspec.json.schema_components([route.gives for route in ROUTES])[1]
    for name, schema in components.items():
        lines.append(f"export interface {name} {{")
        lines += [f"  {key}: {script_type(kind)};" for key, kind in schema["properties"].items()]
        lines += ["}", ""]
    lines.append("export interface Answers {")
    lines += [f"  {route.name}: {route.gives.__name__};" for route in ROUTES]
    return "\n".join([*lines, "}", ""])


def script_type(schema: dict[str, Any]) -> str:
    """A JSON schema as a type of TypeScript."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "enum" in schema:
        return " | ".join(f'"{value}"' for value in schema["enum"])
    if "anyOf" in schema:
        return " | ".join(dict.fromkeys(script_type(kind) for kind in schema["anyOf"]))
    if schema.get("type") == "array":
        inner = script_type(schema.get("items", {}))
        return f"({inner})[]" if "|" in inner else f"{inner}[]"
    if schema.get("type") == "object":
        inner = schema.get("additionalProperties")
        return (
            f"Record<string, {script_type(inner) if isinstance(inner, dict) and inner else 'any'}>"
        )
    return SCALARS.get(str(schema.get("type")), "any")


def pages() -> dict[Path, str]:
    """The pages by their files."""
    return {
        DOCS / "settings.md": settings_page(),
        DOCS / "metrics.md": metrics_page(),
        DOCS / "migrating.md": migrating_page(),
    } | {PAGE / "types.d.ts": script_types()}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; 1 if something would be written"
    )
    check = parser.parse_args().check
    changed = [
        path for path, text in pages().items() if not path.exists() or path.read_text() != text
    ]
    for path in [] if check else changed:
        path.write_text(pages()[path])
    print(
        "\n".join(f"{path.name}: {'not current' if check else 'written'}" for path in changed)
        or "all pages are current"
    )
    return int(check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
