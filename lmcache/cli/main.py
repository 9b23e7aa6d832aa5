"""The entry point `lmcache`: finds the command, runs it, and says in one line what went wrong.

Exit codes: 0 done · 1 it failed (no server, too little memory, a bug) · 2 it was asked for wrongly (a flag, a name, a
plugin) · 130 interrupted. A traceback is shown only with `--debug`.
"""

import errno
import importlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence

import click

from lmcache import __version__
from lmcache.cli.options import WholeNumber, nearest
from lmcache.errors import ConfigError, LMCacheError, PluginError

COMMANDS: Mapping[str, str] = {
    "server": "Run the cache server.",
    "ping": "Ask a server whether it answers, and how fast.",
    "status": "Show what a server holds and has done.",
    "metrics": "Serve what a server reports to Prometheus.",
    "pin": "Keep a prompt's stored chunks for a while, whatever comes.",
    "unpin": "End a pin before its time.",
    "wait-idle": "Wait until no store is in flight on a server.",
    "keys": "Make keys for a server and its clients on other hosts.",
    "plugins": "List plugins, and what each brings.",
    "engines": "List engines: versions found and supported, what was validated.",
    "tier": "List, verify and repair what a storage tier holds.",
    "demo": "Run the main job once, cold and cache-served side by side.",
    "geometry": "Explain a model's KV groups, chunk sizes and what they store.",
    "simulate": "Replay request traces against eviction policies.",
    "bench": "Measure costs, with the machine's own limits beside them.",
}
"""Our own commands and their short help, here so that `lmcache --help` imports none of them."""


_NO_COMMAND_NAMED: tuple[type[click.UsageError], ...] = (
    (click.exceptions.NoArgsIsHelpError,) if hasattr(click.exceptions, "NoArgsIsHelpError") else ()
)
"""Shows the help of a group of commands as it is laid out. Before 8.2 click prints it and ends by itself."""


class CommandLine(click.Group):
    """A group that loads our commands one by one, and plugins only when a command is not ours or all are listed."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]  # click's own arguments, passed through
        self._plugins_asked = False

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of our commands, then of those that plugins add."""
        self._ask_plugins()
        return [*COMMANDS, *sorted(self.commands)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name, imported now."""
        if cmd_name in COMMANDS:
            attribute = cmd_name.replace("-", "_")
            command: click.Command = getattr(importlib.import_module(f"lmcache.cli.{attribute}"), attribute)
            return command
        self._ask_plugins()
        return super().get_command(ctx, cmd_name)

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        """Add a plugin's command. PluginError if the name is taken."""
        name = name or cmd.name or ""
        if name in COMMANDS or name in self.commands:
            raise PluginError(f"the command {name!r} is there already", remedy="give the plugin's command another name")
        super().add_command(cmd, name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command in `args`; an unknown one gets the nearest that there is."""
        if not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            known = self.list_commands(ctx)
            remedy = nearest(args[0], known) or f"commands are {', '.join(known)}"
            raise click.UsageError(f"there is no command {args[0]!r}; {remedy}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands. A broken plugin costs a line, not the help."""
        try:
            self._ask_plugins()
        except PluginError as error:
            click.echo(_line(error), err=True)
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))
        if self.commands:
            with formatter.section("Commands of plugins"):
                formatter.write_dl([(name, self.commands[name].get_short_help_str()) for name in sorted(self.commands)])

    def _ask_plugins(self) -> None:
        if self._plugins_asked:
            return
        self._plugins_asked = True
        from lmcache.plugins.manager import PluginManager

        PluginManager().register_commands(self)


@click.command(cls=CommandLine, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="lmcache")
@click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of an error.")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """A KV-cache server for LLM inference: keeps the KV of prompts outside the engines, and hands it back."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (`sys.argv` by default) and return its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    command = next((i for i, argument in enumerate(arguments) if not argument.startswith("-")), len(arguments))
    try:
        with cli.make_context("lmcache", arguments.copy()) as ctx:
            cli.invoke(ctx)
        if sys.stdout is not None:  # it may be closed
            sys.stdout.flush()
    except click.exceptions.Exit as end:
        return end.exit_code
    except _NO_COMMAND_NAMED as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # the reader of a pipe had enough; Python would complain once more when it flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Exception as error:  # noqa: BLE001 - the last line of defence: one line, an exit code, no traceback
        if "--debug" in arguments[:command]:
            import traceback

            traceback.print_exc()
        click.echo(_line(error, " ".join(["lmcache", *arguments[command : command + 1]])), err=True)
        return _exit_code(error)
    return 0


def _exit_code(error: Exception) -> int:
    if isinstance(error, click.ClickException):
        return error.exit_code
    return 2 if isinstance(error, ConfigError) else 1


def _line(error: Exception, command: str = "lmcache") -> str:
    """What is printed of an error that `command` met: one line."""
    if isinstance(error, LMCacheError):
        text = str(error)
    elif isinstance(error, click.ClickException):
        text = _usage(error, command)
    elif isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None:
        text = "standard output takes no more: no space is left there; give it room, or another place"
    else:
        text = f"internal error: {type(error).__name__}: {error}; run `lmcache --debug …` and report the traceback"
    return f"lmcache: {' '.join(text.split())}"


def _usage(error: click.ClickException, command: str) -> str:
    """A usage error in our form: what is wrong, then what to do."""
    ctx = error.ctx if isinstance(error, click.UsageError) else None
    command = ctx.command_path if ctx else command
    remedy = f"see `{command} --help`"
    if isinstance(error, click.NoSuchOption):
        parameters = ctx.command.get_params(ctx) if ctx else []
        known = [name for parameter in parameters for name in parameter.opts]
        return f"`{command}` has no option {error.option_name}; {nearest(error.option_name, known) or remedy}"
    if ctx and isinstance(ctx.command, click.Group) and error.message.startswith("No such command"):
        wrong, known = error.message.split("'")[1], ctx.command.list_commands(ctx)
        return f"`{command}` has no command {wrong!r}; {nearest(wrong, known) or 'it has ' + ', '.join(known)}"
    if isinstance(error, click.BadOptionUsage) and "requires an argument" in error.message:
        return f"{error.option_name} needs a value; {_allowed(command, error.option_name) or remedy}"
    if isinstance(error, click.BadParameter) and error.param and error.message:
        text = f"{error.param.opts[0]}: {error.message}"
    else:
        text = error.format_message()
    text = text.replace("is not a valid float range", "is not a number")
    return text if ";" in text else f"{text.rstrip('.')}; {remedy}"


def _allowed(command: str, option: str) -> str:
    """What may be written after an option that counts something; empty for others."""
    # click raises this error before it tells anybody the context
    name = command.rpartition(" ")[2]
    found = cli.get_command(click.Context(cli), name) if name in COMMANDS else None
    for parameter in found.params if found else ():
        if option in parameter.opts and isinstance(parameter.type, WholeNumber):
            return parameter.type.allowed
    return ""
