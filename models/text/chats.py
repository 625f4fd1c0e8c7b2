"""Rendering of chats by a tokenizer's chat template, and parsing of turns by its response template, in a subprocess.

A template is a program (or a set of regular expressions) that comes with a model from elsewhere. The sandbox of the
template engine protects files and Python objects, but does not stop an endless loop or unlimited memory use. The kernel
therefore ends the subprocess when it exceeds its limits. The subprocess calls transformers for each request and ends
with the process that started it. This file is also the program of the subprocess, so it imports no other module of this
project.
"""

import atexit
import contextlib
import json
import math
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pydantic import JsonValue
    from transformers import PreTrainedTokenizerFast

CPU_SECONDS: Final = 3
"""CPU time allowed for rendering or parsing in the subprocess, in seconds per request. Published templates need about a
millisecond per chat."""
CPU_SECONDS_PER_CHAT: Final = 0.01
"""CPU time allowed in addition to `CPU_SECONDS` for each chat of a request, in seconds."""
MEMORY_BYTES: Final = 2**31
"""Limit on the address space of the subprocess in bytes, including libraries."""
SPARE_CHARACTERS, CHARACTERS_PER_CHARACTER = 2**16, 16
"""Limit on the length of a rendered chat: this constant plus this factor times the length of its messages."""


class TemplateFailed(ValueError):
    """Raised when a template rejects a chat or turn, or exceeds its limit on time, memory or length."""

    def __init__(self, message: str, *, chat: int) -> None:
        super().__init__(message)
        self.chat = chat
        """Index of the failed chat within the request."""


def render_chats(
    chats: Sequence[Sequence[Mapping[str, object]]],
    tokenizer: "PreTrainedTokenizerFast",
    *,
    generation_prompt: bool,
    tools: "Sequence[Mapping[str, JsonValue]]" = (),
    kwargs: "Mapping[str, JsonValue]" = MappingProxyType({}),
) -> list[str]:
    """Render chats like the tokenizer's `apply_chat_template`. `tools` are JSON schemas of functions, `kwargs` are
    variables for the template.

    If the tokenizer has several templates, the choice is the same as in `apply_chat_template`: `tool_use` if there are
    tools, else `default`. Raises TemplateFailed if a chat cannot be rendered.
    """
    if not chats:
        return []
    settings = {
        "chat_template": select_template(tokenizer, tools=tools),
        "add_generation_prompt": generation_prompt,
        "tools": list(map(dict, tools)) or None,
        **tokenizer.special_tokens_map,
        **kwargs,
    }
    return _RENDERER.render("chat", [list(map(dict, chat)) for chat in chats], settings)


def select_template(tokenizer: "PreTrainedTokenizerFast", *, tools: "Sequence[Mapping[str, JsonValue]]" = ()) -> str:
    """Return the chat template that is used for prompts with these tools. Raises TemplateFailed if the tokenizer has
    none."""
    try:
        template: str = tokenizer.get_chat_template(tools=list(map(dict, tools)) or None)
    except ValueError as error:
        raise TemplateFailed(f"rejects the chat: {error}", chat=0) from error
    return template


def join_templates(tokenizer: "PreTrainedTokenizerFast") -> str:
    """Return the text of all chat templates of a tokenizer together. A tokenizer may have several named templates."""
    templates = tokenizer.chat_template
    return "\n".join(map(str, templates.values())) if isinstance(templates, dict) else str(templates or "")


def find_variables(template: str) -> frozenset[str]:
    """Return the names of the variables that a chat template uses. Raises TemplateFailed if the template is invalid."""
    [encoded] = _RENDERER.render("variables", [template], {})
    return frozenset(json.loads(encoded))


def parse_response(
    text: str,
    tokenizer: "PreTrainedTokenizerFast",
    *,
    prefix: str,
    tools: "Sequence[Mapping[str, JsonValue]]" = (),
) -> "dict[str, JsonValue]":
    """Parse the text of a turn that the policy generated into a message with fields, such as content and tool calls, by
    the tokenizer's response template. `prefix` is the chat rendered before the turn, and `tools` are JSON schemas of
    functions. Raises TemplateFailed if the turn cannot be parsed.

    The result is that of the tokenizer's own `parse_response`.
    """
    settings = {
        "response_template": tokenizer.response_template,
        "prefix": prefix,
        "tools": list(map(dict, tools)) or None,
    }
    [message] = _RENDERER.render("turn", [text], settings)
    fields: dict[str, JsonValue] = json.loads(message)
    return fields


