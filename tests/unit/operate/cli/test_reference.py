"""``docs/reference/cli.md`` shows the help texts of the commands.

After a change, ``python tests/unit/operate/cli/test_reference.py`` writes the page again.
"""

import inspect
import re
from pathlib import Path

import click

from aztask.operate.cli.main import cli
from aztask.operate.cli.options import Duration

PAGE = Path(__file__).parents[4] / "docs" / "reference" / "cli.md"

HEAD = """\
# Command line

<!-- Written by tests/unit/operate/cli/test_reference.py from the commands themselves. -->

```text
aztask [-A MODULE:APP] COMMAND [OPTIONS] [ARGUMENTS]
```

Name your app with `-A`, before or after the command, or in the environment variable `AZTASK_APP`.
Commands that read, and those for queues and dead letters, also work without an app: they use the
addresses in `AZTASK_BROKER` and `AZTASK_RESULTS`. Without `AZTASK_BROKER`, they use
`.aztask/queues.db` in the working directory.

Every option has an environment variable, named beside it. Write durations as `30s`, `5m`, `1h30m`,
`250ms` or plain seconds. Data goes to stdout; logs, progress and errors go to stderr. `--json`
prints one JSON object per line. Colour and progress bars appear on a terminal only, and `NO_COLOR`
switches colour off. `python -m aztask` is the same command.

## Exit codes

| code | meaning |
|---|---|
| 0 | ok |
| 1 | failure: a task failed, a result is wrong, or the command could not do its work |
| 2 | wrong usage, or the app cannot be imported |
| 3 | the broker is unreachable |
| 4 | wrong configuration or missing permission |
| 5 | not found: a queue, a task, an id |
| 130 | Ctrl-C |

## Shell completion

Add one line to the file that your shell reads at its start. The next shell completes commands,
options and their values with Tab. bash must be 4.4 or newer.

| shell | file | line |
|---|---|---|
| bash | `~/.bashrc` | `eval "$(aztask completion bash)"` |
| zsh | `~/.zshrc` | `eval "$(aztask completion zsh)"` |
| fish | `~/.config/fish/completions/aztask.fish` | `aztask completion fish \\| source` |

## Errors

An error is one line on stderr, `aztask: error: ...`, without secrets. Set `AZTASK_DEBUG=1` to see
the traceback too.
"""


def render():
    """The whole page."""
    parts = [HEAD]
    root = click.Context(cli, info_name="aztask", **cli.context_settings)
    for name in cli.list_commands(root):
        parts += section(cli.get_command(root, name), (name,), root)
    return "\n".join(parts)


def section(command, path, parent):
    """A command and its sub-commands.

    parent: the context above it. A command keeps the help option that it makes for the first
    context: without what the parent says of it, ``-h`` would be gone from the rest of the process.
    """
    context = click.Context(command, info_name=path[-1], parent=parent)
    usage = command.collect_usage_pieces(context)
    lines = [f"{'#' * (len(path) + 1)} `aztask {' '.join(path)}`", ""]
    lines += ["```text", " ".join(["aztask", *path, *usage]), "```", ""]
    lines += [inspect.cleandoc(command.help or ""), ""]
    options = [param for param in command.params if isinstance(param, click.Option)]
    lines += ["| option | environment | |", "|---|---|---|"]
    lines += [row(option, path) for option in options if option.name != "app"]
    if lines[-1] == "|---|---|---|":
        del lines[-2:]
    else:
        lines.append("")
    if isinstance(command, click.Group):
        for name in sorted(command.list_commands(context)):
            lines += section(command.get_command(context, name), (*path, name), context)
    return lines


def row(option, path):
    """One option as a line of the table."""
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    if not option.is_flag:
        names += f" {kind(option)}"
    variable = "_".join(("AZTASK", *path, option.name)).upper()
    text = re.sub(r"\[(default: [^]]*)\]", r"(\1)", option.help)
    if isinstance(option.default, str | int) and not option.is_flag and option.default:
        text += f" Default: `{option.default}`."
    return f"| {names} | `{variable}` | {text} |"


def kind(option):
    """What an option takes."""
    if isinstance(option.type, click.Choice):
        return " or ".join(f"`{choice}`" for choice in option.type.choices)
    return "DURATION" if isinstance(option.type, Duration) else option.type.name.split()[0].upper()


def test_the_page_says_what_the_commands_say():
    assert PAGE.read_text(encoding="utf-8") == render(), (
        "the commands have changed: "
        "python tests/unit/operate/cli/test_reference.py writes the page anew"
    )


def test_the_page_has_every_command_and_option():
    text = PAGE.read_text(encoding="utf-8")
    for word in ("`aztask worker`", "`--max-lease`", "`aztask dlq replay`", "AZTASK_WORKER_POOL"):
        assert word in text
    assert 'pip install "aztask[prometheus]"' in text


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
