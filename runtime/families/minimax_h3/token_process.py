"""Tokens of a start's request, made by a process of their own while this one imports torch.

Loading a tokenizer of 150,000 entries takes 0.2 s and more, all of it with the interpreter lock, so on a thread beside the import it
is as much longer. The process is spawned when the family is known, answers once and ends. Whatever goes wrong, the
caller makes the tokens itself and finds out why. Standard library only; `tokens` in the process.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Sequence
from pathlib import Path

from loader.child_process import spawn_module
from runtime.families.minimax_h3.config import H3Config
from runtime.families.minimax_h3.tokens import ImageSpan, TokenStream, build_token_stream

_LARGEST_ANSWER = 1 << 20
_PATIENCE_S = 10.0  # for one that hangs; nobody else would notice


class TokenProcess:
    """Our end. Raises: OSError: no child process here."""

    def __init__(self, tokenizer: Path) -> None:
        self._child, self._socket = spawn_module(__name__, [str(tokenizer)])

    @property
    def pid(self) -> int:
        return self._child.pid

    def stream(
        self, config: H3Config, prompt: str, keyframe_sizes: Sequence[tuple[int, int]]
    ) -> TokenStream | None:
        """What `tokens.build_token_stream` returns for these; None if there is no answer. To be asked once."""
        question = {"config": config.to_dict(), "prompt": prompt, "sizes": keyframe_sizes}
        try:
            self._socket.settimeout(_PATIENCE_S)
            self._socket.send(json.dumps(question).encode())
            answer = json.loads(self._socket.recv(_LARGEST_ANSWER))
            images = tuple(ImageSpan(*span) for span in answer["images"])
            return TokenStream(tuple(answer["ids"]), tuple(answer["tags"]), images)
        except (OSError, ValueError):  # too long for a packet, or it has ended
            return None

    def close(self) -> None:
        """End it. May be called twice."""
        self._socket.close()
        self._child.stop()


def main(arguments: Sequence[str]) -> None:
    """The process: load, answer the one question, end. Without an answer where that fails, or when the parent is gone."""
    descriptor, _, path = arguments
    # Whatever fails here, the parent makes the tokens itself and finds out why.
    with socket.socket(fileno=int(descriptor)) as parent, contextlib.suppress(Exception):
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(path)
        question = json.loads(parent.recv(_LARGEST_ANSWER) or "null")
        if question is None:
            return
        stream = build_token_stream(
            H3Config.from_dict(question["config"]), tokenizer, question["prompt"], question["sizes"]
        )
        images = [[span.start, span.grid_h, span.grid_w] for span in stream.images]
        parent.send(json.dumps({"ids": stream.ids, "tags": stream.tags, "images": images}).encode())