class _Renderer:
    """Client of the subprocess that runs chat templates. It starts the subprocess when needed, and again after a
    template has exceeded a limit."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def render(self, kind: str, items: Sequence[object], settings: Mapping[str, object]) -> list[str]:
        """Run a request of the given `kind` on each item in the subprocess, with `settings` as its arguments, and
        return the resulting texts in order. Raises TemplateFailed for the first item that fails."""
        request = json.dumps({"kind": kind, "items": items, "settings": settings}).encode() + b"\n"
        with self._turn:
            process = self._ensure_started()
            assert process.stdin is not None and process.stdout is not None, "the process was started with pipes"
            texts: list[str] = []
            with contextlib.suppress(OSError):  # the process ended: its answers show how many items it finished
                process.stdin.write(request)
                process.stdin.flush()
            while len(texts) < len(items):
                answer = process.stdout.readline()
                if not answer.endswith(b"\n"):
                    self._process = None
                    raise TemplateFailed(_describe_end(process), chat=len(texts))
                result: dict[str, str] = json.loads(answer)
                if "error" in result:
                    raise TemplateFailed(result["error"], chat=len(texts))
                texts.append(result["text"])
            return texts

    def _ensure_started(self) -> "subprocess.Popen[bytes]":
        """Return the running subprocess. Start a new one if there is none, or if this process is a fork of the one that
        started it."""
        if self._process is None or self._process.poll() is not None or self._owner != os.getpid():
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                process_group=0,  # the terminal's Ctrl-C should reach only the owner
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "USE_TORCH": "0"},
            )
            self._owner = os.getpid()
            atexit.register(self._close, self._process)
        return self._process

    @staticmethod
    def _close(process: "subprocess.Popen[bytes]") -> None:
        """Kill the subprocess and wait until it has ended."""
        process.kill()
        process.communicate()


def _describe_end(process: "subprocess.Popen[bytes]") -> str:
    """Wait for a template subprocess that ended during a request, and return the reason why it ended, as a text for
    messages."""
    process.communicate()
    if process.returncode == -signal.SIGXCPU:
        return f"does not end: it took more than {CPU_SECONDS} s of CPU time"
    return f"brought its process down, which ended with code {process.returncode}"


_RENDERER: Final = _Renderer()


# ---- the process


class _TooLong(Exception):
    """Raised when a rendered chat is much longer than the messages in it."""


def _serve() -> None:
    """Read requests from stdin and write responses until stdin is closed. This is the main function of the subprocess
    that runs chat templates."""
    from jinja2 import meta
    from transformers.utils import chat_parsing, chat_template_utils

    def rendered(chat: list[dict[str, Any]], /, **settings: object) -> str:
        """Render one chat. Raises _TooLong if the text exceeds the length limit."""
        [text], _ = chat_template_utils.render_jinja_template(conversations=[chat], **settings)
        num_characters = sum(len(part.get("text", "")) for message in chat for part in _parts(message.get("content")))
        num_characters += sum(len(json.dumps(message)) for message in chat if not message.keys() <= {"role", "content"})
        num_characters += len(json.dumps(settings["tools"])) if settings["tools"] else 0
        if len(text) > SPARE_CHARACTERS + CHARACTERS_PER_CHARACTER * num_characters:
            raise _TooLong(
                f"renders messages of {num_characters} characters as {len(text)} characters, more than is allowed"
            )
        return str(text)

    def parsed(text: str, /, **settings: object) -> str:
        """Parse one turn and return the message as JSON."""
        return json.dumps(chat_parsing.parse_response(text, **settings))

    def variables(template: str, /) -> str:
        """Return the names of the variables of a template as JSON."""
        document = chat_template_utils._compile_jinja_template(template).environment.parse(template)
        return json.dumps(sorted(meta.find_undeclared_variables(document)))

    makers: dict[str, tuple[Callable[..., str], str]] = {
        "chat": (rendered, "rejects the chat"),
        "variables": (variables, "is not valid"),
        "turn": (parsed, "refuses it"),  # policies read these errors
    }
    for limit, value in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_AS, MEMORY_BYTES)):
        with contextlib.suppress(OSError, ValueError):  # not every system has each limit
            resource.setrlimit(limit, (value, value))
    while line := sys.stdin.buffer.readline():
        request = json.loads(line)
        make, rejection = makers[request["kind"]]
        spent = resource.getrusage(resource.RUSAGE_SELF)
        allowed = spent.ru_utime + spent.ru_stime + CPU_SECONDS + CPU_SECONDS_PER_CHAT * len(request["items"])
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(allowed), resource.RLIM_INFINITY))
        for item in request["items"]:
            answer = _run_template(make, item, request["settings"], rejection=rejection)
            sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
            sys.stdout.buffer.flush()
            if "error" in answer:
                break


def _run_template(
    make: Callable[..., str], item: object, settings: Mapping[str, object], *, rejection: str
) -> dict[str, str]:
    """Return the result of calling `make` with one item and the settings, or an error message. The message starts with
    `rejection` if the template failed."""
    try:
        return {"text": make(item, **settings)}
    except MemoryError:
        return {"error": f"takes more than {MEMORY_BYTES} bytes of memory"}
    except _TooLong as error:
        return {"error": str(error)}
    except Exception as error:  # a template can raise any exception
        return {"error": f"{rejection}: {str(error).strip() or type(error).__name__}"}


def _parts(content: str | list[dict[str, str]] | None) -> list[dict[str, str]]:
    """Return the content of a message as a list of parts, as some templates require."""
    return [{"text": content}] if isinstance(content, str) else content or []


if __name__ == "__main__":
    _serve()
