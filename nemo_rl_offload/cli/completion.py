"""Completion for bash, and for zsh through its `bashcompinit`: commands, options, their values, and configuration keys.

The script is made from the parser and the schema, and starts no Python at a key press, which importing would make slow.
"""

import argparse
from collections.abc import Iterator

from nemo_rl_offload.cli.parser import option_names, subparsers
from nemo_rl_offload.config.rules.effects import defaults
from nemo_rl_offload.specs.devices import DEVICES

TAKE_KEYS = ("run", "check", "plan", "eval")
_NAMES = {"--gpu": tuple(DEVICES)}
"""Of options that take a name or a file."""
SCRIPT = """\
# bash: eval "$(nemo-rl-offload completion)"      zsh: autoload -U bashcompinit && bashcompinit, then the same
_nemo_rl_offload() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" words=""
  COMPREPLY=()
  [ "$before" = "=" ] && before="${{COMP_WORDS[COMP_CWORD-2]}}"
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "{commands}" -- "$word"))
    return
  fi
  case "${{COMP_WORDS[1]}} $before" in
{values}
  esac
  if [ -n "$words" ]; then
    COMPREPLY=($(compgen -W "$words" -- "$word"))
    return
  fi
  case "${{COMP_WORDS[1]}} $word" in
{options}
    {keyed}) [ -n "$word" ] && words="{keys}" ;;
  esac
  COMPREPLY=($(compgen -W "$words" -- "$word"))
  case "${{COMPREPLY[0]:-}}" in *=) type compopt >/dev/null 2>&1 && compopt -o nospace ;; esac
}}
complete -o default -o bashdefault -F _nemo_rl_offload nemo-rl-offload
"""


def script(parser: argparse.ArgumentParser) -> str:
    """The shell's script; where it has no word to offer, the shell offers files."""
    commands = subparsers(parser)
    values = [line for name, each in commands.items() for line in _values(name, each)]
    options = [
        f'    "{name} -"*) words="{" ".join(f"--{option}" for option in option_names(parser, name))}" ;;'
        for name in commands
    ]
    return SCRIPT.format(
        commands=" ".join(commands),
        values="\n".join(values),
        options="\n".join(options),
        keyed="|".join(f'"{name} "*' for name in TAKE_KEYS),
        keys=" ".join(f"{path}=" for path in defaults()),
    )


def _values(command: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    """What may stand after a word: choices of options, and of the command's first argument."""
    for action in parser._actions:
        named = next((_NAMES[each] for each in action.option_strings if each in _NAMES), ())
        if choices := " ".join(map(str, action.choices or named)):
            befores = action.option_strings or [command]
            yield from (f'    "{command} {before}") words="{choices}" ;;' for before in befores)
