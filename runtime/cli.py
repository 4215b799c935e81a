"""`coldframe`: command name → `module:function`, imported on use. Standard library only, and little of it.

Exit codes: 0 done, 1 internal error, 2 bad request or usage, 3 bad checkpoint or prepared directory, 4 something is
missing on this machine, 130 interrupted.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence

from loader.errors import CapabilityError, WorkerError

COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("scripts.demo_video:main", "make a video from a tiny checkpoint that the project writes itself"),
    "prepare": ("prepare.cli:prepare_main", "repack a published checkpoint into a prepared directory"),
    "validate": (
        "prepare.cli:validate_main",
        "re-check every byte of a prepared directory and probe a start",
    ),
    "generate": ("runtime.generate:main", "start a worker on a prepared directory and make one video"),
    "probe": ("runtime.probe:main", "start a worker as far as the first denoiser entry and time it"),
    "check-mp4": ("runtime.media.check:main", "check that an MP4 is complete and plays as it should"),
    "serve": ("runtime.server.main:main", "serve the HTTP API"),
    "worker": ("runtime.worker:main", "one worker process, driven over stdin and stdout"),
    "replay": ("scripts.replay.cli:main", "replay request traces against autoscaling policies"),
}
SERVE_PACKAGES = frozenset({"starlette", "uvicorn", "msgspec", "python_multipart"})
VERSION = "2026.12.0"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. Errors of this project print one line on stderr, without traceback."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args:
        print(_usage(), file=sys.stderr)
        return 2
    if args[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0
    if args[0] in ("-V", "--version"):
        print(f"coldframe {VERSION}")
        return 0
    if args[0] not in COMMANDS:
        print(f"coldframe: unknown command {args[0]!r}\n\n{_usage()}", file=sys.stderr)
        return 2
    try:
        return _load(args[0])(args[1:])
    except WorkerError as error:
        print(f"coldframe {args[0]}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"coldframe {args[0]}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has left; there is nobody to tell
        return 1
    except OSError as error:
        if error.filename is None:
            raise
        print(f"coldframe {args[0]}: {error.filename}: {error.strerror}", file=sys.stderr)
        return CapabilityError.exit_code


def _load(command: str) -> Callable[[Sequence[str]], int]:
    module, _, function = COMMANDS[command][0].partition(":")
    try:
        run: Callable[[Sequence[str]], int] = getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing == "scripts":
            raise CapabilityError(
                f"`coldframe {command}` needs a checkout of the project", where="scripts",
                hint="git clone it and run there",
            ) from error  # fmt: skip
        if missing in SERVE_PACKAGES:
            raise CapabilityError(
                f"`coldframe {command}` needs a package that is not installed", where=missing,
                hint="pip install 'coldframe[serve]', or in a checkout pip install -e '.[serve]'",
            ) from error  # fmt: skip
        raise
    return run


def _usage() -> str:
    width = max(len(name) for name in COMMANDS)
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    return (
        "usage: coldframe <command> [options]\n\nVideo generation workers that start in seconds.\n\ncommands:\n"
        + "\n".join(lines)
        + "\n\n`coldframe <command> --help` explains a command."
    )


if __name__ == "__main__":
    sys.exit(main())
