"""What commands share that run until they are told to stop: their log, and the line that says they are ready."""

import os

import click


def start_logging(level: str) -> None:
    """Log what is at least so grave, to standard error."""
    import logging

    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")


def say(line: str, logger: str) -> None:
    """Print a line that nobody needs: standard output may be a file on a disk that is full, and the command serves."""
    import logging

    try:
        click.echo(line)
    except BrokenPipeError:
        raise
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or it would be tried again at the end
        logging.getLogger(logger).warning("standard output takes nothing (%s): %s", error.strerror, line)
