"""``loopkit completion``: let a shell complete the words of the command."""

from __future__ import annotations

import argparse

from loopkit.commands.cli import COMMANDS, GROUPS, argument, command, say

BASH = """\
_loopkit() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" words=""
    if [ "$COMP_CWORD" -eq 1 ]; then words="{first} --help --version"
    else case "${{COMP_WORDS[1]}} $COMP_CWORD" in
{cases}
        *) case "$word" in -*) words="--help";; esac;;
    esac; fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -o bashdefault -F _loopkit loopkit
"""
ZSH = """\
#compdef loopkit
_loopkit() {{
    if (( CURRENT == 2 )); then
        local -a commands
        commands=({described})
        _describe command commands
    else case "$words[2] $CURRENT" in
{cases}
        *) _files;;
    esac; fi
}}
if [ "$funcstack[1]" = _loopkit ]; then _loopkit "$@"; else compdef _loopkit loopkit; fi
"""
FISH = """\
complete -c loopkit -n __fish_use_subcommand -f
{lines}
"""
INSTALL = {
    "bash": "loopkit completion bash > ~/.local/share/bash-completion/completions/loopkit",
    "zsh": "loopkit completion zsh > ~/.zsh/completions/_loopkit",
    "fish": "loopkit completion fish > ~/.config/fish/completions/loopkit.fish",
}
"""How each shell finds what is printed."""


@command("completion", argument("shell", metavar="SHELL", choices=list(INSTALL), help="bash, zsh or fish"))
def completion(options: argparse.Namespace) -> int:
    """Print what lets bash, zsh or fish complete the words of `loopkit`.

    bash: loopkit completion bash > ~/.local/share/bash-completion/completions/loopkit
    zsh:  loopkit completion zsh > ~/.zsh/completions/_loopkit, where ~/.zsh/completions is in fpath
    fish: loopkit completion fish > ~/.config/fish/completions/loopkit.fish

    The words are the commands installed now.

    Exit code: 0.
    """
    from loopkit.commands.cli import listed

    known = listed()
    groups = {}
    for group in GROUPS:
        groups[group] = [each.words[1] for each in COMMANDS if each.words[0] == group]
    made = {"bash": _bash, "zsh": _zsh, "fish": _fish}[options.shell]
    say(made(known, groups), end="")
    return 0


def _bash(known: dict[str, str], groups: dict[str, list[str]]) -> str:
    cases = [f'        "{group} 2") words="{" ".join(words)} --help";;' for group, words in groups.items()]
    return BASH.format(first=" ".join(known), cases="\n".join(cases))


def _zsh(known: dict[str, str], groups: dict[str, list[str]]) -> str:
    described = [_quoted(f"{name}:{about}") for name, about in known.items()]
    cases = [f'        "{group} 3") compadd {" ".join(words)};;' for group, words in groups.items()]
    return ZSH.format(described=" ".join(described), cases="\n".join(cases))


def _fish(known: dict[str, str], groups: dict[str, list[str]]) -> str:
    lines = [
        f"complete -c loopkit -n __fish_use_subcommand -a {name} -d {_quoted(about)}" for name, about in known.items()
    ]
    lines += [
        f"complete -c loopkit -n '{_fish_group(group, words)}' -f -a '{' '.join(words)}'"
        for group, words in groups.items()
    ]
    return FISH.format(lines="\n".join(lines))


def _fish_group(group: str, words: list[str]) -> str:
    """The condition that a group's word is typed, and none of its own words."""
    return f"__fish_seen_subcommand_from {group}; and not __fish_seen_subcommand_from {' '.join(words)}"


def _quoted(text: str) -> str:
    """A text as one word of a shell."""
    return "'" + text.replace("'", "") + "'"
