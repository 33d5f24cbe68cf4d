"""What every config and every command shares: the frozen base model, the one-line error, the entry-point guard."""

from __future__ import annotations

import argparse
import errno
import functools
import os
import sys
from collections.abc import Callable
from typing import NoReturn

import pydantic

# What a machine says when it will not, rather than when a program is wrong.
REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)


class UserError(Exception):
    """A user's mistake or a machine's refusal, told in one line: the field, the value, and what would be right."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are ours: one line."""

    def error(self, message: str) -> NoReturn:
        """Raises UserError instead of printing the usage."""
        raise UserError(message)


class Settings(pydantic.BaseModel):
    """Base of all configs: immutable, unknown keys refused, defaults validated, JSON round trip exact."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)


def describe(error: pydantic.ValidationError) -> str:
    """One line for the first fault of a validation error: `attention.rank = -1: should be ...`."""
    first = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:] if message[:1].isupper() and not message[:2].isupper() else message
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    value = "" if isinstance(first["input"], dict | Settings) else f" = {first['input']!r}"
    return f"{field}{value}: {message}{more}" if field else f"{message}{more}"


def one_line(error: BaseException) -> str | None:
    """What to tell of a user's mistake or a machine's refusal; None for anything else, which is a fault of ours."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, pydantic.ValidationError):
        return describe(error)
    if isinstance(error, OSError) and error.errno in REFUSALS:
        return f"{error.filename or 'writing'}: {error.strerror}"
    return None


def command(main: Callable[[], int | None]) -> Callable[[], None]:
    """Wraps a command's main: a UserError or a failed validation becomes one line on stderr and exit status 2."""

    @functools.wraps(main)
    def guarded() -> None:
        try:
            sys.exit(main())
        except BrokenPipeError:  # `... | head`: the reader has left, which is no fault
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(0)
        except Exception as error:
            line = one_line(error)
            if line is None:
                raise
            print(f"error: {line}", file=sys.stderr)
        sys.exit(2)

    return guarded
